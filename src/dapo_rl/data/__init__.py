"""Prompts: sources of rows, conversion to tokens, and the order in which prompts are drawn."""

from dapo_rl.data.build import held_out_prompts as held_out_prompts
from dapo_rl.data.build import stream_of as stream_of
from dapo_rl.data.build import training_prompts as training_prompts
from dapo_rl.data.lazy import LazyStream as LazyStream
from dapo_rl.data.prompts import PromptSet as PromptSet
from dapo_rl.data.prompts import build_prompts as build_prompts
from dapo_rl.data.prompts import copies as copies
from dapo_rl.data.prompts import once_each as once_each
from dapo_rl.data.replay import ReplayStream as ReplayStream
from dapo_rl.data.rows import BadRow as BadRow
from dapo_rl.data.rows import Row as Row
from dapo_rl.data.rows import Rows as Rows
from dapo_rl.data.selection import SelectedStream as SelectedStream
from dapo_rl.data.sources import load_rows as load_rows
from dapo_rl.data.stream import MixedStream as MixedStream
from dapo_rl.data.stream import PromptStream as PromptStream
from dapo_rl.data.stream import Stream as Stream
