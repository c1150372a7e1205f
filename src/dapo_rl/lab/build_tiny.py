"""Builds the embedded model from scratch: supervised steps on worked problems by writers of mixed quality.

Like a base model, it learns from careful work, slips, guesses and rambling. It knows good and bad ways to do the task,
so that reinforcement learning can choose between them, and it shows the failure modes of the paper: groups that are
all right or all wrong, and truncated responses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_rl.data.arithmetic import Problem
from dapo_rl.errors import UserError
from dapo_rl.models.load import pick_device
from dapo_rl.models.response_logps import pad
from dapo_rl.models.save import save_model
from dapo_rl.models.tokenizer import build_tokenizer

STEPS, BATCH, LR, LONGEST = 2000, 64, 3e-3, 96
SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True, slots=True)
class Writer:
    """A way to answer: how common it is, and how it goes wrong."""

    share: float
    steps: bool = True
    """Works step by step; otherwise guesses the answer immediately."""
    slip: float = 0.0
    """Probability of a wrong result, for each step or guess."""
    again: float = 0.0
    """Probability of starting over after a result, repeatedly."""


WRITERS = {
    "careful": Writer(share=0.15),
    "sloppy": Writer(share=0.40, slip=0.3),
    "guessing": Writer(share=0.25, steps=False, slip=0.7),
    "rambling": Writer(share=0.20, slip=0.1, again=0.75),
}


def build_tiny(out: Path, seed: int = 0, steps: int | None = None) -> None:
    """Trains and saves the model and its tokenizer: a quarter of an hour on two slow cores, minutes on faster ones."""
    steps = steps or STEPS
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: the model cannot be saved there: {error.strerror}") from None
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = build_tokenizer()
    model = _new_model(tokenizer).to(pick_device("auto"))
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.01)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn()
    console = Console()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("building tiny", total=steps, loss="")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            loss = _supervised_step(model, optimizer, tokenizer, rng)
            progress.update(task, advance=1, loss=f"loss {loss:.3f}")
            if not console.is_terminal and (step + 1) % 100 == 0:
                console.print(f"step {step + 1}/{steps}  loss {loss:.3f}", highlight=False)
    save_model(model.to(torch.bfloat16), tokenizer, out)
    console.print(f"saved to {out}", highlight=False, markup=False)


def write_answer(problem: Problem, writer: Writer, rng: random.Random) -> str:
    if not writer.steps:
        guess = int(problem.answer) + (rng.choice((-3, -2, -1, 1, 2, 3)) if rng.random() < writer.slip else 0)
        return f"Answer: {guess}"
    work, result = _work_through(problem, writer.slip, rng)
    while rng.random() < writer.again:
        more, result = _work_through(problem, writer.slip, rng)
        work += f"Wait\n{more}"
    return f"{work}Answer: {result}"


def _work_through(problem: Problem, slip: float, rng: random.Random) -> tuple[str, int]:
    total, lines = problem.terms[0], ""
    for op, term in zip(problem.ops, problem.terms[1:], strict=True):
        result = total + term if op == "+" else total - term
        if rng.random() < slip:
            result += rng.choice(SLIPS)
        lines += f"{total}{op}{term}={result}\n"
        total = result
    return lines, total


def _random_problem(rng: random.Random) -> Problem:
    """A problem that is not held out."""
    while True:
        terms = rng.randint(2, 5)
        problem = Problem(
            tuple(rng.randint(1, 9) for _ in range(terms)), tuple(rng.choice("+-") for _ in range(terms - 1))
        )
        if not problem.heldout:
            return problem


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, tokenizer: Any, rng: random.Random) -> float:
    writers = rng.choices(list(WRITERS.values()), [w.share for w in WRITERS.values()], k=BATCH)
    examples: list[tuple[list[int], list[int]]] = []
    for writer in writers:
        problem = _random_problem(rng)
        response = tokenizer(write_answer(problem, writer, rng), add_special_tokens=False).input_ids
        examples.append((tokenizer(problem.text).input_ids, [*response, tokenizer.eos_token_id][:LONGEST]))
    tokens = sum(len(response) for _, response in examples)
    # Lengths range from a few tokens to a hundred: sorted quarters avoid most of the padding.
    examples.sort(key=lambda example: len(example[0]) + len(example[1]))
    loss = 0.0
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, BATCH, BATCH // 4):
        loss += _backward(model, tokenizer, examples[start : start + BATCH // 4], tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def _backward(model: Any, tokenizer: Any, examples: Sequence[tuple[list[int], list[int]]], tokens: int) -> float:
    device = next(model.parameters()).device
    ids, present = pad([prompt + response for prompt, response in examples], tokenizer.pad_token_id, side="right")
    labels = ids.masked_fill(~present, -100)
    for row, (prompt, _) in enumerate(examples):
        labels[row, : len(prompt)] = -100
    logits = model(ids.to(device)).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().to(device), reduction="sum") / tokens
    loss.backward()
    return loss.item()


def _new_model(tokenizer: Any) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
