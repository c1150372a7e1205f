"""Reads a run of another library as flat keys and values: a shell script, a command line, YAML or JSON."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.config.peers import leaves
from dapo_rl.config.recipe import check_values, parse_settings, read_utf8
from dapo_rl.convert.hydra import UnknownValue, interpolated, numbers, typed
from dapo_rl.convert.shell.commands import ShellCommand, read_shell
from dapo_rl.convert.shell.words import Word
from dapo_rl.convert.unsupported import why_unsupported
from dapo_rl.errors import UserError

MOST_BYTES_READ = 1 << 20
"""Size limit of a file to convert."""
_VERL = re.compile(
    r"verl\.trainer\.main_\w+|recipe\.\S*main_\w+|(\S*/)?main_(ppo|dapo|ppo_split)\.py|\S+\.(main_(ppo|dapo)|fully_async_main)"
)
_SWIFT = re.compile(r"(\S*/)?swift/cli/(_megatron/)?rlhf\.py")
_OTHERS = (
    (r"\b(swift|megatron|trl) (sft|pt)\b|\bverl\.trainer\.\w*sft\w*|\bsft(_\w+)?\.py\b", "SFT"),
    (r"\b(swift|trl) (dpo|kto|orpo|cpo)\b|\b(online_)?(dpo|kto|bco|orpo|cpo|xpo)(_\w+)?\.py\b", "PREFERENCES"),
    (r"\btrl reward\b|\breward_modeling\.py\b", "REWARD_MODELS"),
    (r"\btrl gkd\b|\bgkd(_\w+)?\.py\b", "TEACHER"),
    (r"\btrl rloo\b|\brloo(_\w+)?\.py\b", "RLOO"),
)
"""Commands that train in another way."""
_OF_SERVER = ("multi_turn_scheduler", "use_gym_env", "gym_env", "agent_template", "max_turns")
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_COMMANDS = re.compile(
    r"^\s*([A-Z_]\w*=\S*\s+)*(python3?|swift|trl|accelerate|torchrun|ray|deepspeed|uv)\s", re.MULTILINE
)
_SEEN = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
"""Variables of a script that the training command reads from its environment."""


@dataclass(frozen=True, slots=True)
class ExternalRun:
    library: str
    """A key of `dapo_rl.config.peers.LIBRARIES`."""
    source: str
    """Where it was read."""
    keys: Mapping[str, Any]
    is_complete: bool = False
    """Whether the keys are those of a file, which may contain every default of the library."""
    command: tuple[int, int] = (1, 1)
    """Which training command of a script it is, and how many there are."""
    is_chosen: bool = True
    """False: the user has not said which of several commands to convert."""


def read_run(path: Path, command: int | None = None) -> ExternalRun:
    """The run that a file describes, or the given training command of a script."""
    if path.suffix == ".py":
        raise UserError(
            f"{path}: Python is not read; write the settings to JSON, for example GRPOConfig(...).to_dict()"
        )
    text = _text(path)
    stripped = text.lstrip()
    is_yaml = path.suffix in (".yaml", ".yml", ".json") or stripped.startswith("{")
    if not is_yaml and (path.suffix in (".sh", ".bash") or stripped.startswith("#!") or _COMMANDS.search(text)):
        return read_script(text, str(path), path.parent, command)
    mapping = _mapping(text, str(path))
    keys, script = _flat(numbers(mapping)), mapping.get("run")
    if isinstance(script, str) and _recognised(keys) is None:  # a file of a scheduler such as SkyPilot
        return read_script(script, str(path), path.parent, command, mapping.get("envs"))
    return _of_keys(keys, str(path))


def read_script(
    text: str, source: str, directory: Path = Path(), number: int | None = None, variables: Any = None
) -> ExternalRun:
    """The run that a script starts: its training command with that number, by default the first."""
    given = {str(name): str(value) for name, value in variables.items()} if isinstance(variables, dict) else {}
    try:
        commands = read_shell(text, _environment() | given, _SEEN)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    served = _served(commands)
    found: list[ExternalRun] = []
    for command in commands:
        run = _of_command(command, source, directory)
        if run is not None and run.library == "ms-swift":
            run = replace(run, keys={**served, **run.keys})
        if run is not None and run not in found:
            found.append(run)
    if not found:
        refusal = next((why for command in commands if (why := _other_training(command))), None)
        raise UserError(f"{source}: {refusal or 'no training command of verl, TRL, ms-swift or AReaL in it'}")
    if not 1 <= (number or 1) <= len(found):
        raise UserError(f"{source}: --command {number}: it has {counted(len(found), 'training command')}")
    chosen = number is not None or len(found) == 1
    return replace(found[(number or 1) - 1], command=(number or 1, len(found)), is_chosen=chosen)


def _served(commands: Sequence[ShellCommand]) -> dict[str, Any]:
    """The turns and tools of ms-swift, which a script may give to the server that samples (`swift rollout`)."""
    options: dict[str, Any] = {}
    for command in commands:
        texts = [word.text for word in command.words]
        if any(texts[at : at + 2] == ["swift", "rollout"] for at in range(min(len(texts), 10))):
            options |= _options(command.words)
    return {key: value for key, value in options.items() if key in _OF_SERVER}


def _other_training(command: ShellCommand) -> str | None:
    """Why a command that trains in another way has no counterpart here."""
    line = " ".join(word.text for word in command.words[:60])
    for pattern, feature in _OTHERS:
        if match := re.search(pattern, line):
            return why_unsupported(feature, match[0].strip())
    return None


def read_words(words: Sequence[str]) -> ExternalRun:
    """The run that a command line starts."""
    return read_script(words[0] if len(words) == 1 else shlex.join(words), "the command line")


def _environment() -> dict[str, str]:
    """The variables that a script may take from its environment; the others would make the result depend on it."""
    return {name: os.environ[name] for name in ("HOME", "USER", "PWD") if name in os.environ}


def _text(path: Path) -> str:
    try:
        return read_utf8(path, MOST_BYTES_READ, "cannot be converted")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a command line is given as dapo convert -- COMMAND") from None


def _mapping(text: str, source: str) -> dict[str, Any]:
    value = parse_settings(text, source, MOST_BYTES_READ)
    if not isinstance(value, dict):
        raise UserError(f"{source}: neither a training command nor a mapping of settings")
    return {str(key): inner for key, inner in value.items()}


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return dict(leaf for name, value in mapping.items() for leaf in leaves(str(name), value))


def _of_keys(keys: dict[str, Any], source: str) -> ExternalRun:
    library = _recognised(keys)
    if library is None:
        raise UserError(f"{source}: not a file of verl, TRL, ms-swift or AReaL: none of their settings is in it")
    keys = _of_swift(keys) if library == "ms-swift" else keys
    return ExternalRun(library, source, interpolated(keys, _environment()), is_complete=True)


def _of_swift(flat: Mapping[str, Any], is_megatron: bool = False) -> dict[str, Any]:
    """In ms-swift's files for Ray, settings of the training processes start with `train.`; Megatron has defaults of its
    own."""
    keys = {key.removeprefix("train."): value for key, value in flat.items()}
    if not is_megatron and "global_batch_size" not in keys:
        return keys
    return {"global_batch_size": 16} | ({} if "train_type" in keys else {"tuner_type": "full"}) | keys


def _recognised(keys: Mapping[str, Any]) -> str | None:
    sections = {key.split(".")[0] for key in keys}
    if "actor_rollout_ref" in sections or {"algorithm", "data"} <= sections or {"trainer", "data"} <= sections:
        return "verl"
    if sections & {"gconfig", "train_dataset"} or {"actor", "rollout"} <= sections:
        return "areal"
    if "rlhf_type" in keys or sections & {"dynamic_sample", "overlong_filter", "external_plugins", "tuner_type"}:
        return "ms-swift"
    ours = {"num_generations", "learning_rate", "per_device_train_batch_size", "max_completion_length", "loss_type"}
    return "trl" if sections & {*ours, "epsilon", "epsilon_high", "beta", "output_dir", "model_name_or_path"} else None


def _of_command(command: ShellCommand, source: str, directory: Path) -> ExternalRun | None:
    texts = [word.text for word in command.words]
    for at, text in enumerate(texts):
        following = texts[at + 1 : at + 2]
        rest = command.words[at + 1 :]
        if _VERL.fullmatch(text):
            keys = _trainer(text) | _launcher(command.words[:at]) | _overrides(rest, {})
            return ExternalRun("verl", source, interpolated(keys, _environment()))
        is_swift = text.split("/")[-1] in ("swift", "megatron") and following == ["rlhf"]
        if is_swift or _SWIFT.fullmatch(text):
            seen = {name: _value(value, value.text) for name in _SEEN if (value := command.variables.get(name))}
            keys = seen | _of_swift(_flags(rest[is_swift:], source, directory), "megatron" in text)
            return ExternalRun("ms-swift", source, keys)
        if text.startswith("areal.") or (text.endswith(".py") and any("areal" in other for other in texts)):
            return _areal(rest, source, directory)
        if text.endswith(".py") and any(_OVERRIDE.fullmatch(word.text) for word in rest):
            run = _areal(rest, source, directory)
            if _recognised(run.keys) == "areal":
                return run
        if text.split("/")[-1] == "trl" and following == ["grpo"]:
            return ExternalRun("trl", source, _flags(rest[1:], source, directory))
        is_grpo = any(re.match(r"--(num_generations|config|loss_type|beta)\b", word.text) for word in rest)
        if text.endswith(".py") and is_grpo and not _other_training(command):
            keys = _launcher(command.words[:at]) | _flags(rest, source, directory)
            return ExternalRun("trl", source, keys)
    return None


def _trainer(module: str) -> dict[str, Any]:
    """The trainer, where it is not verl's synchronous one."""
    names = ("fully_async", "one_step_off", "vla")
    found = next((name for name in names if re.search(rf"(^|[._/]){name}([._/]|$)", module)), None)
    return {"(trainer)": found} if found else {}


def _areal(words: Sequence[Word], source: str, directory: Path) -> ExternalRun:
    """`SCRIPT --config FILE key=value`"""
    overrides = [word for word in words if word.text.startswith("~") or _OVERRIDE.fullmatch(word.text)]
    own = set(overrides)
    options = _options([word for word in words if word not in own])
    keys = _overrides(overrides, _config_file(options, source, directory))
    return ExternalRun("areal", source, interpolated(keys, _environment()))


def _overrides(words: Sequence[Word], file: Mapping[str, Any]) -> dict[str, Any]:
    """Hydra's `key=value`, `+key=value`, `++key=value`, `~key` and `~key=value`, on top of the settings of a file."""
    keys: dict[str, Any] = {}
    replaced = set()
    option = ""
    for word in words:
        if option:
            keys[option], option = _value(word, word.text), ""
        elif word.text in ("--config-name", "--config-path"):
            option = word.text
        elif word.text.startswith("--config") and "=" in word.text:
            name, _, value = word.text.partition("=")
            keys[name] = value
        elif (match := _OVERRIDE.fullmatch(word.text)) and match[1] != "~":
            keys[name := match[2].replace("/", ".")] = value = _value(word, match[3])
            if not isinstance(value, dict):  # a mapping is merged
                replaced.add(name)
        elif word.unknown:
            keys[word.text] = UnknownValue(word.text, word.unknown)
        elif word.text.startswith("~"):
            keys.pop(name := word.text[1:].partition("=")[0], None)
            replaced.add(name)
        elif word.text.strip():
            keys[word.text] = UnknownValue(word.text, "it is not written key=value")
    return {key: value for key, value in file.items() if replaced.isdisjoint(_sections(key))} | _flat(keys)


def _sections(key: str) -> list[str]:
    parts = key.split(".", 12)
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _value(word: Word, text: str) -> Any:
    if word.unknown:
        return UnknownValue(text, word.unknown)
    value = typed(text)
    check_values(value, "a value of the command")
    return value


def _flags(words: Sequence[Word], source: str, directory: Path) -> dict[str, Any]:
    """`--key value`, on top of the file that `--config` names."""
    options = _options(words)
    return _config_file(options, source, directory) | options


def _options(words: Sequence[Word]) -> dict[str, Any]:
    """`--key value value`, `--key=value`, and `--key` for true."""
    values: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            key, equals, value = word.text[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = [_value(word, value)] if equals else []
        elif key and not (word.unknown and values[key]):
            values[key].append(_value(word, word.text))
        elif word.text:
            why = word.unknown if key and word.unknown else "it is not an option"
            values[word.text] = [UnknownValue(word.text, why)]
    return _flat({key: True if not items else items[0] if len(items) == 1 else items for key, items in values.items()})


def _config_file(options: Mapping[str, Any], source: str, directory: Path) -> dict[str, Any]:
    name = options.get("config")
    if isinstance(name, UnknownValue):
        why = f"{shown(name.text)} is not known ({name.why}); convert that file itself"
        raise UserError(f"{source}: --config: {why}")
    if not isinstance(name, str):
        return {}
    # Scripts name files relative to the root of their repository.
    candidates = [Path(name), *(parent / name for parent in (directory, *directory.resolve().parents))]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise UserError(f"{source}: --config {shown(name)} is not a file here; change to its directory")
    return _flat(numbers(_mapping(_text(path), str(path))))


def _launcher(words: Sequence[Word]) -> dict[str, Any]:
    """The options of `accelerate launch`, `torchrun` or `ray job submit`, before the script."""
    options = _options([word for word in words if word.text not in ("--", "-m")])
    keys: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, UnknownValue) and value.why == "it is not an option":
            continue
        if isinstance(value, list):  # the words between an option and the script
            value = value[0]
        keys["num_processes" if name in ("num_processes", "nproc_per_node") else f"launcher.{name}"] = value
    if "nproc_per_node" in options:  # of torchrun, which has so many on each node
        local, nodes = keys["num_processes"], keys.get("launcher.nnodes", 1)
        if isinstance(local, int) and isinstance(nodes, int):
            keys["num_processes"] = local * nodes
        else:
            text = f"{getattr(local, 'text', local)} on {getattr(nodes, 'text', nodes)} nodes"
            keys["num_processes"] = UnknownValue(text, "it is not a number in the script")
    return keys
