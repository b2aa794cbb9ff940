"""Episodes as lines of JSON: what one holds, how it is made and read.

    <workdir>/transcripts/*.jsonl             of training, the oldest file first
    <workdir>/eval/step_N/transcripts*.jsonl  of `--mode=eval`

A line is an episode, of schema 2:

    schema      2
    step        of training; in an evaluation, of its weights
    kind        "train" or "eval"
    task        {source, index, position, question, answer}: `types.Task`
    episode     number within its group, from 0
    status      "ok", "failed" or "cancelled"
    fault       {kind, message} of one that failed, or null
    action      what the orchestra returned
    reward      a number, or {agent: number}; null without an outcome
    success     what an evaluation counts; null without an outcome
    parts       {name: number} behind the reward; null without an outcome
    turns       in the order in which the orchestra reads, each:
      index, agent, policy, policy_version, stop_reason, valid: `types.Turn`
      prompt             as the template rendered it, control tokens kept
      completion         cut where its action block closes
      prompt_ids         [int]: what the policy was given      (since schema 2)
      completion_ids     [int]: what it sampled, whole         (since schema 2)
      prompt_tokens, completion_tokens: how many there are
      reply              what others see of it; null: all      (since schema 2)
      verdict, labels    as parsed, or null
      fault              {kind, message}, or null
      call               of a remote policy, {retries, cached, cost}; otherwise
                         null                                  (since schema 2)
      logprobs           {sum, mean, min} as sampled; null without tokens
      logprob_gap        mean |learner - sampler| over its tokens; null where it
                         was in no update, or behind the first (since schema 2)
      score, advantage   of the turn's row; null where it was none

Ids are null where there are none: in schema 1, and of remote policies. Strings
are as they were said: anything may be in them. Process 0 writes, and its own
groups only. A reader takes every schema up to its own; a last line that is
still being written is no line.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax.types import Episode, Fault, Turn

SCHEMA = 2

_SINCE_2 = ("prompt_ids", "completion_ids", "reply", "call", "logprob_gap")


def rows_of(
  turns: Sequence[Turn], **numbers: np.ndarray
) -> dict[int, dict[str, float | None]]:
  """What the rows of a batch came to: {id of the turn: {name: number}}.

  Args:
    turns: [N] of the rows.
    **numbers: [N] score, advantage and logprob_gap; NaN is none.
  """
  columns = [
    [None if x != x else x for x in np.asarray(values, float).tolist()]
    for values in numbers.values()
  ]
  return {
    id(turn): dict(zip(numbers, row, strict=True))
    for turn, *row in zip(turns, *columns, strict=True)
  }


def record(
  episode: Episode,
  step: int,
  kind: str,
  decode: Callable[[str, np.ndarray], str],
  rows: Mapping[int, Mapping[str, float | None]] | None = None,
) -> dict[str, Any]:
  """An episode as plain data: a line, see the module's docstring.

  Args:
    episode: as it ended, failed ones too.
    step: of training.
    kind: "train" or "eval".
    decode: (policy, ids) -> text, special tokens kept.
    rows: from `rows_of`; those that there are.
  """
  task, outcome = episode.task, episode.outcome
  return {
    "schema": SCHEMA,
    "step": step,
    "kind": kind,
    "task": {
      "source": task.source,
      "index": task.index,
      "position": task.position,
      "question": task.question,
      "answer": task.answer,
    },
    "episode": episode.index,
    "status": episode.status,
    "fault": _fault(episode.fault),
    "action": episode.action,
    "reward": outcome and outcome.reward,
    "success": outcome and outcome.won,
    "parts": outcome and outcome.parts,
    "turns": [
      _turn(turn, decode, (rows or {}).get(id(turn), {}))
      for turn in episode.turns
    ],
  }


def _turn(
  turn: Turn, decode: Callable, row: Mapping[str, float | None]
) -> dict[str, Any]:
  reply = turn.reply
  logprobs = turn.sampler_logprobs.tolist()  # few, for which numpy is slow
  return {
    "index": turn.index,
    "agent": turn.agent,
    "policy": turn.policy,
    "policy_version": turn.policy_version,
    "prompt": turn.call.prompt
    if turn.call
    else decode(turn.policy, turn.prompt_ids),
    "completion": turn.text,
    "prompt_ids": turn.prompt_ids.tolist() or None,
    "completion_ids": turn.completion_ids.tolist() or None,
    "prompt_tokens": turn.num_prompt_tokens,
    "completion_tokens": turn.num_tokens,
    "stop_reason": turn.stop_reason,
    "valid": turn.valid,
    "reply": reply.text if reply and reply.text != turn.text else None,
    "verdict": reply and reply.verdict,
    "labels": reply and reply.labels,
    "fault": _fault(turn.fault),
    "call": turn.call
    and {
      "retries": turn.call.retries,
      "cached": turn.call.cached,
      "cost": turn.call.cost,
    },
    "logprobs": {
      "sum": math.fsum(logprobs),
      "mean": math.fsum(logprobs) / len(logprobs),
      "min": min(logprobs),
    }
    if logprobs
    else None,
    "logprob_gap": row.get("logprob_gap"),
    "score": row.get("score"),
    "advantage": row.get("advantage"),
  }


def _fault(fault: Fault | None) -> dict[str, Any] | None:
  return fault and {"kind": fault.kind, "message": fault.message}


def read(lines: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
  """The episodes of a file, one under way too, as the newest schema has them.

  Args:
    lines: each with its end; one without is not whole yet, and left out.
    name: of the file, for errors.

  Raises:
    ValueError: a line is no episode, or of a newer schema.
  """
  for number, line in enumerate(lines, 1):
    if not line.endswith(b"\n"):
      continue
    where = f"{name}:{number}"
    try:
      found = json.loads(line)
      schema = found["schema"]
    except (ValueError, TypeError, KeyError) as e:
      raise ValueError(f"{where}: not an episode ({e!r})") from e
    if schema > SCHEMA:
      raise ValueError(
        f"{where}: has schema {schema}; allowed are 1 to {SCHEMA}; it was "
        "written by a newer version: update this one"
      )
    for turn in found["turns"]:
      for key in _SINCE_2:
        turn.setdefault(key, None)
    yield found
