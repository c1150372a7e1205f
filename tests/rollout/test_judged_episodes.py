"""Verifiers of whole conversations: message lists, the environments' states, and what reaches worker processes."""

import pytest
from support import make_prompt

from dapo_rl.config import EnvSettings, RewardSettings
from dapo_rl.engines.protocol import Completion, Request, SamplingParams
from dapo_rl.envs import Observation, OneTurn, Opening, ToolCall
from dapo_rl.envs.chat_format import Parsed
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.trl_environment import TRLEnvironments
from dapo_rl.rewards import CustomVerifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.trajectory_file import read_trajectories, write_trajectories
from dapo_rl.types import Trajectory


class Counter:
    """An environment of TRL without a reward of its own."""

    def reset(self, **row):
        self.counter = 0
        return " Count to 3."

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: What to add.
        """
        self.counter += step
        return self.counter


class Calls:
    """A chat format in which a turn of the token 9 is a text, and any other a call with that number."""

    supports_tools = True

    def __init__(self, forks=False):
        self.forks = forks

    def prompt(self, messages, tools=()):
        return [50 + len(messages)]

    def suffix(self, before, messages, tools=()):
        return None if self.forks else [50] * len(messages)

    def parse(self, turn_ids, tools=()):
        if turn_ids == [9]:
            return Parsed("done")
        return Parsed("", (ToolCall("increment", {"step": turn_ids[0]}),))


class Caller:
    """Sample i adds i + 1, twice; then it is done. With `endless`, it never is."""

    version = 0

    def __init__(self, endless=False):
        self.requests, self.endless, self.said = [], endless, {}

    def submit(self, request):
        self.requests.append(request)

    def poll(self, timeout_s=None):
        requests, self.requests = self.requests, []
        return [
            Completion(request.id, begun.index, self._turn(begun))
            for request in requests
            for begun in (*request.partial, *map(Trajectory.nothing, request.starting))
        ]

    def _turn(self, begun):
        turn = self.said[begun.index] = self.said.get(begun.index, 0) + 1
        token = begun.index + 1 if turn < 3 or self.endless else 9
        return begun.then([token], [-0.5], 0).replace(text="said", finish_reason="stop")


def play(verifier, forks=False, endless=False, factory=Counter, **settings):
    """A group of two episodes that the verifier judges."""
    given = EnvSettings(name="x:y", **settings)
    engine = Caller(endless)
    with EnvironmentPool(TRLEnvironments(factory), given) as pool:
        conversations = Conversations(pool, Calls(forks), given, max_new_tokens=100, context=200, rewards=False)
        episodes = Episodes(
            engine,
            OneTurn(verifier),
            lambda draw, prompt, version: Request(f"draw-{draw}", prompt.token_ids, 2, SamplingParams(100), seed=draw),
            conversations=conversations,
        )
        episodes.submitted = True
        episodes.start(0, make_prompt("p", "Go.", answer=None))
        done = []
        while len(episodes):
            if episodes.generating:
                episodes.poll()
            done += episodes.finish(judge_all=not episodes.generating)
    (group,) = done
    return group


def assistant(step, number):
    call = {
        "id": f"call_{number}_0",
        "type": "function",
        "function": {"name": "increment", "arguments": {"step": step}},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(value, number):
    return {"role": "tool", "name": "increment", "content": str(value), "tool_call_id": f"call_{number}_0"}


def conversation(step):
    return [
        assistant(step, 1), result(step, 1), assistant(step, 2), result(2 * step, 2),
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip


def expecting(prompts, completions):
    """A reward function that checks in its worker what it gets, and returns what is wrong as an exception."""
    expected = prompts, completions

    def reward(prompts, completions, environments):
        assert (prompts, completions) == expected, (prompts, completions)
        return [float(environment.counter) for environment in environments]

    return reward


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_with_trl_s_signature_gets_whole_conversations_and_environments(workers, forks):
    """Also where every turn begins another trajectory, because the template rewrites history."""
    opening = [{"role": "user", "content": "Go. Count to 3."}]
    function = expecting([opening, opening], [conversation(1), conversation(2)])
    settings = RewardSettings(workers=workers)
    with VerifierPool(CustomVerifier(function, settings), settings) as verifier:
        group = play(verifier, forks)
    assert [(verdict.status, verdict.detail) for verdict in group.verdicts] == [("correct", "")] * 2
    assert [verdict.score for verdict in group.verdicts] == [2.0, 4.0]
    assert len(group.forks) == (4 if forks else 0)
    assert all(not sample.episode for sample in group.samples), "what was for the verifier is not kept"


def test_an_episode_that_a_limit_ends_has_its_state():
    seen = []

    def reward(completions, environments):
        seen.extend(environment.counter for environment in environments)
        return [0.0 for _ in completions]

    group = play(CustomVerifier(reward, RewardSettings()), endless=True, max_turns=2)
    assert [sample.finish_reason for sample in group.samples] == ["turns", "turns"]
    assert seen == [2, 4]


def test_a_function_with_verl_s_signature_gets_the_last_text():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append(solution_str)
        return 1.0

    settings = RewardSettings()
    play(CustomVerifier(compute_score, settings))
    assert seen == ["done", "done"]


def test_what_a_function_changes_stays_its_own():
    def spoil(prompts, completions):
        for messages in (*prompts, *completions):
            for message in messages:
                message.clear()
        return [0.0 for _ in completions]

    group = play(CustomVerifier(spoil, RewardSettings()))
    assert list(group.samples[0].messages) == conversation(1)


def test_messages_without_an_episode_are_completions():
    seen = []

    def reward(prompts, completions):
        seen.append((prompts, completions))
        return [0.0]

    said = ({"role": "assistant", "content": "7"}, {"role": "user", "content": "no"})
    sample = Trajectory((1,), (-0.1,), "7", "stop", messages=said)
    CustomVerifier(reward, RewardSettings())(make_prompt("p", "Go."), [sample])
    assert seen == [([[{"role": "user", "content": "Go."}]], [list(said)])]


def test_the_environments_are_missing_without_an_environment():
    def reward(completions, environments):
        return [0.0 for _ in completions]

    sample = Trajectory((1,), (-0.1,), "7", "stop")
    (verdict,) = CustomVerifier(reward, RewardSettings())(make_prompt("p"), [sample])
    assert "it needs 'environments'" in verdict.detail


def test_an_episode_survives_a_checkpoint(tmp_path):
    episode = {"messages": [{"role": "user", "content": "Go \ud800"}], "opening": 1, "state": {"board": [[1, None]]}}
    samples = [
        Trajectory((1,), (-0.1,), "7", "stop", episode=episode),
        Trajectory((1,), (-0.1,), "8", "stop"),
    ]
    write_trajectories(tmp_path, samples)
    assert read_trajectories(tmp_path, 10, 10) == samples


class Elsewhere:
    """An agent that begins a second conversation."""

    def open(self, prompt, seed):
        return Opening(({"role": "user", "content": "first"},))

    def step(self, turn):
        if turn.number == 2:
            return 0.0
        return Observation(conversation=Opening(({"role": "user", "content": "second"},)))


def test_an_agent_that_began_another_conversation_is_judged_by_its_last_one():
    seen = []

    def reward(prompts, completions):
        seen.append((prompts[0], completions[0]))
        return [0.0 for _ in completions]

    class Factory:
        environment = Elsewhere

        def __call__(self):
            return Elsewhere()

    given = EnvSettings(name="x:y")
    with EnvironmentPool(Factory(), given) as pool:
        conversations = Conversations(pool, Calls(), given, max_new_tokens=100, context=200)
        episodes = Episodes(
            Caller(),
            OneTurn(CustomVerifier(reward, RewardSettings())),
            lambda draw, prompt, version: Request(f"draw-{draw}", prompt.token_ids, 2, SamplingParams(100), seed=draw),
            conversations=conversations,
        )
        episodes.submitted = True
        episodes.start(0, make_prompt("p"))
        while len(episodes):
            if episodes.generating:
                episodes.poll()
            list(episodes.finish(judge_all=not episodes.generating))
    assert seen == [([{"role": "user", "content": "second"}], [assistant(1, 2)])]
