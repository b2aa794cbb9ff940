"""small_run.py with an adapter for each agent on one copy of the solver's
weights, kept near to what they begin with, in two updates a step."""

import pathlib
import runpy

SMALL = pathlib.Path(__file__).with_name("small_run.py")


def get_config():
  config = runpy.run_path(str(SMALL))["get_config"]()
  for policy in (config.policies.solver, config.policies.verifier):
    policy.checkpoint = "tiny:solver"
    policy.adapter = dict(rank=4, alpha=16.0, targets=("q", "o", "up"))
    policy.loss = dict(kl_weight=0.01, reference="base")
    policy.num_updates = 2
  config.policies.base = dict(
    checkpoint="tiny:solver",
    frozen=True,
    engine=config.policies.solver.engine.to_dict(),
  )
  return config
