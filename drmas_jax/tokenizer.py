"""Text and token ids: a Hugging Face tokenizer and its chat template.

Everything foreign in a chat is data. A control token spelled in a message's
content ("<|im_end|>" in a question) is encoded as the plain text it is, by
`encode_chat` here, and so it cannot end a turn or open another.

Transformers loads when a tokenizer does; torch is not needed.
"""

import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# Set into what must not be read as a control token while the template is
# rendered. A lone surrogate: no text that can be encoded holds one.
_BREAK = "\ud800"
_PROBE = "probe"

# Llama's templates print today's date unless they are given one.
DATE = "26 Jul 2024"


class Tokenizer:
  """One policy's tokenizer.

  Attributes:
    stop_ids: sorted ids that end a completion: the tokenizer's and both config
      files' end tokens, and the template's end of turn.
    end_of_turn_id: what the template writes after an assistant's message.
    pad_id: fills up arrays; nothing depends on its value.
    vocab_size: number of ids; a model may have padded rows beyond it.
  """

  def __init__(self, hf: Any, end_ids: Sequence[int] = ()):
    self._hf = hf
    special = {
      token.content
      for token in hf.added_tokens_decoder.values()
      if token.special
    }
    longest_first = sorted(special, key=len, reverse=True)
    self._special = re.compile("|".join(map(re.escape, longest_first)) or "$^")
    self.vocab_size = len(hf)
    self.end_of_turn_id = self._end_of_turn()
    ends = {*end_ids, self.end_of_turn_id, hf.eos_token_id} - {None}
    self.stop_ids = tuple(sorted(ends))
    pad = hf.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> "Tokenizer":
    """Reads a checkpoint folder.

    Raises:
      ValueError: if the folder holds no tokenizer, no chat template, or names
        no end token.
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
      raise ValueError(f"its tokenizer cannot be read: {e}") from e
    if not hf.chat_template:
      raise ValueError(
        f"checkpoint={str(folder)!r} has no chat template; use an instruct "
        "checkpoint, or add chat_template to tokenizer_config.json"
      )
    ends = _end_ids(folder / "generation_config.json")
    return cls(hf, ends + _end_ids(folder / "config.json"))

  def encode(self, text: str) -> np.ndarray:
    """Ids of plain text [tokens]; control tokens in it are plain text too."""
    return np.asarray(self._plain(_encodable(text)), np.int32)

  def encode_chat(
    self, messages: Sequence[dict[str, str]], **template_kwargs: Any
  ) -> np.ndarray:
    """Ids of a prompt [tokens]: the rendered chat, open for the next turn.

    Equal to `apply_chat_template(.., add_generation_prompt=True)` where no
    content spells a control token. The template writes the begin token if there
    is to be one; none is added to it.
    """
    broken = [
      {**message, "content": self._break(_encodable(message["content"]))}
      for message in messages
    ]
    text = self._render(broken, add_generation_prompt=True, **template_kwargs)
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

  def decode(self, ids: Sequence[int], control: bool = False) -> str:
    """Text of ids; control tokens are left out unless `control` is set."""
    return self._hf.decode(
      [int(i) for i in ids],
      skip_special_tokens=not control,
      clean_up_tokenization_spaces=False,
    )

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

  def _render(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
    kwargs = {"date_string": DATE, **kwargs}
    return self._hf.apply_chat_template(messages, tokenize=False, **kwargs)

  def _plain(self, text: str) -> list[int]:
    if not text:
      return []
    return self._hf(text, add_special_tokens=False, split_special_tokens=True)[
      "input_ids"
    ]

  def _break(self, content: str) -> str:
    """Puts a break behind the first character of each spelled control token."""
    return self._special.sub(
      lambda m: m.group()[0] + _BREAK + m.group()[1:], content
    )

  def _end_of_turn(self) -> int | None:
    """The first control token that follows an assistant's message."""
    chat = [
      {"role": "user", "content": "?"},
      {"role": "assistant", "content": _PROBE},
    ]
    after = self._render(chat).rpartition(_PROBE)[2]
    token = self._special.search(after)
    return self._hf.convert_tokens_to_ids(token.group()) if token else None


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
