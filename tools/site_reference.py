"""Pages of the documentation site that are generated from the package: every setting and every command."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import typer
from pydantic.fields import FieldInfo

from dapo_rl.cli import app
from dapo_rl.config import PRESETS, Section, known_keys

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings_page() -> str:
    sections: dict[str, list[str]] = {}
    for key, field in known_keys().items():
        sections.setdefault(key.rpartition(".")[0], []).append(_setting(key, field))
    parts = [
        "# Settings",
        "A key is written the same way in a recipe, on the command line (`dapo train train.lr=5e-7`) and in Python "
        '(`config={"train.lr": 5e-7}`). In a recipe, the part before the dot is a YAML section. Defaults are those of '
        "`preset: dapo`.",
        _presets(),
    ]
    for section, rows in sections.items():
        head = ["| setting | default | values | meaning |", "|---|---|---|---|"]
        parts += [f"## {section or 'General'}", "\n".join([*head, *rows])]
    return "\n\n".join(parts) + "\n"


def _setting(key: str, field: FieldInfo) -> str:
    bounds = (
        f"{sign} {getattr(m, name):g}" for m in field.metadata for name, sign in BOUNDS.items() if hasattr(m, name)
    )
    values = ", ".join([_type(field.annotation), *bounds])
    meaning = _cell(" ".join((field.description or "").split()))
    # A link to itself, as headings have.
    return f"| [`{key}`](#{key}){{ #{key} }} | {_default(field.default)} | {values} | {meaning} |"


def _type(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in inner if part is not type(None))
    if origin is tuple:
        many = inner[-1] is Ellipsis
        return f"list of {_type(inner[0])}" if many else "[" + ", ".join(map(_type, inner)) + "]"
    if isinstance(kind, type) and issubclass(kind, Section):
        return "settings"
    return TYPES.get(kind) or ("mapping" if origin is not None else kind.__name__)


def _default(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _presets() -> str:
    changed = {name: dict(_flat(changes)) for name, changes in PRESETS.items()}
    rows = []
    for key, field in known_keys().items():
        cells = [_default(settings.get(key, field.default)) for settings in changed.values()]
        if len(set(cells)) > 1:
            rows.append(f"| `{key}` | {' | '.join(cells)} |")
    head = [f"| preset | {' | '.join(f'`{name}`' for name in changed)} |", "|---" * (len(changed) + 1) + "|"]
    return "## Presets\n\n" + "\n".join([*head, *rows])


def _flat(changes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for section, values in changes.items():
        for name, value in values.items():
            yield f"{section}.{name}", value


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands_page() -> str:
    root = typer.main.get_command(app)
    with root.make_context("dapo", [], resilient_parsing=True) as context:
        parts = ["# Commands", *_command(root, context)]
    return "\n\n".join(parts) + "\n"


def command_names() -> list[str]:
    """`dapo train`, `dapo bench rollout` and so on."""
    root = typer.main.get_command(app)
    with root.make_context("dapo", [], resilient_parsing=True) as context:
        return [child.command_path for child in _leaves(root, context)]


def _children(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        yield child, type(context)(child, info_name=name, parent=context)


def _leaves(command: Any, context: Any) -> Iterator[Any]:
    for child, inner in _children(command, context):
        if hasattr(child, "list_commands"):
            yield from _leaves(child, inner)
        else:
            yield inner


def _command(command: Any, context: Any) -> Iterator[str]:
    if hasattr(command, "list_commands"):
        yield from _help(command.help or "")
        yield from _options(command, context)
        for child, inner in _children(command, context):
            yield f"{'###' if context.parent else '##'} {inner.command_path}"
            yield from _command(child, inner)
        return
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield from _help(command.help or "")
    yield from _options(command, context)


def _help(text: str) -> Iterator[str]:
    """click's help text: paragraphs, and after a `\\b` lines that stay as they are."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if all(f"  {key} = " in paragraph for key in known_keys()):
            yield "[Settings](settings.md) lists every setting."
        elif lines and lines[0] == "\b":
            yield from _verbatim(lines[1:])
        elif lines:
            yield " ".join(lines)


def _verbatim(lines: list[str]) -> Iterator[str]:
    while lines and not lines[0].startswith(" "):
        yield lines.pop(0)
    if lines:
        block = "\n".join(line.removeprefix("  ") for line in lines)
        yield f"```text\n{block}\n```"


def _options(command: Any, context: Any) -> Iterator[str]:
    records = [p.get_help_record(context) for p in command.params if p.param_type_name == "option"]
    rows = [f"| `{_cell(record[0])}` | {_cell(record[1])} |" for record in records if record]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows])
