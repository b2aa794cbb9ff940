"""Reinforcement learning of multi-agent LLM teams in JAX (Dr. MAS)."""


def run(config, workdir, *, allow_change=(), **changes):
  """Trains a team, from Python; as the command does with `--config`.

      from drmas_jax import run
      result = run("configs/math_tiny.py", "runs/a", steps=20, eval=dict(k=4))
      result.after["arithmetic"]["avg@4"]

  A run that is in the workdir already is resumed. Any number of runs may follow
  each other in one process: each gives back the devices' memory. Ctrl-C
  finishes the step and saves; in a thread other than the main one, where Python
  hears of no signals, a run goes on to its end.

  Args:
    config: the path of a config file, a ConfigDict, a dict, or a
      `config.Config`.
    workdir: folder of the run.
    allow_change: keys that may differ from the checkpoint's config on resume.
    **changes: of the config; a group of keys is a dict, of which the keys that
      are left out stay as they are.

  Returns:
    A `notebook.Result`.

  Raises:
    ConfigError: the config, the checkpoint or the plan is wrong.
    RunError: the run cannot go on; it is saved.
    UserError: one of these: the team's own code failed.
    KeyboardInterrupt: on Ctrl-C, once it is saved.
  """
  from drmas_jax import notebook

  return notebook.run(config, workdir, allow_change, changes)
