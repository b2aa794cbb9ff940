"""A verifier routes, in each step, to a searcher or to an answerer.

             +--no--> searcher --query--> passages --+
  verifier --+                                       +--> next step
     ^       +--yes-> answerer --answer--> end       |
     +-----------------------------------------------+

A step that comes to no query and no answer that can be read passes, too.
"""

from typing import Literal

from drmas_jax.types import Task, act

ROLES = ("verifier", "searcher", "answerer")


def check(
  *, max_steps: int = 4, at_limit: Literal["answer", "fail"] = "answer"
) -> None:
  """Refuses options that cannot run, before anything starts."""
  del at_limit
  if max_steps < 1:
    raise ValueError(
      f"max_steps: {max_steps} is not allowed; write an integer >= 1"
    )


async def run(
  task: Task,
  call,
  *,
  max_steps: int = 4,
  at_limit: Literal["answer", "fail"] = "answer",
) -> str:
  """Plays one episode and returns the team's answer; "" if there is none.

  Args:
    task: the question.
    call: `await call(agent, task, steps, ..)` plays one turn and returns its
      Reply; `steps` are (query, documents) of the steps before.
    max_steps: most steps in an episode, at least 1; in the last one nothing is
      searched for.
    at_limit: the last step is the answerer's, without a verdict ("answer"); or
      the verifier's, and without a yes there is no answer ("fail", as in the
      reference).
  """
  steps = ()
  for step in range(1, max_steps + 1):
    last = step == max_steps
    enough, view = True, ""
    if not last or at_limit == "fail":
      judgement = await call("verifier", task, steps)
      enough, view = judgement.verdict == "yes", judgement.text
    query, documents = "", ()
    if enough:
      reply = await call("answerer", task, steps)
      if reply.verdict == "answer":
        return reply.text
    elif not last:
      query = (await call("searcher", task, steps, view)).text
      documents = await act(query) if query else ()
    steps += ((query, documents),)
  return ""
