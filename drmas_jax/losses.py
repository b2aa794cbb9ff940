"""Losses by token. The learner adds them up: sum(loss * weight) / denominator.

Every loss has one signature, so that one train step serves reinforcement
learning and supervised warm starts. Nothing here knows of masks: a token that
must not count has weight 0 in the learner's sum.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Far beyond any clip range, and far below where float32 overflows (88).
_MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
  """A loss by token, and what it says of the token; all of one shape.

  Attributes:
    loss: to be minimised.
    ratio: probability under the policy over the one it was sampled with.
    clipped: the clipped branch was taken, so the gradient is 0.
    dual_clipped: the dual clip was taken, so the gradient is 0.
  """

  loss: Float[Array, "..."]
  ratio: Float[Array, "..."]
  clipped: Bool[Array, "..."]
  dual_clipped: Bool[Array, "..."]


def clipped(
  logprobs: Float[Array, "..."],
  old_logprobs: Float[Array, "..."],
  advantages: Float[Array, "..."],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """PPO's clipped surrogate with a dual clip.

      r = exp(logprobs - old_logprobs)
      L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
      L = min(L, -A dual_clip)    where A < 0

  The log-ratio is cut at 20, where either clip has long made the loss a
  constant: the value is the same, and a ratio that overflows cannot turn a
  gradient of 0 into NaN.

  Args:
    logprobs: under the policy; the gradient flows through these.
    old_logprobs: under the policy that sampled, at the same temperature.
    advantages: of the token's turn.
    clip_low: how far below 1 the ratio still has a gradient.
    clip_high: how far above 1.
    dual_clip: bound of the loss per unit of a negative advantage, above 1.

  Source: Schulman et al. 2017 (arXiv 1707.06347) equation 7; Ye et al. 2019
  (arXiv 1912.09729) for the dual clip.
  """
  log_ratio = logprobs - old_logprobs
  ratio = jnp.exp(jnp.minimum(log_ratio, _MAX_LOG_RATIO))
  plain = -advantages * ratio
  bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = jnp.maximum(plain, bounded)
  ceiling = -advantages * dual_clip
  dual = (advantages < 0) & (loss > ceiling)
  return TokenLoss(jnp.where(dual, ceiling, loss), ratio, bounded > plain, dual)


def cross_entropy(
  logprobs: Float[Array, "..."],
  old_logprobs: Float[Array, "..."],
  advantages: Float[Array, "..."],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
) -> TokenLoss:
  """-logprobs, for `--mode=sft`; the other arguments do not matter."""
  del old_logprobs, advantages, clip_low, clip_high, dual_clip
  no = jnp.zeros(logprobs.shape, bool)
  return TokenLoss(-logprobs, jnp.ones_like(logprobs), no, no)


# What `config.Loss.name` may say; `cross_entropy` is sft's and needs no name.
LOSSES: Mapping[str, Callable[..., TokenLoss]] = {"clipped": clipped}
