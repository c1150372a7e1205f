"""Checks the built site: every link leads somewhere, and no page makes a request to another host.

    python tools/site_check.py build/site

Links to other sites are checked for their form only. The README, which is not a page, links to pages as well.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from site_links import REPOSITORY, links, page_of, repository_path

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src")}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "prefetch", "manifest"}
CSS_REQUEST = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


@dataclass
class Html(HTMLParser):
    """Ids of a page, and its links: the address, and whether the browser loads it."""

    ids: set[str] = field(default_factory=set)
    links: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if name in ("href", "src"):
                rels = set(values.get("rel", "").split()) if tag == "link" else set()
                self.links.append((value, (tag, name) in LOADED or bool(rels & LOADED_LINKS)))


def check(site: Path, readme: str = "") -> list[str]:
    """What is wrong, one line for each mistake."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    wrong = [f"{page.relative_to(site)}: {what}" for page in pages for what in _check_page(page, site, pages)]
    for path in sorted(site.rglob("*.css")):
        found = CSS_REQUEST.findall(path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(site)}: requests {address}" for address in found]
    return [*wrong, *(f"README.md: {what}" for what in _check_readme(readme, site, pages))]


def _read(path: Path) -> Html:
    html = Html()
    html.feed(path.read_text(encoding="utf-8"))
    return html


def _check_page(page: Path, site: Path, pages: dict[Path, Html]) -> Iterator[str]:
    for address, loaded in pages[page].links:
        parts = urlsplit(address)
        if parts.scheme == "data":
            continue
        if parts.scheme or parts.netloc:
            if loaded:
                yield f"requests {address}"
            elif parts.scheme != "mailto" and not _is_well_formed(address):
                yield f"{address} is not an address of the form https://host/path"
            continue
        root = site if parts.path.startswith("/") else page.parent
        target = Path(os.path.normpath(root / unquote(parts.path).lstrip("/"))) if parts.path else page
        yield from _check_target(target, unquote(parts.fragment), address, pages)


def _check_target(target: Path, anchor: str, address: str, pages: dict[Path, Html]) -> Iterator[str]:
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        yield f"{address} does not exist"
    elif anchor and target in pages and anchor not in pages[target].ids:
        yield f"{address}: there is no such heading"


def _is_well_formed(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme == "https" and "." in (parts.hostname or "") and not re.search(r"[\s<>\"`{}|\\^]", address)


def _check_readme(readme: str, site: Path, pages: dict[Path, Html]) -> Iterator[str]:
    for target in links(readme):
        path = repository_path("README.md", target)
        if not (REPOSITORY / path).is_file():
            yield f"{target} does not exist"
        elif path.startswith("docs/"):
            page = page_of(path)
            built = site / page.removesuffix(".md").removesuffix("index") if page.endswith(".md") else site / page
            yield from _check_target(built, target.partition("#")[2], target, pages)


def main() -> None:
    site = Path(sys.argv[1])
    wrong = check(site, (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
