"""The documentation site: it builds, its links lead somewhere, and it has every setting and every command."""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import site_check
import site_links
import yaml
from support import REPOSITORY

from dapo_rl.cli import app
from dapo_rl.config import known_keys


def build(root, site):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    words = [sys.executable, "-m", "mkdocs", "build", "-f", str(root / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path = tmp_path_factory.mktemp("site")
    result = build(REPOSITORY, path)
    assert result.returncode == 0, result.stdout + result.stderr
    return path


def page(site: Path, name: str) -> site_check.Html:
    parsed = site_check.Html()
    parsed.feed((site / name / "index.html").read_text())
    return parsed


@pytest.mark.slow
def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert site_check.check(site, (REPOSITORY / "README.md").read_text()) == []


def test_every_setting_has_a_row(site):
    assert set(known_keys()) <= page(site, "settings").ids
    text = (site / "settings" / "index.html").read_text()
    row = text[text.index('id="train.lr"') : text.index('id="train.lr_schedule"')]
    assert "<code>1e-06</code>" in row
    assert "number, &gt; 0" in row
    assert "AdamW's learning rate." in row


def test_the_presets_are_compared(site):
    text = (site / "settings" / "index.html").read_text()
    row = text[text.index("<code>algo.clip_high</code>") :].partition("</tr>")[0]
    assert [part.partition("</code>")[0] for part in row.split("<code>")[2:]] == ["0.28", "0.2", "0.2", "0.28", "0.2"]


def test_every_command_has_a_heading(site):
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    commands = {f"dapo {_name(command)}" for command in app.registered_commands}
    commands |= {
        f"dapo {name} {_name(command)}" for name, part in groups.items() for command in part.registered_commands
    }
    assert {"dapo train", "dapo bench rollout"} <= commands
    assert {command.replace(" ", "-") for command in commands} <= page(site, "commands").ids


def _name(command):
    return command.name or command.callback.__name__


def test_the_settings_are_not_repeated_under_the_command(site):
    text = (site / "commands" / "index.html").read_text()
    assert "sampling.prompts_per_step =" not in text
    assert 'href="../settings/"' in text


def test_a_linked_file_of_the_repository_has_a_page(site):
    text = (site / "source" / "examples" / "own_loss.py" / "index.html").read_text()
    assert '<h1 id="examplesown_losspy">examples/own_loss.py' in text
    shown = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert (REPOSITORY / "examples" / "own_loss.py").read_text().strip() in shown
    assert "../source/examples/own_loss.py/" in (site / "losses" / "index.html").read_text()


def test_the_notebook_is_a_page_with_its_picture(site):
    assert (site / "quickstart-1.png").read_bytes().startswith(b"\x89PNG")
    assert ("../quickstart-1.png", True) in page(site, "quickstart").links


@pytest.mark.slow
def test_a_mistake_fails_the_build(tmp_path):
    """A page that is not in the navigation, a link to no page and one to no heading."""
    root = tmp_path / "root"
    shutil.copytree(REPOSITORY / "docs", root / "docs")
    shutil.copy(REPOSITORY / "mkdocs.yml", root)
    (root / "tools").symlink_to(REPOSITORY / "tools")
    (root / "docs" / "forgotten.md").write_text("# Forgotten\n")
    with (root / "docs" / "losses.md").open("a") as file:
        file.write("\n[a](nowhere.md) [b](engines.md#no-heading)\n")
    result = build(root, tmp_path / "site")
    assert result.returncode == 1
    warnings = "\n".join(result.stderr.split("\nWARNING ")[1:])
    assert [name for name in ("forgotten.md", "'nowhere.md'", "'engines.md#no-heading'") if name not in warnings] == []
    assert result.stderr.count("\nWARNING ") == 3


def test_what_the_check_finds(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "style.css").write_text("@import 'https://fonts.example.org/a.css'; b { background: url(//x.org/y) }")
    (tmp_path / "other" / "index.html").write_text('<h1 id="top">Title</h1>')
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="style.css"> <a href="other/#top">right</a> <a href="https://arxiv.org/abs/1">x</a>'
        '<a href="other/#bottom"></a> <a href="missing/"></a> <a href="http://example.org"></a> <a href="https://host"></a>'
        '<script src="https://cdn.example.org/a.js"></script> <link rel="preconnect" href="https://fonts.example.org">'
    )
    assert site_check.check(tmp_path, "[a](docs/losses.md) [b](docs/none.md) [c](LICENSE) [d](docs/index.md)") == [
        "index.html: other/#bottom: there is no such heading",
        "index.html: missing/ does not exist",
        "index.html: http://example.org is not an address of the form https://host/path",
        "index.html: https://host is not an address of the form https://host/path",
        "index.html: requests https://cdn.example.org/a.js",
        "index.html: requests https://fonts.example.org",
        "style.css: requests https://fonts.example.org/a.css",
        "style.css: requests //x.org/y",
        "README.md: docs/losses.md does not exist",
        "README.md: docs/none.md does not exist",
    ]


def test_links_of_the_repository_become_links_of_the_site():
    markdown = (
        "[a](losses.md#x) ![b](board.png) [c](../examples/own_loss.py) [`d`](../CONTRIBUTING.md) [e](https://a.org)\n"
        "[f](#g) `[h](../i.md)`\n\n```text\n[j](../k.md)\n```\n[l](../examples/quickstart.ipynb)\n"
    )
    assert site_links.rewrite(markdown, lambda target: site_links.on_site("docs/page.md", target)) == (
        "[a](losses.md#x) ![b](board.png) [c](source/examples/own_loss.py.md) [`d`](contributing.md) [e](https://a.org)\n"
        "[f](#g) `[h](../i.md)`\n\n```text\n[j](../k.md)\n```\n[l](quickstart.md)\n"
    )
    assert site_links.on_site("CHANGELOG.md", "docs/verify.md#memory") == "verify.md#memory"


def test_the_navigation_names_each_page_once():
    class Loader(yaml.SafeLoader):
        """Does not resolve the functions that the file names."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), Loader)["nav"]
    pages = [path for section in nav for entries in section.values() for entry in entries for path in entry.values()]
    assert len(pages) == len(set(pages))
