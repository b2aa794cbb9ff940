"""From logits to a token: what is kept, what is banned, who is beside."""

import jax
import numpy as np
import pytest

from drmas_jax import sampling

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
  for other in ({"top_k": 3}, {"top_p": 0.5}, {"banned": 7}):
    name, value = next(iter(other.items()))
    plain = {"top_k": 0, "top_p": 1.0, "banned": -1}[name]
    mixed = draw(logits, **{name: np.where(np.arange(64) % 2, value, plain)})
    for one, all_ in zip(mixed, alone, strict=True):
      np.testing.assert_array_equal(one[::2], all_[::2])
