"""A verifier as the service of worker processes: decodes calls, seeds random numbers, encodes verdicts."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Sequence

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, shorten
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.validation import crash, failures, name_of, verify
from dapo_rl.rewards.wire import Reply, decode_call, encode_reply
from dapo_rl.types import Prompt, Trajectory, Verifier
from dapo_rl.workers.worker import MAX_REPLY, Service


def verifier_service(verifier: Verifier, settings: RewardSettings) -> Service:
    wrong = settings.wrong

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        reply = _reply(verifier, body, wrong)
        data = encode_reply(reply._replace(exhausted=not reply.good and is_short()))
        if len(data) <= MAX_REPLY:
            return data
        detail = f"{name_of(verifier)} returned verdicts of {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 20} MiB"
        return encode_reply(Reply("verdicts", failures(detail, len(reply.verdicts), wrong), exhausted=True))

    def warm_up() -> None:
        if its_own := getattr(verifier, "warm_up", None):
            its_own()

    return Service(answer, settings.memory_mb, warm_up)


def _reply(verifier: Verifier, body: bytearray, wrong: float) -> Reply:
    try:
        prompt, samples, state = decode_call(body)
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
