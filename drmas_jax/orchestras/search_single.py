"""One researcher thinks, then searches or answers: the single-agent baseline.

It is one chat, which goes on with what was found.
"""

from drmas_jax.types import Task, act

ROLES = ("researcher",)

_CHAT = "research"


def check(*, max_steps: int = 4) -> None:
  """Refuses options that cannot run, before anything starts."""
  if max_steps < 1:
    raise ValueError(
      f"max_steps: {max_steps} is not allowed; write an integer >= 1"
    )


async def run(task: Task, call, *, max_steps: int = 4) -> str:
  """Plays one episode and returns the answer; "" if there is none.

  Args:
    task: the question.
    call: `await call(agent, .., chat=..)` plays one turn and returns its Reply.
    max_steps: most turns, at least 1; what the last one searches for is not
      looked up.
  """
  reply = await call("researcher", task, max_steps, chat=_CHAT)
  for left in range(max_steps - 1, 0, -1):
    if reply.verdict == "answer":
      break
    query = reply.text
    documents = await act(query) if query else ()
    reply = await call("researcher", bool(query), documents, left, chat=_CHAT)
  return reply.text if reply.verdict == "answer" else ""
