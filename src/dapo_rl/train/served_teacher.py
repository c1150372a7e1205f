"""A teacher behind an OpenAI-compatible server of vLLM, which returns the log-probabilities of prompt tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from dapo_rl.base.http_client import CallError, HttpClient, fault_of_url, key_in
from dapo_rl.base.quote import one_line
from dapo_rl.config import TeacherSettings
from dapo_rl.data.chat import encode
from dapo_rl.errors import TeacherStopError, UserError
from dapo_rl.types import FloatArray, Trajectory

BATCH_TOKENS, CONCURRENCY = 16384, 8
"""The most tokens in a request, unless one sample has more, and the most requests at a time."""
MOST_BYTES = 256 << 20
"""Of a reply: vLLM says about 100 bytes for each token."""
PROBES = 512
"""Entries of the vocabulary that the server's tokenizer is compared by."""
ROUNDING = 1e-3
"""A log-probability is at most this."""
KEY = "teacher.name"


class ServedTeacher:
    """Scores samples by requests of their tokens. Check it before its first use."""

    def __init__(self, settings: TeacherSettings) -> None:
        assert settings.name is not None
        if fault := fault_of_url(settings.name):
            raise UserError(f"{KEY}: {fault}")
        if settings.api_key_env is not None and not key_in(settings.api_key_env):
            raise UserError(f"teacher.api_key_env: the environment variable {settings.api_key_env} is not set")
        self._url, self._model = settings.name.rstrip("/"), settings.model
        self._http = HttpClient(
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            api_key=partial(key_in, settings.api_key_env),
            most_bytes=MOST_BYTES,
        )
        self.stopped = ""
        """Why the run has to stop; empty if it does not."""

    def check(self, tokenizer: Any, longest: int) -> None:
        """Raises a UserError if the server cannot be this run's teacher: it does not answer, reads other tokens, or
        cannot read a sample of `longest` tokens."""
        try:
            card = self._http.call(f"{self._url}/models", None, partial(_card, self._model))
        except CallError as error:
            raise UserError(self._line(error)) from None
        self._model = card["id"]
        limit = card.get("max_model_len")
        if isinstance(limit, int) and longest >= limit:  # it also generates a token
            raise UserError(
                f"{KEY}: {self._url} reads {limit} tokens, and a sample may have {longest}; start it with "
                f"--max-model-len {longest + 1}, or lower sampling.max_new_tokens"
            )
        self._check_vocabulary(tokenizer)

    def _check_vocabulary(self, tokenizer: Any) -> None:
        size = len(tokenizer)
        text = tokenizer.decode(list(range(0, size, max(1, size // PROBES))), skip_special_tokens=True)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            theirs = self._http.call(f"{self._url.removesuffix('/v1')}/tokenize", body, _tokens)
        except CallError as error:
            if error.status in (404, 405):
                raise UserError(
                    f"{KEY}: {self._url} has no /tokenize to compare vocabularies by; serve the teacher with vLLM"
                ) from None
            raise UserError(self._line(error)) from None
        (ours,) = encode(tokenizer, [text], special=False)
        if theirs != list(ours):
            raise UserError(
                f"{KEY}: {self._model} at {self._url} has another vocabulary than the policy; a teacher needs the "
                "tokenizer of its pupil"
            )

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The teacher's log-probability of each response token, or TeacherStopError."""
        self._http.closing.clear()  # a run that it has stopped may go on in this process
        self.stopped = ""
        batches = list(_batches(samples))
        pool = ThreadPoolExecutor(min(CONCURRENCY, max(1, len(batches))), "teacher")
        try:
            futures = [pool.submit(self._scored, batch) for batch in batches]
            return [row for future in futures for row in future.result()]
        except CallError as error:
            self.stopped = f"{self._line(error)}; resume when it answers"
            raise TeacherStopError(self.stopped) from None
        finally:  # after an error or Ctrl-C, nobody waits for the others
            self._http.closing.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _scored(self, batch: Sequence[Trajectory]) -> list[FloatArray]:
        rows = [[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()] for sample in batch]
        # A token is generated, because not every version of vLLM accepts none.
        body = {"model": self._model, "prompt": rows, "max_tokens": 1, "prompt_logprobs": 0}
        read: Callable[[bytes], list[FloatArray]] = partial(_logps, batch, rows)
        return self._http.call(f"{self._url}/completions", body, read)

    def _line(self, error: CallError) -> str:
        remedy = "; set teacher.api_key_env" if error.status in (401, 403) else ""
        why = str(error)
        where = "" if why.startswith(self._url) else f"{self._url}: "
        return f"{KEY}: {where}{why}{remedy}"


def _batches(samples: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    batch: list[Trajectory] = []
    tokens = 0
    for sample in samples:
        own = len(sample.prompt_ids) + len(sample.token_ids)
        if batch and tokens + own > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += own
    if batch:
        yield batch


def _card(wanted: str | None, data: bytes) -> dict[str, Any]:
    cards = [card for card in _listed(data, "data") if isinstance(card, dict) and isinstance(card.get("id"), str)]
    names = [card["id"] for card in cards]
    if not names:
        raise CallError(f"it lists no model: {_beginning(data)}")
    if wanted is not None and wanted not in names:
        raise CallError(f"it has no model {wanted} (teacher.model), but {one_line(', '.join(names), 200)}", again=False)
    found: dict[str, Any] = cards[0 if wanted is None else names.index(wanted)]
    return found


def _tokens(data: bytes) -> list[Any]:
    if not (tokens := _listed(data, "tokens")):
        raise CallError(f"/tokenize gave no tokens: {_beginning(data)}")
    return tokens


def _logps(batch: Sequence[Trajectory], rows: Sequence[Sequence[int]], data: bytes) -> list[FloatArray]:
    try:
        choices = sorted(_listed(data, "choices"), key=lambda choice: int(choice["index"]))
        found = [_row(sample, ids, choice) for sample, ids, choice in zip(batch, rows, choices, strict=True)]
    except (KeyError, TypeError, ValueError, OverflowError):  # a number may have any number of digits
        raise CallError(
            f"its reply has no log-probabilities of these tokens, as vLLM's has: {_beginning(data)}"
        ) from None
    return found


def _row(sample: Trajectory, ids: Sequence[int], choice: Mapping[str, Any]) -> FloatArray:
    """At each position vLLM gives a mapping from token ids to log-probabilities, the prompt's own token among them."""
    positions = list(zip(ids, choice["prompt_logprobs"], strict=True))[len(sample.prompt_ids) :]
    row = np.array([position[str(token)]["logprob"] for token, position in positions], np.float32)
    if row.ndim != 1 or not (np.isfinite(row) & (row <= ROUNDING)).all():
        raise ValueError
    return row


def _listed(data: bytes, key: str) -> list[Any]:
    try:
        found = json.loads(data)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _beginning(data: bytes) -> str:
    return one_line(data[:200].decode("utf-8", "replace"))
