"""What the project says of itself agrees with the package."""

import re
import tomllib

import yaml
from support import REPOSITORY

from dapo_rl.version import __version__

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
