"""Builds the prompts of `data.train` and `data.eval`, and the order in which they are drawn."""

from __future__ import annotations

from dataclasses import replace

from dapo_rl.config import DataSettings, weights_of
from dapo_rl.data.chat import PromptReader, Tokenizer
from dapo_rl.data.informative_mixture import InformativeMixture
from dapo_rl.data.lazy import LazyStream
from dapo_rl.data.prompts import Fits, PromptBuilder, PromptSet, always_fits, build_prompts
from dapo_rl.data.rows import Rows, RowStream
from dapo_rl.data.sources import Source, as_sources, open_each, open_rows
from dapo_rl.data.stream import MixedStream, PromptStream, Stream
from dapo_rl.errors import UserError


def training_prompts(
    source: Source,
    tokenizer: Tokenizer,
    settings: DataSettings,
    needs_answer: bool = False,
    fits: Fits = always_fits,
) -> PromptSet:
    """All prompts of `data.train`; of a stream, its first ones."""

    def of(rows: Rows | RowStream) -> PromptSet:
        if isinstance(rows, RowStream):
            return _lazy(rows, tokenizer, settings, needs_answer, fits).look_ahead()
        return build_prompts(rows, tokenizer, settings, needs_answer, fits)

    sources = as_sources(source, "data.train")
    weights = weights_of(sources) if isinstance(sources, tuple) else None
    if weights is None:
        return of(open_rows(sources, key="data.train"))
    opened = open_each(sources, "data.train")
    parts = tuple(replace(of(rows), weight=weight) for rows, weight in zip(opened, weights, strict=True))
    prompts, bad = [p for part in parts for p in part.prompts], [row for part in parts for row in part.bad]
    count, too_long = sum(part.rows for part in parts), sum(part.too_long for part in parts)
    outside, limit = sum(part.outside for part in parts), settings.max_prompt_tokens
    window = settings.pass_rate
    return PromptSet("data.train", count, prompts, too_long, limit, bad, parts=parts, outside=outside, window=window)


def held_out_prompts(
    source: Source,
    tokenizer: Tokenizer,
    settings: DataSettings,
    needs_answer: bool,
    most: int | None,
    fits: Fits = always_fits,
) -> PromptSet:
    """All prompts of `data.eval`; of a stream, the first `most`."""
    rows, settings = open_rows(source, key="data.eval"), settings.model_copy(update={"pass_rate": None})
    if not isinstance(rows, RowStream):
        return build_prompts(rows, tokenizer, settings, needs_answer, fits)
    if most is None:
        raise UserError("data.eval: a stream needs eval.prompts, the number of prompts to take from its beginning")
    return replace(_lazy(rows, tokenizer, settings, needs_answer, fits).look_ahead(most), stream=None)


def _lazy(rows: RowStream, tokenizer: Tokenizer, settings: DataSettings, needs_answer: bool, fits: Fits) -> LazyStream:
    reader = PromptReader(tokenizer, settings, rows.key)
    return LazyStream(rows, PromptBuilder(reader, rows.source, settings, needs_answer, fits))


def stream_of(prompts: PromptSet, seed: int, informative_batch: int = 0) -> Stream:
    """The order in which the prompts are drawn. With `informative_batch`, the number of groups of a step, the weights
    of a list follow the informative groups of its entries."""
    if not prompts.parts:
        return prompts.stream or PromptStream(prompts.prompts, seed)
    by_origin = {part.prompts[0].origin: part for part in prompts.parts}
    streams = {origin: part.stream or PromptStream(part.prompts, seed, origin) for origin, part in by_origin.items()}
    weights = {origin: part.weight for origin, part in by_origin.items()}
    size = 0 if prompts.is_stream else len(prompts.prompts)
    if informative_batch:
        return InformativeMixture(streams, weights, size, informative_batch)
    return MixedStream(streams, weights, size)
