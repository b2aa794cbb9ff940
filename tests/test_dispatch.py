"""Programs of one CPU device, side by side."""

import threading

import jax
import jax.numpy as jnp
import pytest

from drmas_jax import dispatch


@pytest.fixture(autouse=True)
def _cores(monkeypatch):
  monkeypatch.setattr("os.cpu_count", lambda: 2)


def _called(strands: dispatch.Strands) -> list[int]:
  return [strands(name, threading.get_ident) for name in "abc"]


def test_each_name_has_a_thread_and_the_first_is_the_callers():
  strands = dispatch.Strands(jax.devices()[:1])
  called = _called(strands)
  assert called[0] == threading.get_ident() and len(set(called)) == 3
  assert called == _called(strands)


def test_a_call_is_the_functions():
  strands = dispatch.Strands(jax.devices()[:1])
  for name in "ab":
    assert strands(name, int, "12", 3) == 5
    with pytest.raises(ValueError, match="literal"):
      strands(name, int, "no number")
    assert strands(name, int, "12") == 12  # and the next one runs


def test_two_run_side_by_side():
  @jax.jit
  def program(num_steps):
    # Of fewer operations a program is run at once, and not dispatched.
    x = jnp.ones([4096])
    return jax.lax.fori_loop(0, num_steps, lambda _, x: x * jnp.sin(x) + 1, x)

  strands = dispatch.Strands(jax.devices()[:1])
  program(1).block_until_ready()  # compiled
  slow, quick = strands("a", program, 30_000), strands("b", program, 1)
  quick.block_until_ready()
  assert not slow.is_ready()
  slow.block_until_ready()


def test_elsewhere_all_are_called_by_the_caller(monkeypatch):
  here = [threading.get_ident()] * 3
  if len(jax.devices()) > 1:
    assert _called(dispatch.Strands(jax.devices()[:2])) == here
    assert dispatch.at_once(jax.devices()[:2]) == 1
  assert dispatch.at_once([]) == 1
  assert dispatch.at_once(jax.devices()[:1]) == 2
  monkeypatch.setattr("os.cpu_count", lambda: 1)
  assert _called(dispatch.Strands(jax.devices()[:1])) == here
