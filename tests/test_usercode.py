"""What a user's own code raises is told by its file, its line and the task."""

import sys
import types as pytypes

import pytest
from test_rollout import Environment, play, two_turns, won

from drmas_jax import (
  building,
  coordinator,
  data,
  main,
  rollout,
  sft,
  training,
  usercode,
)
from drmas_jax import config as config_lib
from drmas_jax.types import (
  Agent,
  Outcome,
  Reply,
  TransientError,
  UserError,
  act,
  gather,
)

pytestmark = pytest.mark.quick


def boom():
  raise ZeroDivisionError("boom")


LINE = boom.__code__.co_firstlineno + 1
TASK = r"task s\[0\], episode 0"


def template(task, *said):
  return [{"role": "user", "content": str(task)}]


def parse(text, stop_reason):
  return Reply(text)


def failing(*args):
  boom()


def blamed(caught, doing, name):
  """The line that raised it, the task, and the user's own frames alone."""
  place, what, *frames = str(caught.value).splitlines()
  assert place == f"{usercode._shown(__file__)}:{LINE}: ZeroDivisionError: boom"
  assert what.startswith(f"  {doing}") and what.endswith("task s[0], episode 0")
  assert [f.split(" in ")[1].split(":")[0] for f in frames] == [name, "boom"]


def play_as(monkeypatch, run=two_turns, score=won, role=None, act_in=None):
  """As `play`, with a role and an `act` of one's own."""
  role = role or Agent({"default": template}, parse)

  class Acting(Environment):
    def act(self, task, action):
      return act_in(task, action)

  monkeypatch.setattr("test_rollout.Role", lambda: role)
  if act_in is not None:
    monkeypatch.setattr("test_rollout.Environment", Acting)
  return play(run, score, num_tasks=1, size=1)


def test_the_orchestra(monkeypatch):
  async def run(task, call):
    await gather(call("a", task), inner(task, call))

  async def inner(task, call):
    await call("b", task)
    boom()

  with pytest.raises(UserError) as caught:
    play_as(monkeypatch, run)
  blamed(caught, "running the orchestra", "inner")


def test_a_prompt(monkeypatch):
  role = Agent({"default": failing}, parse)
  with pytest.raises(UserError) as caught:
    play_as(monkeypatch, role=role)
  blamed(caught, "writing a prompt of 'a'", "failing")


def test_a_prompt_of_the_wrong_form(monkeypatch):
  """No line of the user's raised it: that of the template is named."""
  role = Agent({"default": lambda task: ["a text"]}, parse)
  with pytest.raises(UserError, match=f"usercode.py:.*TypeError(.|\n)*{TASK}"):
    play_as(monkeypatch, role=role)
  role = Agent({"default": lambda: []}, parse)
  with pytest.raises(UserError, match=r"usercode.py:.*takes 0 posit"):
    play_as(monkeypatch, role=role)


def test_a_parser(monkeypatch):
  role = Agent({"default": template}, failing)
  with pytest.raises(UserError) as caught:
    play_as(monkeypatch, role=role)
  blamed(caught, "parsing a turn of 'a'", "failing")
  role = Agent({"default": template}, lambda text, reason: text)
  with pytest.raises(UserError, match=r"usercode.py:.*write a types\.Reply"):
    play_as(monkeypatch, role=role)


async def late(*args):
  failing()


@pytest.mark.parametrize("kind", [failing, late])
def test_the_environment(monkeypatch, kind):
  """A plain function or a coroutine, in the other thread."""

  async def searching(task, call):
    return await act("x")

  frame = "failing"
  for doing, kwargs in (
    ("acting", {"run": searching, "act_in": kind}),
    ("scoring", {"score": kind}),
  ):
    with pytest.raises(UserError) as caught:
      play_as(monkeypatch, **kwargs)
    place, what, *frames = str(caught.value).splitlines()
    assert place.endswith(f"test_usercode.py:{LINE}: ZeroDivisionError: boom")
    assert what.startswith(f"  {doing}") and "s[0], episode 0" in what
    assert f" in {frame}: " in frames[-2]


@pytest.mark.parametrize("kind", [TransientError, TimeoutError, OSError])
def test_the_world_outside_loses_an_episode(monkeypatch, kind):
  async def score(task, episode):
    raise kind("cut")

  (group,), _ = play_as(monkeypatch, score=score)
  assert group.episodes[0].status == "failed"


@pytest.mark.parametrize(
  ("outcome", "wrong"),
  [
    (1.0, r"returned 1\.0; write a types\.Outcome"),
    (Outcome({"a": 1.0}), "returned no reward for b; write one for each"),
  ],
)
def test_a_reward_of_the_wrong_form(monkeypatch, outcome, wrong):
  def score(task, episode):
    return outcome

  with pytest.raises(UserError, match=f"usercode.py:.*{wrong}(.|\n)*{TASK}"):
    play_as(monkeypatch, score=score)


def test_what_an_orchestra_may_not_do(monkeypatch):
  """The line where it waits is named."""

  async def stranger(task, call):
    await inner(task, call)

  async def inner(task, call):
    await call("nobody", task)

  def plain(task, call):
    return "x"

  first = stranger.__code__.co_firstlineno
  with pytest.raises(UserError, match=f"usercode.py:{first + 4}: .*'nobody'"):
    play_as(monkeypatch, stranger)
  with pytest.raises(UserError, match=r"gave 'x'; write 'async def run'"):
    play_as(monkeypatch, plain)


def test_a_row(monkeypatch):
  class Rows:
    fingerprint = ""

    def __len__(self):
      return 1

    def __getitem__(self, index):
      return boom() if index else {"question": "?"}

  stream = data.Stream({"mine": Rows()}, 0)
  with pytest.raises(UserError, match=r"KeyError: 'answer'\n.*mine\[0\]"):
    stream.tasks(0, 1)
  monkeypatch.setattr(Rows, "__getitem__", failing)
  with pytest.raises(UserError, match=rf":{LINE}: Zero(.|\n)*mine\[0\]"):
    stream.tasks(0, 1)


@pytest.fixture
def module(monkeypatch):
  """A module of the user's, where all fails."""
  made = pytypes.ModuleType("own_pkg.module")
  made.make = lambda *args, **kwargs: failing()
  monkeypatch.setitem(sys.modules, "own_pkg", pytypes.ModuleType("own_pkg"))
  monkeypatch.setitem(sys.modules, "own_pkg.module", made)
  return made


def test_what_makes_a_data_set(module):
  source = config_lib.TrainSource(name="own_pkg.module")

  def make():
    return building.make_source("data.sources.mine", "mine", source)

  with pytest.raises(UserError, match=f":{LINE}: Zero(.|\n)*sources.mine"):
    make()
  module.make = lambda split: [{"question": "?"}]
  with pytest.raises(UserError, match=r"usercode.py:.*'fingerprint'"):
    make()


@pytest.mark.parametrize(
  ("made", "wrong"),
  [
    (failing, f"test_usercode.py:{LINE}: ZeroDivisionError: boom"),
    (lambda *_: {"solver": ["2"]}, "TypeError: it gave '2'; write pairs of"),
    (lambda *_: {"solver": [((), "2")]}, "TypeError: .*argument.*"),
  ],
)
def test_demonstrations(made, wrong):
  """And their prompts; a pair is one, so that nothing has to be imported."""
  role = Agent({"default": lambda task: template(task)}, parse)
  entry = pytypes.SimpleNamespace(
    template="default", max_prompt_tokens=8, max_tokens=8
  )
  shown = object.__new__(sft._Demonstrations)
  shown._makers = {"s": made}
  shown._config = pytypes.SimpleNamespace(sft=config_lib.Sft())
  shown._members = [
    pytypes.SimpleNamespace(name="solver", role=role, config=entry)
  ]
  task = data._task("s", [{"question": "?", "answer": "2"}], 0, 0)
  with pytest.raises(UserError, match=rf"{wrong}(.|\n)*s\[0\]"):
    shown.turns(task, None)


def test_what_makes_an_environment(module):
  raw = {
    "policies": {"p": {"checkpoint": "tiny:solver"}},
    "agents": {"solver": {"role": "math.solver", "policy": "p"}},
    "orchestra": {"name": "single"},
    "environment": {"name": "own_pkg.module"},
    "data": {"sources": {"arithmetic": {}}},
  }
  with pytest.raises(UserError, match=f":{LINE}: Zero(.|\n)*environment"):
    rollout.Team(config_lib.build(raw))


def test_the_step_is_given_up_on_all_hosts_alike(monkeypatch):
  """What failed on this host is what all raise, behind their exchange."""
  made = object.__new__(training.Training)
  made.config = config_lib.build(
    {
      "policies": {},
      "agents": {},
      "orchestra": {"name": "single"},
      "environment": {"name": "math"},
      "data": {"sources": {}},
    }
  )
  made.broken, made.keys = "", {"train": None}

  def collect(*args):
    raise UserError("my.py:3: boom")

  made.rollout = pytypes.SimpleNamespace(collect=collect)
  assert made._play([]) == ([], True)
  assert made.broken == "my.py:3: boom"


def test_the_command_says_so(monkeypatch, capsys, root):
  def broken(*args, **kwargs):
    raise UserError("my.py:3: KeyError: 'x'\n  scoring; task s[0]")

  monkeypatch.setattr(coordinator, "main", broken)
  code = main.main(["--config", str(root / "configs" / "math_tiny.py")])
  assert code == 3
  said = capsys.readouterr().err
  assert said == "drmas_jax: my.py:3: KeyError: 'x'\n  scoring; task s[0]\n"
