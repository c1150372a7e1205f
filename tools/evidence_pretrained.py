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


def _by_steps_and_tokens(level: float) -> tuple[Panel, Panel]:
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
EXPERIMENTS = (
    Experiment(
        "smollm2-dynamic",
        "Dynamic Sampling",
        "sampling.dynamic=false,true",
        "without",
        ("steps_to", "tokens_to"),
        (EQUAL, *_by_steps_and_tokens(22)),
        "SmolLM2-135M: Dynamic Sampling learns more per step, and no faster per token",
        0.22,
        recipe=SMOLLM2,
    ),
    CLIP,
    replace(
        CLIP,
        name="smollm2-clip-slow",
        settings=f"{CLIP.settings} train.lr=6e-6",
        title="SmolLM2-135M, 16 updates per step at a learning rate of 6e-6: entropy falls with either bound",
    ),
    Experiment(
        "smollm2-tokens",
        "Token-level Loss",
        "algo.aggregation=seq-mean-token-mean,token-mean",
        "a mean per response",
        ("mean_length", "repetition"),
        (LENGTH, Panel("repetition", "Repeated 4-grams", "% of a response", 100), ACCURACY),
        "SmolLM2-135M: responses become shorter with either loss",
        recipe=SMOLLM2,
        settings="sampling.max_new_tokens=128 log.rollouts=true",
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
    Experiment(
        "qwen-dynamic",
        "Dynamic Sampling",
        "sampling.dynamic=false,true",
        "without",
        ("steps_to", "tokens_to"),
        (EQUAL, *_by_steps_and_tokens(40)),
        "Qwen2.5-Coder-1.5B: Dynamic Sampling takes more tokens to 40 %",
        0.4,
        recipe=QWEN,
    ),
    Experiment(
        "qwen-clip",
        "Clip-Higher",
        "algo.clip_high=0.2,0.28",
        "without",
        ("mean_entropy", "accuracy"),
        (CLIPPED, ENTROPY, ACCURACY),
        "Qwen2.5-Coder-1.5B, 16 updates per step: Clip-Higher and entropy",
        recipe=QWEN,
        settings="train.steps=8 train.mini_batches=16 train.token_budget=4096",
        seeds=range(7),
    ),
)
MODELS = {SMOLLM2: "SmolLM2", QWEN: "Qwen2.5"}
PICTURE = "evidence-pretrained.png"
TITLE = "Each technique alone, on pretrained models"


def in_words(experiment: Experiment) -> str:
    slow = ", lr 6e-6" if "lr=" in experiment.settings else ""
    return f"{MODELS[experiment.recipe]}: {experiment.technique}{slow}"


if __name__ == "__main__":
    evidence.run(sys.argv[1:], EXPERIMENTS, in_words, PICTURE, TITLE)
