r"""Writes the tokenizer of a tiny team, in Hugging Face's layout.

A token is a digit, a sign, a syllable, or a whole tag or phrase that the team's
tasks and its "short" templates use; decoding joins tokens with nothing in
between, so `decode(encode(x)) == x` for every text made of them. Any other run
of characters becomes one unknown token. Tags are ordinary tokens: a decoder
that skips special ones keeps them.

    python -m drmas_jax.models.tiny.make_tokenizer FOLDER {math,search}
"""

import json
import pathlib
import re
import sys
from collections.abc import Sequence

UNKNOWN = "\ufffd"
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
WORDS = (
  UNKNOWN,
  *"0123456789",
  *"+-*/=,.()",
  " ",
  "\n",
  "\\boxed{",
  "}",
  "<think>",
  "</think>",
  "<verify>",
  "</verify>",
  "approve",
  "reject",
  "solve: ",
  "verify: ",
  "\nsolver: ",
  "\nverifier: ",
  " from left to right, modulo ",
)
SEARCH_WORDS = (
  UNKNOWN,
  *(consonant + vowel for consonant in "bdklmnpt" for vowel in "aou"),
  *("friend", "boss", "home", "job", "pet"),
  *("What is the ", " of the ", " of ", "?", "The ", " is ", "."),
  *(" ", "\n"),
  *("verify: ", "search: ", "answer: "),
  *("<think>", "</think>"),
  *("<verify>", "</verify>", "yes", "no"),
  *("<search>", "</search>", "<answer>", "</answer>"),
)
TEAMS = {"math": WORDS, "search": SEARCH_WORDS}
CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write(folder: str | pathlib.Path, words: Sequence[str] = WORDS) -> None:
  """Writes tokenizer.json and tokenizer_config.json into `folder`.

  Args:
    folder: is made if it is not there.
    words: the first one stands for what is none of them.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  # Ids without a gap: what is added behind would take one that is in use.
  words = tuple(dict.fromkeys(words))
  vocabulary = {word: i for i, word in enumerate(words)}
  tokenizer = tokenizers.Tokenizer(
    models.WordLevel(vocabulary, unk_token=UNKNOWN)
  )
  longest_first = sorted(words, key=len, reverse=True)
  pattern = "|".join(re.escape(word) for word in longest_first)
  tokenizer.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(pattern), "isolated"
  )
  tokenizer.decoder = decoders.Fuse()
  # Special tokens are kept out of the word list, so that a text which spells
  # one (rule 17) is an unknown word and never the control token.
  tokenizer.add_special_tokens([PAD, END, *ROLES])
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
    "additional_special_tokens": list(ROLES),
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
  }
  path = folder / "tokenizer_config.json"
  path.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
  if len(sys.argv) != 3 or sys.argv[2] not in TEAMS:
    name = "drmas_jax.models.tiny.make_tokenizer"
    sys.exit(f"usage: python -m {name} FOLDER {{{','.join(TEAMS)}}}")
  write(sys.argv[1], TEAMS[sys.argv[2]])
