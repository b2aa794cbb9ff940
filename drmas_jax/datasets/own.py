"""Rows of your own: JSON lines, parquet, or any Python object by index.

    sources=dict(mine=dict(name="own", options=dict(
      rows="data/{split}.jsonl", question="problem", answer="meta.gold")))
    sources=dict(own=dict(options=dict(rows="tasks.jsonl", held_out=100)))

Nothing is built or copied. Making a source reads all rows once: it checks them,
so that no run ends at a bad row, and names their content.
"""

import array
import hashlib
import importlib
import json
import math
import mmap
import numbers
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol


def make(
  split: str,
  *,
  rows: str | dict[str, str],
  question: str = "question",
  answer: str = "answer",
  info: dict[str, str] | None = None,
  held_out: int = 0,
) -> "Own":
  """A split of your rows.

  Args:
    split: a name of your choice; "train" and "test" are what a config asks for.
    rows: where they are: the path of a .jsonl or .parquet file, or
      "my_pkg.my_module:NAME" for an object with len() and [i] whose rows are
      mappings. One for each split, {"train": ..}, or one for all with "{split}"
      in it. An object's str attribute `fingerprint`, if it has one, spares the
      reading of all its rows.
    question: field of a row, a non-empty text. Dots lead into nested fields and
      list items: "prompt.0.content".
    answer: the same for the gold answer: a text, a number, or a list of those.
    info: fields by the name they get in `Task.info`; none: no further fields.
    held_out: so many last rows of a single file or object are its "test", and
      the others its "train".

  Raises:
    ValueError: no such split, file or object; a row that is no mapping; a row
      without one of the fields, or with an empty answer; nothing to train on.
  """
  where = _whole(rows, split) if held_out else _of_split(rows, split)
  fields = {"question": question, "answer": answer}
  fields |= {f"info.{name}": key for name, key in (info or {}).items()}
  found = _open(where, fields.values())
  keep = range(len(found))
  if held_out:
    cut = len(found) - held_out
    if held_out < 0 or cut < 1:
      raise ValueError(
        f"held_out={held_out} is not allowed; {where} has {len(found)} rows; "
        "write fewer, and at least 0"
      )
    keep = keep[:cut] if split == "train" else keep[cut:]
  return Own(found, where, fields, keep)


class Own:
  """`data.Source` over rows that are somewhere else."""

  def __init__(
    self, rows: "Rows", where: str, fields: Mapping[str, str], keep: range
  ):
    """Checks every row, unless `rows` names its content by itself.

    Args:
      rows: raw rows by index.
      where: what they are called in errors.
      fields: dotted key by "question", "answer" and "info.NAME".
      keep: the rows that are its own.
    """
    self._rows, self._where, self._fields = rows, where, fields
    self._keep = keep
    known = getattr(rows, "fingerprint", None)
    digest = Digest()
    named = [known, dict(fields)]
    if len(keep) < len(rows):
      named.append([keep.start, keep.stop])
    for part in named if isinstance(known, str) else self:
      digest.add(part)
    self.fingerprint = digest.hex()

  def __len__(self) -> int:
    return len(self._keep)

  def __iter__(self) -> Iterator[dict[str, Any]]:
    return (self[i] for i in range(len(self)))

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < len(self):
      raise IndexError(f"index {index} is not in [0, {len(self)})")
    place = self._keep[index]
    row = self._rows[place]
    name = f"{self._where}: row {place}"
    if isinstance(self._rows, JsonLines):
      name = f"{self._where}:{self._rows.line(place)}"
    if not isinstance(row, Mapping):
      raise ValueError(f"{name}: {type(row).__name__}, not a mapping of fields")
    found = {}
    for field, key in self._fields.items():
      try:
        found[field] = find(row, key)
      except LookupError:
        raise ValueError(
          f"{name}: no field {key!r}; it has {', '.join(row)}; set {field}"
        ) from None
    return {
      "question": _question(found.pop("question"), name),
      "answer": gold(found.pop("answer"), name),
      "info": {k.removeprefix("info."): v for k, v in found.items()},
    }


def _of_split(rows: str | Mapping[str, str], split: str) -> str:
  if isinstance(rows, Mapping):
    if split not in rows:
      raise ValueError(
        f"split={split!r} is not allowed; rows has {', '.join(rows)}"
      )
    return rows[split]
  if not isinstance(rows, str) or "{split}" not in rows:
    # One file for all splits would be trained and tested on.
    raise ValueError(
      f"rows={rows!r} does not say which split it is; write {{split}} in it, "
      f"rows=dict({split}={rows!r}), or held_out=NUMBER of its last rows"
    )
  return rows.replace("{split}", split)


def _whole(rows: str | Mapping[str, str], split: str) -> str:
  """What is to be cut in two."""
  if not isinstance(rows, str) or "{split}" in rows:
    raise ValueError(
      f"rows={rows!r} has splits of its own, so that held_out has no effect; "
      "remove one of the two"
    )
  if split not in ("train", "test"):
    raise ValueError(
      f"split={split!r} is not allowed; with held_out there are train, test"
    )
  return rows


# -- rows by index -------------------------------------------------------------


class Rows(Protocol):
  """Raw rows with random access."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class JsonLines:
  """A file of one JSON object a line, of which only offsets are in memory.

  Lines end at "\\n" and nowhere else: a text may hold a line separator of
  Unicode. Blank lines are no rows.
  """

  def __init__(self, path: str | pathlib.Path):
    self._path = path
    self._starts, self._lines = array.array("Q"), array.array("Q")
    with open(path, "rb") as file:
      start = 0
      for number, line in enumerate(file, 1):
        if line.strip():
          self._starts.append(start)
          self._lines.append(number)
        start += len(line)
      if self._starts:
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

  def __len__(self) -> int:
    return len(self._starts)

  def line(self, index: int) -> int:
    """Number of the line of a row, from 1."""
    return self._lines[index]

  def __getitem__(self, index: int) -> dict[str, Any]:
    start = self._starts[index]
    end = self._bytes.find(b"\n", start)
    name = f"{self._path}:{self.line(index)}"
    try:
      row = json.loads(self._bytes[start : end if end >= 0 else None])
    except (ValueError, RecursionError) as e:
      raise ValueError(f"{name}: not JSON ({e}); mend the line") from None
    if not isinstance(row, dict):
      raise ValueError(f"{name}: {type(row).__name__}, not a JSON object")
    return row


class Parquet:
  """The columns of a parquet file that the keys lead into, in memory."""

  def __init__(self, path: str | pathlib.Path, keys: Iterable[str]):
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = set(file.schema_arrow.names)
    wanted = {n for key in keys for n in (key, key.split(".")[0])} & names
    # Without a column that fits, all of them, for the error to name.
    self._table = file.read(sorted(wanted or names))

  def __len__(self) -> int:
    return self._table.num_rows

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._table.slice(index, 1).to_pylist()[0]


def _open(where: str, keys: Iterable[str]) -> Rows:
  if where.endswith((".jsonl", ".parquet")):
    return read(where, keys)
  module, _, name = where.partition(":")
  if not name:
    raise ValueError(
      f"rows={where!r} is not allowed; write the path of a .jsonl or .parquet "
      "file, or 'my_pkg.my_module:NAME'"
    )
  try:
    rows = getattr(importlib.import_module(module), name)
    len(rows), rows.__getitem__
  except (ImportError, AttributeError, TypeError) as e:
    raise ValueError(
      f"rows={where!r} cannot be used ({e}); NAME must be an object of an "
      "importable module, with len() and [i]"
    ) from e
  return rows


def read(path: str, keys: Iterable[str]) -> JsonLines | Parquet:
  """The rows of a file.

  Args:
    path: of a .jsonl or .parquet file.
    keys: dotted keys that will be asked for.

  Raises:
    ValueError: no such file, or not of its kind.
  """
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise ValueError(f"{path}: no such file; name one that is there")
  if file.suffix == ".jsonl":
    return JsonLines(file)
  try:
    return Parquet(file, keys)
  except OSError as e:
    raise ValueError(f"{path}: cannot be read ({e})") from e
  except ValueError as e:
    raise ValueError(f"{path}: not a parquet file ({e})") from e


# -- fields --------------------------------------------------------------------


def find(row: Any, key: str) -> Any:
  """What a dotted key leads to; raises LookupError where it leads nowhere."""
  if isinstance(row, Mapping) and key in row:
    return row[key]
  first, _, rest = key.partition(".")
  if isinstance(row, Sequence) and not isinstance(row, str):
    if not first.isdigit():
      raise LookupError(key)
    value = row[int(first)]
  elif isinstance(row, Mapping):
    value = row[first]
  else:
    raise LookupError(key)
  return find(value, rest) if rest else value


def _question(value: Any, name: str) -> str:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{name}: the question is {value!r}; write a text")
  return value


def gold(value: Any, name: str) -> str | list[str]:
  """A gold answer: a text (numbers become one), or a list of texts.

  Raises:
    ValueError: it is empty or of another type; the message begins with `name`.
  """
  if isinstance(value, (list, tuple)) and value:
    return [_gold(v, name) for v in value]
  return _gold(value, name)


def _gold(value: Any, name: str) -> str:
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if number and math.isfinite(value):  # nan is a table's word for no answer
    value = str(int(value) if value == value // 1 else value)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(
      f"{name}: the answer is {value!r}; write a text, a number, or a list of "
      "those"
    )
  return value.strip()


class Digest:
  """Names the content of rows, in their order, whichever file they are from."""

  def __init__(self):
    self._total = hashlib.sha256()

  def add(self, row: Any) -> None:
    text = json.dumps(row, sort_keys=True, default=repr)
    self._total.update(hashlib.sha256(text.encode()).digest())

  def hex(self) -> str:
    """16 digits."""
    return self._total.hexdigest()[:16]
