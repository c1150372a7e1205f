"""Builds the plan of an evaluation from the command line: protocols, options, settings."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import Config, known_keys
from dapo_rl.config.recipe import flat, parse_value, put
from dapo_rl.data.gym import PREFIX as GYM
from dapo_rl.data.rows import Rows
from dapo_rl.data.tasks import NAME as TASKS
from dapo_rl.errors import UserError

PROTOCOLS: dict[str, dict[str, Any]] = {
    # DAPO, Sec. 4.1: AIME 2024 as in verl's file, avg@32.
    "aime2024": {
        "eval.samples": 32,
        "eval.temperature": 1.0,
        "eval.top_p": 0.7,
        "sampling.max_new_tokens": 20480,
        "data.max_prompt_tokens": 2048,
    },
    # The file contains only questions, so the system prompt asks for a format.
    "gsm8k": {
        "eval.samples": 1,
        "eval.temperature": 0.0,
        "sampling.max_new_tokens": 512,
        "data.chat_template": "always",
        "data.system_prompt": 'Solve the problem step by step. The last line of your response is "Answer: " and the '
        "number.",
    },
}
OPTIONS = {
    "--data": "data.eval",
    "--k": "eval.samples",
    "--temperature": "eval.temperature",
    "--top-p": "eval.top_p",
    "--max-new-tokens": "sampling.max_new_tokens",
    "--prompts": "eval.prompts",
    "--verifier": "reward.verifier",
    "--engine": "engine",
    "--dtype": "model.dtype",
    "--seed": "seed",
}
"""The setting of each option."""
RESULT_SETTINGS = (
    *("seed", "engine", "model.dtype", "data.prompt_key", "data.answer_key", "data.system_prompt"),
    *("data.chat_template", "data.chat_template_kwargs", "data.max_prompt_tokens", "data.eval", "reward.verifier"),
    *("reward.boxed", "reward.form", "reward.correct", "reward.wrong", "reward.threshold"),
    *("sampling.max_new_tokens", "sampling.stop"),
    *("eval.prompts", "eval.samples", "eval.temperature", "eval.top_p"),
)
"""Settings that the result depends on."""
EPISODE_SETTINGS = (
    *("env.name", "env.options", "env.tools", "env.mcp", "env.agent", "env.tool_format", "env.max_turns"),
    *("env.max_turn_tokens", "env.max_observation_tokens", "env.reward_weight"),
)
"""Those that it depends on with an environment."""
OTHER_SETTINGS = (
    *("model.device", "reward.timeout_s", "reward.memory_mb", "reward.workers"),
    *("sampling.max_batch", "sampling.kv_memory_gib"),
    *("env.timeout_s", "env.memory_mb", "env.workers", "env.host", "env.port", "env.tls"),
    "env.max_error_share",
)
"""Settings that it does not depend on, and that may change when an evaluation is resumed."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    config: Config
    data: str
    """The source as the user wrote it."""
    given: frozenset[str]
    """Keys set by the user or the protocol."""

    @property
    def k(self) -> int | None:
        """Samples per problem; None: the number of copies of each problem in the file."""
        return self.config.eval.samples if "eval.samples" in self.given else None

    def settings(self, dtype: str) -> dict[str, Any]:
        """The settings that the result depends on, in addition to the model's weights and the rows."""
        resolved = flat(self.config.model_dump(mode="json"))
        names = (*RESULT_SETTINGS, *(EPISODE_SETTINGS if self.config.env.given else ()))
        chosen = {key: value for key, value in resolved.items() if is_one_of(key, names)}
        return chosen | {"model.dtype": dtype, "eval.samples": self.k}


def make_plan(
    data: str | None, options: Mapping[str, Any] | None = None, words: Iterable[str] = (), protocol: str | None = None
) -> EvalPlan:
    """`options` have their names on the command line, `words` are `key=value`; both override the protocol. Without
    data, an environment makes its tasks."""
    words = list(words)
    if not data and any(word.startswith("env.name=") for word in words):
        data = TASKS
    if not data:
        needs = "an agent needs rows to work on; " if any(word.startswith("env.agent=") for word in words) else ""
        raise UserError(
            f"--data: {needs}name a .jsonl or .parquet file, a hub data set, reasoning_gym:NAME, or arithmetic"
        )
    chosen = {OPTIONS[option]: value for option, value in (options or {}).items() if value is not None}
    given = {"data.eval", *chosen}
    settings: dict[str, Any] = {}
    for key, value in (_defaults(data) | _protocol(protocol) | chosen).items():
        put(settings, key, value)
    for word in words:
        word_key, _, text = word.partition("=")
        for key, value in _by_setting(word_key, parse_value(word_key, text)):
            _check(key, given)
            put(settings, key, value)
            given.add(key)
    config = Config.build(settings)
    if config.eval.temperature == 0 and config.eval.samples > 1:
        raise UserError(
            f"--k: {config.eval.samples} samples at temperature 0 are identical; use --k 1 or a higher temperature"
        )
    return EvalPlan(config, data, frozenset(given | set(_protocol(protocol))))


def _defaults(data: str) -> dict[str, Any]:
    listed = parse_value("--data", data) if data.startswith("[") else data
    defaults: dict[str, Any] = {"data.eval": listed, "overlong.shape": "off"}  # evaluation uses no length penalty
    if data.startswith(GYM):
        defaults["reward.verifier"] = "gym"
    if data == "arithmetic":  # the held-out problems of the embedded default
        defaults["data.eval"] = {"source": data, "split": "heldout", "size": 512}
    if data == TASKS:
        defaults["data.eval"] = {"source": data, "split": "heldout", "size": 256}
    return defaults


def _protocol(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PROTOCOLS:
        hint = did_you_mean(nearest(name, PROTOCOLS), f"there are {', '.join(PROTOCOLS)}")
        raise UserError(f"--protocol: there is no {name!r}{hint}")
    return PROTOCOLS[name]


def _by_setting(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a word, whose value may be a whole section."""
    is_section = any(known.startswith(f"{key}.") for known in known_keys()) and key not in known_keys()
    if is_section and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _by_setting(f"{key}.{name}", inner)
    else:
        yield key, value


def _check(key: str, given: Collection[str]) -> None:
    option = next((option for option, named in OPTIONS.items() if named == key), None)
    if key in given:
        raise UserError(f"{key}: given twice" + (f"; {option} is the same setting" if option else ""))
    if key == "model.name":
        raise UserError("model.name: name models as arguments, as in dapo eval tiny runs/mine/model")
    if is_one_of(key, known_keys()) and not is_one_of(key, (*RESULT_SETTINGS, *EPISODE_SETTINGS, *OTHER_SETTINGS)):
        raise UserError(f"{key}: has no effect on an evaluation; leave it out")


def is_one_of(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def fingerprint(rows: Rows) -> str:
    """A digest of all rows of a source."""
    digest = sha256()
    for row in rows.good:
        # Objects that JSON cannot represent count by their type: their text may contain an address.
        line = json.dumps([row.number, row.columns], default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]
