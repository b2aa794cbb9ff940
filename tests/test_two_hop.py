"""The generated knowledge base: its facts are found, its splits apart."""

import json
import types

import numpy as np
import pytest

from drmas_jax import config as config_lib
from drmas_jax import data, rollout, sft
from drmas_jax.agents import search as agents
from drmas_jax.agents.agent import closes
from drmas_jax.backbone import checkpoint_folder
from drmas_jax.datasets import two_hop
from drmas_jax.models.tiny import make_tokenizer
from drmas_jax.retrieval.bm25 import Bm25
from drmas_jax.retrieval.memory import Memory
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Task

pytestmark = pytest.mark.quick

TEXTS = [p["contents"] for p in two_hop.PASSAGES]


def _facts():
  words = [text.rstrip(".").split() for text in TEXTS]
  return {(w[1], w[3]): w[5] for w in words}


def test_two_passages_answer_a_question():
  facts = _facts()
  assert len(facts) == len(TEXTS) == len(set(TEXTS))
  for split in ("train", "test"):
    source = two_hop.make(split)
    rows = [source[i] for i in range(len(source))]
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
      info = row["info"]
      other = facts[info["first"], info["person"]]
      assert facts[info["second"], other] == row["answer"]
  with pytest.raises(IndexError):
    source[len(source)]
  with pytest.raises(ValueError, match="split='eval'"):
    two_hop.make("eval")


def test_nobody_of_the_test_split_is_in_the_train_split():
  facts, people, pairs = _facts(), {}, {}
  for split in ("train", "test"):
    source = two_hop.make(split)
    rows = [source[i]["info"] for i in range(len(source))]
    people[split] = {r["person"] for r in rows} | {
      facts[first, r["person"]] for r in rows for first in two_hop.FIRST
    }
    pairs[split] = {(r["first"], r["second"]) for r in rows[:128]}
  assert not people["train"] & people["test"]
  assert len(pairs["test"]) == 6, "the first rows ask for all there is"
  fingerprints = {two_hop.make(s).fingerprint for s in ("train", "test")}
  assert len(fingerprints) == 2


def test_a_plain_query_finds_its_fact(tmp_path):
  """In memory and by BM25 alike, so that neither is a toy of its own."""
  path = tmp_path / "facts.jsonl"
  path.write_text("".join(json.dumps(p) + "\n" for p in two_hop.PASSAGES))
  memory, bm25 = Memory(two_hop.PASSAGES), Bm25(path)
  assert len(memory) == len(bm25) == len(TEXTS)
  facts = _facts()
  queries = [f"{relation} of {name}" for relation, name in facts]
  found = memory.search(queries, 3)
  for (relation, name), hits in zip(facts, found, strict=True):
    best, *rest = hits
    assert best.text == f"The {relation} of {name} is {facts[relation, name]}."
    assert all(best.score > hit.score for hit in rest)
  firsts = [hits[0].text for hits in bm25.search(queries[:200], 1)]
  assert firsts == [hits[0].text for hits in found[:200]]


def test_memory_finds_nothing_without_a_common_word():
  memory = Memory(two_hop.PASSAGES)
  (nothing, some, tie) = memory.search(["zz", "FRIEND!", "the the"], 2)
  assert nothing == [] and len(some) == len(tie) == 2
  assert [p.id for p in tie] == ["0", "1"], "of equal scores the first"


def _demonstrations(num, **options):
  source, rng = two_hop.make("train"), np.random.default_rng(0)
  for i in range(num):
    row = source[i]
    task = Task("two_hop", i, i, row["question"], row["answer"], row["info"])
    yield task, two_hop.demonstrations(task, rng, **options)


def test_demonstrations_are_what_the_orchestra_asks_for():
  wins, shown = 0, 0
  for task, played in _demonstrations(600):
    verdicts = []
    for name, calls in played.items():
      role = getattr(agents, name)
      for args, completion in calls:
        role.messages("short", *args)
        reply = role.parse(completion, "tag")
        assert reply.valid
        assert closes(role.tags)(completion) == len(completion)
        verdicts += [reply.verdict] if name == "verifier" else []
    assert verdicts.count("yes") <= 1 and verdicts.count("no") == len(
      played["searcher"]
    )
    assert len(played["answerer"]) == 1
    wins += (
      played["answerer"][0].completion == f"<answer>{task.answer}</answer>"
    )
    shown += len(played["searcher"])
  assert 0.25 < wins / 600 < 0.4, "there is something to be learned"
  assert shown > 600


def test_faultless_demonstrations_win():
  faultless = dict.fromkeys(
    (
      *("verifier_flip", "searcher_slip", "searcher_noise"),
      *("answerer_slip", "answerer_noise"),
    ),
    0.0,
  )
  for task, played in _demonstrations(50, **faultless):
    assert len(played["searcher"]) == 2 and len(played["verifier"]) == 3
    assert played["answerer"][0].completion == f"<answer>{task.answer}</answer>"


def test_the_words_of_the_tiny_policies(tmp_path):
  make_tokenizer.write(tmp_path, make_tokenizer.SEARCH_WORDS)
  tokenizer = Tokenizer.load(tmp_path)
  source = two_hop.make("test")
  for text in [*TEXTS, *(source[i]["question"] for i in range(len(source)))]:
    ids = tokenizer.encode(text)
    assert 0 not in ids and len(ids) <= 9
    assert tokenizer.decode(ids) == text


def test_demonstrations_fit_the_config(root):
  config = config_lib.read(root / "configs" / "search_tiny.py", mode="sft")
  tasks = data.Stream({"two_hop": two_hop.make("train")}, 0).tasks(0, 40)
  team = rollout.Team(config)
  for name, policy in config.policies.items():
    backbone = types.SimpleNamespace(
      names=(name,),
      tokenizer=Tokenizer.load(checkpoint_folder(policy.checkpoint)),
      agents={name: (name,)},
      policy=policy,
    )
    shown = sft._Demonstrations(
      config, backbone, team, {"two_hop": two_hop.demonstrations}
    )
    rng = np.random.default_rng(0)
    turns = [turn for task in tasks for turn in shown.turns(task, rng)]
    for turn in turns:
      assert 0 not in turn.prompt_ids, "no word is unknown"
      assert turn.prompt_cut is False and len(turn.prompt_ids) <= 42
