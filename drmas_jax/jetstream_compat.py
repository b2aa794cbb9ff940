"""The only place that imports jetstream, and mends it (release 0.2.2).

* `jetstream.engine.token_utils` imports two names of seqio, and with them
  TensorFlow (13 s, 0.6 GB). Two light stand-ins take their place while
  jetstream is imported, unless seqio is there already, and are removed after.
* `jetstream.core.orchestrator` sets the root logger to DEBUG with a handler on
  stdout. An exception in one of its driver's threads kills the process, and
  three come of nothing wrong: `delete_pytree` calls `jax.tree_map`, which is
  gone; the generate thread asserts that a slot is in use, but the last one may
  come free while it looks for another to fill; `pad_tokens` takes a list of
  tokens, which it is given with a session, for an array.
"""

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


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


def _start_again(generate: Callable[..., None]) -> Callable[..., None]:
  """A generate thread with no slot in use has nothing to lose."""

  @functools.wraps(generate)
  def thread(driver, idx):
    while driver.live:
      try:
        return generate(driver, idx)
      except AssertionError as error:
        if "some requests inserted" not in str(error):
          raise

  return thread


def _pad_tokens(tokens: Any, bos_id: int, pad_id: int, **kwargs) -> Any:
  """token_utils.pad_tokens of a list too; where there is nothing, a begin."""
  kwargs["is_bos"] = kwargs.get("is_bos", True) or not len(tokens)
  return _given_array(np.asarray(tokens, np.int32), bos_id, pad_id, **kwargs)


_given_array = token_utils.pad_tokens


@functools.cache
def orchestrator() -> types.ModuleType:
  """JetStream's own Driver, mended; to serve finished policies with."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  with _without_seqio():
    module = importlib.import_module("jetstream.core.orchestrator")
  root.setLevel(level)
  root.handlers[:] = handlers
  module.delete_pytree = _delete_pytree
  module.Driver._generate_thread = _start_again(module.Driver._generate_thread)
  token_utils.pad_tokens = _pad_tokens
  return module
