"""A generated knowledge base, and questions that take two of its facts.

    What is the home of the friend of kuba?
    The friend of kuba is mita.  The home of mita is peno.        answer peno

Half of its people are asked about; they have a friend and a boss among the
others. All have a home, a job and a pet. `PASSAGES` are its facts, one each.
Names are pairs of syllables. The people of the test split, those asked about
and their friends and bosses alike, are in no question of the train split: what
is learned is how to ask, and no fact.

`demonstrations` plays a deliberately imperfect team, for `--mode=sft`.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from drmas_jax.datasets import dataset
from drmas_jax.types import Task

SYLLABLES = tuple(c + v for c in "bdklmnpt" for v in "aou")
FIRST = ("friend", "boss")  # of a person: another one
SECOND = ("home", "job", "pet")

_ASKED, _OTHERS, _VALUES = 300, 150, 40  # names; the last for each of SECOND
_TEST = 10  # one in so many people


class Fact(NamedTuple):
  """ "The `relation` of `subject` is `object`." """

  relation: str
  subject: str
  object: str

  @property
  def text(self) -> str:
    return f"The {self.relation} of {self.subject} is {self.object}."


def _facts() -> tuple[list[str], dict[tuple[str, str], Fact]]:
  """(people who are asked about, facts by relation and subject).

  Each `_TEST`-th person is one of the test split, and knows only such.
  """
  rng = np.random.Generator(np.random.PCG64(0))
  names = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)]
  names = [names[i] for i in rng.permutation(len(names))]
  asked, others = names[:_ASKED], names[_ASKED : _ASKED + _OTHERS]
  known = [
    [o for j, o in enumerate(others) if (j % _TEST == 0) == test]
    for test in (False, True)
  ]
  facts = [
    Fact(relation, person, str(rng.choice(known[i % _TEST == 0])))
    for i, person in enumerate(asked)
    for relation in FIRST
  ]
  people, rest = asked + others, names[_ASKED + _OTHERS :]
  for i, relation in enumerate(SECOND):
    values = rest[i * _VALUES : (i + 1) * _VALUES]
    facts += [Fact(relation, p, str(rng.choice(values))) for p in people]
  return asked, {(f.relation, f.subject): f for f in facts}


_PEOPLE, _FACTS = _facts()
PASSAGES = tuple(
  {"id": str(i), "contents": fact.text}
  for i, fact in enumerate(_FACTS.values())
)


class Questions:
  """A split: of each of its people, every pair of relations."""

  def __init__(self, split: str):
    """Raises a ValueError for a split that there is not."""
    if split not in ("train", "test"):
      raise ValueError(f"split={split!r} is not allowed; it has train, test")
    self._people = [
      person
      for i, person in enumerate(_PEOPLE)
      if (i % _TEST == 0) == (split == "test")
    ]
    self._pairs = list(itertools.product(FIRST, SECOND))
    text = f"two_hop {split} {PASSAGES}"
    self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._people) * len(self._pairs)

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < len(self):
      raise IndexError(f"index {index} is not in [0, {len(self)})")
    lap, place = divmod(index, len(self._people))
    person = self._people[place]
    # Neighbours ask for different pairs: the first rows have some of all.
    first, second = self._pairs[(lap + place) % len(self._pairs)]
    return {
      "question": f"What is the {second} of the {first} of {person}?",
      "answer": _FACTS[second, _FACTS[first, person].object].object,
      "info": {"person": person, "first": first, "second": second},
    }


def make(split: str) -> Questions:
  """A split of the questions: "train" or "test"."""
  return Questions(split)


# -- demonstrations ------------------------------------------------------------


class _Known(NamedTuple):
  """What passages say of a question; None where they do not."""

  person: str | None  # the second one
  answer: str | None


def demonstrations(
  task: Task,
  rng: np.random.Generator,
  *,
  max_steps: int = 4,
  verifier_flip: float = 0.1,
  searcher_slip: float = 0.4,
  searcher_noise: float = 0.1,
  answerer_slip: float = 0.45,
  answerer_noise: float = 0.05,
) -> dict[str, list[dataset.Demonstration]]:
  """One episode of an imperfect team, as `orchestras.search` plays it.

  Args:
    task: of this data set.
    rng: the source of all chance.
    max_steps: as the orchestra's.
    verifier_flip: chance of the wrong verdict.
    searcher_slip: chance that the second fact is asked of the first person. A
      systematic error, so that even the likeliest completion has something to
      learn.
    searcher_noise: chance that a random relation is asked for.
    answerer_slip: chance that the answer is whom the newest passage is about.
    answerer_noise: chance that it is a random name.

  Returns:
    Demonstrations by agent, in the order of the calls.
  """
  calls = {"verifier": [], "searcher": [], "answerer": []}
  facts, steps, view = [], (), ""
  for step in range(1, max_steps + 1):
    known = _known(task.info, facts)
    enough = step == max_steps
    if not enough:
      enough = (known.answer is not None) != (rng.random() < verifier_flip)
      view = f"<verify>{'yes' if enough else 'no'}</verify>"
      calls["verifier"].append(dataset.Demonstration((task, steps), view))
    if enough:
      answer = _answer(task.info, known, facts)
      if rng.random() < answerer_slip:
        answer = facts[-1].subject if facts else task.info["person"]
      elif rng.random() < answerer_noise:
        answer = "".join(rng.choice(SYLLABLES, 2))
      completion = f"<answer>{answer}</answer>"
      calls["answerer"].append(dataset.Demonstration((task, steps), completion))
      break
    fact = _FACTS[_query(task.info, known, rng, searcher_slip, searcher_noise)]
    query = f"{fact.relation} of {fact.subject}"
    completion = f"<search>{query}</search>"
    calls["searcher"].append(
      dataset.Demonstration((task, steps, view), completion)
    )
    facts.append(fact)
    steps += ((query, (fact.text,)),)
  return calls


def _known(info: Mapping[str, str], facts: Sequence[Fact]) -> _Known:
  found = {(f.relation, f.subject): f.object for f in facts}
  person = found.get((info["first"], info["person"]))
  return _Known(person, person and found.get((info["second"], person)))


def _query(
  info: Mapping[str, str],
  known: _Known,
  rng: np.random.Generator,
  slip: float,
  noise: float,
) -> tuple[str, str]:
  """(relation, subject) of the fact that is asked for."""
  relation, subject = info["first"], info["person"]
  if known.person is not None:
    relation = info["second"]
    subject = subject if rng.random() < slip else known.person
  if rng.random() < noise:
    able = [r for r in (*FIRST, *SECOND) if (r, subject) in _FACTS]
    relation = str(rng.choice(able))
  return relation, subject


def _answer(
  info: Mapping[str, str], known: _Known, facts: Sequence[Fact]
) -> str:
  """The right one if it was found, otherwise the best guess there is."""
  if known.answer is not None:
    return known.answer
  return facts[-1].object if facts else info["person"]
