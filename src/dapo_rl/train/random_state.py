"""The global random number generators, saved as JSON. Sampling does not use them, but custom functions may."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

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
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    except StopRequested:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        torch.cuda.set_rng_state_all(on_gpus)
        raise


class RandomState:
    """The checkpoint part that saves the states of the global random number generators."""

    def save(self, directory: Path) -> None:
        kind, keys, *rest = np.random.get_state()
        state = {
            "python": random.getstate(),
            "numpy": [kind, np.asarray(keys).tolist(), *rest],
            "torch": _text(torch.get_rng_state()),
            "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        }
        write_state(directory / FILE, state)

    def load(self, directory: Path) -> None:
        """A GPU without a saved state keeps its own."""
        path = directory / FILE
        with restoring(path):
            state = parse_state(SavedRandom, read_state(path))
            version, internal, gauss = state.python
            random.setstate((version, tuple(internal), gauss))
            kind, keys, position, has_gauss, cached = state.numpy
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
            try:
                torch.set_rng_state(_tensor(state.torch))
                if torch.cuda.is_available():
                    for device, text in enumerate(state.cuda[: torch.cuda.device_count()]):
                        torch.cuda.set_rng_state(_tensor(text), device)
            except RuntimeError as error:
                raise ValueError(f"torch: {error}") from None


def _text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
