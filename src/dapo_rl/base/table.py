"""Tables of figures on the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table


def figure_table(*heads: str, texts: int = 1) -> Table:
    """A table of which the first columns, `texts` of them, are text, and the others figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < texts else "right")
    return table
