"""verl's scoring of a row by its column `data_source`."""

from __future__ import annotations

import re

from dapo_rl.convert.draft import Draft

BY_SOURCE = "dapo_rl.rewards.by_source:by_source"
_PATTERNS = {
    "openai/gsm8k": r"gsm8k",
    "math_dapo": r"dapo[-_]?math|math[-_]?dapo|aime",
    "lighteval/MATH": r"(^|[/_-])math([/_.-]|$)|math[-_]?(lighteval|500|dataset)",
}
"""What the names of files with rows of a data source contain."""
_SCORES = {
    "openai/gsm8k": "1 or 0 by the number after ####",
    "math_dapo": "1 or -1 by the last Answer: line",
    "lighteval/MATH": "1 or 0 by the last \\boxed{}",
}


def data_source_of(path: str) -> str | None:
    """The data source of a file, by the end of its path."""
    end = "/".join(path.lower().split("/")[-2:])
    return next((source for source, pattern in _PATTERNS.items() if re.search(pattern, end)), None)


def data_sources(draft: Draft) -> list[str | None]:
    """The data source of each training file; None where its name does not tell."""
    paths = draft.settings.get("data.train")
    return [data_source_of(str(path)) for path in (paths if isinstance(paths, list) else [paths] if paths else [])]


def score_by_source(draft: Draft) -> None:
    """The verifier of a run without a reward function of its own. verl chooses one for each row."""
    found = data_sources(draft)
    known = list(dict.fromkeys(source for source in found if source))
    told = "; ".join(f"{source}: {_SCORES[source]}" for source in known)
    if known == ["math_dapo"] and None not in found:
        draft.put("reward.verifier", "math")
        draft.put("reward.correct", 1.0)
        draft.put("reward.wrong", -1.0)
        draft.add_row("(data_source)", "math_dapo", "same", "reward.verifier: math", told)
        return
    draft.put("reward.verifier", BY_SOURCE)
    here = f"reward.verifier: {BY_SOURCE}"
    if known and None not in found:
        draft.add_row("(data_source)", ", ".join(known), "same", here, f"as verl scores them: {told}")
        return
    note = "scores GSM8K, MATH and DAPO-Math as verl does; rows of other sources fail: then set reward.verifier"
    draft.add_row("(data_source)", ", ".join([*known, "not known"]), "differs", here, note, True)
