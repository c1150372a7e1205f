"""A run of another library as a recipe, with an explanation of each of its settings."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dapo_rl.base.quote import printable
from dapo_rl.config import Config, known_keys
from dapo_rl.config.conflicts import nearest_divisor
from dapo_rl.config.peers import LIBRARIES
from dapo_rl.config.recipe import put
from dapo_rl.convert.areal import derive_areal
from dapo_rl.convert.draft import STATUSES, ConvertedSetting, Draft, is_default
from dapo_rl.convert.ms_swift import derive_swift
from dapo_rl.convert.read_run import ExternalRun
from dapo_rl.convert.shared import recompute_for_sequences
from dapo_rl.convert.trl import derive_trl
from dapo_rl.convert.turns import PLACEHOLDERS, has_turns
from dapo_rl.convert.unsupported import missing_feature
from dapo_rl.convert.verl import derive_verl
from dapo_rl.errors import UserError
from dapo_rl.objectives import ADVANTAGES

_DERIVED: Mapping[str, Callable[[Draft], None]] = {
    "verl": derive_verl,
    "trl": derive_trl,
    "ms-swift": derive_swift,
    "areal": derive_areal,
}

NO_SOURCE = "TRAIN_DATA.parquet"
"""`data.train` of a run whose data are not known: a file that does not exist, so that nothing else is trained on."""
NO_MODEL = "path/to/the/model"
_ALONE = "reinforce++"
_GROUP_KEYS = ("actor_rollout_ref.rollout.n", "gconfig.n_samples", "num_generations")


@dataclass(frozen=True, slots=True)
class Converted:
    library: str
    source: str
    settings: Mapping[str, Any]
    """By dotted keys."""
    rows: tuple[ConvertedSetting, ...]

    @property
    def changes(self) -> list[ConvertedSetting]:
        return [row for row in self.rows if row.learns]


def convert_run(run: ExternalRun, prompts: int | None = None, processes: int | None = None) -> Converted:
    """The recipe of a run. Raises UserError if its settings do not fit together."""
    library = LIBRARIES[run.library]
    if (missing := missing_feature(run.library, run.keys, run.is_complete)) is not None:
        raise UserError(f"{run.source}: {missing}")
    draft = Draft(library, dict(run.keys), prompts, processes)
    try:
        draft.carry_over()
        _DERIVED[run.library](draft)
        recompute_for_sequences(draft)
        _repair(draft)
        draft.finish()
        number, total = run.command
        if not run.is_chosen:
            note = f"the script has {total} training commands, and this is the first; --command N converts another"
            draft.add_row("(command)", f"{number} of {total}", "differs", note=note, learns=True)
        settings = _worth_writing(draft)
        Config.build(nested_settings(settings))
    except UserError as error:
        raise UserError(f"{run.source}: cannot be converted: {error}") from None
    rows = [row for row in draft.rows.values() if row.is_set or row.status != "default here"]
    rows.sort(key=lambda row: STATUSES.index(row.status))
    return Converted(library.name, run.source, settings, tuple(rows))


def _repair(draft: Draft) -> None:
    """Makes a recipe valid where other libraries ask for less: names, whole mini-batches, room for one sample."""
    _name(draft, "model.name", NO_MODEL, "model")
    _name(draft, "data.train", NO_SOURCE, "data set")
    _divide_step(draft)
    _hold_one_sample(draft)
    _compare_one_sample(draft)


def _name(draft: Draft, ours: str, placeholder: str, kind: str) -> None:
    """A recipe without a model or data would train the demo's."""
    if not draft.settings.get(ours):
        draft.settings[ours] = placeholder
        note = f"no {kind} is known: write its name there; the run does not start without it"
        draft.add_row(f"({ours})", "", "differs", f"{ours}: {placeholder}", note, True)


def _divide_step(draft: Draft) -> None:
    """The updates of a step have equally many prompts here."""
    ours = "train.mini_batches"
    prompts, updates = draft.setting("sampling.prompts_per_step"), draft.setting(ours)
    if prompts % updates == 0:
        return
    draft.settings[ours] = nearest = nearest_divisor(prompts, updates)
    here, note = f"{ours}: {nearest}", f"{updates} updates do not divide {prompts} prompts"
    if ours in draft.sources:
        draft.explain_again(draft.sources[ours], "differs", here, note, True)
    else:
        draft.add_row(f"({ours})", updates, "differs", here, note, True)


def _hold_one_sample(draft: Draft) -> None:
    """Micro-batches have room for one sample here, where other libraries split it between GPUs."""
    budget = draft.settings.get(ours := "train.token_budget")
    longest = draft.setting("data.max_prompt_tokens") + draft.setting("sampling.max_new_tokens")
    longest += draft.setting("env.max_observation_tokens") if has_turns(draft) else 0
    if budget is None or budget >= longest:
        return
    draft.settings[ours] = longest
    if ours in draft.sources:
        note = f"{budget} tokens do not hold one sample of up to {longest}; affects memory only"
        draft.explain_again(draft.sources[ours], "differs", f"{ours}: {longest}", note)


def _compare_one_sample(draft: Draft) -> None:
    """One sample per prompt has no group: other libraries then take the reward itself as its advantage."""
    estimator = draft.settings.get("algo.advantage", "group")
    if draft.setting("sampling.group_size") != 1 or (estimator in ADVANTAGES and ADVANTAGES[estimator].alone):
        return
    draft.settings |= {"algo.advantage": _ALONE, "sampling.dynamic": False}
    for ours in ("algo.normalize", "sampling.dynamic_batch", "sampling.metric", "sampling.cap"):
        draft.settings.pop(ours, None)
    here = f"sampling.group_size: 1, algo.advantage: {_ALONE}"
    note = "one sample has no group; it is compared with the other prompts, where theirs takes its reward as it is"
    for key in _GROUP_KEYS:
        draft.explain_again(key, "differs", here, note, True)


def _worth_writing(draft: Draft) -> dict[str, Any]:
    """The settings that follow from the file or differ from the defaults here, in the order of the help."""
    follows = {row.here.partition(":")[0] for row in draft.rows.values() if row.is_set}
    names = list(known_keys())
    written = {
        key: value
        for key, value in draft.settings.items()
        if (key in follows and value not in (None, [])) or not is_default(key, value)
    }
    return dict(sorted(written.items(), key=lambda item: names.index(item[0])))


def nested_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"preset": "dapo"}
    for key, value in settings.items():
        put(result, key, value)
    return result


def recipe_text(converted: Converted) -> str:
    changed = [_in_comment(row.key) for row in converted.changes]
    lines = [f"# Converted from {_in_comment(converted.source)} ({converted.library}) by `dapo convert`."]
    if changed:
        lines += textwrap.wrap(f"# Learning would change: {', '.join(changed)}.", 118, subsequent_indent="# ")
    top, blocks = "", ""
    for section, value in nested_settings(converted.settings).items():
        if isinstance(value, dict):
            blocks += f"\n{section}:\n" + "".join(_lines(value, "  "))
        else:
            top += f"{section}: {_inline(value)}\n"
    return "\n".join(lines) + f"\n{top}{blocks}"


def _lines(settings: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and "source" not in value:  # model.lora
            yield f"{indent}{_key(name)}:\n"
            yield from _lines(value, f"{indent}  ")
        else:
            missing = value in (NO_SOURCE, NO_MODEL, *PLACEHOLDERS)
            remark = "  # not known: write it here" if missing else ""
            yield f"{indent}{_key(name)}: {_inline(value)}{remark}\n"


def _in_comment(text: str) -> str:
    """Without line breaks, of which YAML knows more than textwrap: what follows one would be read as settings."""
    return printable(" ".join(text.split()))


def _key(name: str) -> str:
    """A YAML key, quoted as in JSON unless it is a plain word."""
    return name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else json.dumps(name)


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20, sort_keys=False)
    return text.removesuffix("...\n").strip()
