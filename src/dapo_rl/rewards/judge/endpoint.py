"""A judge behind an OpenAI-compatible endpoint, which is asked by threads."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_rl.base.http_client import CallError, HttpClient
from dapo_rl.base.quote import describe, one_line
from dapo_rl.config import RewardSettings
from dapo_rl.errors import VerifierStopError
from dapo_rl.rewards.judge.judge_file import JudgeSettings
from dapo_rl.rewards.judge.verifier import JudgeCounts, JudgeReply, JudgeVerifier, Mark


class EndpointJudge(JudgeVerifier):
    def __init__(self, judge: JudgeSettings, settings: RewardSettings, name: str, file: str) -> None:
        super().__init__(judge, settings, name, file)
        self._url = judge.endpoint.rstrip("/") + "/chat/completions"
        self._http = HttpClient(timeout_s=judge.timeout_s, retries=judge.retries, api_key=judge.api_key)
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Ends waiting; calls being made end first, and their replies are kept."""
        self._http.closing.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _call(self, key: str, body: dict[str, Any]) -> Future[Mark]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.judge.concurrency, "judge")
        return self._pool.submit(self._reply_in_thread, key, body)

    def _reply_in_thread(self, key: str, body: dict[str, Any]) -> Mark:
        """In a thread of the pool. Raises VerifierStopError alone."""
        mark = Mark()
        for _ in range(self.judge.retries + 1):
            try:
                mark = self._called(key, body)
            except VerifierStopError as error:
                self.record.stopped = str(error)
                raise
            except CallError as error:
                return Mark(fault=str(error), slow=error.slow)
            except Exception as error:
                return Mark(fault=describe(error))
            if not mark.fault or not self.judge.is_random or self._http.closing.is_set():
                break  # without randomness the reply would be the same
        return mark

    def _called(self, key: str, body: dict[str, Any]) -> Mark:
        started, made = time.monotonic(), 0

        def begin() -> None:
            nonlocal made
            self.record.begin_call()
            made += 1

        try:
            reply = self._http.call(self._url, body, _reply, begin)
        finally:
            self._count(JudgeCounts(calls=made, seconds=time.monotonic() - started))
        return self._take_reply(key, reply)


def _reply(data: bytes) -> JudgeReply:
    try:
        found = json.loads(data)
        text = found["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise CallError(
            f"its reply is not that of a chat completion: {one_line(data[:200].decode('utf-8', 'replace'))}"
        )
    usage = found.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return JudgeReply(text, tokens if type(tokens) is int and 0 <= tokens < 2**40 else 0)
