"""What the project says of itself agrees with the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support import REPOSITORY

from dapo_rl.recipes import recipe_names
from dapo_rl.version import __version__

PACKAGE = REPOSITORY / "src" / "dapo_rl"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_the_versions_agree():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "dapo-rl contributors"}] == PROJECT["authors"]
    assert re.search(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.M)[1].split()[0] == __version__


def test_the_metadata_is_there_for_a_package_index():
    assert len(PROJECT["description"]) < 120
    assert PROJECT["keywords"]
    supported = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert named == [f"3.{minor}" for minor in range(int(supported[1]), int(supported[2]))]


def test_what_is_locked_is_for_every_python_that_is_supported():
    """Also for the first release of each: Debian 12 has 3.11.2."""
    locked = [Requirement(line) for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if "==" in line]
    supported = [f"{c.rpartition(' ')[2]}.0" for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert supported[0] == "3.11.0"
    for requirement in locked:
        if requirement.marker is None or requirement.marker.evaluate():
            needs = SpecifierSet(metadata(requirement.name)["Requires-Python"] or "")
            assert [version for version in supported if version not in needs] == [], requirement


def test_the_workflow_runs_what_a_change_must_pass():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o100
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert all(f"Programming Language :: Python :: {version}" in PROJECT["classifiers"] for version in versions)


def test_the_issue_templates_are_forms():
    for name in ("bug", "feature"):
        form = yaml.safe_load((REPOSITORY / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "id", "attributes"} <= field.keys() for field in form["body"])


@pytest.mark.slow
def test_the_wheel_has_the_recipes(tmp_path):
    """Built offline from a copy, so that the build leaves nothing in the repository."""
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=300)
    (wheel,) = tmp_path.glob("dapo_rl-*.whl")
    files = {path.relative_to(REPOSITORY / "src").as_posix() for path in PACKAGE.rglob("*.yaml")}
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".yaml")} == files
        archive.extractall(tmp_path / "installed")
    listed = subprocess.run(
        [sys.executable, "-P", "-m", "dapo_rl.cli", "recipes"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [line.split(":")[0] for line in listed.stdout.splitlines() if line[:1].strip()][:-1] == recipe_names()


def test_no_two_test_files_share_a_name():
    """pytest imports them by their base names, and leaves the second out with an error."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
