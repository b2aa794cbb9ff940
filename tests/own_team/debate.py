"""Two debaters answer at once, hear each other and a judge, answer again."""

import re

from drmas_jax.types import Agent, Outcome, Reply, gather

ROLES = ("left", "right", "judge")
FORM = re.compile(r"\\boxed{(\d)}|<verify>(approve|reject)</verify>")


def prompt(cue):
  def write(task, answer="", judgement=""):
    content = f"{cue}: {task.question}"
    content += f"\nsolver: {answer}" if answer else ""
    content += f"\nverifier: {judgement}" if judgement else ""
    return [{"role": "user", "content": content}]

  return {"default": write}


def parse(text, stop_reason):
  found = FORM.search(text)
  verdict = found and found[found.lastindex]
  return Reply(text, valid=bool(found), verdict=verdict)


debater = Agent(prompt("solve"), parse)
judge = Agent(prompt("verify"), parse, tags=("verify",))


async def run(task, call):
  a, b = await gather(call("left", task), call("right", task))
  of_a, of_b = await gather(*(call("judge", task, x.text) for x in (a, b)))
  heard = (task, b.text, of_b.text), (task, a.text, of_a.text)
  a, b = await gather(call("left", *heard[0]), call("right", *heard[1]))
  return a.verdict, b.verdict


class Debate:
  def score(self, task, episode):
    said = [turn.reply.verdict for turn in episode.turns]
    right = [float(x == task.answer) for x in said]
    judged = [(said[i + 2] == "approve") == right[i] for i in (0, 1)]
    rewards = dict(left=right[4], right=right[5], judge=sum(judged) / 2)
    return Outcome(rewards, success=right[4:] == [1, 1])


make = Debate
