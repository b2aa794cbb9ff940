"""Every config that is shipped can be read; the paper's fit their hardware."""

import pathlib
import re

import jax
import pytest

from drmas_jax import config as config_lib
from drmas_jax import placement
from drmas_jax.models import transformer, weights

pytestmark = pytest.mark.quick

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
SHIPPED = sorted(p for p in FOLDER.glob("*.py") if p.stem != "common")
PAPER = [p for p in SHIPPED if p.stem.startswith("math_qwen3")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_config_is_read_and_says_how_it_is_run(path):
  config_lib.read(path)
  text = path.read_text().partition('"""')[2].partition('"""')[0]
  assert f"python -m drmas_jax.main --config configs/{path.name}" in text
  assert "Hardware" in text
  assert "Expected" in text or re.search(r"avg@\d+ .* from", text)


def test_the_papers_rows_are_there():
  assert {p.stem for p in PAPER} == {
    f"math_qwen3_{size}_{row}"
    for size in ("4b", "8b")
    for row in (
      *("single_grpo", "share_grpo", "share_drmas"),
      *("apart_grpo", "apart_drmas"),
    )
  }


@pytest.mark.parametrize("path", PAPER, ids=lambda p: p.stem)
def test_the_papers_hyper_parameters(path):
  config = config_lib.read(path)
  _, _, size, team, method = path.stem.split("_")
  assert config.advantage.name == {"drmas": "agent_wise"}.get(method, method)
  assert (config.data.num_tasks, config.data.group_size) == (32, 8)
  assert len(config.policies) == (2 if team == "apart" else 1)
  assert len(config.agents) == (1 if team == "single" else 2)
  for agent in config.agents.values():
    assert (agent.max_prompt_tokens, agent.max_tokens) == (8192, 4096)
    assert (agent.invalid_penalty, agent.sampling.temperature) == (0.1, 1.0)
  for policy in config.policies.values():
    assert policy.checkpoint == f"Qwen/Qwen3-{size.upper()}"
    adam = policy.optimizer
    assert (adam.learning_rate, adam.weight_decay) == (1e-6, 0.01)
    assert (adam.b1, adam.b2, adam.clip_norm) == (0.9, 0.999, 1.0)
    loss = policy.loss
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.2, 0.2, 3.0)


@pytest.mark.parametrize("path", PAPER, ids=lambda p: p.stem)
def test_the_papers_rows_are_planned_without_their_weights(path, monkeypatch):
  # They are for devices whose kernels read the cache as it lies.
  monkeypatch.setattr(transformer, "fused", lambda *_: True)
  config = config_lib.read(path, ["placement.device_memory_gb=80"])
  models = {
    name: weights.public_sizes(policy.checkpoint)
    for name, policy in config.policies.items()
  }
  devices = jax.devices()[: 4 if "_4b_" in path.stem else 8]
  plan = placement.plan(config, models, devices)
  assert set(plan.slices) == set(config.policies)
  with pytest.raises(config_lib.ConfigError, match="GB"):
    placement.plan(config, models, devices[:1])
