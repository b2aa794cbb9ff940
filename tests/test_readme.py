"""Every block of the README does what the README says, in the README's order.

bash runs in a copy of the tree, cut small by what `readme.py` lays behind the
commands; what a user must have of his own lies there under its name. Of the
first two blocks .ci/run runs all, installation and tests included.
"""

import contextlib
import importlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import readme
from parity import make_vectors
from safetensors.numpy import load_file

from drmas_jax import config as config_lib
from drmas_jax import health, main
from drmas_jax.models import weights
from drmas_jax.tokenizer import Tokenizer

TINY = readme.ROOT / "drmas_jax" / "models" / "tiny"

# Of configs/math_tiny.py: two small steps, and one shape of each program.
_POLICY = {
  "micro_tokens": 1792,
  "row_buckets": [56],
  "engine.num_slots": 16,
  "engine.prefill_rows": 0,
  "engine.steps_per_call": 4,
}
CHANGES = {
  "steps": 2,
  "data.num_tasks": 4,
  "eval.num_tasks": 4,
  "eval.k": 4,
  "checkpoint.every": 1,
  "logging.agent_norm_every": 0,
  "sft.steps": 2,
  "sft.batch_rows": 8,
} | {
  f"policies.{name}.{key}": value
  for name in ("solver", "verifier")
  for key, value in _POLICY.items()
}
FLAGS = {"--step": 2}

PASSAGES = (
  '"Glomma"\nThe longest of the rivers of Norway.',
  '"Oslo"\nThe capital of Norway.',
  '"Seine"\nOne of the rivers of France.',
  '"Lee"\nAnn Lee wrote the book.',
  '"Book"\nA book has pages.',
)


class Walk:
  """A reader's way through the README: each block once, and where it ends.

  Attributes:
    tree: a copy of this one, with what a user would have.
  """

  def __init__(self, tree):
    self.tree = tree
    self._said = {}
    names = (".*", "runs", "__pycache__", "benchmarks", "*.egg-info")
    shutil.copytree(readme.ROOT, tree, ignore=shutil.ignore_patterns(*names))
    shutil.copytree(TINY / "solver", tree / "models" / "SmolLM2-135M-Instruct")
    make_vectors.write(tree / "models" / "e5-base-v2")
    self.write(
      "data/wiki-18/five.jsonl",
      *({"id": str(i), "contents": text} for i, text in enumerate(PASSAGES)),
    )
    for split in ("train", "test"):
      rows = (
        {"problem": f"{split} {i}+1", "gold": {"text": str(i + 1)}}
        for i in range(3)
      )
      self.write(f"data/{split}.jsonl", *rows)

  def write(self, name, *rows):
    path = self.tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

  def said(self, name):
    """Of a block; those that it builds on are run before it."""
    if name not in self._said:
      row = BLOCKS[name]
      for other in row.after:
        self.said(other)
      self._said[name] = row.run(self, readme.block(row.marker))
    return self._said[name]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
  return Walk(tmp_path_factory.mktemp("reader") / "drmas_jax")


# -- ways to run one -----------------------------------------------------------


def bash(walk, text):
  return readme.bash(text, walk.tree, CHANGES, FLAGS)


def python(walk, text):
  (walk.tree / "block.py").write_text(text)
  return readme.bash("python block.py", walk.tree, CHANGES)


def elsewhere(path, call):
  """Another file of this project runs it, by its marker."""

  def run(walk, text):
    assert call in (readme.ROOT / path).read_text()

  return run


def shows(path):
  """It is that file."""

  def run(walk, text):
    assert text == (readme.ROOT / path).read_text()

  return run


def check(walk, config):
  """What `--mode=check` says of configs/math_tiny.py with other values."""
  raw = config_lib.load_file(readme.ROOT / "configs" / "math_tiny.py")
  path = walk.tree / "tests" / "checked.py"
  path.write_text(f"def get_config():\n  return {raw | config!r}\n")
  said = io.StringIO()
  importlib.invalidate_caches()  # files beside it are new as well
  before, modules = list(sys.path), set(sys.modules)
  try:
    with (
      contextlib.chdir(walk.tree),
      contextlib.redirect_stdout(said),
      contextlib.redirect_stderr(said),
    ):
      code = main.main([f"--config={path}", "--mode=check"])
  finally:
    sys.path[:] = before
    for name in set(sys.modules) - modules:
      if name.split(".")[0] in ("asking", "own_team"):
        del sys.modules[name]
  assert code == 0, said.getvalue()
  return said.getvalue()


def math_agents(**policies):
  """A solver and a verifier, played by these."""
  return {
    name: dict(role=f"math.{name}", policy=policy, max_tokens=512)
    for name, policy in policies.items()
  }


def config(**more):
  """It defines `config`, or some of its values, for `--mode=check`."""

  def run(walk, text):
    found = {}
    exec(text, found)
    own = found.get("config") or {"policies": found["policies"]}
    return check(walk, own | more)

  return run


def judged(walk, text):
  """An environment that asks the judge of the debate."""
  folder = walk.tree / "tests" / "asking"
  folder.mkdir(exist_ok=True)
  (folder / "environment.py").write_text(text)
  raw = config_lib.load_file(readme.ROOT / "configs" / "math_tiny.py")
  judge = dict(role="own_team.debate.judge", policy="judge", max_tokens=12)
  frozen = dict(checkpoint="tiny:verifier", frozen=True)
  return check(
    walk,
    dict(
      environment=dict(name="asking.environment"),
      policies=raw["policies"] | dict(judge=frozen),
      agents=raw["agents"] | dict(judge=judge),
    ),
  )


def alarm(walk, text):
  """What a run says of such a step, whose end the README leaves out."""
  config = config_lib.read(readme.ROOT / "configs" / "math_tiny.py")
  monitor = health.Monitor(config)
  (begun,) = monitor.see(12, {"truncated/solver": 0.73}).begun
  line = f"drmas_jax: ALARM at step 12: {begun.name}: {begun.text}"
  start, end = re.sub(r"\s+", " ", text).split(" .. ")
  assert line.startswith(start) and not end.strip()


# -- the blocks ----------------------------------------------------------------


class Row(NamedTuple):
  """How a block is run.

  Attributes:
    marker: what it has, and none before it.
    run: of the walk and its text; raises where it is wrong.
    after: names of those that it builds on.
  """

  marker: str
  run: Callable
  after: tuple[str, ...] = ()


BLOCKS = {
  "start": Row("drmas_jax.main --config", bash),
  "tests": Row("pytest", elsewhere(".ci/run", "block 'pytest'")),
  "team": Row("debaters", shows("tests/own_team/debate.py")),
  "own": Row(
    "--config own_team",
    elsewhere("tests/test_own_team.py", 'block("--config own_team")'),
  ),
  "notebook": Row("import run\n", python),
  "remote": Row(
    "gpt-4", config(agents=math_agents(solver="small", verifier="far"))
  ),
  "judge": Row("JUDGES", judged),
  "small": Row("--config.steps=40", bash),
  "show": Row("--worst 5", bash, ("small",)),
  "sft": Row("--export best.jsonl", bash, ("small",)),
  "eval": Row("--mode=eval", bash, ("small",)),
  "compare": Row("drmas_jax.compare", bash, ("notebook",)),
  "export": Row("drmas_jax.export", bash, ("small",)),
  "serve": Row("drmas_jax.serve", bash, ("small",)),
  "alarm": Row("ALARM", alarm),
  "replay": Row("--mode=replay", bash, ("start",)),
  "policies": Row("Qwen3-0.6B", config()),
  "data": Row("gsm8k=", config()),
  "datasets": Row("drmas_jax.datasets", bash),
  "passages": Row("retrieval.serve", bash),
  "adapters": Row("adapter=", config()),
}


@pytest.mark.quick
def test_each_block_has_a_way_to_be_run():
  texts = [block.text for block in readme.blocks()]
  for text, (name, row) in zip(texts, BLOCKS.items(), strict=True):
    assert row.marker in text, name
    assert readme.block(row.marker) == text, f"{name}: is not the first"


@pytest.mark.parametrize("name", BLOCKS)
def test_it_does_what_it_is_there_for(walk, name):
  walk.said(name)


# -- where a reader comes to ---------------------------------------------------


def test_the_first_run_leaves_what_is_listed(walk):
  walk.said("start")
  text = (readme.ROOT / "README.md").read_text()
  table = text[text.index("The run's folder") :].split("\n\n")[1]
  listed = re.findall(r"`([\w.]+)/?`(?=[^|]*\| )", table)
  listed = [n for n in listed if n not in ("alarms.jsonl", "stacks")]
  assert len(listed) > 8
  for name in listed:
    path = walk.tree / "runs" / "math_tiny" / name
    assert path.stat().st_size if path.is_file() else any(path.iterdir()), name


def test_an_evaluation(walk):
  assert "# Evaluation of step_2" in walk.said("eval")
  results = walk.tree / "runs" / "small" / "eval" / "step_2" / "results.md"
  assert "avg@4" in results.read_text()


def test_episodes(walk):
  said = walk.said("show")
  assert "step 2  arithmetic[" in said and "arithmetic[17216]" in said
  assert "turn 1  verifier" in said


def test_an_exported_policy_that_has_learned(walk):
  walk.said("export")
  assert_changed(walk.tree / "solver")


def assert_changed(folder):
  """It is the shipped solver's folder, with other weights."""
  assert Tokenizer.load(folder).vocab_size
  assert weights.load(folder, weights.read_config(folder), None, np.float32)
  old, new = (
    load_file(f / "model.safetensors") for f in (TINY / "solver", folder)
  )
  assert old.keys() == new.keys()
  assert any((old[k] != new[k]).any() for k in old)


def test_a_policy_that_learned_of_its_successes(walk):
  """It began with that of the run, and differs from that as well."""
  walk.said("sft")
  folder = walk.tree / "runs" / "best" / "policies" / "solver"
  assert_changed(folder)


def test_a_comparison(walk):
  walk.said("compare")
  table = (walk.tree / "table.md").read_text()
  assert "| a" in table and "| b" in table and "avg@4" in table


def test_policies_and_their_team_answer(walk):
  said = walk.said("serve")
  replies = [json.loads(x) for x in said.splitlines() if x.startswith("{")]
  assert [r["model"] for r in replies] == ["solver", "verifier", "team"]
  assert all(r["choices"][0]["message"]["content"] for r in replies)
  assert replies[2]["choices"][0]["transcript"]


def test_passages_are_found_by_word_and_by_meaning(walk):
  said = walk.said("passages")
  assert "serves 5 passages by bm25" in said
  assert "serves 5 passages by dense" in said
  word, meaning = (
    json.loads(x)["result"][0] for x in said.splitlines() if x[:1] == "{"
  )
  assert "rivers of Norway" in word[0]["contents"] and len(meaning) == 2


def test_a_step_again(walk):
  walk.said("replay")
  folder = walk.tree / "runs" / "math_tiny" / "replay" / "step_2"
  assert "EQUAL: all numbers of step 2" in (folder / "summary.md").read_text()


def test_what_a_check_says_of_what_is_not_here(walk):
  assert "gpt-4.1-mini at https://api.openai.com/v1" in walk.said("remote")
  assert "reward" in walk.said("judge")
  assert "data.sources.mine: 3 rows" in walk.said("data")
  assert "data.sources.gsm8k" in walk.said("data")
  assert "Qwen/Qwen3-0.6B" in walk.said("policies")
