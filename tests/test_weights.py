"""Hugging Face folders: what is read, what is written, what is refused."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from parity import make_numbers
from safetensors.numpy import load_file, save_file

from drmas_jax.models import files, transformer, weights

pytestmark = pytest.mark.quick


def _write(folder, name, **changes):
  """A case's folder, with tensors added, replaced or (None) left out."""
  tensors = make_numbers.tensors(name) | changes
  tensors = {k: v for k, v in tensors.items() if v is not None}
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(make_numbers.CASES[name]))
  save_file(tensors, folder / "model.safetensors")
  return folder


def _shard(folder):
  """Splits a folder's file in two shards with an index."""
  tensors = load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names, index = sorted(tensors), {}
  for i, part in enumerate((names[::2], names[1::2])):
    file = f"model-{i + 1:05}-of-00002.safetensors"
    save_file({n: tensors[n] for n in part}, folder / file)
    index |= dict.fromkeys(part, file)
  (folder / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {}, "weight_map": index})
  )


def _load(folder, mesh=None, **kwargs):
  return weights.load(folder, weights.read_config(folder), mesh, **kwargs)


def _assert_same(a, b):
  def same(x, y):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)

  jax.tree.map(same, a, b)


@pytest.mark.parametrize("name", make_numbers.CASES)
def test_round_trip_is_exact(name, tmp_path):
  source = _write(tmp_path / "a", name)
  config, params = weights.read_config(source), _load(source)
  weights.save(tmp_path / "b", params, config)
  assert weights.read_config(tmp_path / "b") == config
  _assert_same(_load(tmp_path / "b"), params)
  written = load_file(tmp_path / "b" / "model.safetensors")
  expected = make_numbers.tensors(name)
  assert written.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_array_equal(written[key], value, err_msg=key)


def test_layout_of_a_product(tmp_path):
  """q[l, d, h, c] is q_proj[h C + c, d] of layer l; o the other way round."""
  params = _load(_write(tmp_path / "a", "qwen3"))["layers"]["attention"]
  tensors = make_numbers.tensors("qwen3")
  q = tensors["model.layers.1.self_attn.q_proj.weight"]
  o = tensors["model.layers.1.self_attn.o_proj.weight"]
  assert params["q"][1, 7, 3, 5] == q[3 * 32 + 5, 7]
  assert params["o"][1, 3, 5, 7] == o[7, 3 * 32 + 5]


def test_sharded_files_and_mesh_equal_the_single_file(tmp_path, mesh):
  folder = _write(tmp_path / "a", "qwen2_untied")
  single = _load(folder)
  _shard(folder)
  _assert_same(_load(folder), single)
  spread = _load(folder, mesh)
  _assert_same(spread, single)
  shard = spread["layers"]["attention"]["q"].addressable_shards[0]
  assert shard.data.shape == (2, 16, 2, 8)


def test_bfloat16_file_and_dtype(tmp_path):
  folder = _write(tmp_path / "a", "llama")
  half = {
    k: v.astype(ml_dtypes.bfloat16)
    for k, v in make_numbers.tensors("llama").items()
  }
  save_file(half, folder / "model.safetensors")
  params = _load(folder)
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
  np.testing.assert_array_equal(
    params["embedding"],
    half["model.embed_tokens.weight"].astype(np.float32),
  )
  params = _load(folder, dtype=ml_dtypes.bfloat16)
  weights.save(tmp_path / "b", params, weights.read_config(folder))
  written = load_file(tmp_path / "b" / "model.safetensors")
  assert written.keys() == half.keys()
  for key, value in half.items():
    np.testing.assert_array_equal(written[key], value)
  raw = json.loads((tmp_path / "b" / "config.json").read_text())
  assert raw["torch_dtype"] == "bfloat16"


def test_float16_file(tmp_path):
  folder = _write(tmp_path / "a", "qwen3")
  half = {
    k: v.astype(np.float16) for k, v in make_numbers.tensors("qwen3").items()
  }
  save_file(half, folder / "model.safetensors")
  np.testing.assert_array_equal(
    _load(folder)["layers"]["attention_norm"][1],
    half["model.layers.1.input_layernorm.weight"].astype(np.float32),
  )


# -- how it is read ------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one device", "mesh", "sharded file"])
def test_every_byte_is_read_once(tmp_path, monkeypatch, mesh, layout):
  """A tied head in the file among them, which is compared and dropped."""
  embedding = make_numbers.tensors("qwen3")["model.embed_tokens.weight"]
  folder = _write(tmp_path / "a", "qwen3", **{"lm_head.weight": embedding})
  if layout == "sharded file":
    _shard(folder)
  spans, read = [], np.fromfile

  def counted(path, dtype, count, offset):
    spans.append((str(path), offset, offset + count))
    return read(path, dtype, count, offset=offset)

  monkeypatch.setattr(files.np, "fromfile", counted)
  params = _load(folder, mesh if layout == "mesh" else None)
  _assert_same(params, _load(_write(tmp_path / "b", "qwen3")))
  spans = sorted(s for s in spans if s[0].startswith(str(folder)))
  for path in folder.glob("*.safetensors"):
    own = [s[1:] for s in spans if s[0] == str(path)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(own)), path
    assert own[-1][1] == path.stat().st_size
    assert own[0][0] == min(t.start for t in files.header(path).values())


def _big(folder, dtype, vocab=24_000, embed=256, layers=2):
  """A checkpoint of zeros, most of it an embedding and a copy of it as head."""
  config = dataclasses.replace(
    weights.public_sizes("Qwen/Qwen3-0.6B"),
    vocab_size=vocab,
    embed_dim=embed,
    num_layers=layers,
    mlp_dim=2 * embed,
  )
  shapes = transformer.param_shapes(config)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, dtype), shapes)
  weights.save(folder, zeros, config)
  tensors = load_file(folder / "model.safetensors")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  save_file(tensors, folder / "model.safetensors")
  return config, vocab * embed * np.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [False, True])
def test_the_host_holds_one_tensor_at_a_time(tmp_path, mesh, dtype, spread):
  """At most 1.3 times the largest; what the devices hold is not counted."""
  config, largest = _big(tmp_path, dtype)
  load = functools.partial(
    weights.load, tmp_path, config, mesh if spread else None
  )
  load()  # compiles
  peaks = []
  # When JAX's thread frees what it has copied is chance on a busy machine.
  for _ in range(3):
    tracemalloc.start()
    try:
      load()
      peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
      tracemalloc.stop()
  peak = min(peaks)
  assert largest < peak + 1e6 and peak < 1.3 * largest


_PEAK = """
import pathlib, re, sys
import jax
from drmas_jax.models import files, transformer, weights

def memory(what):
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(what + r":\\s+(\\d+)", text)[1])

config = weights.read_config(sys.argv[1])
weights.load(sys.argv[2], weights.read_config(sys.argv[2]))  # libraries
before = memory("VmRSS")
params = weights.load(sys.argv[1], config)
print(memory("VmHWM") - before - sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_the_process(tmp_path, dtype):
  """The same, as the system counts it: pages of files, copies of JAX and the
  heap of the compiler included, for which 100 MB are allowed."""
  if not pathlib.Path("/proc/self/status").exists():
    pytest.skip("the peak is read from /proc, which Linux alone has")
  _, largest = _big(tmp_path / "a", dtype, vocab=128_000, embed=1024, layers=8)
  _big(tmp_path / "b", dtype)
  done = subprocess.run(
    [sys.executable, "-c", _PEAK, tmp_path / "a", tmp_path / "b"],
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) < 1.3 * largest + 100e6


def test_parameters_do_not_follow_the_file(tmp_path):
  """A folder may be written again while its weights are in use."""
  folder = _write(tmp_path / "a", "llama")
  params = _load(folder)
  before = jax.tree.map(np.array, params)
  path = folder / "model.safetensors"
  with path.open("r+b") as file:
    file.seek(-4096, 2)
    file.write(b"\x7f" * 4096)
  _assert_same(params, before)


def test_save_like_copies_the_other_files(tmp_path):
  source = _write(tmp_path / "a", "qwen2")
  raw = json.loads((source / "config.json").read_text())
  raw |= {"eos_token_id": 3, "dtype": "bfloat16"}
  (source / "config.json").write_text(json.dumps(raw))
  (source / "tokenizer.json").write_text("{}")
  (source / "chat_template.jinja").write_text("x")
  weights.save(
    tmp_path / "b",
    _load(source),
    weights.read_config(source),
    like=source,
    dtype="float32",
  )
  assert {p.name for p in (tmp_path / "b").iterdir()} == {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
  }
  written = json.loads((tmp_path / "b" / "config.json").read_text())
  assert written["eos_token_id"] == 3
  assert "dtype" not in written and written["torch_dtype"] == "float32"


# -- what is refused -----------------------------------------------------------


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path):
  folder = _write(
    tmp_path / "a",
    "llama",
    **{
      "model.layers.1.mlp.up_proj.weight": None,
      "model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32),
      "model.norm.weight": np.zeros(31, np.float32),
    },
  )
  with pytest.raises(ValueError) as e:
    _load(folder)
  message = str(e.value)
  assert "of the family llama3 (LlamaForCausalLM)" in message
  assert "model.layers.1.mlp.up_proj.weight is missing" in message
  assert "model.layers.2.mlp.up_proj.weight is surplus" in message
  assert "model.norm.weight is (31,), config.json asks for (32,)" in message
  assert message.count("model.") == 3


def test_a_transposed_tensor_is_refused(tmp_path):
  name = "model.layers.0.mlp.up_proj.weight"
  turned = np.ascontiguousarray(make_numbers.tensors("llama")[name].T)
  folder = _write(tmp_path / "a", "llama", **{name: turned})
  with pytest.raises(ValueError, match=r"up_proj.weight is \(32, 48\)"):
    _load(folder)


def test_rotary_buffers_are_ignored(tmp_path):
  key = "model.layers.0.self_attn.rotary_emb.inv_freq"
  folder = _write(tmp_path / "a", "llama", **{key: np.ones(4, np.float32)})
  _assert_same(_load(folder), _load(_write(tmp_path / "b", "llama")))


def test_tied_head(tmp_path):
  embedding = make_numbers.tensors("qwen2")["model.embed_tokens.weight"]
  same = _write(tmp_path / "a", "qwen2", **{"lm_head.weight": embedding})
  assert "head" not in _load(same)
  other = _write(tmp_path / "b", "qwen2", **{"lm_head.weight": embedding + 1})
  with pytest.raises(ValueError, match=r"lm_head.weight differs from"):
    _load(other)
  untied = _write(tmp_path / "c", "llama", **{"lm_head.weight": None})
  with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
    _load(untied)


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("config.json", "[1]", "config.json: holds no JSON object"),
    ("config.json", "{", "config.json: not JSON"),
    ("model.safetensors.index.json", "{}", "index.json: has no weight_map"),
  ],
)
def test_json_of_a_wrong_shape(tmp_path, name, text, message):
  folder = _write(tmp_path / "a", "llama")
  config = weights.read_config(folder)
  (folder / "model.safetensors").unlink()
  (folder / name).write_text(text)
  with pytest.raises(ValueError, match=message):
    weights.read_config(folder)
    weights.load(folder, config)


def test_a_number_that_is_text(tmp_path):
  folder = _write(tmp_path / "a", "llama")
  raw = json.loads((folder / "config.json").read_text())
  raw["hidden_size"] = "many"
  (folder / "config.json").write_text(json.dumps(raw))
  with pytest.raises(
    ValueError, match="embed_dim is 'many'; it must be of int"
  ):
    weights.read_config(folder)


def test_missing_folder_and_files(tmp_path):
  with pytest.raises(ValueError, match="nowhere: no such checkpoint folder"):
    weights.read_config(tmp_path / "nowhere")
  with pytest.raises(ValueError, match=r"config.json: no such file"):
    weights.read_config(tmp_path)


def _no_weights(folder):
  (folder / "model.safetensors").unlink()


def _a_folder_in_their_place(folder):
  _no_weights(folder)
  (folder / "model.safetensors").mkdir()


def _other_format(folder):
  _no_weights(folder)
  (folder / "pytorch_model.bin").write_bytes(b"x")


def _empty(folder):
  (folder / "model.safetensors").write_bytes(b"")


def _cut_short(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-1])


def _grown(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes() + b"x")


def _something_else(folder):
  (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 9)


def _absent_shard(folder):
  _shard(folder)
  (folder / "model-00002-of-00002.safetensors").unlink()


def _a_folder_for_a_shard(folder):
  _absent_shard(folder)
  (folder / "model-00002-of-00002.safetensors").mkdir()


def _stale_shard(folder):
  _shard(folder)
  (folder / "model-00003-of-00003.safetensors").write_bytes(b"x")


def _both_layouts(folder):
  whole = (folder / "model.safetensors").read_bytes()
  _shard(folder)
  (folder / "model.safetensors").write_bytes(whole)


def _in_two_shards(folder):
  _shard(folder)
  path = folder / "model-00002-of-00002.safetensors"
  twice = {"lm_head.weight": make_numbers.tensors("llama")["lm_head.weight"]}
  save_file(load_file(path) | twice, path)


def _eight_bits(folder):
  tensors = make_numbers.tensors("llama")
  name = "model.layers.1.mlp.up_proj.weight"
  tensors[name] = tensors[name].astype(np.int8)
  save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (_no_weights, "has neither model.safetensors nor .*: no weights at all"),
    (_a_folder_in_their_place, "has neither model.safetensors nor"),
    (_other_format, "pytorch_model.bin; fetch or save .* as safetensors"),
    (_empty, "model.safetensors: cannot be read"),
    (_cut_short, "model.safetensors: cannot be read: it has .* bytes"),
    (_grown, "model.safetensors: cannot be read: it has .* bytes"),
    (_something_else, "model.safetensors: cannot be read"),
    (_absent_shard, "files that are not there: model-00002-of-00002"),
    (_a_folder_for_a_shard, "files that are not there: model-00002-of-00002"),
    (_stale_shard, "model-00003-of-00003.safetensors would not be read"),
    (_both_layouts, "model-00001-of-00002.safetensors, .* would not be read"),
    (_in_two_shards, "lm_head.weight is in model-00001.* and in model-00002"),
    (_eight_bits, "layers.1.mlp.up_proj.weight is of I8, allowed are F32, BF"),
  ],
)
def test_broken_weights_are_refused_before_any_device_work(
  tmp_path, monkeypatch, spoil, message
):
  """Case L07, and its kind."""
  folder = _write(tmp_path / "a", "llama")
  config = weights.read_config(folder)
  spoil(folder)
  monkeypatch.setattr(weights, "_programs", lambda *_: pytest.fail("too late"))
  with pytest.raises(ValueError, match=message) as e:
    weights.load(folder, config)
  assert str(folder) in str(e.value)


def test_a_folder_named_like_a_file_is_no_part(tmp_path):
  folder = _write(tmp_path / "a", "llama")
  (folder / "x.safetensors").mkdir()
  _assert_same(_load(folder), _load(_write(tmp_path / "b", "llama")))


def test_names_of_another_model(tmp_path):
  """Case L10: the first names that do not fit, and the family expected."""
  folder = _write(tmp_path / "a", "llama")
  tensors = make_numbers.tensors("llama")
  save_file(
    {f"language_model.{k}": v for k, v in tensors.items()},
    folder / "model.safetensors",
  )
  with pytest.raises(ValueError) as e:
    _load(folder)
  message, num = str(e.value), len(tensors)
  first = sorted(tensors)[0]
  assert "llama3 (LlamaForCausalLM)" in message
  assert f"language_model.{first} is surplus" in message
  assert f"{first} is missing" in message
  assert message.count(f"and {num - 8} more") == 2
  assert len(message) < 2000


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"architectures": ["GemmaForCausalLM"]},
      "'GemmaForCausalLM' is not supported; allowed are LlamaForCausalLM, "
      "Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_theta: null; write"),
    (
      {  # as one adds it to a file of transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
      },
      "is not what rope_parameters says",
    ),
    (
      {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
      "['full_attention'] apart",
    ),
    ({"attention_bias": True}, "attention_bias: True is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "be trained; take"),
    ({"layer_types": ["sliding_attention"]}, "layer_types: ['sliding_att"),
    ({"tie_word_embeddings": "no"}, "tied is 'no'; it must be of bool"),
    ({"rms_norm_eps": "1e-6"}, "norm_eps is '1e-6'; it must be of float"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window: True"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
  ],
)
def test_config_that_the_decoder_cannot_do(changes, message, tmp_path):
  raw = make_numbers.CASES["llama"] | changes
  raw = {k: v for k, v in raw.items() if v is not None}
  (tmp_path / "config.json").write_text(json.dumps(raw))
  with pytest.raises(ValueError, match=r"config.json") as e:
    weights.read_config(tmp_path)
  assert message in str(e.value)


def test_config_of_transformers_4_and_5(tmp_path):
  """Version 5 keeps theta and scaling in `rope_parameters`."""
  raw = dict(make_numbers.CASES["llama32"])
  (tmp_path / "config.json").write_text(json.dumps(raw))
  old = weights.read_config(tmp_path)
  assert old.rope_theta == 5e5 and old.rope_scaling.factor == 32.0
  rope = {"rope_theta": raw.pop("rope_theta"), **raw.pop("rope_scaling")}
  raw["rope_parameters"] = rope
  del raw["architectures"]
  (tmp_path / "config.json").write_text(json.dumps(raw))
  assert weights.read_config(tmp_path) == old


def test_defaults_of_absent_keys(tmp_path):
  """Grouping, head size and theta may be left out."""
  raw = dict(make_numbers.CASES["qwen3_untied"])
  for key in ("head_dim", "num_key_value_heads", "rope_theta"):
    del raw[key]
  (tmp_path / "config.json").write_text(json.dumps(raw))
  config = weights.read_config(tmp_path)
  assert (config.head_dim, config.num_kv_heads) == (128, 6)
  assert config.rope_theta == 10_000.0


def test_save_replaces_what_is_there(tmp_path):
  folder = _write(tmp_path / "a", "llama_tied")
  config, params = weights.read_config(folder), _load(folder)
  moved = jax.tree.map(lambda x: x + 1, params)
  weights.save(folder, moved, config)
  _assert_same(_load(folder), moved)
