"""The tables and pictures of docs/evidence-pretrained.md, from the run directories of its commands, and the numbers of
each seed in docs/evidence/.

    python tools/evidence_pretrained.py runs/evidence          # reads the runs, writes JSON and pictures
    python tools/evidence_pretrained.py runs/evidence NAME …   # only these experiments
    python tools/evidence_pretrained.py --tables               # prints the table of the saved JSON
"""

from __future__ import annotations

import sys
from dataclasses import replace

import evidence
from evidence import ACCURACY, TOKENS, Experiment, Panel

SMOLLM2, QWEN = "smollm2-sums", "qwen-gsm8k"
EQUAL = Panel("reward/zero_std_share", "Sampled groups whose rewards are all equal", "% of groups", 100)
CUT_OFF = Panel("response_length/clip_ratio", "Responses cut off", "% of responses", 100)
LENGTH = Panel("response_length/mean", "Length of responses", "tokens")
CLIPPED = Panel("actor/pg_clipfrac_high", "Tokens clipped at the upper bound", "% of tokens", 100)
ENTROPY = Panel("actor/entropy", "Entropy", "nats per token")


def _by_steps_and_tokens(level: float | None) -> tuple[Panel, Panel]:
    return (
        replace(ACCURACY, title="Held-out accuracy by steps", level=level),
        replace(ACCURACY, title="… and by tokens", x=TOKENS, level=level),
    )


CLIP = Experiment(
    "smollm2-clip",
    "Clip-Higher",
    "algo.clip_high=0.2,0.28",
    "without",
    ("mean_entropy", "accuracy"),
    (CLIPPED, ENTROPY, ACCURACY),
    "SmolLM2-135M, 16 updates per step at a learning rate of 3e-5: accuracy falls with either bound",
    recipe=SMOLLM2,
    settings="train.steps=24 train.mini_batches=8 train.epochs_per_step=2",
)
CLIP_SLOW = replace(
    CLIP,
    name="smollm2-clip-slow",
    settings=f"{CLIP.settings} train.lr=6e-6",
    title="SmolLM2-135M, 16 updates per step at a learning rate of 6e-6: entropy falls with either bound",
)
CLIP_QWEN = replace(
    CLIP,
    name="qwen-clip",
    title="Qwen2.5-Coder-1.5B, 16 updates per step: Clip-Higher and entropy",
    recipe=QWEN,
    settings="train.steps=8 train.mini_batches=16 train.token_budget=4096",
)
DYNAMIC = Experiment(
    "smollm2-dynamic",
    "Dynamic Sampling",
    "sampling.dynamic=false,true",
    "without",
    ("steps_to", "tokens_to"),
    (EQUAL, *_by_steps_and_tokens(22)),
    "SmolLM2-135M: with Dynamic Sampling, more is learned per step, and less per token at first",
    0.22,
    recipe=SMOLLM2,
)
TOKEN_LEVEL = Experiment(
    "smollm2-tokens",
    "Token-level Loss",
    "algo.aggregation=seq-mean-token-mean,token-mean",
    "a mean per response",
    ("mean_length", "repetition"),
    (LENGTH, Panel("repetition", "Repeated 4-grams", "% of a response", 100), ACCURACY),
    "SmolLM2-135M: responses become shorter with either loss",
    recipe=SMOLLM2,
    settings="sampling.max_new_tokens=128 log.rollouts=true",
)


def _again(experiment: Experiment, name: str, seeds: range, quantity: str, title: str) -> Experiment:
    """The same with other seeds, and the one quantity that the first runs had suggested."""
    return replace(experiment, name=name, seeds=seeds, compared=(quantity,), title=title, to_accuracy=None)


EXPERIMENTS = (
    DYNAMIC,
    replace(
        _again(
            DYNAMIC,
            "smollm2-dynamic-again",
            range(8, 16),
            "accuracy",
            "SmolLM2-135M, seeds 8 to 15: with Dynamic Sampling, accuracy keeps rising",
        ),
        panels=(EQUAL, *_by_steps_and_tokens(None)),
    ),
    CLIP,
    CLIP_SLOW,
    _again(
        CLIP_SLOW,
        "smollm2-clip-again",
        range(8, 32),
        "accuracy",
        "SmolLM2-135M, seeds 8 to 31, learning rate 6e-6: no difference found with Clip-Higher",
    ),
    TOKEN_LEVEL,
    _again(
        TOKEN_LEVEL,
        "smollm2-tokens-again",
        range(8, 32),
        "repetition",
        "SmolLM2-135M, seeds 8 to 31: repetition grows most in runs with a mean per response",
    ),
    Experiment(
        "smollm2-filter",
        "Overlong Filtering",
        "overlong.mask_truncated=false,true",
        "without",
        ("accuracy", "response_length"),
        (replace(CUT_OFF, title="Responses cut off at 16 tokens"), LENGTH, ACCURACY),
        "SmolLM2-135M: with Overlong Filtering, nothing punishes length",
        recipe=SMOLLM2,
        settings="sampling.max_new_tokens=16",
    ),
    Experiment(
        "smollm2-soft",
        "Soft Overlong Punishment",
        "overlong.shape=off,soft",
        "without",
        ("mean_truncated", "accuracy"),
        (replace(CUT_OFF, title="Responses cut off at 32 tokens"), LENGTH, ACCURACY),
        "SmolLM2-135M: Soft Overlong Punishment shortens responses within six steps",
        recipe=SMOLLM2,
        settings="sampling.max_new_tokens=32 overlong.cache_length=16",
    ),
    replace(
        DYNAMIC,
        name="qwen-dynamic",
        panels=(EQUAL, *_by_steps_and_tokens(40)),
        title="Qwen2.5-Coder-1.5B: Dynamic Sampling takes more tokens to 40 %",
        to_accuracy=0.4,
        recipe=QWEN,
    ),
    CLIP_QWEN,
    _again(
        CLIP_QWEN,
        "qwen-clip-again",
        range(8, 16),
        "mean_entropy",
        "Qwen2.5-Coder-1.5B, seeds 8 to 15: no difference in entropy found with Clip-Higher",
    ),
)
MODELS = {SMOLLM2: "SmolLM2", QWEN: "Qwen2.5"}
PICTURE = "evidence-pretrained.png"
TITLE = "Each technique alone, on pretrained models"


def in_words(experiment: Experiment) -> str:
    slow = ", lr 6e-6" if "lr=" in experiment.settings else ""
    return f"{MODELS[experiment.recipe]}: {experiment.technique}{slow}{experiment.other_seeds}"


if __name__ == "__main__":
    evidence.run(sys.argv[1:], EXPERIMENTS, in_words, PICTURE, TITLE)
