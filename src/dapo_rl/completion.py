"""Shell completion of recipes and settings. typer completes commands and options, and installs the scripts.

Nothing here imports torch, so that it takes a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, get_args

import typer

from dapo_rl.config import known_keys
from dapo_rl.engine_specs import ENGINES
from dapo_rl.objectives import ADVANTAGES, LOSSES
from dapo_rl.recipes import SUFFIX, recipe_names

Candidate = tuple[str, str]
"""A word and its help."""
OPEN = (".", "=", "/", ":")
"""The ends of words that go on."""
NAMES = {
    "engine": tuple(ENGINES),
    "algo.loss": tuple(LOSSES),
    "algo.advantage": tuple(ADVANTAGES),
    "data.train": ("arithmetic", "reasoning_gym:", "reasoning_gym:chain_sum"),
    "data.eval": ("arithmetic", "reasoning_gym:", "reasoning_gym:chain_sum"),
    "model.name": ("tiny", "smollm2-135m"),
    "reward.verifier": ("math", "exact", "gym"),
}
"""Values of settings that also accept others."""


def complete_recipes(incomplete: str) -> list[Candidate]:
    return _complete(incomplete, _recipes)


def complete_settings(incomplete: str) -> list[Candidate]:
    return _complete(incomplete, _settings)


def complete_arguments(incomplete: str) -> list[Candidate]:
    """A recipe of the package, a file that may be one, or a setting."""
    return _complete(incomplete, _recipes, partial(_files, suffix=SUFFIX), _settings)


def complete_models(incomplete: str) -> list[Candidate]:
    """A model to evaluate, or a setting."""
    return _complete(incomplete, lambda _: [("tiny", "the embedded model")], _files, _settings)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE] [KEY=VALUE", show_default=False, hidden=True, autocompletion=complete_arguments),
]
"""A recipe and overrides. typer adds the outer brackets: `[RECIPE] [KEY=VALUE]...`."""


def _complete(incomplete: str, *sources: Callable[[str], Iterable[Candidate]]) -> list[Candidate]:
    """The candidates of the sources that start with a word."""
    before = _before_equals()

    def matches(word: str) -> list[Candidate]:
        return [candidate for source in sources for candidate in source(word) if candidate[0].startswith(word)]

    found = matches(before + incomplete)
    if len(found) == 1 and found[0][0].endswith(OPEN):
        # With a second candidate, shells add no space after the first.
        found += [candidate for candidate in matches(found[0][0]) if candidate != found[0]]
    return [(word.removeprefix(before), text) for word, text in found]


def _before_equals() -> str:
    """bash splits `key=value` at the equals sign and replaces only the value: returns `key=`, and "" in other shells
    and for other words."""
    words = os.environ.get("COMP_WORDS", "").split()[: int(os.environ.get("COMP_CWORD", "0")) + 1]
    if words[-1:] == ["="]:
        words.append("")
    return f"{words[-3]}=" if words[-2:-1] == ["="] and len(words) > 2 else ""


def _recipes(_word: str) -> Iterator[Candidate]:
    yield from ((name, "a recipe of the package") for name in recipe_names())


def _settings(beginning: str) -> Iterator[Candidate]:
    """Sections first, then the keys of one, then the values of a key."""
    keys = known_keys()
    key, equals, value = beginning.partition("=")
    if equals:
        if key in keys:
            yield from ((f"{key}={word}", text) for word, text in _values(key, keys[key], value))
        return
    if "." not in beginning:
        sections = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
        yield from ((f"{section}.", "settings") for section in sections)
    for key, field in keys.items():
        if "." not in key or "." in beginning:
            first_sentence = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
            yield f"{key}=", first_sentence


def _values(key: str, field: Any, value: str) -> Iterator[Candidate]:
    kinds = (field.annotation, *get_args(field.annotation))
    words = ["true", "false"] if bool in kinds else []
    choices = [kind for kind in kinds if isinstance(kind, str)]
    words += [*choices, *NAMES.get(key, ())]
    yield from ((word, "") for word in words)
    if not choices and str in kinds:
        yield from _files(value)
    elif not words:
        yield str(field.default).lower(), "the default"


def _files(beginning: str, suffix: str = "") -> Iterator[Candidate]:
    """Directories, and files whose name ends in `suffix`."""
    directory, slash, start = beginning.rpartition("/")
    try:
        entries = sorted(os.scandir(os.path.expanduser(f"{directory}{slash}") or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") > start.startswith("."):  # hidden ones only if asked for
            continue
        if entry.is_dir():
            yield f"{directory}{slash}{entry.name}/", ""
        elif entry.name.endswith(suffix):
            yield f"{directory}{slash}{entry.name}", ""
