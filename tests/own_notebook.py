"""Three runs in one process, as in a notebook; see test_own_team.py.

    python own_notebook.py FOLDER '{"key": value}'

In FOLDER lies own_team. The last line of the output is a JSON object: what each
run came to, the bytes on devices behind it, and whether signals are as before.
"""

import dataclasses
import json
import os
import signal
import sys
import threading

os.chdir(sys.argv[1])
sys.path.insert(0, "")
changes = json.loads(sys.argv[2])

import jax  # noqa: E402

from drmas_jax import config, run  # noqa: E402

results, left = [], []


def one(source, workdir, **more):
  results.append(run(source, workdir, **(changes | more)))
  left.append(sum(x.nbytes for x in jax.live_arrays()))


before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
one("own_team/config.py", "first", steps=1)
own = config.load_file("own_team/config.py")
one(own, "first")  # goes on to its two steps
after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
for name, checkpoint in results[-1].policies.items():
  own["policies"][name]["checkpoint"] = checkpoint
last = threading.Thread(
  target=one, args=(config.build(own), "second"), kwargs={"steps": 1}
)
last.start()
last.join()
print(
  json.dumps(
    {
      "results": [dataclasses.asdict(r) for r in results],
      "left": left,
      "signals": before == after,
    },
    default=str,
  )
)
