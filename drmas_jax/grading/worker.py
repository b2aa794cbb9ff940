"""The process behind `pool`: reads questions on stdin, writes verdicts.

One line of JSON each: [a, b, percent] in, and out {"same": bool}, or
{"error": text} where the work failed. The first line out says that imports are
done. The process limits its own memory, ends with its parent (end of input),
and is ended by its own alarm if nobody else ends it.
"""

import json
import signal
import sys

_MEGABYTE = 2**20


def main(memory_mb: int, alarm_s: float) -> None:
  """Answers until the input ends.

  Args:
    memory_mb: limit of the address space.
    alarm_s: seconds after which one verdict ends the process.
  """
  _limit_memory(memory_mb * _MEGABYTE)
  from drmas_jax.grading import algebra

  out, sys.stdout = sys.stdout, sys.stderr  # what prints is no verdict
  print("{}", file=out, flush=True)
  for line in sys.stdin:
    signal.setitimer(signal.ITIMER_REAL, alarm_s)  # its default ends us
    answer = _answer(algebra.verdict, line)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(answer), file=out, flush=True)


def _answer(verdict, line: str) -> dict:
  try:
    return {"same": bool(verdict(*json.loads(line)))}
  except MemoryError:
    return {"error": "out of memory"}
  except Exception as e:  # whatever it is, it is no verdict
    return {"error": f"{type(e).__name__}: {e}"[:500]}


def _limit_memory(num_bytes: int) -> None:
  try:
    import resource
  except ImportError:  # not a Unix
    return
  _, hard = resource.getrlimit(resource.RLIMIT_AS)
  if hard != resource.RLIM_INFINITY:
    num_bytes = min(num_bytes, hard)
  resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
