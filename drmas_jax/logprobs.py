"""From hidden states to log-probs and entropy, without [B, T, V] in memory.

Sampler and learner both take the softmax here: tempered, full, in float32,
with the padded rows of the vocabulary masked, so that the first update's ratio
is 1 up to rounding.

Blocks run along V, and all tokens meet one block of the head at a time. Blocks
of tokens would add up the head's gradient, [D, V] in float32, once for each of
them (for D = 896, V = 151,936 that took 1.25 times as long on CPU, and a second
such array); here a block's gradient is whole when it is written, and of a head
that is sharded one block at a time is gathered.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drmas_jax import products

# Not -inf: 0 * -inf would be NaN in the entropy. Far from float32's ends, so
# that it stays finite and out of reach divided by any sensible temperature.
MASKED = -1e20


def logits(
  hidden: Float[Array, "*N D"], head: Float[Array, "D V"], vocab_size: int
) -> Float[Array, "*N V"]:
  """float32 logits; entries from `vocab_size` on (padding) are masked.

  Multiplied in the precision of `hidden` and summed in float32. `head` may be
  more precise than `hidden`: it is rounded here.
  """
  flat = hidden.reshape(-1, hidden.shape[-1])
  out = products.dot(flat, products.rounded(head, hidden.dtype))
  if vocab_size < head.shape[1]:
    out = jnp.where(jnp.arange(head.shape[1]) < vocab_size, out, MASKED)
  return out.reshape(*hidden.shape[:-1], head.shape[1])


def token_logprobs(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  *,
  vocab_size: int,
  chunk: int,
  ways: int = 1,
  tied: bool = False,
  with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
  """Log-prob of each target, and entropy, under the tempered full softmax.

      logp = log_softmax(hidden @ head / temperature)
      logprob = logp[target];  entropy = -sum(exp(logp) logp)

  Has gradients by `hidden` and `head`.

  Args:
    hidden: after the final norm.
    head: output embedding; V may be padded beyond `vocab_size`.
    targets: ids, each the token that follows its hidden state.
    temperature: per token; 0 (greedy) counts as 1.
    vocab_size: entries of the head that are tokens.
    chunk: logits of so many tokens, V each, are as much as exists at a time,
      forward and backward (they are computed again there), but at least 128
      entries of all tokens; 0 for all of them at once.
    ways: parts that V is sharded in.
    tied: the head is a transposed embedding, [V, D] in memory; blocks are cut
      from what is there, so that neither it nor its gradient is copied.
    with_entropy: False leaves the entropy out and returns None for it.

  Returns:
    (logprobs, entropy) in float32, in nats.
  """
  tempered = jnp.where(temperature == 0, 1.0, temperature)
  if not chunk or chunk >= targets.size:
    return _at_once(hidden, head, targets, tempered, vocab_size, with_entropy)
  dim, width = head.shape
  ways = 1 if width % ways else ways
  width //= ways
  least = -(-width * chunk // targets.size)
  size = min(width, -(-least // 128) * 128)
  stored = head.T if tied else head
  if ways > 1:
    stored = stored.reshape((ways, width, dim) if tied else (dim, ways, width))
  out = _by_block(
    _Blocks(vocab_size, size, -(-width // size), tied, with_entropy),
    hidden.reshape(-1, dim),
    stored,
    targets.reshape(-1),
    tempered.reshape(-1),
  )
  return jax.tree.map(lambda x: x.reshape(targets.shape), out)


def _at_once(hidden, head, targets, tempered, vocab_size, with_entropy):
  z = logits(hidden, head, vocab_size) / tempered[..., None]
  logp = jax.nn.log_softmax(z)
  # A masked sum, not a gather: it stays local where the vocabulary is sharded.
  here = jnp.arange(logp.shape[-1]) == targets[..., None]
  target = jnp.sum(jnp.where(here, logp, 0.0), axis=-1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1) if with_entropy else None
  return target, entropy


class _Blocks(NamedTuple):
  """How the head is gone through; static.

  Attributes:
    vocab_size: entries that are tokens.
    size: of a block: so many entries of each of the `ways` parts.
    num: of blocks. The last begins early where the size does not divide.
    tied: the head is [ways, width, D] or, of one part, [V, D]; otherwise
      [D, ways, width] or [D, V].
    with_entropy: whether it is wanted.
  """

  vocab_size: int
  size: int
  num: int
  tied: bool
  with_entropy: bool

  @property
  def axis(self) -> int:
    """Of the entries of a part."""
    return -2 if self.tied else -1


def _block(blocks, j, head, hidden, targets, tempered):
  """Block j's start, its part of the head [D, E], its logits [N, E] divided by
  the temperature, and where they are of the target."""
  dim, width = hidden.shape[1], head.shape[blocks.axis]
  ways = head.size // (dim * width)
  start = jnp.minimum(j * blocks.size, width - blocks.size)
  at = start + jnp.arange(blocks.size)
  ids = jnp.arange(ways)[:, None] * width + at
  own = (at >= j * blocks.size) & (ids < blocks.vocab_size)
  part = jax.lax.dynamic_slice_in_dim(head, start, blocks.size, blocks.axis)
  part = part.reshape(-1, dim).T if blocks.tied else part.reshape(dim, -1)
  part = products.rounded(part, hidden.dtype)
  z = products.dot(hidden, part) / tempered[:, None]
  here = (ids.reshape(-1) == targets[:, None]) & own.reshape(-1)
  return start, part, jnp.where(own.reshape(-1), z, MASKED), here


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_block(blocks, hidden, head, targets, tempered):
  """(log-probs, entropy or None) [N] of hidden [N, D] and a head as `blocks`
  says; a running softmax."""
  return _forward(blocks, hidden, head, targets, tempered)[0]


def _forward(blocks, hidden, head, targets, tempered):
  def body(j, carry):
    most, total, target, mean = carry
    _, _, z, here = _block(blocks, j, head, hidden, targets, tempered)
    new = jnp.maximum(most, jnp.max(z, axis=-1))
    z, rise = z - new[:, None], new - most
    weights, shrink = jnp.exp(z), jnp.exp(-rise)
    if blocks.with_entropy:  # `mean` of z - most: small where entropy is
      mean = (mean - total * rise) * shrink + jnp.sum(weights * z, axis=-1)
    total = total * shrink + jnp.sum(weights, axis=-1)
    target += jnp.sum(jnp.where(here, z + new[:, None], 0.0), axis=-1)
    return new, total, target, mean

  zeros = jnp.zeros(targets.shape, jnp.float32)
  start = (zeros + MASKED, zeros, zeros, zeros)
  most, total, target, mean = jax.lax.fori_loop(0, blocks.num, body, start)
  norm = most + jnp.log(total)
  entropy = jnp.log(total) - mean / total if blocks.with_entropy else None
  residuals = hidden, head, targets, tempered, norm, entropy
  return (target - norm, entropy), residuals


def _backward(blocks, residuals, grads):
  """d logprob / dz = [z is the target's] - p;  d entropy / dz = -p (logp + H)
  for logits z / temperature, p = exp(logp)."""
  hidden, head, targets, tempered, norm, entropy = residuals
  by_logprob, by_entropy = grads
  axis = blocks.axis
  dot = functools.partial(
    jax.lax.dot_general,
    precision=products.precision(hidden.dtype),
    preferred_element_type=jnp.float32,
  )

  def body(j, carry):
    to_hidden, to_head = carry
    start, part, z, here = _block(blocks, j, head, hidden, targets, tempered)
    logp = z - norm[:, None]
    p = jnp.exp(logp)
    dz = by_logprob[:, None] * (here - p)
    if blocks.with_entropy:
      dz -= by_entropy[:, None] * p * (logp + entropy[:, None])
    dz = (dz / tempered[:, None]).astype(hidden.dtype)
    to_hidden += dot(dz, part, (((1,), (1,)), ((), ())))
    both = (dz, hidden) if blocks.tied else (hidden, dz)
    # Added: the last block's first entries, not its own, are there already.
    old = jax.lax.dynamic_slice_in_dim(to_head, start, blocks.size, axis)
    new = old + dot(*both, (((0,), (0,)), ((), ()))).reshape(old.shape)
    to_head = jax.lax.dynamic_update_slice_in_dim(to_head, new, start, axis)
    return to_hidden, to_head

  start = jnp.zeros_like(hidden, jnp.float32), jnp.zeros_like(head, jnp.float32)
  to_hidden, to_head = jax.lax.fori_loop(0, blocks.num, body, start)
  to_hidden, to_head = (
    to_hidden.astype(hidden.dtype),
    to_head.astype(head.dtype),
  )
  return to_hidden, to_head, None, None


_by_block.defvjp(_forward, _backward)
