"""A solver proposes, a verifier judges, and a rejected solution is redone.

solver -> verifier -approve-> end
  ^          |
  +--reject--+       at most `max_loops` solutions; the last is not judged
"""

from drmas_jax.types import Task

ROLES = ("solver", "verifier")


def check(*, max_loops: int = 2) -> None:
  """Refuses options that cannot run, before anything starts."""
  if max_loops < 1:
    raise ValueError(
      f"max_loops: {max_loops} is not allowed; write an integer >= 1"
    )


async def run(task: Task, call, *, max_loops: int = 2) -> str:
  """Plays one episode and returns the team's action, the last solution.

  Args:
    task: the problem.
    call: `await call(agent, task, said)` plays one turn and returns its Reply;
      `said` is what the team has said so far, as (agent, text) pairs.
    max_loops: most solutions in an episode, at least 1.
  """
  said = ()
  for loop in range(max_loops):
    solution = await call("solver", task, said)
    said += (("solver", solution.text),)
    if loop == max_loops - 1:
      break
    judgement = await call("verifier", task, said)
    said += (("verifier", judgement.text),)
    if judgement.verdict == "approve":
      break
  return solution.text
