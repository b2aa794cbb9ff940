r"""What an agent is: how its prompt is written, how its completion is read.

An agent is one `Agent(...)` value in a module of this folder; a config names
it by module and name ("math.solver"). Nothing here knows of tokens.

Two rules hold for every role. Tags count only outside `<think>..</think>`, and
the first complete action block acts. Text from outside (the question, another
agent's output, a document) is data: it is joined into a message as it is, cut
to a limit, and never formatted, so that braces in it mean nothing.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from drmas_jax.types import Reply

Message = dict[str, str]
Template = Callable[..., list[Message]]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}]+")


@dataclasses.dataclass(frozen=True)
class Agent:
  """A role.

  Attributes:
    templates: by name, functions from the orchestra's arguments (the task,
      then whatever it passes on) to chat messages. "default" must be there.
    parse: `parse(text, stop_reason, *, option=..) -> Reply` reads a completion;
      its keyword-only parameters are the options of the agent's config entry.
    tags: names of the action blocks at whose end sampling stops. Empty where
      the whole completion is the action.
  """

  templates: Mapping[str, Template]
  parse: Callable[..., Reply]
  tags: tuple[str, ...] = ()

  def messages(self, template: str, *args) -> list[Message]:
    """The chat messages of one turn: [{"role": .., "content": ..}]."""
    return self.templates[template](*args)

  @property
  def closes(self) -> Callable[[str], int | None] | None:
    """Where sampling stops: text -> index just after the first action block.

    It gives None while no block is complete; it is None itself for a role
    without tags, whose text then need not be decoded as it grows.
    """
    return functools.partial(_end_of_block, self.tags) if self.tags else None


class Block(NamedTuple):
  """`text[start:end]` is `<name>content</name>`."""

  name: str
  content: str
  start: int
  end: int


def _end_of_block(tags: tuple[str, ...], text: str) -> int | None:
  block = find_block(text, *tags)
  return block.end if block else None


def find_block(text: str, *names: str) -> Block | None:
  """The first complete block of one of `names`, outside of any reasoning.

  A block holds no opening tag of its own name: in `<a>x<a>y</a>` it is the
  inner one. Linear in the length of `text`.
  """
  opened: dict[str, re.Match] = {}
  thinking = False
  tags = "|".join(map(re.escape, ("think", *names)))
  for tag in re.finditer(rf"<(/?)({tags})>", text):
    closing, name = tag.groups()
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


def after_reasoning(text: str) -> str | None:
  """What follows the last `</think>`; None if a `<think>` is left open."""
  rest = text.rpartition("</think>")[2]
  return None if "<think>" in rest else rest


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


def cut(text: str, limit: int) -> str:
  """At most `limit` characters of foreign text, kept from both its ends.

  The middle goes, since a problem's terms stand at its beginning and a
  solution's answer at its end.
  """
  if len(text) <= limit:
    return text
  mark = " ... "
  head = (limit - len(mark) + 1) // 2
  tail = limit - len(mark) - head
  return text[:head] + mark + text[len(text) - tail :]
