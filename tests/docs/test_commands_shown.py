"""What the first pages show: recipes are valid, `make` targets exist, and CI keeps the site that it builds."""

import re
import subprocess
import sys

import pytest
import yaml
from support import REPOSITORY

from dapo_rl.config import Config

MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


def test_the_recipe_on_the_first_page_is_valid():
    (block,) = re.findall(r"^    ```yaml\n(.*?)^    ```", (REPOSITORY / "docs" / "index.md").read_text(), re.M | re.S)
    config = Config.build(yaml.safe_load(re.sub(r"^    ", "", block, flags=re.MULTILINE)))
    assert config.reward.verifier == "rewards.py:score"


@pytest.mark.parametrize("name", ["docs/install.md", "CONTRIBUTING.md", "README.md", ".ci/run"])
def test_targets_of_make_exist(name):
    text = (REPOSITORY / name).read_text()
    named = set(re.findall(r"(?:^|`)make (?:PYTHON=\S+ )?(\w+)", text, re.MULTILINE))
    assert named
    assert named <= TARGETS


def test_what_a_change_must_pass_includes_the_site():
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert lines[-3:] == ["make check", "make site", "make test"]


def test_the_workflow_keeps_the_site():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["test"]
    (upload,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    built = re.search(r"^site_dir: (\S+)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert upload["with"]["path"] == built
    (version,) = re.findall(r"'([\d.]+)'", upload["if"])
    assert version in job["strategy"]["matrix"]["python"]


def test_setting_up_says_what_it_installs(tmp_path):
    """With a Python that only notes its arguments: a log gets a line per phase, a terminal pip's own progress."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n')
    python.chmod(0o755)
    make = ["make", "-C", str(REPOSITORY), "--no-print-directory", "setup", f"VENV={tmp_path / 'venv'}"]
    make.append(f"PYTHON={sys.executable}")
    done = subprocess.run(make, capture_output=True, text=True, check=True)
    packages = (REPOSITORY / "requirements.lock").read_text().count("==")
    second, third = done.stdout.splitlines()
    assert second.startswith(f"2/3 installing {packages} packages of requirements.lock")
    assert third == "3/3 installing dapo-rl"
    lock, own = (tmp_path / "words").read_text().splitlines()
    assert lock == "-m pip install -qq --disable-pip-version-check -r requirements.lock"
    assert own.startswith("-m pip install -qq ")
    assert own.endswith(" -e .")
    (tmp_path / "venv" / ".set-up").unlink()
    subprocess.run([*make, "MAKE_TERMOUT=/dev/tty"], capture_output=True, check=True)
    assert "-qq" not in (tmp_path / "words").read_text().splitlines()[2]
