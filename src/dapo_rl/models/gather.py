"""Rows that are read several times, such as the tokens of a prompt that several samples share.

Shapes: T rows, R reads of them, N elements of a row.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.models.transfer import to_device


class Reads:
    """`reads.of(x)` is `x[indices]`, with a backward pass that is deterministic on every device.

    On a GPU, the reads of each row are listed once on the host, and each row's gradient is the sum over its list. The
    backward pass of `torch.embedding` would sort the indices in every layer, and that of `index_select` adds in the
    order in which threads arrive.
    """

    def __init__(self, indices_R: npt.NDArray[np.int64], rows: int, device: torch.device) -> None:
        self._on_host, self._rows, self._device = indices_R, rows, device
        self.indices = to_device(indices_R, device)

    def of(self, x: Tensor) -> Tensor:
        flat_TN = x.flatten(1)
        if x.is_cuda and x.requires_grad and torch.is_grad_enabled() and (lists := self._lists) is not None:
            from dapo_rl.models.kernels.gather import read_rows

            read_RN = read_rows(flat_TN, self.indices, *lists)
        else:
            read_RN = torch.embedding(flat_TN, self.indices)
        return read_RN.view(-1, *x.shape[1:])

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor] | None:
        """The reads of row 0, of row 1 and so on, and where each row's begin; None without Triton."""
        try:
            import triton  # noqa: F401
        except ImportError:
            return None
        order_R, starts_T = reads_by_row(self._on_host, self._rows)
        return to_device(order_R, self._device), to_device(starts_T, self._device)


def reads_by_row(indices_R: npt.NDArray[np.int64], rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The reads in the order of their rows, and the number of reads of earlier rows, for each row and the end."""
    order_R = np.argsort(indices_R, kind="stable").astype(np.int32)
    starts_T = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(indices_R, minlength=rows), out=starts_T[1:])
    return order_R, starts_T
