"""Environments of Gymnasium and games of TextArena, played with the packages themselves."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from dapo_rl.envs.gymnasium_env import Gymnasium
from dapo_rl.envs.protocol import AssistantTurn, Observation
from dapo_rl.envs.textarena_env import TextArena
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

PROMPT = Prompt("p", "", [1], messages=({"role": "user", "content": "Play."},))
LAKE = ["left", "down", "right", "up"]


def said(text: str) -> AssistantTurn:
    return AssistantTurn(text)


class Parrot(gymnasium.Env[str, str]):
    """Wants the observation back; counts down from `lives`."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(20)

    def __init__(self, lives: int = 2) -> None:
        self.lives = lives

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = f"{(options or {}).get('word', 'w')}{self.np_random.integers(10**6)}"
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.lives -= 1
        right = action == self.word
        return "again", float(right), right, self.lives == 0, {}


gymnasium.register("Parrot-v0", Parrot)


def test_text_spaces_with_a_seed_and_options() -> None:
    first, second, other = (Gymnasium("Parrot-v0", make={"lives": 3}, reset={"word": "x"}) for _ in range(3))
    content = first.open(PROMPT, 5).messages[-1]["content"]
    assert content == second.open(PROMPT, 5).messages[-1]["content"] != other.open(PROMPT, 6).messages[-1]["content"]
    word = content.removeprefix("Play.\n\n")
    assert word.startswith("x")
    assert first.step(said("no")) == Observation("again", tool_calls=1)
    assert first.step(said(f" {word}\n")) == Observation("again", 1.0, done=True, tool_calls=1)
    assert second.step(said("y" * 21)).tool_errors == 1
    assert [second.step(said("no")).done for _ in range(3)] == [False, False, True]


def lake(**options: Any) -> Gymnasium:
    env = Gymnasium("FrozenLake-v1", make={"is_slippery": False}, **options)
    env.open(PROMPT, 0)
    return env


def test_frozen_lake_is_crossed_by_names_and_numbers() -> None:
    env = lake(actions=LAKE)
    path = ["down", "I go DOWN.", "2", "down", "Right", "right"]
    seen = [env.step(said(text)) for text in path]
    assert [int(step.text) for step in seen] == [4, 8, 9, 13, 14, 15]
    assert [step.reward for step in seen] == [0, 0, 0, 0, 0, 1]
    assert [step.done for step in seen] == [False] * 5 + [True]


@pytest.mark.parametrize("text", ["", "jump", "left or right", "7", "-1", "1.5", "9" * 5000])
def test_what_is_no_action_is_answered_and_changes_nothing(text: str) -> None:
    env = lake(actions=LAKE)
    assert env.step(said(text)).text == "not a valid action: write one of left, down, right, up"
    assert env.step(said("1")).text == "4"
    assert lake().step(said("fly")).text == "not a valid action: write a number from 0 to 3"


def test_render_and_structured_observations() -> None:
    drawn = Gymnasium("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3", render=True)
    assert "+---------+" in drawn.open(PROMPT, 1).messages[-1]["content"]
    cards = Gymnasium("Blackjack-v1").open(PROMPT, 1).messages[-1]["content"].removeprefix("Play.\n\n")
    assert len(listed(cards)) == 3


def listed(text: str) -> list[int]:

    values = json.loads(text)
    assert isinstance(values, list)
    return values


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("NoSuch-v0", {}, "gymnasium:NoSuch-v0 cannot be made"),
        ("Pendulum-v1", {}, r"has actions in Box.*Discrete and Text do"),
        ("FrozenLake-v1", {"actions": ["a"]}, "env.options.actions has 1 names; gymnasium:FrozenLake-v1 has 4"),
        ("FrozenLake-v1", {"make": {"nonsense": 1}}, "cannot be made"),
    ],
)
def test_environments_that_cannot_be_used(name: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        Gymnasium(name, **options)
    assert "\n" not in str(raised.value)


def guess(seed: int, texts: list[str]) -> list[Observation]:
    game = TextArena("GuessTheNumber-v0")
    opening = game.open(PROMPT, seed)
    assert opening.messages[-1]["content"].startswith("Play.\n\nYou are Player 0. You are playing Guess The Number.")
    seen = []
    for text in texts:
        seen.append(game.step(said(text)))
        if seen[-1].done:
            break
    return seen


def bisect(seed: int) -> list[Observation]:
    """Plays by the game's hints alone."""
    game = TextArena("GuessTheNumber-v0")
    game.open(PROMPT, seed)
    low, high, seen = 1, 20, []
    while not seen or not seen[-1].done:
        middle = (low + high) // 2
        seen.append(game.step(said(f"[{middle}]")))
        low, high = (middle + 1, high) if "higher" in seen[-1].text else (low, middle - 1)
    return seen


def test_guess_the_number_is_won_by_its_hints() -> None:
    games = [bisect(seed) for seed in range(8)]
    assert all(game[-1].reward == 1.0 for game in games)
    assert len({len(game) for game in games}) > 1
    assert all(step.reward == 0 and step.text.count("\n") == 0 for game in games for step in game[:-1])
    assert games[3] == bisect(3)


def test_moves_without_brackets_count_and_two_bad_ones_end_the_game() -> None:
    first, second = guess(1, ["no number", "[99]"])
    assert "invalid move" in first.text
    assert (first.tool_errors, first.done, second.done) == (1, False, True)
    assert guess(1, ["5"])[0].tool_errors == 0


@pytest.mark.parametrize("name", ["Mastermind-v0", "FrozenLake-v0", "Minesweeper-v0-small", "TowerOfHanoi-v0"])
def test_other_games_begin_alike_with_the_same_seed(name: str) -> None:
    assert TextArena(name).open(PROMPT, 4) == TextArena(name).open(PROMPT, 4)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("GuessTheNumber-v1", {}, "has no game 'GuessTheNumber-v1'.*textarena:GuessTheNumber-v0"),
        ("TicTacToe-v0", {}, "The number of players has to be 2"),
        ("PublicGoodsGame-v0", {}, "is a game for several players"),
        ("GuessTheNumber-v0", {"nonsense": 1}, "cannot be played here"),
    ],
)
def test_games_that_cannot_be_played(name: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        TextArena(name, **options).open(PROMPT, 0)
    assert "\n" not in str(raised.value)
