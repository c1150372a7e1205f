"""The file that describes a judge. Its values are data: nothing in it is evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from dapo_rl.base.http_client import fault_of_url, key_in
from dapo_rl.base.placeholders import fault_of_names, filled
from dapo_rl.base.quote import one_line, shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.base.suggest import did_you_mean, nearest, nearest_path
from dapo_rl.choices import VERIFIERS, is_judge
from dapo_rl.config.recipe import parse_yaml
from dapo_rl.config.section import Section
from dapo_rl.config.sections import Temperature
from dapo_rl.errors import UserError

MOST_BYTES = 256 << 10
FIELDS = ("prompt", "response", "truth")
"""What a template may name in braces."""
POLICY = "policy"
"""The endpoint of a judge that is the run's own model."""
DECIDING = ("endpoint", "model", "prompt", "parse", "scale", "temperature", "max_tokens")
"""Keys that a mark depends on. The others may change while it is asked."""
_SWITCHES = {True: ("yes", "true", "on"), False: ("no", "false", "off")}
"""Words that YAML reads as true and false."""


class Budget(Section):
    calls: int | None = Field(None, ge=1)
    """Requests, those of retries included."""
    tokens: int | None = Field(None, ge=1)
    """Tokens of prompts and replies, as the server reports them."""


class JudgeSettings(Section):
    endpoint: str
    """The base URL of an OpenAI-compatible server, for example `https://api.openai.com/v1`, or `policy`: the run's own
    engine answers, with its current weights."""
    model: str = ""
    """The name of the model there."""
    prompt: str
    """What the judge is asked, with {prompt}, {response} and {truth} in the places of these texts."""
    parse: str | dict[str, str]
    """How its mark is read from its reply: a regular expression with one group, whose last match counts, or `{json:
    KEY}`, the value of a key in the last JSON object."""
    scale: dict[str, float] | None = None
    """Scores of words (`{good: 1, bad: 0}`), or `{min: 1, max: 10}`: marks from 1 to 10 become scores from 0 to 1.
    none: the mark is the score."""
    api_key_env: str | None = None
    """The environment variable that has the key."""
    temperature: Temperature | None = Field(0.0, ge=0)
    """none: the server's default; of the policy, that of the run."""
    max_tokens: int | None = Field(1024, ge=1)
    """none: the server's default; of the policy, that of the run."""
    retries: int = Field(4, ge=0)
    """How often a call that fails is made again."""
    timeout_s: float = Field(60.0, gt=0)
    """The time limit of a call."""
    concurrency: int = Field(8, ge=1, le=256)
    """The most calls at a time."""
    cache: bool | str = True
    """Keep replies in the run directory, or in the directory that is given; false: in memory alone."""
    budget: Budget = Budget()
    """The run stops before it makes more calls."""
    agree_with: str | None = None
    """A built-in verifier whose verdicts are compared with the judge's, for the log."""

    @property
    def is_policy(self) -> bool:
        return self.endpoint == POLICY

    @property
    def is_random(self) -> bool:
        """Whether the same question may have another reply. The temperature of a run is above 0, and that of a server
        is, as far as is known."""
        return self.temperature != 0

    @property
    def needs_answer(self) -> bool:
        return "{truth}" in self.prompt

    def request(self, prompt: str) -> dict[str, Any]:
        """The body of a request: all that the reply depends on, except the weights of the model."""
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        messages = [{"role": "user", "content": prompt}]
        given = {name: value for name, value in limits.items() if value is not None}
        return {"model": self.model, "messages": messages, **given}

    def api_key(self) -> str | None:
        return key_in(self.api_key_env)


def read_judge(path: Path) -> JudgeSettings:
    """Raises a UserError of one line for anything wrong with the file."""
    settings = _mapping(path)
    if unknown := [str(key) for key in settings if key not in JudgeSettings.model_fields]:
        listed = f"a judge has {', '.join(JudgeSettings.model_fields)}"
        hint = did_you_mean(nearest(unknown[0], JudgeSettings.model_fields), listed)
        raise UserError(f"{path}: no key {shown(unknown[0])}{hint}")
    of_policy = settings.get("endpoint") == POLICY
    for key in ("endpoint", "model", "prompt", "parse"):
        if key not in settings and not (of_policy and key in _OF_SERVERS):
            raise UserError(f"{path}: no {key}; {_NEEDED[key]}")
    if of_policy and (given := [key for key in _OF_SERVERS if key in settings]):
        raise UserError(f"{path}: {given[0]}: endpoint: policy has {_OF_SERVERS[given[0]]}; leave it out")
    if isinstance(scale := settings.get("scale"), Mapping):
        settings["scale"] = {word: score for key, score in scale.items() for word in _marks(key)}
    try:
        judge = JudgeSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(part for part in map(str, first["loc"]) if part not in ("bool", "str", "dict[str,str]"))
        raise UserError(f"{path}: {where}: {shown(first['input'])}: {one_line(first['msg'])}") from None
    for key, fault in (
        ("endpoint", "" if of_policy else fault_of_url(judge.endpoint)),
        ("prompt", _fault_of_prompt(judge.prompt)),
        ("parse", fault_of_parse(judge.parse)),
        ("scale", _fault_of_scale(judge.scale)),
        ("agree_with", _fault_of_rule(judge.agree_with)),
    ):
        if fault:
            raise UserError(f"{path}: {key}: {fault}")
    if judge.api_key_env is not None and not judge.api_key():
        raise UserError(f"{path}: api_key_env: the environment variable {judge.api_key_env} is not set")
    return judge.model_copy(update={"cache": False}) if of_policy else judge


def is_policy_judge(verifier: str) -> bool:
    """Whether a verifier is a judge that is the policy, as far as its file can be read."""
    if not is_judge(verifier):
        return False
    try:
        return _mapping(Path(verifier)).get("endpoint") == POLICY
    except UserError:
        return False


_OF_SERVERS = {
    "model": "the model of the run",
    "api_key_env": "no key",
    "timeout_s": "no time limit",
    "concurrency": "the whole engine",
    "cache": "no file of replies, as they hold for one version of the weights",
}
"""Keys that only a server needs, and what the policy has instead."""
_NEEDED = {
    "endpoint": "give the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1, or policy",
    "model": "give the name of the model on the server",
    "prompt": "give what the judge is asked, with {prompt} and {response}",
    "parse": "give a regular expression with one group, or {json: KEY}",
}


def _mapping(path: Path) -> dict[Any, Any]:
    try:
        settings = parse_yaml(read_bytes(path, MOST_BYTES).decode("utf-8"), MOST_BYTES)
    except FileNotFoundError:
        close = nearest_path(path, lambda neighbour: neighbour.suffix in (".yaml", ".yml"))
        raise UserError(f"reward.verifier: no judge {path}{did_you_mean(close)}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {one_line(getattr(error, 'problem', None) or error)}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: a judge is a mapping of keys, not {shown(settings)}")
    return settings


def _fault_of_prompt(prompt: str) -> str:
    if "{response}" not in prompt:
        return "it has no {response}: the judge would not see what it judges"
    return fault_of_names(prompt, FIELDS)


def fault_of_parse(parse: str | Mapping[str, str]) -> str:
    if isinstance(parse, Mapping):
        return "" if list(parse) == ["json"] and parse["json"] else "give a regular expression, or {json: KEY}"
    if parse.startswith("json:"):
        return "" if parse.removeprefix("json:").strip() else "json: needs the name of a key"
    try:
        groups = re.compile(parse).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"{shown(parse)} is not a regular expression ({one_line(error)})"
    return "" if groups == 1 else f"{shown(parse)} has {groups} groups; it needs one, the mark"


def _fault_of_scale(scale: Mapping[str, float] | None) -> str:
    if scale is None:
        return ""
    if not scale:
        return "it is empty; give scores of words, or {min: 1, max: 10}"
    if set(scale) == {"min", "max"} and scale["min"] >= scale["max"]:
        return f"min {scale['min']:g} is not below max {scale['max']:g}"
    return ""


def _fault_of_rule(rule: str | None) -> str:
    if rule is None or rule in VERIFIERS:
        return ""
    return f"{shown(rule)} is not one of {', '.join(VERIFIERS)}{did_you_mean(nearest(rule, VERIFIERS))}"


def rendered(template: str, prompt: str, response: str, truth: str) -> str:
    """The template with the texts in place."""
    return filled(template, {"prompt": prompt, "response": response, "truth": truth})


def _marks(key: object) -> tuple[str, ...]:
    """The marks that a key of `scale` stands for. Python takes 1 for True, and 0 for False."""
    return _SWITCHES[key] if isinstance(key, bool) else (str(key),)
