"""Events of MkDocs: adds the generated pages and turns links to files of the repository into links to pages."""

from __future__ import annotations

import site_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from site_links import INCLUDED, NOTEBOOKS, REPOSITORY
from site_notebook import notebook_page
from site_reference import commands_page, settings_page

_repository_paths = {page: path for path, page in INCLUDED.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    def add(page: str, content: str | bytes, inclusion: InclusionLevel = InclusionLevel.UNDEFINED) -> None:
        files.append(File.generated(config, page, content=content, inclusion=inclusion))

    add("settings.md", settings_page())
    add("commands.md", commands_page())
    for path, page in INCLUDED.items():
        add(page, (REPOSITORY / path).read_text(encoding="utf-8"))
    for path, page in NOTEBOOKS.items():
        text, pictures = notebook_page(REPOSITORY / path, page.removesuffix(".md"))
        add(page, text)
        for name, picture in pictures.items():
            add(name, picture)
    pages = {_repository_path(file.src_uri): file.content_string for file in files.documentation_pages()}
    for path in sorted(site_links.linked_sources(pages)):
        add(site_links.page_of(path), site_links.source_page(path), InclusionLevel.NOT_IN_NAV)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    path = _repository_path(page.file.src_uri)
    return site_links.rewrite(markdown, lambda target: site_links.on_site(path, target))


def _repository_path(page: str) -> str:
    return _repository_paths.get(page, f"docs/{page}")
