"""Ctrl-C before there is a run."""

import contextlib
import signal

import pytest
import small_run

from drmas_jax import check, main, signals

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def handlers():
  before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)
  signals._interrupted = False


def test_it_is_remembered_where_a_library_loses_it():
  signals.listen()
  with pytest.raises(KeyboardInterrupt):
    signal.raise_signal(signal.SIGINT)  # as in a callback that hides it
  with pytest.raises(KeyboardInterrupt):
    signals.Stop()
  signals.listen()  # another run of this process
  stop = signals.Stop()
  signal.raise_signal(signal.SIGINT)
  assert stop.exit_code == 130
  stop.close()


def test_the_command_remembers_it(monkeypatch, capsys):
  def ready(config, start):
    with contextlib.suppress(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    signals.Stop()

  monkeypatch.setattr(check, "main", ready)
  monkeypatch.setattr(main, "set_environment", lambda: None)
  config = small_run.ROOT / "tests" / "small_run.py"
  assert main.main([f"--config={config}", "--mode=check"]) == 130
  assert "interrupted; nothing was saved" in capsys.readouterr().err
