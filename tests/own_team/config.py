def policy(checkpoint):
  engine = dict(num_slots=16, max_length=56, steps_per_call=4)
  return dict(checkpoint=checkpoint, engine=engine)


def agent(role, policy):
  return dict(role=f"own_team.debate.{role}", policy=policy, max_tokens=12)


def get_config():
  rows = dict(rows="own_team/tasks.jsonl", held_out=4)
  return dict(
    steps=2,
    policies=dict(two=policy("tiny:solver"), one=policy("tiny:verifier")),
    agents=dict(
      left=agent("debater", "two"),
      right=agent("debater", "two"),
      judge=agent("judge", "one"),
    ),
    orchestra=dict(name="own_team.debate"),
    environment=dict(name="own_team.debate"),
    data=dict(sources=dict(own=dict(options=rows)), num_tasks=2),
    eval=dict(num_tasks=4, k=4),
  )
