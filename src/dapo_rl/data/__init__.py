"""Prompts: sources of rows, conversion to tokens, and the order in which prompts are drawn."""

from dapo_rl.data.lazy import LazyStream, held_out_prompts, training_prompts
from dapo_rl.data.mixture import MixedStream, Stream, stream_of
from dapo_rl.data.prompts import PromptSet, build_prompts, copies, once_each
from dapo_rl.data.rows import BadRow, Row, Rows
from dapo_rl.data.sources import load_rows
from dapo_rl.data.stream import PromptStream

__all__ = [
    "BadRow",
    "LazyStream",
    "MixedStream",
    "PromptSet",
    "PromptStream",
    "Row",
    "Rows",
    "Stream",
    "build_prompts",
    "copies",
    "held_out_prompts",
    "load_rows",
    "once_each",
    "stream_of",
    "training_prompts",
]
