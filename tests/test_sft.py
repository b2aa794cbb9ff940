"""Demonstrations become turns that the policy itself could have sampled."""

import types

import numpy as np
import pytest
import small_run

from drmas_jax import config as config_lib
from drmas_jax import data, rollout, sft
from drmas_jax.datasets import arithmetic
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import RunError

pytestmark = pytest.mark.quick

CONFIG = small_run.ROOT / "tests" / "small_run.py"
TINY = small_run.ROOT / "drmas_jax" / "models" / "tiny" / "solver"


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("max_tokens=5", r"it has \d+ tokens; .*solver\.max_tokens=5; raise"),
    ("max_prompt_tokens=20", r"prompt of \d\d tokens.* at most 20;"),
  ],
)
def test_demonstrations_that_do_not_fit(override, message):
  config = config_lib.read(CONFIG, [f"agents.solver.{override}"], "sft")
  backbone = types.SimpleNamespace(
    tokenizer=Tokenizer.load(TINY),
    names=("solver",),
    agents={"solver": {"solver": 0}},
    policy=config.policies["solver"],
  )
  shown = sft._Demonstrations(
    config,
    backbone,
    rollout.Team(config),
    {"arithmetic": arithmetic.demonstrations},
  )
  tasks = data.Stream({"arithmetic": arithmetic.make("train")}, 0).tasks(0, 9)
  match = rf"demonstration of 'solver' for arithmetic\[\d+\]: {message}"
  with pytest.raises(RunError, match=match):
    for task in tasks:
      shown.turns(task, np.random.default_rng(0))
