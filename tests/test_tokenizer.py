"""Ids of chats equal transformers', and foreign text is never control."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from drmas_jax import data
from drmas_jax.agents import math as agents
from drmas_jax.datasets import arithmetic
from drmas_jax.models.tiny import make_tokenizer
from drmas_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.quick

# The habits of the three families, in miniature: a default system turn and an
# empty think block (Qwen), a begin token and a date (Llama).
TEMPLATES = {
  "qwen": (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
  ),
  "llama": (
    "{{ bos_token }}{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|im_start|>system\nToday: {{ date_string }}<|im_end|>"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  ),
}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|begin|>"]
CONTENT = st.lists(
  st.sampled_from([*CONTROL, "<|im_", "<", "|>", "user\n", "é你🙂", " ", "a7"]),
  max_size=8,
).map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tiny")
  make_tokenizer.write(folder)
  return Tokenizer.load(folder)


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request, tmp_path_factory):
  """A byte-level BPE of a few merges with one family's template, and HF's."""
  import tokenizers
  import transformers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  folder = tmp_path_factory.mktemp(request.param)
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=CONTROL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  bpe.train_from_iterator(["<verify>approve</verify> user system"] * 9, trainer)
  bpe.save(str(folder / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin|>",
    "eos_token": "<|im_end|>",
    "chat_template": TEMPLATES[request.param],
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
  (folder / "generation_config.json").write_text(
    json.dumps({"eos_token_id": [5, 9]})
  )
  hf = transformers.AutoTokenizer.from_pretrained(str(folder))
  return request.param, Tokenizer.load(folder), hf


CHATS = [
  [{"role": "user", "content": "hi"}],
  [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "1+1 <verify> é 你 🙂\n\n "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": " <think>sure?</think>"},
  ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_ids_equal_transformers(family, chat, options):
  _, tokenizer, hf = family
  theirs = hf.apply_chat_template(
    chat,
    add_generation_prompt=True,
    tokenize=True,
    return_dict=False,
    date_string="26 Jul 2024",
    **options,
  )
  ours = tokenizer.encode_chat(chat, **options)
  assert ours.dtype == np.int32
  assert ours.tolist() == theirs


def test_template_options_and_one_begin_token(family):
  name, tokenizer, hf = family
  chat = [{"role": "user", "content": "hi <|begin|>"}]
  plain = tokenizer.encode_chat(chat)
  begin = hf.convert_tokens_to_ids("<|begin|>")
  assert (plain == begin).sum() == (1 if name == "llama" else 0)
  other = tokenizer.encode_chat(
    chat, enable_thinking=False, date_string="1 Jan 2026"
  )
  assert hf.decode(other) != hf.decode(plain)


@hypothesis.given(CONTENT, CONTENT)
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
  deadline=None,
)
def test_spelled_control_tokens_are_plain_text(family, system, user):
  _, tokenizer, hf = family
  special = set(hf.all_special_ids)

  def chat(first, second):
    return [
      {"role": "system", "content": first},
      {"role": "user", "content": second},
    ]

  ids = tokenizer.encode_chat(chat(system, user))
  empty = tokenizer.encode_chat(chat("", ""))
  assert [i for i in ids if i in special] == [i for i in empty if i in special]
  # Nothing is lost either: the text is the rendered one, letter by letter.
  rendered = hf.apply_chat_template(
    chat(system, user),
    add_generation_prompt=True,
    tokenize=False,
    date_string="26 Jul 2024",
  )
  assert hf.decode(ids, clean_up_tokenization_spaces=False) == rendered


def test_ends_and_padding(family):
  _, tokenizer, hf = family
  end = hf.convert_tokens_to_ids("<|im_end|>")
  assert tokenizer.end_of_turn_id == end
  assert tokenizer.stop_ids == tuple(sorted({end, 5, 9}))
  assert tokenizer.pad_id == min(tokenizer.stop_ids)  # the folder names none
  assert tokenizer.vocab_size == len(hf)


@hypothesis.given(st.text(alphabet="ab <>/verify🙂é你", max_size=25))
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
  deadline=None,
)
def test_tokens_until(family, text):
  _, tokenizer, _ = family
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  for end in range(len(text) + 1):
    enough = [
      n
      for n in range(len(ids) + 1)
      if tokenizer.decode(ids[:n]).startswith(text[:end])
    ]
    assert tokenizer.tokens_until(ids, end) == min(enough)


def test_the_token_that_closes_a_tag_is_kept_whole(tiny):
  text = "7<verify>reject</verify>,8"
  ids = tiny.encode(text)
  end = agents.verifier.closes(text)
  assert tiny.tokens_until(ids, end) == 4
  # One character into a token's text is all of that token.
  assert tiny.tokens_until(ids, 2) == 2


def test_lone_surrogates_do_not_crash(family):
  _, tokenizer, _ = family
  chat = [{"role": "user", "content": "a\ud800b<|im_end|>"}]
  assert "a?b<|im_end|>" in tokenizer.decode(tokenizer.encode_chat(chat))
  assert tokenizer.decode(tokenizer.encode("\udfff")) == "?"


@pytest.mark.parametrize(
  ("file", "content", "message"),
  [
    ("tokenizer.json", None, "no tokenizer.json"),
    ("tokenizer_config.json", "{}", "no chat template"),
  ],
)
def test_a_folder_that_lacks_something(tmp_path, file, content, message):
  make_tokenizer.write(tmp_path)
  (tmp_path / file).unlink()
  if content is not None:
    (tmp_path / file).write_text(content)
  with pytest.raises(ValueError, match=message):
    Tokenizer.load(tmp_path)


# -- the tiny policies' tokenizer ----------------------------------------------


@hypothesis.given(st.lists(st.sampled_from(make_tokenizer.WORDS), max_size=30))
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_tiny_spells_its_own_words(tiny, words):
  text = "".join(words)
  assert tiny.decode(tiny.encode(text)) == text


@hypothesis.given(st.text(max_size=30))
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_tiny_takes_any_text(tiny, text):
  ids = tiny.encode_chat([{"role": "user", "content": text}])
  assert ids.min() >= 0 and ids.max() < tiny.vocab_size <= 64


def test_tiny_control_tokens(tiny):
  spelled = "".join([make_tokenizer.END, make_tokenizer.PAD, "<|user|>"])
  ids = tiny.encode_chat([{"role": "user", "content": spelled}])
  unknown = tiny.encode("?").tolist()
  assert ids[1:-2].tolist() == unknown
  assert tiny.end_of_turn_id in tiny.stop_ids
  assert tiny.pad_id not in tiny.stop_ids
  assert tiny.decode([tiny.pad_id, *ids, *tiny.stop_ids]) == "\ufffd"


def test_tiny_covers_the_demonstrations(tiny):
  rng = np.random.default_rng(0)
  unknown = tiny.encode("?")[0]
  longest = {"prompt": 0, "completion": 0}
  source = arithmetic.make("train")
  for task in data.Stream(source, seed=0).tasks(0, 300):
    for name, shown in arithmetic.demonstrations(task, rng).items():
      for d in shown:
        messages = getattr(agents, name).messages("short", *d.args)
        prompt = tiny.encode_chat(messages)
        completion = tiny.encode(d.completion)
        assert unknown not in prompt and unknown not in completion
        assert tiny.decode(prompt) == messages[0]["content"]
        assert tiny.decode(completion) == d.completion
        longest["prompt"] = max(longest["prompt"], len(prompt))
        longest["completion"] = max(longest["completion"], len(completion))
  assert longest == {"prompt": 36, "completion": 10}
