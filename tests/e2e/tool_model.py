"""A model that calls tools: the embedded one with tokens that are whole calls of the calculator.

python tests/e2e/tool_model.py DIRECTORY
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_rl.models.load import TINY

SUMS = ("7+8", "9+4", "6*7", "12-5", "3+", "2**70")
CALLS = tuple(
    f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{each}"}}}}</tool_call>' for each in SUMS
)
SETTINGS = (
    "env.tools=calculator", "env.tool_format=hermes", "env.max_turns=4", "env.max_observation_tokens=96",
    "env.workers=2", "data.train.size=200", "data.eval=null", "eval.every=null", "log.report=false",
    "sampling.max_new_tokens=48", "sampling.prompts_per_step=4", "sampling.group_size=4", "sampling.ahead=1",
    "sampling.dynamic=false", "train.mini_batches=2", "train.epochs_per_step=1", "train.warmup_steps=0",
)  # fmt: skip
"""A small recipe for it, on the sums of the demo. Checkpoints have unfinished episodes."""


def recipe(directory: Path) -> list[str]:
    """Saves the model; the settings of a run of it."""
    save(directory)
    return [f"model.name={directory}", *SETTINGS]


def save(directory: Path, calls: Sequence[str] = CALLS) -> None:
    """A call is about half as likely as a digit, at any time."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY)
    tokenizer.add_tokens(list(calls))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        weights = model.get_input_embeddings().weight
        like = weights[[vocabulary[digit] for digit in "123456"[: len(calls)]]]
        weights[-len(calls) :] = like * 0.9
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
