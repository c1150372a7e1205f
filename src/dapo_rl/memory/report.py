"""The memory report of `dapo check`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Memory:
    name: str
    kind: Literal["cuda", "cpu"]
    bytes: int
    here: bool = True
    """False for a GPU that the user named."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    bytes: int
    about: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    machine: Memory
    parts: tuple[MemoryPart, ...]
    """Empty if the model's size is unknown."""
    least: int
    """With micro-batches of one sample, and a KV cache for one sequence."""
    verdict: str
    """One line."""
    fits: bool | None
    """None if unknown."""

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def share(self) -> float:
        return self.total / self.machine.bytes


def memory_json(report: MemoryReport) -> dict[str, Any]:
    return {
        "machine": report.machine.name,
        "gib": round(report.machine.bytes / GIB, 2),
        "parts": {part.name: round(part.bytes / GIB, 3) for part in report.parts},
        "total": round(report.total / GIB, 2),
        "least": round(report.least / GIB, 2),
        "share": round(report.share, 3),
        "fits": report.fits,
        "verdict": report.verdict,
    }
