"""From logits to a token: temperature, top-k, top-p, greedy (rule 9).

A token is drawn by inverting the cumulative distribution at one uniform number
per row: one pass over the vocabulary, where Gumbel noise would draw V numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sample(NamedTuple):
  """One token per row.

  Attributes:
    token: [B] int32.
    logprob: [B] log-probability under the tempered FULL softmax.
    log_kept_mass: [B] log-probability of the set that top-k and top-p kept,
      at most 0; the token was drawn with logprob - log_kept_mass.
  """

  token: Int[Array, " B"]
  logprob: Float[Array, " B"]
  log_kept_mass: Float[Array, " B"]


def sample(
  keys: jax.Array,
  logits: Float[Array, "B V"],
  temperature: Float[Array, " B"],
  top_k: Int[Array, " B"],
  top_p: Float[Array, " B"],
) -> Sample:
  """Draws one token per row, each with its own key and settings.

  Args:
    keys: [B, 2] uint32, one key per row.
    logits: fp32; padded vocabulary entries very negative.
    temperature: 0 is greedy, with the log-probability at temperature 1.
    top_k: 0 keeps all; ties at the k-th value are all kept.
    top_p: the smallest set of most likely tokens whose mass reaches top_p.
  """
  greedy = temperature == 0
  scale = jnp.where(greedy, 1.0, temperature)[:, None]
  logprobs = jax.nn.log_softmax(logits / scale)
  narrow = (top_k > 0) | (top_p < 1)
  kept = jax.lax.cond(
    jnp.any(narrow),
    lambda: _truncate(logprobs, top_k, top_p),
    lambda: logprobs,
  )
  uniform = jax.vmap(jax.random.uniform)(keys)
  # A parallel cumsum rounds; made monotone, it rises only where there is mass,
  # and the first entry above u * total cannot lie outside the kept set.
  mass = jnp.exp(kept)
  cumulative = jax.lax.cummax(jnp.cumsum(mass, axis=-1), axis=1)
  total = cumulative[:, -1]
  above = (cumulative > uniform[:, None] * total[:, None]) & (mass > 0)
  drawn = jnp.argmax(above, axis=-1)
  token = jnp.where(greedy, jnp.argmax(logprobs, axis=-1), drawn)
  token = token.astype(jnp.int32)
  logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
  kept_mass = jnp.where(narrow & ~greedy, jnp.minimum(jnp.log(total), 0.0), 0.0)
  return Sample(token, logprob, kept_mass)


def root_key(seed: int, purpose: str) -> jax.Array:
  """The root of all keys of one purpose, [2] uint32 (DESIGN, decision 9)."""
  purposes = ("init", "train", "eval", "study")
  root = jax.random.key_data(jax.random.key(seed))
  return jax.random.fold_in(root, purposes.index(purpose))


def _truncate(
  logprobs: Float[Array, "B V"], top_k: jax.Array, top_p: jax.Array
) -> Float[Array, "B V"]:
  """-inf outside the kept set: top-k first, then top-p of what is left."""
  size = logprobs.shape[-1]
  ordered = -jnp.sort(-logprobs, axis=-1)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
  by_rank = jnp.where(jnp.arange(size) < k[:, None], ordered, -jnp.inf)
  mass = jnp.cumsum(jax.nn.softmax(by_rank, axis=-1), axis=-1)
  # A rank stays while the mass of those before it is short of top_p.
  before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
  by_rank = jnp.where(before < top_p[:, None], by_rank, -jnp.inf)
  lowest = jnp.min(jnp.where(jnp.isfinite(by_rank), by_rank, jnp.inf), -1)
  return jnp.where(logprobs >= lowest[:, None], logprobs, -jnp.inf)
