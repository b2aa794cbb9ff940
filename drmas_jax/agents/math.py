r"""The solver and the verifier of the math orchestra.

Both are called with the task and with what the team has said so far: a tuple
of (agent's name, text) pairs, oldest first. "default" is written for policies
that follow instructions, "short" for tiny ones, which learn the form of their
answer from demonstrations and pay for every token of a prompt, "examples" for
small pretrained ones on sums, which show two worked examples in place of words.
"""

from typing import Literal

from drmas_jax.agents.agent import (
  after_reasoning,
  find_block,
  last_box,
)
from drmas_jax.types import (
  Agent,
  Foreign,
  Message,
  Reply,
  StopReason,
  Task,
)

Said = tuple[tuple[str, str], ...]

_TEAM = (
  "You belong to a small team that works on mathematics problems. A solver "
  "writes a solution, a verifier checks it, and a rejected solution is "
  "written anew. The whole team is judged by its last solution."
)
_SOLVER = (
  "You are the solver. Work the problem out step by step. If there are "
  "earlier outputs, use what is right in them and repair what is wrong, but "
  "trust your own reasoning first. End with the final answer, and nothing "
  "else, inside \\boxed{}."
)
_VERIFIER = (
  "You are the verifier. Check the solver's latest solution: redo its steps, "
  "and ask whether each follows, whether anything is left out, and whether "
  "the boxed result answers the question. Then give your verdict once, as the "
  "last thing you write: <verify>approve</verify> if the solution is right, "
  "<verify>reject</verify> if it is not."
)


def _aged(said: Said) -> list[tuple[str, Foreign]]:
  """Each agent's newest output is of age 0, the one before of age 1, .."""
  names = [name for name, _ in said]
  return [
    (name, Foreign(text, age=names[i + 1 :].count(name)))
    for i, (name, text) in enumerate(said)
  ]


def _default(part: str):
  """A system turn about the team and a user turn of three sections."""

  def template(task: Task, said: Said = ()) -> list[Message]:
    content = ["# Problem\n", task.question, "\n\n"]
    if said:
      content.append("# Outputs so far\n")
    for name, text in _aged(said):
      content += [f"[{name} wrote]\n", text, "\n\n"]
    return [
      {"role": "system", "content": _TEAM},
      {"role": "user", "content": [*content, "# Your part\n", part]},
    ]

  return template


def _short(part: str):
  """One user turn: a cue, the question, a line for each earlier output."""

  def template(task: Task, said: Said = ()) -> list[Message]:
    content = [f"{part}: ", task.question]
    for name, text in _aged(said):
      content += [f"\n{name}: ", text]
    return [{"role": "user", "content": content}]

  return template


def _chat(*texts: str | list[str]) -> list[Message]:
  """A system turn, then user and assistant in turns."""
  roles = ("system", *("user", "assistant") * len(texts))
  return [
    {"role": role, "content": text}
    for role, text in zip(roles, texts, strict=False)
  ]


def _solver_examples(task: Task, said: Said = ()) -> list[Message]:
  """The rejected solution stands as the policy's own, and is asked again."""
  first = ("You compute.", "13 + 6", r"13 + 6 = \boxed{19}")
  if said:
    last = [text for name, text in _aged(said) if name == "solver"][-1]
    return _chat(*first, task.question, [last], f"Wrong: {task.question}")
  return _chat(*first, "8 + 7", r"8 + 7 = \boxed{15}", task.question)


def _verifier_examples(task: Task, said: Said) -> list[Message]:
  """The newest solution alone: it holds the question."""
  del task
  wrong = (r"8 + 7 = \boxed{16}", "<verify>reject</verify>")
  right = (r"13 + 6 = \boxed{19}", "<verify>approve</verify>")
  return _chat("You check.", *wrong, *right, [_aged(said)[-1][1]])


def _parse_solver(text: str, stop_reason: StopReason) -> Reply:
  """The whole completion after its reasoning; valid if it holds a box."""
  del stop_reason
  shown = after_reasoning(text)
  boxed = shown is not None and last_box(shown) is not None
  return Reply(text=shown or "", valid=boxed)


def _parse_verifier(
  text: str,
  stop_reason: StopReason,
  *,
  missing_verdict: Literal["approve", "reject"] = "approve",
) -> Reply:
  """The verdict of the first block; without one, invalid and as configured.

  What others see ends with the block.
  """
  del stop_reason
  if missing_verdict not in ("approve", "reject"):
    raise ValueError(
      f"missing_verdict={missing_verdict!r} is not allowed; write 'approve' "
      "or 'reject'"
    )
  block = find_block(text, "verify")
  read = block.content.strip().lower() if block else ""
  missing = read not in ("approve", "reject")
  verdict = missing_verdict if missing else read
  return Reply(
    text=after_reasoning(text[: block.end] if block else text) or "",
    valid=not missing,
    verdict=verdict,
    labels={
      "approved": float(verdict == "approve"),
      "rejected": float(verdict == "reject"),
      "missing": float(missing),
    },
  )


solver = Agent(
  templates={
    "default": _default(_SOLVER),
    "short": _short("solve"),
    "examples": _solver_examples,
  },
  parse=_parse_solver,
  examples=(r"It comes to \boxed{{answer}}",),
)
verifier = Agent(
  templates={
    "default": _default(_VERIFIER),
    "short": _short("verify"),
    "examples": _verifier_examples,
  },
  parse=_parse_verifier,
  tags=("verify",),
  examples=("<verify>reject</verify>", "<verify>approve</verify>"),
  verdicts=("approve", "reject"),
)
