r"""Prepares and shows data sets.

    python -m drmas_jax.datasets
    python -m drmas_jax.datasets prepare gsm8k math500 --data_dir DIR
    python -m drmas_jax.datasets show math math500 --data_dir DIR
    python -m drmas_jax.datasets show my.jsonl --question problem
    python -m drmas_jax.datasets show sums --option num_terms=3

`prepare` builds public sets into the cache. `show` prints, for each split,
counts, lengths, kinds of answers, duplicates, golds that do not grade correct
against themselves (of math sets), and first rows; then the questions that two
of the shown splits share. Exit code 2: a bad argument or bad rows.
"""

import argparse
import ast
import collections
import functools
import inspect
import itertools
import pathlib
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from drmas_jax import config
from drmas_jax.datasets import own, public
from drmas_jax.grading import math as grading

_NAMED = 5  # of the rows in a list of them
_QUANTILES = {"least": 0, "quarter": 0.25, "half": 0.5, "95 %": 0.95, "most": 1}


class _Shown(NamedTuple):
  """A split and all its rows; `forms` are its questions, to be compared."""

  name: str
  fingerprint: str
  questions: list[str]
  answers: list[Any]
  forms: dict[str, list[str]]


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.datasets",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "command", nargs="?", default="show", choices=("prepare", "show")
  )
  parser.add_argument(
    "names",
    nargs="*",
    metavar="NAME",
    help="a data set's name, as in a config; or, to show your own, a .jsonl or "
    ".parquet file or my_pkg.my_module:NAME, with {split} in it if it has "
    "train and test. None: a list of the sets",
  )
  parser.add_argument(
    "--split", action="append", help="only this one; may be repeated"
  )
  options = parser.add_argument_group("options of the data sets")
  options.add_argument("--data_dir", help="folder, gs://.. or hub")
  options.add_argument("--cache_dir", help="where built sets are kept")
  options.add_argument("--question", help="its field in rows of your own")
  options.add_argument("--answer", help="its field in rows of your own")
  options.add_argument(
    "--option", action="append", default=[], metavar="KEY=VALUE", help="others"
  )
  show = parser.add_argument_group("show")
  show.add_argument("--rows", type=int, default=2, help="first rows to print")
  show.add_argument(
    "--tokenizer", metavar="FOLDER", help="also count a checkpoint's tokens"
  )
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  try:
    if not args.names:
      _list()
    elif args.command == "prepare":
      _prepare(args)
    else:
      _show(args)
  except ValueError as e:  # a ConfigError is one
    print(f"drmas_jax.datasets: {e}", file=sys.stderr)
    return 2
  return 0


def _list() -> None:
  print("Public sets, built from files or from the Hugging Face hub:")
  for name, row in public.SETS.items():
    print(f"  {name:14}{', '.join(row.splits):13}{row.repo:31}{row.about}")
  print("Generated: arithmetic, sums, two_hop (train, test).")
  print("Your own rows: own.")


# -- from names to sources -----------------------------------------------------


def _sources(args: argparse.Namespace) -> Iterable[tuple[str, Any]]:
  """(what it is called, source) of every split asked for and there."""
  options = _options(args)
  for name in args.names:
    make, splits = _maker(name)
    if args.split and not any(splits):
      raise ValueError(
        f"--split: {name} is one file or object; leave it out, or write "
        "{split} in the name"
      )
    found, missing = 0, []
    for split in args.split or splits:
      try:
        inspect.signature(make).bind(split, **options)
      except TypeError as e:
        allowed = ", ".join(list(inspect.signature(make).parameters)[1:])
        raise ValueError(f"{name}: {e}; its options are {allowed}") from None
      label = f"{name} {split}".strip()
      try:
        source = make(split, **options)
      except ValueError as e:
        said = str(e)
        missing.append(said if said.startswith(label) else f"{label}: {said}")
        continue
      found += 1
      yield label, source
    if missing and (args.split or not found):
      raise ValueError("\n".join(missing))
    for text in missing:
      print(text, file=sys.stderr)


def _maker(name: str) -> tuple[Callable[..., Any], Sequence[str]]:
  """How a named set is made, and its splits."""
  if name.endswith((".jsonl", ".parquet")) or ":" in name:
    if "{split}" in name:
      return functools.partial(own.make, rows=name), ("train", "test")
    return functools.partial(own.make, rows={"": name}), ("",)
  row = config.load_module("datasets", name)
  if not hasattr(row, "make"):
    raise ValueError(f"{name!r} has no make; name another data set")
  return row.make, getattr(row, "splits", ("train", "test"))


def _options(args: argparse.Namespace) -> dict[str, Any]:
  named = ("data_dir", "cache_dir", "question", "answer")
  options = {k: getattr(args, k) for k in named if getattr(args, k) is not None}
  for text in args.option:
    key, equals, value = text.partition("=")
    if not equals:
      raise ValueError(f"--option {text}: write KEY=VALUE")
    try:
      options[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      options[key] = value  # a text without quotes
  return options


def _prepare(args: argparse.Namespace) -> None:
  for name in args.names:
    if name not in public.SETS:
      raise ValueError(
        f"{name!r} needs no preparing; allowed are {', '.join(public.SETS)}"
      )
  start = time.monotonic()
  for name, source in _sources(args):
    seconds = time.monotonic() - start
    print(f"{name}: {len(source)} rows in {source.folder} ({seconds:.1f} s)")
    start = time.monotonic()


# -- show ----------------------------------------------------------------------


def _show(args: argparse.Namespace) -> None:
  tokens = _counter(args.tokenizer) if args.tokenizer else None
  shown = []
  for name, source in _sources(args):
    rows = [source[i] for i in _watched(range(len(source)), name)]
    questions = [row["question"] for row in rows]
    forms = {kind: list(map(form, questions)) for kind, form in _FORMS.items()}
    shown.append(
      _Shown(
        name,
        source.fingerprint,
        questions,
        [row["answer"] for row in rows],
        forms,
      )
    )
    _describe(shown[-1], tokens)
    for i, row in enumerate(rows[: args.rows]):
      print(f"  row {i}")
      for field, value in row.items():
        print(f"    {field:12}{textwrap.shorten(repr(value), 300)}")
  _compare(shown)


def _describe(shown: _Shown, tokens: Callable | None) -> None:
  print(shown.name)
  print(f"  rows          {len(shown.questions)}")
  print(f"  fingerprint   {shown.fingerprint}")
  if not shown.questions:
    return
  print(f"  question      characters: {_quantiles(map(len, shown.questions))}")
  if tokens is not None:
    print(f"                tokens: {_quantiles(tokens(shown.questions))}")
  kinds = collections.Counter(map(_kind, shown.answers))
  print(f"  answer        {', '.join(f'{n} {k}' for k, n in kinds.items())}")
  pairs = {kind: _repeated(form) for kind, form in shown.forms.items()}
  print(f"  duplicates    {_counted(pairs)}")
  _grade(shown)


def _compare(shown: Sequence[_Shown]) -> None:
  """Questions that two splits share; the normalised ones include the exact."""
  found = False
  for first, second in itertools.combinations(shown, 2):
    pairs = {k: _shared(first.forms[k], second.forms[k]) for k in _FORMS}
    if pairs["normalised"]:
      found = True
      print(f"{first.name} and {second.name} share {_counted(pairs)}")
  if len(shown) > 1 and not found:
    print("no two of them share a question")


def _grade(shown: _Shown) -> None:
  """Rule 21, for golds that are one text: those the math grader reads."""
  golds = {a for a in shown.answers if isinstance(a, str)}
  if not golds:
    print("  golds         lists of texts, not graded here")
    return
  wrong = {
    gold
    for gold in _watched(sorted(golds), f"{shown.name}: grading")
    if not grading.grade(rf"\boxed{{{gold}}}", gold)
  }
  rows = [
    (i, answer)
    for i, answer in enumerate(shown.answers)
    if isinstance(answer, str) and answer in wrong
  ]
  text = "each is right against itself"
  if rows:
    text = f"{len(rows)} wrong against themselves:"
  print(f"  golds         {text}")
  for i, answer in rows:
    print(f"    row {i}: {textwrap.shorten(repr(answer), 200)}")


def _kind(answer: Any) -> str:
  if isinstance(answer, list):
    return f"lists of {'1' if len(answer) == 1 else '2 or more'}"
  return "integers" if re.fullmatch(r"-?\d+", str(answer)) else "other texts"


def _quantiles(lengths: Iterable[int]) -> str:
  lengths = list(lengths)
  return ", ".join(
    f"{name} {np.quantile(lengths, q):.0f}" for name, q in _QUANTILES.items()
  )


def _counter(folder: str) -> Callable[[list[str]], list[int]]:
  """Counts the tokens of questions as they stand, without a chat template."""
  import tokenizers  # all that is needed of transformers

  path = pathlib.Path(folder).expanduser() / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as e:  # of Rust, of no kind of its own
    raise ValueError(
      f"--tokenizer={folder}: no tokenizer.json there that can be read ({e}); "
      "name a checkpoint's folder"
    ) from e
  tokenizer.encode_special_tokens = True  # a question is plain text
  return lambda questions: [
    len(found)
    for found in tokenizer.encode_batch(questions, add_special_tokens=False)
  ]


# -- duplicates ----------------------------------------------------------------

_SPACES = re.compile(r"\\[,;:! ]|\\(?:left|right|q?quad)(?![a-z])|[$\s~]")
# But those within a number or between two.
_MARKS = re.compile(r"['\"`]|(?<!\d)[.,:;!?]|[.,:;!?](?!\d)")


def _squeezed(question: str) -> str:
  """The same for questions that differ in case, spaces, `$` and punctuation.

  Spaces are LaTeX's too, and its commands that only size a bracket.
  """
  return _MARKS.sub("", _SPACES.sub("", question.lower()))


_FORMS = {"exact": str, "normalised": _squeezed}


def _repeated(questions: Sequence[str]) -> list[tuple[int, int]]:
  """(first row, later row) for every row whose question was there before."""
  first: dict[str, int] = {}
  pairs = ((first.setdefault(q, i), i) for i, q in enumerate(questions))
  return [(a, b) for a, b in pairs if a != b]


def _shared(
  known: Sequence[str], questions: Sequence[str]
) -> list[tuple[int, int]]:
  """(row of the first split, row of the second) for the second's rows."""
  rows = {text: i for i, text in reversed(list(enumerate(known)))}
  return [(rows[q], i) for i, q in enumerate(questions) if q in rows]


def _counted(pairs: dict[str, list[tuple[int, int]]]) -> str:
  """ "1 exact, 3 normalised: rows 4 = 9, .." """
  text = ", ".join(f"{len(found)} {kind}" for kind, found in pairs.items())
  examples = [f"{a} = {b}" for a, b in pairs["normalised"]]
  if examples:
    text += f": rows {', '.join(examples[:_NAMED])}"
  return text + ", .." * (len(examples) > _NAMED)


def _watched(items: Sequence, name: str) -> Iterable:
  return tqdm.tqdm(items, name, disable=None, leave=False)


if __name__ == "__main__":
  sys.exit(main())
