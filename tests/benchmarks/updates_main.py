"""This project's side of `updates_steps.py`: its main run, of one agent."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import rollouts_lab as lab
import updates_lab
import updates_steps
import updates_this

from drmas_jax import building, coordinator, signals
from drmas_jax import config as config_lib
from drmas_jax.models import weights
from drmas_jax.types import Agent, Outcome, Reply


def train(
  sizes: dict, gate: Callable[[], None], folder: str, asked: Sequence[str]
) -> None:
  """Until `gate`, which every step begins with, ends the process.

  Args:
    sizes: the fields of `rollouts_lab.SIZES`.
    gate: see `updates_steps.Gate`.
    folder: has the tokenizer; weights, rows and the run are written to it.
    asked: a question for each task.
  """
  model = updates_this.model_of(sizes)
  params = updates_this.weights_of(model, lab.one_device())
  weights.save(folder, params, model)
  rows = [json.dumps({"question": q, "answer": 0}) for q in asked]
  (pathlib.Path(folder) / "rows.jsonl").write_text("\n".join(rows))

  class Run(coordinator.Run):
    def step(self):
      gate()
      super().step()
      updates_steps.wait_for_all()

  config, backbones = building.prepare(_config(sizes, folder))
  workdir = pathlib.Path(folder) / "run"
  run = Run(config, backbones, workdir, signals.Stop(), time.monotonic())
  team = run.rollout.team
  team.environment = Environment()
  solver = dataclasses.replace(team.members["solver"], role=ROLE)
  team.members["solver"] = solver
  run.restore(allow_change=())
  with run.watch:
    run.run()


def _config(sizes: dict, folder: str) -> config_lib.Config:
  prompt, length = sizes["length"] // 3, sizes["length"]
  prompts, group = updates_steps.PROMPTS, updates_steps.GROUP
  policy = {
    "checkpoint": folder,
    "micro_tokens": updates_lab.MICRO_TOKENS,
    "row_buckets": (length,),
    "loss": {"kl_weight": updates_steps.KL_WEIGHT, "reference": "before"},
    "optimizer": {"learning_rate": updates_steps.RATE},
    "engine": {
      "num_slots": prompts * group,
      "max_length": length,
      "prefill_rows": prompts,
      "prefill_buckets": (prompt,),
    },
  }
  solver = {
    "role": "math.solver",
    "policy": "one",
    "max_tokens": length - prompt,
  }
  rows = {"train": f"{folder}/rows.jsonl"}
  config = config_lib.build(
    {
      "steps": updates_steps.MANY,
      "policies": {
        "one": policy,
        "before": {"checkpoint": folder, "frozen": True},
      },
      "agents": {"solver": solver},
      "orchestra": {"name": "single"},
      "environment": {"name": "math"},
      "data": {
        "sources": {"own": {"options": {"rows": rows}}},
        "num_tasks": prompts,
        "group_size": group,
      },
      "eval": {"every": 0, "num_tasks": 0, "final_num_tasks": 0},
      "checkpoint": {"every": updates_steps.MANY},
    }
  )
  return config_lib.check(config)


# -- the team ------------------------------------------------------------------


def _ask(task, said):
  del said
  return [{"role": "user", "content": task.question}]


def _parse(text, stop_reason):
  del stop_reason
  return Reply(text)


ROLE = Agent({"default": _ask}, _parse)


class Environment:
  def score(self, task, episode):
    del task
    return Outcome(updates_steps.reward(episode.turns[-1].reply.text))
