"""Text and token ids: a Hugging Face tokenizer and its chat template.

Everything foreign in a chat is data. A control token spelled in a message's
content ("<|im_end|>" in a question) is encoded as the plain text it is, and so
it cannot end a turn or open another. To that end `render` marks what contents
spell, and `encode_rendered` reads the marks.

Transformers loads when a tokenizer does; torch is not needed.
"""

import datetime
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Set into what must not be read as a control token while the template is
# rendered. A lone surrogate: no text that can be encoded holds one.
_BREAK = "\ud800"
_PROBE = "probe"

# Templates may print today's date (Llama's do); here it is always this one. It
# is put in front of them, since they are given plain data only.
_DAY = datetime.datetime(2024, 7, 26)
_CLOCK = "{% macro strftime_now(format) %}{{ format"
_CLOCK += "".join(
  f" | replace('%{code}', '{_DAY.strftime('%' + code)}')"
  for code in "aAbBdHjmMpSyY"
)
_CLOCK += " }}{% endmacro %}{{ '' }}"

# What a template is given without being asked.
_GIVEN = {"messages", "add_generation_prompt", "raise_exception"}
_GIVEN |= {"strftime_now"}

Message = Mapping[str, str | Sequence[str]]


class Tokenizer:
  """One policy's tokenizer.

  Attributes:
    stop_ids: sorted ids that end a completion: the tokenizer's and both config
      files' end tokens, and the template's end of turn.
    end_of_turn_id: what the template writes after an assistant's message.
    pad_id: fills up arrays; nothing depends on its value.
    vocab_size: number of ids; a model may have padded rows beyond it.
  """

  def __init__(
    self,
    hf: Any,
    end_ids: Sequence[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
  ):
    self._hf = hf
    self._kwargs = dict(template_kwargs or {})
    self._template = hf.get_chat_template(tools=self._kwargs.get("tools"))
    self._check_kwargs()
    special = {
      token.content: i
      for i, token in hf.added_tokens_decoder.items()
      if token.special
    }
    self._special_ids = frozenset(special.values())
    self._bytes = _byte_tokens(hf.backend_tokenizer)
    longest_first = sorted(special, key=len, reverse=True)
    any_of = "|".join(map(re.escape, longest_first))
    self._special = re.compile(any_of or "(?!)")  # which is nowhere
    self.vocab_size = len(hf)
    self._end = self._end_of_turn()
    self.end_of_turn_id = self._end and hf.convert_tokens_to_ids(self._end)
    ends = {*end_ids, self.end_of_turn_id, hf.eos_token_id} - {None}
    self.stop_ids = tuple(sorted(ends))
    if not ends:
      raise ValueError(
        "checkpoint: nothing in its files ends a completion; write "
        "eos_token_id in generation_config.json"
      )
    pad = hf.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad

  @classmethod
  def load(
    cls,
    folder: str | pathlib.Path,
    template_kwargs: Mapping[str, Any] | None = None,
  ) -> "Tokenizer":
    """Reads a checkpoint folder.

    Args:
      folder: in the layout of Hugging Face.
      template_kwargs: given to the chat template with every prompt.

    Raises:
      ValueError: the folder holds no tokenizer or no chat template, or one
        that fails, or the template never reads one of the keys.
    """
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise ValueError(
        f"checkpoint={str(folder)!r} has no tokenizer.json; name a Hugging "
        "Face folder that has one"
      )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # Not AutoTokenizer: for some families it puts parts of its own in place of
    # what tokenizer.json says.
    try:
      hf = transformers.PreTrainedTokenizerFast.from_pretrained(
        str(folder), local_files_only=True
      )
    except Exception as e:  # of many kinds, some of them from Rust
      raise ValueError(
        f"checkpoint={str(folder)!r}: its tokenizer cannot be read: {e}"
      ) from e
    if not hf.chat_template:
      raise ValueError(
        f"checkpoint={str(folder)!r} has no chat template; use an instruct "
        "checkpoint, or add chat_template to tokenizer_config.json"
      )
    ends = _end_ids(folder / "generation_config.json")
    ends += _end_ids(folder / "config.json")
    import jinja2

    try:
      return cls(hf, ends, template_kwargs)
    except (jinja2.TemplateError, TypeError) as e:
      raise ValueError(
        f"checkpoint={str(folder)!r}: its chat template or the ids of its end "
        f"tokens are wrong ({type(e).__name__}: {e}); compare them with the "
        "checkpoint as it was published"
      ) from e

  def encode(self, text: str) -> np.ndarray:
    """Ids of plain text [tokens]; control tokens in it are plain text too."""
    return np.asarray(self._plain(_encodable(text)), np.int32)

  def encode_chat(self, messages: Sequence[Message]) -> np.ndarray:
    """Ids of a prompt [tokens]: the rendered chat, open for the next turn.

    Equal to `apply_chat_template(.., add_generation_prompt=True)` where no
    content spells a control token. The template writes the begin token if there
    is to be one; none is added to it.
    """
    return self.encode_rendered(self.render(messages))

  def render(self, messages: Sequence[Message], *, open: bool = True) -> str:
    """The chat as the template writes it, with spelled control tokens marked.

    Args:
      messages: `content` is a string, or a list of strings to be joined.
      open: for an assistant's turn to follow.
    """
    marked = [
      {**m, "content": self._mark("".join(m["content"]))} for m in messages
    ]
    return self._hf.apply_chat_template(
      marked,
      chat_template=_CLOCK + self._template,
      tokenize=False,
      add_generation_prompt=open,
      **self._kwargs,
    )

  def encode_rendered(self, text: str) -> np.ndarray:
    """Ids [tokens] of what `render` gives, or of its end from a control token
    on."""
    if _BREAK not in text:
      ids = self._hf(text, add_special_tokens=False)["input_ids"]
      return np.asarray(ids, np.int32)
    ids, end = [], 0
    for token in self._special.finditer(text):
      ids += self._plain(text[end : token.start()].replace(_BREAK, ""))
      ids.append(self._hf.convert_tokens_to_ids(token.group()))
      end = token.end()
    ids += self._plain(text[end:].replace(_BREAK, ""))
    return np.asarray(ids, np.int32)

  def after_turn(self, opened: str, said: str, rendered: str) -> str | None:
    """What the template writes behind an assistant's message.

    Args:
      opened: the chat before the message, as `render` gave it.
      said: the message.
      rendered: a chat that goes on behind it, as `render` gives it.

    Returns:
      The end of `rendered` from the message's end of turn on. None where the
      template has rewritten what comes before, so that `rendered` does not
      begin with `opened` and `said`, white space around `said` apart.
    """
    if not rendered.startswith(opened) or self._end is None:
      return None
    # What contents spell is marked: the first end of turn is the template's.
    shown, end, rest = rendered[len(opened) :].partition(self._end)
    same = shown.strip() == self._mark(said).strip()
    return end + rest if end and same else None

  def spans(self, text: str) -> list[tuple[int, int]]:
    """Where each token of plain text begins and ends in it, in characters."""
    return self._hf(
      _encodable(text),
      add_special_tokens=False,
      split_special_tokens=True,
      return_offsets_mapping=True,
    )["offset_mapping"]

  def vocabulary(self) -> dict[str, int]:
    """The id of every token."""
    return self._hf.get_vocab()

  def decode(self, ids: Sequence[int], control: bool = False) -> str:
    """Text of ids; control tokens are left out unless `control` is set.

    What ids spell stays, whatever follows them, but for a character that is
    not complete: that is U+FFFD.
    """
    ids = np.asarray(ids, int).tolist()
    if self._bytes:
      return self._decode_bytes(ids, control)
    # Not transformers' own way to it, which takes four times as long.
    return self._hf.backend_tokenizer.decode(
      ids, skip_special_tokens=not control
    )

  def _decode_bytes(self, ids: Sequence[int], control: bool) -> str:
    """Where single bytes are tokens, "<0x0A>", read by a fallback: of a run
    that is not UTF-8 to its end it would spell no byte."""
    backend, tokens = self._hf.backend_tokenizer, []
    seen = [i for i in ids if control or i not in self._special_ids]
    for is_byte, some in itertools.groupby(seen, self._bytes.__contains__):
      if is_byte:  # a token to a character: what follows may join them only
        tokens += bytes(self._bytes[i] for i in some).decode("utf-8", "replace")
      else:
        tokens += map(backend.id_to_token, some)
    return backend.decoder.decode([t for t in tokens if t is not None])

  def tokens_until(self, ids: Sequence[int], char_index: int) -> int:
    """How many leading ids it takes to spell `decode(ids)[:char_index]`.

    The token that spells the last of these characters counts whole, with
    whatever it spells beyond them.
    """
    wanted = self.decode(ids)[:char_index]
    low, high = 0, len(ids)
    while low < high:
      middle = (low + high) // 2
      if self.decode(ids[:middle]).startswith(wanted):
        high = middle
      else:
        low = middle + 1
    return low

  def _plain(self, text: str) -> list[int]:
    if not text:
      return []
    return self._hf(text, add_special_tokens=False, split_special_tokens=True)[
      "input_ids"
    ]

  def _mark(self, content: str) -> str:
    """Puts a break behind the first character of each spelled control token."""
    return self._special.sub(
      lambda m: m.group()[0] + _BREAK + m.group()[1:], _encodable(content)
    )

  def _end_of_turn(self) -> str | None:
    """The first control token that follows an assistant's message."""
    chat = [
      {"role": "user", "content": "?"},
      {"role": "assistant", "content": _PROBE},
    ]
    after = self.render(chat, open=False).rpartition(_PROBE)[2]
    token = self._special.search(after)
    return token.group() if token else None

  def _check_kwargs(self) -> None:
    """A key that the template never reads would change nothing."""
    allowed = _variables(self._template) - _GIVEN
    allowed -= self._hf.special_tokens_map.keys()
    for key, value in self._kwargs.items():
      if key not in allowed:
        raise ValueError(
          f"chat_template_kwargs.{key}: {value!r} would change nothing, since "
          "the checkpoint's chat template never reads that key; allowed are "
          f"{', '.join(sorted(allowed)) or 'none'}; correct or remove it"
        )


def _byte_tokens(backend: Any) -> dict[int, int]:
  """The byte that a token stands for, of a tokenizer with a byte fallback."""
  if backend.token_to_id("<0x0A>") is None:
    return {}
  decoder = json.loads(backend.to_str())["decoder"] or {}
  steps = decoder.get("decoders", [decoder])
  if not any(step.get("type") == "ByteFallback" for step in steps):
    return {}
  ids = {b: backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
  return {i: b for b, i in ids.items() if i is not None}


class Growing:
  """Decodes ids that are added to, each of them about once.

  Always equal to `decode(ids)` for a decoder that only looks back as far as
  the ids that were new the last time.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str]):
    self._decode = decode
    self._text = self._known = ""
    self._start = self._end = 0

  def __call__(self, ids: Sequence[int]) -> str:
    """Text of all ids; they begin with those of the last call."""
    new = self._decode(ids[self._start :])[len(self._known) :]
    text = self._text + new
    # A character at its end may still be incomplete.
    if len(ids) > self._end and not text.endswith("\ufffd"):
      known = self._decode(ids[self._end :])
      if known:  # or what follows would be decoded as a text's beginning
        self._text, self._known = text, known
        self._start, self._end = self._end, len(ids)
    return text


def common_length(one: np.ndarray, other: np.ndarray) -> int:
  """How many ids two sequences have in common at their beginning."""
  num = min(len(one), len(other))
  differ = np.flatnonzero(one[:num] != other[:num])
  return int(differ[0]) if len(differ) else num


def _variables(template: str) -> set[str]:
  """Names that a template looks up.

  One that it sets itself counts only where it asks whether it was given.
  """
  import jinja2
  from jinja2 import meta, nodes

  # A tag of transformers' own, which is about nothing here.
  template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
  parser = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
  tree = parser.parse(template)
  own = {n.name for n in tree.find_all(nodes.Name) if n.ctx == "store"}
  asked = {
    n.node.name
    for n in tree.find_all((nodes.Test, nodes.Filter))
    if n.name in ("defined", "undefined", "default", "d")
    and isinstance(n.node, nodes.Name)
  }
  return meta.find_undeclared_variables(tree) - (own - asked)


def _encodable(text: str) -> str:
  """Lone surrogates, which no tokenizer takes, become question marks."""
  return text.encode("utf-8", "replace").decode("utf-8")


def _end_ids(path: pathlib.Path) -> list[int]:
  """`eos_token_id` of a config file: absent, a number, or a list."""
  if not path.is_file():
    return []
  ends = json.loads(path.read_text()).get("eos_token_id")
  if ends is None:
    return []
  return list(ends) if isinstance(ends, list) else [ends]
