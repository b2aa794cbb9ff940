"""`drmas_jax.main` that ends at a chosen moment of its run, or tells of itself.

    python faulty_main.py FAULT ..flags of drmas_jax.main

FAULT is SIGNAL:MOMENT:STEP, such as SIGKILL:rollout:3, or "none". The moments:

    rollout     within the rollout of that step
    update      one policy is updated and the other is not
    evaluation  within the evaluation after that step
    written     its metrics are on disk, its checkpoint is not begun
    save        its checkpoint is written and not yet committed

The last line of the output, where the process comes to an end of its own, is a
JSON object: whether TensorFlow was imported, which files were opened for
writing, and a digest of the weights in learner and engine.
"""

import functools
import hashlib
import json
import os
import runpy
import signal
import sys

from drmas_jax import coordinator, hosts, placement, signals, writers
from drmas_jax.backbone import Backbone

Run = coordinator.Run
opened: list[str] = []
_now: dict = {"training": None, "in": "", "fired": False}


def _wrap(owner, name, before=None, after=None):
  method = getattr(owner, name)

  @functools.wraps(method)
  def wrapped(self, *args, **kwargs):
    if before is not None:
      before(self)
    result = method(self, *args, **kwargs)
    if after is not None:
      after(self)
    return result

  setattr(owner, name, wrapped)


def _set_fault(number, moment, step):
  def here(name):
    return moment == name and _now["in"] == name

  def fire():
    if not _now["fired"]:
      _now["fired"] = True
      os.kill(os.getpid(), number)

  def beat(_):
    done = _now["training"].step_done
    if (here("rollout") and done == step - 1) or (
      here("evaluation") and done == step
    ):
      fire()

  def updated(_):
    if moment == "update" and _now["training"].step_done == step - 1:
      fire()

  def flushed(_):
    if moment == "written" and _now["training"].step_done == step:
      fire()

  def audit(event, args):
    if event == "os.rename" and moment == "save":
      folder = os.path.basename(os.fspath(args[0]))
      if folder.startswith(f"{step}.orbax-checkpoint-tmp"):
        fire()

  def enter(name):
    return lambda _: _now.update({"in": name})

  _wrap(Run, "_collect", enter("rollout"), enter(""))
  _wrap(Run, "evaluate", enter("evaluation"), enter(""))
  _wrap(signals.Stop, "check", beat)
  _wrap(Backbone, "update", after=updated)
  _wrap(writers.RunWriter, "flush", after=flushed)
  sys.addaudithook(audit)


def watch(event, args):
  if (
    event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
  ):
    opened.append(os.fsdecode(args[0]))


def _digest(tree) -> str:
  import jax

  arrays = jax.tree.leaves(placement.fetch(tree))
  return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def _tell(backbone):
  if backbone.engines:
    digest = _digest([e.params for e in backbone.engines])
    print(f"engines of {backbone.name}: {digest}", flush=True)


def weights(run) -> dict:
  """Digests of what learners and engines of this host hold."""
  return {
    "learner": {n: _digest(b.state) for n, b in run.backbones.items()},
    "engine": {
      n: _digest([e.params for e in b.engines])
      for n, b in run.backbones.items()
    },
  }


def main() -> int:
  """SILENT_S and GRACE_S in the environment: two of the package's limits. TELL:
  a line for the weights of a policy's engines whenever they get them."""
  fault = sys.argv.pop(1)
  for module, name in ((hosts, "SILENT_S"), (signals, "GRACE_S")):
    if name in os.environ:
      setattr(module, f"_{name}", float(os.environ[name]))
  if fault != "none":
    name, moment, step = fault.split(":")
    _set_fault(getattr(signal, name).value, moment, int(step))
  if "TELL" in os.environ:
    _wrap(Backbone, "resume", after=_tell)
  _wrap(Run, "restore", lambda self: _now.update(training=self))
  sys.addaudithook(watch)
  try:
    runpy.run_module("drmas_jax.main", run_name="__main__", alter_sys=True)
  except SystemExit as e:
    code = e.code
  said = {"tensorflow": "tensorflow" in sys.modules, "opened": opened}
  if _now["training"] is not None:
    said |= weights(_now["training"])
  print(json.dumps(said), flush=True)
  return code


if __name__ == "__main__":
  sys.exit(main())
