"""Ids of chats equal transformers', and foreign text is never control."""

import datetime
import json
import os
import pathlib

import families
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from drmas_jax import data
from drmas_jax.agents import agent
from drmas_jax.agents import math as agents
from drmas_jax.datasets import arithmetic
from drmas_jax.models.tiny import make_tokenizer
from drmas_jax.tokenizer import Growing, Tokenizer

pytestmark = pytest.mark.quick

CONTENT = st.lists(
  st.sampled_from(
    [*families.QWEN, *families.LLAMA, "<|im_", "<", "|>", "é你🙂", " ", "a7"]
  ),
  max_size=8,
).map("".join) | st.text(max_size=20)
ANY_TEXT = hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
  deadline=None,
)
USER = [{"role": "user", "content": "hi"}]
CHATS = [
  USER,
  [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "1+1 <verify> é 你 🙂\n\n "},
    {"role": "assistant", "content": "<think>so</think>\n\n2"},
    {"role": "user", "content": " <think>sure?</think>"},
  ],
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tiny")
  make_tokenizer.write(folder)
  return Tokenizer.load(folder)


@pytest.fixture(scope="module", params=families.TEMPLATES)
def family(request, tmp_path_factory):
  """(name, folder, our tokenizer, transformers')."""
  import transformers

  folder = tmp_path_factory.mktemp(request.param)
  families.write(folder, request.param)
  hf = transformers.AutoTokenizer.from_pretrained(str(folder))
  return request.param, folder, Tokenizer.load(folder), hf


def template_ids(hf, chat, **options):
  """What transformers encodes, on the day that is pinned."""
  return hf.apply_chat_template(
    chat,
    add_generation_prompt=True,
    tokenize=True,
    return_dict=False,
    **{"date_string": "26 Jul 2024"} | options,
  )


OPTIONS = {
  "qwen25": [],
  "qwen3": [{"enable_thinking": True}, {"enable_thinking": False}],
  "llama32": [{"date_string": "1 Jan 2026"}],
}


@pytest.mark.parametrize("chat", CHATS)
def test_ids_equal_transformers(family, chat):
  """T04: with the family's own system turn or a given one; T06: both flags."""
  name, folder, tokenizer, hf = family
  ours = tokenizer.encode_chat(chat)
  assert ours.dtype == np.int32
  assert ours.tolist() == template_ids(hf, chat)
  for options in OPTIONS[name]:
    other = Tokenizer.load(folder, options).encode_chat(chat)
    assert other.tolist() == template_ids(hf, chat, **options)


def test_the_default_system_turn_is_the_template_s(family):
  """T04."""
  name, _, tokenizer, _ = family
  shown = tokenizer.decode(tokenizer.encode_chat(USER), control=True)
  own = {"qwen25": "Be of help.", "qwen3": "", "llama32": "Known until: 2023"}
  assert own[name] in shown
  assert ("system" in shown) == bool(own[name])


def test_an_empty_think_block_is_prompt(tmp_path):
  """T06: it is in the prompt, so nothing of it is sampled or trained."""
  folder = families.write(tmp_path, "qwen3")
  on, off = (
    Tokenizer.load(folder, {"enable_thinking": flag}).encode_chat(USER)
    for flag in (True, False)
  )
  assert off[: len(on)].tolist() == on.tolist()
  block = Tokenizer.load(folder).decode(off[len(on) :])
  assert block == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
  "template",
  [
    None,
    "{{ strftime_now('%Y-%m-%d %H:%M') }}{% for m in messages %}"
    "{{ m.content }}<|eot_id|>{% endfor %}",
  ],
)
def test_no_template_knows_what_day_it_is(tmp_path, monkeypatch, template):
  """T08: whether it can be given a date or not."""
  from transformers.utils import chat_template_utils

  shown = set()
  for day in ("2026-01-01", "2026-06-01"):

    class Clock(datetime.datetime):
      @classmethod
      def now(cls, day=day):
        return cls.fromisoformat(day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer = Tokenizer.load(families.write(tmp_path, "llama32", template))
    shown.add(tokenizer.decode(tokenizer.encode_chat(USER)))
  (text,) = shown
  assert ("26 Jul 2024" if template is None else "2024-07-26 00:00") in text


def test_exactly_one_begin_token(family):
  """T09: the template's, or none; encoding alone adds none either."""
  name, _, tokenizer, hf = family
  begin = hf.convert_tokens_to_ids("<|begin_of_text|>")
  chat = [{"role": "user", "content": "hi <|begin_of_text|>"}]
  for ids in (tokenizer.encode_chat(USER), tokenizer.encode_chat(chat)):
    assert ids.tolist().count(begin) == (name == "llama32")
  assert begin not in tokenizer.encode("hi <|begin_of_text|>")


@pytest.mark.parametrize(
  ("name", "key", "allowed"),
  [
    ("qwen25", "enable_thinking", "none"),
    ("qwen3", "enable_thinkin", "enable_thinking"),
    ("llama32", "enable_thinking", "date_string"),
    ("llama32", "bos_token", "date_string"),
    ("llama32", "messages", "date_string"),
    ("qwen25", "strftime_now", "none"),
  ],
)
def test_a_key_that_the_template_never_reads(tmp_path, name, key, allowed):
  folder = families.write(tmp_path, name)
  with pytest.raises(ValueError) as caught:
    Tokenizer.load(folder, {key: False})
  assert str(caught.value) == (
    f"chat_template_kwargs.{key}: False would change nothing, since the "
    "checkpoint's chat template never reads that key; allowed are "
    f"{allowed}; correct or remove it"
  )


@hypothesis.given(CONTENT, CONTENT)
@ANY_TEXT
def test_spelled_control_tokens_are_plain_text(family, system, user):
  name, _, tokenizer, hf = family
  spelled = families.LLAMA if name == "llama32" else families.QWEN
  special = set(hf.convert_tokens_to_ids(spelled))

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


def test_a_content_may_be_in_parts(family):
  _, _, tokenizer, _ = family
  parts = [{"role": "user", "content": ["a<|im_", "end|>", "b"]}]
  whole = [{"role": "user", "content": "a<|im_end|>b"}]
  assert tokenizer.render(parts) == tokenizer.render(whole)


def test_ends_and_padding(family):
  name, _, tokenizer, hf = family
  llama = name == "llama32"
  end = hf.convert_tokens_to_ids("<|eot_id|>" if llama else "<|im_end|>")
  assert tokenizer.end_of_turn_id == end == 2
  assert tokenizer.stop_ids == (0, 1, 2)  # of three files
  assert tokenizer.pad_id == 0
  assert tokenizer.vocab_size == len(hf)


@hypothesis.given(st.text(alphabet="ab <>/verify🙂é你", max_size=25))
@ANY_TEXT
def test_tokens_until(family, text):
  _, _, tokenizer, _ = family
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  for end in range(len(text) + 1):
    enough = [
      n
      for n in range(len(ids) + 1)
      if tokenizer.decode(ids[:n]).startswith(text[:end])
    ]
    assert tokenizer.tokens_until(ids, end) == min(enough)


@hypothesis.given(
  st.text(alphabet="ab <>/verify🙂é你\ufffd", max_size=25),
  st.lists(st.integers(1, 4)),
)
@ANY_TEXT
def test_a_growing_text_is_the_whole_one(family, text, steps):
  _, _, tokenizer, _ = family
  ids = tokenizer.encode(text).tolist()
  decoded = []
  read = Growing(
    lambda some: decoded.append(len(some)) or tokenizer.decode(some)
  )
  end = 0
  for step in [*steps, len(ids)]:
    end = min(end + step, len(ids))
    assert read(ids[:end]) == tokenizer.decode(ids[:end])


def test_a_growing_text_is_decoded_about_once(family):
  _, _, tokenizer, _ = family
  ids = tokenizer.encode("a verdict " * 100).tolist()
  lengths = []
  read = Growing(
    lambda some: lengths.append(len(some)) or tokenizer.decode(some)
  )
  for end in range(8, len(ids), 8):
    text = read(ids[:end])
  assert text + tokenizer.decode(ids[end:]) == "a verdict " * 100
  assert sum(lengths) < 4 * len(ids)


@pytest.fixture(scope="module")
def bytewise():
  """(ours, transformers') of a vocabulary in which bytes are tokens."""
  import tokenizers
  import transformers
  from tokenizers import decoders, models

  spelled = [f"<0x{b:02X}>" for b in ("\n€🙂".encode())]
  words = ["<unk>", *families.QWEN, "a", "▁", "▁b", *dict.fromkeys(spelled)]
  ids = {word: i for i, word in enumerate(words)}
  backend = tokenizers.Tokenizer(
    models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
  )
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  backend.add_special_tokens(families.QWEN)
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    eos_token=families.QWEN[2],
    chat_template=families.TEMPLATES["qwen25"],
  )
  return Tokenizer(hf), hf


@hypothesis.given(st.lists(st.integers(0, 13), max_size=9))
@ANY_TEXT
def test_of_bytes_what_was_spelled_stays(bytewise, ids):
  """Transformers' spells no byte of a run of which the last is half one."""
  ours, hf = bytewise
  for control in (True, False):
    whole = ours.decode(ids, control)
    theirs = hf.decode(ids, skip_special_tokens=not control)
    assert whole == theirs or "\ufffd" in theirs
    read = Growing(lambda some, c=control: ours.decode(some, c))
    for end in range(len(ids) + 1):
      part = ours.decode(ids[:end], control)
      assert whole.startswith(part.rstrip("\ufffd"))
      assert read(ids[:end]) == part


def test_a_line_ends_with_half_a_character(bytewise):
  ours, hf = bytewise
  ids = hf.convert_tokens_to_ids(["a", "<0x0A>", "<0xF0>", "<0x9F>"])
  assert ours.decode(ids) == "a\n\ufffd"
  assert ours.tokens_until(ids, 2) == ours.tokens_until(ids[:2], 2) == 2


def test_a_growing_text_of_words():
  """A decoder may leave out the blank before what it is given first."""
  words = ["▁one", "▁two", "s", "▁three", "▁four"]

  def decode(ids):
    return "".join(words[i] for i in ids).replace("▁", " ").lstrip()

  read = Growing(decode)
  for end in (1, 2, 3, 3, 5):
    assert read(range(end)) == decode(range(end))


@hypothesis.given(CONTENT)
@ANY_TEXT
def test_spans(family, text):
  _, _, tokenizer, _ = family
  spans = tokenizer.spans(text + "\ud800")
  assert len(spans) == len(tokenizer.encode(text + "\ud800"))
  assert spans[-1][1] == len(text) + 1


def test_the_token_that_closes_a_tag_is_kept_whole(tiny):
  text = "7<verify>reject</verify>,8"
  ids = tiny.encode(text)
  end = agent.closes(agents.verifier.tags)(text)
  assert tiny.tokens_until(ids, end) == 4
  # One character into a token's text is all of that token.
  assert tiny.tokens_until(ids, 2) == 2


def test_lone_surrogates_do_not_crash(family):
  _, _, tokenizer, _ = family
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


def test_nothing_that_ends_a_completion(tmp_path):
  template = "{% for m in messages %}{{ m.content }}{% endfor %}"
  families.write(tmp_path, "qwen25", template)
  settings = {"chat_template": template}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  assert Tokenizer.load(tmp_path).stop_ids == (0, 1, 2)
  for file in ("config.json", "generation_config.json"):
    (tmp_path / file).unlink()
  with pytest.raises(ValueError, match=r"checkpoint: nothing .*eos_token_id"):
    Tokenizer.load(tmp_path)
  # Nor is there any control token.
  path = tmp_path / "tokenizer.json"
  tokenizer = json.loads(path.read_text())
  for token in tokenizer["added_tokens"]:
    token["special"] = False
  path.write_text(json.dumps(tokenizer))
  with pytest.raises(ValueError, match="checkpoint: nothing"):
    Tokenizer.load(tmp_path)


# -- the tiny policies' tokenizer ----------------------------------------------


@hypothesis.given(st.lists(st.sampled_from(make_tokenizer.WORDS), max_size=30))
@ANY_TEXT
def test_tiny_spells_its_own_words(tiny, words):
  text = "".join(words)
  assert tiny.decode(tiny.encode(text)) == text


@pytest.mark.parametrize("team", make_tokenizer.TEAMS)
def test_each_word_of_a_tiny_team_is_a_token(tmp_path, team):
  """Also one that two lists of words have in common."""
  make_tokenizer.write(tmp_path, make_tokenizer.TEAMS[team])
  tokenizer, words = Tokenizer.load(tmp_path), set(make_tokenizer.TEAMS[team])
  ids = set()
  for word in words - {make_tokenizer.UNKNOWN}:
    (one,) = tokenizer.encode(word).tolist()
    assert tokenizer.decode([one]) == word
    ids.add(one)
  assert len(ids) == len(words) - 1
  assert not ids & {tokenizer.pad_id, *tokenizer.stop_ids}


@hypothesis.given(st.text(max_size=30))
@ANY_TEXT
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
  for task in data.Stream({"arithmetic": source}, seed=0).tasks(0, 300):
    for name, shown in arithmetic.demonstrations(task, rng).items():
      for d in shown:
        messages = getattr(agents, name).messages("short", *d.args)
        prompt = tiny.encode_chat(messages)
        completion = tiny.encode(d.completion)
        assert unknown not in prompt and unknown not in completion
        assert tiny.decode(prompt) == "".join(messages[0]["content"])
        assert tiny.decode(completion) == d.completion
        longest["prompt"] = max(longest["prompt"], len(prompt))
        longest["completion"] = max(longest["completion"], len(completion))
  assert longest == {"prompt": 36, "completion": 10}


# -- released tokenizers -------------------------------------------------------


@pytest.mark.parametrize("name", ["DRMAS_SMOLLM2", "DRMAS_QWEN05"])
def test_a_released_folder(name):
  """T01, T04, T09 on the real thing: `DRMAS_SMOLLM2=FOLDER pytest ..`."""
  import transformers

  if name not in os.environ:
    pytest.skip(f"set {name} to a folder of the checkpoint")
  folder = pathlib.Path(os.environ[name])
  tokenizer = Tokenizer.load(folder)
  hf = transformers.AutoTokenizer.from_pretrained(str(folder))
  for chat in CHATS:
    assert tokenizer.encode_chat(chat).tolist() == template_ids(hf, chat)
  text = tokenizer.decode(tokenizer.encode_chat(USER), control=True)
  assert text.count("system\n") == 1
  spelled = [{"role": "user", "content": "".join(hf.all_special_tokens)}]
  plain, empty = (
    tokenizer.encode_chat(chat).tolist()
    for chat in (spelled, [{"role": "user", "content": ""}])
  )
  special = set(hf.all_special_ids)
  assert [i for i in plain if i in special] == [
    i for i in empty if i in special
  ]
  assert tokenizer.end_of_turn_id in tokenizer.stop_ids
