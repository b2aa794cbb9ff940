"""From an agent's messages to the ids of its prompt: limits and chats.

A prompt longer than its limit is cut as the agent's config says (`cut`):

    foreign              parts marked `Foreign` lose tokens from their middle,
                         the oldest first, and the newest never wholly
    left, middle, right  ids of the whole prompt go, wherever they fall: the
                         reference's rules, which may lose the question
    error                the episode is lost

A chat goes on with ids, not with text: what was sampled stays as it is, and
only what the template writes behind it is encoded. Where the template now
writes the past in another way (some leave out earlier reasoning), the chat is
encoded afresh and its next turn is a row of its own (rule 8).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax.tokenizer import Tokenizer, common_length
from drmas_jax.types import Fault, Foreign, Message

_GAP = " ... "  # in place of what was cut
_LEAST = 32  # tokens that stay of a part of age 0
_THINK = "<think>"
_LEAST_HEAD = 32  # tokens that are worth a prefill of their own


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What an agent is asked.

  Attributes:
    messages: the whole chat, as it was rendered.
    text: the same, rendered and open for the next turn (`Tokenizer.render`).
    ids: [prompt] int32.
    continues: the turn whose prompt and completion `ids` begin with, by its
      index; None: none.
    split: it should have continued one, and could not.
    cut: something had to go.
    fault: it does not fit, whatever may go; `ids` are then too many.
    head: so many of `ids` stand before the last message's content, where a chat
      begins: a template has them in common for all tasks. 0 if they are few.
  """

  messages: tuple[dict[str, str], ...]
  text: str
  ids: np.ndarray
  continues: int | None = None
  split: bool = False
  cut: bool = False
  fault: Fault | None = None
  head: int = 0

  @property
  def opened(self) -> str:
    """ "<think>" where the template ends the prompt with it: the completion
    then begins within the reasoning (rule 13). Otherwise ""."""
    return _THINK if self.text.rstrip().endswith(_THINK) else ""


def limit(agent: config_lib.Agent, engine: config_lib.Engine) -> int:
  """The most tokens that a prompt of an agent may have."""
  room = config_lib.prompt_room(agent, engine)
  return min(room, agent.max_prompt_tokens or room)


class Chat:
  """One agent's conversation within an episode; a single call is one, too."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._prompt: Prompt | None = None  # of the last turn
    self._answer: Any = None  # (turn index, completion ids, text) of it

  @property
  def begun(self) -> bool:
    return self._prompt is not None

  @property
  def waits(self) -> bool:
    """A prompt was made and its answer has not been heard."""
    return self.begun and self._answer is None

  def ask(
    self, messages: Sequence[Message], limit: int, cut: str = "foreign"
  ) -> Prompt:
    """The prompt of the next turn.

    Args:
      messages: new ones, of the agent's template.
      limit: most tokens.
      cut: what goes where there are more; see the module's docstring.
    """
    prompt = self._encode(messages)
    over = len(prompt.ids) - limit
    if over > 0 and cut in ("left", "middle", "right"):
      prompt = _cut_ids(prompt, limit, cut)
    elif over > 0:
      shorter = None if cut == "error" else self._shorten(messages, over, limit)
      prompt = shorter or _too_long(prompt, limit)
    if not self.begun:
      prompt = dataclasses.replace(prompt, head=self._head(prompt))
    self._prompt, self._answer = prompt, None
    return prompt

  def _head(self, prompt: Prompt) -> int:
    *before, last = (tuple(m.items()) for m in prompt.messages)
    emptied = tuple((k, v) for k, v in last if k != "content")
    opening = _opening(self._tokenizer, (*before, emptied))
    head = min(common_length(opening, prompt.ids), len(prompt.ids) - 1)
    return head if head >= _LEAST_HEAD else 0

  def hear(self, turn: int, ids: np.ndarray, text: str) -> None:
    """Takes the completion of the prompt made last.

    Args:
      turn: its index in the episode.
      ids: as sampled.
      text: as others see it: up to where its action block closes.
    """
    self._answer = turn, ids, text

  def _encode(self, new: Sequence[Message]) -> Prompt:
    new = tuple({**m, "content": "".join(m["content"])} for m in new)
    if self._prompt is None:
      text = self._tokenizer.render(new)
      return Prompt(new, text, self._tokenizer.encode_rendered(text))
    turn, completion, said = self._answer
    past = (*self._prompt.messages, {"role": "assistant", "content": said})
    text = self._tokenizer.render([*past, *new])
    tail = self._tokenizer.after_turn(self._prompt.text, said, text)
    if tail is None:
      ids = self._tokenizer.encode_rendered(text)
      return Prompt((*past, *new), text, ids, split=True)
    added = self._tokenizer.encode_rendered(tail)
    # Its end of turn is there if it was sampled: not behind a tag or a cut.
    if len(completion) and completion[-1] == self._tokenizer.end_of_turn_id:
      added = added[1:]
    ids = np.concatenate([self._prompt.ids, completion, added])
    return Prompt((*past, *new), text, ids, continues=turn)

  def _shorten(
    self, messages: Sequence[Message], over: int, limit: int
  ) -> Prompt | None:
    """Leaves out `over` tokens of foreign parts, if there are as many.

    What parts take alone does not quite add up to what they take in the prompt,
    so it is made again, without what it still has too many, until it fits.
    """
    parts = [
      part
      for message in messages
      for part in _parts(message)
      if isinstance(part, Foreign)
    ]
    spans = [self._tokenizer.spans(part) for part in parts]
    sizes, ages = [len(s) for s in spans], [part.age for part in parts]
    budget = sum(sizes)
    while over > 0:
      budget -= over
      shares = _shares(sizes, ages, budget)
      if shares is None:
        return None
      shown = map(_ends, parts, spans, shares)
      prompt = self._encode(_with_foreign(messages, shown))
      over = len(prompt.ids) - limit
    return dataclasses.replace(prompt, cut=True)


@functools.lru_cache(maxsize=256)
def _opening(
  tokenizer: Tokenizer, messages: tuple[tuple[tuple[str, str], ...], ...]
) -> np.ndarray:
  """Ids of messages up to the content of the last, whatever that is.

  Messages are pairs of keys and values; the last has no content.
  """
  *before, last = map(dict, messages)
  some, other = (
    tokenizer.encode_rendered(
      tokenizer.render([*before, {**last, "content": content}])
    )
    for content in ("", "?")
  )
  return some[: common_length(some, other)]


def _parts(message: Message) -> list[str]:
  content = message["content"]
  return [content] if isinstance(content, str) else content


def _with_foreign(
  messages: Sequence[Message], texts: Iterator[str]
) -> list[Message]:
  """The messages with their foreign parts replaced, in order."""
  return [
    message
    | {
      "content": [
        next(texts) if isinstance(part, Foreign) else part
        for part in _parts(message)
      ]
    }
    for message in messages
  ]


def _shares(
  sizes: Sequence[int], ages: Sequence[int], budget: int
) -> list[int] | None:
  """How many of its tokens each part keeps, of `budget` in all.

  The newest are served first, those of one age alike. None where those of age 0
  would get too few.
  """
  left, shares = max(budget, 0), [0] * len(sizes)
  order = sorted(range(len(sizes)), key=lambda i: (ages[i], sizes[i]))
  for place, i in enumerate(order):
    alike = sum(ages[j] == ages[i] for j in order[place:])
    shares[i] = min(sizes[i], left // alike)
    left -= shares[i]
    if not ages[i] and shares[i] < min(sizes[i], _LEAST):
      return None
  return None if budget < 0 else shares


def _ends(text: str, spans: Sequence[tuple[int, int]], num: int) -> str:
  """`num` tokens of a text, half of them from each end.

  What an answer is about stands at its beginning, what it comes to at its end.
  """
  if num >= len(spans):
    return text
  head = spans[(num - 1) // 2][1] if num else 0
  tail = spans[-(num // 2)][0] if num > 1 else len(text)
  return text[:head] + _GAP + text[max(head, tail) :]


def _cut_ids(prompt: Prompt, limit: int, cut: str) -> Prompt:
  """The reference's rules; what is left continues no turn."""
  num, half = len(prompt.ids), limit // 2
  kept = {
    "left": [prompt.ids[num - limit :]],
    "right": [prompt.ids[:limit]],
    "middle": [prompt.ids[:half], prompt.ids[num - limit + half :]],
  }[cut]
  return dataclasses.replace(
    prompt,
    ids=np.concatenate(kept),
    continues=None,
    split=prompt.split or prompt.continues is not None,
    cut=True,
  )


def _too_long(prompt: Prompt, limit: int) -> Prompt:
  message = (
    f"prompt of {len(prompt.ids)} tokens, of which too many may not be cut; "
    f"allowed are at most {limit}; raise max_prompt_tokens of the agent or "
    "engine.max_length, or let the template mark more of it as Foreign"
  )
  return dataclasses.replace(prompt, fault=Fault("prompt", message))
