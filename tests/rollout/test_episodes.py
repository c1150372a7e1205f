"""Episodes: one turn that a verifier judges, or several with an environment, each moving on its own."""

import time
from concurrent.futures import Future
from threading import Timer

import numpy as np
import pytest
from support import TextVerifier, make_prompt, make_sample, tokenizer

from dapo_rl.config import Config, EnvSettings
from dapo_rl.engines.protocol import Completion, Request, SamplingParams
from dapo_rl.envs import Observation, OneTurn, Opening
from dapo_rl.envs.agent import AgentEnvironment
from dapo_rl.envs.build import Factory
from dapo_rl.envs.chat_format import Parsed
from dapo_rl.envs.compare_messages import same_messages
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.protocol import ToolCall, tool_schema
from dapo_rl.rollout.build_conversations import build_conversations
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.saved_episodes import SavedFlight
from dapo_rl.types import Trajectory


class GuessingGame:
    """Says higher or lower until the number is right."""

    deterministic = True

    def open(self, prompt, seed):
        self.number = int(prompt.answer)

    def step(self, turn):
        if turn.text == str(self.number):
            return 1.0
        return "higher" if self.number > int(turn.text) else "lower"


class Letters:
    """A chat format with a token per letter, and no template."""

    supports_tools = False

    def prompt(self, messages, tools=()):
        return [ord(letter) for message in messages for letter in message["content"]] or [1]

    def suffix(self, before, messages, tools=()):
        return self.prompt(messages)

    def parse(self, turn_ids, tools=()):
        return Parsed("".join(map(str, turn_ids)))


class Guesser:
    """An engine whose samples guess: sample i says i in its first turn, and then one more or one less each turn."""

    version = 3

    def __init__(self, cut=False):
        self.requests, self.cut = [], cut

    def submit(self, request):
        self.requests.append(request)

    def poll(self, timeout_s=None):
        requests, self.requests = self.requests, []
        return [
            Completion(request.id, begun.index, self._turn(begun))
            for request in requests
            for begun in (*request.partial, *map(Trajectory.nothing, request.starting))
        ]

    def take_unfinished(self):
        requests, self.requests = self.requests, []
        return requests

    def _turn(self, begun):
        guess = begun.index
        if len(begun.token_ids):
            said = begun.token_ids[begun.turns[-1].start : begun.turns[-1].end].tolist()
            last = begun.token_ids[begun.turns[-2].start].item()
            guess = last + 1 if said == letters("higher") else last - 1
        done = begun.then([guess], [-0.5], self.version)
        return done.replace(text=str(guess), finish_reason="length" if self.cut else "stop")


def letters(text):
    return [ord(letter) for letter in text]


def request(draw, prompt, version=0):
    return Request(f"draw-{draw}", prompt.token_ids, 4, SamplingParams(100), seed=draw)


def conversations(pool, **options):
    settings = {name: options.pop(name) for name in ("max_turns", "max_turn_tokens") if name in options}
    limits = {"max_new_tokens": 100, "context": 200} | options
    return Conversations(pool, Letters(), EnvSettings(name="x:y", **settings), **limits)


def episodes_of(pool, engine=None, judge=None, waits=True, **options):
    engine = engine or Guesser()
    episodes = Episodes(engine, judge, request, waits=waits, conversations=conversations(pool, **options))
    episodes.submitted = True
    return episodes


def finish(episodes):
    done = []
    while len(episodes):
        if episodes.generating:
            episodes.poll()
        done += episodes.finish(judge_all=not episodes.generating)
    return done


@pytest.fixture(scope="module")
def game():
    with EnvironmentPool(GuessingGame, EnvSettings(name="x:y")) as pool:
        yield pool


def play(pool, pause_at=None, waits=True):
    """Four guessers of the number 2."""
    episodes = episodes_of(pool, waits=waits)
    episodes.start(0, make_prompt("p", answer="2"))
    done = []
    for turn in range(12):
        if turn == pause_at:
            episodes.drain()
            assert not episodes.pause()
            episodes.resume()
        if episodes.generating:
            episodes.poll()
        done += episodes.finish(judge_all=not episodes.generating)
    (group,) = done
    return group


def parts(group):
    """What of a group does not depend on time."""
    samples = [s.replace(turns=[(t.start, t.end, t.author, t.reward) for t in s.turns]) for s in group.samples]
    return [(s.columns, s.turns, s.messages, s.text, s.finish_reason) for s in samples], group.verdicts


def same(first, second):
    (mine, verdicts), (others, other_verdicts) = parts(first), parts(second)
    for (columns, *rest), (other_columns, *other_rest) in zip(mine, others, strict=True):
        assert rest == other_rest
        assert all(np.array_equal(columns[name], other_columns[name]) for name in columns)
    assert verdicts == other_verdicts


def test_a_verifier_ends_with_the_first_turn():
    samples = [make_sample(text="right"), make_sample(text="wrong")]
    answers = OneTurn(TextVerifier()).step(make_prompt("p"), samples)
    assert answers.done()
    assert [verdict.score for verdict in answers.result()] == [1.0, -1.0]


def test_episodes_of_several_turns_end_one_by_one(game):
    group = play(game)
    assert [sample.text for sample in group.samples] == ["2", "2", "2", "2"]
    assert [verdict.correct for verdict in group.verdicts] == [True] * 4
    first = group.samples[0]
    said = letters("higher")
    assert first.token_ids.tolist() == [0, *said, 1, *said, 2]
    assert first.mask.tolist() == [True, *[False] * 6, True, *[False] * 6, True]
    assert [(turn.start, turn.end, turn.author) for turn in first.turns] == [
        (0, 1, "policy"), (1, 7, "environment"), (7, 8, "policy"), (8, 14, "environment"), (14, 15, "policy"),
    ]  # fmt: skip
    assert [message["content"] for message in first.messages] == ["0", "higher", "1", "higher", "2"]
    assert first.turns[-1].reward == 1.0
    assert [sample.written for sample in group.samples] == [3, 2, 1, 2]
    assert group.tokens == 8, "the environment's tokens do not count"
    assert game.open_episodes == 0


@pytest.mark.parametrize("pause_at", range(6))
def test_episodes_that_are_paused_with_the_engine_or_the_environment_continue(game, pause_at):
    same(play(game, pause_at), play(game))


def test_answers_that_are_read_when_they_are_ready_give_the_same_episodes(game):
    same(play(game, waits=False), play(game))


def test_a_limit_on_turns_ends_an_episode(game):
    episodes = episodes_of(game, max_turns=2)
    episodes.start(0, make_prompt("p", answer="2"))
    (group,) = finish(episodes)
    assert [sample.finish_reason for sample in group.samples] == ["turns", "stop", "stop", "stop"]
    assert [sample.truncated for sample in group.samples] == [True, False, False, False]
    assert [verdict.correct for verdict in group.verdicts] == [False, True, True, True]


def test_a_turn_that_is_cut_off_ends_an_episode(game):
    episodes = episodes_of(game, Guesser(cut=True))
    episodes.start(0, make_prompt("p", answer="2"))
    (group,) = finish(episodes)
    assert [sample.finish_reason for sample in group.samples] == ["length"] * 4
    assert [sample.written for sample in group.samples] == [1] * 4


def test_for_benchmarks_a_turn_that_is_cut_off_goes_on(game):
    episodes = episodes_of(game, Guesser(cut=True))
    episodes.conversations.cut_turns_continue = True
    episodes.start(0, make_prompt(0, answer="2"))
    (group,) = finish(episodes)
    assert [sample.finish_reason for sample in group.samples] == ["stop"] * 4
    assert [sample.written for sample in group.samples] == [3, 2, 1, 2]


def test_a_group_is_there_once_however_many_of_its_episodes_wait(game):
    episodes = episodes_of(game)
    for draw in (0, 1):
        episodes.start(draw, make_prompt(draw, answer="2"))
    seen = set()
    while len(episodes):
        assert [flight.draw for flight in episodes] == sorted({flight.draw for flight in episodes})
        seen.add(len(episodes))
        if episodes.generating:
            episodes.poll()
        list(episodes.finish(judge_all=not episodes.generating))
    assert 2 in seen


@pytest.mark.parametrize("waits", [True, False])
def test_a_group_that_the_last_answer_ends_is_judged_with_the_others(game, waits):
    """Otherwise it would be in no step: neither unfinished nor judged."""
    episodes = episodes_of(game, waits=waits, max_turns=1)
    episodes.start(0, make_prompt("p", answer="2"))
    list(episodes.finish(judge_all=True))  # the environments are open
    episodes.poll()
    episodes.drain()
    done = []
    for _ in range(2):  # answers to the turns, and the last rewards
        episodes._pending.polls += 100
        for step in episodes._pending.environments.values():
            step.answers.result()
        done += episodes.finish(judge_all=True)
    assert [group.draw for group in done] == [0]
    assert len(episodes) == episodes.judging == 0


class LateVerifier:
    """Gives its verdicts after a while."""

    def submit(self, prompt, samples):
        verdicts = TextVerifier()(prompt, samples)
        future = Future()
        Timer(0.3, lambda: future.set_result(verdicts)).start()
        return future


@pytest.mark.parametrize("waits", [True, False])
def test_verdicts_are_waited_for_where_all_are_judged(waits):
    episodes = Episodes(Guesser(), OneTurn(LateVerifier()), request, waits=waits)
    episodes.submitted = True
    for draw in (0, 1):
        episodes.start(draw, make_prompt(draw))
    episodes.poll()
    assert list(episodes.finish(judge_all=False)) == []
    with pytest.raises(KeyboardInterrupt):
        list(episodes.finish(judge_all=True, check=interrupt))
    assert episodes.judging == 2
    assert [group.draw for group in episodes.finish(judge_all=True)] == [0, 1]
    assert len(episodes) == 0


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(("limit", "written"), [({"max_new_tokens": 2}, 2), ({"context": 8}, 2), ({"context": 7}, 1)])
def test_what_does_not_fit_is_not_appended(game, limit, written):
    """An observation has six tokens."""
    prompt = make_prompt("p", answer="9")
    if "context" in limit:
        limit = {"context": limit["context"] + len(prompt.text)}
    episodes = episodes_of(game, **limit)
    episodes.start(0, prompt)
    (group,) = finish(episodes)
    assert {sample.finish_reason for sample in group.samples} == {"length"}
    assert [sample.written for sample in group.samples] == [written] * 4
    assert all(sample.mask[-1] for sample in group.samples)


class Slow:
    """Waits as long as the answer of the prompt says in its first step."""

    def open(self, prompt, seed):
        self.seconds = float(prompt.answer)

    def step(self, turn):
        if turn.number == 2:
            return 1.0
        time.sleep(self.seconds)
        return "higher"


def test_an_episode_does_not_wait_for_others():
    with EnvironmentPool(Slow, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool, waits=False)
        episodes.start(0, make_prompt("slow", answer="5"))
        episodes.start(1, make_prompt("fast", answer="0"))
        started, done = time.monotonic(), []
        while not done:
            if episodes.generating:
                episodes.poll()
            done += episodes.finish(judge_all=not episodes.generating)
        assert [group.draw for group in done] == [1]
        assert time.monotonic() - started < 4
        episodes.remove(lambda flight: True)


class Broken:
    def step(self, turn):
        raise RuntimeError("no more")


def test_an_environment_that_fails_ends_its_own_episode():
    class Sometimes:
        def open(self, prompt, seed):
            pass

        def step(self, turn):
            if turn.text == "1":
                raise RuntimeError("no more")
            return 1.0 if turn.text == "0" else 0.0

    with EnvironmentPool(Sometimes, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool)
        episodes.start(0, make_prompt("p"))
        (group,) = finish(episodes)
    assert [verdict.status for verdict in group.verdicts] == ["correct", "error", "wrong", "wrong"]
    assert "RuntimeError: no more" in group.verdicts[1].detail


@pytest.mark.parametrize(("threshold", "correct"), [({}, False), ({"reward.threshold": 0}, True)])
def test_an_episode_is_correct_with_a_reward_above_the_threshold(threshold, correct):
    class Partly:
        def step(self, turn):
            return 0.3

    config = Config.build({"data.chat_template": "never", **threshold})
    with EnvironmentPool(Partly, EnvSettings(name="x:y")) as pool:
        sizes = {"context": 200, "max_new_tokens": 100, "vocabulary": 256}
        built = build_conversations(config, pool, tokenizer(), **sizes, rewards=True)
        episodes = Episodes(Guesser(), None, request, waits=True, conversations=built)
        episodes.submitted = True
        episodes.start(0, make_prompt("p"))
        (group,) = finish(episodes)
    assert [(verdict.score, verdict.correct) for verdict in group.verdicts] == [(0.3, correct)] * 4


class Rewriter:
    """Tells the whole conversation before each turn, and forgets the first turn."""

    def open(self, prompt, seed):
        return Opening(({"role": "user", "content": "ab"},))

    def step(self, turn):
        if turn.number == 3:
            return Observation(reward=0.5, done=True)
        if turn.number == 1:
            messages = ({"role": "user", "content": "ab"}, turn.message, {"role": "user", "content": "higher"})
        else:
            messages = ({"role": "user", "content": "abc"},)
        return Observation(conversation=Opening(messages))


def test_a_conversation_that_is_rewritten_forks():
    with EnvironmentPool(Rewriter, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool)
        episodes.start(0, make_prompt("p"))
        (group,) = finish(episodes)
    assert [fork.index for fork in group.forks] == [0, 1, 2, 3]
    before, after = group.forks[1], group.samples[1]
    assert before.prompt_ids.tolist() == letters("ab")
    assert before.token_ids.tolist() == [1, *letters("higher"), 2]
    assert after.prompt_ids.tolist() == letters("abc")
    assert after.token_ids.tolist() == [1]
    assert after.scalars["forks"] == 1
    assert group.tokens == 4 * 3
    assert [verdict.score for verdict in group.verdicts] == [0.5] * 4


def test_a_fork_without_room_for_a_turn_is_undone():
    """The trajectories of an episode share `max_new_tokens`: two turns of one token use it up."""
    with EnvironmentPool(Rewriter, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool, max_new_tokens=2)
        conversation = episodes.start(0, make_prompt("p")).conversations[1]
        (group,) = finish(episodes)
    assert group.forks == ()
    assert [sample.written for sample in group.samples] == [2] * 4
    assert {sample.finish_reason for sample in group.samples} == {"length"}
    assert {sample.scalars["forks"] for sample in group.samples} == {0}
    judged = conversation.for_verifier()["messages"]
    assert [message["content"] for message in judged] == ["ab", "1", "higher", "2"], "what the policy saw and said"


def test_an_episode_that_fails_in_a_fork_has_its_tokens_once():
    class TooLong(Rewriter):
        def step(self, turn):
            return Observation(conversation=Opening(({"role": "user", "content": "a" * 300},)))

    with EnvironmentPool(TooLong, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool)
        episodes.start(0, make_prompt("p"))
        (group,) = finish(episodes)
    assert "too_long: the prompt has 300 tokens" in group.verdicts[0].detail
    assert group.tokens == 4


class Calls(Letters):
    """Each turn has a tool call, and a malformed one."""

    def parse(self, turn_ids, tools=()):
        return Parsed("", (ToolCall("f", {"x": 1}), ToolCall("", error="not valid JSON", raw="{oops")))


async def answers_calls(task, client):
    """An agent that sends back what it gets."""
    messages = list(task["messages"])
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[tool_schema("f", "", {})])
        said = reply.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "higher"} for call in said.tool_calls]
        messages += [said.model_dump(exclude_none=True), *results]
    return float(said.content == "{oops")


@pytest.mark.slow
def test_malformed_tool_calls_of_agents_are_counted_and_the_trajectory_continues():
    settings = EnvSettings(name="x:y")
    with EnvironmentPool(Factory(AgentEnvironment, answers_calls), settings) as pool:
        chats = Conversations(pool, Calls(), settings, max_new_tokens=100, context=200)
        episodes = Episodes(Guesser(), None, request, waits=True, conversations=chats)
        episodes.submitted = True
        episodes.start(0, make_prompt("p"))
        (group,) = finish(episodes)
    assert [verdict.score for verdict in group.verdicts] == [1.0] * 4
    assert group.forks == ()
    sample = group.samples[1]
    assert sample.token_ids.tolist() == [1, *letters("higher"), 2]
    assert (sample.scalars["tool_calls"], sample.scalars["tool_errors"]) == (4, 2)
    said, result, _ = sample.messages
    assert said["content"] == "{oops"
    assert [call["id"] for call in said["tool_calls"]] == [result["tool_call_id"]]


def test_messages_are_the_same_however_an_agent_writes_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    other = {"function": {"name": "f", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert same_messages([said], [{"role": "assistant", "content": "", "tool_calls": [other]}])
    assert not same_messages([said], [{"role": "assistant", "content": "", "tool_calls": []}])
    assert not same_messages([said], [said, said])


def restored(pool, episodes):
    """The same groups in new episodes, as after a kill."""
    saved = []
    for flight in episodes.unfinished:
        partial = {s.index: s for r in flight.turns.values() for s in r.partial}
        begun = [
            partial.get(c.index, c.trajectory).replace(turns=c.trajectory.turns, prompt_ids=c.trajectory.prompt_ids)
            for c in flight.conversations
            if c.verdict is None and len(c.trajectory.token_ids)
        ]
        saved.append(SavedFlight(flight, tuple(begun)))
    again = episodes_of(pool)
    again.submitted = False
    for each in saved:
        fresh = again.conversations.new(each.flight.request)
        for conversation, new in zip(each.flight.conversations, fresh, strict=True):
            if conversation.verdict is None:
                for name in type(new).__slots__:
                    setattr(conversation, name, getattr(new, name))
    return again, again.restore(saved, episodes.order, episodes.steps)


@pytest.mark.parametrize("at", range(6))
def test_deterministic_environments_are_replayed(game, at):
    episodes = episodes_of(game)
    episodes.start(0, make_prompt("p", answer="2"))
    done = []
    for _ in range(at):
        if episodes.generating:
            episodes.poll()
        done += episodes.finish(judge_all=not episodes.generating)
    if not len(episodes):
        return
    episodes.drain()
    again, lost = restored(game, episodes)
    assert sum(lost) == 0
    again.resume()
    (group,) = finish(again)
    same(group, play(game))


def test_other_environments_start_again():
    class Forgetful(GuessingGame):
        deterministic = False

    with EnvironmentPool(Forgetful, EnvSettings(name="x:y")) as pool:
        episodes = episodes_of(pool)
        episodes.start(0, make_prompt("p", answer="2"))
        for _ in range(2):
            if episodes.generating:
                episodes.poll()
            list(episodes.finish(judge_all=not episodes.generating))
        episodes.drain()
        again, lost = restored(pool, episodes)
        assert sum(lost) > 0
        again.resume()
        (group,) = finish(again)
        same(group, play(pool))


def test_turns_and_observations_are_one_sample_with_a_mask():
    """What the engine gets for the next turn: all tokens so far, those of the environment without a gradient."""

    first = make_sample(3, version=4)
    observed = np.arange(40, 42, dtype=np.int32)
    next_turn = first.then_observed(observed)
    assert next_turn.mask.tolist() == [True] * 3 + [False] * 2
    after = next_turn.then(np.int32([9]), np.float32([-1]), 5)
    assert after.mask.tolist() == [True] * 3 + [False] * 2 + [True]
    assert after.versions.tolist() == [4] * 5 + [5]
