"""Shell completion: what a word can become, and the scripts that ask for it.

A script runs `dapo` with `_DAPO_COMPLETE=complete_SHELL` and the line so far in `_DAPO_LINE`; the answer is one
candidate per line. Nothing here imports torch, so that it takes a fraction of a second.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dapo_rl.base.files import atomic_write
from dapo_rl.config import known_keys
from dapo_rl.engine_specs import ENGINES
from dapo_rl.errors import UserError
from dapo_rl.objectives import ADVANTAGES, LOSSES
from dapo_rl.recipes import SUFFIX, recipe_names

INSTRUCTION, LINE, BREAKS = "_DAPO_COMPLETE", "_DAPO_LINE", "_DAPO_BREAKS"
ASKS = "complete_"
TAKE_RECIPES = ("train", "check", "plan", "verify", "ablate", "local", "ray", "slurm")
TAKE_SETTINGS = (*TAKE_RECIPES, "eval", "rollout", "update", "step")
"""Commands with KEY=VALUE arguments."""
NAMES = {
    "engine": tuple(ENGINES),
    "algo.loss": tuple(LOSSES),
    "algo.advantage": tuple(ADVANTAGES),
    "data.train": ("arithmetic", "reasoning_gym:"),
    "data.eval": ("arithmetic", "reasoning_gym:"),
    "model.name": ("tiny", "smollm2-135m"),
    "reward.verifier": ("math", "exact", "gym"),
}
"""Values of settings that also accept others."""

SCRIPTS = {
    "bash": """_dapo_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $(_DAPO_COMPLETE=complete_bash _DAPO_LINE="${COMP_LINE:0:$COMP_POINT}" \\
        _DAPO_BREAKS="$COMP_WORDBREAKS" "$1" 2>/dev/null) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./:] ]]; then compopt -o nospace; fi
}
complete -F _dapo_completion dapo
""",
    "zsh": """#compdef dapo
_dapo_completion() {
    local -a lines open closed
    local line
    lines=( "${(@f)$(_DAPO_COMPLETE=complete_zsh _DAPO_LINE="${words[1,$CURRENT]}" ${words[1]} 2>/dev/null)}" )
    for line in $lines; do
        if [[ ${line%%$'\\t'*} == *[=./:] ]]; then open+=( "${line/$'\\t'/:}" ); else closed+=( "${line/$'\\t'/:}" ); fi
    done
    (( $#open )) && _describe dapo open -S ''
    (( $#closed )) && _describe dapo closed
}
(( $+functions[compdef] )) || { autoload -Uz compinit; compinit }
compdef _dapo_completion dapo
""",
    "fish": """complete -c dapo -f -a '(env _DAPO_COMPLETE=complete_fish _DAPO_LINE=(commandline -cp) \
(commandline -cpo)[1] 2>/dev/null)'
""",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    value: str
    help: str = ""


def candidates(root: Any, words: Sequence[str], incomplete: str) -> list[Candidate]:
    """What a word can become after the words before it (without `dapo`)."""
    command = root
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    options = {name: option for option in command.params for name in option.opts if name.startswith("-")}
    asked = options.get(words[-1]) if words else None
    if asked is not None and not asked.is_flag:
        found = _settings(incomplete) if asked.metavar == "KEY=VALUE,..." else _files(incomplete)
    elif incomplete.startswith("-"):
        found = (Candidate(name, option.help or "") for name, option in options.items())
    else:
        found = _arguments(command, incomplete)
    return [each for each in found if each.value.startswith(incomplete)]


def _arguments(command: Any, incomplete: str) -> Iterator[Candidate]:
    for name, inner in getattr(command, "commands", {}).items():
        yield Candidate(name, inner.get_short_help_str(80))
    if command.name in TAKE_RECIPES or command.name == "recipes":
        yield from (Candidate(name, "a recipe of the package") for name in recipe_names())
    if command.name in TAKE_SETTINGS:
        yield from _settings(incomplete)
    if "=" not in incomplete and command.name in TAKE_RECIPES:
        yield from _files(incomplete, SUFFIX)
    elif "=" not in incomplete and command.name in ("eval", "board", "convert"):
        yield from [Candidate("tiny", "the embedded model")] if command.name == "eval" else []
        yield from _files(incomplete)


def _settings(incomplete: str) -> Iterator[Candidate]:
    """Sections first, then the keys of one, then the values of a key."""
    keys = known_keys()
    key, equals, value = incomplete.partition("=")
    if equals:
        for each in _values(key, keys, value):
            yield Candidate(f"{key}={each.value}", each.help)
        return
    sections = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
    if "." not in incomplete:
        yield from (Candidate(f"{section}.", "settings") for section in sections)
    for key, field in keys.items():
        if "." not in key or "." in incomplete:
            yield Candidate(f"{key}=", _first_sentence(field.description or ""))


def _values(key: str, keys: Mapping[str, Any], value: str) -> Iterator[Candidate]:
    field = keys.get(key)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    if bool in kinds:
        yield from (Candidate("true"), Candidate("false"))
    choices = [kind for kind in kinds if isinstance(kind, str)]
    yield from map(Candidate, (*choices, *NAMES.get(key, ())))
    if not choices and str in kinds:
        yield from _files(value)


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
            yield Candidate(f"{directory}{slash}{entry.name}/")
        elif entry.name.endswith(suffix):
            yield Candidate(f"{directory}{slash}{entry.name}")


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def asked_to_complete() -> bool:
    return os.environ.get(INSTRUCTION, "").startswith(ASKS)


def print_candidates(root: Any) -> None:
    """Answers a script."""
    shell = os.environ[INSTRUCTION].removeprefix(ASKS)
    words, incomplete = split_line(os.environ.get(LINE, ""))
    # bash replaces only what follows the last of these characters.
    cut = max((incomplete.rfind(mark) for mark in "=:" if mark in os.environ.get(BREAKS, "=:")), default=-1) + 1
    for each in candidates(root, words[1:], incomplete):
        if shell == "bash":
            print(each.value[cut:])
            continue
        value = each.value.replace(":", "\\:") if shell == "zsh" else each.value  # there, help follows a colon
        print(f"{value}\t{each.help}" if each.help else value)


def split_line(line: str) -> tuple[list[str], str]:
    """The complete words of a line, and the word that is being written, which may have an open quote."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        return words, lexer.token
    return (words, "") if not line or line[-1].isspace() else (words[:-1], words[-1])


def completion_script() -> str:
    """The script for the user's shell."""
    return SCRIPTS[_shell()]


def install_completion() -> str:
    """Installs the script for the user's shell; returns a line that says where."""
    shell = _shell()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        path = config / "fish" / "completions" / "dapo.fish"
        started = None
    else:
        path = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "dapo-rl" / f"dapo.{shell}"
        started = Path.home() / f".{shell}rc"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, SCRIPTS[shell])
    if started is None:
        return f"completion for fish is in {path}; it works in a new shell"
    line = f"source {shlex.quote(str(path))}\n"
    text = started.read_text(encoding="utf-8") if started.exists() else ""
    if line not in text:
        with started.open("a", encoding="utf-8") as file:
            file.write(("" if not text or text.endswith("\n") else "\n") + line)
    return f"completion for {shell} is in {path}, which {started} reads; it works in a new shell"


def _shell() -> str:
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        raise UserError(f"completion: $SHELL is {shell or 'not set'}; set it to {', '.join(SCRIPTS)}")
    return shell
