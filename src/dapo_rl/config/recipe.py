"""Reads recipes, and explains mistakes in them in one line. The keys are defined in `config/sections.py`."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dapo_rl.base.quote import HUGE, one_line, shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.base.unicode import is_unicode
from dapo_rl.config.aliases import current_setting, use_current_names
from dapo_rl.config.peers import leaves
from dapo_rl.config.peers.hints import counterpart, library_hint
from dapo_rl.errors import UserError
from dapo_rl.recipes import no_such_recipe

MOST_BYTES = 256 << 10
"""Size limit of a recipe. One that sets every key takes 3 KiB."""


def read_recipe(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    try:
        text = read_utf8(path, most, "cannot be read as a recipe")
    except FileNotFoundError:
        raise no_such_recipe(path) from None
    settings = parse_settings(text, str(path), most)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, not a {type(settings).__name__}")
    return nested(settings, f"{path}: ")


def read_utf8(path: Path, most: int, fault: str) -> str:
    """The text of a file. Raises FileNotFoundError, or UserError with the `fault` and why."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError:
        raise UserError(f"{path}: {fault}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise UserError(f"{path}: {fault}: {getattr(error, 'strerror', None) or error}") from None


def parse_settings(text: str, source: str, most: int = MOST_BYTES) -> Any:
    """A document whose values a setting can have. Raises UserError with the `source` and the line."""
    try:
        value = parse_yaml(text, most)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML: {one_line(getattr(error, 'problem', None) or error)}") from None
    check_values(value, source)
    return value


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, which YAML silently overwrites, and documents that expand to something huge."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.MappingNode, int] = {}
        """Number of keys of each mapping so far, including merged ones."""
        self._merged = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, yaml.MappingNode)
        seen: set[str] = set()
        size = len(node.value)
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                size += self._merge(value, key.start_mark)
            elif isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {shown(key.value)} appears twice", key.start_mark
                    )
                seen.add(key.value)
        self._sizes[node] = size
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        assert isinstance(node, yaml.ScalarNode)
        if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:  # conversion takes quadratic time
            problem = f"a number of {len(node.value)} characters"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def _merge(self, value: yaml.Node, mark: Any) -> int:
        """How many keys `<<: value` adds. Repeated merges grow exponentially, so keys are counted before merging."""
        sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        mappings = [source for source in sources if isinstance(source, yaml.MappingNode)]
        if any(source not in self._sizes for source in mappings):  # an unfinished mapping
            raise yaml.composer.ComposerError(None, None, "an anchor is merged into itself", mark)
        size = sum(self._sizes[source] for source in mappings)
        self._merged += size
        if self._merged > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"merges expand to more than {MOST_VALUES} values", mark)
        return size


def parse_yaml(text: str, most: int = MOST_BYTES) -> Any:
    """A YAML document. Raises YAMLError for anything that is not valid, or larger than it looks."""
    if len(text) > most:
        raise yaml.YAMLError(f"it has more than {most >> 10} KiB")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except Exception as error:  # from Python's conversions: the 45th of a month, a number of 5000 digits
        raise yaml.YAMLError(one_line(error)) from None


MOST_VALUES, MOST_LEVELS = 10_000, 50
"""Limits on what anchors expand to: a few nested ones can stand for more values than fit in memory."""
LONGEST_KEY, LONGEST_NUMBER = 200, 400
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def check_values(settings: Any, where: str) -> None:
    """Rejects YAML values that no setting can have."""
    waiting, seen = [("", settings)], 0
    while waiting:
        key, value = waiting.pop()
        seen += 1
        if seen > MOST_VALUES or key.count(".") > MOST_LEVELS:
            raise UserError(f"{where}: too many values, or too deeply nested; does an anchor contain itself?")
        at = f"{where}: {key}" if key else where
        if isinstance(value, Mapping):
            for name in value:  # before it becomes part of longer keys
                _check_length(name, at)
            waiting += [(f"{key}.{name}" if key else str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
        elif isinstance(value, datetime.date):
            raise UserError(f"{at}: {value} is read as a date; write it in quotes")
        elif isinstance(value, int) and value.bit_length() > 63:
            raise UserError(f"{at}: a whole number beyond {2**63 - 1} is too large")
        elif isinstance(value, str) and not is_unicode(value):
            raise UserError(f"{at}: text that is not valid Unicode (half of a surrogate pair)")
        elif not isinstance(value, str | int | float | None):
            raise UserError(f"{at}: a setting cannot be a {type(value).__name__}")


def _check_length(name: Any, where: str = "") -> None:
    if len(text := shown(name, LONGEST_KEY + 3)) > LONGEST_KEY + 2 or text == HUGE:
        raise UserError(f"{where}{': ' if where else ''}{shown(name)}: a key of more than {LONGEST_KEY} characters")


def nested(settings: Mapping[Any, Any], where: str = "") -> dict[str, Any]:
    """Settings by section. A key may be dotted or inside its section, but must not appear twice."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        put(result, str(key), value, where)
    return use_current_names(result, where)


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves("", settings) if value != {}}


def override(settings: dict[str, Any], overrides: Iterable[str]) -> None:
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"{shown(word)}: an override is written key=value, for example train.lr=1e-6")
        key, parsed = current_setting(key.strip(), parse_value(key, value))
        put(settings, key, use_current_names({key: parsed})[key])  # the value may be a whole section


def put(settings: dict[str, Any], key: str, value: Any, once_in: str | None = None) -> None:
    """Sets a dotted key; mappings are merged. Replaces an earlier value, or with `once_in`, the beginning of the error,
    refuses to."""

    def refuse(there: bool) -> None:
        if there and once_in is not None:
            raise UserError(f"{once_in}{key}: appears twice, with dots and in its section; keep one")

    *path, last = key.split(".")
    if not last or "" in path:
        raise UserError(f"{shown(key)}: a key is written section.name, for example train.lr")
    if len(path) > MOST_LEVELS:
        raise UserError(f"{shown(key)}: too deeply nested; a key is written section.name, for example train.lr")
    _check_length(key)
    level = settings
    for name in path:
        inner = level.get(name)
        if not isinstance(inner, dict):
            # A parameter turns a plain source (`data.train: FILE`) into {source: FILE, parameter: …}.
            if isinstance(inner, list | tuple):
                where = key.rpartition(".")[0]
                raise UserError(f"{key}: {where} is a list; give the whole list, {where}=[…]")
            refuse(inner is not None and not isinstance(inner, str))
            inner = level[name] = {"source": inner} if isinstance(inner, str) else {}
        level = inner
    if isinstance(value, Mapping):
        if not isinstance(level.get(last), dict):
            refuse(level.get(last) is not None)
            level[last] = {}
        for inner_key, inner_value in value.items():
            put(level[last], str(inner_key), inner_value, None if once_in is None else f"{once_in}{key}.")
        return
    if once_in is not None and isinstance(value, str) and isinstance(level.get(last), dict):
        level, last = level[last], "source"  # the parameter came first
    refuse(last in level)
    level[last] = value


def parse_value(key: str, text: str) -> Any:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        # Prose such as `Reply in one line: the answer` is not YAML, because of the colon.
        if not text[:1].isalpha():
            raise UserError(f"{key}: {shown(text)} is not a value; quote it as in YAML") from None
        value = text
    check_values(value, key)
    return value


def explain(error: ValidationError, keys: Collection[str]) -> str:
    """The first mistake in one line: the key, what is wrong, and the nearest valid key."""
    first, *others = error.errors()
    key = _key(first)
    # pydantic reports a mistake for each type of a union.
    more = len({_key(other) for other in others} - {key})
    if first["type"] == "extra_forbidden":
        key, value = next(leaves(key, first["input"]))
        line = f"{key}: no such setting{suggestion(key, keys, value)}"
    elif first["type"] == "value_error":
        line = str(first["ctx"]["error"])
    elif first["type"] == "literal_error":
        close = nearest(str(first["input"]), first["ctx"]["expected"].replace("'", "").split())
        hint = did_you_mean(close and close.strip(","))
        line = f"{key}: {shown(first['input'])} is not one of {first['ctx']['expected']}{hint}"
    elif key not in keys and any(known.startswith(f"{key}.") for known in keys):
        line = f"{key}: is a section, not a value{_example(key, first['input'], keys)}"
    elif isinstance(first["input"], Mapping | list) and key in keys:
        line = f"{key}: expected a single value, got a {type(first['input']).__name__}"
    else:
        line = f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}, got {shown(first['input'])}"
    line = " ".join(line.split())
    return f"{line} (and {more} more)" if more else line


def _key(mistake: Any) -> str:
    return ".".join(str(part) for part in mistake["loc"] if part not in ("str", "SourceSettings"))


def _example(section: str, value: Any, keys: Collection[str]) -> str:
    first_key = next(key for key in keys if key.startswith(f"{section}."))
    return f"; for example {first_key}={value}" if isinstance(value, str | int | float) else ""


def setting_named(name: str, keys: Collection[str]) -> str | None:
    """The key with this name as its last part, or with this name in another library."""
    return counterpart(name) or _by_last(keys).get(name)


def _by_last(keys: Collection[str]) -> dict[str, str]:
    """Keys by their last part: the first of several with the same."""
    return {key.split(".")[-1]: key for key in reversed(list(keys))}


_RUN_DIRECTORY = ("dir", "out", "output", "run", "run_dir")


def suggestion(key: str, keys: Collection[str], value: Any = None) -> str:
    """A hint at what an unknown key is here, if another library has it, or at the valid key nearest to it."""
    last = key.split(".")[-1]
    if hint := library_hint(key, value):
        return hint
    if key in _RUN_DIRECTORY:
        return "; name the run directory with --run DIR"
    by_last = _by_last(keys)
    close = by_last.get(last) or nearest(key, keys, cutoff=0.5) or by_last.get(nearest(last, by_last) or "")
    return did_you_mean(close, "`dapo train --help` lists them all")
