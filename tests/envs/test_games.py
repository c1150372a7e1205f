"""The embedded environments: `guess` and `calculator`."""

import pytest
from support import make_prompt

from dapo_rl import Config
from dapo_rl.envs import AssistantTurn, Observation
from dapo_rl.envs.build import build_environment, gives_rewards
from dapo_rl.envs.guess import Guess
from dapo_rl.envs.gymnasium_env import Gymnasium
from dapo_rl.envs.inline_calculator import InlineCalculator
from dapo_rl.errors import UserError


def play(number, *guesses, **options):
    """A game for a number that the seed is searched for."""
    for seed in range(1000):
        game = Guess(**options)
        game.open(make_prompt("p"), seed)
        if game._number == number:
            break
    said = [game.step(AssistantTurn(guess, number=i)) for i, guess in enumerate(guesses, start=1)]
    return said


def test_halving_finds_every_number():
    for number in range(1, 8):
        low, high = 0, 8
        game = Guess()
        seed = next(s for s in range(1000) if (game.open(make_prompt("p"), s), game._number)[1] == number)
        game.open(make_prompt("p"), seed)
        for turn in range(1, 4):
            guess = (low + high) // 2
            said = game.step(AssistantTurn(f"Answer: {guess}", number=turn))
            if said.done:
                break
            assert said.text == f"{guess}{'+' if number > guess else '-'}=?"
            low, high = (guess, high) if number > guess else (low, guess)
        assert (said.reward, said.correct) == (1.0, True)


def test_the_last_guess_and_one_that_is_none_end_the_game():
    assert play(3, "Answer: 9", "4-1=3\nAnswer: 3") == [
        Observation("9-=?"),
        Observation(reward=1.0, done=True, correct=True),
    ]
    assert play(3, "Answer: 9", "Answer: 8", guesses=2)[-1] == Observation(done=True, correct=False)
    for nonsense in ("", "3", "Answer: -3", "Answer: 3 or 4", "Answer: ³"):
        assert play(3, nonsense) == [Observation(done=True, correct=False)]


def test_a_seed_gives_the_same_number():
    games = [Guess(), Guess()]
    assert [game.open(make_prompt("p"), 7) for game in games] == ["0+=?\n"] * 2
    assert games[0]._number == games[1]._number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3+8=", Observation("11\n", inline=True, tool_calls=1)),
        ("3+8=11\n11-20=", Observation("-9\n", inline=True, tool_calls=1)),
        ("3+=", Observation("?\n", inline=True, tool_calls=1, tool_errors=1)),
        ("__import__('os')=", Observation("?\n", inline=True, tool_calls=1, tool_errors=1)),
        ("Answer: 11", Observation(done=True)),
        ("", Observation(done=True)),
    ],
)
def test_the_calculator_completes_equations(text, said):
    assert InlineCalculator().step(AssistantTurn(text)) == said


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("textarena:GuessTheNumbr-v0", r"textarena has no game 'GuessTheNumbr-v0'; did you mean textarena:GuessTheN"),
        ("gymnasium:FrozenLaek-v1", r"env\.name: gymnasium:FrozenLaek-v1 cannot be made"),
    ],
)
def test_a_wrong_name_is_found_before_the_run_begins(name, line):
    pytest.importorskip(name.partition(":")[0])
    with pytest.raises(UserError, match=line):
        build_environment(Config.load("demo", [f"env.name={name}"]))


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("up", 0), ("Up left", 1), ("I go up left.", 1), ("left up, then", 2), ("2", 2),
        ("up or down", None), ("up left or up", None), ("upward", None),
    ],
)  # fmt: skip
def test_a_name_inside_a_longer_one_is_not_meant(text, moved):
    pytest.importorskip("gymnasium")
    game = Gymnasium("FrozenLake-v1", actions=["up", "up left", "left up", "down"])
    assert game._action_of(text) == moved


def test_a_limit_on_steps_ends_the_episode():
    pytest.importorskip("gymnasium")
    game = Gymnasium("FrozenLake-v1", make={"max_episode_steps": 2, "is_slippery": False})
    game.open(make_prompt("p"), 0)
    assert [game.step(AssistantTurn("0")).done for _ in range(2)] == [False, True], "at the wall, but not in a hole"


class WithoutRewards:
    rewards = False

    def step(self, turn):
        return 0.0


class Counter:
    """As TRL's environments, without `get_reward`."""

    def reset(self, **row):
        return "Count."


class RewardedCounter(Counter):
    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ("name", "gives"),
    [
        ("guess", True), ("calculator", False), ("gymnasium:FrozenLake-v1", True),
        ("WithoutRewards", False), ("Counter", False), ("RewardedCounter", True),
    ],
)  # fmt: skip
def test_who_gives_the_rewards_of_an_environment(name, gives):
    if name[0].isupper():
        name = f"{__file__}:{name}"
    assert gives_rewards(Config.build({"env.name": name})) is gives
