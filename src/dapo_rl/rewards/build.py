"""Builds a verifier from a setting, or from the trainer's `reward_funcs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from dapo_rl.base.load import load_function
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.combined import CombinedVerifier
from dapo_rl.rewards.exact import ExactVerifier
from dapo_rl.rewards.gym import GymVerifier
from dapo_rl.rewards.math_rule import MathVerifier
from dapo_rl.rewards.user import SIGNATURES, UserVerifier, signature_of
from dapo_rl.types import Verifier

VERIFIERS: dict[str, Callable[[RewardSettings], Verifier]] = {
    "math": MathVerifier,
    "exact": ExactVerifier,
    "gym": GymVerifier,
}

RewardFunction = str | Callable[..., Any]


def build_verifier(settings: RewardSettings) -> Verifier:
    """The verifier that `reward.verifier` names."""
    name = settings.verifier
    if name in VERIFIERS:
        return VERIFIERS[name](settings)
    if ":" in name:
        return _from_callable(load_function(name), settings)
    hint = did_you_mean(nearest(name, VERIFIERS), "a function is named module:name or file.py:name")
    raise UserError(f"reward.verifier: {name!r} is not one of {', '.join(VERIFIERS)}{hint}")


def as_verifier(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    settings: RewardSettings,
    weights: Sequence[float] | None = None,
) -> Verifier:
    """Turns a verifier's name, a function or its name, a verifier, or a list of these into one verifier."""
    if isinstance(reward_funcs, str):
        return build_verifier(settings.model_copy(update={"verifier": reward_funcs}))
    if callable(reward_funcs):
        return _from_callable(reward_funcs, settings)
    if not isinstance(reward_funcs, Sequence):
        raise UserError(f"reward functions: cannot use a value of type {type(reward_funcs).__name__}; {_EXPECTED}")
    verifiers = [as_verifier(one, settings) for one in reward_funcs]
    return verifiers[0] if len(verifiers) == 1 and weights is None else CombinedVerifier(verifiers, weights)


_EXPECTED = f"give {', '.join(VERIFIERS)}, module:name, file.py:name, or a function {SIGNATURES}"


def _from_callable(function: Callable[..., Any], settings: RewardSettings) -> Verifier:
    if not inspect.isclass(function) and signature_of(function) is None and _is_verifier(function):
        return cast(Verifier, function)
    if inspect.isclass(function):
        raise UserError(f"{function.__name__}: it is a class; give an object of it, or a function {SIGNATURES}")
    return UserVerifier(function, settings)


def _is_verifier(function: Callable[..., Any]) -> bool:
    """Whether an object can be called with a prompt and its samples; a function's parameters must have these names."""
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    return not inspect.isroutine(function) or list(signature.parameters)[:2] == ["prompt", "samples"]
