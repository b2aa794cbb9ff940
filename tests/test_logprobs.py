"""Chunked log-probs: equal to the plain ones, and no [B, T, V] anywhere."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drmas_jax import logprobs

pytestmark = pytest.mark.quick

B, T, D, V, REAL = 4, 12, 8, 300, 297
SHAPE = dict(vocab_size=REAL)


def inputs(num_rows=B, length=T, vocab=V, seed=0):
  keys = jax.random.split(jax.random.key(seed), 4)
  hidden = jax.random.normal(keys[0], (num_rows, length, D))
  head = jax.random.normal(keys[1], (D, vocab))
  targets = jax.random.randint(keys[2], (num_rows, length), 0, vocab - 3)
  temperature = jax.random.uniform(
    keys[3], (num_rows, length), minval=0.5, maxval=1.5
  )
  return hidden, head, targets, temperature


def naive(hidden, head, targets, temperature):
  z = jnp.einsum("btd,dv->btv", hidden, head)[..., :REAL]
  logp = jax.nn.log_softmax(z / temperature[..., None])
  target = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
  return target, -jnp.sum(jnp.exp(logp) * logp, -1)


def test_logits_mask_the_padded_vocabulary():
  hidden, head, *_ = inputs()
  z = logprobs.logits(hidden, head, REAL)
  np.testing.assert_allclose(z[..., :REAL], (hidden @ head)[..., :REAL], 1e-5)
  assert (jax.nn.softmax(z)[..., REAL:] == 0).all()
  # One token, as in decode, and an unpadded vocabulary.
  assert logprobs.logits(hidden[0, 0], head, V).shape == (V,)


def test_logits_are_float32_sums_of_bfloat16_products():
  hidden, head, *_ = inputs()
  z = logprobs.logits(hidden.astype(jnp.bfloat16), head, V)
  exact = hidden.astype(jnp.bfloat16).astype(jnp.float32) @ head.astype(
    jnp.bfloat16
  ).astype(jnp.float32)
  assert z.dtype == jnp.float32
  np.testing.assert_allclose(z, exact, atol=1e-5)


# 3 of 48 tokens are 128 entries, the least, in 3 blocks; the last begins early;
# 30 are 2 blocks of 256; 999 are more than there are. Of 2 and 4 parts the last
# holds entries that are no tokens; 7 do not divide 300.
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
  "chunk, ways", [(0, 1), (3, 1), (30, 1), (999, 1), (3, 2), (20, 4), (3, 7)]
)
def test_equal_to_the_plain_ones_with_gradients(chunk, ways, tied):
  args = inputs()

  def total(f, hidden, head):
    logp, entropy = f(hidden, head, *args[2:])
    return jnp.sum(logp * args[3] + 0.3 * entropy), (logp, entropy)

  def chunked(*a):
    return logprobs.token_logprobs(
      *a, **SHAPE, chunk=chunk, ways=ways, tied=tied
    )

  def run(f):
    return jax.jit(
      jax.value_and_grad(
        functools.partial(total, f), argnums=(0, 1), has_aux=True
      )
    )(*args[:2])

  (_, want), want_grads = run(naive)
  (_, got), got_grads = run(chunked)
  np.testing.assert_allclose(got[0], want[0], atol=2e-6, rtol=1e-6)
  np.testing.assert_allclose(got[1], want[1], atol=2e-6, rtol=1e-6)
  for a, b in zip(got_grads, want_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=3e-6 * float(jnp.abs(b).max()))
  assert (got_grads[1][:, REAL:] == 0).all()


def test_temperature():
  hidden, head, targets, _ = inputs()

  def at(t):
    t = jnp.full((B, T), t, jnp.float32)
    return logprobs.token_logprobs(hidden, head, targets, t, **SHAPE, chunk=16)

  for a, b in zip(at(0.0), at(1.0), strict=True):
    np.testing.assert_array_equal(a, b)
  assert (at(0.01)[1] > -1e-6).all() and float(at(0.01)[1].mean()) < 0.1
  assert all(bool(jnp.isfinite(x).all()) for x in at(1e-4))
  np.testing.assert_allclose(at(1e6)[1], np.log(REAL), atol=1e-4)


def test_without_entropy():
  args = inputs()
  logp, entropy = logprobs.token_logprobs(
    *args, **SHAPE, chunk=16, with_entropy=False
  )
  assert entropy is None
  np.testing.assert_allclose(logp, naive(*args)[0], atol=2e-6)


def sizes(jaxpr):
  """The number of elements of every value in a jaxpr, inner ones included."""
  for equation in jaxpr.eqns:
    for var in equation.outvars:
      yield int(np.prod(var.aval.shape))
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from sizes(inner)


def biggest(f, *args):
  return max(sizes(jax.make_jaxpr(f)(*args).jaxpr))


def loss(chunk, vocab, hidden, head, targets, temperature):
  logp, entropy = logprobs.token_logprobs(
    hidden, head, targets, temperature, vocab_size=vocab - 3, chunk=chunk
  )
  return jnp.sum(logp) + jnp.sum(entropy)


def test_no_b_t_v_forward_or_backward():
  num_rows, length, vocab, chunk = 4, 64, 2048, 16
  args = inputs(num_rows, length, vocab)
  whole = num_rows * length * vocab

  def grad(chunk):
    return jax.grad(functools.partial(loss, chunk, vocab), argnums=(0, 1))

  # The measure sees the array it looks for, where there is one.
  assert biggest(grad(0), *args) >= whole
  assert biggest(grad(chunk), *args) <= max(chunk * vocab, args[1].size)

  def temporary(chunk):
    compiled = jax.jit(grad(chunk)).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(0) >= 4 * whole
  assert temporary(chunk) <= 4 * whole / 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_head_has_one_gradient_and_no_copy(tied):
  """Nothing as large as the head beside the gradient, which is a result; the
  blocks of logits are smaller here."""
  num_tokens, dim, vocab, chunk = 512, 512, 151_936, 32

  def total(hidden, weights):
    logp, _ = logprobs.token_logprobs(
      hidden,
      weights.T if tied else weights,
      jnp.zeros(hidden.shape[:2], jnp.int32),
      jnp.ones(hidden.shape[:2]),
      vocab_size=vocab,
      chunk=chunk,
      tied=tied,
      with_entropy=False,
    )
    return jnp.sum(logp)

  args = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in (
      (4, num_tokens // 4, dim),
      (vocab, dim) if tied else (dim, vocab),
    )
  ]
  compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*args).compile()
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary < 4 * vocab * 4 * chunk < vocab * dim * 4
  # Who trains adapters needs no gradient of the head.
  compiled = jax.jit(jax.grad(total)).lower(*args).compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= temporary


def test_rows_stay_on_their_shards():
  mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
  args = inputs(num_rows=8, length=16)
  rows = NamedSharding(mesh, PartitionSpec("data"))
  whole = NamedSharding(mesh, PartitionSpec())
  layout = (rows, whole, rows, rows)
  f = jax.jit(functools.partial(loss, 32, V))
  compiled = (
    jax.jit(functools.partial(loss, 32, V), in_shardings=layout)
    .lower(*args)
    .compile()
  )
  text = compiled.as_text()
  assert "all-gather" not in text and "all-to-all" not in text
  assert "collective-permute" not in text
  placed = [jax.device_put(x, s) for x, s in zip(args, layout, strict=True)]
  np.testing.assert_allclose(compiled(*placed), f(*args), rtol=1e-5)
