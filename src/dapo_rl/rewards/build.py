"""Builds a verifier from a setting, or from the trainer's `reward_funcs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from dapo_rl.base.load import load_function, spec_of
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import RewardSettings, WeightedVerifier
from dapo_rl.errors import UserError
from dapo_rl.rewards.combined import CombinedVerifier, unique
from dapo_rl.rewards.custom import SIGNATURES, CustomVerifier, curve_name, signature_of
from dapo_rl.rewards.gym import GymVerifier
from dapo_rl.rewards.math import ExactVerifier, MathVerifier
from dapo_rl.rewards.validation import limit_of
from dapo_rl.types import Verifier

VERIFIERS: dict[str, Callable[[RewardSettings], Verifier]] = {
    "math": MathVerifier,
    "exact": ExactVerifier,
    "gym": GymVerifier,
}

RewardFunction = str | Callable[..., Any]


def build_verifier(settings: RewardSettings) -> Verifier:
    """The verifier that `reward.verifier` names."""
    entries = settings.verifiers
    if not entries:
        raise UserError(
            "reward.verifier=none: nothing gives rewards; name a verifier, or an environment that gives them"
        )
    if isinstance(settings.verifier, str):
        return _build_one(settings.verifier, settings)
    verifiers = [_build_one(entry.verifier, settings, entry.timeout_s) for entry in entries]
    limits = [e.timeout_s or limit_of(v) for e, v in zip(entries, verifiers, strict=True)]
    weights, names = [entry.weight for entry in entries], [curve_name(entry.verifier) for entry in entries]
    return CombinedVerifier(verifiers, weights, names, limits, settings.timeout_s)


def as_verifier(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    settings: RewardSettings,
    weights: Sequence[float] | None = None,
) -> Verifier:
    """Turns a verifier's name, a function or its name, a verifier, or a list of these into one verifier."""
    functions = _as_list(reward_funcs)
    for index, function in enumerate(functions):
        if any(function is other or (isinstance(function, str) and function == other) for other in functions[:index]):
            raise UserError(f"reward functions: {curve_name(function)} appears twice; give it once, with one weight")
    verifiers = [_build_one(f, settings) if isinstance(f, str) else _from_callable(f, settings) for f in functions]
    if len(verifiers) == 1 and weights is None:
        return verifiers[0]
    return CombinedVerifier(verifiers, weights, [curve_name(f) for f in functions], timeout_s=settings.timeout_s)


def recorded_verifier(
    reward_funcs: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
) -> str | tuple[WeightedVerifier, ...]:
    """What `reward.verifier` says of the trainer's `reward_funcs` in the files of a run."""
    names = unique([each if isinstance(each, str) else spec_of(each) for each in _as_list(reward_funcs)])
    if len(names) == 1 and weights is None:
        return names[0]
    shares = [1.0] * len(names) if weights is None else weights
    return tuple(WeightedVerifier(verifier=n, weight=w) for n, w in zip(names, shares, strict=True))


_EXPECTED = f"give {', '.join(VERIFIERS)}, module:name, file.py:name, or a function {SIGNATURES}"


def _as_list(reward_funcs: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    """The functions, each of which is a name or can be called."""
    alone = isinstance(reward_funcs, str) or callable(reward_funcs) or not isinstance(reward_funcs, Sequence)
    functions = [cast(RewardFunction, reward_funcs)] if alone else list(cast(Sequence[RewardFunction], reward_funcs))
    for function in functions:
        if not isinstance(function, str) and not callable(function):
            raise UserError(f"reward functions: cannot use a value of type {type(function).__name__}; {_EXPECTED}")
    return functions


def _build_one(name: str, settings: RewardSettings, timeout_s: float | None = None) -> Verifier:
    if ":" in name:
        return _from_callable(load_function(name), settings, timeout_s)
    if name not in VERIFIERS:
        hint = did_you_mean(nearest(name, VERIFIERS), "a function is named module:name or file.py:name")
        raise UserError(f"reward.verifier: {name!r} is not one of {', '.join(VERIFIERS)}{hint}")
    return VERIFIERS[name](settings)


def _from_callable(function: Callable[..., Any], settings: RewardSettings, timeout_s: float | None = None) -> Verifier:
    if not inspect.isclass(function) and signature_of(function) is None and _is_verifier(function):
        return cast(Verifier, function)
    if inspect.isclass(function):
        raise UserError(f"{function.__name__}: it is a class; give an object of it, or a function {SIGNATURES}")
    return CustomVerifier(function, settings, timeout_s=timeout_s)


def _is_verifier(function: Callable[..., Any]) -> bool:
    """Whether an object can be called with a prompt and its samples; a function's parameters must have these names."""
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    return not inspect.isroutine(function) or list(signature.parameters)[:2] == ["prompt", "samples"]
