"""One solver, one turn: the single-agent baseline."""

from drmas_jax.types import Task

ROLES = ("solver",)


async def run(task: Task, call) -> str:
  """Plays one episode and returns the solver's text."""
  return (await call("solver", task, ())).text
