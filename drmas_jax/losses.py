"""Losses by token. The learner adds them up: sum(loss * weight) / denominator.

Every loss has one signature, so that one train step serves reinforcement
learning and supervised warm starts. What a token counts in the sum is not
decided in a loss but in `aggregate`: a token that must not count has weight 0.

Some losses need sums over a completion, of which a packed row has several.
They are only ever factors without a gradient: a loss of a sequence is written
by token so that the gradients of its tokens add up to the sequence's.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]

# Far beyond any clip range, and far below where float32 overflows (88).
_MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
  """A loss by token, and what it says of the token; all of one shape.

  Attributes:
    loss: to be minimised.
    ratio: probability under the policy over the one it was sampled with.
    clipped: the clip decided: the gradient is 0, or of a ratio that was cut.
    dual_clipped: the dual clip was taken, so the gradient is 0.
  """

  loss: Float[Array, "..."]
  ratio: Float[Array, "..."]
  clipped: Bool[Array, "..."]
  dual_clipped: Bool[Array, "..."]


def clipped(
  logprobs: Float[Array, "B T"],
  old_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  completions: Int[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """PPO's clipped surrogate with a dual clip.

      r = exp(logprobs - old_logprobs)
      L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
      L = min(L, -A dual_clip)    where A < 0

  Args:
    logprobs: under the policy; the gradient flows through these.
    old_logprobs: under the policy that sampled, at the same temperature.
    advantages: of the token's turn.
    completions: place in its row, from 1, of the completion that a token is
      of; 0: of none, and both log-probs are 0. Not read here.
    clip_low: how far below 1 the ratio still has a gradient.
    clip_high: how far above 1.
    dual_clip: bound of the loss per unit of a negative advantage, above 1.

  Source: Schulman et al. 2017 (arXiv 1707.06347) equation 7; Ye et al. 2019
  (arXiv 1912.09729) for the dual clip.
  """
  del completions
  out = _surrogate(logprobs - old_logprobs, advantages, clip_low, clip_high)
  ceiling = -advantages * dual_clip
  dual = (advantages < 0) & (out.loss > ceiling)
  return out._replace(
    loss=jnp.where(dual, ceiling, out.loss), dual_clipped=dual
  )


def gspo(
  logprobs: Float[Array, "B T"],
  old_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  completions: Int[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """GSPO: the clipped surrogate of a completion's ratio, normalised by length.

      s = exp(mean over the completion of (logprobs - old_logprobs))
      L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

  at each of its tokens, in GSPO-token's form: the value is that of s and the
  gradient in a token's log-prob -A s, so that equal weights within a completion
  give -A s grad(sum of logprobs) and weights of 1 / length the paper's
  gradient. The paper averages over sequences (`sequence_mean`), with a clip of
  3e-4 below and 4e-4 above.

  Args:
    logprobs: as in `clipped`.
    old_logprobs: as in `clipped`.
    advantages: of the token's turn, so of the whole completion.
    completions: as in `clipped`.
    clip_low: how far below 1 a completion's ratio still has a gradient.
    clip_high: how far above 1.
    dual_clip: not read.

  Source: Zheng et al. 2025 (arXiv 2507.18071) equations 5, 7 and 14.
  """
  del dual_clip
  log_ratio = jax.lax.stop_gradient(logprobs - old_logprobs)
  lengths = _totals(jnp.ones_like(log_ratio), completions)
  mean = _totals(log_ratio, completions) / lengths
  zero = logprobs - jax.lax.stop_gradient(logprobs)  # with a gradient of 1
  return _surrogate(mean + zero, advantages, clip_low, clip_high)


def cispo(
  logprobs: Float[Array, "B T"],
  old_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  completions: Int[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """CISPO: REINFORCE with a clipped ratio as its weight.

      L = -A stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) logprobs

  No token loses its gradient. The paper bounds the ratio only from above, which
  is clip_low = 1.

  Args:
    logprobs: as in `clipped`.
    old_logprobs: as in `clipped`.
    advantages: of the token's turn.
    completions: not read.
    clip_low: how far below 1 the weight may be; 1: no bound.
    clip_high: how far above 1.
    dual_clip: not read.

  Source: MiniMax 2025 (arXiv 2506.13585) equations 4 and 5.
  """
  del completions, dual_clip
  ratio = _ratio(jax.lax.stop_gradient(logprobs - old_logprobs))
  weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  no = jnp.zeros(logprobs.shape, bool)
  return TokenLoss(
    -advantages * weight * logprobs,
    ratio,
    (weight != ratio) & (advantages != 0),
    no,
  )


def cross_entropy(
  logprobs: Float[Array, "B T"],
  old_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  completions: Int[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """-logprobs, for `--mode=sft`; the other arguments do not matter."""
  del old_logprobs, advantages, completions, clip_low, clip_high, dual_clip
  no = jnp.zeros(logprobs.shape, bool)
  return TokenLoss(-logprobs, jnp.ones_like(logprobs), no, no)


def _ratio(log_ratio: jax.Array) -> jax.Array:
  """exp, cut at e^20, where any clip has long made the loss a constant: the
  value is the same, and a ratio that overflows cannot turn a gradient of 0
  into NaN."""
  return jnp.exp(jnp.minimum(log_ratio, _MAX_LOG_RATIO))


def _surrogate(log_ratio, advantages, clip_low, clip_high) -> TokenLoss:
  ratio = _ratio(log_ratio)
  plain = -advantages * ratio
  bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return TokenLoss(
    jnp.maximum(plain, bounded),
    ratio,
    bounded > plain,
    jnp.zeros(ratio.shape, bool),
  )


def _totals(
  x: Float[Array, "B T"], completions: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """At each token the sum of x over its completion."""
  num = x.shape[1] + 1  # no row has more completions than tokens

  def row(x, completions):
    return jax.ops.segment_sum(x, completions, num)[completions]

  return jax.vmap(row)(x, completions)


def k1(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """The log-ratio, whose mean is the distance.

      d = logprobs - ref_logprobs;  value d, slope 1

  Without bias as a number. As a term of the loss it teaches nothing: over the
  policy's own samples the mean of grad logprobs is 0.

  Source: Schulman 2020, "Approximating KL divergence"; k2 and k3 too.
  """
  return logprobs - ref_logprobs


def k2(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Half the squared log-ratio.

      value d^2 / 2, slope d

  The mean of its gradient over the policy's own samples is, token by token
  given those before, that of KL(policy | reference): the one to distill with.

  Source: as `k1`; for the gradient Tang and Munos 2025 (arXiv 2506.09477).
  """
  return 0.5 * jnp.square(logprobs - ref_logprobs)


def k3(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """The log-ratio with a control variate, which makes it positive.

      value exp(-d) - 1 + d, slope 1 - exp(-d)

  Without bias as a number, and steadier than `k1`. The mean of its gradient
  over the policy's own samples is, token by token, that of
  KL(reference | policy). -d is cut at 20, beyond which the slope is 0.

  Source: as `k1`; Shao et al. 2024 (GRPO, arXiv 2402.03300) equation 4.
  """
  below = jnp.minimum(ref_logprobs - logprobs, _MAX_LOG_RATIO)
  return jnp.expm1(below) - below


def k3_capped(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """`k3` cut at 10, as in DrMAS's code: no slope from d = -2.6 down, where the
  policy is furthest from its reference."""
  return jnp.minimum(k3(logprobs, ref_logprobs), 10.0)


def absolute(
  logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]
) -> Float[Array, "..."]:
  """The size of the log-ratio: value |d|, slope sign(d), and 0 at d = 0."""
  difference = logprobs - ref_logprobs
  return difference * jnp.sign(difference)  # the slope of jnp.abs at 0 is 1


def importance_weights(
  log_ratio: Float[Array, "B T"],
  completions: Int[Array, "B T"],
  *,
  kind: Literal["none", "token", "sequence", "rejection"],
  bound: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
  """Factors of the loss that make up for another distribution at sampling.

      token      w = min(rho_t, bound)
      sequence   w = min(rho, bound)          rho = product of its rho_t
      rejection  w = rho if rho <= bound else 0

  with rho_t the old probability over the one that the token was drawn with. The
  product over a long completion is far from 1 where each rho_t is a little off:
  with top-p, whose rho_t are at most 1, it soon is nearly 0.

  Args:
    log_ratio: log rho_t, 0 outside of completions.
    completions: see `clipped`.
    kind: as above; "none": 1.
    bound: at least 1.

  Returns:
    (w, whether the bound was exceeded). Neither has a gradient.

  Source: Yao et al. 2025, "Your efficient RL framework secretly brings you
  off-policy RL training" (token); Liu et al. 2025, "When speed kills stability"
  (sequence, and rejection as masked importance sampling).
  """
  if kind == "none":
    return jnp.ones_like(log_ratio), jnp.zeros(log_ratio.shape, bool)
  log_ratio = jax.lax.stop_gradient(log_ratio)
  if kind != "token":
    log_ratio = _totals(log_ratio, completions)
  limit = np.float32(np.log(bound))
  cut = log_ratio > limit
  weights = jnp.exp(jnp.minimum(log_ratio, limit))
  if kind == "rejection":
    weights = jnp.where(cut, 0.0, weights)
  return weights, cut


def aggregate(
  lengths: np.ndarray, counted: np.ndarray, kind: Aggregation, divisor: float
) -> tuple[np.ndarray, float]:
  """How token losses become one: sum(loss * weight) / denominator.

      token_mean     sum over all tokens / number of tokens
      sequence_mean  mean over completions of their tokens' mean
      sequence_sum   mean over completions of their tokens' sum / divisor

  Both numbers are of completions alone, so the loss is the same however they
  lie in rows and micro-batches; denominators of hosts add up (rule 10).

  Args:
    lengths: [N] tokens of each completion.
    counted: [N] whether it is in the loss at all; one without tokens is not.
    kind: as above.
    divisor: of `sequence_sum` alone.

  Returns:
    ([N] float32 weight of each token of a completion, the denominator).

  Source: token_mean: Yu et al. 2025 (DAPO, arXiv 2503.14476) equation 8;
  sequence_mean: Shao et al. 2024 (GRPO, arXiv 2402.03300) equation 3;
  sequence_sum: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783) section 3.2, whose
  divisor is the limit of a completion's length.
  """
  counted = counted & (lengths > 0)
  weights = counted.astype(np.float32)
  if kind == "token_mean":
    return weights, float(lengths[counted].sum())
  if kind == "sequence_mean":
    weights /= np.maximum(lengths, 1)
    return weights, float(counted.sum())
  return weights, float(counted.sum()) * divisor


# What `config.Loss.name` may say; `cross_entropy` is sft's and needs no name.
LOSSES: Mapping[str, Callable[..., TokenLoss]] = {
  "clipped": clipped,
  "gspo": gspo,
  "cispo": cispo,
}

# What `config.Loss.kl` may say: estimates by token of the distance from the
# policy to its reference, of which the gradient is taken as they stand.
KL: Mapping[str, Callable[..., jax.Array]] = {
  "k1": k1,
  "k2": k2,
  "k3": k3,
  "k3_capped": k3_capped,
  "abs": absolute,
}
