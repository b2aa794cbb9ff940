"""What generated data sets share: numbered questions, scattered and split, and
what demonstrations are."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MAX_TEST = 10_000


class Demonstration(NamedTuple):
  """A call as the orchestra makes it, `call(agent, *args)`, and its answer."""

  args: tuple
  completion: str


class Sampled(NamedTuple):
  """A turn as a policy has sampled it, which is trained on by its ids.

  Attributes:
    prompt: `prompt_ids` decoded, control tokens kept: it tells whether they are
      of the tokenizer at hand.
    prompt_ids: what the policy was given.
    completion_ids: what it sampled, end token included if there was one.
  """

  prompt: str
  prompt_ids: list[int]
  completion_ids: list[int]


class Numbered:
  """A split of the questions 0 .. N-1; `source[i]` is a pure function of i.

  An affine permutation of the numbers (x -> a x + 1 mod N with a prime to N)
  scatters them over an index. The test split is the end of that index, a share
  of it but at most 10000 rows, and the train split a part of the rest, so no
  question is in both.
  """

  def __init__(
    self,
    row: Callable[[int], dict[str, Any]],
    num_questions: int,
    split: str,
    num_tasks: int,
    identity: str,
    test_share: float = 0.1,
  ):
    """Draws the split.

    Args:
      row: the row of a question's number.
      num_questions: N.
      split: "train" or "test".
      num_tasks: most rows of the train split.
      identity: differs where `row` gives other rows.
      test_share: of the questions, between 0 and 1.

    Raises:
      ValueError: any other split or share.
    """
    if split not in ("train", "test"):
      raise ValueError(f"split={split!r} is not allowed; it has train, test")
    if not 0 < test_share < 1:
      raise ValueError(
        f"test_share={test_share} is not allowed; write one between 0 and 1"
      )
    test = min(int(num_questions * test_share), _MAX_TEST)
    train = min(num_questions - test, num_tasks)
    self._row, self._num_questions = row, num_questions
    self._first = num_questions - test if split == "test" else 0
    self._length = test if split == "test" else train
    self._factor = _prime_to(num_questions)
    text = f"{identity} {split} {test} {self._length}"
    self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < self._length:
      raise IndexError(f"index {index} is not in [0, {self._length})")
    place = (self._first + index) * self._factor + 1
    return self._row(place % self._num_questions)


def at_least(options: Mapping[str, tuple[int, int]]) -> None:
  """Raises a ValueError for the first (value, lowest allowed) too low."""
  for field, (value, low) in options.items():
    if value < low:
      raise ValueError(f"{field}={value} is not allowed; write one >= {low}")


def _prime_to(n: int) -> int:
  """A number prime to n near its golden section: neighbours land far apart."""
  factor = max(1, int(n * 0.6180339887))
  while math.gcd(factor, n) != 1:
    factor += 1
  return factor
