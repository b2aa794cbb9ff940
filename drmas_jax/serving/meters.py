"""What a server has done so far, in the text format of Prometheus."""

import collections
import threading
from collections.abc import Mapping, Sequence


class Meters:
  """Counters; they may be used from any thread."""

  def __init__(self):
    self._lock = threading.Lock()
    self._requests: collections.Counter = collections.Counter()
    self._tokens: collections.Counter = collections.Counter()
    self._seconds: collections.Counter = collections.Counter()

  def count(
    self,
    model: str,
    status: int,
    seconds: float,
    prompt_tokens: int,
    completion_tokens: int,
  ) -> None:
    """A request is over.

    Args:
      model: one that is served, or "": labels are few.
      status: of HTTP; 499 where the client has gone away.
      seconds: it took.
      prompt_tokens: of what was answered.
      completion_tokens: sampled for it.
    """
    with self._lock:
      self._requests[model, str(status)] += 1
      self._tokens[model, "prompt"] += prompt_tokens
      self._tokens[model, "completion"] += completion_tokens
      self._seconds[model,] += seconds

  def text(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
    """All of it.

    Args:
      gauges: {name: (what it is, {model: now})}; "" for that of no model.
    """
    with self._lock:
      tables = [
        ("requests_total", "Requests answered.", self._requests, "code"),
        ("tokens_total", "Tokens of answers.", self._tokens, "kind"),
        ("request_seconds_total", "From request to answer.", self._seconds, ""),
      ]
      lines = []
      for name, about, values, label in tables:
        lines += _head(name, about, "counter")
        for (model, *other), value in sorted(values.items()):
          labels = [("model", model), *zip([label], other, strict=False)]
          lines.append(_line(name, labels, value))
    for name, (about, now) in gauges.items():
      lines += _head(name, about, "gauge")
      for model, value in now.items():
        labels = [("model", model)] if model else []
        lines.append(_line(name, labels, value))
    return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
  return [f"# HELP drmas_{name} {about}", f"# TYPE drmas_{name} {kind}"]


def _line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
  shown = ",".join(f'{key}="{text}"' for key, text in labels)
  return (
    f"drmas_{name}{{{shown}}} {value:.10g}"
    if shown
    else (f"drmas_{name} {value:.10g}")
  )
