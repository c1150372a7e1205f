"""Templates with names in braces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dapo_rl.base.suggest import did_you_mean, nearest

_IN_BRACES = re.compile(r"\{(\w+)\}")


def filled(template: str, texts: Mapping[str, str]) -> str:
    """The template with the texts in place, in one pass: braces in a text are text."""
    return _IN_BRACES.sub(lambda found: texts.get(found[1], found[0]), template)


def fault_of_names(template: str, known: Iterable[str]) -> str:
    """The error for a misspelt name, or an empty text. Names unlike any known one are literal text."""
    names = (*known,)
    for name in _IN_BRACES.findall(template):
        if name not in names and (close := nearest(name, names)):
            return f"{{{name}}} is not replaced{did_you_mean(f'{{{close}}}')}"
    return ""
