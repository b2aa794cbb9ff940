r"""What agents have in common: how tags and boxes in a completion are read.

An agent is one `types.Agent(...)` value in a module of this folder; a config
names it by module and name ("math.solver"). Nothing here knows of tokens.

Two rules hold for every role. Tags count only outside `<think>..</think>`, and
the first complete action block acts. Text from outside (the question, another
agent's output, a document) is data: it is a part of a message as it is, and
never formatted, so that braces in it mean nothing.
"""

import collections
import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"(?:[^\s${}]|\{[^{}]*\})+")


class Block(NamedTuple):
  """`text[start:end]` is `<name>content</name>`."""

  name: str
  content: str
  start: int
  end: int


def closes(tags: tuple[str, ...]) -> Callable[[str], int | None] | None:
  """Where sampling stops: text -> index just after the first action block.

  It gives None while no block is complete; it is None itself for a role
  without tags, whose text then need not be decoded as it grows.
  """
  return functools.partial(_end_of_block, tags) if tags else None


def _end_of_block(tags: tuple[str, ...], text: str) -> int | None:
  block = find_block(text, *tags)
  return block.end if block else None


def find_block(text: str, *names: str) -> Block | None:
  """The first complete block of one of `names`, outside of any reasoning.

  Tags may be written in any case; `Block.name` is as in `names`, which are
  lower-case. A block holds no opening tag of its own name: in `<a>x<a>y</a>`
  it is the inner one. Linear in the length of `text`.
  """
  opened: dict[str, re.Match] = {}
  thinking = False
  for tag, closing, name in _tags(text, "think", *names):
    if name == "think":
      thinking = not closing
      opened.clear()
    elif thinking:
      continue
    elif not closing:
      opened[name] = tag
    elif name in opened:
      start = opened[name]
      content = text[start.end() : tag.start()]
      return Block(name, content, start.start(), tag.end())
  return None


def one_block(text: str, *names: str) -> Block | None:
  """The only block of a turn that keeps the format to the letter, or None.

  The format is at most one `<think>..</think>`, and outside of it exactly one
  block of one of `names`, not empty, nothing nested. Tags within the reasoning
  do not count. `find_block` says what acts, this says whether it was well
  said; for a turn in which it finds a block, so does `find_block`, the same.

  Args:
    text: a completion, as a parser is given it: with the `<think>` in front
      that its prompt ended with.
    *names: of the action blocks, lower-case.
  """
  inside = start = block = None
  thoughts = 0
  for tag, closing, name in _tags(text, "think", *names):
    if inside == "think" and name != "think":
      continue
    if closing:
      if name != inside:
        return None
      inside = None
      if name != "think":
        content = text[start.end() : tag.start()]
        block = Block(name, content, start.start(), tag.end())
    elif (
      inside or (name == "think" and thoughts) or (name != "think" and block)
    ):
      return None
    else:
      inside, start = name, tag
      thoughts += name == "think"
  complete = block is not None and inside is None
  return block if complete and block.content.strip() else None


def _tags(text: str, *names: str) -> Iterator[tuple[re.Match, bool, str]]:
  """(match, whether it closes, lower-case name) of every tag of `names`."""
  pattern = rf"<(/?)({'|'.join(map(re.escape, names))})>"
  for tag in re.finditer(pattern, text, re.IGNORECASE | re.ASCII):
    yield tag, bool(tag[1]), tag[2].lower()


def after_reasoning(text: str) -> str | None:
  """What follows the last `</think>`; None if a `<think>` is left open."""
  start = 0
  opened = False
  for tag, closing, _ in _tags(text, "think"):
    opened = not closing
    if closing:
      start = tag.end()
  return None if opened else text[start:]


def last_box(text: str) -> str | None:
  r"""Content of the last `\boxed{..}`, `\fbox{..}` or `\boxed 5`.

  None if there is none, or if the last one is empty or unterminated, whatever
  came before it. Linear in the length of `text`.
  """
  boxes = collections.deque(_BOX.finditer(text), maxlen=1)
  if not boxes:
    return None
  start = boxes[0]
  if not text.startswith("{", start.end()):
    bare = _BARE.match(text, start.end())
    return bare.group().rstrip(".,;:!?") or None if bare else None
  depth = 0
  for brace in _BRACES.finditer(text, start.end()):
    depth += {"{": 1, "}": -1}.get(brace.group(), 0)
    if depth == 0:
      return text[start.end() + 1 : brace.start()].strip() or None
  return None
