"""Prompts: sources of rows, conversion to tokens, and the order in which prompts are drawn."""

from dapo_rl.data.build import held_out_prompts, stream_of, training_prompts
from dapo_rl.data.lazy import LazyStream
from dapo_rl.data.prompts import PromptSet, build_prompts, copies, once_each
from dapo_rl.data.replay import ReplayStream
from dapo_rl.data.rows import BadRow, Row, Rows
from dapo_rl.data.selection import SelectedStream
from dapo_rl.data.sources import load_rows
from dapo_rl.data.stream import MixedStream, PromptStream, Stream

__all__ = [
    "BadRow",
    "LazyStream",
    "MixedStream",
    "PromptSet",
    "PromptStream",
    "ReplayStream",
    "Row",
    "Rows",
    "SelectedStream",
    "Stream",
    "build_prompts",
    "copies",
    "held_out_prompts",
    "load_rows",
    "once_each",
    "stream_of",
    "training_prompts",
]
