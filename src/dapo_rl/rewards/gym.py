"""The scorers of reasoning-gym, for prompts from its data sets."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_rl.base.quote import describe
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.answers import extract_answer
from dapo_rl.rewards.inert_python import is_inert_python
from dapo_rl.types import Prompt, Trajectory, Verdict

FULL_MARKS = 1.0
SOURCE_PREFIX = "reasoning_gym:"
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")


class GymVerifier:
    """Scores with the data set that generated the prompt. Correct means full marks, or at least `reward.threshold`.

    Scorers give partial marks to an answer that contains the right one among others.

    The answer is the last `Answer:` line, else the content of `<answer>…</answer>`, else the whole response.
    """

    per_sample = True
    text_only = True

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings

    def warm_up(self) -> None:
        import reasoning_gym  # noqa: F401

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Checks before a run starts that the prompts are from reasoning-gym."""
        for prompt in prompts:
            if not prompt.data_source.startswith(SOURCE_PREFIX):
                raise UserError(
                    f"prompt {prompt.id}: reward.verifier=gym needs prompts of reasoning-gym, but its data_source is "
                    f"{prompt.data_source!r}; set data.train to reasoning_gym:NAME, or choose another verifier"
                )

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        self.check([prompt])
        scorer, evaluates = _scorer(prompt.data_source.removeprefix(SOURCE_PREFIX), _parameters(prompt))
        entry = {
            "question": prompt.columns.get("question", prompt.text),
            "answer": prompt.columns.get("answer", prompt.answer),
            "metadata": prompt.columns.get("metadata", {}),
        }
        return [self._verify(scorer, evaluates, entry, sample) for sample in samples]

    def _verify(self, scorer: Any, evaluates: bool, entry: dict[str, Any], sample: Trajectory) -> Verdict:
        answer = gym_answer(sample.text)
        wrong = functools.partial(Verdict, self.settings.wrong, False)
        if answer != entry["answer"] and evaluates and not is_inert_python(answer):
            return wrong("wrong", answer, "not evaluated: more than arithmetic or a list")
        try:
            score = float(scorer.score_answer(answer, entry))
        except Exception as error:
            detail = f"{type(scorer).__name__}.score_answer: {describe(error)}"
            return wrong("unparseable" if _works(scorer, entry) else "error", answer, detail)
        if math.isnan(score):
            return wrong("error", answer, f"{type(scorer).__name__} returned the score nan")
        if score >= min(FULL_MARKS if self.settings.threshold is None else self.settings.threshold, FULL_MARKS):
            return Verdict(self.settings.correct, True, "correct", answer)
        return wrong("wrong", answer)


def _works(scorer: Any, entry: dict[str, Any]) -> bool:
    """Whether it can score the entry's own answer. A few scorers raise if they cannot parse a response."""
    try:
        scorer.score_answer(entry["answer"], entry)
    except Exception:
        return False
    return True


def gym_answer(text: str) -> str:
    answer = extract_answer(text)
    if answer is not None:
        return answer
    before, closing, _ = text.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return inside.strip() if closing and opening else text.strip()


@functools.lru_cache(maxsize=256)
def _scorer(name: str, parameters: str) -> tuple[Any, bool]:
    """The data set as a scorer, cached for each set of parameters, and whether it evaluates answers as Python."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"reasoning_gym:{name}: reasoning-gym cannot be imported ({describe(error)}); pip install 'dapo-rl[gym]'"
        ) from None
    if name not in DATASETS:
        hint = did_you_mean(nearest(name, DATASETS), "see reasoning_gym.factory.DATASETS for the names")
        raise UserError(f"reasoning_gym:{name}: no such data set{hint}")
    try:
        dataset = reasoning_gym.create_dataset(name, **{**json.loads(parameters), "size": 1, "seed": 0})
    except Exception as error:
        raise UserError(f"reasoning_gym:{name}: its scorer cannot be created: {describe(error)}") from error
    return dataset, _evaluates(dataset)


def _parameters(prompt: Prompt) -> str:
    parameters = prompt.columns.get("gym_parameters")
    return json.dumps(dict(parameters), sort_keys=True, default=str) if isinstance(parameters, Mapping) else "{}"


def _evaluates(dataset: Any) -> bool:
    """Whether the scorer evaluates the answer as Python, as some do to parse a list or an expression."""
    try:
        return _EVALUATES.search(inspect.getsource(dataset.score_answer)) is not None
    except (OSError, TypeError):
        return True
