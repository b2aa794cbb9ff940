"""Token losses against hand numbers and the reference's numbers."""

import functools
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
    out = losses.clipped(logprob, -1.0, jnp.float32(advantage), None, **CLIP)
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
    None,
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
  for kind in ("sequence_mean", "sequence_sum"):
    weights, denominator = losses.aggregate(
      mask.sum(1), np.ones(len(mask), bool), kind, 1.0
    )
    total = (np.asarray(out.loss) * mask * weights[:, None]).sum()
    assert total / denominator == pytest.approx(want[kind], abs=1e-5)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(advantage):
  def f(logprob):
    return losses.clipped(logprob, -200.0, advantage, None, **CLIP).loss

  value, slope = jax.value_and_grad(f)(jnp.float32(-0.5))
  assert float(value) == pytest.approx(
    {-1.0: 3.0, 0.0: 0.0, 1.0: -1.2}[advantage]
  )
  assert float(slope) == 0.0


def test_cross_entropy():
  logprobs = jnp.array([[-0.5, -2.0], [-1.0, 0.0]])
  other = jnp.full_like(logprobs, 7.0)

  def f(x):
    out = losses.cross_entropy(x, other, other, None, **CLIP)
    return out.loss.sum(), out

  (total, out), slope = jax.value_and_grad(f, has_aux=True)(logprobs)
  assert float(total) == 3.5
  assert (slope == -1).all()
  assert (out.ratio == 1).all()
  assert not out.clipped.any() and not out.dual_clipped.any()


# -- losses of sequences, in rows of several completions -----------------------

# Three completions in two rows, of 2, 1 and 3 tokens.
PLACES = np.array([[0, 1, 1, 0, 2], [1, 1, 1, 0, 0]])
COMPLETIONS = [(0, [1, 2]), (0, [4]), (1, [0, 1, 2])]
RNG = np.random.default_rng(5)
OLD = np.where(PLACES, -RNG.random(PLACES.shape) - 0.5, 0).astype(np.float32)
NEW = OLD + np.where(PLACES, RNG.normal(0, 0.4, PLACES.shape), 0).astype("f")
BY_COMPLETION = np.array([1.5, -0.7, 0.4], np.float32)
ADVANTAGES = np.zeros(PLACES.shape, np.float32)
for (_row, _tokens), _a in zip(COMPLETIONS, BY_COMPLETION, strict=True):
  ADVANTAGES[_row, _tokens] = _a
LENGTHS = np.array([2, 1, 3])


def by_token(values):
  out = np.zeros(PLACES.shape, np.float32)
  for (row, tokens), value in zip(COMPLETIONS, values, strict=True):
    out[row, tokens] = value
  return out


def added_up(function, kind, divisor=1.0, **clip):
  """Loss as a function of the log-probs, added up as the learner does."""
  weights, denominator = losses.aggregate(
    LENGTHS, np.ones(3, bool), kind, divisor
  )

  def f(logprobs):
    out = function(logprobs, OLD, ADVANTAGES, PLACES, dual_clip=3.0, **clip)
    return (out.loss * by_token(weights)).sum() / denominator

  return f


def of_sequence(name, logprobs, old, advantage, low, high):
  """The papers' terms: those of a completion's tokens, or one for all."""
  ratio = jnp.exp(logprobs - old)
  if name == "gspo":
    ratio = jnp.exp((logprobs - old).mean())
  if name == "cispo":
    factor = jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    return -factor * advantage * logprobs
  terms = -jnp.minimum(
    ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage
  )
  return jnp.broadcast_to(terms, logprobs.shape)


def loop(name, kind, divisor, low, high):
  """The same, completion by completion."""

  def f(logprobs):
    terms = [
      of_sequence(name, logprobs[row, t], OLD[row, t], a, low, high)
      for (row, tokens), a in zip(COMPLETIONS, BY_COMPLETION, strict=True)
      for t in [np.array(tokens)]
    ]
    if kind == "token_mean":
      return jnp.concatenate(terms).mean()
    if kind == "sequence_mean":
      return sum(t.mean() for t in terms) / 3
    return sum(t.sum() / divisor for t in terms) / 3

  return f


@pytest.mark.parametrize("clip", [(0.2, 0.28), (1.0, 9.0), (0.01, 0.01)])
@pytest.mark.parametrize(
  "kind", ["token_mean", "sequence_mean", "sequence_sum"]
)
@pytest.mark.parametrize("name", ["clipped", "gspo", "cispo"])
def test_value_and_gradient_are_those_of_a_loop(name, kind, clip):
  low, high = clip
  packed = added_up(
    losses.LOSSES[name], kind, 7.0, clip_low=low, clip_high=high
  )
  got = jax.value_and_grad(packed)(jnp.array(NEW))
  want = jax.value_and_grad(loop(name, kind, 7.0, low, high))(jnp.array(NEW))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
  assert np.abs(want[1]).max() > 1e-3 or (name, low) == ("gspo", 0.01)


def test_gspo_by_hand():
  """Ratios 4 and 1 of one completion: s = 2, at both of its tokens."""
  new = jnp.log(jnp.array([[0.4, 0.1, 0.5]]))
  old = jnp.log(jnp.array([[0.1, 0.1, 0.5]]))
  places, advantages = jnp.array([[1, 1, 2]]), jnp.array([[-1.0, -1.0, 3.0]])

  def f(x):
    out = losses.gspo(x, old, advantages, places, **CLIP)
    return out.loss.sum(), out

  (_, out), slope = jax.value_and_grad(f, has_aux=True)(new)
  np.testing.assert_allclose(out.loss, [[2, 2, -3]], rtol=1e-6)
  np.testing.assert_allclose(out.ratio, [[2, 2, 1]], rtol=1e-6)
  np.testing.assert_allclose(slope, [[2, 2, -3]], rtol=1e-6)
  assert not out.clipped.any() and not out.dual_clipped.any()
  up = losses.gspo(new, old, -advantages, places, **CLIP)
  np.testing.assert_allclose(up.loss, [[-1.2, -1.2, 3]], rtol=1e-6)
  assert up.clipped.tolist() == [[True, True, False]]


def test_cispo_by_hand():
  """Every token keeps a gradient, the third of a ratio that was cut to 1.2."""
  ratio = np.array([[1.0, 0.5, 1.5]], np.float32)
  advantages = jnp.array([[1.0, -2.0, 3.0]])

  def f(x):
    out = losses.cispo(x, x0 - np.log(ratio), advantages, None, **CLIP)
    return out.loss.sum(), out

  x0 = jnp.full([1, 3], -2.0)
  (_, out), slope = jax.value_and_grad(f, has_aux=True)(x0)
  np.testing.assert_allclose(slope, [[-1, 1.6, -3.6]], rtol=1e-6)
  np.testing.assert_allclose(out.loss, [[2, -3.2, 7.2]], rtol=1e-6)
  assert out.clipped.tolist() == [[False, True, True]]


@pytest.mark.parametrize("name", ["clipped", "gspo", "cispo"])
@pytest.mark.parametrize("far", [-300.0, 300.0])
def test_far_ratios_are_finite_and_no_advantage_is_exactly_nothing(name, far):
  places = jnp.array([[1, 1, 0]])
  old = jnp.array([[-1.0, -1.0 - far, 0.0]])

  def f(x, advantage):
    sides = jnp.array([[advantage, advantage, 0.0]])
    return losses.LOSSES[name](x, old, sides, places, **CLIP).loss.sum()

  start = jnp.array([[-1.0, -1.0, 0.0]])
  for advantage in (-1.0, 1.0):
    value, slope = jax.value_and_grad(f)(start, advantage)
    assert np.isfinite(value) and np.isfinite(slope).all()
  value, slope = jax.value_and_grad(f)(start, 0.0)
  assert value == 0 and not slope.any()


@pytest.mark.parametrize(
  ("kind", "want"),
  [
    ("none", [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    # rho_t: 3 and 0.5; 0.25; 2, 2 and 0.1. Products: 1.5, 0.25, 0.4.
    ("token", [[1, 2, 0.5, 1, 0.25], [2, 2, 0.1, 1, 1]]),
    ("sequence", [[1, 1.5, 1.5, 1, 0.25], [0.4, 0.4, 0.4, 1, 1]]),
    ("rejection", [[1, 1.5, 1.5, 1, 0.25], [0.4, 0.4, 0.4, 1, 1]]),
  ],
)
def test_importance_weights_by_hand(kind, want):
  rho = np.array([[1, 3, 0.5, 1, 0.25], [2, 2, 0.1, 1, 1]], np.float32)
  weights = functools.partial(losses.importance_weights, kind=kind)
  got, cut = weights(jnp.log(rho), PLACES, bound=2.0)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  over = np.isclose(rho, 3.0) & (kind == "token")
  np.testing.assert_array_equal(cut, over)
  # A lower bound, which the first completion exceeds.
  got, cut = weights(jnp.log(rho), PLACES, bound=1.25)
  if kind in ("sequence", "rejection"):
    edge = 1.25 if kind == "sequence" else 0.0
    np.testing.assert_allclose(got[0, 1:3], edge, rtol=1e-6)
    assert cut.tolist() == [[False, True, True, False, False], [False] * 5]
  far, _ = weights(jnp.full([2, 5], 1e4), PLACES, bound=2.0)
  assert np.isfinite(far).all()

  def total(x):
    return weights(x, PLACES, bound=2.0)[0].sum()

  assert not jax.grad(total)(jnp.log(rho)).any()


# -- distance to a reference ---------------------------------------------------


@pytest.mark.parametrize("case", range(len(GOLDEN)))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3_capped", "abs"])
def test_kl_has_the_references_numbers(kind, case):
  """In the last case the cap decides."""
  case = GOLDEN[case]
  got = losses.KL[kind](
    jnp.array(case["logprobs"]), jnp.array(case["old_logprobs"])
  )
  np.testing.assert_allclose(got, case["expected"]["kl"][kind], atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
  ("kind", "d", "value", "slope"),
  [
    ("k1", -1.0, -1.0, 1.0),
    ("k1", 0.0, 0.0, 1.0),
    ("k2", -2.0, 2.0, -2.0),
    ("k2", 0.5, 0.125, 0.5),
    ("k3", 0.0, 0.0, 0.0),
    ("k3", -1.0, np.e - 2, 1 - np.e),  # spot check of the reference's notes
    ("k3", 2.0, np.exp(-2) + 1, 1 - np.exp(-2)),
    ("k3", -200.0, np.expm1(20) - 20, 0.0),  # would overflow
    ("k3_capped", -1.0, np.e - 2, 1 - np.e),
    ("k3_capped", -3.0, 10.0, 0.0),
    ("abs", -3.0, 3.0, -1.0),
    ("abs", 0.0, 0.0, 0.0),
    ("abs", 3.0, 3.0, 1.0),
  ],
)
def test_kl_by_hand(kind, d, value, slope, jit):
  def f(logprob):
    return losses.KL[kind](logprob, jnp.float32(-1.5))

  grad = jax.value_and_grad(f)
  got = (jax.jit(grad) if jit else grad)(jnp.float32(d - 1.5))
  np.testing.assert_allclose(got, (value, slope), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  ("kind", "biased", "of"),
  [
    ("k1", False, None),
    ("k2", True, "policy"),
    ("k3", False, "reference"),
    ("abs", True, None),
  ],
)
def test_what_each_kl_teaches(kind, biased, of):
  """Means over a policy's samples, exactly: those of the value, and of the
  gradient, which is that of the distance one way round, the other, or nothing
  (k1), or of neither (abs)."""
  logits = jnp.array([0.3, -1.0, 0.8, 0.1])
  reference = jax.nn.log_softmax(jnp.array([-0.5, 0.2, 0.4, 0.0]))

  def distance(logits, of):
    own = jax.nn.log_softmax(logits)
    one, other = (own, reference) if of == "policy" else (reference, own)
    return jnp.sum(jnp.exp(one) * (one - other))

  def mean(logits):
    own = jax.nn.log_softmax(logits)
    drawn = jax.lax.stop_gradient(jnp.exp(own))  # samples have no gradient
    return jnp.sum(drawn * losses.KL[kind](own, reference))

  value, slope = jax.value_and_grad(mean)(logits)
  assert np.isclose(value, distance(logits, "policy"), rtol=1e-5) != biased
  for which in ("policy", "reference"):
    wanted = jax.grad(distance)(logits, which)
    assert np.allclose(slope, wanted, atol=1e-6) == (which == of)
  assert np.allclose(slope, 0, atol=1e-6) == (kind == "k1")


def test_aggregate_by_hand():
  lengths, counted = np.array([4, 0, 1, 5]), np.array([1, 1, 1, 0], bool)
  for kind, weights, denominator in (
    ("token_mean", [1, 0, 1, 0], 5.0),
    ("sequence_mean", [0.25, 0, 1, 0], 2.0),
    ("sequence_sum", [1, 0, 1, 0], 20.0),
  ):
    got = losses.aggregate(lengths, counted, kind, 10.0)
    assert got[0].tolist() == weights and got[0].dtype == np.float32
    assert got[1] == denominator
