"""The plan of an ablation: its arms, each with complete settings, and the seeds of each arm."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dapo_rl.base.files import atomic_write
from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config
from dapo_rl.config.aliases import use_current_names
from dapo_rl.config.recipe import flat, parse_value
from dapo_rl.demo import start_from
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.quantities import COMPARABLE, DEFAULT_COMPARED
from dapo_rl.lab.ablate.techniques import DEFAULT_TABLE, TABLES, Part

MOST_ARMS = 256
MOST_BYTES = 16 << 20
"""Size limit of a plan file, which takes a few KiB per arm."""


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    """Also the name of its directory, if the arm has its own."""
    label: str
    part: Part
    directory: str
    """The directory of its runs: that of an earlier arm if the settings are the same."""
    compared_with: str | None
    """The arm that it is compared with."""
    changes: dict[str, Any]
    """Settings that differ from that arm; for the first arm, from the recipe."""
    settings: dict[str, Any]
    """All settings, resolved."""
    paper: int | None = None

    def config(self, seed: int) -> Config:
        return Config.build(self.settings | {"seed": seed})


@dataclass(frozen=True, slots=True)
class AblationPlan:
    name: str
    recipe: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    table: str | None = None
    """The paper's table that the arms are the rows of; None for varied settings."""
    compared: tuple[str, ...] = DEFAULT_COMPARED
    """The quantities whose differences have intervals corrected for the number of comparisons."""
    to_accuracy: float | None = None
    """The held-out accuracy whose steps and tokens are counted."""

    @property
    def comparisons(self) -> int:
        """The number of differences that are reported: the family that the intervals are corrected for."""
        return len(self.compared) * sum(arm.compared_with is not None for arm in self.arms)

    @property
    def steps(self) -> str:
        """The steps of a run, in words."""
        of_arms = [int(arm.settings["train"]["steps"]) for arm in self.arms]
        least, most = min(of_arms), max(of_arms)
        return counted(most, "step") if least == most else f"{least} to {counted(most, 'step')}"

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def with_own_runs(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.directory == arm.name]

    def save(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> AblationPlan:
        try:
            plan = TypeAdapter(cls).validate_json(read_bytes(path, MOST_BYTES))
            if not plan._is_valid():
                raise ValueError
            # Resolve again: this version may have settings that the version that wrote it did not have.
            arms = [replace(arm, settings=Config.build(arm.settings).resolved()) for arm in plan.arms]
            return replace(plan, arms=tuple(arms))
        except (OSError, ValueError, UserError) as error:
            why = f" ({error})" if isinstance(error, UserError) else ""
            raise UserError(
                f"{path}: cannot be read as the plan of an ablation{why}; name another directory with --out"
            ) from None

    def _is_valid(self) -> bool:
        """Whether a plan that was read can run. Names become directories, so they must be safe."""
        names = [arm.name for arm in self.arms]
        return (
            len(set(names)) == len(names) > 0
            and len(self.seeds) > 0
            and all(0 <= seed < 2**63 for seed in self.seeds)
            and self.table in (None, *TABLES)
            and set(self.compared) <= set(COMPARABLE)
            and (self.to_accuracy is None or 0 < self.to_accuracy < 1)
            and all(re.fullmatch(r"[a-z0-9_-][a-z0-9._-]*", name) for name in names)
            and all(arm.directory in names[: place + 1] for place, arm in enumerate(self.arms))
            and all(arm.compared_with in (None, *names[:place]) for place, arm in enumerate(self.arms))
        )


def arms_by_part(arms: Sequence[Any]) -> dict[str, list[Any]]:
    """The arms of each panel; the leave-one-out panel starts with the arm that it is compared with."""
    parts: dict[str, list[Any]] = {}
    for arm in arms:
        parts.setdefault(arm.part, []).append(arm)
    if left_out := parts.get("leave-one-out"):
        others = [arm for arm in arms if arm.name == left_out[0].compared_with and arm not in left_out]
        left_out[:0] = others[:1]
    return parts


def paper_table(
    recipe: Path | None,
    overrides: Sequence[str],
    seeds: int,
    parts: Sequence[str] | None = None,
    name: str = DEFAULT_TABLE,
) -> AblationPlan:
    """The rows of a paper's table: the techniques added in the paper's order, and each left out of the whole."""
    table = TABLES[name]
    parts = table.parts if parts is None else parts
    recipe, overrides = _start(recipe, [*([f"preset={table.preset}"] if table.preset else []), *overrides])
    base = Config.load(recipe, overrides)
    _check_data(base, recipe)
    for technique in table.techniques:
        named = {override.partition("=")[0].strip() for override in overrides} & set(technique.on)
        if named and not technique.is_on(base):
            raise UserError(
                f"{named.pop()}: turns {technique.name} off, but the arms switch it on and off themselves; leave it "
                "out, or compare your own values with --vary"
            )

    names = [technique.name for technique in table.techniques]
    arms: list[Arm] = []

    def add(label: str, part: Part, on: Sequence[str], paper: int | None, compared_with: str | None = None) -> None:
        changes: dict[str, Any] = {}
        for technique in table.techniques:
            changes |= technique.settings(base, technique.name in on)
        settings = Config.load(recipe, [*overrides, *_written(changes)]).resolved()
        arms.append(Arm(_slug(label), label, part, _slug(label), compared_with, {}, settings, paper))

    if "ladder" in table.parts:
        add(table.baseline, "ladder", (), table.baseline_paper)
        for count, technique in enumerate(table.techniques, start=1):
            label = f"+ {technique.name}" + (f" ({table.whole})" if count == len(names) else "")
            add(label, "ladder", names[:count], technique.paper, arms[-1].name)
    else:
        add(table.whole, "leave-one-out", names, table.whole_paper)
    whole = arms[-1].name
    if "ladder" not in parts:
        arms = [replace(arms[-1], part="leave-one-out", compared_with=None)]
    if "leave-one-out" in parts:
        for technique in table.techniques:
            others = [other for other in names if other != technique.name]
            label = f"{table.whole} without {technique.name}"
            add(label, "leave-one-out", others, technique.paper_without, whole)
        if "ladder" not in table.parts:
            add(table.baseline, "leave-one-out", (), table.baseline_paper, whole)
    return replace(_plan(recipe, overrides, base, arms, seeds), table=name)


def grid(recipe: Path | None, overrides: Sequence[str], seeds: int, vary: Sequence[str]) -> AblationPlan:
    """An arm for every combination of the varied values; each is compared with the first."""
    axes = [_axis(words) for words in vary]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise UserError(f"--vary: {next(key for key in keys if keys.count(key) > 1)} appears twice")
    if (combinations := prod(len(values) for _, values in axes)) > MOST_ARMS:
        raise UserError(f"--vary: {combinations} combinations are more than {MOST_ARMS}; name fewer values")
    changes = [_written(dict(zip(keys, values, strict=True))) for values in product(*(values for _, values in axes))]
    return _varied(recipe, overrides, seeds, changes, "--vary")


def arms_of(recipe: Path | None, overrides: Sequence[str], seeds: int, arms: Sequence[str]) -> AblationPlan:
    """An arm for each list of settings; each is compared with the first."""
    changes = []
    for words in arms:
        try:
            changes.append(shlex.split(words))
        except ValueError as error:
            raise UserError(f"--arm: {words!r}: {str(error).lower()}") from None
        for word in changes[-1]:
            key, equals, _ = word.partition("=")
            if not equals or not key.strip():
                raise UserError(f"--arm: {word!r} is not KEY=VALUE, for example --arm 'algo.clip_high=0.28'")
            if key.strip() == "seed":
                raise UserError("--arm: every arm already runs with several seeds; use --seeds")
    return _varied(recipe, overrides, seeds, changes, "--arm")


def _varied(
    recipe: Path | None, overrides: Sequence[str], seeds: int, changes: Sequence[Sequence[str]], option: str
) -> AblationPlan:
    """An arm for each list of `key=value`."""
    arms: list[Arm] = []
    recipe, overrides = _start(recipe, overrides, changes)
    for words in changes:
        try:
            config = Config.load(recipe, [*overrides, *words])
            _check_data(config, recipe)
        except UserError as error:
            raise UserError(f"{option} {' '.join(words)}: {error}") from None
        settings = config.resolved()
        known = flat(settings)  # has the validated value: `off`, which YAML reads as false
        keys = [word.partition("=")[0].strip() for word in words]
        label = ", ".join(
            f"{key}={known[key]}" if key in known else word for key, word in zip(keys, words, strict=True)
        )
        label = label or "the recipe"
        if same := next((arm for arm in arms if arm.settings == settings), None):
            raise UserError(f"{option}: {label} gives the same settings as {same.label}; name each value once")
        name = _slug(label)
        while any(arm.name == name for arm in arms):
            name += "-again"
        arms.append(Arm(name, label, "vary", name, arms[0].name if arms else None, {}, settings))
    return _plan(recipe, overrides, Config.load(recipe, overrides), arms, seeds)


def check_same_plan(out: Path, before: AblationPlan, now: AblationPlan) -> None:
    """Raises UserError if a directory holds a different ablation; more seeds are allowed."""
    other = f"{out}: holds another ablation"
    remedy = "resume it by naming only --out, or name another directory"
    old, new = {arm.name: arm for arm in before.arms}, {arm.name: arm for arm in now.arms}
    if list(old) != list(new):
        different = [name for name in [*old, *new] if (name in old) != (name in new)]
        raise UserError(f"{other}: {', '.join(different[:4]) or 'its arms'} only in one of them; {remedy}")
    for name, arm in new.items():
        # The settings include the first seed, but each run has its own.
        if listed := differences(old[name].settings | {"seed": 0}, arm.settings | {"seed": 0}):
            raise UserError(f"{other}: {arm.label} with {listed}; {remedy}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at_most: int = 4) -> str:
    """Settings that differ, as `key old → new`; empty if none does."""
    before, after = flat(use_current_names(copy.deepcopy(dict(old)))), flat(dict(new))
    if after.get("model.dtype") == "auto":  # a run records what it resolved to
        after["model.dtype"] = before.get("model.dtype", "auto")
    after["checkpoint.save_final"] = before.get("checkpoint.save_final")  # as --keep-models says
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    more = f" and {len(keys) - at_most} more" if len(keys) > at_most else ""
    return ", ".join(f"{key} {shown(before.get(key))} → {shown(after.get(key))}" for key in keys[:at_most]) + more


def _start(
    recipe: Path | None, overrides: Sequence[str], varied: Sequence[Sequence[str]] = ((),)
) -> tuple[Path | None, tuple[str, ...]]:
    """The recipe and overrides of every arm. If one arm's model or data is not the demo's, no arm starts from the demo:
    compared arms differ only in the varied settings."""
    starts = [(start_from(recipe, [*overrides, *words]), len(words)) for words in varied]
    start, extra = next((each for each in starts if each[0].custom), starts[0])
    return start.recipe, start.overrides[: len(start.overrides) - extra]


def _check_data(config: Config, recipe: Path | None) -> None:
    if config.data.eval is None:
        raise UserError("data.eval: an ablation compares held-out accuracy; set data.eval")
    config.check_data(str(recipe or f"model.name={config.model.name}"))


def _plan(recipe: Path | None, overrides: Sequence[str], base: Config, arms: Sequence[Arm], seeds: int) -> AblationPlan:
    finished: list[Arm] = []
    for arm in arms:
        twin = next((earlier for earlier in finished if earlier.settings == arm.settings), arm)
        origin = next((other.settings for other in arms if other.name == arm.compared_with), base.resolved())
        old, new = flat(origin), flat(arm.settings)
        changes = {key: value for key, value in new.items() if old.get(key) != value}
        finished.append(replace(arm, directory=twin.directory, changes=changes))
    numbers = tuple(range(base.seed, base.seed + seeds))
    name, title = (recipe.stem, recipe.name) if recipe else ("dapo", "the defaults")
    return AblationPlan(name, title, tuple(overrides), tuple(finished), numbers)


def _axis(words: str) -> tuple[str, list[Any]]:
    key, equals, values = words.partition("=")
    key = key.strip()
    if not equals or not key or not values.strip():
        raise UserError(f"--vary: {words!r} is not KEY=VALUE,VALUE,…, for example algo.clip_high=0.2,0.28,0.4")
    if key == "seed":
        raise UserError("--vary: every arm already runs with several seeds; use --seeds")
    parsed = parse_value(f"--vary {key}", f"[{values}]")
    if not isinstance(parsed, list):
        raise UserError(f"--vary: {words!r} is not KEY=VALUE,VALUE,…; quote a value as in YAML")
    return key, parsed


def _written(changes: Mapping[str, Any]) -> list[str]:
    """Changes as `key=value`; JSON is valid YAML."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]


def _slug(label: str) -> str:
    """A safe directory name. One that contains `=` would be read as a setting on the command line."""
    return re.sub(r"[^a-z0-9._]+", "-", label.lower()).strip("-.")[:80] or "arm"
