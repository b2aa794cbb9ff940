"""What the parts of `rollouts.py` share: sizes, engines, drivers, clocks.

Times are read as wall seconds and as CPU seconds of the whole process. What is
to be compared runs in turns, ABAB.., and the figure is the median over the
rounds of each round's ratio: a neighbour's load then disturbs both alike.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import decoding, placement
from drmas_jax import engine as engine_lib
from drmas_jax import sampler as sampler_lib
from drmas_jax.models import transformer

ROUNDS = 5
PROMPT, NEW = 64, 128
# A random model samples nearly uniformly: with so many stop ids of 2048 lengths
# are geometric, with a median near 40. Nothing knows them beforehand.
NUM_STOPS = 40
# Those of the peers' baselines; `length` is the room of a sequence.
SIZES = {
  "vocab_size": 2048,
  "embed_dim": 256,
  "num_layers": 8,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 64,
  "mlp_dim": 1024,
  "length": PROMPT + NEW,
}
MODEL = transformer.DecoderConfig(
  family="qwen3",
  max_positions=32_768,
  rope_theta=1e6,
  tied=True,
  qk_norm=True,
  **{name: size for name, size in SIZES.items() if name != "length"},
)


class Cost(NamedTuple):
  """Seconds."""

  wall: float
  cpu: float


class Silent:
  """A tokenizer for sequences that nobody reads."""

  stop_ids = ()

  def decode(self, ids, control=False):
    del ids, control
    return ""


def timed(run: Callable[[], Any]) -> Cost:
  wall, cpu = time.perf_counter(), time.process_time()
  run()
  return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(
  runs: Mapping[str, Callable[[], Cost]], rounds: int = ROUNDS
) -> dict[str, list[Cost]]:
  """Each once to warm up, then all of them in every round."""
  for run in runs.values():
    run()
  costs: dict[str, list[Cost]] = {name: [] for name in runs}
  for _ in range(rounds):
    for name, run in runs.items():
      costs[name].append(run())
  return costs


def median(costs: Sequence[Cost], clock: str) -> float:
  return statistics.median(getattr(c, clock) for c in costs)


def ratio(slow: Sequence[Cost], fast: Sequence[Cost], clock: str) -> float:
  """How many times as long `slow` takes; above 1 where `fast` is faster."""
  pairs = zip(slow, fast, strict=True)
  return round(
    statistics.median(getattr(s, clock) / getattr(f, clock) for s, f in pairs),
    2,
  )


def compare(
  costs: Mapping[str, Sequence[Cost]], ours: str, num_tokens: int
) -> dict:
  """Tokens a second of each, and how many times as long the others take."""
  found = {
    name: {
      "tokens_per_s": round(num_tokens / median(c, "wall")),
      "tokens_per_cpu_s": round(num_tokens / median(c, "cpu")),
    }
    for name, c in costs.items()
  }
  for name, c in costs.items():
    if name != ours:
      found[name] |= {
        "wall_ratio": ratio(c, costs[ours], "wall"),
        "cpu_ratio": ratio(c, costs[ours], "cpu"),
      }
  return found


# -- the command ---------------------------------------------------------------


def parser(about: str, parts: Mapping[str, Any]) -> argparse.ArgumentParser:
  """Of a benchmark of parts, some of them against peers."""
  made = argparse.ArgumentParser(
    description=about, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  made.add_argument("--parts", default=",".join(parts))
  made.add_argument("--tunix_python", default="")
  made.add_argument("--torch_python", default="")
  made.add_argument("--rounds", type=int, default=ROUNDS)
  return made


def parse(
  made: argparse.ArgumentParser, parts: Mapping[str, Any], *, torch: str
) -> tuple[argparse.Namespace, dict[str, str]]:
  """The arguments, with the parts as a list; and the interpreters given by
  peer, where `torch` is the name of torch's."""
  args = made.parse_args()
  args.parts = args.parts.split(",")
  if unknown := set(args.parts) - set(parts):
    made.error(f"--parts: {sorted(unknown)}; allowed are {list(parts)}")
  return args, {"tunix": args.tunix_python, torch: args.torch_python}


def report(
  parts: Mapping[str, Callable[..., Any]],
  args: argparse.Namespace,
  given: Mapping[str, str],
  *peers: Any,
) -> None:
  """Runs the parts that are asked for; prints a line of JSON for each when it
  is done, and as the last line all of them, however the run ends.

  Raises:
    SystemExit: a part failed, after the others have run; or SIGTERM came.
  """
  found = {
    "jax": jax.__version__,
    "cores": os.cpu_count(),
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", ""),  # large pages
    "load": [os.getloadavg()[0]],
    "left out": [name for name, python in given.items() if not python],
  }
  signal.signal(signal.SIGTERM, lambda *_: sys.exit("out of time"))
  failed = []
  try:
    for part in args.parts:
      try:
        found[part] = parts[part](args, *peers)
      except Exception as e:
        traceback.print_exc()
        found[part] = {"fault": f"{type(e).__name__}: {e}"}
        failed.append(part)
      print(json.dumps({part: found[part]}), flush=True)
  finally:
    found["load"].append(os.getloadavg()[0])
    print(json.dumps(found), flush=True)
  if failed:
    sys.exit(f"failed: {', '.join(failed)}")


# -- engines -------------------------------------------------------------------


def one_device() -> jax.sharding.Mesh:
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  return jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))


def spec(model=MODEL, **changes) -> decoding.Spec:
  """The engine of the uniform decode, with changes."""
  settings = {
    "model": model,
    "mesh": one_device(),
    "num_slots": 32,
    "max_length": PROMPT + NEW,
    "prefill_rows": 8,
    "prefill_buckets": (PROMPT,),
    "steps_per_call": 16,
    "stop_ids": (),
    "vocab_size": model.vocab_size,
  } | changes
  sizes = config_lib.Engine(
    num_slots=settings["num_slots"],
    max_length=settings["max_length"],
    page_size=settings.get("page_size", 0),
  )
  most, size = placement.pool(sizes)
  chosen = {
    "page_size": size,
    "max_pages": most,
    "lanes": placement.lanes(sizes),
  }
  return decoding.Spec(**chosen | settings)


def random_params(model=MODEL) -> Any:
  return jax.jit(transformer.init_params, static_argnums=0)(
    model, jax.random.key(0)
  )


def rollout_params(params: Any, dtype: str = "float32") -> Any:
  """As an engine takes them."""
  return jax.tree.map(lambda p: p.astype(dtype), transformer.unstack(params))


def make_sampler(
  params: Any, tokenizer: Any = None, **changes
) -> sampler_lib.Sampler:
  """A sampler that is ready, over an engine of its own."""
  made = spec(**changes)
  sampler = sampler_lib.Sampler(
    engine_lib.PolicyEngine(made), tokenizer or Silent()
  )
  sampler.resume(rollout_params(params, made.dtype), 0)
  return sampler


def request(
  key: tuple[int, int, int], prompt: np.ndarray, max_tokens: int, **changes
) -> sampler_lib.Request:
  """One that ends at a stop id of the engine or at max_tokens."""
  settings = {
    "sampling": config_lib.Sampling(),
    "closes": None,
    "shared_by": 1,
    "deadline": time.monotonic() + 600,
  }
  return sampler_lib.Request(
    id=key, prompt_ids=prompt, max_tokens=max_tokens, **settings | changes
  )


def serve(
  sampler: sampler_lib.Sampler,
  requests: Sequence[sampler_lib.Request],
  keep: bool = False,
) -> dict[tuple[int, int, int], sampler_lib.Completion]:
  """Plays requests to their end, and without `keep` their episodes, too."""
  for one in requests:
    sampler.submit(one)
  done = {}
  while sampler.busy:
    sampler.dispatch()
    for completion in sampler.harvest():
      done[completion.request.id] = completion
      if not keep:
        sampler.forget(*completion.request.id[:2])
  faults = [c.fault for c in done.values() if c.fault is not None]
  if faults or len(done) != len(requests):
    raise RuntimeError(f"{len(done)} of {len(requests)} came back; {faults}")
  return done


def stop_ids() -> tuple[int, ...]:
  """Drawn from the vocabulary; lengths are then skewed, see NUM_STOPS."""
  drawn = np.random.default_rng(0).choice(MODEL.vocab_size, NUM_STOPS, False)
  return tuple(sorted(drawn.tolist()))


def prompts(num: int, length: int = PROMPT, seed: int = 0) -> np.ndarray:
  """[num, length] random ids."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(1, MODEL.vocab_size - 1, (num, length))
  return ids.astype(np.int32)


# -- peers ---------------------------------------------------------------------


@dataclasses.dataclass
class Peer:
  """A peer's process, which waits for jobs; see `rollouts_peer`."""

  name: str
  process: subprocess.Popen
  limit_s: float = 600.0

  @classmethod
  def start(
    cls,
    name: str,
    python: str,
    script: str = "rollouts_peer.py",
    sizes: Mapping[str, int] = SIZES,
  ) -> "Peer":
    path = pathlib.Path(__file__).with_name(script)
    command = [python, str(path), name, json.dumps(sizes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = dict(os.environ)
    if python != sys.executable:  # begins as its users begin it
      env.pop("GLIBC_TUNABLES", None)
    return cls(name, subprocess.Popen(command, text=True, env=env, **pipes))

  def ask(self, job: Mapping[str, Any]) -> dict:
    print(json.dumps(job), file=self.process.stdin, flush=True)
    ready, _, _ = select.select([self.process.stdout], [], [], self.limit_s)
    line = self.process.stdout.readline() if ready else ""
    if not line:
      raise RuntimeError(f"{self.name} did not answer; see its messages above")
    return json.loads(line)

  def decode(
    self, prompt_ids: np.ndarray, steps: int, batch: int, threads: int
  ) -> Cost:
    return Cost(
      **self.ask(
        {
          "prompts": prompt_ids.tolist(),
          "steps": steps,
          "batch": batch,
          "threads": threads,
        }
      )
    )

  def stop(self) -> None:
    self.process.kill()
    self.process.wait(timeout=60)


class Way(NamedTuple):
  """A peer as it is run."""

  name: str
  peer: Peer
  threads: int

  def run(self, prompt_ids: np.ndarray, steps: int, batch: int):
    return lambda: self.peer.decode(prompt_ids, steps, batch, self.threads)


def ways(peers: Sequence[Peer]) -> list[Way]:
  """Torch also with one thread, which costs it fewer CPU seconds."""
  found = []
  for peer in peers:
    found.append(Way(peer.name, peer, os.cpu_count()))
    if peer.name == "transformers" and os.cpu_count() > 1:
      found.append(Way("transformers, 1 thread", peer, 1))
  return found
