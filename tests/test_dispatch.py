"""Programs of one CPU device, side by side."""

import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import dispatch


class Two(NamedTuple):
  first: Any
  second: Any


def _mesh(num: int) -> jax.sharding.Mesh:
  return jax.sharding.Mesh(np.array(jax.devices()[:num]), ("data",))


def _here() -> tuple:
  return threading.get_ident(), threading.current_thread().name


@pytest.fixture(autouse=True)
def _cores(monkeypatch):
  monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_all_of_one_are_called_in_one_thread_of_their_own():
  first, second = (dispatch.apart(Two(_here, _here), _mesh(1)) for _ in "ab")
  assert first.first() == first.second() != second.first()
  assert threading.get_ident() not in (first.first()[0], second.first()[0])


def test_what_a_program_raises_reaches_its_caller():
  def fails():
    raise ValueError("no room")

  programs = dispatch.apart(Two(fails, _here), _mesh(1))
  with pytest.raises(ValueError, match="no room"):
    programs.first()
  assert programs.second()  # and the next one runs


def test_two_run_side_by_side():
  @jax.jit
  def program(num_steps):
    # Of fewer operations a program is run at once, and not dispatched.
    x = jnp.ones([4096])
    return jax.lax.fori_loop(0, num_steps, lambda _, x: x * jnp.sin(x) + 1, x)

  long, short = (dispatch.apart(Two(program, _here), _mesh(1)) for _ in "ab")
  short.first(1).block_until_ready()  # compiled
  slow, quick = long.first(30_000), short.first(1)
  quick.block_until_ready()
  assert not slow.is_ready()
  slow.block_until_ready()


def test_elsewhere_they_are_called_as_they_are(monkeypatch):
  programs = Two(_here, _here)
  if len(jax.devices()) > 1:
    assert dispatch.apart(programs, _mesh(2)) is programs
    assert dispatch.at_once(jax.devices()[:2]) == 1
  assert dispatch.at_once(jax.devices()[:1]) == 2
  monkeypatch.setattr("os.cpu_count", lambda: 1)
  assert dispatch.apart(programs, _mesh(1)) is programs
