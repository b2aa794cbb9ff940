r"""The verifier, the searcher and the answerer of the search orchestra, and the
researcher who does it all alone.

What the team has done so far is `steps`, oldest first: (query, documents) each,
the query "" where nothing could be read of what was written. "default" is for
policies that follow instructions, "short" for tiny ones, which learn the form
from demonstrations and pay for every token: it shows documents alone.
"""

import re
from typing import Literal

from drmas_jax.agents.agent import (
  after_reasoning,
  find_block,
  one_block,
)
from drmas_jax.types import (
  Agent,
  Foreign,
  Message,
  Reply,
  StopReason,
  Task,
)

Documents = tuple[str, ...]
Steps = tuple[tuple[str, Documents], ...]
Validity = Literal["strict", "reference"]

_TEAM = (
  "You belong to a small team that answers questions with the help of a search "
  "engine. In each step a verifier decides whether enough has been found. If "
  "not, a searcher writes the next query; if so, an answerer writes the "
  "answer. The whole team is judged by that answer."
)
_VERIFIER = (
  "You are the verifier. Go through the queries and what they found: does it "
  "bear on the question, which facts are established, which are missing or "
  "only guessed, and was a query vague, off the point, or asked before? Then "
  "give your verdict once, as the last thing you write: "
  "<verify>yes</verify> if the question can be answered from what was found, "
  "<verify>no</verify> if another search is needed."
)
_SEARCHER = (
  "You are the searcher. First think inside <think> and </think> about the one "
  "fact that is missing next and how a text would word it. Then write a "
  "single query, unlike those before, inside <search> and </search>."
)
_ANSWERER = (
  "You are the answerer. First think inside <think> and </think>, using what "
  "was found. Then write the answer inside <answer> and </answer>: a name, a "
  "number or a few words, such as <answer>Lake Geneva</answer>, and no "
  "explanation."
)
_RESEARCHER = (
  "You answer a question with the help of a search engine, in at most {} "
  "steps. In each step think first, inside <think> and </think>. Then either "
  "search, by a single query inside <search> and </search>, and you are shown "
  "what was found; or, once you know enough, end with the answer inside "
  "<answer> and </answer>: a name, a number or a few words, and no "
  "explanation. Never do both in one step."
)


# -- prompts -------------------------------------------------------------------


def _found(documents: Documents, age: int) -> list[str]:
  """A line for each document, or one that says there are none."""
  if not documents:
    return ["Nothing was found.\n"]
  shown = []
  for number, document in enumerate(documents, 1):
    shown += [f"[{number}] ", Foreign(document, age), "\n"]
  return shown


def _told(steps: Steps) -> list[str]:
  """A section on what was searched for; the newest step is of age 0."""
  told = ["# Steps so far\n"] if steps else []
  for number, (query, documents) in enumerate(steps, 1):
    age = len(steps) - number
    if query:
      told += [f"Step {number}, query: ", Foreign(query, age), "\n"]
      told += _found(documents, age)
    else:
      told.append(f"Step {number}: what was written could not be read.\n")
  return [*told, "\n"] if steps else []


def _default(part: str):
  """A system turn about the team and a user turn of three or four sections."""

  def template(task: Task, steps: Steps, view: str = "") -> list[Message]:
    content = ["# Question\n", task.question, "\n\n", *_told(steps)]
    if view:
      content += ["# The verifier wrote\n", Foreign(view), "\n\n"]
    return [
      {"role": "system", "content": _TEAM},
      {"role": "user", "content": [*content, "# Your part\n", part]},
    ]

  return template


def _short(part: str):
  """One user turn: a cue, the question, a line of documents for each step."""

  def template(task: Task, steps: Steps, view: str = "") -> list[Message]:
    del view  # a tiny verifier gives no reasons
    content = [f"{part}: ", task.question]
    for age, (_, documents) in zip(
      range(len(steps) - 1, -1, -1), steps, strict=True
    ):
      content += ["\n", *(Foreign(text, age) for text in documents)]
    return [{"role": "user", "content": content}]

  return template


def _researcher(task: Task, left: int) -> list[Message]:
  return [
    {"role": "system", "content": _RESEARCHER.format(left)},
    {"role": "user", "content": ["Question: ", task.question]},
  ]


def _more(searched: bool, documents: Documents, left: int) -> list[Message]:
  content = (
    _found(documents, 0)
    if searched
    else ["Neither a query nor an answer could be read.\n"]
  )
  last = "This is the last step: answer now."
  content.append(last if left == 1 else f"{left} steps are left.")
  return [{"role": "user", "content": content}]


def _researcher_short(task: Task, left: int) -> list[Message]:
  del left
  return [{"role": "user", "content": ["answer: ", task.question]}]


def _more_short(
  searched: bool, documents: Documents, left: int
) -> list[Message]:
  del searched, left
  return [{"role": "user", "content": [Foreign(text) for text in documents]}]


# -- what is read of a completion ----------------------------------------------

_THOUGHT = re.compile(r"</?think>", re.IGNORECASE)
_CJK = re.compile("[\u4e00-\u9fff]")


def _valid_as_reference(text: str, thinks: bool) -> bool:
  """The reference's rule for a text in which there is a block."""
  thoughts = [tag.lower() for tag in _THOUGHT.findall(text)]
  thought = thoughts == ["<think>", "</think>"] or not thinks
  return thought and not _CJK.search(text)


def _acting(text: str, names: tuple[str, ...], validity: Validity) -> Reply:
  """The first block of one of `names` acts; its name is the verdict."""
  _check(validity)
  block = find_block(text, *names)
  content = block.content.strip() if block else ""
  if validity == "strict":
    acts, valid = bool(content), one_block(text, *names) is not None
  else:
    acts = block is not None
    valid = acts and _valid_as_reference(text, thinks=True)
  verdict = block.name if acts else None
  labels = {f"{name}_written": float(verdict == name) for name in names}
  return Reply(content, valid, verdict, labels)


def _check(validity: str) -> None:
  if validity not in ("strict", "reference"):
    raise ValueError(
      f"validity={validity!r} is not allowed; write 'strict' or 'reference'"
    )


def _parse_searcher(
  text: str, stop_reason: StopReason, *, validity: Validity = "strict"
) -> Reply:
  """The query, "" where there is none.

  Strictly, a turn is valid with one block that is not empty, nothing nested and
  at most one `<think>..</think>`. The reference wants exactly one of these,
  takes an empty block, and no Chinese character.
  """
  del stop_reason
  return _acting(text, ("search",), validity)


def _parse_answerer(
  text: str, stop_reason: StopReason, *, validity: Validity = "strict"
) -> Reply:
  """The answer; verdict None where there is none. An empty one is an answer to
  the reference alone. Validity is as a searcher's."""
  del stop_reason
  return _acting(text, ("answer",), validity)


def _parse_researcher(
  text: str, stop_reason: StopReason, *, validity: Validity = "strict"
) -> Reply:
  """The query or the answer, as the verdict says; validity as a searcher's."""
  del stop_reason
  return _acting(text, ("search", "answer"), validity)


def _parse_verifier(
  text: str,
  stop_reason: StopReason,
  *,
  missing_verdict: Literal["yes", "no"] = "yes",
  validity: Validity = "strict",
) -> Reply:
  """The verdict of the first block; without one, as configured.

  A verdict that cannot be read is invalid, but to the reference, which wants
  no more than the tags, and no Chinese character.
  """
  del stop_reason
  _check(validity)
  if missing_verdict not in ("yes", "no"):
    raise ValueError(
      f"missing_verdict={missing_verdict!r} is not allowed; write 'yes' or 'no'"
    )
  block = find_block(text, "verify")
  read = block.content.strip().lower() if block else ""
  missing = read not in ("yes", "no")
  verdict = missing_verdict if missing else read
  valid = not missing
  if validity == "reference":
    valid = block is not None and _valid_as_reference(text, thinks=False)
  return Reply(
    text=after_reasoning(text[: block.end] if block else text) or "",
    valid=valid,
    verdict=verdict,
    labels={
      "yes": float(verdict == "yes"),
      "no": float(verdict == "no"),
      "missing": float(missing),
    },
  )


verifier = Agent(
  templates={"default": _default(_VERIFIER), "short": _short("verify")},
  parse=_parse_verifier,
  tags=("verify",),
  examples=("<verify>no</verify>", "<verify>yes</verify>"),
  verdicts=("yes", "no"),
)
searcher = Agent(
  templates={"default": _default(_SEARCHER), "short": _short("search")},
  parse=_parse_searcher,
  tags=("search",),
  examples=("<think>One fact.</think><search>an example</search>",),
)
answerer = Agent(
  templates={"default": _default(_ANSWERER), "short": _short("answer")},
  parse=_parse_answerer,
  tags=("answer",),
  examples=("<think>It is known.</think><answer>{answer}</answer>",),
)
researcher = Agent(
  templates={"default": _researcher, "short": _researcher_short},
  replies={"default": _more, "short": _more_short},
  parse=_parse_researcher,
  tags=("search", "answer"),
  examples=(
    "<think>One fact.</think><search>an example</search>",
    "<think>It is known.</think><answer>{answer}</answer>",
  ),
  verdicts=("search", "answer"),
)
