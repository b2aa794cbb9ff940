"""Trained weights as a Hugging Face folder: for transformers, vLLM, a new run.

    python -m drmas_jax.export --workdir RUN --policy solver --out DIR
        [--step N|best] [--dtype float32|bfloat16|float16] [--peft]

DIR is like the folder that the policy began with: the same files hold the same
tensors in the same order, shapes and dtypes, next to copies of config.json,
tokenizer and chat template. generation_config.json names every end id that the
run stopped at, as config files and tokenizers often disagree on them.

Parameters are read one after another and written tensor by tensor: host memory
holds about twice the largest one (of all layers), and no optimizer state. No
accelerator is used, so an export may run beside the training that it is from.

A policy that is an adapter is merged into the weights below it, which are then
all in memory; with --peft, DIR has the adapter alone, as PEFT and vLLM load it.

Exit codes: 0 done; 2 something asked for is not there or does not fit (one
message, and DIR is as it was); 130 Ctrl-C.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.export",
    description="Writes a trained policy of a run as a Hugging Face folder.",
    allow_abbrev=False,
  )
  parser.add_argument("--workdir", required=True, help="folder of the run")
  parser.add_argument("--policy", required=True, help="its name in the config")
  parser.add_argument("--out", required=True, help="folder to be made")
  parser.add_argument(
    "--step",
    default="",
    help="a checkpoint's step, or best; the default is the newest",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="of all tensors; the default is each tensor's in the original folder",
  )
  parser.add_argument(
    "--peft",
    action="store_true",
    help="the adapter alone, and not merged into the weights below it",
  )
  return parser


def export(
  workdir: str | pathlib.Path,
  policy: str,
  out: str | pathlib.Path,
  step: str = "",
  dtype: str | None = None,
  peft: bool = False,
) -> str:
  """Writes `out`, whole or not at all; returns a line on what is in it.

  Args:
    workdir: of the run.
    policy: its name in the run's config.
    out: a folder that is not there yet, or empty.
    step: a number, "best", or "" for the newest.
    dtype: "float32", "bfloat16" or "float16"; None: as the original folder.
    peft: an adapter is written alone, in float32.

  Raises:
    ValueError: there is no such run, policy or step; the policy is frozen, so
      that its weights are in its own folder already; the folder that it began
      with is gone or changed; `out` holds something; or `peft` is asked of a
      policy without an adapter.
  """
  from drmas_jax.backbone import original_folder
  from drmas_jax.checkpoint import SavedPolicy
  from drmas_jax.models import weights
  from drmas_jax.tokenizer import Tokenizer

  out = pathlib.Path(out).expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ValueError(f"--out={out}: is there already; name another, or move it")
  saved = SavedPolicy(workdir, policy, step)
  if peft and saved.adapter is None:
    raise ValueError(
      f"--peft: {policy!r} trains all weights and has no adapter; leave it out"
    )
  if peft and saved.checkpoint.startswith("run:"):
    raise ValueError(
      f"--peft: the adapter is on {saved.checkpoint!r}, which PEFT cannot "
      "load; leave it out, and the two are merged"
    )
  original = original_folder(saved)
  stop_ids = Tokenizer.load(original).stop_ids
  model = weights.read_config(original)
  # Beside it, so that renaming it is one step; of an export that was killed.
  part = out.with_name(f"{out.name}.part")
  shutil.rmtree(part, ignore_errors=True)
  try:
    if peft:
      _write_adapter(part, saved, model, original)
    else:
      params = _merged if saved.adapter else _params
      weights.save(
        part, params(saved, model), model, like=original, dtype=dtype
      )
      _write_end_ids(part / "generation_config.json", stop_ids)
    part.rename(out)
  finally:
    shutil.rmtree(part, ignore_errors=True)
  return f"{out}: {saved.pinned}, like {original}; end ids {stop_ids}"


def _params(saved: Any, model: Any) -> Any:
  """The tree of parameters, each read from the checkpoint when it is called."""
  import jax

  from drmas_jax.models import transformer

  def reader(path, shape):
    keys = [key.key for key in path]

    def read():
      branch = shape
      for key in reversed(keys):
        branch = {key: branch}
      (found,) = jax.tree.leaves(saved.restore(branch))
      return found

    return read

  return jax.tree_util.tree_map_with_path(
    reader, transformer.param_shapes(model)
  )


def _adapters(saved: Any, model: Any) -> tuple[Any, Any]:
  """(settings, the policy's adapters), on the host."""
  import jax

  from drmas_jax import config as config_lib
  from drmas_jax.models import adapters, transformer

  adapter = config_lib.Adapter(
    **saved.adapter | {"targets": tuple(saved.adapter["targets"])}
  )
  shapes = adapters.shapes(
    transformer.param_shapes(model)["layers"], adapter, num_policies=1
  )
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
  )
  return adapter, saved.restore(one)


def _merged(saved: Any, model: Any) -> Any:
  """The tree of parameters, with the adapter in them."""
  from drmas_jax.backbone import original_folder
  from drmas_jax.checkpoint import SavedPolicy
  from drmas_jax.models import adapters, transformer, weights

  adapter, own = _adapters(saved, model)
  if saved.checkpoint.startswith("run:"):
    below = SavedPolicy.parse(saved.checkpoint)
    params = below.restore(transformer.param_shapes(model))
  else:
    params = weights.load(original_folder(saved), model)
  return params | {"layers": adapters.merge(params["layers"], own, adapter)}


def _write_adapter(
  folder: pathlib.Path, saved: Any, model: Any, original: pathlib.Path
) -> None:
  from drmas_jax.models import peft

  adapter, own = _adapters(saved, model)
  named = saved.checkpoint
  base = str(original) if named.startswith("tiny:") else named
  peft.save(folder, own, model, adapter, base)


def _write_end_ids(path: pathlib.Path, stop_ids: Sequence[int]) -> None:
  """A file that names them already stays as it is."""
  raw = json.loads(path.read_text()) if path.is_file() else {}
  there = raw.get("eos_token_id")
  if set(there if isinstance(there, list) else [there]) == set(stop_ids):
    return
  raw["eos_token_id"] = list(stop_ids)
  path.write_text(json.dumps(raw, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args = _parser().parse_args(argv)
  os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax loads
  try:
    print(export(**vars(args)))
  except (ValueError, OSError) as e:
    print(f"drmas_jax: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("drmas_jax: interrupted; nothing was written", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
