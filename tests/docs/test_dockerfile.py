"""The Dockerfile: what it copies exists, and its versions are those of the lock file and of pyproject.toml."""

import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKED = dict(
    line.split("==") for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")
)
LOCKED = {canonicalize_name(name): version for name, version in LOCKED.items()}


def instructions():
    """Pairs of an instruction and its words as one line."""
    text = (REPOSITORY / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


INSTRUCTIONS = instructions()
ARGUMENTS = {
    name: value
    for kind, text in INSTRUCTIONS
    if kind == "ARG"
    for name, equals, value in [text.partition("=")]
    if equals or name not in ("DEVICE", "PYTHON")
}
STAGES = [text.split(" AS ")[1] for kind, text in INSTRUCTIONS if kind == "FROM" and " AS " in text]


def ignored(path):
    """By .dockerignore, whose last matching line decides. Its lines here are `*`, `!name` and `**/pattern`."""
    lines = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    return f"!{path}" not in lines


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    copied = [shlex.split(text)[:-1] for kind, text in INSTRUCTIONS if kind == "COPY" and "--from" not in text]
    sources = {source for words in copied for source in words}
    assert sources == {"pyproject.toml", "requirements.lock", "README.md", "LICENSE", "src"}
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert not ignored(source)


def test_the_files_that_the_wheel_needs_are_copied():
    build = [text for kind, text in INSTRUCTIONS if kind == "COPY" and "--from" not in text]
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(" ".join(build).split())


def test_stages_are_defined_before_they_are_used():
    seen = set()
    for kind, text in INSTRUCTIONS:
        for name in re.findall(r"(?:--|,)from=([\w-]+)", text):
            assert name in seen
        if kind == "FROM" and " AS " in text:
            seen.add(text.split(" AS ")[1])
    last = [text for kind, text in INSTRUCTIONS if kind == "FROM"][-1]
    assert {last.replace("${DEVICE}", device) for device in ("cpu", "cuda")} <= set(STAGES)


def test_versions_are_those_of_the_project():
    assert ARGUMENTS["TORCH"] == LOCKED["torch"]
    assert f"Programming Language :: Python :: {ARGUMENTS['PYTHON']}" in PROJECT["classifiers"]
    assert ARGUMENTS["DEVICE"] == "cpu"


def test_what_is_installed_is_in_the_lock_file():
    wanted = PROJECT["dependencies"] + [line for extra in ARGUMENTS["EXTRAS"].split(",") for line in EXTRAS[extra]]
    for requirement in map(Requirement, wanted):
        version = LOCKED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


@pytest.mark.parametrize("extras", ["", "gym,lora"])
def test_the_line_that_reads_the_dependencies(extras):
    (command,) = [text for kind, text in INSTRUCTIONS if kind == "RUN" and "tomllib" in text]
    program = re.search(r"python -c '(.*?)'", command)[1]
    words = [sys.executable, "-c", program, extras]
    output = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        *PROJECT["dependencies"],
        *(line for extra in extras.split(",") if extra for line in EXTRAS[extra]),
    ]


def test_the_image_does_not_run_as_root():
    final = INSTRUCTIONS[max(i for i, (kind, _) in enumerate(INSTRUCTIONS) if kind == "FROM") :]
    assert [text for kind, text in final if kind == "USER"] == ["dapo"]
    last_run = max(i for i, (kind, _) in enumerate(final) if kind == "RUN")
    assert last_run < next(i for i, (kind, _) in enumerate(final) if kind == "USER")


def test_the_build_arguments_are_documented():
    page = (REPOSITORY / "docs" / "docker.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", page, re.MULTILINE))
    assert rows.keys() == ARGUMENTS.keys() - {"TORCH"}
    assert all(rows[name] == f"`{ARGUMENTS[name]}`" for name in ("DEVICE", "PYTHON", "EXTRAS"))
