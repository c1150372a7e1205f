"""A filter of the user's own, and what can go wrong in it."""

import asyncio

import pytest
from support import Prompts, ScriptedEngine, TextVerifier, make_sample

from dapo_rl.base.quote import LINE_LIMIT, TRACEBACK_LIMIT
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Verdict


def fill(keep, verifier=None):
    def script(request):
        return [make_sample(3, text=text) for text in ("right", "wrong")]

    settings = SamplingSettings(group_size=2, prompts_per_step=1)
    sampler = Sampler(
        Prompts(),
        ScriptedEngine(script, 10**6),
        verifier or TextVerifier(),
        SamplingParams(max_new_tokens=100),
        settings,
        cap=10,
        seed=0,
        max_error_share=0.5,
        keep=keep,
    )
    return sampler.fill(1)


@pytest.mark.parametrize(
    "error", [SystemExit(0), SystemExit(), GeneratorExit(), asyncio.CancelledError(), BaseException(), ValueError("x")]
)
def test_whatever_a_filter_raises_is_one_line(error):
    def keep(group):
        raise error

    with pytest.raises(UserError, match=rf"^sampling\.filter: {type(error).__name__}.* on the group of prompt"):
        fill(keep)


def test_ctrl_c_and_a_users_own_line_come_out():
    def keep(group):
        raise error

    for error in (KeyboardInterrupt("stop"), UserError("a line of its own")):
        with pytest.raises(type(error), match=str(error)):
            fill(keep)


def test_a_filters_message_is_shortened_and_cannot_steer_the_terminal():
    def keep(group):
        raise ValueError("\x1b[2J\n" * 10**6)

    with pytest.raises(UserError) as caught:
        fill(keep)
    assert len(str(caught.value)) < 3 * LINE_LIMIT
    assert str(caught.value).isprintable()


def test_a_failing_verifiers_line_is_shortened():
    def verifier(prompt, samples):
        return [Verdict(0.0, False, "error", detail="x" * 10**6 + "\nbelow" + "y" * 10**6) for _ in samples]

    with pytest.raises(UserError, match="characters cut") as caught:
        fill(None, verifier)
    assert len(str(caught.value)) < 3 * LINE_LIMIT
    assert caught.value.more.startswith("below")
    assert len(caught.value.more) < 2 * TRACEBACK_LIMIT
