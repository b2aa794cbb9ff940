"""The command that shows a run's episodes in the terminal.

    python -m drmas_jax.show WORKDIR [--step N] [--task ID] [--agent NAME]
        [--worst N | --best N] [--success] [--invalid] [--truncated]
        [--eval] [--num N] [--full] [--width N] [--export FILE]

It reads transcripts (`transcripts.py`), of a run under way too; WORKDIR may be
in a bucket (gs://..). Without --step it shows the newest step that has what was
asked for, or all steps with --task and with --export. What is asked for in
several ways must be so in all of them.

--export writes the turns that would be shown as demonstrations for `--mode=sft`
(`datasets/sampled.py`), each once, and leaves out what is invalid, was cut by
its limit or has no token ids. A run writes as many groups of a step as
`logging.transcript_groups` says; for rejection sampling let it be all, with
`logging.transcripts_mb` to match.

Exit codes: 0 done; 2 a bad argument, or nothing to show (what there is instead
is said); 130 Ctrl-C.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from drmas_jax import transcripts, writers
from drmas_jax.datasets import sampled

Record = dict[str, Any]  # a line of transcripts
TurnRecord = dict[str, Any]

_TRAIN = "transcripts/*.jsonl"
_EVAL = "eval/step_*/transcripts*.jsonl"
_PROMPT, _COMPLETION, _ACTION = 600, 3000, 300  # characters before a fold
_NAMED = 8  # of a list of what there is
_LOOKS = {
  "": "",
  "head": "\x1b[1m",
  "name": "\x1b[1;36m",
  "good": "\x1b[32m",
  "bad": "\x1b[31m",
  "quiet": "\x1b[2m",
}
_PLAIN = "\x1b[0m"


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.show",
    description="Shows a run's episodes, or exports turns of them.",
    allow_abbrev=False,
  )
  parser.add_argument("workdir", help="of the run; gs://.. too")
  parser.add_argument("--step", type=int, help="of training, or of the weights")
  parser.add_argument("--task", metavar="ID", help="source[index], or index")
  parser.add_argument("--agent", metavar="NAME", help="its turns only")
  rank = parser.add_mutually_exclusive_group()
  for word, which in (("worst", "lowest"), ("best", "highest")):
    rank.add_argument(
      f"--{word}", type=int, metavar="N", help=f"those with the {which} reward"
    )
  parser.add_argument(
    "--success", action="store_true", help="episodes that succeeded"
  )
  parser.add_argument(
    "--invalid", action="store_true", help="turns that could not be read"
  )
  parser.add_argument(
    "--truncated", action="store_true", help="turns that their limit cut"
  )
  parser.add_argument(
    "--eval", action="store_true", help="of --mode=eval, and not of training"
  )
  parser.add_argument(
    "--num", type=int, help="most episodes; 3, and with --export all"
  )
  parser.add_argument(
    "--full", action="store_true", help="long texts in full length"
  )
  parser.add_argument("--width", type=int, help="columns; the terminal's")
  parser.add_argument(
    "--export", metavar="FILE", help="demonstrations for --mode=sft (.jsonl)"
  )
  return parser


# -- which ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Selection:
  """What is asked for; the default is everything.

  Attributes:
    step: of training, or of the weights.
    task: (source, or None for any; index).
    agent: whose turns.
    success: only episodes that succeeded.
    invalid, truncated: only turns that are.
  """

  step: int | None = None
  task: tuple[str | None, int] | None = None
  agent: str | None = None
  success: bool = False
  invalid: bool = False
  truncated: bool = False

  def __contains__(self, record: Record) -> bool:
    """Whether an episode is asked for."""
    task, of_turns = (
      record["task"],
      self.agent or self.invalid or self.truncated,
    )
    return (
      (self.step is None or record["step"] == self.step)
      and (not self.success or bool(record["success"]))
      and (not self.task or self.task[1] == task["index"])
      and (not self.task or self.task[0] in (None, task["source"]))
      and (not of_turns or bool(self.turns(record)))
    )

  def turns(self, record: Record) -> list[TurnRecord]:
    """Those of an episode that are asked for."""
    return [
      turn
      for turn in record["turns"]
      if self.agent in (None, turn["agent"])
      and not (self.invalid and turn["valid"])
      and not (self.truncated and turn["stop_reason"] != "length")
    ]


def parse_task(text: str) -> tuple[str | None, int]:
  """("gsm8k", 3) of "gsm8k[3]", (None, 3) of "3".

  Raises:
    ValueError: it is neither.
  """
  match = re.fullmatch(r"(?:(\w+)\[(\d+)\]|(\d+))", text)
  if not match:
    raise ValueError(
      f"--task={text}: write source[index], such as gsm8k[3], or an index"
    )
  return match[1], int(match[2] or match[3])


def ranked(
  records: Sequence[Record], selection: Selection, best: bool
) -> list[Record]:
  """Those with a reward, by it; of equal ones by the mean advantage of the
  turns that are asked for."""

  def worth(record: Record) -> tuple[float, float]:
    own = [t["advantage"] for t in selection.turns(record)]
    own = [a for a in own if a is not None]
    return _reward(record, selection.agent), sum(own) / max(1, len(own))

  rewarded = [r for r in records if r["reward"] not in (None, {})]
  return sorted(rewarded, key=worth, reverse=best)


def _reward(record: Record, agent: str | None) -> float:
  """The team's, the agent's, or the mean of all agents'."""
  reward = record["reward"]
  if not isinstance(reward, Mapping):
    return reward
  return reward.get(agent, sum(reward.values()) / len(reward))


def choose(
  records: Sequence[Record], selection: Selection, args: argparse.Namespace
) -> tuple[list[Record], int]:
  """The episodes to be shown, and how many there would be without --num."""
  found = [r for r in records if r in selection]
  everywhere = args.task or args.export or args.step is not None
  if found and not everywhere:
    newest = max(r["step"] for r in found)
    found = [r for r in found if r["step"] == newest]
  total, most = len(found), args.num or (None if args.export else 3)
  if args.worst or args.best:
    found = ranked(found, selection, best=bool(args.best))
    most = min(x for x in (args.worst, args.best, args.num) if x)
  return found[:most], total


# -- where ---------------------------------------------------------------------


def load(workdir: str, pattern: str) -> list[Record]:
  """The episodes of all files that match, in the order in which they were
  written.

  Raises:
    ValueError: a file is not as it should be, or a bucket cannot be read.
  """
  found = []
  for name, lines in _files(workdir, pattern):
    found += transcripts.read(lines, name)
  return found


def _files(workdir: str, pattern: str) -> Iterator[tuple[str, list[bytes]]]:
  """(name, lines) of each file. One that goes meanwhile was the oldest."""
  if "://" in workdir:
    from drmas_jax import folders  # loads jax

    for name, content in folders.contents(workdir, pattern):
      yield name, content.splitlines(keepends=True)
    return
  for path in sorted(pathlib.Path(workdir).expanduser().glob(pattern)):
    try:
      with open(path, "rb") as file:
        lines = file.readlines()
    except FileNotFoundError:
      continue
    yield str(path), lines


def there_is(records: Sequence[Record]) -> str:
  """Steps, tasks and agents, and how much of it is what can be asked for."""
  steps = sorted({r["step"] for r in records})
  tasks = dict.fromkeys(_task(r) for r in records)
  turns = [t for r in records for t in r["turns"]]
  counts = {
    "successes": sum(bool(r["success"]) for r in records),
    "invalid turns": sum(not t["valid"] for t in turns),
    "truncated turns": sum(t["stop_reason"] == "length" for t in turns),
  }
  return (
    f"there are {len(records)} episodes ("
    + ", ".join(f"{n} {what}" for what, n in counts.items())
    + f") of the steps {_named(steps)}, of the tasks {_named(tasks)}, with the "
    f"agents {_named(sorted({t['agent'] for t in turns}))}"
  )


def _named(items: Any) -> str:
  """The first few and the last."""
  names = [str(i) for i in items]
  if len(names) > _NAMED:
    names = [*names[: _NAMED - 1], "..", names[-1]]
  return ", ".join(names)


def _task(record: Record) -> str:
  return f"{record['task']['source']}[{record['task']['index']}]"


# -- how -----------------------------------------------------------------------


def visible(text: str) -> str:
  """Text that a terminal shows and does not obey.

  Control characters become their pictures, or <U+202E> where they have none;
  so do lone surrogates and what turns the direction of writing. Line ends stay.
  """
  return "".join(c if _harmless(c) else _picture(c) for c in text)


def _harmless(char: str) -> bool:
  if char in "\n\u200c\u200d":  # joiners belong to words and to emoji
    return True
  return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _picture(char: str) -> str:
  code = ord(char)
  if code < 0x20:
    return chr(0x2400 + code)
  return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


def _cells(char: str) -> int:
  """Columns that it takes."""
  if unicodedata.category(char) in ("Mn", "Me", "Cf"):
    return 0
  return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrap(text: str, width: int) -> list[str]:
  """Lines of at most `width` columns, broken behind a space where one is."""
  lines = []
  for line in text.split("\n"):
    start = used = place = 0
    space = -1  # behind the last one of this line
    while place < len(line):
      used += _cells(line[place])
      if used > width and place > start:
        end = space if space > start else place
        lines.append(line[start:end].rstrip(" "))
        start, used, space, place = end, 0, -1, end
        continue
      place += 1
      if line[place - 1] == " ":
        space = place
    lines.append(line[start:])
  return lines


class Page:
  """Writes lines; whatever they hold, and only it decides what a terminal is
  told.

  Args:
    stream: where to.
    width: columns.
    color: whether the terminal is told of looks.
    full: texts are not folded.
  """

  def __init__(
    self, stream: TextIO, width: int, color: bool = False, full: bool = False
  ):
    self._stream, self._width = stream, width
    self._color, self._full = color, full

  def say(self, text: str, look: str = "", margin: str = "") -> None:
    """Lines of text, all in one look, behind a margin."""
    on, off = (_LOOKS[look], _PLAIN) if self._color and look else ("", "")
    for line in wrap(visible(text), max(8, self._width - len(margin))):
      shown = f"{on}{line}{off}" if line else ""
      print(f"{margin}{shown}".rstrip(" "), file=self._stream)

  def quote(self, what: str, text: str, most: int) -> None:
    """What somebody said, under its name; its middle is left out where it has
    more than `most` characters."""
    self.say(what, "quiet", "  ")
    left, margin = len(text) - most, "  | "
    if self._full or left <= most // 10:  # not worth a fold
      self.say(text, margin=margin)
      return
    self.say(text[: most // 2], margin=margin)
    note = f".. {left} characters left out, --full shows them .."
    self.say(note, "quiet", margin)
    self.say(text[len(text) - (most - most // 2) :], margin=margin)


def show(page: Page, record: Record, turns: Sequence[TurnRecord]) -> None:
  """Prints an episode, with these of its turns in full."""
  kind = "evaluation of " if record["kind"] == "eval" else ""
  title = f"{kind}step {record['step']}  {_task(record)}"
  page.say(f"{title}  episode {record['episode']}", "head")
  for word in ("question", "answer"):
    text = _text(record["task"][word])
    page.say(f"{word:<9} {text}", margin="  ")
  chosen = {turn["index"] for turn in turns}
  for turn in record["turns"]:
    name = f"turn {turn['index']}  {turn['agent']}"
    if turn["index"] not in chosen:
      page.say(f"{name}  (not asked for)", "quiet")
      continue
    page.say(name, "name")
    _show_turn(page, turn)
  page.say("outcome", "name")
  page.quote("action", _text(record["action"]), _ACTION)
  if record["reward"] is None:
    page.say(f"{record['status']}{_why(record['fault'])}", "bad", "  ")
  else:
    won = record["success"]
    words = {"reward": record["reward"]} | (record["parts"] or {})
    word = "success" if won else "no success"
    page.say(f"{word}  {_numbers(words)}", "good" if won else "bad", "  ")
  page.say("")


def _show_turn(page: Page, turn: TurnRecord) -> None:
  page.quote("prompt", turn["prompt"], _PROMPT)
  page.quote("completion", turn["completion"], _COMPLETION)
  if turn["reply"] is not None:
    page.quote("as others see it", turn["reply"], _COMPLETION)
  parsed = [] if turn["verdict"] is None else [f"verdict {turn['verdict']}"]
  parsed += filter(None, [_numbers(turn["labels"] or {})])
  if parsed:
    page.say(f"parsed  {'  '.join(parsed)}", margin="  ")
  if not turn["valid"]:
    page.say(f"invalid{_why(turn['fault'])}", "bad", "  ")
  if turn["stop_reason"] == "length":
    page.say("cut by its limit", "bad", "  ")
  numbers = {
    "score": turn["score"],
    "advantage": turn["advantage"],
    "log-prob": turn["logprobs"] and turn["logprobs"]["mean"],
    "least": turn["logprobs"] and turn["logprobs"]["min"],
    "log-prob gap": turn["logprob_gap"],
  }
  page.say(_numbers(numbers), margin="  ")
  told = [
    f"policy {turn['policy']} at update {turn['policy_version']}",
    f"{turn['prompt_tokens']} + {turn['completion_tokens']} tokens",
    f"ended by {turn['stop_reason']}",
  ]
  if turn["call"]:
    told.append(f"remote: {_numbers(turn['call'])}")
  page.say(", ".join(told), "quiet", "  ")


def _why(fault: Mapping[str, str] | None) -> str:
  return f": {fault['kind']}: {fault['message']}" if fault else ""


def _text(value: Any) -> str:
  if isinstance(value, str):
    return value
  return json.dumps(value, ensure_ascii=False)


def _numbers(values: Mapping[str, Any]) -> str:
  """ "reward 1  advantage -0.25", of those that there are."""
  return "  ".join(
    f"{name} {_number(value)}"
    for name, value in values.items()
    if value is not None
  )


def _number(value: Any) -> str:
  if isinstance(value, Mapping):
    return f"({_numbers(value)})"
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _page(args: argparse.Namespace) -> Page:
  """For stdout; in colors on a terminal, unless NO_COLOR says no."""
  sys.stdout.reconfigure(errors="backslashreplace")
  dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
  width = args.width or shutil.get_terminal_size((100, 24)).columns
  color = sys.stdout.isatty() and not dumb
  return Page(sys.stdout, width, color, args.full)


# -- demonstrations ------------------------------------------------------------


def export(
  records: Sequence[Record], selection: Selection, path: pathlib.Path
) -> str:
  """Writes the turns that are asked for as demonstrations.

  Args:
    records: of which.
    selection: what is asked for.
    path: of the file, which is replaced.

  Returns:
    What is in it, in one line.

  Raises:
    ValueError: nothing is left to be written.
  """
  rows: dict[str, dict[str, Any]] = {}
  without: collections.Counter[str] = collections.Counter()
  for record in records:
    for turn in selection.turns(record):
      row = _demonstration(record, turn)
      same = [row[k] for k in ("agent", "prompt_ids", "completion_ids")]
      if fault := _unfit(turn):
        without[fault] += 1
      elif rows.setdefault(json.dumps(same), row) is not row:
        without["the same again"] += 1
  left = ", ".join(f"{n} {why}" for why, n in without.items())
  if not rows:
    raise ValueError(f"--export={path}: nothing to write; left out: {left}")
  path.parent.mkdir(parents=True, exist_ok=True)
  writers.write_text(path, "".join(map(json_line, rows.values())))
  agents = collections.Counter(row["agent"] for row in rows.values())
  said = ", ".join(f"{n} of {agent}" for agent, n in sorted(agents.items()))
  return (
    f"{path}: {len(rows)} demonstrations ({said}) from {len(records)} episodes"
    + (f"; left out: {left}" if left else "")
  )


def json_line(row: Mapping[str, Any]) -> str:
  """Lone surrogates stay escapes."""
  return json.dumps(row) + "\n"


def _unfit(turn: TurnRecord) -> str | None:
  """Why a turn is no demonstration, if it is none."""
  if not (turn["prompt_ids"] and turn["completion_ids"]):
    return "without token ids"
  if turn["stop_reason"] == "length":
    return "cut"
  return None if turn["valid"] else "invalid"


def _demonstration(record: Record, turn: TurnRecord) -> dict[str, Any]:
  """A line of `datasets.sampled`, and where it is from."""
  task = record["task"]
  return {
    "format": sampled.FORMAT,
    "agent": turn["agent"],
    "prompt": turn["prompt"],
    "completion": turn["completion"],
    "prompt_ids": turn["prompt_ids"],
    "completion_ids": turn["completion_ids"],
    "question": task["question"],
    "answer": task["answer"],
    "source": task["source"],
    "index": task["index"],
    "step": record["step"],
    "episode": record["episode"],
    "turn": turn["index"],
    "reward": record["reward"],
    "advantage": turn["advantage"],
  }


# -- all of it together --------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
  lows = {"num": 1, "worst": 1, "best": 1, "width": 20}
  for flag, low in lows.items():
    value = getattr(args, flag)
    if value is not None and value < low:
      raise ValueError(f"--{flag}={value}: write a number >= {low}")
  if args.export and (args.invalid or args.truncated):
    raise ValueError(
      "--export: leaves out what is invalid or truncated; remove --invalid and "
      "--truncated"
    )


def _load(args: argparse.Namespace) -> list[Record]:
  """Of training; of evaluations if asked for or if there is nothing else."""
  records = [] if args.eval else load(args.workdir, _TRAIN)
  records = records or load(args.workdir, _EVAL)
  if not records:
    raise ValueError(
      f"{args.workdir}: no episodes in {'' if args.eval else f'{_TRAIN} and '}"
      f"{_EVAL}; name a workdir in which a run has done a step, with "
      "logging.transcripts_mb and logging.transcript_groups above 0"
    )
  return records


def _run(args: argparse.Namespace) -> None:
  _check(args)
  task = parse_task(args.task) if args.task else None
  picks = {k: getattr(args, k) for k in ("success", "invalid", "truncated")}
  selection = Selection(args.step, task, args.agent, **picks)
  records = _load(args)
  found, total = choose(records, selection, args)
  if not found:
    raise ValueError(f"nothing like that; {there_is(records)}")
  if args.export:
    print(export(found, selection, pathlib.Path(args.export)))
    print(
      'for --mode=sft: data=dict(sources=dict(best=dict(name="sampled", '
      f"options=dict(path={args.export!r}))))"
    )
    if found[0]["kind"] == "eval":
      print("NOTE: they are of an evaluation; its sets are no longer held out")
    return
  page = _page(args)
  for record in found:
    show(page, record, selection.turns(record))
  if total > len(found):
    page.say(f"{len(found)} of {total} episodes (--num N)", "quiet")


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args = _parser().parse_args(argv)
  try:
    _run(args)
    sys.stdout.flush()
  except BrokenPipeError:  # whoever reads has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (ValueError, OSError) as e:
    print(f"drmas_jax.show: {visible(str(e))}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
