"""A verifier as the service of worker processes: its calls and replies as bytes, and how a worker answers.

A call is a pickled prompt with its trajectories in the form of `codec`. A reply is JSON and is validated, since user
code has access to the worker's end of the socket.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, shorten
from dapo_rl.codec import from_bytes, to_bytes, verdict_of, verdict_row
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.trainer_state import RewardState
from dapo_rl.rewards.validation import crash, failure, fault_of, name_of, verify
from dapo_rl.types import Prompt, Trajectory, Verdict, Verifier
from dapo_rl.workers.limits import MAX_REPLY
from dapo_rl.workers.worker import CorruptReplyError, Service


class Reply(NamedTuple):
    """The reply of a worker to a call."""

    kind: Literal["verdicts", "failed", "fatal"]
    """`failed`: no verdict on any sample; `fatal`: a `UserError` for the caller to raise."""
    verdicts: list[Verdict]
    error: tuple[str, str] = ("", "")
    """Without verdicts: what went wrong, as a line and further text below it."""
    exhausted: bool = False
    """The worker ran out of memory and still holds much of it, so it must be replaced."""

    @property
    def good(self) -> bool:
        return self.kind == "verdicts" and not any(verdict.failed for verdict in self.verdicts)


def encode_call(prompt: Prompt, samples: Sequence[Trajectory], state: RewardState) -> bytes:
    return pickle.dumps((prompt, to_bytes(samples), state), pickle.HIGHEST_PROTOCOL)


def encode_reply(reply: Reply) -> bytes:
    verdicts = [verdict_row(verdict) for verdict in reply.verdicts]
    return json.dumps((reply.kind, verdicts, reply.error, reply.exhausted), check_circular=False).encode()


def decode_reply(data: bytearray, count: int) -> Reply:
    """The reply to a call about `count` samples, or CorruptReplyError."""
    try:
        kind, rows, (line, more), exhausted = json.loads(data)
        verdicts = [verdict_of(row) for row in rows]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CorruptReplyError from None
    expected = count if kind == "verdicts" else 0
    if kind not in ("verdicts", "failed", "fatal") or len(verdicts) != expected or any(map(fault_of, verdicts)):
        raise CorruptReplyError
    return Reply(kind, verdicts, (str(line), str(more)), exhausted is True)


def verifier_service(verifier: Verifier, settings: RewardSettings) -> Service:
    wrong = settings.wrong

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        reply = _reply(verifier, body, wrong)
        data = encode_reply(reply._replace(exhausted=not reply.good and is_short()))
        if len(data) <= MAX_REPLY:
            return data
        detail = f"{name_of(verifier)} returned verdicts of {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 20} MiB"
        return encode_reply(Reply("verdicts", [failure(detail, wrong)] * len(reply.verdicts), exhausted=True))

    def warm_up() -> None:
        if its_own := getattr(verifier, "warm_up", None):
            its_own()

    return Service(answer, settings.memory_mb, warm_up)


def _reply(verifier: Verifier, body: bytearray, wrong: float) -> Reply:
    try:
        prompt, columns, state = pickle.loads(body)
        samples = from_bytes(columns)
        _seed(prompt, samples)
    except Exception as error:  # a column that cannot be unpickled, or not enough memory
        return Reply("failed", [], (f"the verifier's process cannot read the call: {describe(error)}", ""))
    try:
        return Reply("verdicts", verify(verifier, prompt, samples, wrong, state))
    except UserError as error:
        return Reply("fatal", [], (shorten(str(error), TRACEBACK_LIMIT), shorten(str(error.more), TRACEBACK_LIMIT)))
    except KeyboardInterrupt as error:  # raised by the verifier: Ctrl-C goes to the run
        return Reply("verdicts", crash(name_of(verifier), error, len(samples), wrong))


def _seed(prompt: Prompt, samples: Sequence[Trajectory]) -> None:
    """Seeds random numbers, so that a verifier draws the same ones in any worker."""
    seed = zlib.crc32(prompt.id.encode("utf-8", "surrogatepass"))
    for sample in samples:
        seed = zlib.crc32(sample.text.encode("utf-8", "surrogatepass"), seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
