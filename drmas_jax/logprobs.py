"""From hidden states to log-probs and entropy, without [B, T, V] in memory.

Sampler and learner both take the softmax here: tempered, full, in float32,
with the padded rows of the vocabulary masked, so that the first update's ratio
is 1 up to rounding.

Chunks run along T, not B: rows are sharded over the mesh, and a chunk of every
row keeps all shards at work and moves nothing between them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Not -inf: 0 * -inf would be NaN in the entropy. Far from float32's ends, so
# that it stays finite and out of reach divided by any sensible temperature.
MASKED = -1e20


def logits(
  hidden: Float[Array, "*N D"], head: Float[Array, "D V"], vocab_size: int
) -> Float[Array, "*N V"]:
  """float32 logits; entries from `vocab_size` on (padding) are masked.

  Multiplied in the precision of `hidden` and summed in float32. `head` may be
  more precise than `hidden`: cast here, its gradient over many chunks still
  adds up in its own precision.
  """
  flat = hidden.reshape(-1, hidden.shape[-1])
  exact = hidden.dtype == jnp.float32  # not bfloat16 on TPU or TF32 on GPU
  out = jnp.matmul(
    flat,
    head.astype(hidden.dtype),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )
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
  with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
  """Log-prob of each target, and entropy, under the tempered full softmax.

      logp = log_softmax(hidden @ head / temperature)
      logprob = logp[target];  entropy = -sum(exp(logp) logp)

  Args:
    hidden: after the final norm.
    head: output embedding; V may be padded beyond `vocab_size`.
    targets: ids, each the token that follows its hidden state.
    temperature: per token; 0 (greedy) counts as 1.
    vocab_size: entries of the head that are tokens.
    chunk: tokens, over all rows, whose logits exist at a time, forward and
      backward (they are computed again there); 0 for all of them at once.
    with_entropy: False leaves the entropy out and returns None for it.

  Returns:
    (logprobs, entropy) in float32, in nats.
  """
  num_rows, length = targets.shape

  def step(xs):
    return _logprobs(head, *xs, vocab_size, with_entropy)

  xs = (hidden, targets, temperature)
  if not chunk or chunk >= num_rows * length:
    return step(xs)
  num_chunks = -(-length // max(1, chunk // num_rows))
  width = -(-length // num_chunks)  # chunks of one size, with little padding

  def split(x):
    surplus = num_chunks * width - length
    x = jnp.pad(x, [(0, 0), (0, surplus)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(num_rows, num_chunks, width, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(num_rows, -1)[:, :length]

  out = jax.lax.map(jax.checkpoint(step), jax.tree.map(split, xs))
  return jax.tree.map(join, out)


def _logprobs(head, hidden, targets, temperature, vocab_size, with_entropy):
  tempered = jnp.where(temperature == 0, 1.0, temperature)[..., None]
  logp = jax.nn.log_softmax(logits(hidden, head, vocab_size) / tempered)
  # A masked sum, not a gather: it stays local where the vocabulary is sharded.
  here = jnp.arange(logp.shape[-1]) == targets[..., None]
  target = jnp.sum(jnp.where(here, logp, 0.0), axis=-1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1) if with_entropy else None
  return target, entropy
