"""`--mode=check`: one task through the team, without weights.

    python -m drmas_jax.main --config my_team/config.py --mode=check

Orchestra, prompts, parsers, environment and reward are the real ones. What the
policies say is scripted: the examples of an agent's role in turns or, where it
has none, the first of a few guesses (the gold answer within the role's tags, in
a box, alone) that its parser finds valid. Nothing is fetched, and no weights
are read. What is not on this machine is named, and something stands in for it:
bytes for a tokenizer, a made-up task for data, a made-up passage for a
retriever.
"""

import collections
import dataclasses
import os
import pathlib
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from drmas_jax import (
  backbone,
  building,
  data,
  folders,
  placement,
  prompts,
  rewards,
  rollout,
  usercode,
)
from drmas_jax.agents.agent import after_reasoning
from drmas_jax.checkpoint import SavedPolicy
from drmas_jax.config import Config, ConfigError
from drmas_jax.models import weights
from drmas_jax.sampler import Completion, Request
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Agent, Episode, Fault, Group, RunError, Task, Turn

# Bytes that a token of ordinary text has, about.
_BYTES = 4
_MAX_LENGTH = 1 << 24  # of a policy whose limit nobody here knows
_CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PASSAGES = (
  {"id": "0", "contents": '"An example"\nThis stands for what is found.'},
)


def main(config: Config, start: float) -> int:
  """Prints what becomes of the first task; returns the exit code.

  Args:
    config: checked.
    start: of the process, on the clock of `time.monotonic`.

  Returns:
    0, also where something is not on this machine; 2 where the config, the
    team's code, or an episode is at fault.
  """
  os.environ["HF_HUB_OFFLINE"] = "1"  # read when its library loads
  missing: list[str] = []
  try:
    fault = _check(config, missing)
  except (RunError, ValueError) as e:
    fault = str(e)
  seconds = time.monotonic() - start
  if fault:
    print(f"drmas_jax: {fault}", file=sys.stderr)
    return 2
  if missing:
    print(f"\n{len(missing)} thing(s) are not here; a run here would stop at:")
    print("\n".join(f"  {line}" for line in missing))
  print(f"\nchecked in {seconds:.1f} s: the task was played to its end")
  return 0


def _check(config: Config, missing: list[str]) -> str:
  """Prints all but the last lines; returns the fault, if there is one."""
  _print_plan(config, missing)
  task = _task(config, missing)
  tokenizers = _tokenizers(config, missing)
  played = _with_passages(_with_stand_ins(config, tokenizers), missing)
  print(
    f"\ntask {task.source}[{task.index}]\n  question: {task.question}\n"
    f"  answer: {task.answer!r}"
  )
  team = rollout.Team(played)
  script = _Script(team, task)
  samplers = {n: _Sampler(t, script) for n, t in tokenizers.items()}
  size = played.data.group_size if team.scores_groups else 1
  group = Group(task, [Episode(task, i) for i in range(size)])
  player = rollout.Rollout(team, samplers, played)
  shown = _Shown(config, played, tokenizers, script)
  try:
    rollout.Episodes(player).collect([group], None)
  except RunError as e:
    for turn in group.episodes[0].turns:
      shown.turn(turn)
    for sampler in samplers.values():
      shown.unheard(sampler.asked, group.episodes[0])
    return str(e)
  finally:
    player.close()
  episode = group.episodes[0]
  for turn in episode.turns:
    shown.turn(turn)
  if episode.fault is not None:
    return f"the episode is lost: {episode.fault.kind}: {episode.fault.message}"
  _print_outcome(group, config)
  return ""


# -- what is here --------------------------------------------------------------


def _folder(checkpoint: str) -> pathlib.Path:
  """With tokenizer and config.json, if it is on this machine.

  Raises:
    ValueError: it is not.
  """
  if checkpoint.startswith("run:"):
    checkpoint = SavedPolicy.parse(checkpoint).checkpoint
  if checkpoint.startswith("tiny:"):
    return backbone.checkpoint_folder(checkpoint)
  return folders.here(checkpoint)


def _print_plan(config: Config, missing: list[str]) -> None:
  models = {}
  for name, policy in sorted(config.policies.items()):
    if policy.remote is not None:
      print(f"{name}: {policy.remote.model} at {policy.remote.base_url}")
      continue
    print(f"{name}: {policy.checkpoint}")
    try:
      known = weights.public_sizes(policy.checkpoint)
      models[name] = known or weights.read_config(_folder(policy.checkpoint))
    except ValueError as e:
      missing.append(f"policies.{name}.checkpoint={policy.checkpoint!r}: {e}")
  if len(models) < sum(map(len, config.backbones.values())):
    print("no plan of the devices without the sizes of all policies")
    return
  try:
    plan = placement.plan(config, models, train=bool(config.trained))
  except ConfigError as e:
    missing.append(f"devices: {textwrap.indent(str(e), '  ').strip()}")
    return
  print(placement.describe(plan) + "\n" + placement.table(plan.memory))
  for name, layout in plan.layouts.items():
    print(
      f"  {name}: updates on devices {layout.train}, samples on "
      f"{', '.join(map(str, layout.rollout))}"
    )


def _task(config: Config, missing: list[str]) -> Task:
  """The first one of the stream, of the sources that are here."""
  sources = {}
  for key, source in config.data.sources.items():
    where = f"data.sources.{key}"
    try:
      if "://" in str(source.options.get("data_dir")):
        raise ConfigError(f"{where}: is in a bucket; a run copies it")
      sources[key] = building.make_source(where, key, source)
      print(f"{where}: {len(sources[key])} rows")
    except ConfigError as e:
      missing.append(textwrap.shorten(str(e), 160, placeholder=" .."))
  if sources:
    return data.Stream(sources, config.seed).tasks(0, 1)[0]
  key, source = next(iter(config.data.sources.items()))
  print(f"data.sources.{key}: a made-up task stands in")
  info = dict.fromkeys(source.options.get("info") or (), "an example")
  return Task(key, 0, 0, "What is two plus two?", "4", info)


def _tokenizers(
  config: Config, missing: list[str]
) -> dict[str, "Tokenizer | _Bytes"]:
  """Of the policies that agents have."""
  found: dict[str, Tokenizer | _Bytes] = {}
  for name in sorted({agent.policy for agent in config.agents.values()}):
    policy, why = config.policies[name], "it is remote"
    if policy.remote is None:
      try:
        folder = _folder(policy.checkpoint)
        found[name] = Tokenizer.load(folder, policy.chat_template_kwargs)
        continue
      except ValueError as e:
        why = "it is not here"
        line = f"policies.{name}.checkpoint={policy.checkpoint!r}: {e}"
        if line not in missing:
          missing.append(line)
    print(
      f"{name}: bytes and a ChatML template stand in for its tokenizer, as "
      f"{why}; tokens are estimates, of {_BYTES} bytes each"
    )
    found[name] = _Bytes.make()
  return found


class _Bytes(Tokenizer):
  """Stands in for a tokenizer that is not here."""

  @classmethod
  def make(cls) -> "_Bytes":
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({text: i for i, text in enumerate(vocabulary)}, [])
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=False
    )
    inner.decoder = decoders.ByteLevel()
    hf = transformers.PreTrainedTokenizerFast(
      tokenizer_object=inner,
      eos_token="<|im_end|>",
      additional_special_tokens=["<|im_start|>"],
      chat_template=_CHATML,
    )
    return cls(hf)


def _with_stand_ins(
  config: Config, tokenizers: Mapping[str, Tokenizer]
) -> Config:
  """Limits in bytes where these stand in for tokens; remote policies as if
  they were here."""
  bytes_of = {n for n, t in tokenizers.items() if isinstance(t, _Bytes)}
  policies = dict(config.policies)
  for name in bytes_of:
    policy, length = policies[name], _MAX_LENGTH
    if policy.remote is None:
      length = policy.engine.max_length * _BYTES
    engine = dataclasses.replace(
      policy.engine, max_length=length, prefill_buckets=()
    )
    policies[name] = dataclasses.replace(policy, remote=None, engine=engine)
  agents = {
    name: dataclasses.replace(
      agent,
      max_tokens=agent.max_tokens * _BYTES,
      max_prompt_tokens=agent.max_prompt_tokens * _BYTES,
    )
    if agent.policy in bytes_of
    else agent
    for name, agent in config.agents.items()
  }
  return dataclasses.replace(config, policies=policies, agents=agents)


def _with_passages(config: Config, missing: list[str]) -> Config:
  """A made-up passage in place of an index or a server."""
  retriever = config.environment.options.get("retriever")
  if not isinstance(retriever, Mapping):
    return config
  kind = retriever.get("kind", "bm25")
  if kind == "memory" or "." in kind:
    return config
  print(f"retriever {kind}: a made-up passage stands in for what it would find")
  for key in ("corpus", "encoder"):
    path = retriever.get(key)
    if path and not pathlib.Path(path).expanduser().exists():
      missing.append(
        f"environment.options.retriever.{key}={path!r}: is not on this machine"
      )
  memory = {"kind": "memory", "passages": f"{__name__}:PASSAGES"}
  environment = dataclasses.replace(
    config.environment,
    options={**config.environment.options, "retriever": memory},
  )
  return dataclasses.replace(config, environment=environment)


# -- what is said --------------------------------------------------------------


class _Script:
  """The completions of a team, whatever it is asked."""

  def __init__(self, team: rollout.Team, task: Task):
    self._team = team
    golds = task.answer if isinstance(task.answer, list) else [task.answer]
    self._gold = str(next(iter(golds), ""))
    self._calls: collections.Counter[str] = collections.Counter()
    self.origin: dict[str, str] = {}  # by agent, where its completions are from

  def next(self, agent: str) -> str:
    """What an agent says at its next call."""
    role = self._team.members[agent].role
    call = self._calls[agent]
    self._calls[agent] += 1
    if role.examples:
      self.origin[agent] = "an example of its role"
      example = role.examples[call % len(role.examples)]
      return example.replace("{answer}", self._gold)
    return self._guess(agent, role)

  def _guess(self, agent: str, role: Agent) -> str:
    guesses = [f"<{tag}>{self._gold}</{tag}>" for tag in role.tags]
    guesses += [f"\\boxed{{{self._gold}}}", self._gold]
    options = self._team.members[agent].config.options
    with usercode.blaming(f"parsing a guess for {agent!r}", code=role.parse):
      for guess in guesses:
        if role.parse(guess, "stop", **options).valid:
          self.origin[agent] = "a guess that its parser takes"
          return guess
    self.origin[agent] = (
      "no guess is valid to its parser; give its Agent examples=(..)"
    )
    return guesses[0]


class _Sampler:
  """A `sampler.Sampler` that says what is scripted."""

  def __init__(self, tokenizer: Tokenizer, script: _Script):
    self.tokenizer, self._script = tokenizer, script
    self.engine = types.SimpleNamespace(
      key=None, max_concurrent_decodes=1, devices=frozenset()
    )
    self._queue: list[tuple[Request, Fault | None]] = []
    self.asked: list[Request] = []

  @property
  def num_requests(self) -> int:
    return len(self._queue)

  @property
  def busy(self) -> bool:
    return bool(self._queue)

  def submit(self, request: Request, fault: Fault | None = None) -> None:
    self.asked.append(request)
    self._queue.append((request, fault))

  def cancel(self, wanted: Callable[[Request], bool]) -> None:
    self._queue = [(r, f) for r, f in self._queue if not wanted(r)]

  def forget(self, position: int, episode: int) -> None: ...

  def dispatch(self) -> None: ...

  def harvest(self) -> list[Completion]:
    queue, self._queue = self._queue, []
    return [self._complete(*entry) for entry in queue]

  def _complete(self, request: Request, fault: Fault | None) -> Completion:
    text, ids, reason = "", np.zeros(0, np.int32), "fault"
    if fault is None:
      text, ids, reason = self._say(request)
    zeros = np.zeros(len(ids), np.float32)
    return Completion(request, ids, zeros, zeros, text, reason, 0, fault)

  def _say(self, request: Request) -> tuple[str, np.ndarray, str]:
    text, reason = self._script.next(request.kind), "stop"
    if len(self.tokenizer.encode(text)) > request.max_tokens:
      text = after_reasoning(text) or text  # it may go without saying
    prompt = self.tokenizer.decode(request.prompt_ids, control=True)
    if prompt.rstrip().endswith("<think>"):  # the template has opened it
      text = f"\n</think>\n{text}"
    end = request.closes(text) if request.closes else None
    if end is not None:
      text, reason = text[:end], "tag"
    ids = self.tokenizer.encode(text)
    if reason == "stop" and self.tokenizer.end_of_turn_id is not None:
      ids = np.append(ids, np.int32(self.tokenizer.end_of_turn_id))
    if len(ids) > request.max_tokens:
      ids, reason = ids[: request.max_tokens], "length"
      text = self.tokenizer.decode(ids)
    return text, ids, reason


# -- what is shown -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shown:
  """Prints turns.

  Attributes:
    config: as it was given, of which the limits are.
    played: with stand-ins, in whose units sequences are.
    tokenizers: by policy.
    script: that was played.
  """

  config: Config
  played: Config
  tokenizers: Mapping[str, Tokenizer]
  script: _Script

  def turn(self, turn: Turn) -> None:
    self._prompt(turn.agent, turn.prompt_ids)
    if turn.prompt_cut:
      print("  it was cut to fit")
    if turn.fault is not None:
      print(f"  no completion: {turn.fault.message}")
      return
    num = self._count(turn.policy, len(turn.completion_ids))
    print(
      f"  completion ({self.script.origin[turn.agent]}), {num} of at most "
      f"max_tokens={self.config.agents[turn.agent].max_tokens}, ended by "
      f"{turn.stop_reason!r}"
    )
    print(_quoted(turn.text))
    print("  read: " + ", ".join(_read(turn)))

  def unheard(self, asked: Sequence[Request], episode: Episode) -> None:
    """What was asked in an episode, and came to no turn."""
    heard = {turn.index for turn in episode.turns}
    for request in asked:
      _, number, turn = request.id
      if number == episode.index and turn not in heard:
        self._prompt(request.kind, request.prompt_ids)

  def _prompt(self, name: str, ids: np.ndarray) -> None:
    agent, played = self.config.agents[name], self.played.agents[name]
    policy, num = agent.policy, self._count(agent.policy, len(ids))
    limits = []
    if self.config.policies[policy].remote is None:
      most = prompts.limit(played, self.played.policies[policy].engine)
      limits = [
        f"at most {most // self._unit(policy)}",
        f"max_prompt_tokens={agent.max_prompt_tokens}",
        f"engine.max_length={self.config.policies[policy].engine.max_length}",
      ]
    print(f"\n{name}, played by {policy}")
    print(f"  prompt, {'; '.join([num, *limits])}")
    print(_quoted(self.tokenizers[policy].decode(ids, control=True)))

  def _unit(self, policy: str) -> int:
    return _BYTES if isinstance(self.tokenizers[policy], _Bytes) else 1

  def _count(self, policy: str, num: int) -> str:
    if self._unit(policy) == 1:
      return f"{num} tokens"
    return f"about {-(-num // _BYTES)} tokens"


def _read(turn: Turn) -> Iterator[str]:
  """What the parser made of a completion."""
  yield "valid" if turn.valid else "INVALID"
  if turn.reply.verdict is not None:
    yield f"verdict {turn.reply.verdict!r}"
  for name, value in turn.reply.labels.items():
    yield f"{name} {value:g}"
  yield f"text {turn.reply.text!r}"


def _quoted(text: str) -> str:
  return "\n".join(f"    | {line}" for line in text.split("\n"))


def _print_outcome(group: Group, config: Config) -> None:
  """Of the first episode of a group."""
  episode = group.episodes[0]
  outcome = episode.outcome
  print(f"\naction: {episode.action!r}")
  for asked, answer in episode.observations:
    print(f"act({asked!r}) -> {answer!r}")
  reward = outcome.reward
  if not isinstance(reward, Mapping):
    reward = {"the team": reward}
  for part, values in (("reward", reward), ("part", outcome.parts)):
    for name, value in values.items():
      print(f"{part} {name}: {value:g}")
  for turn, value in outcome.turn_rewards.items():
    print(f"reward of turn {turn}: {value:g}")
  print(f"success: {outcome.won}; answer that votes: {outcome.answer!r}")
  print(f"score of turns: {_scores(group, config)}")


def _scores(group: Group, config: Config) -> str:
  """With penalties; what an estimator would get."""
  penalties = {n: a.invalid_penalty for n, a in config.agents.items()}
  first = Group(group.task, group.episodes[:1])
  rows = rewards.row_scores([first], penalties)
  said: Sequence[str] = [
    f"{turn.index} {turn.agent} {score:g}"
    for turn, score in zip(rows.turns, rows.scores, strict=True)
  ]
  return ", ".join(said) or "none"
