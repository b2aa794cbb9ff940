"""A real policy on real questions; minutes on 2 cores, so by hand:

    DRMAS_SMOLLM2=FOLDER pytest -m slow tests/test_smollm2.py

FOLDER holds SmolLM2-135M-Instruct in the layout of Hugging Face; the questions
are those of ../shared/data/math.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from drmas_jax import batching, decoding, engine, learner, placement, sharding
from drmas_jax import config as config_lib
from drmas_jax.agents import math as agents
from drmas_jax.models import transformer, weights
from drmas_jax.sampler import Request, Sampler
from drmas_jax.sampling import root_key
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Task, Turn

pytestmark = pytest.mark.slow

# GSM8K's own reward is nearly always 0 for so small a policy, and a group of
# equal rewards teaches nothing.
REWARD = """
from drmas_jax.types import Outcome

class Letters:
  def score(self, task, episode):
    return Outcome(reward=len(set(episode.action)) / 50)

def make():
  return Letters()
"""


@pytest.fixture(scope="module")
def folder():
  path = os.environ.get("DRMAS_SMOLLM2")
  if not path:
    pytest.skip("set DRMAS_SMOLLM2 to a folder of SmolLM2-135M-Instruct")
  return pathlib.Path(path)


# -- the sampler's log-probs and the learner's ---------------------------------

QUESTIONS = (
  "What is 2 + 3? Answer with the number alone.",
  "Say hello.",
  "Natalia sold 48 clips in April and half as many in May. How many in all?",
)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy(folder):
  """(mesh of one device, model, tokenizer, params)."""
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES
  )
  model = weights.read_config(folder)
  params = weights.load(folder, model, mesh)
  return mesh, model, Tokenizer.load(folder), params


def sample(policy, num_slots):
  """Three prompts of four episodes each, as turns."""
  mesh, model, tokenizer, params = policy
  spec = decoding.Spec(
    model=model,
    mesh=mesh,
    num_slots=num_slots,
    max_length=288,
    prefill_rows=2,
    prefill_buckets=(64, 256),
    steps_per_call=8,
    stop_ids=tokenizer.stop_ids,
    vocab_size=tokenizer.vocab_size,
    page_size=64,
    max_pages=1 + 5 * num_slots,
  )
  sampler = Sampler(engine.PolicyEngine(spec), tokenizer)
  rollout_params = placement.sync(
    params, decoding.param_shardings(spec), spec.dtype, transformer.unstack
  )
  sampler.resume(rollout_params, 0)
  sampler.engine.key = root_key(0, "train")
  prompts = [[{"role": "user", "content": q}] for q in QUESTIONS[:2]]
  task = Task("gsm8k", 0, 0, QUESTIONS[2], "72")
  prompts.append(agents.solver.messages("default", task, ()))
  for position, messages in enumerate(prompts):
    for episode in range(4):
      sampler.submit(
        Request(
          id=(position, episode, 0),
          prompt_ids=tokenizer.encode_chat(messages),
          max_tokens=32,
          sampling=config_lib.Sampling(temperature=TEMPERATURE),
          closes=None,
          shared_by=4,
          deadline=time.monotonic() + 3600,
        )
      )
  done = []
  while sampler.busy:
    sampler.dispatch()
    done += sampler.harvest()
  return [
    Turn(
      agent="a",
      policy="p",
      index=0,
      prompt_ids=c.request.prompt_ids,
      completion_ids=c.ids,
      sampler_logprobs=c.logprobs,
      log_kept_mass=c.log_kept_mass,
      stop_reason=c.stop_reason,
      policy_version=0,
      valid=True,
    )
    for c in sorted(done, key=lambda c: c.request.id)
  ]


@pytest.fixture(scope="module")
def turns(policy):
  return {num_slots: sample(policy, num_slots) for num_slots in (4, 8)}


def test_tokens_do_not_depend_on_the_number_of_slots(turns):
  for few, many in zip(turns[4], turns[8], strict=True):
    np.testing.assert_array_equal(few.completion_ids, many.completion_ids)
    np.testing.assert_allclose(
      few.sampler_logprobs, many.sampler_logprobs, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("num_slots", [4, 8])
def test_the_learner_scores_as_the_sampler_did(policy, turns, num_slots):
  mesh, model, tokenizer, params = policy
  spec = learner.Spec(
    model=model,
    mesh=mesh,
    loss=config_lib.Loss(),
    optimizer=config_lib.Optimizer(),
    num_agents=1,
    vocab_size=tokenizer.vocab_size,
    head_chunk=128,
  )
  played = turns[num_slots]
  shape = batching.Shape(4, 4, 256, 3)
  places = range(len(played))
  batch = batching.pack(played, places, [0] * len(played), shape)
  scored = learner.programs(spec).score(
    params,
    placement.global_batch(batch, mesh),
    3,
    np.array([TEMPERATURE], np.float32),
  )
  gap = np.abs(np.asarray(scored) - batch.sampler_logprobs) * batch.mask
  assert batch.mask.sum() == sum(len(t.completion_ids) for t in played)
  assert np.abs(batch.sampler_logprobs).sum() > 10
  assert gap.max() < 1e-3, f"max {gap.max():.2e}"
  print(f"{num_slots} slots: largest gap {gap.max():.2e}")


def test_the_end_token_is_trained_though_it_is_also_the_pad(policy, turns):
  _, _, tokenizer, _ = policy
  assert tokenizer.stop_ids == (tokenizer.pad_id,) == (2,)
  ended = [t for t in turns[4] if t.stop_reason == "stop"]
  assert ended
  for turn in ended:
    assert list(turn.completion_ids).count(2) == 1
    assert turn.completion_ids[-1] == 2
    assert 2 in turn.prompt_ids  # earlier ends of turn are seen
    total = len(turn.prompt_ids) + len(turn.completion_ids)
    shape = batching.Shape(1, 1, total + 3, 1)
    batch = batching.pack([turn], [0], [0], shape)
    segments, mask = batch.segment_ids[0, 0], batch.mask[0, 0]
    assert segments.tolist() == [1] * total + [0] * 3
    assert mask[total - 1] == 1 and mask.sum() == len(turn.completion_ids)
    np.testing.assert_array_equal(batch.weights[0, 0], mask)


# -- the run -------------------------------------------------------------------


def run(root, tmp_path, folder, shared, steps):
  """The command on one device; returns metrics by step."""
  (tmp_path / "own").mkdir(exist_ok=True)
  (tmp_path / "own" / "letters.py").write_text(REWARD)
  workdir = tmp_path / "run"
  keys = {
    "policies.solver.checkpoint": folder,
    "policies.verifier.checkpoint": folder,
    "data.sources.gsm8k.options.data_dir": shared / "data" / "math",
    "data.sources.gsm8k.options.cache_dir": tmp_path / "data",
    "environment.name": "own.letters",
    "agents.solver.max_tokens": 24,
    "agents.verifier.max_tokens": 24,
    "eval.num_tasks": 0,
    "steps": steps,
  }
  found = subprocess.run(
    [
      sys.executable,
      "-m",
      "drmas_jax.main",
      "--config",
      root / "configs" / "math_smollm2.py",
      "--workdir",
      workdir,
      *(f"--config.{key}={value}" for key, value in keys.items()),
    ],
    cwd=root,
    env={**os.environ, "PYTHONPATH": str(tmp_path), "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=3000,
  )
  assert found.returncode == 0, found.stderr
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return workdir, {m["step"]: m for m in map(json.loads, lines)}


def test_two_steps_and_a_third_after_a_resume(root, tmp_path, folder, shared):
  workdir, metrics = run(root, tmp_path, folder, shared, 2)
  assert (workdir / "checkpoints" / "2" / "policy_solver").is_dir()
  for name in ("solver", "verifier"):
    assert metrics[1][f"ratio_error/{name}"] < 1e-3
    for step in (1, 2):
      assert metrics[step][f"grad_norm/{name}"] > 0
      assert metrics[step][f"logprob_gap_max/{name}"] < 1e-3
  records = workdir.glob("transcripts/*.jsonl")
  episodes = [json.loads(line) for path in records for line in path.open()]
  assert len(episodes) == 16
  assert {t["policy_version"] for e in episodes for t in e["turns"]} == {0, 1}
  workdir, metrics = run(root, tmp_path, folder, shared, 3)
  assert {1, 2, 3} <= metrics.keys()
  assert metrics[3]["grad_norm/solver"] > 0
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["steps"] == 3
  assert summary["peak_memory_gb"] < 12
