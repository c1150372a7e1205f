"""Builds a verifier from a setting, or from the trainer's `reward_funcs`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from dapo_rl.base.load import load_function, spec_of
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import REWARD_MODEL, is_judge, is_reward_model
from dapo_rl.config import RewardSettings, WeightedVerifier
from dapo_rl.errors import UserError
from dapo_rl.rewards.combined import CombinedVerifier, unique
from dapo_rl.rewards.custom import SIGNATURES, CustomVerifier, curve_name, signature_of
from dapo_rl.rewards.exact import ExactVerifier
from dapo_rl.rewards.gym import GymVerifier
from dapo_rl.rewards.judge.endpoint import EndpointJudge
from dapo_rl.rewards.judge.judge_file import read_judge
from dapo_rl.rewards.judge.policy import PolicyJudge
from dapo_rl.rewards.math import MathVerifier
from dapo_rl.rewards.model_verifier import GivenModel, ModelVerifier
from dapo_rl.rewards.served import MixedVerifier, Served
from dapo_rl.rewards.validation import limit_of
from dapo_rl.types import Verifier

VERIFIERS: dict[str, Callable[[RewardSettings], Verifier]] = {
    "math": MathVerifier,
    "exact": ExactVerifier,
    "gym": GymVerifier,
}

RewardFunction = str | Callable[..., Any] | GivenModel


def build_verifier(settings: RewardSettings) -> Verifier:
    """The verifier that `reward.verifier` names."""
    entries = settings.verifiers
    if not entries:
        raise UserError(
            "reward.verifier=none: nothing gives rewards; name a verifier, or an environment that gives them"
        )
    names = unique([curve_name(entry.verifier) for entry in entries])
    verifiers = [_build_one(e.verifier, settings, n, e.timeout_s) for e, n in zip(entries, names, strict=True)]
    if isinstance(settings.verifier, str) and not isinstance(verifiers[0], Served):
        return verifiers[0]
    limits = [entry.timeout_s for entry in entries]
    return _weighted(verifiers, [entry.weight for entry in entries], names, limits, settings)


def _weighted(
    verifiers: Sequence[Verifier | Served],
    weights: Sequence[float] | None,
    names: Sequence[str],
    given: Sequence[float | None],
    settings: RewardSettings,
) -> Verifier:
    """`given` are the time limits of the settings."""
    pairs = zip(verifiers, given, strict=True)
    limits = [None if isinstance(each, Served) else limit or limit_of(each) for each, limit in pairs]
    served = {name: each for name, each in zip(names, verifiers, strict=True) if isinstance(each, Served)}
    if not served:
        return CombinedVerifier(verifiers, weights, names, limits, settings.timeout_s)
    rules = {name: VERIFIERS[each.agree_with](settings) for name, each in served.items() if each.agree_with}
    return MixedVerifier(verifiers, weights, names, limits, settings, rules)


def as_verifier(
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    settings: RewardSettings,
    weights: Sequence[float] | None = None,
) -> Verifier:
    """Turns a verifier's name, a function or its name, a verifier, or a list of these into one verifier."""
    functions = _as_list(reward_funcs)
    for index, function in enumerate(functions):
        if any(function is other or (isinstance(function, str) and function == other) for other in functions[:index]):
            name = curve_name(_recorded([function])[0])
            raise UserError(f"reward functions: {name} appears twice; give it once, with one weight")
    names = unique([curve_name(each) for each in _recorded(functions)])
    verifiers = [_from(function, settings, name) for function, name in zip(functions, names, strict=True)]
    if len(verifiers) == 1 and weights is None and not isinstance(verifiers[0], Served):
        return verifiers[0]
    return _weighted(verifiers, weights, names, [None] * len(names), settings)


def recorded_verifier(
    reward_funcs: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
) -> str | tuple[WeightedVerifier, ...]:
    """What `reward.verifier` says of the trainer's `reward_funcs` in the files of a run."""
    functions = _recorded(_as_list(reward_funcs))
    names = unique([each if isinstance(each, str) else spec_of(each) for each in functions])
    if len(names) == 1 and weights is None:
        return names[0]
    shares = [1.0] * len(names) if weights is None else weights
    return tuple(WeightedVerifier(verifier=n, weight=w) for n, w in zip(names, shares, strict=True))


_EXPECTED = (
    f"give {', '.join(VERIFIERS)}, model:NAME, a judge's .yaml file, module:name, file.py:name, or a function "
    f"{SIGNATURES}"
)


def _recorded(functions: Sequence[RewardFunction]) -> list[str | Callable[..., Any]]:
    """The functions, with the names of loaded models in their place."""
    return [REWARD_MODEL + each.name if isinstance(each, GivenModel) else each for each in functions]


def _as_list(reward_funcs: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    """The functions, each of which is a name or can be called."""
    one = isinstance(reward_funcs, str | GivenModel) or callable(reward_funcs)
    alone = one or not isinstance(reward_funcs, Sequence)
    functions = [cast(RewardFunction, reward_funcs)] if alone else list(cast(Sequence[RewardFunction], reward_funcs))
    for function in functions:
        if not isinstance(function, str | GivenModel) and not callable(function):
            raise UserError(f"reward functions: cannot use a value of type {type(function).__name__}; {_EXPECTED}")
    return functions


def _from(function: RewardFunction, settings: RewardSettings, curve: str) -> Verifier | Served:
    if isinstance(function, GivenModel):
        return ModelVerifier(function, settings, curve)
    return _build_one(function, settings, curve) if isinstance(function, str) else _from_callable(function, settings)


def _build_one(name: str, settings: RewardSettings, curve: str, timeout_s: float | None = None) -> Verifier | Served:
    """`curve` is the name of its curve."""
    if is_reward_model(name):
        return ModelVerifier(GivenModel(name.removeprefix(REWARD_MODEL)), settings, curve)
    if is_judge(name):
        judge = read_judge(Path(name))
        return (PolicyJudge if judge.is_policy else EndpointJudge)(judge, settings, curve, name)
    if ":" in name:
        return _from_callable(load_function(name), settings, timeout_s)
    if name not in VERIFIERS:
        hint = did_you_mean(
            nearest(name, VERIFIERS), "a function is named module:name or file.py:name, a reward model model:NAME"
        )
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
