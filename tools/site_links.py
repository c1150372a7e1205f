"""Links between files of the repository, as links between pages of the site.

A page of docs/ may link to any file of the repository, as on GitHub: `../examples/own_loss.py`. On the site such a file
has a page with its text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[1]
INCLUDED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages of the site."""
NOTEBOOKS = {"examples/quickstart.ipynb": "quickstart.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}

_CODE = re.compile(r"^(```|~~~).*?^\1|`+[^`\n]+`+(?!\])", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def links(markdown: str) -> Iterator[str]:
    """Targets of the links and images of a page that lead to a file."""
    yield from (match[1] for match in _targets(markdown))


def _targets(markdown: str) -> Iterator[re.Match[str]]:
    code = [match.span() for match in _CODE.finditer(markdown)]
    for match in _TARGET.finditer(markdown):
        if not any(start <= match.start() < end for start, end in code):
            yield match


def rewrite(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for match in _targets(markdown):
        parts += [markdown[end : match.start(1)], change(match[1])]
        end = match.end(1)
    return "".join([*parts, markdown[end:]])


def repository_path(page: str, target: str) -> str:
    """The file that a link on a page leads to, from the root of the repository. `page` is given in the same way."""
    path = target.partition("#")[0]
    return os.path.normpath(PurePosixPath(page).parent / path)


def page_of(path: str) -> str:
    """The page that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return INCLUDED.get(path) or NOTEBOOKS.get(path) or f"source/{path}.md"


def on_site(page: str, target: str) -> str:
    """A link of a file of the repository, as a link of its page."""
    _, hash_sign, anchor = target.partition("#")
    path = os.path.relpath(page_of(repository_path(page, target)), PurePosixPath(page_of(page)).parent)
    return f"{path}{hash_sign}{anchor}"


def source_page(path: str) -> str:
    """A page with the text of a file."""
    file = REPOSITORY / path
    text = file.read_text(encoding="utf-8").rstrip("\n")
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def linked_sources(pages: dict[str, str]) -> set[str]:
    """Files that need a source page. `pages` has the text of each page by its path in the repository."""
    paths = {repository_path(page, target) for page, text in pages.items() for target in links(text)}
    return {path for path in paths if page_of(path).startswith("source/") and (REPOSITORY / path).is_file()}
