"""adapter_run.py on one of two hosts, and what is done with the run later, in
one process: programs are compiled once.

Arguments: index, port, folder. The run is in `run`, a fork of its second step
in `fork`. In its third step the tasks of host 0 are lost, so that this host has
no row. The last line of the output is a JSON object: digests of the weights in
learner and engine, and which files were opened for writing.
"""

import dataclasses
import json
import pathlib
import sys

import faulty_main

from drmas_jax import (
  advantages,
  coordinator,
  health,
  hosts,
  main,
  training,
)
from drmas_jax.types import Fault

CONFIG = pathlib.Path(__file__).with_name("adapter_run.py")
STEPS = 3
LOST = Fault("reward", "it was lost")


def call(workdir, *flags):
  flags = (f"--config={CONFIG}", f"--workdir={workdir}", *flags)
  code = main.main([*flags, f"--config.steps={STEPS}"])
  assert code == 0, (code, flags)


def lose(run):
  """The outcomes of every second task, those of host 0."""
  collect = run._collect

  def collected(self):
    played = collect(self)
    if self.step_done + 1 == STEPS:
      for group in played.groups:
        if group.task.position % 2 == 0:
          group.episodes[:] = [
            dataclasses.replace(e, outcome=None, status="failed", fault=LOST)
            for e in group.episodes
          ]
    return played

  run._collect = collected


def note(run):
  """The runs that are begun, for their weights."""
  restore, begun = run.restore, []

  def restored(self, *args):
    begun.append(self)
    restore(self, *args)

  run.restore = restored
  return begun


def work(folder):
  """Trains, replays, evaluates and forks; what the hosts hold at the end."""
  lose(training.Training)
  health.Monitor.spikes = lambda self, found: ("solver",)
  others = advantages.others  # each costs a pass over both hosts
  advantages.others = lambda own: dict([*others(own).items()][:2])
  begun, run = note(coordinator.Run), folder / "run"
  call(run)
  call(run, "--mode=replay", f"--step={STEPS}")
  call(run, "--mode=replay", f"--spike={STEPS}")
  call(run, "--mode=eval")
  call(folder / "fork", f"--fork={run}@2")
  return [faulty_main.weights(r) for r in begun]


if __name__ == "__main__":
  index, port, folder = sys.argv[1:]
  sys.addaudithook(faulty_main.watch)
  address = f"127.0.0.1:{port}"
  hosts.initialize(address, 2, int(index), timeout_s=200)
  weights = work(pathlib.Path(folder))
  said = {"weights": weights, "opened": faulty_main.opened}
  print(json.dumps(said), flush=True)
