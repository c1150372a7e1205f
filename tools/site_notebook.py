"""A notebook as a page of the site: its text, its code, and the outputs that are stored in the file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def notebook_page(path: Path, name: str) -> tuple[str, dict[str, bytes]]:
    """Markdown, and the pictures in it by file name."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"```python\n{source}\n```")
            parts += [part for output in cell["outputs"] for part in _output(output, name, pictures)]
    return "\n\n".join(parts) + "\n", pictures


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode("".join(data["image/png"]))
        yield f"![Output]({file})"
    elif text := "".join(output.get("text") or data.get("text/plain") or ""):
        yield f"```text\n{text.rstrip()}\n```"
