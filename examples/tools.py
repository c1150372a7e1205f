"""Train a model to use a tool: it learns when to call `add` instead of adding in its head.

    python examples/tools.py                              # the embedded model, in seconds
    python examples/tools.py Qwen/Qwen2.5-0.5B-Instruct

The embedded model is not told of tools and knows no format of calls, so it adds in its head.
"""

import sys

from dapo_rl import DAPOTrainer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "tiny"


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: The first one.
        b: The second one; negative to subtract.
    """
    return a + b


def correct(completions, answer, **columns):
    """1 if the last message ends with the answer, otherwise 0."""
    last = [messages[-1]["content"].split() for messages in completions]
    return [float(words[-1:] == [truth]) for words, truth in zip(last, answer, strict=True)]


def row(a, b, c):
    return {"prompt": [{"role": "user", "content": f"{a}+{b}-{c}=?"}], "answer": str(a + b - c)}


if __name__ == "__main__":
    config = {
        "sampling.prompts_per_step": 4,
        "sampling.group_size": 4,
        "sampling.max_new_tokens": 64 if MODEL == "tiny" else 512,
        "train.steps": 2,
        "train.warmup_steps": 0,
    }
    with DAPOTrainer(
        model=MODEL,
        reward_funcs=correct,
        train_dataset=[row(a, b, c) for a in range(4, 10) for b in range(4, 10) for c in range(1, 5)],
        tools=[add],
        config=config,
    ) as trainer:
        trainer.train()
