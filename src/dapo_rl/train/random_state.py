"""The global random number generators, saved as JSON. Sampling does not use them, but custom functions may."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field

from dapo_rl.base.saved import AsTuple, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.errors import StopRequested

FILE = "random.json"
Word = Annotated[int, Field(ge=0, lt=2**32)]
HexText = Annotated[str, AfterValidator(lambda text: bytes.fromhex(text).hex())]


class SavedRandom(Saved):
    python: Annotated[
        tuple[Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], float | None], AsTuple
    ]
    numpy: Annotated[
        tuple[
            Literal["MT19937"],
            Annotated[list[Word], Field(min_length=624, max_length=624)],
            Annotated[int, Field(ge=0, le=624)],
            Annotated[int, Field(ge=0, le=1)],
            float,
        ],
        AsTuple,
    ]
    torch: HexText
    cuda: list[HexText]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def unless_stopped() -> Iterator[None]:
    """A StopRequested in the block leaves the generators as they were before: the block is repeated later."""
    before = _states()
    try:
        yield
    except StopRequested:
        _restore(*before)
        raise


def _states() -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpus


def _restore(python: Any, numpy: Any, on_cpu: torch.Tensor, on_gpus: Sequence[torch.Tensor]) -> None:
    """A GPU without a state keeps its own."""
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(on_cpu)
    for device, state in enumerate(on_gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


class RandomState:
    def save(self, directory: Path) -> None:
        python, (kind, keys, *rest), on_cpu, on_gpus = _states()
        state = {
            "python": python,
            "numpy": [kind, np.asarray(keys).tolist(), *rest],
            "torch": _text(on_cpu),
            "cuda": [_text(state) for state in on_gpus],
        }
        write_state(directory / FILE, state)

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            state = parse_state(SavedRandom, read_state(path))
            version, internal, gauss = state.python
            kind, keys, *rest = state.numpy
            numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
            on_gpus = [_tensor(text) for text in state.cuda]
            try:
                _restore((version, tuple(internal), gauss), numpy, _tensor(state.torch), on_gpus)
            except RuntimeError as error:
                raise ValueError(f"torch: {error}") from None


def _text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
