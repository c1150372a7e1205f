"""Prompts: sources of rows, conversion to tokens, and the order in which prompts are drawn."""

from dapo_rl.data.prompts import PromptSet, build_prompts, copies, once_each
from dapo_rl.data.rows import BadRow, Row, Rows
from dapo_rl.data.sources import load_rows
from dapo_rl.data.stream import PromptStream

__all__ = ["BadRow", "PromptSet", "PromptStream", "Row", "Rows", "build_prompts", "copies", "load_rows", "once_each"]
