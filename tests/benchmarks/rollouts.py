"""The figures of the rollouts, as ratios from one run.

    python tests/benchmarks/rollouts.py [--parts a,b,c,d,e,f,g,h]
      [--tunix_python PYTHON] [--torch_python PYTHON] [--smollm2 DIR]
      [--rounds 5]

    a  uniform decode against google-tunix's Sampler and transformers' generate
    b  groups of skewed lengths against the same
    c  the math team against a barrier at each agent call
    d  fused steps, slots, growth, sharing, chats, cache dtypes: on and off
    e  rule 26 with every switch; the sampler's log-probs against the learner's
    f  the host's share of a rollout; what a queue of 10,000 costs
    g  memory at a maximum length of 12,288
    h  SmolLM2-135M as a share of what the machine can do

A peer runs in an environment of its own (`pip install google-tunix==0.1.7
jax==0.10.2`; `pip install torch transformers`), whose interpreter is given; one
that is not given is left out. Figures are medians over the rounds, by wall and
by CPU seconds; what is compared runs in turns. Each part's are printed when it
is done, as a line of JSON, and all of them as the last line.
"""

import rollouts_costs
import rollouts_exact
import rollouts_lab as lab
import rollouts_speed

from drmas_jax import hugepages

PARTS = rollouts_speed.PARTS | rollouts_exact.PARTS | rollouts_costs.PARTS


def main() -> None:
  hugepages.restart()  # as the commands of the project do
  parser = lab.parser(__doc__, PARTS)
  parser.add_argument("--smollm2", default="")
  args, given = lab.parse(parser, PARTS, torch="transformers")
  peers = []
  try:
    if {"a", "b"} & set(args.parts):
      peers = [lab.Peer.start(*peer) for peer in given.items() if peer[1]]
    lab.report(PARTS, args, given, peers)
  finally:
    for peer in peers:
      peer.stop()


if __name__ == "__main__":
  main()
