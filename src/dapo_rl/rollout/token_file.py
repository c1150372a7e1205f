"""The token file of a sampler's state, `samples.safetensors`: the samples one after the other, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dapo_rl.engines.protocol import Begun
from dapo_rl.types import FinishReason, Sample

TOKENS = "samples.safetensors"
Tokens = Sample | Begun
"""Both have ids, log-probabilities, versions and a mask."""


def write_tokens(path: Path, samples: Sequence[Tokens]) -> None:
    texts = [sample.text.encode("utf-8", "surrogatepass") if isinstance(sample, Sample) else b"" for sample in samples]

    def joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:  # type: ignore[type-arg]
        return np.concatenate([np.empty(0, dtype), *parts])

    save_file(
        {
            "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
            "token_ids": joined((sample.token_ids for sample in samples), np.int32),
            "logps": joined((sample.logps for sample in samples), np.float32),
            "versions": joined((sample.versions for sample in samples), np.int32),
            "mask": joined((sample.mask for sample in samples), np.bool_),
            "text_lengths": np.array([len(text) for text in texts], np.int64),
            "texts": np.frombuffer(b"".join(texts), np.uint8),
        },
        path,
    )


class TokenFile:
    """Reads the samples of a file one after the other."""

    def __init__(self, path: Path, longest: int, vocabulary: int) -> None:
        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        kinds = {"lengths": "int64", "token_ids": "int32", "logps": "float32", "versions": "int32", "mask": "bool"}
        kinds |= {"text_lengths": "int64", "texts": "uint8"}
        if {name: str(array.dtype) for name, array in arrays.items()} != kinds:
            raise ValueError("it has the wrong columns")
        if any(array.ndim != 1 for array in arrays.values()):
            raise ValueError("its columns are not one-dimensional")
        self._arrays = arrays
        lengths, text_lengths = arrays["lengths"], arrays["text_lengths"]
        count = len(arrays["token_ids"])
        fits = len(lengths) == len(text_lengths) and (text_lengths >= 0).all()
        fits = fits and ((lengths > 0) & (lengths <= longest)).all() and lengths.sum() == count
        fits = fits and (text_lengths <= len(arrays["texts"])).all() and text_lengths.sum() == len(arrays["texts"])
        if not fits or any(len(arrays[name]) != count for name in ("logps", "versions", "mask")):
            raise ValueError("lengths are inconsistent")
        if count and not (arrays["token_ids"].min() >= 0 and arrays["token_ids"].max() < vocabulary):
            raise ValueError("it has tokens outside the vocabulary")
        if not np.isfinite(arrays["logps"]).all() or (count and arrays["versions"].min() < 0):
            raise ValueError("it has invalid log-probabilities or versions")
        self._ends, self._text_ends = np.cumsum(lengths).tolist(), np.cumsum(text_lengths).tolist()
        self.count, self._next = len(lengths), 0

    def sample(self, finish_reason: FinishReason) -> Sample:
        place, text = self._take()
        columns = [self._arrays[name][place] for name in ("token_ids", "logps", "versions", "mask")]
        return Sample(columns[0], columns[1], text, finish_reason, columns[2], columns[3])

    def begun(self, index: int) -> Begun:
        place, _ = self._take()
        return Begun(index, *(self._arrays[name][place] for name in ("token_ids", "logps", "versions", "mask")))

    def _take(self) -> tuple[slice, str]:
        i = self._next
        self._next += 1
        place = slice(self._ends[i - 1] if i else 0, self._ends[i])
        text = self._arrays["texts"][self._text_ends[i - 1] if i else 0 : self._text_ends[i]]
        return place, text.tobytes().decode("utf-8", "surrogatepass")
