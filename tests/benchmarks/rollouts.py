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
by CPU seconds; what is compared runs in turns. The last line is JSON.
"""

import argparse
import importlib.metadata
import json
import os

import rollouts_costs
import rollouts_exact
import rollouts_lab as lab
import rollouts_speed

PARTS = rollouts_speed.PARTS | rollouts_exact.PARTS | rollouts_costs.PARTS


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--parts", default=",".join(PARTS))
  parser.add_argument("--tunix_python", default="")
  parser.add_argument("--torch_python", default="")
  parser.add_argument("--smollm2", default="")
  parser.add_argument("--rounds", type=int, default=lab.ROUNDS)
  args = parser.parse_args()
  parts = args.parts.split(",")
  if unknown := set(parts) - set(PARTS):
    parser.error(f"--parts: {sorted(unknown)}; allowed are {list(PARTS)}")
  given = {"tunix": args.tunix_python, "transformers": args.torch_python}
  found = {
    "jax": importlib.metadata.version("jax"),
    "cores": os.cpu_count(),
    "load": [os.getloadavg()[0]],
    "left out": [name for name, python in given.items() if not python],
  }
  peers = []
  try:
    if {"a", "b"} & set(parts):
      peers = [lab.Peer.start(*peer) for peer in given.items() if peer[1]]
    for part in parts:
      found[part] = PARTS[part](args, peers)
      print(f"{part}: {json.dumps(found[part], indent=2)}", flush=True)
  finally:
    for peer in peers:
      peer.stop()
  found["load"].append(os.getloadavg()[0])
  print(json.dumps(found))


if __name__ == "__main__":
  main()
