"""small_run.py with a solver that is kept near to a frozen policy, which has
devices of its own."""

import pathlib
import runpy

SMALL = pathlib.Path(__file__).with_name("small_run.py")


def get_config():
  config = runpy.run_path(str(SMALL))["get_config"]()
  config.policies.solver.loss = dict(kl_weight=0.01, reference="base")
  config.policies.base = dict(
    checkpoint="tiny:verifier", frozen=True, engine=dict(max_length=56)
  )
  config.placement = dict(
    strategy="columns",
    shares=dict(solver=2),
    rollout_mesh=dict(data=0, fsdp=1),
  )
  return config
