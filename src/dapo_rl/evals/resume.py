"""What an evaluation that is resumed must have in common with the one that began: weights, data, judges, code."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from dapo_rl.base.home import expanded
from dapo_rl.choices import is_judge
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.rewards.judge.judge_file import DECIDING, read_judge

SETTINGS = "settings.json"
ENDS = 2**20
"""Bytes at either end of a weights file that go into its fingerprint: training changes all weights."""


def judged_by(config: Config) -> dict[str, Any]:
    """What verdicts, samples and episodes depend on in files; the name of a file does not say it."""
    judges = {
        each.verifier: read_judge(Path(each.verifier)).model_dump(mode="json", include=set(DECIDING))
        for each in config.reward.verifiers
        if is_judge(each.verifier)
    }
    code = _digests_of_code(config)
    return ({"judges": judges} if judges else {}) | ({"code": code} if code else {})


def _digests_of_code(config: Config) -> dict[str, str]:
    """A digest of each file of the user's own functions and classes, by the setting's value."""
    env = config.env
    named = [config.engine, *(each.verifier for each in config.reward.verifiers), env.name, env.agent, *env.tools]
    files = {name: expanded(name.rpartition(":")[0]) for name in named if name and ".py:" in name}
    # Where one is missing, what loads it says so.
    return {name: sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items() if file.is_file()}


def check_same(home: Path, settings: dict[str, Any]) -> None:
    """Existing responses must be from the same model, problems and settings."""
    path = home / SETTINGS
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise UserError(f"{path}: cannot be read; remove {home}, or name another --out")
    settings = json.loads(json.dumps(settings))
    changed = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if changed:
        what = {"weights": "the model's weights", "rows": "the data", "judges": "the judge's file", "code": "your code"}
        listed = ", ".join(what.get(k, f"{k} {before.get(k)} → {settings.get(k)}") for k in changed[:4])
        raise UserError(f"{home}: was started with different settings: {listed}; name another --out, or remove it")


def fingerprint_of_weights(directory: Path | None) -> str | None:
    """A fingerprint of the weights in a directory; None for a model on the hub."""
    if directory is None:
        return None
    digest = sha256()
    for path in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".gguf")):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, size - ENDS))
            digest.update(f"{path.name} {size}\n".encode() + head + file.read(ENDS))
    return digest.hexdigest()[:16]
