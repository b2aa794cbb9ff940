"""The page of a run: what is on it, and that nothing foreign runs in it."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_jax import charts, report, transcripts, writers

pytestmark = pytest.mark.quick

SPIKES = {"solver": (300, 700), "verifier": (512,)}
EVIL = (
  "</script><script>document.title = 'run'</script>"
  "<img src=x onerror=\"document.title = 'run'\">' \" & \ud800"
)
NAMES = ("solver", "verifier")


def numbers(step, rng):
  """What a step of a made-up run measures."""
  level = 0.9 - 0.55 * np.exp(-step / 250)
  found = {"eval/avg@8": level, "eval/pass@8": level**0.3}
  found |= {f"eval/{k}_recall/verifier": level for k in ("approve", "reject")}
  if step % 100:
    found = {}
  if step == 0:
    return found
  found |= {"reward/team": rng.normal(level, 0.05), "time/step_s": 3.0}
  found |= {"time/rollout_s": 1.5, "time/score_s": 0.1, "time/update_s": 1.0}
  found |= {"time/outside_s": 1.0, "memory/host_bytes": 8e8 + 1e3 * step}
  found |= {f"part_{i}/team": rng.normal() for i in range(120)}
  for name in NAMES:
    norm = 10.0 if step in SPIKES[name] else float(rng.lognormal(-1, 0.2))
    found |= {
      f"grad_norm/{name}": norm,
      f"grad_norm/{name}/{name}": norm,
      **{f"{what}/{name}": level for what in ("reward", "valid", "truncated")},
      f"kappa/{name}": float(rng.lognormal(0.1, 0.2)),
      f"completion_length/{name}": 100 * level,
      f"entropy/{name}": 1 - level,
      f"logprob_gap/{name}": 1e-4 * level,
      f"zero_variance_groups/{name}": 3.0,
    }
  for kind in ("right_approved", "right_rejected", "wrong_approved"):
    found[f"verdict_{kind}/verifier"] = 2.0
  return found | {"verdict_wrong_rejected/verifier": 4.0}


def episode(step, index, reward=0.0):
  turn = {
    "index": 0,
    "agent": "solver",
    "prompt": f"prompt {EVIL}",
    "completion": f"completion {EVIL} {'x' * 9000}",
    "completion_tokens": 7,
    "stop_reason": "eos",
    "valid": True,
    "verdict": EVIL,
    "fault": {"kind": "k", "message": EVIL},
    "score": 1.0,
    "advantage": -0.5,
  }
  task = {"source": EVIL, "index": 3, "question": EVIL, "answer": EVIL}
  return {
    "schema": transcripts.SCHEMA,
    "step": step,
    "task": task,
    "episode": index,
    "status": "ok",
    "action": EVIL,
    "reward": reward,
    "parts": {EVIL: 1.0},
    "turns": [turn],
  }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A workdir of 1000 made-up steps, with hostile text wherever text can be."""
  folder = tmp_path_factory.mktemp("runs") / "tiny"
  rng = np.random.default_rng(0)
  run = writers.RunWriter(folder, 1000, extra=[report.Live(folder, share=1e-9)])
  run.write_json(
    "config.json",
    {
      "steps": 1000,
      "note": EVIL,
      "agents": {n: {"policy": n} for n in NAMES},
      "policies": {n: {} for n in NAMES},
      "health": {"norm_spike": 3.0, "window": 20},
    },
  )
  run.write_json(
    "changes.json", [dict.fromkeys(("step", "key", "old", "new"), EVIL)]
  )
  planned = {"rollout": [4e8, 5e8], "update": [7e8, 6e8]}
  about = {"python": EVIL, "devices": {"planned_bytes": planned}}
  run.write_json("manifest.json", about)
  alarm = {"step": 512, "name": "norm_spike", "agent": None, "text": EVIL}
  with open(folder / "alarms.jsonl", "w") as f:
    f.write(json.dumps(alarm) + '\n{"step": 5')
  for step in range(1001):
    run.write_scalars(step, numbers(step, rng))
    if step in (999, 1000):
      run.write_episodes([episode(step, i, reward=i / 8) for i in range(8)])
  run.close()
  return folder


class Page(html.parser.HTMLParser):
  """Tags, attributes and text, as a browser reads them."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text = [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_data(self, data):
    self.text.append(data)

  def said(self, text):
    return any(text in data for data in self.text)


@pytest.fixture(scope="module")
def page(run):
  return Page((run / "report.html").read_text())


def figures(run):
  text = (run / "report.html").read_text()
  found = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
  return {re.search(r"<b>(.*?)</b>", f).group(1): f for f in found}


def test_it_is_one_small_file_that_loads_nothing(run, page):
  size = (run / "report.html").stat().st_size
  assert 50_000 < size < 2_000_000
  assert not [p for p in run.iterdir() if p.name.endswith(".tmp")]
  names = {name for name, _ in page.attributes}
  assert not names & {"src", "href", "srcset", "action", "style"}
  assert not {"link", "iframe", "object", "embed", "base", "form"} & {
    *page.tags
  }
  text = (run / "report.html").read_text()
  assert "url(" not in text and "@import" not in text
  assert "default-src 'none'" in dict(page.attributes)["content"]


def test_foreign_text_stays_text(page):
  assert page.tags.count("script") == 1
  assert "img" not in page.tags
  assert not [n for n, _ in page.attributes if n.startswith("on")]
  shown = EVIL.replace("\ud800", "?")
  assert sum(data.count(shown) for data in page.text) >= 8 * 6
  assert page.said("[and 5,") and not page.said("x" * 4001)


def test_it_shows_every_part_of_a_run(run, page):
  wanted = {
    *("Held-out score", "Reward (training)", "Gradient norm by policy"),
    *("kappa", "Valid turns", "Truncated turns", "Entropy [nats per token]"),
    *("Length of completions [tokens]", "Log-prob gap of learner and sampler"),
    *("Groups with equal scores", "Held-out verdicts"),
    *("Verdicts of verifier (training)", "Seconds of a step, by part"),
  }
  assert figures(run).keys() == wanted  # and no norms by agent: they are alone
  for title, lines in (("Reward (training)", 3), ("kappa", 2)):
    assert figures(run)[title].count("<polyline") == lines
  for text in ("1000 of 1000", "norm_spike", "0.350 → 0.890", "0.700", "0.801"):
    assert page.said(text), text
  for text in (
    "rewards and advantages",
    "rest of the step",
    "38%",
    "part_7/team",
  ):
    assert page.said(text), text
  shown = [t for t in page.text if "episode " in t and "reward" in t]
  assert [t.rpartition(" ")[2] for t in shown] == [
    *("0.875", "0.75", "0.625", "0.25", "0.125", "0"),
  ]
  assert page.said("Of the 8 of step 1000")


def test_spikes_are_marked(run):
  figure = figures(run)["Gradient norm by policy"]
  marked = re.findall(r"<title>(\w+), step (\d+): 10</title>", figure)
  assert marked == [(n, str(s)) for n in NAMES for s in SPIKES[n]]
  assert "over 3x the running median" in figure
  assert "<title>" not in figures(run)["kappa"]


def test_long_curves_are_thinned_and_nothing_is_hidden(run):
  figure = figures(run)["Gradient norm by policy"]
  data = re.search(r'data-lines="(.*?)"', figure).group(1)
  lines = json.loads(html.unescape(data))
  assert [len(line["x"]) for line in lines] == [240, 240]
  assert lines[0]["x"][-1] == 1000
  steps, values, band = charts._thin(np.arange(1000), np.arange(1000) % 7.0)
  assert band[0].min() == 0 and band[1].max() == 6 and steps[-1] == 999
  assert values.mean() == pytest.approx(3, abs=0.05)
  assert charts._thin(np.arange(9), np.zeros(9))[2] is None


def test_spikes_are_over_the_median_of_what_came_before():
  values = np.array([1, 1, 1, 1, 9, 3.1, 1, 1, 1, 2.9, 3.1, 20])
  found = np.flatnonzero(charts._spikes(values, 3.0, 4))
  assert found.tolist() == [5, 10, 11]  # [4] comes too early
  assert not charts._spikes(np.zeros(20), 3.0, 4).any()


@settings(max_examples=200, deadline=None)
@given(
  st.floats(-1e9, 1e9),
  st.floats(1e-6, 1e9),
  st.booleans(),
)
def test_ticks_are_few_and_inside(low, width, log):
  low = abs(low) + 1e-9 if log else low
  high = low + width
  if high - low < 1e-9 * abs(high):
    return
  ticks = charts._Axis(low, high, 0, 100, log).ticks()
  assert 1 <= len(ticks) <= 11
  room = 1e-6 * (high - low)
  assert all(low - room <= t <= high + room for t in ticks)


@pytest.mark.parametrize(
  "value, text",
  [(0, "0"), (0.25, "0.25"), (12345.6, "12,346"), (1e-5, "1e-05"), (None, "")]
  + [
    (3e8, "3e+08"),
    (0.123456, "0.1235"),
    (True, "True"),
    (np.float32(2), "2"),
  ],
)
def test_numbers_read_well(value, text):
  assert charts.number(value) == text


def test_a_run_before_its_first_step(tmp_path):
  run = writers.RunWriter(tmp_path, 3, extra=[report.Live(tmp_path)])
  run.flush()
  page = Page((tmp_path / "report.html").read_text())
  assert page.said("No step has been done.") and "figure" not in page.tags
  run.write_scalars(1, {"reward/team": 0.5})
  run.close()
  page = Page((tmp_path / "report.html").read_text())
  assert "figure" in page.tags


def test_rewriting_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
  now, writes = [0.0], []

  def write(workdir):
    writes.append(now[0])
    now[0] += 0.5

  monkeypatch.setattr(report, "write", write)
  live = report.Live(tmp_path, share=0.01, clock=lambda: now[0])
  for _ in range(400):
    now[0] += 1.0
    live.flush()
  assert len(writes) == 8 and writes[0] == 1.0
  live.close()
  assert len(writes) == 9


def test_the_command(run, tmp_path, capsys):
  before = (run / "report.html").read_text()
  (run / "report.html").unlink()
  assert report.main([str(run)]) == 0
  assert capsys.readouterr().out.strip() == str(run / "report.html")
  after = (run / "report.html").read_text()
  pattern = r"<dt>written</dt><dd>.*?</dd>"
  assert re.sub(pattern, "", after) == re.sub(pattern, "", before)
  assert report.main([str(tmp_path)]) == 2
  assert "metrics.jsonl" in capsys.readouterr().err


# -- in a browser --------------------------------------------------------------


class Browser:
  """Headless Chromium, by its debugging protocol over two pipes."""

  def __init__(self, program, folder):
    (out, self._to), (self._from, into) = os.pipe(), os.pipe()
    self._process = subprocess.Popen(
      [
        *("bash", "-c", f'exec "$@" 3<&{out} 4>&{into}', "bash", program),
        *("--headless", "--no-sandbox", "--disable-gpu"),
        *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
        *("--window-size=1280,900", f"--user-data-dir={folder}", "about:blank"),
      ],
      pass_fds=(out, into),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(out)
    os.close(into)
    self._read, self._number, self._session = b"", 0, None
    self.events = []
    (target,) = [
      t["targetId"]
      for t in self.ask("Target.getTargets")["targetInfos"]
      if t["type"] == "page"
    ]
    self._session = self.ask(
      "Target.attachToTarget", targetId=target, flatten=True
    )["sessionId"]

  def ask(self, method, **params):
    self._number += 1
    message = {"id": self._number, "method": method, "params": params}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._to, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._next()
      if answer.get("id") == self._number:
        assert "error" not in answer, answer
        return answer["result"]

  def wait(self, event):
    while event not in [e["method"] for e in self.events]:
      self._next()

  def _next(self):
    while b"\0" not in self._read:
      piece = os.read(self._from, 1 << 16)
      assert piece, "the browser is gone"
      self._read += piece
    text, _, self._read = self._read.partition(b"\0")
    answer = json.loads(text)
    if "method" in answer:
      self.events.append(answer)
    return answer

  def run(self, script):
    found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
    return found["result"].get("value")

  def close(self):
    self._process.kill()
    self._process.wait()
    os.close(self._to)
    os.close(self._from)


@pytest.fixture
def browser(tmp_path):
  names = ("chromium", "chromium-browser", "google-chrome")
  programs = [p for p in map(shutil.which, names) if p]
  if not programs:
    pytest.skip(f"needs a browser: {', '.join(names)}")
  browser = Browser(programs[0], tmp_path)
  yield browser
  browser.close()


@pytest.mark.browser
def test_it_opens_in_a_browser(run, browser):
  for domain in ("Page", "Runtime", "Log", "Network"):
    browser.ask(f"{domain}.enable")
  browser.ask("Page.navigate", url=(run / "report.html").as_uri())
  browser.wait("Page.loadEventFired")
  assert browser.run("document.title") == "tiny: report"  # and not "run"
  place = "document.querySelector('figure svg').getBoundingClientRect()"
  x, y = (browser.run(f"{place}.{k}") for k in ("right", "top"))
  browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x - 20, y=y + 50)
  said = browser.run("document.querySelector('output').innerText")
  assert said.split() == [
    *("step", "1000", "avg@8", "0.8899", "pass@8", "0.9656"),
  ]
  kinds = [e["method"] for e in browser.events]
  assert "Runtime.exceptionThrown" not in kinds
  assert "Log.entryAdded" not in kinds  # of what the policy had to forbid
  asked = [
    e["params"]["request"]["url"]
    for e in browser.events
    if e["method"] == "Network.requestWillBeSent"
  ]
  assert asked == [(run / "report.html").as_uri()]
