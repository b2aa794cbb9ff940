"""Token losses against hand numbers and the reference's numbers."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import losses

pytestmark = pytest.mark.quick

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "golden/policy_loss.json").read_text()
)["cases"]
CLIP = dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
  ("advantage", "ratio", "loss", "slope", "clipped", "dual"),
  [
    # slope: of the loss in the log-prob, which is -A r where it is not cut.
    (1.0, 1.0, -1.0, -1.0, False, False),
    (1.0, 1.5, -1.2, 0.0, True, False),
    (1.0, 0.5, -0.5, -0.5, False, False),
    (-1.0, 1.0, 1.0, 1.0, False, False),
    (-1.0, 0.5, 0.8, 0.0, True, False),
    (-1.0, 1.5, 1.5, 1.5, False, False),
    (-1.0, 5.0, 3.0, 0.0, False, True),
    (0.0, 5.0, 0.0, 0.0, False, False),
  ],
)
def test_clipped_by_hand(advantage, ratio, loss, slope, clipped, dual, jit):
  def f(logprob):
    out = losses.clipped(logprob, -1.0, jnp.float32(advantage), **CLIP)
    return out.loss, out

  grad = jax.value_and_grad(f, has_aux=True)
  (got, out), got_slope = (jax.jit(grad) if jit else grad)(
    jnp.float32(np.log(ratio) - 1)
  )
  np.testing.assert_allclose(got, loss, rtol=1e-6)
  np.testing.assert_allclose(got_slope, slope, rtol=1e-6)
  np.testing.assert_allclose(out.ratio, ratio, rtol=1e-6)
  assert bool(out.clipped) == clipped
  assert bool(out.dual_clipped) == dual


@pytest.mark.parametrize("case", range(len(GOLDEN)))
@pytest.mark.parametrize("clip", ["0.2|0.2", "0.2|0.28"])
def test_reference_numbers(case, clip):
  case = GOLDEN[case]
  low, high = map(float, clip.split("|"))
  mask = np.array(case["mask"])
  out = losses.clipped(
    jnp.array(case["logprobs"]),
    jnp.array(case["old_logprobs"]),
    jnp.array(case["advantages"])[:, None],
    clip_low=low,
    clip_high=high,
    dual_clip=3.0,
  )

  def mean(x):
    return float((np.asarray(x) * mask).sum() / mask.sum())

  want = case["expected"][clip]
  assert mean(out.loss) == pytest.approx(want["loss"], abs=1e-5)
  assert mean(out.clipped) == pytest.approx(want["clip_fraction"], abs=1e-6)
  assert mean(out.dual_clipped) == pytest.approx(
    want["dual_clip_fraction"], abs=1e-6
  )


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(advantage):
  def f(logprob):
    return losses.clipped(logprob, -200.0, advantage, **CLIP).loss

  value, slope = jax.value_and_grad(f)(jnp.float32(-0.5))
  assert float(value) == pytest.approx(
    {-1.0: 3.0, 0.0: 0.0, 1.0: -1.2}[advantage]
  )
  assert float(slope) == 0.0


def test_cross_entropy():
  logprobs = jnp.array([[-0.5, -2.0], [-1.0, 0.0]])
  other = jnp.full_like(logprobs, 7.0)

  def f(x):
    out = losses.cross_entropy(x, other, other, **CLIP)
    return out.loss.sum(), out

  (total, out), slope = jax.value_and_grad(f, has_aux=True)(logprobs)
  assert float(total) == 3.5
  assert (slope == -1).all()
  assert (out.ratio == 1).all()
  assert not out.clipped.any() and not out.dual_clipped.any()
