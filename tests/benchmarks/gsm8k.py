"""A pretrained policy on GSM8K: the team, and one agent against transformers.

    python tests/benchmarks/gsm8k.py --checkpoint DIR --data DIR [--num 64]
      [--parts single,math,transformers] [--out DIR]

Plays the first test rows with `--mode=eval`, greedily, on the config
`math_smollm2.py` with another checkpoint: first the solver alone, then the
solver and the verifier, both played by the same policy. Where torch is
installed, transformers' `generate` continues the same prompts, 16 at a time,
and the same grader judges both. Prints accuracy, tokens, and tokens per second
of wall clock and of CPU; the last line is JSON. With --out an interrupted one
goes on where it was; its seconds are then those of the last process.
"""

import argparse
import importlib.util
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "math_smollm2.py"
MAX_TOKENS = 256


def play(args, team: str, workdir: pathlib.Path) -> dict:
  """One evaluation in a process of its own."""
  keys = {
    "policies": {
      "policy": {
        "checkpoint": args.checkpoint,
        "frozen": True,
        "engine": {
          "num_slots": 16,
          "max_length": 1024,
          "prefill_rows": 4,
          "prefill_buckets": [256, 384, 512, 768],
          "steps_per_call": 16,
        },
      }
    },
    "agents": {
      agent: {
        "role": f"math.{agent}",
        "policy": "policy",
        "max_tokens": MAX_TOKENS,
      }
      for agent in (("solver",) if team == "single" else ("solver", "verifier"))
    },
    "orchestra": {"name": team},
    "data.sources.gsm8k.options.data_dir": args.data,
    "eval.num_tasks": args.num,
    "eval.k": 1,
    "eval.sampling": {"temperature": 0.0},
    # On two cores a turn that waits for its slot may take long.
    "rollout.turn_timeout_s": 3000,
    "placement.timeout_s": 4000,
  }
  before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
  subprocess.run(
    [
      *(sys.executable, "-m", "drmas_jax.main", "--mode=eval"),
      *("--config", str(CONFIG), "--workdir", str(workdir)),
      *(f"--config.{key}={value}" for key, value in keys.items()),
    ],
    check=True,
    cwd=ROOT,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  lines = next(workdir.glob("eval/*/episodes*.jsonl")).read_text().splitlines()
  episodes = [json.loads(line) for line in lines]
  tokens = sum(t["tokens"] for e in episodes for t in e["turns"])
  return figures(
    sum(e["won"] for e in episodes),
    tokens,
    time.monotonic() - start,
    after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
  ) | {"failed": sum(not e["ok"] for e in episodes)}


def figures(correct: int, tokens: int, wall: float, cpu: float) -> dict:
  return {
    "correct": correct,
    "tokens": tokens,
    "wall_s": round(wall, 1),
    "cpu_s": round(cpu, 1),
    "tokens_per_s": round(tokens / wall, 1),
    "tokens_per_cpu_s": round(tokens / cpu, 1),
  }


def transformers_alone(args) -> dict:
  """The solver's prompts, continued greedily by transformers on torch."""
  import torch
  import transformers

  from drmas_jax import data
  from drmas_jax.agents import math as agents
  from drmas_jax.datasets import public
  from drmas_jax.grading import math as grading
  from drmas_jax.tokenizer import Tokenizer

  tokenizer = Tokenizer.load(args.checkpoint)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    args.checkpoint, dtype=torch.float32
  ).eval()
  source = public.SETS["gsm8k"].make("test", data_dir=args.data)
  tasks = data.held_out("gsm8k", source, args.num)
  prompts = [
    tokenizer.encode_chat(agents.solver.messages("default", task, ()))
    for task in tasks
  ]
  correct, tokens = 0, 0
  start, cpu = time.monotonic(), time.process_time()
  for first in range(0, args.num, 16):
    rows = prompts[first : first + 16]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), tokenizer.pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):  # padded on the left
      ids[i, length - len(row) :] = torch.tensor(row)
      mask[i, length - len(row) :] = 1
    with torch.no_grad():
      out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(tokenizer.stop_ids),
        pad_token_id=tokenizer.pad_id,
      )
    for task, row in zip(tasks[first:], out[:, length:].tolist(), strict=False):
      ends = [i for i, t in enumerate(row) if t in tokenizer.stop_ids]
      row = row[: ends[0] + 1] if ends else row
      tokens += len(row)
      correct += grading.grade(tokenizer.decode(row), task.answer)
  return figures(
    correct, tokens, time.monotonic() - start, time.process_time() - cpu
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--data", required=True)
  parser.add_argument("--num", type=int, default=64)
  parser.add_argument("--out", type=pathlib.Path)
  parser.add_argument("--parts", default="single,math,transformers")
  args = parser.parse_args()
  found = {"num": args.num}
  with tempfile.TemporaryDirectory() as folder:
    for team in ("single", "math"):
      if team in args.parts:
        found[team] = play(
          args, team, (args.out or pathlib.Path(folder)) / team
        )
        print(team, found[team], flush=True)
  if "transformers" in args.parts and importlib.util.find_spec("torch"):
    found["transformers"] = transformers_alone(args)
    print("transformers", found["transformers"])
  print(json.dumps(found))


if __name__ == "__main__":
  main()
