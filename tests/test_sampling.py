"""From logits to a token: what is kept, what is banned, who is beside."""

import jax
import numpy as np
import pytest

from drmas_jax import logprobs, sampling

pytestmark = pytest.mark.quick

sample = jax.jit(sampling.sample)


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, banned=-1, seed=0):
  """Rows of logits [B, V]; settings for all of them, or for each."""
  num = len(logits)
  keys = np.asarray(jax.random.split(jax.random.PRNGKey(seed), num))
  settings = (
    np.broadcast_to(np.asarray(x, dtype), [num])
    for x, dtype in ((temperature, "f"), (top_k, "i"), (top_p, "f"))
  )
  ban = np.broadcast_to(np.asarray(banned, np.int32), [num])[:, None]
  drawn = sample(keys, logits.astype(np.float32), *settings, ban)
  return jax.tree.map(np.asarray, drawn)


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_a_banned_token_may_have_all_of_the_mass(temperature):
  """What is left is drawn from as ever, however little it is."""
  num = 4000
  logits = np.tile(np.r_[9.0, np.zeros(6), np.log([3.0, 1.0]), -1.0], (num, 1))
  logits[:, 7:9] *= temperature
  logits[:, 7:9] += 5
  drawn = draw(logits, temperature, top_k=2, banned=0)
  assert set(drawn.token) == {7, 8}
  assert abs(np.mean(drawn.token == 7) - 0.75) < 0.03
  kept = drawn.logprob - drawn.log_kept_mass
  want = np.where(drawn.token == 7, np.log(0.75), np.log(0.25))
  np.testing.assert_allclose(kept, want, atol=1e-4)


def test_at_top_p_1_every_token_is_kept():
  """Or a row would feel that others are truncated (rule 26): in float32 a sum
  of all but the last may be 1 already."""
  rng = np.random.default_rng(0)
  for _ in range(10):
    logits = rng.normal(size=[2, 50_000]).astype(np.float32)
    kept = sampling._truncate(logits, np.array([0, 5]), np.ones([2], "f"))
    assert np.isfinite(kept).sum(axis=1).tolist() == [50_000, 5]


def test_a_row_does_not_feel_what_others_are_asked_for():
  logits = np.random.default_rng(1).normal(size=[64, 999])
  alone = draw(logits)
  for name, plain, value in (
    ("top_k", 0, 3),
    ("top_p", 1.0, 0.5),
    ("banned", -1, 7),
    ("temperature", 1.0, 0.0),
  ):
    mixed = draw(logits, **{name: np.where(np.arange(64) % 2, value, plain)})
    for one, all_ in zip(mixed, alone, strict=True):
      np.testing.assert_array_equal(one[::2], all_[::2])


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 2e-38, 1e-40, 1e-60])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_least_temperature_is_greedy_and_finite(temperature, top_p):
  """With padded rows of the vocabulary, which are far below."""
  logits = np.tile([5.0, 11.0, 10.99, logprobs.MASKED], (64, 1))
  drawn = draw(logits, temperature, top_p=top_p)
  assert set(drawn.token) == {1}
  np.testing.assert_array_equal(drawn.log_kept_mass, 0.0)
  if temperature < np.finfo("f").tiny:  # as temperature 0, then
    drawn = drawn._replace(logprob=drawn.logprob - draw(logits, 0).logprob)
  np.testing.assert_array_equal(drawn.logprob, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_top_p_keeps_no_more_than_reaches_it(seed):
  """Where a sum is top_p but for its rounding, nothing is added to it."""
  rng = np.random.default_rng(seed)
  for size in (10, 100):
    parts = np.sort(rng.multinomial(size - 6, np.ones(6) / 6, 400) + 1)
    num = rng.integers(1, 6, 400)
    kept = parts >= parts[np.arange(400), -num, None]  # with their equals
    first = np.cumsum(parts[:, ::-1], axis=1)[np.arange(400), num - 1]
    got = sampling._truncate(
      np.log(parts / size).astype("f"),
      np.zeros([400], "i"),
      (first / size).astype("f"),
    )
    np.testing.assert_array_equal(np.isfinite(got), kept)


@pytest.mark.parametrize("top_p", [1e-9, 1e-38, 1e-45, 1e-60])
def test_the_least_top_p_keeps_the_likeliest_token(top_p):
  drawn = draw(np.tile(np.log([0.3, 0.5, 0.2]), (64, 1)), top_p=top_p)
  assert set(drawn.token) == {1}
  np.testing.assert_allclose(drawn.logprob, np.log(0.5), atol=1e-6)
  np.testing.assert_allclose(drawn.log_kept_mass, drawn.logprob, atol=1e-6)
