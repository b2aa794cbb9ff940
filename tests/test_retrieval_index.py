"""Corpora, BM25, the encoder, the exact search: all but the network."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from parity import make_vectors

from drmas_jax.retrieval import bm25, corpus, encoder, retriever, topk
from drmas_jax.retrieval.retriever import Passage

quick = pytest.mark.quick

ROWS = [
  {"id": "a", "title": "Oslo", "text": "Oslo is the capital of Norway."},
  {"id": "b", "title": "Bergen", "text": "A city of Norway on the sea."},
  {"id": "c", "title": "The Who", "text": "The Who are a band."},
  {"id": "d", "title": "Café Élan", "text": "It is in Paris."},
  {"id": "e", "title": "Twin", "text": "same words here"},
  {"id": "f", "title": "Twin", "text": "same words here"},
]


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture
def path(tmp_path):
  return write(tmp_path / "small.jsonl", ROWS)


def ids(found):
  return [[p.id for p in hits] for hits in found]


# -- passages ------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
  "document, found",
  [
    ({"id": 7, "contents": '"A "B""\n text'}, Passage("7", 'A "B"', " text")),
    ({"id": "7", "contents": "no title"}, Passage("7", "", "no title")),
    ({"contents": "A\nb\nc"}, Passage("", "A", "b\nc")),
    ({"id": "7", "title": "A", "text": "b"}, Passage("7", "A", "b")),
    ({"id": "7", "text": "b\nc"}, Passage("7", "", "b\nc")),
  ],
)
def test_layouts_of_a_document(document, found):
  assert retriever.passage(document) == found
  again = {"id": found.id, "contents": found.contents}
  assert retriever.passage(again) == found


@quick
@pytest.mark.parametrize(
  "document",
  [{"id": "1"}, {"id": None, "text": ""}, {"contents": 3}, {"id": True}],
)
def test_what_is_no_document(document):
  with pytest.raises(ValueError, match="not a text"):
    retriever.passage(document)


@quick
def test_a_query_is_cut_and_can_be_encoded():
  """R11: whatever a model writes."""
  assert retriever.clean("q" * 100_000) == "q" * retriever.MAX_QUERY
  for text in ("😀" * 5000, "中" * 5000, "א" * 5000):
    assert retriever.clean(text) == text[: retriever.MAX_QUERY]
  assert retriever.clean(" a\ud800b\n") == "a?b"


# -- the index and its folder --------------------------------------------------


@quick
def test_words():
  assert bm25.words("The Café's 2nd ÉLAN-vital") == [
    *("the", "cafe", "s", "2nd", "elan", "vital"),
  ]


@quick
def test_bm25(path, capfd):
  found = bm25.Bm25(path)
  assert len(found) == 6
  assert "cut into words: 100%" in capfd.readouterr().err
  assert ids(found.search(["capital of Norway?", "zebra", "", "?!"], 3)) == [
    *(["a", "b"], [], [], []),
  ]
  (hits,) = found.search(["cafe elan"], 3)
  assert hits[0][:3] == ("d", "Café Élan", "It is in Paris.")
  assert hits[0].score > 0
  # Only common words; equal scores in the order of the corpus; few asked for.
  assert ids(found.search(["The Who", "same words", "norway"], 1)) == [
    *(["c"], ["e"], ["a"]),
  ]
  # It is there now: nothing is made.
  began = time.process_time()
  again = bm25.Bm25(path, build="never")
  assert time.process_time() - began < 1
  assert ids(again.search(["same words"], 9)) == [["e", "f"]]
  assert not capfd.readouterr().err


@quick
def test_scores_are_those_of_the_formula(path):
  """Lucene's BM25 by hand, with k1 1.5, b 0.75."""
  found = bm25.Bm25(path)
  texts = [bm25.words(found._corpus.passage(i).contents) for i in range(6)]
  mean = np.mean([len(t) for t in texts])
  (hits,) = found.search(["norway oslo"], 2)
  scores = []
  for text in texts[:2]:
    score = 0
    for word in ("norway", "oslo"):
      have = sum(word in t for t in texts)
      idf = np.log(1 + (len(texts) - have + 0.5) / (have + 0.5))
      count = text.count(word)
      norm = 1.5 * (1 - 0.75 + 0.75 * len(text) / mean)
      score += idf * count / (count + norm)
    scores.append(score)
  np.testing.assert_allclose([p.score for p in hits], scores, rtol=1e-5)


@quick
def test_a_folder_of_files_in_both_layouts(tmp_path):
  folder = tmp_path / "wiki"
  folder.mkdir()
  write(folder / "b.jsonl", ROWS[:2])
  contents = json.dumps({"id": "0", "contents": '"Rome"\nCapital of Italy'})
  (folder / "a.jsonl").write_text(contents)  # its only line has no end
  (folder / "c.jsonl").write_text("\n\n")
  (folder / "d.jsonl").write_text("")
  found = bm25.Bm25(folder, tmp_path / "index" / "here")
  assert ids(found.search(["capital"], 5)) == [["0", "a"]]
  assert [p.name for p in tmp_path.iterdir()] == ["wiki", "index"]


BROKEN = [
  (b'{"id": "x", "text": ', "small.jsonl:7: cannot be read"),
  (b"[1]\n", "small.jsonl:7: cannot be read: it is no object"),
  (
    b'{"text": "x"}\n',
    "small.jsonl:7: cannot be read: it is no object with an",
  ),
  (b'{"id": "x"}\n', "small.jsonl:7: cannot be read: its text is NoneType"),
  (b'{"id": "x", "text": "\xff"}\n', "small.jsonl:7: cannot be read: 'utf-8'"),
  (b"[" * 100_000 + b"\n", "small.jsonl:7: cannot be read"),
]


@quick
@pytest.mark.parametrize("line, said", BROKEN)
def test_a_broken_line_is_named(path, line, said):
  with path.open("ab") as file:
    file.write(line)
  with pytest.raises(ValueError) as caught:
    bm25.Bm25(path)
  assert said in str(caught.value)
  assert [p.name for p in path.parent.iterdir()] == ["small.jsonl"]


@quick
def test_no_corpus(tmp_path):
  with pytest.raises(ValueError, match=r"no such file"):
    bm25.Bm25(tmp_path / "none")
  with pytest.raises(ValueError, match=r"holds no \.jsonl file"):
    bm25.Bm25(tmp_path)
  (tmp_path / "b.json").write_text("[]")
  with pytest.raises(ValueError, match=r"b\.json: is no \.jsonl file"):
    bm25.Bm25(tmp_path / "b.json")
  (tmp_path / "a.jsonl").write_text("\n")
  with pytest.raises(ValueError, match=r"a\.jsonl: there is no passage"):
    bm25.Bm25(tmp_path)
  (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "!"}')
  with pytest.raises(
    ValueError, match=r"no passage of the corpus holds a word"
  ):
    bm25.Bm25(tmp_path / "a.jsonl")


@quick
def test_a_missing_or_stale_index(path):
  with pytest.raises(ValueError, match=r"there is no index; make it with"):
    bm25.Bm25(path, build="never")
  bm25.Bm25(path)
  os.utime(path, (1, 1))  # touched, and the same
  assert len(bm25.Bm25(path, build="never")) == 6
  rows = [ROWS[0] | {"text": ROWS[0]["text"].upper()}, *ROWS[1:]]
  write(path, rows)  # as long as before
  with pytest.raises(ValueError, match=r"small\.jsonl has changed"):
    bm25.Bm25(path, build="never")
  found = bm25.Bm25(path)
  assert found.search(["oslo"], 1)[0][0].text == rows[0]["text"]
  write(path, rows[1:])
  assert len(bm25.Bm25(path)) == 5
  assert sorted(p.name for p in path.parent.iterdir()) == [
    *("small.jsonl", "small.jsonl.bm25"),
  ]


@quick
def test_a_damaged_index(path):
  bm25.Bm25(path)
  folder = path.with_name("small.jsonl.bm25")
  (folder / "data.npy").write_bytes((folder / "data.npy").read_bytes()[:-9])
  with pytest.raises(ValueError, match=r"data\.npy: cannot be read: .* delete"):
    bm25.Bm25(path)
  (folder / "index.json").write_text("{")
  with pytest.raises(ValueError, match=r"its index\.json cannot be read"):
    bm25.Bm25(path, build="never")
  assert len(bm25.Bm25(path)) == 6


@quick
def test_a_folder_of_something_else_is_kept(path, tmp_path):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").write_text("x")
  with pytest.raises(ValueError, match="is no index, and not empty"):
    bm25.Bm25(path, tmp_path / "mine")
  assert (tmp_path / "mine" / "thesis.tex").exists()
  (tmp_path / "file").write_text("x")
  for place in ("file", "file/below"):
    with pytest.raises(ValueError, match="name another folder"):
      bm25.Bm25(path, tmp_path / place)


def test_a_killed_build_leaves_no_index(path, root):
  """It is made by whoever comes next; what was half made is not taken."""
  code = (
    "import sys, time; from drmas_jax.retrieval import bm25, corpus\n"
    "def fill(found, folder):\n"
    "  (folder / 'half').write_text('x'); print('!', flush=True)\n"
    "  time.sleep(60)\n"
    "bm25._fill = fill; bm25.Bm25(sys.argv[1])"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code, path],
    env=os.environ | {"PYTHONPATH": str(root)},
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  ) as process:
    assert process.stdout.readline() == b"!\n"
    made = []
    waits = threading.Thread(target=lambda: made.append(bm25.Bm25(path)))
    waits.start()
    waits.join(timeout=0.3)
    assert waits.is_alive()  # one at a time
    process.send_signal(signal.SIGKILL)
  waits.join(timeout=30)
  assert ids(made[0].search(["oslo"], 1)) == [["a"]]
  assert not path.with_name("small.jsonl.bm25.part").exists()


@quick
def test_a_build_goes_on_where_it_was(path, tmp_path):
  """What is there of the same index is kept, of another one it is not."""
  seen = []

  def fill(found, folder):
    seen.append((folder / "half").exists())
    (folder / "half").write_text("")
    if len(seen) < 4:
      raise KeyboardInterrupt

  for settings in (1, 1, 2, 2):
    where = corpus.place(path, tmp_path / "i", "", {"n": settings})
    try:
      corpus.ready(where, "auto", fill)
    except KeyboardInterrupt:
      assert not (tmp_path / "i").exists()
  assert seen == [False, True, False, True]
  assert (tmp_path / "i" / "half").exists()


# -- many queries, one search --------------------------------------------------


class Fake:
  """Finds the query; counts its searches."""

  def __init__(self, seconds=0.0):
    self.seconds, self.asked = seconds, []

  def __len__(self):
    return 1

  def search(self, queries, k):
    self.asked.append(list(queries))
    time.sleep(self.seconds)
    if "bad" in queries:
      raise MemoryError("too bad")
    return [[Passage(q, "", q, float(i)) for i in range(k)] for q in queries]


@quick
def test_a_batcher_searches_once_for_all():
  """R02: 64 requests at once, and each gets its own."""
  fake = Fake(0.05)
  batcher = retriever.Batcher(fake, wait_s=0.05)
  began = time.monotonic()
  futures = [batcher.submit([f"q{i % 40}"], 1 + i % 3) for i in range(64)]
  for i, future in enumerate(futures):
    (hits,) = future.result(timeout=10)
    assert [p.id for p in hits] == [f"q{i % 40}"] * (1 + i % 3)
  assert time.monotonic() - began < 1.6  # half of one after the other
  assert sum(map(len, fake.asked)) <= 64 and len(fake.asked) < 4
  assert batcher.submit(["", " "], 2).result(timeout=10) == [[], []]
  batcher.close()
  assert batcher.num_open == 0


@quick
def test_what_fails_costs_its_asker():
  """R05: one of 32."""
  import asyncio

  batcher = retriever.Batcher(Fake(), wait_s=0.05)

  async def play():
    return await asyncio.gather(
      *(batcher.retrieve("bad" if i == 7 else f"q{i}", 1) for i in range(32)),
      return_exceptions=True,
    )

  found = asyncio.run(play())
  assert isinstance(found.pop(7), retriever.RetrievalFault)
  assert [hits[0].id for hits in found] == [
    f"q{i}" for i in range(32) if i != 7
  ]
  batcher.close()


# -- the exact search ----------------------------------------------------------


@pytest.mark.parametrize(
  "stream, dtype", [(False, "float32"), (True, "float16")]
)
def test_the_nearest_are_those_of_numpy(mesh, stream, dtype):
  """Numbers are whole, so products are exact, and many are equal."""
  rng = np.random.default_rng(0)
  vectors = rng.integers(-4, 5, (203, 8)).astype(dtype)
  parts = [vectors[:100], vectors[100:101], vectors[101:]]
  found = topk.Vectors(parts, mesh, chunk_rows=61, stream=stream)
  assert len(found) == 203 and found._rows == 64
  queries = rng.integers(-4, 5, (70, 8)).astype(np.float32)
  exact = queries @ vectors.astype(np.float32).T
  for k in (5, 203, 500):
    scores, places = found.search(queries, k)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, order, 1))


# -- the encoder ---------------------------------------------------------------


def one_device():
  return Mesh(np.asarray(jax.devices()[:1]), ("rows",))


@pytest.mark.parametrize("pooling", make_vectors.POOLINGS)
def test_vectors_are_those_of_transformers(tmp_path, mesh, pooling):
  make_vectors.write(tmp_path, pooling)
  wanted = np.load(make_vectors.PATH)[pooling]
  for place in (one_device(), mesh):
    found = encoder.Encoder(tmp_path, place, ("", ""))
    vectors = found.encode(make_vectors.TEXTS, "query")
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)


def test_vectors_today(tmp_path):
  """Where torch is: what is committed is still what transformers computes."""
  pytest.importorskip("torch", reason="the extra [parity] brings torch")
  make_vectors.write(tmp_path)
  known = np.load(make_vectors.PATH)
  for pooling, vectors in make_vectors.compute(tmp_path).items():
    np.testing.assert_allclose(vectors, known[pooling], atol=1e-5)


def test_what_the_folder_says(tmp_path):
  make_vectors.write(tmp_path / "st")
  found = encoder.read_settings(tmp_path / "st")
  assert found.prefixes == {"query": "who ", "passage": "the "}
  assert (found.max_tokens, found.pooling) == (make_vectors.MAX_TOKENS, "mean")
  make_vectors.write(tmp_path / "plain", None)
  plain = encoder.read_settings(tmp_path / "plain")
  assert plain == encoder.Settings(
    {"query": "", "passage": ""}, 48, "mean", True
  )
  own = encoder.Encoder(tmp_path / "st", one_device())
  other = encoder.Encoder(tmp_path / "st", one_device(), ("", "of "))
  same = own.encode(["book"], "query"), other.encode(["who book"], "query")
  np.testing.assert_array_equal(*same)
  assert own.described() != other.described()
  assert own.encode(["\ud800 ok", "ok"], "query").shape == (2, 24)


@quick
@pytest.mark.parametrize(
  "change, said",
  [
    (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    (lambda f: (f / "model.safetensors").unlink(), "safetensors: no such file"),
    (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    (
      lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
      "model.safetensors: cannot be read",
    ),
    (
      lambda f: make_vectors.write(f, "max_tokens"),
      "pooling_mode_max_tokens.* is not offered",
    ),
    (
      lambda f: make_vectors.write(f, model_type="mpnet"),
      "model_type 'mpnet' is not offered; allowed is 'bert'",
    ),
    (
      lambda f: make_vectors.write(f, num_hidden_layers=9),
      r"encoder\.layer\.3\..* is missing",
    ),
  ],
)
def test_what_is_no_encoder(tmp_path, change, said):
  make_vectors.write(tmp_path)
  change(tmp_path)
  with pytest.raises(ValueError, match=said):
    encoder.Encoder(tmp_path, one_device())


def test_dense(path, tmp_path, mesh, monkeypatch):
  """Vectors are made once; a build goes on behind the files that it wrote."""
  import asyncio

  from drmas_jax.retrieval import dense

  make_vectors.write(tmp_path / "bert")
  monkeypatch.setattr(dense, "_FILE_ROWS", 4)
  whole = encoder.Encoder.encode
  calls = []

  def breaks(self, texts, kind, *tell):
    calls.append(len(texts))
    if len(calls) == 2:
      raise KeyboardInterrupt
    return whole(self, texts, kind, *tell)

  monkeypatch.setattr(encoder.Encoder, "encode", breaks)
  with pytest.raises(KeyboardInterrupt):
    dense.Dense(path, tmp_path / "bert", mesh)
  found = dense.Dense(path, tmp_path / "bert", mesh)
  assert calls == [4, 2, 2] and len(found) == 6
  dense.Dense(path, tmp_path / "bert", mesh, build="never", stream=True)
  assert len(calls) == 3
  with pytest.raises(ValueError, match="made with other settings"):
    dense.Dense(
      path, tmp_path / "bert", mesh, build="never", prefixes=("", "x ")
    )
  with pytest.raises(ValueError, match="allowed are float16 and float32"):
    dense.Dense(path, tmp_path / "bert", mesh, dtype="int8")
  texts = [found._corpus.passage(i).contents for i in range(6)]
  vectors = whole(found._encoder, texts, "passage").astype(np.float16)
  query = whole(found._encoder, ["oslo"], "query")
  scores = query @ vectors.astype(np.float32).T
  order = np.argsort(-scores[0], kind="stable")[:3]
  source = dense.make(corpus=str(path), encoder=str(tmp_path / "bert"))
  hits = asyncio.run(source.retrieve("oslo", 3))
  source.close()
  assert [[p.id for p in hits]] == ids(found.search(["oslo"], 3))
  assert [p.id for p in hits] == [ROWS[i]["id"] for i in order]
  np.testing.assert_allclose(
    [p.score for p in hits], scores[0][order], rtol=1e-3
  )


# -- the data beside the project -----------------------------------------------


def test_any_gold_among_five(shared, tmp_path):
  """The 100 questions of HotpotQA-mini, among 994 passages."""
  source = shared / "data" / "corpus" / "hotpotqa_mini.jsonl"
  found = bm25.Bm25(source, tmp_path / "index")
  began = time.process_time()
  found = bm25.Bm25(source, tmp_path / "index", "never")
  assert time.process_time() - began < 2
  lines = (shared / "data" / "qa" / "hotpotqa_mini.jsonl").read_text()
  rows = [json.loads(line) for line in lines.splitlines()]
  hits = ids(found.search([row["question"] for row in rows], 5))
  golds = [set(row["gold_ids"]) for row in rows]
  share = np.mean([bool(g & set(h)) for g, h in zip(golds, hits, strict=True)])
  assert share >= 0.95
