"""How conversations end that fork, that cannot go on, or whose processes are lost."""

from itertools import count

import pytest
from support import make_prompt

from dapo_rl.config import EnvSettings
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.envs import Observation, Opening
from dapo_rl.envs.chat_format import Parsed
from dapo_rl.envs.host import Host
from dapo_rl.envs.protocol import EpisodeFailure
from dapo_rl.envs.shared_loops import finished
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.in_flight import InFlightGroup
from dapo_rl.rollout.lost_episodes import replay_lost
from dapo_rl.rollout.pending_steps import AllOf, Step

FIRST = ({"role": "user", "content": "one"},)
OTHER = (
    {"role": "user", "content": "another"},
    {"role": "assistant", "content": "?"},
    {"role": "user", "content": "!"},
)


class Tells:
    """Answers each turn with the same observation."""

    deterministic = True
    answer = Observation("more")

    def open(self, prompt, seed):
        return Opening(FIRST)

    def step(self, turn):
        return self.answer


class Here:
    """Environments in the process of the test."""

    deterministic, takes_tokens, has_state, tools = True, False, False, ()

    def __init__(self, answer):
        self.answer, self.keys, self._keys = answer, set(), count()
        self._host = Host(self._make, "tells", False)

    def _make(self):
        environment = Tells()
        environment.answer = self.answer
        return environment

    def answer_all(self, answer):
        for environment in self._host._environments.values():
            environment.answer = answer

    def _call(self, operation, key, *arguments):
        return finished(self._host.end(operation, key, self._host.begin(operation, key, arguments)))

    def new_key(self):
        return f"episode-{next(self._keys)}"

    def open(self, key, prompt, seed):
        self.keys.add(key)
        return self._call("open", key, prompt, seed)

    def step(self, key, turn):
        return self._call("step", key, turn)

    def result(self, key):
        return self._call("result", key)

    def close_episodes(self, keys):
        self.keys.difference_update(keys)


class Letters:
    """A chat format with a token per letter."""

    supports_tools = False

    def prompt(self, messages, tools=()):
        return [ord(letter) for message in messages for letter in message["content"]]

    def suffix(self, before, messages, tools=()):
        return self.prompt(messages)

    def parse(self, turn_ids, tools=()):
        return Parsed("?" * len(turn_ids))


def after_a_turn(answer, **options):
    """The conversations, and one whose first turn has been answered."""
    settings = EnvSettings(name="x:y", max_observation_tokens=options.pop("max_observation_tokens", 2048))
    limits = {"max_new_tokens": 100, "context": 200} | options
    conversations = Conversations(Here(answer), Letters(), settings, **limits)
    request = Request("draw-0", [1], 1, SamplingParams(100), 0)
    (conversation,) = conversations.new(request)
    conversations.opened(conversation, conversations.open(conversation, make_prompt("p")).result())
    answered = conversations.end_turn(conversation, conversation.trajectory.then([7, 8], [-0.5, -0.5], 0))
    last = conversations.answer(conversation, answered.result())
    if last is not None:
        conversations.answer(conversation, last.result())
    return conversations, conversation


@pytest.mark.parametrize("answer", [Observation("no room"), Observation(conversation=Opening(OTHER))])
def test_judges_do_not_see_what_the_policy_could_not_answer(answer):
    _, conversation = after_a_turn(answer, max_new_tokens=2)
    sample = conversation.trajectory
    assert sample.finish_reason == "length"
    assert sample.episode["opening"] == 1
    assert sample.episode["messages"] == [*FIRST, {"role": "assistant", "content": "??"}]
    assert sample.episode["messages"][1:] == list(sample.messages)


@pytest.mark.parametrize("opening", [Opening(OTHER * 100), Opening((*OTHER, {"role": "user", "content": None}))])
def test_a_fork_that_cannot_begin_counts_its_tokens_once(opening):
    _, conversation = after_a_turn(Observation(conversation=opening))
    assert conversation.trajectory.scalars["env_failed"]
    assert conversation.finished_tokens == 2
    assert (conversation.trajectory.written, conversation.forks) == (2, [])


@pytest.mark.parametrize("told", ["prompt_ids", "conversation"])
@pytest.mark.parametrize("continues", [True, False])
def test_tokens_that_the_model_does_not_have_end_the_episode(told, continues):
    ids = (*map(ord, "one"), 7, 8, 500) if continues else (1, 500)
    whole = Observation(prompt_ids=ids) if told == "prompt_ids" else Observation(conversation=Opening((), (), ids))
    _, fine = after_a_turn(whole, vocabulary=501)
    assert fine.verdict is None
    _, conversation = after_a_turn(whole, vocabulary=500)
    assert conversation.verdict.detail == "error: its prompt has the token 500, and the model has those from 0 to 499"


@pytest.mark.parametrize("follows", [True, False])
def test_each_conversation_of_an_agent_has_the_system_prompt(follows):
    """As agents write their own messages, they do not repeat it."""
    turn, more = {"role": "assistant", "content": "??"}, {"role": "user", "content": "more"}
    told = Opening((*FIRST, turn, more) if follows else OTHER)
    _, conversation = after_a_turn(Observation(conversation=told), system="Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}, *told.messages]
    assert len(conversation.forks) == (0 if follows else 1)
    if not follows:
        assert bytes(conversation.trajectory.prompt_ids.tolist()) == b"Be brief.another?!"


@pytest.mark.parametrize(
    "answer",
    [
        Observation(conversation=Opening(OTHER), max_tokens=3),
        Observation(conversation=Opening(OTHER, max_tokens=3)),
        Observation(prompt_ids=(1, 2), max_tokens=3),
    ],
)
def test_an_agent_limits_the_turn_of_a_fork(answer):
    conversations, conversation = after_a_turn(answer)
    assert len(conversation.forks) == 1
    request = conversations.request(conversation, Request("draw-0", [1], 1, SamplingParams(100), 0))
    assert request.params.max_new_tokens == 3


@pytest.mark.parametrize(("most", "goes_on"), [(7, False), (8, True)])
def test_what_is_observed_before_and_after_a_fork_counts_together(most, goes_on):
    conversations, conversation = after_a_turn(Observation("more"), max_observation_tokens=most)
    for answer in (Observation(conversation=Opening(OTHER)), Observation("more")):
        assert conversation.verdict is None
        conversations.pool.answer_all(answer)
        answered = conversations.end_turn(conversation, conversation.trajectory.then([7], [-0.5], 0))
        last = conversations.answer(conversation, answered.result())
        if last is not None:
            conversations.answer(conversation, last.result())
    assert len(conversation.forks) == 1
    assert (conversation.verdict is None) is goes_on


def test_a_replayed_episode_leaves_nothing_of_the_lost_one():
    conversations, conversation = after_a_turn(Observation("more"))
    answered = conversations.end_turn(conversation, conversation.trajectory.then([9], [-0.5], 0))
    lost = EpisodeFailure("lost", "its process ended")
    request = Request("draw-0", [1], 1, SamplingParams(100), 0)
    flight = InFlightGroup(0, make_prompt("p"), 0, request, [None], [conversation])
    before = conversation.key
    for step in (Step(0, flight, AllOf([answered]), conversation), Step(0, flight, AllOf([]), opens=True)):
        ((found,),) = replay_lost(conversations, [step], [[lost]])
        assert found == (Opening(FIRST) if step.opens else Observation("more"))
        assert conversation.key != before
        assert conversations.pool.keys == {conversation.key}
        before = conversation.key
