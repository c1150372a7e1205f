"""Small real parts for tests: a random model, prompts, and an engine that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import torch
from forked import DAPO
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_rl.models.tokenizer import build_tokenizer
from dapo_rl.rollout.engine import Completion, Request
from dapo_rl.types import Prompt, Sample, Verdict

if TYPE_CHECKING:
    from subprocess import CompletedProcess

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
SMALL = [
    "sampling.prompts_per_step=4",
    "sampling.group_size=4",
    "train.mini_batches=2",
    "data.train.size=200",
    "data.eval.size=16",
]
"""Settings that make a run of the embedded default small enough for a test."""


def dapo(*words: Any, cwd: Path, timeout: float = 300, **options: Any) -> CompletedProcess[str]:
    """The command in a process of its own."""
    return forked.run([DAPO, *words], cwd=cwd, timeout=timeout, **options)


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def small_model(seed: int = 0, **changes: Any) -> Any:
    """A Llama of a few thousand parameters with random weights, sharp enough that tokens differ in probability."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": tokenizer().bos_token_id,
        "eos_token_id": tokenizer().eos_token_id,
        "pad_token_id": tokenizer().pad_token_id,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def make_prompt(name: str, text: str = "1+1=?\n", answer: str | None = "2") -> Prompt:
    return Prompt(id=name, text=text, token_ids=tuple(tokenizer()(text).input_ids), answer=answer)


def make_sample(length: int = 3, finish_reason: str = "stop", text: str = "", version: int = 0) -> Sample:
    return Sample(
        token_ids=tuple(range(5, 5 + length)),
        logps=tuple(-0.5 - 0.1 * i for i in range(length)),
        text=text,
        finish_reason=finish_reason,  # type: ignore[arg-type]
        versions=(version, version),
    )


class Prompts:
    """Prompts one after the other: `p0`, `p1`, …"""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.resting: list[tuple[str, int]] = []
        self._front: list[Prompt] = []
        self._next = 0

    def draw(self) -> Prompt:
        if self._front:
            prompt = self._front.pop(0)
        else:
            prompt = make_prompt(f"p{self._next}")
            self._next += 1
        self.drawn.append(prompt.id)
        return prompt

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        self._front = [*prompts, *self._front]

    def find(self, prompt_id: str) -> Prompt:
        return make_prompt(prompt_id)

    def rest(self, prompt: Prompt, epochs: int) -> None:
        self.resting.append((prompt.id, epochs))


class ScriptedEngine:
    """Gives each request the samples that a script says; a longer sample takes more polls, as in a real engine."""

    keeps_begun = True

    def __init__(self, script: Callable[[Request], Sequence[Sample]], width: int = 10**6) -> None:
        self.version = 0
        self._script, self._width = script, width
        self._running: list[list[Any]] = []
        self._queue: list[Request] = []
        self.tokens = 0

    @property
    def pending(self) -> int:
        return len(self._running) + sum(r.count for r in self._queue)

    @property
    def waiting(self) -> frozenset[str]:
        return frozenset(request.id for request in self._queue)

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def cancel(self, request_id: str) -> int:
        self._queue = [r for r in self._queue if r.id != request_id]
        lost = sum(len(s.token_ids) - left for left, r, _, s in self._running if r.id == request_id)
        self._running = [row for row in self._running if row[1].id != request_id]
        self.tokens += lost
        return lost

    def poll(self) -> list[Completion]:
        while self._queue and len(self._running) + self._queue[0].count <= self._width:
            request = self._queue.pop(0)
            for i, sample in enumerate(self._script(request)):
                self._running.append([len(sample.token_ids), request, i, sample])
        if not self._running:
            return []
        shortest = min(row[0] for row in self._running)
        for row in self._running:
            row[0] -= shortest
        done = [row for row in self._running if row[0] == 0]
        self._running = [row for row in self._running if row[0] > 0]
        self.tokens += sum(len(s.token_ids) for _, _, _, s in done)
        return [Completion(request.id, i, sample) for _, request, i, sample in done]

    def load_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        self.version = version

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "running": [list(row) for row in self._running], "queue": [*self._queue]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]
        self._running, self._queue = [list(row) for row in state["running"]], [*state["queue"]]


class TextVerifier:
    """Correct where the text says `right`; fails where it says `crash`."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._verdict(sample.text) for sample in samples]

    @staticmethod
    def _verdict(text: str) -> Verdict:
        if text == "crash":
            return Verdict(0.0, False, "error", detail="ValueError: it crashed")
        right = text == "right"
        return Verdict(1.0 if right else -1.0, right, "correct" if right else "wrong")
