"""docs/install.md lists every extra with its packages, and the supported versions of Python."""

import re
import tomllib

from packaging.requirements import Requirement
from support import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PAGE = (REPOSITORY / "docs" / "install.md").read_text()


def test_every_extra_is_there_with_its_packages():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE))
    extras = {
        name: ", ".join(Requirement(line).name for line in lines)
        for name, lines in PROJECT["optional-dependencies"].items()
    }
    assert rows.pop("dev").startswith("pytest")
    assert "dev" in extras
    assert rows == {name: packages for name, packages in extras.items() if name != "dev"}


def test_the_versions_of_python():
    lowest, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    *first, last = [f"3.{minor}" for minor in range(int(lowest), int(end))]
    assert f"Python {', '.join(first)} or {last}" in PAGE
