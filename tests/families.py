"""Small tokenizers whose chat templates behave as those of three families.

The templates are not the published ones; they do what those do to a chat:

  qwen25   a system turn of its own where none is given
  qwen3    no system turn of its own; an empty think block where thinking is
           off; reasoning of turns before the last question is left out
  llama32  a begin token, and a system turn with today's date unless it is given
           one; contents are trimmed; several end tokens
"""

import json

QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = [
  *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
  *("<|start_header_id|>", "<|end_header_id|>"),
]

_QWEN_TURN = "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n"

TEMPLATES = {
  "qwen25": (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nBe of help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}" + _QWEN_TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  ),
  "qwen3": (
    "{% set last = namespace(user=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought, _, said = m.content.rpartition('</think>') %}"
    "{% set thought = thought.split('<think>')[-1].strip('\n') %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > last.user and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said.lstrip('\n') }}<|im_end|>\n"
    "{% else %}" + _QWEN_TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
  ),
  "llama32": (
    "{% macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% endmacro %}{{ bos_token }}{% if date_string is not defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ head('system') }}Known until: 2023\nToday: {{ date_string }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}{{ head(m.role) }}{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
  ),
}


def write(folder, family, template=None):
  """A byte-level BPE of a few merges in Hugging Face's layout.

  As in the released folders, `<think>` and `</think>` are tokens of their own
  and no control tokens, Llama's adds its begin token to whatever it encodes,
  and the end tokens stand in three files, which do not agree.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  llama = family == "llama32"
  control = LLAMA if llama else QWEN
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=control,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  bpe.train_from_iterator(["<verify>approve</verify> user system"] * 9, trainer)
  if llama:
    begin = bpe.token_to_id("<|begin_of_text|>")
    bpe.post_processor = processors.TemplateProcessing(
      single="<|begin_of_text|> $A",
      special_tokens=[("<|begin_of_text|>", begin)],
    )
  else:
    bpe.add_tokens(["<think>", "</think>"])
  bpe.save(str(folder / "tokenizer.json"))
  end = "<|eot_id|>" if llama else "<|im_end|>"
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": end,
    "chat_template": template or TEMPLATES[family],
  }
  if llama:
    settings["bos_token"] = "<|begin_of_text|>"
  else:
    settings["pad_token"] = "<|endoftext|>"
  ids = [bpe.token_to_id(token) for token in control]
  files = {
    "tokenizer_config.json": settings,
    "config.json": {"eos_token_id": ids[1]},
    "generation_config.json": {"eos_token_id": [ids[2], ids[0]]},
  }
  for name, content in files.items():
    (folder / name).write_text(json.dumps(content))
  return folder
