"""The only place that imports jetstream, and mends it (release 0.2.2).

* `jetstream.engine.token_utils` imports two names of seqio, and with them
  TensorFlow (13 s, 0.6 GB). Two light stand-ins take their place while
  jetstream is imported, unless seqio is there already, and are removed after.
* `jetstream.core.orchestrator` sets the root logger to DEBUG with a handler on
  stdout; and its `delete_pytree` calls `jax.tree_map`, which is gone: in a
  driver thread that exception kills the process.
"""

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def _without_seqio() -> Iterator[None]:
  if "seqio" in sys.modules:
    yield
    return
  seqio = types.ModuleType("seqio")
  vocabularies = types.ModuleType("seqio.vocabularies")
  for name in ("Vocabulary", "SentencePieceVocabulary"):
    setattr(vocabularies, name, type(name, (), {}))
  seqio.vocabularies = vocabularies
  stand_ins = {"seqio": seqio, "seqio.vocabularies": vocabularies}
  sys.modules.update(stand_ins)
  try:
    yield
  finally:
    for name in stand_ins:
      del sys.modules[name]


with _without_seqio():
  from jetstream.engine import engine_api, token_utils, tokenizer_pb2

Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
SlotData = engine_api.SlotData
TokenizerParameters = tokenizer_pb2.TokenizerParameters
Tokenizer = token_utils.tokenizer_api.Tokenizer


def _delete_pytree(tree) -> None:
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.delete()


def orchestrator() -> types.ModuleType:
  """JetStream's own Driver, mended; to serve finished policies with."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  with _without_seqio():
    module = importlib.import_module("jetstream.core.orchestrator")
  root.setLevel(level)
  root.handlers[:] = handlers
  module.delete_pytree = _delete_pytree
  return module
