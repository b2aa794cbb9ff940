"""From logits to a token: temperature, top-k, top-p, greedy (rule 9).

A token is drawn by inverting the cumulative distribution at one uniform number
per row, where Gumbel noise would draw V numbers: first among the sums of blocks
of the vocabulary, then within a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Of a temperature and of top_p: with less, float32 ends, and a row is NaN.
_LEAST = 1e-30
_ROUNDING = 1e-6  # of a sum of probabilities


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
  banned: Int[Array, "B N"] | None = None,
) -> Sample:
  """Draws one token per row, each with its own key and settings.

  Args:
    keys: [B, 2] uint32, one key per row.
    logits: fp32; padded vocabulary entries very negative.
    temperature: 0 is greedy, with the log-probability at temperature 1.
    top_k: 0 keeps all; ties at the k-th value are all kept.
    top_p: the smallest set of most likely tokens whose mass reaches top_p.
    banned: ids that are not kept, filled with -1; top-k and top-p are of what
      is left.
  """
  if banned is None:
    banned = jnp.full([logits.shape[0], 1], -1)
  greedy = temperature == 0
  temperature = jnp.maximum(temperature, _LEAST)
  # In this order: a large quotient would be rounded by more than 1.
  logits -= jnp.max(logits, axis=-1, keepdims=True)
  logits /= jnp.where(greedy, 1.0, temperature)[:, None]
  mass = jnp.exp(logits)
  total = jnp.sum(mass, axis=-1)
  barred = jnp.any(banned >= 0, axis=-1)
  narrow = (top_k > 0) | (top_p < 1) | barred

  def narrowed():
    kept = _truncate(_without(logits, banned), top_k, top_p)
    return kept, *_kept_mass(kept, mass, barred)

  kept, kept_mass, most = jax.lax.cond(
    jnp.any(narrow), narrowed, lambda: (logits, mass, jnp.zeros_like(total))
  )
  uniform = jax.vmap(jax.random.uniform)(keys)
  drawn, kept_total = _invert(kept_mass, uniform)
  token = jax.lax.cond(
    jnp.any(greedy),
    lambda: jnp.where(greedy, jnp.argmax(kept, axis=-1), drawn),
    lambda: drawn,
  ).astype(jnp.int32)
  logprob = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
  log_kept = jnp.minimum(jnp.log(kept_total / total) + most, 0.0)
  return Sample(
    token,
    logprob - jnp.log(total),
    jnp.where(narrow & ~greedy, log_kept, 0.0),
  )


def _kept_mass(
  kept: Float[Array, "B V"],
  mass: Float[Array, "B V"],
  barred: Bool[Array, " B"],
) -> tuple[Float[Array, "B V"], Float[Array, " B"]]:
  """Of what is kept, and the logarithm of what it is to be multiplied with."""
  # What is banned may have all but the whole mass: the rest is scaled anew.
  most = jnp.where(barred, jnp.max(kept, axis=-1), 0.0)
  scaled = jnp.exp(kept - most[:, None])
  # Elsewhere it is the very mass, whatever others ask for (rule 26).
  same = jnp.where(jnp.isfinite(kept), mass, 0.0)
  return jnp.where(barred[:, None], scaled, same), most


def _invert(
  mass: Float[Array, "B V"], uniform: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """The place where the cumulative sum passes uniform * total, and the total.

  Whatever rounding does, the place has mass.
  """
  rows, size = mass.shape
  width = 1 << (size.bit_length() // 2)  # about the square root
  mass = jnp.pad(mass, [(0, 0), (0, -size % width)])
  blocks = mass.reshape(rows, -1, width)
  block_mass = jnp.sum(blocks, axis=-1)
  # A parallel sum may fall; made monotone, it does not.
  ends = jax.lax.cummax(jnp.cumsum(block_mass, axis=-1), axis=1)
  total = ends[:, -1]
  goal = uniform * total
  passed = (ends > goal[:, None]) & (block_mass > 0)
  block = jnp.argmax(passed, axis=-1)[:, None]
  start = jnp.take_along_axis(ends - block_mass, block, axis=-1)
  inner = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
  passed = (start + jnp.cumsum(inner, axis=-1) > goal[:, None]) & (inner > 0)
  # Where rounding lets none pass, it is the last that has mass.
  last = width - 1 - jnp.argmax(inner[:, ::-1] > 0, axis=-1)
  place = jnp.where(jnp.any(passed, -1), jnp.argmax(passed, axis=-1), last)
  return block[:, 0] * width + place, total


def _without(
  logits: Float[Array, "B V"], banned: Int[Array, "B N"]
) -> Float[Array, "B V"]:
  rows = jnp.arange(logits.shape[0])[:, None]
  place = jnp.where(banned < 0, logits.shape[1], banned)
  return logits.at[rows, place].set(-jnp.inf, mode="drop")


def root_key(seed: int, purpose: str) -> jax.Array:
  """The root of all keys of one purpose, [2] uint32 (DESIGN, decision 9)."""
  purposes = ("init", "train", "eval", "study")
  root = jax.random.key_data(jax.random.key(seed))
  return jax.random.fold_in(root, purposes.index(purpose))


def _truncate(
  logits: Float[Array, "B V"], top_k: jax.Array, top_p: jax.Array
) -> Float[Array, "B V"]:
  """-inf outside the kept set: top-k first, then top-p of what is left."""
  size = logits.shape[-1]
  ordered = -jnp.sort(-logits, axis=-1)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
  by_rank = jnp.where(jnp.arange(size) < k[:, None], ordered, -jnp.inf)
  mass = jnp.cumsum(jax.nn.softmax(by_rank, axis=-1), axis=-1)
  # A rank stays while the mass of those before it is short of top_p, by more
  # than a sum is rounded. At 1 all do, or others' settings would be felt.
  before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
  goal = jnp.maximum(top_p * (1 - _ROUNDING), _LEAST)
  stays = before < goal[:, None]
  stays |= (top_p >= 1)[:, None]
  by_rank = jnp.where(stays, by_rank, -jnp.inf)
  lowest = jnp.min(jnp.where(jnp.isfinite(by_rank), by_rank, jnp.inf), -1)
  return jnp.where(logits >= lowest[:, None], logits, -jnp.inf)
