"""The run directory: everything that a run leaves behind, and all that a resumed run or a reader needs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.runs.files import atomic_write
from dapo_rl.runs.rollouts import GroupRow, write_table

__all__ = ["GroupRow", "RunDirectory", "atomic_write"]


class RunDirectory:
    """Paths into a run directory, its writers and its readers. One process writes at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.rollouts_path = self.path / "rollouts"
        self.checkpoints_path = self.path / "checkpoints"
        self.model_path = self.path / "model"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.png"

    @classmethod
    def create(cls, path: str | Path, config: Config) -> RunDirectory:
        """A directory for a new run; one that holds a run already is left as it is."""
        run = cls(path)
        try:
            if run._holds_a_run():
                raise UserError(f"{path}: holds a run already; continue it with --resume, or name another with --run")
            run.path.mkdir(parents=True, exist_ok=True)
            run.write_config(config)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{path}: is not a directory; name another with --run") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; name another with --run") from None
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """The directory of a run that was started before."""
        run = cls(path)
        if not run.config_path.is_file():
            raise UserError(f"{path}: no run here (no config.yaml); start one without --resume, or name it with --run")
        return run

    def rollout(self, step: int) -> Path:
        return self.rollouts_path / f"step-{step:06d}.parquet"

    def read_config(self) -> Config:
        return Config.load(self.config_path)

    def write_config(self, config: Config) -> None:
        atomic_write(self.config_path, yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True))

    def append_metrics(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """One line of JSON, in the hands of the operating system when this returns."""
        line = {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """A dictionary for each step; null is read as None. A last line that was cut off is left out."""
        return [record for _, record in self._metric_lines()]

    def truncate_metrics(self, last_step: int) -> None:
        """Forgets what was recorded after `last_step`, where a resumed run goes on."""
        kept = [line for line, record in self._metric_lines() if record["step"] <= last_step]
        if self.metrics_path.exists():
            atomic_write(self.metrics_path, b"".join(line + b"\n" for line in kept))
        for file in self.rollouts_path.glob("step-*.parquet"):
            step = file.stem.removeprefix("step-")
            if step.isdecimal() and int(step) > last_step:
                file.unlink()

    def write_rollouts(self, step: int, rows: Sequence[GroupRow]) -> None:
        self.rollouts_path.mkdir(exist_ok=True)
        write_table(self.rollout(step), step, rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        atomic_write(self.summary_path, json.dumps(_json_value(summary), indent=2, allow_nan=False) + "\n")

    def _holds_a_run(self) -> bool:
        return self.metrics_path.exists() or (self.checkpoints_path.is_dir() and any(self.checkpoints_path.iterdir()))

    def _metric_lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        if not self.metrics_path.exists():
            return
        lines = self.metrics_path.read_bytes().rstrip(b"\n").split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                record["step"] = int(record["step"])
            except (ValueError, TypeError, KeyError):
                if number == len(lines):  # what a crash left of a line, or an empty file
                    return
                raise UserError(f"{self.metrics_path}:{number}: not a line of metrics; delete the line") from None
            yield line, record


def _json_number(value: float | None) -> float | int | None:
    """JSON has no NaN and no infinity. Scalars of array libraries become plain numbers."""
    if value is None or isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, str) else _json_number(value)
