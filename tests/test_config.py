"""Every wrong config is refused, in one message that says how to mend it."""

import ast
import copy
import dataclasses
import json
import os
import re
import subprocess
import sys

import ml_collections
import pytest

from drmas_jax import config as config_lib
from drmas_jax.config import ConfigError

pytestmark = pytest.mark.quick

RAW = {
  "policies": {
    "alice": {"checkpoint": "tiny:solver"},
    "bob": {"checkpoint": "tiny:verifier"},
  },
  "agents": {
    "solver": {"role": "math.solver", "policy": "alice"},
    "verifier": {"role": "math.verifier", "policy": "bob"},
  },
  "orchestra": {"name": "math"},
  "environment": {"name": "math"},
  "data": {"sources": {"own": {"name": "own_team.tasks"}}},
}


@pytest.fixture(autouse=True)
def own_team(tmp_path, monkeypatch):
  """A user's own package, named in the config by its dotted name."""
  folder = tmp_path / "own_team"
  folder.mkdir()
  (folder / "tasks.py").write_text(
    "def make(split='train', *, level: int = 1, kind: str): ...\n"
  )
  (folder / "simple.py").write_text("def make(split='train'): ...\n")
  (folder / "empty.py").write_text("")
  (folder / "broken.py").write_text("import own_team.nowhere\n")
  monkeypatch.syspath_prepend(tmp_path)
  yield
  for name in [n for n in sys.modules if n.split(".")[0] == "own_team"]:
    del sys.modules[name]


@pytest.fixture
def write(tmp_path):
  def write(text):
    path = tmp_path / "config.py"
    path.write_text(text)
    return path

  return write


@pytest.fixture
def read(write):
  """Reads the good config with some `a.b=value` on top."""

  def read(*overrides, mode="train", raw=RAW):
    raw = copy.deepcopy(raw)
    raw["data"]["sources"]["own"] = {"name": "own_team.simple"}
    path = write(f"def get_config():\n  return {raw!r}\n")
    return config_lib.read(path, overrides, mode)

  return read


def lines(read, *overrides, **kwargs):
  with pytest.raises(ConfigError) as error:
    read(*overrides, **kwargs)
  return str(error.value).splitlines()


def fits(line, pattern):
  """Whether the line is the pattern, where … stands for anything."""
  return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), line)


def test_good_config_has_defaults_and_types(read):
  config = read()
  assert config.policies["alice"].optimizer.learning_rate == 1e-6
  assert config.agent_names == ("solver", "verifier")
  assert config.trained == ("alice", "bob")
  assert config.agents_of("bob") == ("verifier",)
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.steps = 3


def test_config_dict_and_dict_are_the_same():
  own = ml_collections.ConfigDict(RAW)
  assert config_lib.build(own) == config_lib.build(RAW)


WRONG = [
  # -- keys
  (
    "policies.alice.optimizer.learning_rte=1e-6",
    "policies.alice.optimizer.learning_rte: unknown key; allowed are "
    "name, learning_rate…offload; did you mean 'learning_rate'?",
  ),
  (
    "lr=1e-6",
    "lr: unknown key; allowed are policies, agents…; did you mean "
    "policies.NAME.optimizer.learning_rate or sft.learning_rate?",
  ),
  (
    "group_size=4",
    "group_size: unknown key; allowed are…; did you mean data.group_size?",
  ),
  ("num-epochs=3", "num-epochs: unknown key; allowed are…; remove it"),
  ("data.num-tasks=3", "data.num-tasks:…; did you mean 'num_tasks'?"),
  ("agnts=['solver']", "agnts: unknown key…; did you mean 'agents'?"),
  ("num_agents=2", "num_agents: unknown key;…; did you mean 'agents'?"),
  ("defaults=['optioal agent: x']", "defaults: unknown key…; remove it"),
  # -- types
  (
    "agents=['a', 'b', 'c']",
    "agents: ['a', 'b', 'c'] is not allowed; write a dict of NAME: a dict "
    "with role, policy,…options",
  ),
  (
    "policies.alice.optimizer=adam",
    "policies.alice.optimizer: 'adam' is not a group of keys; write a dict "
    "with name, learning_rate…offload",
  ),
  ("steps=many", "steps: 'many' is not allowed; write an integer"),
  ("steps=2.5", "steps: 2.5 is not allowed; write an integer"),
  ("steps=True", "steps: True is not allowed; write an integer"),
  (
    "policies.alice.frozen=1",
    "policies.alice.frozen: 1 is not allowed; write True or False",
  ),
  (
    "policies.alice.checkpoint=3",
    "policies.alice.checkpoint: 3 is not allowed; write a string",
  ),
  (
    "policies.alice.optimizer.learning_rate=[1e-6, 2e-6]",
    "policies.alice.optimizer.learning_rate: [1e-06, 2e-06] is not allowed; "
    "write a number",
  ),
  (
    "placement.strategy=colums",
    "placement.strategy: 'colums' is not allowed; write one of 'shared', "
    "'split', 'columns'",
  ),
  (
    "policies.alice.row_buckets=64",
    "policies.alice.row_buckets: 64 is not allowed; write a list, each an "
    "integer",
  ),
  (
    "environment.options={'a': {1, 2}}",
    "environment.options.a: {1, 2} is not allowed; write plain data…",
  ),
  # -- bounds
  ("steps=0", "steps: 0 is out of range; write a finite value >= 1"),
  (
    "seed=4294967296",  # for jax the same as 0
    "seed: 4294967296 is out of range; write a finite value >= 0 and < "
    "4294967296",
  ),
  (
    "eval.sampling.top_k=2147483648",  # more than the device can count
    "eval.sampling.top_k: 2147483648 is out of range; write a finite value >= "
    "0 and < 2147483648",
  ),
  (
    "data.group_size=0",
    "data.group_size: 0 is out of range; write a finite value >= 1",
  ),
  (
    "agents.solver.sampling.temperature=-1",
    "agents.solver.sampling.temperature: -1.0 is out of range; write a finite "
    "value >= 0 and <= 100",
  ),
  (
    "agents.solver.sampling.top_p=0",
    "agents.solver.sampling.top_p: 0.0 is out of range; write a finite value "
    "> 0 and <= 1",
  ),
  (
    "policies.alice.loss.clip_low=-0.2",
    "policies.alice.loss.clip_low: -0.2 is out of range; write a finite value "
    ">= 0 and <= 1",
  ),
  (
    "policies.alice.optimizer.b2=1",
    "policies.alice.optimizer.b2: 1.0 is out of range; write a finite value "
    ">= 0 and < 1",
  ),
  (
    "policies.alice.optimizer.clip_norm=1e999",
    "policies.alice.optimizer.clip_norm: inf is out of range; write a finite "
    "value > 0",
  ),
  # -- names
  (
    "agents.solver.role=math.slover",
    "agents.solver.role: 'math' has no role 'slover'; allowed are solver, "
    "verifier",
  ),
  (
    "agents.solver.role=math.find_block",
    "agents.solver.role: 'math' has no role 'find_block'; allowed are solver, "
    "verifier",
  ),
  (
    "agents.solver.role=maths.solver",
    "agents.solver.role: 'maths' not found; allowed are…, or a module of "
    "your own that Python can import, such as 'my_pkg.my_module'",
  ),
  (
    "agents.solver.role=solver",
    "agents.solver.role: 'solver' must be 'module.role', such as 'math.solver'",
  ),
  (
    "agents.solver.template=shrt",
    "agents.solver.template: 'shrt' is no template of math.solver; allowed "
    "are default, short…; rename it",
  ),
  (
    "orchestra.name=mth",
    "orchestra.name: 'mth' not found; allowed are math,…",
  ),
  (
    "environment.name=../secret",
    "environment.name: '../secret' not found; allowed are math,…",
  ),
  (
    "environment.name=own_team.nowhere",
    "environment.name: 'own_team.nowhere' not found; allowed are…",
  ),
  (
    "environment.name=own_team.empty",
    "environment.name: 'own_team.empty' has no make; define it",
  ),
  (
    "data.sources.own.name=own_tasks",
    "data.sources.own.name: 'own_tasks' not found; allowed are…",
  ),
  (
    "advantage.name=agentwise",
    "advantage.name: 'agentwise' not found; allowed are agent_wise, grpo…"
    "; rename it, or add a row to ESTIMATORS in advantages.py",
  ),
  (
    "policies.bob.loss.name=ppo",
    "policies.bob.loss.name: 'ppo' not found; allowed are clipped…LOSSES "
    "in losses.py",
  ),
  # -- options
  (
    "orchestra.options={'max_loop': 3}",
    "orchestra.options.max_loop: unknown key; allowed are max_loops; did you "
    "mean 'max_loops'?",
  ),
  (
    "orchestra.options.max_loops=0",
    "orchestra.options.max_loops: 0 is not allowed; write an integer >= 1",
  ),
  (
    "policies.bob.optimizer.decay_steps=5",
    "policies.bob.optimizer.decay_steps: has no effect with "
    "optimizer.schedule='constant'; remove it",
  ),
  (
    "policies.bob.optimizer.name=adam",
    "policies.bob.optimizer.name: 'adam' not found; allowed are adamw, "
    "adafactor, muon; rename it, or add a row to OPTIMIZERS in optimizers.py",
  ),
  (
    "policies.bob.optimizer.momentum=0.9",
    "policies.bob.optimizer.momentum: has no effect with "
    "optimizer.name='adamw'; remove it",
  ),
  (
    "policies.bob.optimizer={'name': 'adafactor', 'b2': 0.95}",
    "policies.bob.optimizer.b2: has no effect with "
    "optimizer.name='adafactor'; remove it",
  ),
  (
    "policies.bob={'checkpoint': 'x', 'frozen': True, 'remat': 'full'}",
    "policies.bob.remat: has no effect with frozen=True; remove it",
  ),
  (
    "policies.bob={'checkpoint': 'x', 'frozen': True, 'attention': 'xla'}",
    "policies.bob.attention: has no effect with frozen=True; remove it",
  ),
  (
    "policies.bob.engine.cache_tokens=1023",
    "policies.bob.engine.cache_tokens: 1023 cannot hold one sequence of "
    "engine.max_length=1024; write at least that, or 0 for room in every slot",
  ),
  (
    "policies.bob.engine.cache_dtype=float16",
    "policies.bob.engine.cache_dtype: 'float16' is not allowed; write one of "
    "'', 'float32', 'bfloat16', 'int8'",
  ),
  (
    "advantage.pool_agents=True",
    "advantage.pool_agents: has no effect with advantage.name='agent_wise'"
    "…or write name='grpo'",
  ),
  (
    "advantage.decay=0.5",
    "advantage.decay: has no effect with advantage.name='agent_wise'; remove "
    "it, or write name='rae'",
  ),
  (
    "advantage.gamma=0.5",
    "advantage.gamma: has no effect with advantage.name='agent_wise'; remove "
    "it, or write name='gigpo'",
  ),
  (
    "advantage={'name': 'grpo', 'over': 'team'}",
    "advantage.over: has no effect with advantage.name='grpo'; remove it, or "
    "write name='rloo'",
  ),
  (
    "advantage={'count': 'episode', 'by_turn': True}",
    "advantage.by_turn: has no effect with advantage.count='episode'…",
  ),
  (
    "advantage={'name': 'rloo', 'over': 'team', 'pool_agents': True}",
    "advantage.pool_agents: has no effect with advantage.over='team' and "
    "count='turn'…",
  ),
  (
    "agents.solver.sampling.top_k=20",
    "agents.solver.sampling: top_k=20, top_p=1 would train on tokens drawn…"
    "write 0 and 1 (eval.sampling is free), or policies.alice.loss.importance="
    "'token'",
  ),
  (
    "policies.bob.loss.importance=token",
    "policies.bob.loss.importance: has no effect with old_logprobs='sampler' "
    "and top_k=0, top_p=1 for all its agents; remove it, or write…",
  ),
  (
    "policies.bob.loss={'name': 'gspo', 'dual_clip': 2.0}",
    "policies.bob.loss.dual_clip: has no effect with loss.name='gspo'; remove "
    "it",
  ),
  (
    "policies.bob.loss.divisor=512",
    "policies.bob.loss.divisor: has no effect with loss.aggregation="
    "'token_mean'; remove it",
  ),
  (
    "policies.bob.loss.importance_bound=3",
    "policies.bob.loss.importance_bound: has no effect with loss.importance="
    "'none'; remove it",
  ),
  (
    "policies.bob={'checkpoint': 'y', 'update_on_zero_signal': True, "
    "'loss': {'entropy_weight': 0.1}}",
    "policies.bob.update_on_zero_signal: has no effect with loss."
    "entropy_weight or loss.kl_weight; remove it",
  ),
  (
    "policies.bob.loss.kl=k2",
    "policies.bob.loss.kl: has no effect with loss.kl_weight=0; remove it",
  ),
  (
    "policies.bob.loss.kl_weight=0.1",
    "policies.bob.loss.kl_weight: 0.1 needs a reference; write policies.bob."
    "loss.reference=NAME of a frozen policy; there are none; add one with "
    "frozen=True",
  ),
  (
    "policies.bob.loss={'kl_weight': 0.1, 'reference': 'bob'}",
    "policies.bob.loss.reference: 'bob' is trained; allowed are frozen "
    "policies: none; add one with frozen=True",
  ),
  (
    "policies.bob.loss={'kl_weight': 0.1, 'reference': 'carol'}",
    "policies.bob.loss.reference: 'carol' is no policy; allowed are…",
  ),
  (
    "policies.bob.loss.reward_weight=0",
    "policies.bob.loss.reward_weight: 0 without kl_weight, so nothing would be "
    "trained; write…",
  ),
  (
    "agents.solver.overlong_tokens=513",
    "agents.solver.overlong_tokens: 513 is more than max_tokens=512…lower it",
  ),
  (
    "agents.solver.overlong_penalty=0.5",
    "agents.solver.overlong_penalty: has no effect with overlong_tokens=0; "
    "remove it",
  ),
  (
    "agents.solver={'role': 'math.solver', 'policy': 'alice', "
    "'overlong_tokens': 9, 'overlong_penalty': 0}",
    "agents.solver.overlong_tokens: has no effect with overlong_penalty=0; "
    "remove it",
  ),
  (
    "agents.solver.train=False",
    "policies.alice: train=False for all its agents (solver), so nothing would "
    "train it; set frozen=True, or train=True for one",
  ),
  (
    "policies.alice.update_phase=1",
    "policies.alice.update_phase: 1 would never come; write less than "
    "update_every=1",
  ),
  (
    "data={'sources': {'own': {'name': 'own_team.simple'}}, 'resample': 2, "
    "'group_size': 1}",
    "data.resample: the one reward of a group of data.group_size=1 tells "
    "nothing apart…",
  ),
  (
    "data={'sources': {'own': {'name': 'own_team.simple'}}, 'group_size': 1}",
    "data.group_size: 1 leaves 'alice' nothing to learn from…'rae'…",
  ),
  (
    "placement.timeout_s=10",
    "placement.timeout_s: 10 is not more than rollout.turn_timeout_s=600…"
    "raise it",
  ),
  (
    "orchestra.options={'max_loops': 'two'}",
    "orchestra.options.max_loops: 'two' is not allowed; write an integer",
  ),
  (
    "agents.verifier.options={'missing_verdict': 'perhaps'}",
    "agents.verifier.options.missing_verdict: 'perhaps' is not allowed; write "
    "one of 'approve', 'reject'",
  ),
  (
    "data.sources.own={'name': 'own', 'options': {'rows': 5}}",
    "data.sources.own.options.rows: 5 is not allowed; write a string or a dict "
    "of NAME: a string",
  ),
  (
    "eval.sources.a={'name': 'aime24', 'options': {'cache_dir': 5}}",
    "eval.sources.a.options.cache_dir: 5 is not allowed; write a string or "
    "None",
  ),
  (
    "eval.sampling={'top_k': 1.5}",
    "eval.sampling.top_k: 1.5 is not allowed; write an integer",
  ),
  (
    "data.sources.own.weight=2",
    "data.sources.own.weight: has no effect with one source; remove it",
  ),
  (
    "data.sources.own.name=own_team.tasks",
    "data.sources.own.options.kind: missing; add it",
  ),
  # -- across keys
  (
    "agents.solver.max_tokens=1024",
    "agents.solver.max_tokens: 1024 leaves no room for a prompt; write less "
    "than policies.alice.engine.max_length=1024",
  ),
  (
    "agents.solver.max_prompt_tokens=513",
    "agents.solver.max_prompt_tokens: 513 is more than the 512 that "
    "max_tokens=512, engine.max_length=1024 and engine.prefill_buckets leave; "
    "write at most that, or raise engine.max_length",
  ),
  (
    "agents.solver.sampling.temperature=0",
    "agents.solver.sampling.temperature: 0 is greedy and teaches nothing; "
    "write a value >= 0.01 (eval.sampling may be greedy)",
  ),
  (
    "agents.solver.sampling.temperature=1e-60",  # 0 in float32
    "agents.solver.sampling.temperature: 1e-60 is greedy and teaches nothing; "
    "write a value >= 0.01 (eval.sampling may be greedy)",
  ),
  (
    "policies.alice.row_buckets=[64, 32]",
    "policies.alice.row_buckets: (64, 32) must be rising lengths >= 1",
  ),
  (
    "policies.alice.row_buckets=[512]",
    "policies.alice.row_buckets: the last, 512, cannot hold a row of "
    "engine.max_length=1024; add 1024",
  ),
  (
    "policies.alice.engine.prefill_buckets=[2048]",
    "policies.alice.engine.prefill_buckets: 2048 is more than "
    "engine.max_length=1024; lower it",
  ),
  (
    "policies.carol.checkpoint=x",
    "policies.carol: no agent uses it; remove it, or set "
    "agents.NAME.policy='carol'",
  ),
  (
    "placement.shares={'alice': 1}",
    "placement.shares: has no effect where strategy='shared'; remove it…",
  ),
  (
    "placement.train_mesh={'data': 0}",
    "placement.train_mesh: {'data': 0, 'fsdp': 0, 'tensor': 1} leaves more "
    "than one axis open; write 0 for one of them",
  ),
]


@pytest.mark.parametrize(("override", "expected"), WRONG)
def test_wrong_value_is_named(read, override, expected):
  [line] = lines(read, override)
  assert fits(line, expected), line


def test_missing_keys_are_named(read):
  raw = copy.deepcopy(RAW)
  del raw["agents"]["solver"]["policy"], raw["orchestra"]
  assert lines(read, raw=raw) == [
    "agents.solver.policy: missing; add a string",
    "orchestra: missing; add a dict with name, options",
  ]


def test_policies_are_those_of_the_agents(read):
  assert lines(read, "agents.solver.policy=carol") == [
    "agents.solver.policy: 'carol' is no policy; allowed are alice, bob; add "
    "it to policies or rename",
    "policies.alice: no agent uses it; remove it, or set "
    "agents.NAME.policy='alice'",
  ]


def test_agents_are_those_of_the_orchestra(read):
  raw = copy.deepcopy(RAW)
  raw["agents"]["judge"] = raw["agents"].pop("verifier")
  assert lines(read, raw=raw) == [
    "agents.verifier: missing; the orchestra 'math' calls it: add an entry",
    "agents.judge: the orchestra 'math' never calls it; allowed are solver, "
    "verifier; remove it",
  ]


def test_names_become_file_names(read):
  raw = copy.deepcopy(RAW)
  raw["policies"]["../a"] = raw["policies"].pop("alice")
  raw["agents"]["solver"]["policy"] = "../a"
  [line] = lines(read, raw=raw)
  assert line.startswith("'../a': not allowed as the name of a policy")


def test_shares_are_of_policies(read):
  assert lines(
    read, "placement.strategy=split", "placement.shares={'alic': 1, 'bob': 0}"
  ) == [
    "placement.shares.alic: unknown key; allowed are alice, bob; did you mean "
    "'alice'?",
    "placement.shares.bob: 0 is out of range; write a value >= 1",
  ]


# Nobody speaks with it.
TEACHER = "policies.teacher={'checkpoint': 'tiny:solver', 'frozen': True}"


def kept_near(policy, **loss):
  loss = {"kl_weight": 0.1, "reference": "teacher"} | loss
  return f"policies.{policy}.loss={loss!r}"


def test_a_reference_needs_no_agent(read):
  config = read(TEACHER, kept_near("alice"), kept_near("bob", kl="abs"))
  assert config.references == {"teacher"} and config.agents_of("teacher") == ()
  assert config.trained == ("alice", "bob")
  [line] = lines(read, TEACHER)
  assert line.startswith("policies.teacher: no agent uses it; remove it")
  [line] = lines(read, TEACHER, "policies.bob.loss.reference=teacher")
  assert line == (
    "policies.bob.loss.reference: has no effect with loss.kl_weight=0; remove "
    "it"
  )
  [line] = lines(read, TEACHER, kept_near("bob", kl="k4"))
  assert fits(
    line,
    "policies.bob.loss.kl: 'k4' not found; allowed are k1, k2, k3…KL in "
    "losses.py",
  )
  # It scores by a program of its own, and updates nothing.
  for own in ("compute_dtype=bfloat16", "attention=xla"):
    read(TEACHER, kept_near("bob"), f"policies.teacher.{own}")
  [line] = lines(
    read, TEACHER, kept_near("bob"), "policies.teacher.num_epochs=2"
  )
  assert line == (
    "policies.teacher.num_epochs: has no effect with frozen=True; remove it"
  )


def test_a_reference_may_be_an_agents(read):
  frozen = "policies.alice.frozen=true"
  near = kept_near("bob", reference="alice")
  assert read(frozen, near).references == {"alice"}
  # Those of a frozen policy are no references.
  idle = kept_near("alice", reference="bob")
  found = lines(read, frozen, near, idle)
  assert found == [
    "policies.alice.loss: has no effect with frozen=True; remove it"
  ]


def test_policies_that_share_weights(read):
  """Adapters on one checkpoint, and a frozen policy that is this checkpoint."""
  shared = [
    "policies.bob.checkpoint=tiny:solver",
    "policies.alice.checkpoint=tiny:solver",
    "policies.bob.adapter={'rank': 4}",
  ]
  assert read(*shared).backbones == {"alice": ("alice",), "bob": ("bob",)}
  both = (*shared, "policies.alice.adapter={'rank': 4}")
  assert read(*both).backbones == {"alice+bob": ("alice", "bob")}
  frozen = (*shared, "policies.alice.frozen=True")
  assert read(*frozen).backbones == {"bob+alice": ("bob", "alice")}
  read(*both, "policies.bob.optimizer.learning_rate=1.0")
  [line] = lines(read, *both, "policies.bob.optimizer.weight_decay=1.0")
  assert line == (
    "policies.bob.optimizer.weight_decay: 1.0 is not the 0.01 of 'alice', "
    "with which it shares the weights of 'tiny:solver'; write that, or give "
    "one of the two a copy of the checkpoint"
  )
  [line] = lines(read, *frozen, "policies.alice.engine.num_slots=3")
  assert line.startswith("policies.alice.engine.num_slots: 3 is not the 32 ")
  # A reference scores in the others' numerics, whose name it may repeat.
  near = (*frozen, kept_near("bob", reference="alice"))
  said = "policies.alice.compute_dtype=bfloat16"
  read(*near, "policies.bob.compute_dtype=bfloat16", said)
  read(*near, "policies.bob.compute_dtype=bfloat16")
  [line] = lines(read, *near, said)
  assert line.startswith("policies.alice.compute_dtype: 'bfloat16' is not the ")
  read(*both, "policies.bob.update_every=2")  # when it is updated is its own
  [line] = lines(read, *shared, "policies.bob.adapter={'targets': ('q', 'q')}")
  assert line.startswith("policies.bob.adapter.targets: ")


def test_distillation(read):
  """By the distance alone; what rewards drive has then no effect."""
  loss = (
    read(TEACHER, kept_near("bob", reward_weight=0, kl="k2"))
    .policies["bob"]
    .loss
  )
  assert (loss.reward_weight, loss.kl_weight, loss.kl) == (0, 0.1, "k2")
  [line] = lines(read, TEACHER, kept_near("bob", reward_weight=0, kl="k1"))
  assert fits(line, "policies.bob.loss.kl: 'k1' has no gradient on average…")
  [line] = lines(
    read, TEACHER, kept_near("bob", reward_weight=0, clip_high=0.3)
  )
  assert line == (
    "policies.bob.loss.clip_high: has no effect with loss.reward_weight=0; "
    "remove it"
  )


def test_an_agents_part_in_the_loss(read):
  shared = ("policies.alice.checkpoint=x", "agents.verifier.policy=alice")
  raw = copy.deepcopy(RAW)
  del raw["policies"]["bob"]
  config = read(
    *shared,
    "agents.solver.train=false",
    "agents.verifier.loss_weight=2",
    raw=raw,
  )
  assert not config.agents["solver"].train
  [line] = lines(
    read,
    *shared,
    "agents.solver.train=false",
    "agents.solver.loss_weight=2",
    raw=raw,
  )
  assert line == (
    "agents.solver.loss_weight: has no effect with train=False; remove it"
  )
  assert lines(
    read,
    "policies.bob.frozen=true",
    "agents.verifier.train=false",
    "agents.verifier.loss_weight=2",
  ) == [
    "agents.verifier.train: has no effect with policies.bob.frozen=True; "
    "remove it",
    "agents.verifier.loss_weight: has no effect with policies.bob.frozen=True; "
    "remove it",
  ]


def test_alternating_updates(read):
  config = read("policies.bob.update_every=3", "policies.bob.update_phase=2")
  assert config.policies["bob"].update_phase == 2
  [line] = lines(
    read, "policies.bob.update_every=2", "policies.bob.update_phase=2"
  )
  assert fits(line, "policies.bob.update_phase: 2 would never come…every=2")


def test_modes_need_different_things(read):
  frozen = ("policies.alice.frozen=true", "policies.bob.frozen=true")
  [line] = lines(read, *frozen)
  assert line.startswith(
    "policies: all are frozen or remote, so nothing would be trained"
  )
  greedy = "agents.solver.sampling.temperature=0"
  assert read(*frozen, greedy, mode="eval").trained == ()
  [line] = lines(read, "eval.num_tasks=0", mode="eval")
  assert line.startswith("eval.num_tasks: 0 evaluates nothing")


def test_sft_needs_demonstrations(read):
  [line] = lines(read, mode="sft")
  assert line == (
    "data.sources.own.name: 'own_team.simple' has no demonstrations; define "
    "it, as --mode=sft needs it"
  )
  arithmetic = "data.sources.own.name=arithmetic"
  assert read(arithmetic, mode="sft").sft.steps == 500
  [line] = lines(read, arithmetic, "sft.options.solver_nois=0", mode="sft")
  assert line.endswith("did you mean 'solver_noise'?")


def test_all_faults_at_once(read):
  found = lines(read, "steps=0", "sed=3", "eval.k=x")
  assert {line.partition(":")[0] for line in found} == {
    "eval.k",
    "steps",
    "sed",
  }
  found = lines(read, "orchestra.name=x", "advantage.name=y")
  assert [line.partition(":")[0] for line in found] == [
    "advantage.name",
    "orchestra.name",
  ]


def test_nan_is_refused():
  raw = copy.deepcopy(RAW)
  raw["rollout"] = {"max_failed": float("nan")}
  with pytest.raises(ConfigError, match=r"^rollout.max_failed: nan is out of"):
    config_lib.build(raw)


# -- overrides and files -------------------------------------------------------


def test_overrides_are_typed(read):
  config = read(
    "policies.alice.optimizer.learning_rate=1e-3",
    "policies.alice.optimizer.warmup_steps=1_000",
    "policies.alice.row_buckets=[256,1024]",
    "policies.bob.frozen=true",
    "policies.bob.checkpoint=/some/where=else",
    "agents.solver.invalid_penalty=1",
    "eval.sampling.temperature=0",
    "orchestra.options.max_loops=3",
  )
  alice, bob = config.policies["alice"], config.policies["bob"]
  assert alice.optimizer.learning_rate == 1e-3
  assert alice.optimizer.warmup_steps == 1000
  assert alice.row_buckets == (256, 1024)
  assert bob.frozen is True
  assert bob.checkpoint == "/some/where=else"
  assert isinstance(config.agents["solver"].invalid_penalty, float)
  assert config.eval.sampling == config_lib.Sampling(temperature=0.0)
  assert config.orchestra.options == {"max_loops": 3}


def test_a_key_of_a_group_changes_no_other(read):
  """Defaults of the place stay, where they are not those of the kind."""
  mesh = read("placement.rollout_mesh.tensor=2").placement.rollout_mesh
  assert mesh == dataclasses.replace(
    config_lib.Placement().rollout_mesh, tensor=2
  )
  assert mesh != config_lib.Mesh(tensor=2)


@pytest.mark.parametrize("key", ["steps", "health.slow_floor_s"])
def test_numbers_beyond_all_bounds(read, key):
  (line,) = lines(read, f"{key}={10**400}")
  assert "is out of range" in line and len(line) < 250


@pytest.mark.parametrize("text, said", [("{", "is no JSON"), ("[1]", "a list")])
def test_a_broken_config_json(tmp_path, text, said):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ConfigError, match=said):
    config_lib.read(tmp_path / "config.json", ["steps=3"])


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=3", ".steps=3"])
def test_override_syntax(read, text):
  assert lines(read, text) == [f"override {text!r}: write --config.a.b=value"]


def test_override_below_a_value(read):
  assert lines(read, "orchestra.name.x=3") == [
    "orchestra.name.x: 'name' is a value, not a group of keys"
  ]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("x = 1", ":1: AttributeError: module…no attribute 'get_config'"),
    ("def get_config(:", ":1: SyntaxError: invalid syntax…"),
    ("import nowhere", ":1: ModuleNotFoundError: No module named 'nowhere'"),
    ("def get_config():\n  return 1 / 0", ":2: ZeroDivisionError:…"),
    (
      "def get_config():\n  return {'a': {'x': 1, 'y': 2, 'x': 3}}",
      ":2: 'x' is written twice in one dict; rename or remove one",
    ),
  ],
)
def test_broken_file(write, text, expected):
  path = write(text)
  with pytest.raises(ConfigError) as error:
    config_lib.read(path)
  assert fits(str(error.value), f"{path}{expected}"), error.value


def test_file_that_returns_something_else(write):
  with pytest.raises(ConfigError, match="gives a list; write keys"):
    config_lib.read(write("def get_config():\n  return []"))


def test_top_p_trains_where_weights_correct_for_it(read):
  config = read(
    "agents.solver.sampling.top_p=0.9", "policies.alice.loss.importance=token"
  )
  assert config.policies["alice"].loss.importance_bound == 2
  read(
    "policies.bob.loss.importance=token", "policies.bob.old_logprobs=learner"
  )


@pytest.mark.parametrize(
  ("loss", "key", "why"),
  [
    ({"importance": "rejection"}, "importance", "'rejection' rejects nothing"),
    (
      {"importance": "sequence", "importance_bound": 3.0},
      "importance_bound",
      "has no effect",
    ),
  ],
)
def test_factors_of_what_top_p_keeps_have_no_bound(read, loss, key, why):
  top_p = "agents.solver.sampling.top_p=0.9"
  given = f"policies.alice.loss={loss}"
  [line] = lines(read, top_p, given)
  assert fits(
    line,
    f"policies.alice.loss.{key}: {why} with old_logprobs='sampler'…"
    "old_logprobs='learner'",
  ), line
  read(top_p, given, "policies.alice.old_logprobs=learner")


def test_what_needs_groups_and_what_does_not(read):
  alone = "data.group_size=1"
  read(alone, "advantage={'name': 'rae'}")
  read(alone, "advantage={'singleton': 'raw'}")
  entropy = [f"policies.{n}.loss.entropy_weight=0.1" for n in ("alice", "bob")]
  read(alone, *entropy)
  [line] = lines(read, alone, entropy[0])
  assert fits(line, "data.group_size: 1 leaves 'bob' nothing to learn from…")
  [line] = lines(read, "data.resample=1", "advantage={'name': 'rae'}")
  assert fits(line, "data.resample: with advantage.name='rae' groups whose…")


@pytest.mark.parametrize("name", ["missing.py", "own_team", "notes.txt"])
def test_no_such_file(tmp_path, name):
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(ConfigError, match="no such file; name a Python file"):
    config_lib.read(tmp_path / name)


def test_import_that_fails_inside_a_module_is_not_hidden():
  match = r"'own_team.broken' fails at .*broken.py:1: Module.*own_team\.nowhere"
  with pytest.raises(ConfigError, match=match):
    config_lib.load_module("environments", "own_team.broken")


# -- the whole -----------------------------------------------------------------


def test_plain_data_and_back(read):
  config = read("policies.alice.row_buckets=[1024]", "eval.k=4")
  plain = json.loads(json.dumps(config_lib.to_dict(config)))
  assert config_lib.build(plain) == config
  assert config_lib.flatten(plain)["policies.alice.row_buckets"] == [1024]


def test_table_names_are_the_tables():
  from drmas_jax import advantages, losses

  estimators = config_lib.table_names("advantages", "ESTIMATORS")
  assert estimators == tuple(advantages.ESTIMATORS)
  assert config_lib.table_names("losses", "LOSSES") == tuple(losses.LOSSES)
  assert config_lib.table_names("losses", "KL") == tuple(losses.KL)


def test_check_is_light(root, tmp_path):
  raw = copy.deepcopy(RAW) | {
    "data": {"sources": {"own": {"name": "own_team.simple"}}}
  }
  code = (
    "import json, sys; from drmas_jax import config as c; "
    "c.check(c.build(json.load(sys.stdin))); print(*sys.modules)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    input=json.dumps(raw),
    env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"},
    capture_output=True,
    text=True,
    check=True,
  )
  loaded = set(done.stdout.split())
  assert "drmas_jax.orchestras.math" in loaded
  assert not loaded & {"jax", "flax", "orbax", "transformers", "tensorflow"}


def _kinds(cls):
  yield cls
  for hint in config_lib._hints(cls).values():
    for kind in [hint, *getattr(hint, "__args__", ())]:
      if dataclasses.is_dataclass(kind):
        yield from _kinds(kind)


def test_every_key_is_read(root):
  package = root / "drmas_jax"
  read = {
    node.attr
    for path in package.rglob("*.py")
    if path != package / "config.py"
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute)
  }
  keys = {
    f"{kind.__name__}.{field.name}"
    for kind in _kinds(config_lib.Config)
    if kind is not config_lib.Mesh  # read as a whole, by its axes
    for field in dataclasses.fields(kind)
    if field.name not in read
  }
  assert not keys, "accepted, but without effect"
