"""What transformers computes with a tiny random BERT, for the encoder's tests.

    pip install -e '.[parity]'
    python tests/parity/make_vectors.py

writes vectors.npz beside this file: vectors [texts, D] by pooling. The
checkpoint is not kept: `write` makes it from a seed by numpy alone.
"""

import json
import pathlib
import string

import numpy as np

PATH = pathlib.Path(__file__).with_name("vectors.npz")
POOLINGS = ("mean", "cls")
MAX_TOKENS = 24
TEXTS = (
  "who wrote the book",
  "The Book is by Ann Lee, of Oslo!",
  "a",
  "",
  "book " * 40,
)
_WORDS = ("who", "wrote", "the", "book", "is", "by", "ann", "lee", "of", "oslo")
_SIZES = {
  "hidden_size": 24,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "intermediate_size": 40,
  "max_position_embeddings": 48,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
  "hidden_act": "gelu",
  "model_type": "bert",
  "architectures": ["BertModel"],
}


def vocabulary() -> dict[str, int]:
  """Word pieces: special ones, words, letters and inner letters."""
  letters = string.ascii_lowercase + string.punctuation
  inner = [f"##{c}" for c in letters]
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  return {t: i for i, t in enumerate([*special, *_WORDS, *letters, *inner])}


def tensors() -> dict[str, np.ndarray]:
  """Tensor name -> float32, the same everywhere."""
  rng = np.random.RandomState(0)  # whose stream is frozen for good
  D, F = _SIZES["hidden_size"], _SIZES["intermediate_size"]
  found = {}

  def add(name, *shape, scale=1.0, center=0.0):
    values = center + scale * rng.standard_normal(shape)
    found[name] = values.astype(np.float32)

  def linear(name, num_out, num_in):
    add(f"{name}.weight", num_out, num_in, scale=num_in**-0.5)
    add(f"{name}.bias", num_out, scale=0.2)

  def norm(name):
    add(f"{name}.weight", D, scale=0.2, center=1.0)
    add(f"{name}.bias", D, scale=0.2)

  add("embeddings.word_embeddings.weight", len(vocabulary()), D)
  add("embeddings.position_embeddings.weight", 48, D, scale=0.5)
  add("embeddings.token_type_embeddings.weight", 2, D, scale=0.5)
  norm("embeddings.LayerNorm")
  for i in range(_SIZES["num_hidden_layers"]):
    layer = f"encoder.layer.{i}"
    for part in ("query", "key", "value"):
      linear(f"{layer}.attention.self.{part}", D, D)
    linear(f"{layer}.attention.output.dense", D, D)
    norm(f"{layer}.attention.output.LayerNorm")
    linear(f"{layer}.intermediate.dense", F, D)
    linear(f"{layer}.output.dense", D, F)
    norm(f"{layer}.output.LayerNorm")
  return found


def write(folder: pathlib.Path, pooling: str | None = "mean", **raw) -> None:
  """The checkpoint's folder; without the files of sentence-transformers where
  `pooling` is None. `raw` changes config.json."""
  import tokenizers
  from safetensors.numpy import save_file
  from tokenizers import models, normalizers, pre_tokenizers, processors

  folder.mkdir(parents=True, exist_ok=True)
  pieces = vocabulary()
  own = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
  own.normalizer = normalizers.BertNormalizer(lowercase=True)
  own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  own.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
  )
  own.save(str(folder / "tokenizer.json"))
  save_file(tensors(), str(folder / "model.safetensors"))
  files = {
    "config.json": _SIZES | {"vocab_size": len(pieces)} | raw,
    "tokenizer_config.json": {"pad_token": "[PAD]", "unk_token": "[UNK]"},
  }
  if pooling is not None:
    kinds = [("", "Transformer"), ("pool", "Pooling"), ("unit", "Normalize")]
    files |= {
      "modules.json": [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds
      ],
      "pool/config.json": {
        f"pooling_mode_{name}": name.startswith(pooling)
        for name in ("mean_tokens", "cls_token", "max_tokens")
      },
      "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS},
      "config_sentence_transformers.json": {
        "prompts": {"query": "who ", "document": "the "}
      },
    }
  for name, content in files.items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def compute(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Vectors of TEXTS without a prefix, by pooling."""
  import torch
  import transformers

  model = transformers.BertModel.from_pretrained(
    folder, dtype=torch.float32, add_pooling_layer=False
  ).eval()
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  batch = tokenizer(
    list(TEXTS),
    padding=True,
    truncation=True,
    max_length=MAX_TOKENS,
    return_tensors="pt",
    return_token_type_ids=False,
  )
  with torch.no_grad():
    hidden = model(**batch).last_hidden_state
  mask = batch["attention_mask"][:, :, None].float()
  pooled = {
    "mean": (hidden * mask).sum(1) / mask.sum(1),
    "cls": hidden[:, 0],
  }
  return {
    name: torch.nn.functional.normalize(v, dim=-1).numpy()
    for name, v in pooled.items()
  }


if __name__ == "__main__":
  import tempfile

  with tempfile.TemporaryDirectory() as made:
    write(pathlib.Path(made))
    np.savez_compressed(PATH, **compute(pathlib.Path(made)))
