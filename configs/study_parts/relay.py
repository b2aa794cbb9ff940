"""A team whose agents speak very unequally often, as a searching one does.

drafter -> verifier -approve-> answerer -> end
   ^          |
   +--reject--+       at most `max_drafts`; then nobody answers

Each reads the question and the newest draft with its verdict alone.
"""

from drmas_jax.types import Task

ROLES = ("drafter", "verifier", "answerer")


async def run(task: Task, call, *, max_drafts: int = 8) -> str:
  """Plays one episode; the action is the answer, or nothing.

  Args:
    task: the problem.
    call: plays a turn; see `drmas_jax.orchestras.math`.
    max_drafts: most drafts in an episode.
  """
  said = ()
  for _ in range(max_drafts):
    draft = await call("drafter", task, said)
    said = (("solver", draft.text),)
    judgement = await call("verifier", task, said)
    said += (("verifier", judgement.text),)
    if judgement.verdict == "approve":
      return (await call("answerer", task, said)).text
  return ""
