"""The part of accelerate's `Accelerator` that scripts of TRL use after training."""

from __future__ import annotations


class Accelerator:
    """A run is one process."""

    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = True
    print = staticmethod(print)

    def wait_for_everyone(self) -> None:
        pass
