"""The shipped policies: tiny:solver and tiny:verifier of configs/math_tiny.py,
tiny:search_verifier, tiny:searcher and tiny:answerer of configs/search_tiny.py.

Two layers of width 64, 0.1 M parameters each, as Hugging Face folders that the
ordinary code loads. Those of math were made by `--mode=sft` with its seed 0, in
about five minutes on two CPU cores: first on nearly faultless demonstrations,
which teach the arithmetic fast, then on the imperfect ones of the config.

    job="python -m drmas_jax.main --config configs/math_tiny.py --mode sft
         --config.policies.solver.micro_tokens=3584
         --config.policies.verifier.micro_tokens=3584"
    $job --workdir first --config.sft.from_scratch=True --config.sft.steps=1000
         --config.sft.learning_rate=5e-3 --config.sft.options.solver_noise=0.1
         --config.sft.options.solver_slip=0.0
         --config.sft.options.retry_copy=0.5
         --config.sft.options.verifier_noise=0.0
         --config.sft.options.verifier_flip=0.0
    $job --workdir second
         --config.policies.solver.checkpoint=first/policies/solver
         --config.policies.verifier.checkpoint=first/policies/verifier

Those of search are made in the same way:

    job="python -m drmas_jax.main --config configs/search_tiny.py --mode sft"
    $job --workdir first --config.sft.from_scratch=True --config.sft.steps=1000
         --config.sft.learning_rate=5e-3
         --config.sft.options.verifier_flip=0.0
         --config.sft.options.searcher_slip=0.0
         --config.sft.options.searcher_noise=0.1
         --config.sft.options.answerer_slip=0.0
         --config.sft.options.answerer_noise=0.0
    $job --workdir second
         --config.policies.verifier.checkpoint=first/policies/verifier
         --config.policies.searcher.checkpoint=first/policies/searcher
         --config.policies.answerer.checkpoint=first/policies/answerer

A rotary theta of 30 suits prompts of at most 40 tokens: with 10000 most
frequencies do not turn within a prompt, and the arithmetic is learned several
times slower. `make_tokenizer` wrote the tokenizers.
"""
