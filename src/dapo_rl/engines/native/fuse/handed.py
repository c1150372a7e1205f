"""Results that one fused module computes for another."""

from __future__ import annotations

from torch import Tensor


class Handed:
    """A result that one module computes for another: for one input, to be used once."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._result: Tensor | None = None

    def leave(self, x: Tensor, result: Tensor) -> None:
        self._input, self._result = x, result

    def take(self, x: Tensor) -> Tensor | None:
        if self._input is not x:
            return None
        result, self._input, self._result = self._result, None, None
        return result
