"""Reward functions get the whole conversation of an episode."""

import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.rewards import as_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.types import Prompt, Trajectory

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
MESSAGES = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "2"},
)


def tool_results(completions, **_):
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


@pytest.mark.slow
def test_completions_have_all_messages_in_the_process_of_a_verifier():
    prompt = Prompt(id="p", text="1+1=?", token_ids=[1], answer="2", messages=({"role": "user", "content": "1+1=?"},))
    samples = [Trajectory([1], [-0.1], "2", "stop", 0, messages=MESSAGES), Trajectory([1], [-0.1], "2", "stop", 1)]
    settings = RewardSettings(workers=1)
    with VerifierPool(as_verifier([tool_results], settings), settings) as pool:
        verdicts = pool.submit(prompt, samples).result()
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0]
