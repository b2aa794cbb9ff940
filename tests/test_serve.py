"""The server by its own client: the openai package, on a real port."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types as pytypes

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import xla_flags

from drmas_jax import config as config_lib
from drmas_jax import serve
from drmas_jax.serving import answers, api
from drmas_jax.types import Task

openai = pytest.importorskip("openai")

SLOTS = 8
ASK = [{"role": "user", "content": "solve: 3+1+4+1+5 % 10"}]
QUESTION = "2+7+1+8+2 % 10"


# -- what goes over the wire ---------------------------------------------------


def parse(**raw):
  return api.parse(
    json.dumps({"model": "m", "messages": ASK} | raw).encode(), ("m", "team")
  )


@pytest.mark.quick
def test_what_a_request_may_say():
  ask = parse(
    messages=[
      {"role": "developer", "content": "Be brief.", "type": "text"},
      {
        "role": "user",
        "name": "me",
        "content": [{"type": "text", "text": "one"}] * 2,
      },
    ],
    max_completion_tokens=7,
    temperature=0,
    top_k=3,
    stop="\n",
    n=2,
    user="me",
    tools=None,
    presence_penalty=0,
  )
  assert ask.messages[0] == {"role": "system", "content": "Be brief."}
  assert ask.question == "oneone" and ask.stop == ("\n",) and ask.n == 2
  assert ask.sampling == config_lib.Sampling(0.0, 3, 1.0)
  assert ask.max_tokens == 7 and ask.seed is None
  assert parse().sampling is None and parse().max_tokens is None
  sent_back = {"role": "assistant", "content": "1", "annotations": []}
  messages = [*ASK, sent_back | {"refusal": None}, *ASK]
  assert len(parse(messages=messages).messages) == 3
  assert parse(model="team", stop=[], min_tokens=0).stop == ()


WRONG = [
  ({"model": "other"}, 404, "model"),
  ({"model": None}, 400, "model"),
  ({"messages": []}, 400, "messages"),
  ({"messages": "hello"}, 400, "messages"),
  ({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role"),
  ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
  ({"messages": [*ASK, "x"]}, 400, "messages[1]"),
  ({"messages": [ASK[0] | {"name": 5}]}, 400, "messages[0].name"),
  ({"messages": [ASK[0] | {"type": "image"}]}, 400, "messages[0].type"),
  (
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    400,
    "messages[0].content",
  ),
  ({"max_tokens": 0}, 400, "max_tokens"),
  ({"max_tokens": True}, 400, "max_tokens"),
  ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
  ({"temperature": 2.1}, 400, "temperature"),
  ({"temperature": -0.1}, 400, "temperature"),
  ({"temperature": float("nan")}, 400, "temperature"),
  ({"top_p": 0}, 400, "top_p"),
  ({"n": 0}, 400, "n"),
  ({"n": 129}, 400, "n"),
  ({"stop": ["a", ""]}, 400, "stop"),
  ({"seed": 1.5}, 400, "seed"),
  ({"top_logprobs": 2, "logprobs": True}, 400, "top_logprobs"),
  ({"tools": [{}]}, 400, "tools"),
  ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
  ({"best_of": 2}, 400, "best_of"),
  ({"model": "team", "max_tokens": 3}, 400, "max_tokens"),
  ({"model": "team", "logprobs": True}, 400, "logprobs"),
  (
    {"model": "team", "messages": [{"role": "system", "content": "x"}]},
    400,
    "messages",
  ),
]


@pytest.mark.quick
@pytest.mark.parametrize("raw, status, param", WRONG)
def test_what_it_may_not(raw, status, param):
  with pytest.raises(api.ApiError, match=param.partition("[")[0]) as caught:
    parse(**raw)
  assert caught.value.status == status
  assert caught.value.body()["error"]["param"] == param


@pytest.mark.quick
@pytest.mark.parametrize(
  "body", [b"{", b"\xff", b"[]", b"[" * 100_000, b"9" * 9999]
)
def test_what_is_no_json(body):
  with pytest.raises(api.ApiError) as caught:
    api.parse(body, ("m",))
  assert caught.value.status == 400
  assert caught.value.code == "invalid_json"


def decode_bytes(ids):
  return bytes(ids).decode("utf-8", "replace")


@pytest.mark.quick
@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  st.text("ab€😀"), st.lists(st.text("ab€", min_size=1)), st.data()
)
def test_a_stream_shows_whole_characters_up_to_the_stop(text, stops, data):
  """Tokens are bytes here, so characters come in halves."""
  ids = list(text.encode())
  cuts = data.draw(st.lists(st.integers(0, len(ids))))
  edges = sorted({0, len(ids), *cuts})
  shown = api.Text(decode_bytes, stops, tokens=True)
  parts, tokens = [], []
  for begin, end in zip(edges, [*edges[1:], len(ids)], strict=True):
    last = end == len(ids) and begin == edges[-1]
    part, new = shown.add(ids[begin:end], [-1.0] * (end - begin), last)
    assert "\ufffd" not in part
    parts.append(part)
    tokens += new
    # What is shown is never taken back: no stop string may begin in it.
    assert "".join(t.text for t in tokens) == "".join(parts)
  found = api.find_stop(text, stops)
  assert "".join(parts) == (text if found is None else text[: found[0]])
  whole = api.Text(decode_bytes, stops, tokens=True)
  assert whole.add(ids, [-1.0] * len(ids), True) == ("".join(parts), tokens)


# -- the server ----------------------------------------------------------------


@dataclasses.dataclass
class Served:
  """A server in threads of this process, and what it should answer."""

  loop: object
  desk: object
  door: object
  rollout: object
  client: openai.OpenAI
  alone: list  # a group of QUESTION, in process, seed 5

  def leave(self, **options):
    """Asks, and is gone as soon as the solver has begun."""
    body = json.dumps({"messages": ASK, **options})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}"
    end = time.monotonic() + 10
    with socket.create_connection(self.door.server_address[:2]) as client:
      client.sendall(f"{head} \r\n\r\n{body}".encode())  # a blank is allowed
      while not self.loop.load["solver"].in_use:
        time.sleep(0.01)
        assert time.monotonic() < end

  @contextlib.contextmanager
  def slow(self, seconds):
    """Every round takes so long."""
    sampler = self.loop._samplers["solver"]
    harvest = sampler.harvest

    def slowly():
      time.sleep(seconds)
      return harvest()

    sampler.harvest = slowly
    try:
      yield
    finally:
      del sampler.harvest

  def idle(self):
    """Whether nothing is open or in a slot, within a limit."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
      in_use = sum(load.in_use for load in self.loop.load.values())
      if not self.loop.num_open and not in_use and not self.loop._jobs:
        return not any(s.busy for s in self.loop._samplers.values())
      time.sleep(0.02)
    return False

  def chat(self, model="solver", messages=ASK, **options):
    return self.client.chat.completions.create(
      model=model, messages=messages, **options
    )

  def post(self, body, **headers):
    """(status, headers, what it says) of a body as it is."""
    connection = http.client.HTTPConnection(
      *self.door.server_address[:2], timeout=30
    )
    with contextlib.closing(connection):
      connection.request("POST", "/v1/chat/completions", body, headers)
      answer = connection.getresponse()
      return answer.status, answer.headers, json.loads(answer.read())


def small(root):
  sizes = {"num_slots": SLOTS, "prefill_rows": 4, "steps_per_call": 2}
  return config_lib.read(
    root / "configs" / "math_tiny.py",
    [
      f"policies.{name}.engine.{key}={value}"
      for name in ("solver", "verifier")
      for key, value in sizes.items()
    ],
    "serve",
  )


def backbones_on_one_device(config):
  import jax

  from drmas_jax import backbone, placement
  from drmas_jax.models import weights

  folders = {
    n: backbone.checkpoint_folder(p.checkpoint)
    for n, p in config.policies.items()
  }
  models = {n: weights.read_config(f) for n, f in folders.items()}
  plan = placement.plan(config, models, jax.devices()[:1], train=False)
  made = {
    n: backbone.Backbone(
      [n], config, plan.slices[n], models[n], folders[n], train=False
    )
    for n in models
  }
  for one in made.values():
    one.load()
    one.resume()
  return made


@pytest.fixture(scope="module")
def served(root):
  from drmas_jax import rollout as rollout_lib
  from drmas_jax import sampling
  from drmas_jax.serving.door import Door

  config = small(root)
  backbones = backbones_on_one_device(config)
  samplers = {n: b.sampler for n, b in backbones.items()}
  rollout = rollout_lib.Rollout(rollout_lib.Team(config), samplers, config)
  args = pytypes.SimpleNamespace(max_open=512, timeout_s=60.0)
  door = Door("127.0.0.1", 0)
  alone = rollout.collect(
    [Task("s", 0, 5, QUESTION, 0)], 3, sampling.root_key(config.seed, "eval")
  )
  loop = serve.open_door(args, config, backbones, rollout, door)
  stop = threading.Event()
  thread = threading.Thread(target=loop.run, args=(stop.is_set, 5.0))
  thread.start()
  client = openai.OpenAI(
    base_url=f"{door.url}/v1", api_key="any", max_retries=0, timeout=60
  )
  yield Served(loop, door.desk, door, rollout, client, alone[0].episodes)
  stop.set()
  thread.join(timeout=30)
  door.close(5.0)
  rollout.close()
  assert not thread.is_alive()


def streamed(chunks):
  """{choice: (text, tokens, finish reason)} of a stream, and its usage."""
  found, usage = {}, None
  for chunk in chunks:
    usage = chunk.usage or usage
    for choice in chunk.choices:
      text, tokens, _ = found.get(choice.index, ("", [], None))
      text += choice.delta.content or ""
      tokens = tokens + (choice.logprobs.content if choice.logprobs else [])
      found[choice.index] = text, tokens, choice.finish_reason
  return found, usage


def test_whole_and_streamed_are_the_same(served):
  options = dict(seed=3, n=3, logprobs=True, temperature=1.3)
  whole = served.chat(**options)
  assert whole.model == "solver" and whole.object == "chat.completion"
  stream = served.chat(
    **options, stream=True, stream_options={"include_usage": True}
  )
  parts, usage = streamed(stream)
  assert usage == whole.usage
  assert len({c.message.content for c in whole.choices}) > 1
  for choice in whole.choices:
    text, tokens, reason = parts[choice.index]
    assert text == choice.message.content
    assert tokens == choice.logprobs.content
    assert reason == choice.finish_reason
    assert "".join(t.token for t in tokens) == text
    assert all(t.logprob <= 0 and t.top_logprobs == [] for t in tokens)
  assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
  assert usage.prompt_tokens == 18
  assert served.idle()


def test_a_stream_comes_in_parts(served):
  """While the completion is under way, not when it has ended."""
  with served.slow(0.02):
    chunks = list(served.chat(seed=3, stream=True))
  assert len(chunks) >= 3
  assert all(chunk.choices[0].delta.content for chunk in chunks[:-1])
  assert served.idle()


def test_a_seed_decides_whatever_else_runs(served):
  before = served.chat(seed=7, n=2, temperature=1.5)
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    same = [
      pool.submit(served.chat, seed=7, n=2, temperature=1.5) for _ in range(8)
    ]
    others = [
      pool.submit(served.chat, temperature=1.5, n=1 + i % 3) for i in range(20)
    ]
    for future in same:
      assert [c.message for c in future.result().choices] == [
        c.message for c in before.choices
      ]
    texts = {f.result().choices[0].message.content for f in others}
  assert len(texts) > 5  # without a seed each has another
  big = [served.chat(seed=s).choices for s in (2**40, 2**40, -1)]
  assert big[0] == big[1] and big[0] != big[2]
  assert served.idle()


def test_the_text_is_that_of_the_sampler(served):
  """Log-probabilities too: at seed 5 the first turn of the episode is a chat
  with the solver."""
  messages = [{"role": "user", "content": f"solve: {QUESTION}"}]
  answer = served.chat(messages=messages, seed=5, n=3, logprobs=True)
  for choice, episode in zip(answer.choices, served.alone, strict=True):
    turn = episode.turns[0]
    assert choice.message.content == turn.text
    got = [t.logprob for t in choice.logprobs.content]
    np.testing.assert_array_equal(
      np.float32(got), turn.sampler_logprobs[: len(got)]
    )


def test_stop_ends_a_choice_and_is_not_part_of_it(served):
  text = served.chat(seed=3).choices[0].message.content
  stop = text[3:5]
  for stream in (False, True):
    answer = served.chat(
      seed=3, stop=["never", stop], stream=stream, logprobs=True
    )
    if stream:
      shown, tokens, reason = streamed(answer)[0][0]
    else:
      (choice,) = answer.choices
      shown, reason = choice.message.content, choice.finish_reason
      tokens = choice.logprobs.content
    assert shown == text[: text.index(stop)] and reason == "stop"
    assert "".join(t.token for t in tokens).startswith(shown)
  assert served.chat(seed=3, max_tokens=2).choices[0].finish_reason == "length"


def test_the_least_temperature_is_greedy(served):
  """However little it is, as clients write it who want no chance."""
  greedy = served.chat(temperature=0, n=2).choices
  assert greedy[0].message == greedy[1].message
  for least in ({"temperature": 1e-9}, {"temperature": 1e-40}):
    assert served.chat(**least).choices[0].message == greedy[0].message
  assert served.chat(top_p=1e-60).choices[0].message == greedy[0].message


def test_min_tokens_hold_the_end_back(served):
  assert served.chat(seed=3, max_tokens=30).usage.completion_tokens < 20
  answer = served.chat(seed=3, max_tokens=30, extra_body={"min_tokens": 20})
  assert 20 <= answer.usage.completion_tokens <= 30


def test_the_team_is_that_of_a_rollout(served):
  """Turn for turn, whether alone or among others."""

  def team():
    messages = [
      {"role": "user", "content": "hello"},
      {"role": "user", "content": QUESTION},
    ]
    return served.chat("team", messages, seed=5, n=3)

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    answers = [team()]
    futures = [pool.submit(team) for _ in range(4)]
    chats = [pool.submit(served.chat) for _ in range(20)]
    answers += [f.result() for f in futures]
    assert all(f.result().choices for f in chats)
  for answer in answers:
    for choice, episode in zip(answer.choices, served.alone, strict=True):
      assert choice.message.content == episode.action
      assert len(choice.transcript) == len(episode.turns)
      for told, turn in zip(choice.transcript, episode.turns, strict=True):
        assert told["agent"] == turn.agent and told["policy"] == turn.policy
        assert told["prompt_ids"] == turn.prompt_ids.tolist()
        assert told["completion_ids"] == turn.completion_ids.tolist()
        assert told["completion"] == turn.text
        assert told["stop_reason"] == turn.stop_reason
        assert told["valid"] == turn.valid
        assert told["prompt"].startswith("<|user|>")
    assert answer.usage.completion_tokens == sum(
      len(t.completion_ids) for e in served.alone for t in e.turns
    )
  assert served.idle() and not served.loop._episodes.plays


def test_a_remote_policy_may_be_one_that_is_served(served):
  from drmas_jax import remote
  from drmas_jax.config import Remote, Sampling

  async def ask(model):
    there = Remote(f"{served.door.url}/v1", model, cache="", timeout_s=60.0)
    one = remote.Endpoint(there)
    try:
      return await asyncio.gather(
        *(
          one.complete(ASK, max_tokens=6, sampling=Sampling(), seed=i % 4)
          for i in range(8)
        )
      )
    finally:
      one.close()

  said = asyncio.run(ask("solver"))
  texts = [one.text for one in said]
  assert texts[:4] == texts[4:] and len(set(texts)) > 1
  for one in said:
    assert one.fault is None and one.stop_reason in ("stop", "length")
    assert one.call.prompt_tokens > 3 and 0 < one.call.completion_tokens <= 6
  lost = asyncio.run(ask("another"))[0]
  assert "status 404" in lost.fault.message
  assert "allowed are solver, verifier, team" in lost.fault.message


def test_a_team_that_breaks_costs_its_request(served, monkeypatch):
  async def broken(task, call, **options):
    await call("solver", task, ())
    raise KeyError("in user code")

  def at_once(task, call, **options):
    raise KeyError("in user code")

  for run in (broken, at_once):
    orchestra = pytypes.SimpleNamespace(run=run)
    monkeypatch.setattr(served.rollout.team, "orchestra", orchestra)
    with pytest.raises(openai.InternalServerError, match="in user code"):
      served.chat("team", n=2)
  monkeypatch.undo()
  assert served.chat("team").choices[0].transcript
  assert served.idle()


def test_a_team_whose_way_out_breaks(served, monkeypatch, capfd):
  """It is closed because its client has gone."""

  async def raises(task, call, **options):
    try:
      while True:
        await call("solver", task, ())
    finally:
      raise KeyError("on its way out")

  async def goes_on(task, call, **options):
    with contextlib.suppress(BaseException):
      while True:
        await call("solver", task, ())
    await call("solver", task, ())

  for run in (raises, goes_on):
    orchestra = pytypes.SimpleNamespace(run=run)
    monkeypatch.setattr(served.rollout.team, "orchestra", orchestra)
    with served.slow(0.05):
      served.leave(model="team", n=3)
      assert served.idle()
  monkeypatch.undo()
  assert served.chat("team").choices[0].transcript
  said = capfd.readouterr().err
  assert said.count("KeyError: 'on its way out'\n  giving up the ep") == 3
  assert said.count("ignored GeneratorExit\n  giving up the episode") == 3


def test_a_fault_of_ours_in_a_stream_is_an_event(served, monkeypatch, capfd):
  def breaks(self, gone):
    yield {"choices": []}
    raise ZeroDivisionError("ours")

  monkeypatch.setattr(answers.Answer, "chunks", breaks)
  with pytest.raises(openai.APIError, match="see the server's log"):
    list(served.chat(stream=True))
  assert "ZeroDivisionError: ours" in capfd.readouterr().err
  monkeypatch.undo()
  assert served.chat().choices and served.idle()


# -- too much, too long, too late ----------------------------------------------


def test_two_hundred_at_once(served):
  async def ask_all():
    async with openai.AsyncOpenAI(
      base_url=f"{served.door.url}/v1", api_key="any", max_retries=0, timeout=60
    ) as client:
      create = client.chat.completions.create
      return await asyncio.gather(
        *(
          create(model="solver", messages=ASK, seed=i % 50, stop=["}"])
          for i in range(200)
        )
      )

  answers = asyncio.run(ask_all())
  texts = [a.choices[0].message.content for a in answers]
  assert texts[:50] * 4 == texts
  assert served.idle()


@pytest.mark.parametrize(
  "options, param",
  [
    ({"messages": [ASK[0] | {"content": "1" * 99}]}, "messages"),
    ({"max_tokens": 39}, "max_tokens"),
    ({"max_tokens": 5, "extra_body": {"min_tokens": 6}}, "min_tokens"),
    (
      {"model": "team", "messages": [ASK[0] | {"content": "1" * 99}]},
      "messages",
    ),
  ],
)
def test_more_than_the_cache_has_room_for(served, options, param):
  with pytest.raises(openai.BadRequestError) as caught:
    served.chat(**options)
  assert caught.value.param == param
  assert served.chat(max_tokens=38).choices and served.idle()


@pytest.mark.parametrize("model", ["solver", "team"])
def test_a_text_that_nothing_has_room_for_is_not_encoded(served, model):
  """Millions of characters would keep everybody else waiting."""
  long = [ASK[0] | {"content": "1" * (4 << 20)}]
  began = time.monotonic()
  with pytest.raises(openai.BadRequestError, match="4194304 char") as caught:
    served.chat(model, long)
  assert caught.value.code == "context_length_exceeded"
  assert time.monotonic() < began + 5
  with pytest.raises(openai.BadRequestError, match="999 of them"):
    served.chat(model, [ASK[0] | {"content": ""}] * 999)
  spaces = [ASK[0] | {"content": "1" + " " * 60_000}]
  with pytest.raises(openai.BadRequestError) as caught:
    served.chat(model, spaces)
  assert caught.value.param == "messages" and served.idle()


def test_faults_of_http(served):
  big = {"Content-Length": str(1 << 40)}
  for body, headers, status, code in (
    ("{", {}, 400, "invalid_json"),
    ("", big, 413, "request_too_large"),
    ("", {"Content-Length": "x"}, 411, "length_required"),
  ):
    got, _, said = served.post(body, **headers)
    assert (got, said["error"]["code"]) == (status, code)
    assert said["error"]["type"] == "invalid_request_error"
  for method, path in (("GET", "/v2"), ("POST", "/v1/models"), ("PUT", "/")):
    connection = http.client.HTTPConnection(
      *served.door.server_address[:2], timeout=30
    )
    with contextlib.closing(connection):
      connection.request(method, path, "")
      answer = connection.getresponse()
      assert answer.status == (501 if method == "PUT" else 404)
      assert json.loads(answer.read())["error"]["message"]
  with pytest.raises(openai.NotFoundError, match="solver, verifier, team"):
    served.chat("gpt-4")


def test_a_body_that_is_refused_is_told_of(served):
  """While it is still being sent, too: the connection is not cut before."""
  status, _, said = served.post(b"x" * (12 << 20))
  assert (status, said["error"]["code"]) == (413, "request_too_large")


def said_to(served, *requests):
  """All that the server says until it closes the connection."""
  found = []
  with socket.create_connection(
    served.door.server_address[:2], timeout=10
  ) as client:
    client.sendall("".join(requests).encode())
    while part := client.recv(1 << 16):
      found.append(part)
  return b"".join(found).decode()


def test_what_has_no_body_is_kept_apart_from_what_follows(served):
  twice = "POST /v1/chat/completions HTTP/1.1\r\n"
  twice += "Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}"
  assert said_to(served, twice).startswith("HTTP/1.1 411 ")
  last = "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
  for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
    head = f"HEAD {path} HTTP/1.1\r\n\r\n"
    first, _, rest = said_to(served, head, last).partition("\r\n\r\n")
    assert f" {404 if path == '/nowhere' else 200} " in first.split("\r\n")[0]
    assert "Content-Length: " in first and "Content-Length: 0" not in first
    assert rest.startswith("HTTP/1.1 200 ") and rest.endswith(
      '{"status": "ok"}'
    )
  # A body that is not expected is no request: nothing behind it is answered.
  for body in (
    "Content-Length: 5\r\n\r\nGET /",
    "Transfer-Encoding: chunked\r\n\r\n",
  ):
    said = said_to(served, f"GET /health HTTP/1.1\r\n{body}", last)
    assert said.count("HTTP/1.1") == 1 and "Connection: close" in said


def test_one_connection_too_many_is_sent_away(served, monkeypatch):
  none = threading.Semaphore(0)  # whoever leaves just now makes no place
  monkeypatch.setattr(none, "release", lambda: None)
  monkeypatch.setattr(served.door, "_places", none)
  connection = http.client.HTTPConnection(
    *served.door.server_address[:2], timeout=30
  )
  with contextlib.closing(connection):
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 503 and answer.headers["Retry-After"] == "1"


def test_a_full_queue_says_when_to_come_again(served, monkeypatch):
  monkeypatch.setattr(served.loop, "limit", 2)
  long = {"n": 2, "stream": True, "extra_body": {"min_tokens": 38}}
  with served.slow(0.05), served.chat(**long) as stream:
    next(stream)
    with pytest.raises(openai.RateLimitError) as caught:
      served.chat()
  assert caught.value.code == "queue_full"
  assert caught.value.response.headers["Retry-After"] == "1"
  assert served.idle() and served.chat(n=2).choices
  with pytest.raises(openai.BadRequestError, match="write at most 2") as caught:
    served.chat(n=3)  # which no other time will do for
  assert caught.value.param == "n" and served.idle()


def test_a_request_has_a_limit(served, monkeypatch):
  monkeypatch.setattr(served.desk, "_timeout_s", 0.3)
  with served.slow(0.1), pytest.raises(openai.APIStatusError) as caught:
    served.chat(extra_body={"min_tokens": 38})
  assert (caught.value.status_code, caught.value.code) == (503, "timeout")
  assert served.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(served, stream):
  with served.slow(0.1):  # 19 rounds at least
    began = time.monotonic()
    served.leave(model="solver", stream=stream, n=4, min_tokens=38)
    assert served.idle()
    assert time.monotonic() < began + 1.5


def test_what_it_tells_of_itself(served):
  assert [m.id for m in served.client.models.list()] == [
    *("solver", "verifier", "team"),
  ]
  assert served.client.models.retrieve("team").id == "team"
  connection = http.client.HTTPConnection(
    *served.door.server_address[:2], timeout=30
  )

  def get(path):
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200
    return answer.read().decode()

  def metric(line):
    found = [x for x in get("/metrics").splitlines() if x.startswith(line)]
    return float(found[0].split()[-1]) if found else 0.0

  with contextlib.closing(connection):
    assert json.loads(get("/health")) == {"status": "ok"}
    requests = 'drmas_requests_total{model="verifier",code="200"}'
    tokens = 'drmas_tokens_total{model="verifier",kind="completion"}'
    before = metric(requests), metric(tokens)
    usage = served.chat("verifier", n=2).usage
    end = time.monotonic() + 10  # it is counted once it has been written
    while metric(requests) == before[0] and time.monotonic() < end:
      time.sleep(0.01)
    after = metric(requests), metric(tokens)
    assert np.subtract(after, before).tolist() == [1, usage.completion_tokens]
    assert served.idle()
    assert metric('drmas_slots{model="solver"}') == SLOTS
    assert metric('drmas_slots_in_use{model="solver"}') == 0
    assert metric("drmas_open") == metric("drmas_queue") == 0
    assert metric('drmas_request_seconds_total{model="verifier"}') > 0


# -- the command ---------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
  "flags, said",
  [
    ("", "nothing to serve"),
    ("--workdir=/nowhere", "--workdir=/nowhere: no such folder"),
    ("--policy=a", "write NAME=FOLDER"),
    ("--policy=team=tiny:solver", "may not be 'team'"),
    ("--policy=a=x --policy=a=y", "--policy=a=..: is there twice"),
    ("--policy=a=tiny:solver --step=3", "--step: has no effect"),
    ("--policy=a=x --timeout_s=0 --port=-1", "--timeout_s=0: is out of range"),
    ("--policy=a=x --config.policies.a.nme=1", "policies.a.nme: unknown key"),
    ("--config=none.py", "no such file"),
  ],
)
def test_wrong_flags(flags, said, capsys):
  assert serve.main(flags.split()) == 2
  assert said in capsys.readouterr().err


@pytest.mark.quick
def test_policies_alone_take_overrides():
  config = config_lib.policies_alone(
    {"a": "tiny:solver"}, ["policies.a.engine.num_slots=4"]
  )
  policy = config.policies["a"]
  assert (policy.checkpoint, policy.engine.num_slots) == ("tiny:solver", 4)
  assert not config.agents
  with pytest.raises(config_lib.ConfigError, match="prefill_buckets"):
    config_lib.policies_alone(
      {"a": "x"}, ["policies.a.engine.prefill_buckets=[9,3]"]
    )


def test_help_is_light(root):
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "drmas_jax.serve", "--help"],
    cwd=root,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0 and "--workdir" in done.stdout
  loaded = {
    line.rpartition("|")[2].strip().split(".")[0]
    for line in done.stderr.splitlines()
  }
  assert "argparse" in loaded and not loaded & {"jax", "flax", "transformers"}


def test_a_workdir_is_served_until_sigterm(root, tmp_path):
  """The checkpoint's weights, here all 0: greedy decoding is of id 0. What was
  taken is finished."""
  import jax

  from drmas_jax import building, checkpoint

  config = small(root)
  backbones = building.build(config)
  states = {}
  for one in backbones.values():
    states |= jax.tree.map(
      lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
      one.abstract_states(),
    )
  run = checkpoint.Run(
    step=7,
    cursor=0,
    config=config_lib.to_dict(config),
    versions={"solver": 7, "verifier": 7},
    extra={"folders": {n: b.digest for n, b in backbones.items()}},
  )
  saved = checkpoint.Checkpoints(tmp_path)
  saved.save(run, states)
  saved.close()
  text = json.dumps(config_lib.to_dict(config))
  (tmp_path / "config.json").write_text(text)
  command = [sys.executable, "-m", "drmas_jax.serve"]
  with subprocess.Popen(
    [*command, f"--workdir={tmp_path}", "--step=7", "--port=0"],
    cwd=root,
    env=os.environ | {"XLA_FLAGS": xla_flags.flags(), "PYTHONPATH": str(root)},
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      line = process.stdout.readline()
      assert "serves solver, verifier, team at http://" in line
      client = openai.OpenAI(
        base_url=line.split()[-1], api_key="any", max_retries=0, timeout=60
      )
      stream = iter(
        client.chat.completions.create(
          model="solver", messages=ASK, temperature=0, n=64, stream=True
        )
      )
      chunks = [next(stream)]
      process.send_signal(signal.SIGTERM)
      with pytest.raises(
        (openai.InternalServerError, openai.APIConnectionError)
      ):
        while True:  # the signal may take a moment
          client.chat.completions.create(model="verifier", messages=ASK)
      chunks += list(stream)
      choices, _ = streamed(chunks)
      assert len(choices) == 64
      for text, _, reason in choices.values():
        assert (len(text), len(set(text)), reason) == (38, 1, "length")
      assert process.wait(timeout=30) == 0
    finally:
      process.kill()
