"""Finished rows become samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from dapo_rl.engines.native.slots import BatchRow, SlotState
from dapo_rl.engines.protocol import Completion
from dapo_rl.engines.stopping import StopSearch, StopStrings, make_sample
from dapo_rl.models.device import to_device
from dapo_rl.types import FinishReason, IntArray, Trajectory


class OutputProcessor:
    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._stop_strings = cache(partial(StopStrings, tokenizer))

    def collect(
        self, state: SlotState, rows: Sequence[BatchRow], done: Sequence[int], version: int
    ) -> tuple[list[Completion], list[BatchRow]]:
        """The samples of rows that have ended, and those rows. `done` says which the device knows to have ended."""
        # The device does not know stop strings: a row that is not done may have reached one.
        stopped = self._search(state, [row for row in rows if row.request.params.stop])
        ended = [row for row, is_done in zip(rows, done, strict=True) if is_done or row.slot in stopped]
        completions = []
        for row, written in zip(ended, self.written(state, ended, version), strict=True):
            end = self._end(row, written.token_ids, stopped.get(row.slot))
            stop_ids = frozenset[int]() if row.request.params.ignore_eos else self._stop_ids
            sample = make_sample(self._tokenizer, written, *end, stop_ids)
            completions.append(Completion(row.request.id, row.index, sample))
        return completions, ended

    def written(self, state: SlotState, rows: Sequence[BatchRow], version: int) -> list[Trajectory]:
        """The rows with their tokens."""
        if not rows:
            return []
        width = max(row.written for row in rows)
        slots = to_device(np.array([row.slot for row in rows]), state.done.device)
        tokens, logps = (x[slots, :width].cpu().numpy() for x in (state.tokens, state.logps))
        result = []
        for row, row_tokens, row_logps in zip(rows, tokens, logps, strict=True):
            new, most_kept = slice(len(row.partial.token_ids), row.written), row.request.params.most_kept
            kept_ids = state.kept_ids[row.slot, new, :most_kept].cpu().numpy() if most_kept else None
            tokens_of_row = row_tokens[new].astype(np.int32)
            result.append(row.partial.then(tokens_of_row, row_logps[new], version, kept_ids=kept_ids))
        return result

    def _search(self, state: SlotState, rows: Sequence[BatchRow]) -> dict[int, int]:
        """Searches the tokens since the last look for stop strings; returns the lengths of the responses that have one,
        by slot."""
        found: dict[int, int] = {}
        new: list[tuple[BatchRow, StopSearch, int]] = []
        for row in rows:
            if row.search is None:
                row.search = StopSearch(self._stop_strings(row.request.params.stop))
                row.search.skip(row.partial.token_ids, row.partial.mask)
            if row.written > row.search.count:
                new.append((row, row.search, row.written - row.search.count))
        if not new:
            return found
        device = state.done.device
        slots = torch.tensor([row.slot for row, _, _ in new], device=device)
        starts = torch.tensor([search.count for _, search, _ in new], device=device)
        width = torch.arange(max(count for _, _, count in new), device=device)
        places = (starts[:, None] + width).clamp(max=state.tokens.shape[1] - 1)
        tokens = state.tokens[slots[:, None], places].cpu().numpy().astype(np.int32)
        for (row, search, count), row_tokens in zip(new, tokens, strict=True):
            if (end := search.find(row_tokens[:count])) is not None:
                found[row.slot] = end
        return found

    def _end(self, row: BatchRow, tokens: IntArray, stopped: int | None) -> tuple[int, FinishReason]:
        """The length of a finished response, and its finish reason."""
        if stopped is not None:
            return stopped, "stop"
        by_token = int(tokens[-1]) in self._stop_ids and not row.request.params.ignore_eos
        return len(tokens), "stop" if by_token else "length"
