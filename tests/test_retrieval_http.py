"""Passages over HTTP: a real server on a real port, and the client."""

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import faulty_retrieval
import pytest

from drmas_jax import door as door_lib
from drmas_jax.door import ApiError
from drmas_jax.retrieval import client, retriever, serve, wire
from drmas_jax.retrieval.retriever import Passage, RetrievalFault

quick = pytest.mark.quick


class Echo:
  """Finds a passage whose text is the query, and so tells whose it is."""

  def __init__(self, seconds=0.0):
    self.seconds, self.asked = seconds, []

  def __len__(self):
    return 3

  def search(self, queries, k):
    self.asked.append(list(queries))
    time.sleep(self.seconds)
    return [
      []
      if q == "nothing"
      else [Passage(f"{i}", "Title", q, 1.0 - i) for i in range(min(k, 3))]
      for q in queries
    ]


@contextlib.contextmanager
def opened(found=None, faults=None, **options):
  faults = faults or faulty_retrieval.Faults()
  door = faulty_retrieval.open_door(found or Echo(), faults, **options)
  try:
    yield door
  finally:
    door.close(5.0)


@pytest.fixture(scope="module")
def door():
  with opened() as door:
    yield door


@pytest.fixture
def patient(monkeypatch):
  """No request goes out once more because the machine is busy."""
  monkeypatch.setattr(client, "_PATIENCE_S", (10.0, 10.0))


def ask_all(url, queries, k=2, **options):
  """Answers, or faults, of queries at once; and the client."""

  async def run():
    one = client.Client(f"{url}/retrieve", **options)
    try:
      return await asyncio.gather(
        *(one.retrieve(q, k) for q in queries), return_exceptions=True
      ), one
    finally:
      await one.close()

  return asyncio.run(run())


def texts(found):
  return [[p.text for p in hits] for hits in found]


# -- the formats ---------------------------------------------------------------


@quick
def test_both_formats_there_and_back():
  for form in wire.FORMATS:
    body = wire.write_ask(["q"], 5, form)
    assert wire.read_ask(body) == (["q"], 5, True)
  assert json.loads(wire.write_ask(["q"], 5, "drmas"))["query"] == "q"
  assert wire.read_ask(b'{"queries": []}') == ([], 3, False)
  assert wire.read_ask(b'{"query": "x", "topk": null}') == (["x"], 3, False)
  found = [[Passage("1", "A", "b", 2.0)], [], [Passage("", "", "c", -1.0)]]
  for scores in (True, False):
    body = json.dumps(wire.write_answer(found, scores)).encode()
    again = wire.read_answer(body, 3, 5)
    if not scores:
      again = [
        [p._replace(score=f.score) for p, f in zip(*both, strict=True)]
        for both in zip(again, found, strict=True)
      ]
    assert again == found


@quick
def test_what_the_reference_server_answers():
  body = b"""{"result": [[
    {"document": {"id": "5", "contents": "\\"Oslo\\"\\n City"}, "score": 0.5},
    {"document": {"contents": "Bergen\\nAnother."}, "score": 1}]]}"""
  assert wire.read_answer(body, 1, 3) == [
    [
      Passage("5", "Oslo", " City", 0.5),
      Passage("", "Bergen", "Another.", 1),
    ]
  ]


EMPTY = ['{"result": [[]]}', '{"result": []}']
MALFORMED = [
  '{"result": null}',
  '{"error": "x"}',
  "<html>502</html>",
  '{"result": [[{"id": "1"}]]}',
  '{"result": [[], []]}',
  '{"result": {"0": []}}',
  '{"result": [null]}',
  '{"result": [["text"]]}',
  '{"result": [[{"document": null, "score": 1}]]}',
  '{"result": [[{"document": {"contents": 3}, "score": 1}]]}',
  '{"result": [[{"document": {"contents": "a"}, "score": "high"}]]}',
  '{"result": [[{"document": {"contents": "a"}, "score": 1'
  + "0" * 999
  + "}]]}",
  "[]",
  "",
  "[" * 100_000,
  b'{"result": [[{"contents": "\xff"}]]}',
]


@quick
@pytest.mark.parametrize("body", EMPTY)
def test_no_hits(body):
  """R06: a clear empty result."""
  assert wire.read_answer(body.encode(), 1, 3) == [[]]


@quick
@pytest.mark.parametrize("body", MALFORMED)
def test_a_shape_that_differs_is_a_typed_failure(body):
  """R06: never a KeyError."""
  body = body if isinstance(body, bytes) else body.encode()
  with pytest.raises(RetrievalFault, match="is not understood") as caught:
    wire.read_answer(body, 1, 3)
  assert not caught.value.wall_clock and len(str(caught.value)) < 400


@quick
def test_results_are_never_those_of_another_query():
  """R06: of three queries, one without a hit; and one result too few."""
  hits = [{"contents": "a"}]
  body = json.dumps({"result": [hits, [], hits]}).encode()
  assert texts(wire.read_answer(body, 3, 3)) == [["a"], [], ["a"]]
  for num in (2, 4):
    with pytest.raises(RetrievalFault, match=f"3 results for {num} queries"):
      wire.read_answer(body, num, 3)
  with pytest.raises(RetrievalFault, match="0 results for 3 queries"):
    wire.read_answer(b'{"result": []}', 3, 3)


WRONG = [
  (b"{", "invalid_json"),
  (b"\xff", "invalid_json"),
  (b'{"query": "\xff"}', "invalid_json"),
  (b"[" * 100_000, "invalid_json"),
  (b"[]", "invalid_json"),
  (b"{}", "missing"),
  (b'{"topk": 3}', "missing"),
  (b'{"query": "a", "queries": ["a"]}', "missing"),
  (b'{"query": ["a"]}', "invalid_value"),
  (b'{"queries": "a"}', "invalid_value"),
  (b'{"queries": ["a", null]}', "invalid_value"),
  (b'{"query": "a", "topk": 0}', "invalid_value"),
  (b'{"query": "a", "topk": 1001}', "invalid_value"),
  (b'{"query": "a", "topk": true}', "invalid_value"),
  (b'{"query": "a", "topk": "3"}', "invalid_value"),
  (b'{"query": "a", "return_scores": 1}', "invalid_value"),
  (b'{"query": "a", "k": 1}', "unknown_key"),
  (json.dumps({"queries": ["a"] * 1025}).encode(), "invalid_value"),
]


@quick
@pytest.mark.parametrize("body, code", WRONG)
def test_what_a_request_may_not_say(body, code):
  with pytest.raises(ApiError) as caught:
    wire.read_ask(body)
  assert (caught.value.status, caught.value.code) == (400, code)


# -- the server ----------------------------------------------------------------


def post(door, body, path="/retrieve", headers=()):
  """Status and JSON of a plain request."""
  connection = http.client.HTTPConnection(*door.server_address[:2], timeout=30)
  with contextlib.closing(connection):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, body, dict(headers))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@quick
def test_a_server_speaks_both(door):
  status, said = post(door, {"query": "a", "topk": 1, "return_scores": True})
  document = {"id": "0", "contents": '"Title"\na'}
  assert status == 200
  assert said == {"result": [[{"document": document, "score": 1.0}]]}
  status, said = post(door, {"queries": ["a", "", "nothing"], "topk": 1})
  assert said == {"result": [[document], [], []]}
  assert post(door, {"queries": []}) == (200, {"result": []})


@quick
def test_what_a_server_refuses(door):
  status, said = post(door, b"{")
  assert (status, said["error"]["code"]) == (400, "invalid_json")
  status, said = post(door, b"\xff\xfe")
  assert (status, said["error"]["code"]) == (400, "invalid_json")
  status, said = post(door, {"query": "a"}, "/search")
  assert status == 404 and "allowed are POST /retrieve" in str(said)
  status, said = post(door, b"", headers={"Content-Length": str(1 << 40)})
  assert (status, said["error"]["code"]) == (413, "request_too_large")
  connection = http.client.HTTPConnection(*door.server_address[:2], timeout=30)
  with contextlib.closing(connection):
    for path, status in (("/health", 200), ("/retrieve", 404)):
      connection.request("GET", path)
      answer = connection.getresponse()
      said = json.loads(answer.read())
      assert answer.status == status
      if status == 200:
        assert said == {
          **{"status": "ok", "kind": "bm25"},
          **{"passages": 3, "open": 0},
        }


@quick
def test_a_long_query_is_cut(door):
  """R11: 100 kB, in any script."""
  for letter in ("q", "😀", "中", "א"):
    query = letter * 100_000
    _, said = post(door, {"query": query, "topk": 1})
    assert said["result"][0][0]["contents"] == (
      f'"Title"\n{query[: retriever.MAX_QUERY]}'
    )
    found, _ = ask_all(door.url, [query])
    assert texts(found)[0][0] == query[: retriever.MAX_QUERY]


@quick
def test_too_much_and_too_late():
  with opened(Echo(0.5), max_open=2, timeout_s=0.1) as door:
    status, said = post(door, {"queries": ["a", "b", "c"]})
    assert (status, said["error"]["code"]) == (429, "queue_full")
    status, said = post(door, {"query": "a"})
    assert (status, said["error"]["code"]) == (503, "timeout")


@quick
def test_a_thread_that_cannot_be_started_keeps_no_place(monkeypatch, capfd):
  """Where a container may have no more of them, for a while."""

  class Later(door_lib.Door):
    lost = 3

    def process_request(self, *args):
      with monkeypatch.context() as m:
        if self.lost:
          m.setattr(threading.Thread, "start", refuse)
        self.lost = max(0, self.lost - 1)
        super().process_request(*args)

  def refuse(thread):
    raise RuntimeError("can't start new thread")

  class Handler(door_lib.Handler):
    def do_GET(self):
      self.send_response(204)
      self.end_headers()

  made = Later("127.0.0.1", 0, Handler)
  made.start(num_connections=2)
  statuses = []
  try:
    for _ in range(6):
      where = http.client.HTTPConnection(*made.server_address, timeout=5)
      try:
        where.request("GET", "/")
        statuses.append(where.getresponse().status)
      except (http.client.HTTPException, OSError):
        statuses.append(None)
      finally:
        where.close()
  finally:
    made.close(5.0)
  assert statuses[:3] == [None] * 3 and set(statuses[3:]) <= {204, 503}
  assert 204 in statuses[3:]
  assert "can't start new thread" in capfd.readouterr().err


@quick
def test_a_search_that_fails_is_told(capfd):
  broken = types.SimpleNamespace(search=lambda queries, k: 1 / 0)
  with opened(broken) as door:
    status, said = post(door, {"query": "a"})
    assert (status, said["error"]["code"]) == (500, "internal")
  assert "ZeroDivisionError" in capfd.readouterr().err


@quick
def test_requests_at_once_are_one_search():
  """R02: a slow search, and 64 requests; each gets its own."""
  echo = Echo(0.1)
  with opened(echo, wait_s=0.05) as door:
    queries = [f"q{i}" for i in range(64)]
    began = time.monotonic()
    found, _ = ask_all(door.url, queries, form="drmas", connections=64)
    assert time.monotonic() - began < 3.2  # half of one after the other
  assert texts(found) == [[q, q] for q in queries]
  assert sum(map(len, echo.asked)) >= 64 and len(echo.asked) < 16


# -- the client ----------------------------------------------------------------


@quick
def test_queries_share_requests(door):
  """Of one number of passages each, and every one gets its own."""
  queries = [f"q{i % 30}" for i in range(60)]

  async def run():
    one = client.Client(f"{door.url}/retrieve", batch=8, wait_s=0.05)
    found = await asyncio.gather(
      *(one.retrieve(q, 1 + i % 2) for i, q in enumerate(queries))
    )
    await one.close()
    return found, one

  found, one = asyncio.run(run())
  assert texts(found) == [[q] * (1 + i % 2) for i, q in enumerate(queries)]
  # 8 requests, and those that go out once more on a busy machine.
  assert 8 <= one.num_tries < 30


@quick
def test_answers_are_kept(door, patient):
  async def run():
    one = client.Client(f"{door.url}/retrieve", cached=2)
    tries = []
    for query, k in (
      *(("a", 1), ("b", 1), ("a", 1), ("c", 1), ("a", 1), ("b", 1), ("a", 2)),
      *((" \n", 3), (" a ", 2)),
    ):
      await one.retrieve(query, k)
      tries.append(one.num_tries)
    await one.close()
    return tries

  one = [1, 2, 2, 3, 3, 4, 5, 5, 5]  # c puts b out, which was asked for last
  assert asyncio.run(run()) == one


@quick
@pytest.mark.parametrize("form", wire.FORMATS)
def test_faults_on_the_way_are_nobodys_wrong_answer(form):
  """Half of the replies are delayed, fail or are cut: all come in the end."""
  faults = faulty_retrieval.Faults(0.1, 0.2, 0.2, seed=4)
  queries = [f"q{i}" for i in range(48)]
  with opened(faults=faults) as door:
    began = time.monotonic()
    found, one = ask_all(
      door.url, queries, form=form, batch=4, connections=6, budget_s=60
    )
    assert time.monotonic() - began < 20
    assert texts(found) == [[q, q] for q in queries]
    assert one.num_failed_tries > 0 and min(faults.counts.values()) > 0


@quick
def test_a_reply_that_is_late_is_not_waited_for():
  """What is usual is learned; a request out of it goes out once more."""
  faults = faulty_retrieval.Faults()
  coming = []
  faults.draw = lambda: coming.pop() if coming else "whole"

  async def run(url):
    one = client.Client(f"{url}/retrieve")
    for i in range(12):
      await one.retrieve(f"q{i}", 1)
    coming.append("delayed")
    began = time.monotonic()
    found = await one.retrieve("late", 1)
    assert time.monotonic() - began < 1.5  # it would be 2
    await one.close()
    return found

  with opened(faults=faults) as door:
    assert asyncio.run(run(door.url))[0].text == "late"
  assert not coming


@quick
def test_many_at_a_server_that_takes_few():
  """R01: 200 at once, 50 ms a search, a queue of 20."""
  with opened(Echo(0.05), max_open=20) as door:
    queries = [f"q{i}" for i in range(200)]
    found, one = ask_all(
      door.url, queries, batch=4, connections=64, budget_s=60
    )
  assert texts(found) == [[q, q] for q in queries]
  assert one.num_failed_tries > 0


class Stub(http.server.BaseHTTPRequestHandler):
  """Answers with `server.answers`, in turn: (status, headers, body)."""

  protocol_version = "HTTP/1.1"

  def do_POST(self):
    self.rfile.read(int(self.headers["Content-Length"]))
    status, headers, body = self.server.answers.pop(0)
    self.send_response(status)
    for key, value in headers.items():
      self.send_header(key, value)
    self.end_headers()
    self.wfile.write(body)
    if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
      self.close_connection = True

  def log_message(self, *args):
    pass


@contextlib.contextmanager
def stub(*answers):
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
    server.answers = list(answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


GOOD = b'{"result": [[{"contents": "a"}]]}'
SIZED = {"Content-Length": str(len(GOOD))}
CHUNKS = b"5;x=1\r\n" + GOOD[:5] + b"\r\n%x\r\n" % (len(GOOD) - 5)
CHUNKS += GOOD[5:] + b"\r\n0\r\nTrailer: x\r\n\r\n"


@quick
def test_every_way_to_end_a_body(patient):
  chunked = {"Transfer-Encoding": "chunked"}
  with stub((200, chunked, CHUNKS), (200, SIZED, GOOD), (200, {}, GOOD)) as (
    server,
    url,
  ):

    async def run():
      one = client.Client(f"{url}/x?y=1")
      found = [await one.retrieve(q, 1) for q in ("a", "b", "c")]
      await one.close()
      return texts(found)

    assert asyncio.run(run()) == [["a"], ["a"], ["a"]]
    assert not server.answers


@quick
def test_what_may_pass_is_tried_again_and_all_else_is_not():
  none = {"Content-Length": "0"}
  late = none | {"Retry-After": "1"}
  with stub((503, late, b""), (429, none, b""), (200, SIZED, GOOD)) as (_, url):
    began = time.monotonic()
    found, one = ask_all(url, ["a"])
    assert texts(found) == [["a"]] and one.num_tries == 3
    assert time.monotonic() - began >= 1
  for answer, said in (
    ((404, none, b""), "status 404"),
    ((200, none, b""), "not understood"),
    ((200, {"Content-Length": "99999999999"}, b""), "99999999999 bytes"),
  ):
    with stub(answer) as (_, url):
      (fault,), one = ask_all(url, ["a"])
      assert isinstance(fault, RetrievalFault) and said in str(fault)
      assert one.num_tries == 1 and not fault.wall_clock


@contextlib.contextmanager
def listening(answer=None):
  """A port that takes connections, and says nothing or `answer`."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(0.05)
    over, taken = threading.Event(), []

    def run():
      while not over.is_set():
        with contextlib.suppress(TimeoutError):
          taken.append(server.accept()[0])
          if answer is not None:
            taken[-1].sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    over.set()
    thread.join()
    for one in taken:
      one.close()


@quick
def test_a_server_that_never_answers():
  """Within the budget, and it says that a clock decided."""
  with listening() as url:
    began = time.monotonic()
    faults, one = ask_all(url, ["a", "b"], budget_s=0.3)
    assert time.monotonic() - began < 2
  for fault in faults:
    assert isinstance(fault, RetrievalFault) and fault.wall_clock
    assert "no passages within 0.3 s" in str(fault)
  assert one.num_tries == 1 and not one._tasks


@quick
def test_no_server_and_no_http():
  with listening() as url:
    pass
  (fault,), one = ask_all(url, ["a"], budget_s=0.4)
  assert "ConnectionRefusedError" in str(fault) and fault.wall_clock
  assert 2 <= one.num_tries < 10
  with listening(b"SSH-2.0-x\r\n\r\n") as url:
    (fault,), _ = ask_all(url, ["a"], budget_s=5)
  assert "no HTTP: it begins 'SSH-2.0-x'" in str(fault)
  assert not fault.wall_clock


@quick
def test_several_servers_take_turns(door):
  with listening() as dead:
    pass

  async def run():
    one = client.make(url=[f"{dead}/retrieve", f"{door.url}/retrieve"])
    found = [await one.retrieve(f"q{i}", 1) for i in range(4)]
    await one.close()
    return texts(found)

  assert asyncio.run(run()) == [["q0"], ["q1"], ["q2"], ["q3"]]


@quick
def test_who_stops_waiting_costs_nobody():
  """A query that is given up leaves its batch; the others go on."""

  async def run(url):
    one = client.Client(f"{url}/retrieve", wait_s=0.02)
    asked = [asyncio.create_task(one.retrieve(f"q{i}", 1)) for i in range(3)]
    await asyncio.sleep(0.001)
    asked[1].cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    await one.close()
    return found

  echo = Echo()
  with opened(echo) as door:
    first, given_up, last = asyncio.run(run(door.url))
  assert isinstance(given_up, asyncio.CancelledError)
  assert texts([first, last]) == [["q0"], ["q2"]]
  assert echo.asked == [["q0", "q2"]]


@quick
@pytest.mark.parametrize(
  "options, said",
  [
    ({"url": "localhost:8000"}, "url='localhost:8000': write http://"),
    ({"url": []}, "names no server"),
    ({"form": "grpc"}, "form='grpc': allowed are search_r1, drmas"),
    ({"budget_s": 0}, "budget_s=0: allowed are"),
    ({"batch": 5000}, "batch=5000"),
  ],
)
def test_wrong_options(options, said):
  with pytest.raises(ValueError, match=said):
    client.Client(**{"url": "http://x"} | options)


# -- the command ---------------------------------------------------------------


@quick
@pytest.mark.parametrize(
  "flags, said",
  [
    ("--corpus=none", "none: no such file or folder"),
    ("--corpus={corpus} --build=never", "there is no index; make it with"),
    ("--corpus={corpus} --kind=dense", "--kind=dense: needs --encoder"),
    ("--corpus={corpus} --stream", "--stream: has no effect"),
    ("--corpus={corpus} --port={used}", "Address already in use; name another"),
    ("--corpus={corpus} --port=70000", "--port=70000: allowed are"),
    ("--corpus={corpus} --max_batch=0", "--max_batch=0: write a value > 0"),
  ],
)
def test_wrong_flags(flags, said, tmp_path, capsys, door):
  path = tmp_path / "c.jsonl"
  path.write_text('{"id": "1", "text": "a word"}\n')
  flags = flags.format(corpus=path, used=door.server_port)
  if "--port" not in flags:
    flags += " --port=0"
  assert serve.main(flags.split()) == 2
  assert said in capsys.readouterr().err


def test_a_corpus_is_served_until_sigterm(root, tmp_path):
  """And the index made, without jax, which bm25s would load and start."""
  path = tmp_path / "c.jsonl"
  path.write_text('{"id": "1", "contents": "\\"A\\"\\na word"}\n')
  command = [sys.executable, "-X", "importtime", "-m"]
  command += ["drmas_jax.retrieval.serve", f"--corpus={path}", "--port=0"]
  with subprocess.Popen(
    command,
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      line = process.stdout.readline()
      assert "serves 1 passages by bm25" in line
      url = line.split()[-1].removesuffix("/retrieve")
      found, _ = ask_all(url, ["word", "other"])
      assert [[p.id for p in hits] for hits in found] == [["1"], []]
      process.send_signal(signal.SIGTERM)
      assert process.wait(timeout=30) == 0
      loaded = process.stderr.read()
    finally:
      process.kill()
  names = {x.rpartition("|")[2].strip() for x in loaded.splitlines()}
  assert "bm25s" in names and not names & {"jax", "transformers", "torch"}
