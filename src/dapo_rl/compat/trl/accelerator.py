"""The part of accelerate's `Accelerator` that scripts of TRL use after training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A run is one process."""

    num_processes: int = 1
    process_index: int = 0
    local_process_index: int = 0
    is_main_process: bool = True
    is_local_main_process: bool = True

    def print(self, *values: Any, **options: Any) -> None:
        print(*values, **options)

    def wait_for_everyone(self) -> None:
        pass
