"""Real policies against transformers; minutes on 2 cores, so by hand:

    export DRMAS_SMOLLM2=FOLDER DRMAS_QWEN05=FOLDER
    pytest -n 0 -m slow tests/test_pretrained.py

in an environment with the extra [parity]. A folder is in the layout of Hugging
Face, such as `hf download NAME --local-dir FOLDER` makes it.
"""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import config as config_lib
from drmas_jax import decoding, engine, placement, sharding
from drmas_jax.models import transformer, weights
from drmas_jax.sampler import Request, Sampler
from drmas_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NAMES = {
  "DRMAS_SMOLLM2": "HuggingFaceTB/SmolLM2-135M-Instruct",
  "DRMAS_QWEN05": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
}
PROMPTS = (
  "What is the capital of France?",
  "What is 17 + 25? Think step by step.",
  "Write a Python function that reverses a list.",
  "Say hello in three languages.",
  "A train travels 60 km in 45 minutes. How fast is it in km/h?",
  "Why is the sky blue?",
  "List the first ten prime numbers.",
  "Write a poem of four lines about the sea.",
  "Solve for x: 3x - 7 = 11.",
  "Explain recursion to a child.",
)
NUM_NEW = 64
# Below this difference of the two largest logits the order is a matter of
# rounding, and so is all that follows.
TIE = 1e-4


@pytest.fixture(scope="module", params=NAMES)
def folder(request):
  path = os.environ.get(request.param)
  if not path:
    pytest.skip(
      f"set {request.param} to a folder of {NAMES[request.param]}, as `hf "
      "download` makes it"
    )
  return path


@pytest.fixture(scope="module")
def reference(folder):
  """The same folder in transformers, in float32."""
  torch = pytest.importorskip("torch", reason="the extra [parity] brings it")
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  ).eval()


@pytest.fixture(scope="module")
def policy(folder):
  """(model, tokenizer, params) on one device."""
  model = weights.read_config(folder)
  mesh = _mesh()
  return model, Tokenizer.load(folder), weights.load(folder, model, mesh)


def _mesh():
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  return jax.sharding.Mesh(devices, sharding.AXES)


def test_logits_equal_those_of_transformers(policy, reference):
  import torch

  model, tokenizer, params = policy
  ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, 64))
  with torch.no_grad():
    expected = reference(torch.from_numpy(ids)).logits.numpy()
  inputs = transformer.Inputs(
    jnp.asarray(ids, jnp.int32),
    jnp.broadcast_to(jnp.arange(64), (2, 64)),
    jnp.ones((2, 64), jnp.int32),
    jnp.zeros(2, jnp.int32),
  )
  hidden, _ = jax.jit(transformer.forward, static_argnames="config")(
    params, inputs, config=model
  )
  logits = hidden @ transformer.head(params, model)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


def _continue(policy, prompts):
  """Greedy completions by the sampler, in fewer slots than there are."""
  model, tokenizer, params = policy
  spec = decoding.Spec(
    model=model,
    mesh=_mesh(),
    num_slots=4,
    max_length=192,
    prefill_rows=2,
    prefill_buckets=(64, 128),
    steps_per_call=8,
    stop_ids=tokenizer.stop_ids,
    vocab_size=tokenizer.vocab_size,
    page_size=64,
    max_pages=1 + 4 * 3,
  )
  sampler = Sampler(engine.PolicyEngine(spec), tokenizer)
  sampler.resume(
    placement.sync(
      params, decoding.param_shardings(spec), spec.dtype, transformer.unstack
    ),
    0,
  )
  for i, prompt in enumerate(prompts):
    sampler.submit(
      Request(
        id=(i, 0, 0),
        prompt_ids=prompt,
        max_tokens=NUM_NEW,
        sampling=config_lib.Sampling(temperature=0.0),
        closes=None,
        shared_by=1,
        deadline=time.monotonic() + 3600,
      )
    )
  found = {}
  while sampler.busy:
    sampler.dispatch()
    found |= {c.request.id[0]: c.ids.tolist() for c in sampler.harvest()}
  return [found[i] for i in range(len(prompts))]


def test_greedy_continuations_equal_those_of_transformers(policy, reference):
  """64 tokens of 10 prompts, through the engine and its sampler."""
  import torch

  _, tokenizer, _ = policy
  prompts = [
    tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS
  ]
  for prompt, ours in zip(prompts, _continue(policy, prompts), strict=True):
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = reference.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      do_sample=False,
      temperature=None,
      top_p=None,
      top_k=None,
      repetition_penalty=1.0,
      max_new_tokens=NUM_NEW,
      eos_token_id=list(tokenizer.stop_ids),
      pad_token_id=tokenizer.pad_id,
      output_logits=True,
      return_dict_in_generate=True,
    )
    theirs = out.sequences[0, len(prompt) :].tolist()
    if ours == theirs:
      continue
    at = next(
      (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
      None,
    )
    assert at is not None, (tokenizer.decode(ours), tokenizer.decode(theirs))
    best = out.logits[at][0].topk(2)
    gap = float(best.values[0] - best.values[1])
    print(f"token {at} of {prompt.tolist()[-8:]}: a tie, apart by {gap:.1e}")
    assert gap < TIE and ours[at] in best.indices, (at, gap)
