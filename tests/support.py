"""Small real parts for tests: a random model, prompts, and an engine that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import torch
from forked import DAPO
from transformers import LlamaConfig, LlamaForCausalLM

from dapo_rl.config import Config
from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.models.tokenizer import build_tokenizer
from dapo_rl.models.weights import ModelWeights, WeightSource
from dapo_rl.train.batch import make_batch, with_advantages
from dapo_rl.train.custom import build_advantages
from dapo_rl.types import Batch, Group, Prompt, Trajectory, Verdict

if TYPE_CHECKING:
    from subprocess import CompletedProcess

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
SMALL = [
    "log.report=false",
    "sampling.prompts_per_step=4",
    "sampling.group_size=4",
    "train.mini_batches=2",
    "data.train.size=200",
    "data.eval.size=4",
    "sampling.max_new_tokens=24",
    "train.epochs_per_step=1",
]
"""Settings that make a run of the embedded default small enough for a test. To draw report.png takes a third of it."""
THOROUGH = [*SMALL, "data.eval.size=16", "train.epochs_per_step=2"]
"""For what must be the same after a stop or on several processes: passes as by default, more to evaluate."""


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
    return Prompt(id=name, text=text, token_ids=tokenizer()(text).input_ids, answer=answer)


def make_sample(length: int = 3, finish_reason: str = "stop", text: str = "", version: int = 0) -> Trajectory:
    return Trajectory(
        token_ids=range(5, 5 + length),
        logps=[-0.5 - 0.1 * i for i in range(length)],
        text=text,
        finish_reason=finish_reason,  # type: ignore[arg-type]
        versions=version,
    )


def train_sample(
    prompt_ids: Any,
    token_ids: Any,
    logps: Any,
    advantages: Any,
    group: int = 0,
    in_loss: bool = True,
    mask: Any = True,
    *,
    correct: bool = False,
    **columns: Any,
) -> Trajectory:
    """A trajectory as a batch holds it."""
    sample = Trajectory(
        token_ids,
        logps,
        mask=mask,
        prompt_ids=prompt_ids,
        advantages=advantages,
        scalars={"group": group, "correct": correct},
        **columns,
    )
    return sample if in_loss else sample.replace(loss_mask=False)


def with_reference(policy: Any, samples: Sequence[Trajectory]) -> list[Trajectory]:
    """The samples with the log-probabilities of the policy's reference, as a run's transform adds them."""
    scores = policy.score_reference(samples)
    return [sample.replace(ref_logps=row) for sample, row in zip(samples, scores, strict=True)]


def full_batch(groups: Sequence[Group], config: Config, *arguments: Any, **more: Any) -> Batch:
    """`make_batch` with the advantages that `algo.advantage` estimates."""
    return with_advantages(
        make_batch(groups, config, *arguments, **more), build_advantages(config.algo, config.overlong.factor)
    )


def ids(sample: Trajectory | Prompt) -> tuple[int, ...]:
    """Its tokens as something that can be compared and hashed."""
    return tuple(sample.token_ids.tolist())


def weights_of(model: Any) -> ModelWeights:
    return ModelWeights(model)


def all_weights(source: WeightSource) -> dict[str, Any]:
    return {name: tensor for bucket in source.buckets(2**30) for name, tensor in bucket}


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

    def skip(self, prompt: Prompt, epochs: int) -> None:
        self.resting.append((prompt.id, epochs))

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        pass


class ScriptedEngine(Engine):
    """Gives each request the samples that a script says; a longer sample takes more polls, as in a real engine."""

    version = 0

    def __init__(self, script: Callable[[Request], Sequence[Trajectory]], width: int = 10**6) -> None:
        self._script, self._width = script, width
        self._samples: dict[str, Sequence[Trajectory]] = {}
        self._running: list[list[Any]] = []
        self._queue: list[Request] = []
        self.tokens = 0

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def cancel(self, ids: Collection[str]) -> int:
        self._queue = [r for r in self._queue if r.id not in ids]
        lost = sum(len(s.token_ids) - left for left, r, _, s in self._running if r.id in ids)
        self._running = [row for row in self._running if row[1].id not in ids]
        return lost

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        while self._queue and len(self._running) + self._queue[0].samples <= self._width:
            request = self._queue.pop(0)
            if request.id not in self._samples:
                self._samples[request.id] = self._script(request)
            for begun in (*request.partial, *map(Trajectory.nothing, request.starting)):
                sample = self._samples[request.id][begun.index]
                self._running.append([len(sample.token_ids) - len(begun.token_ids), request, begun.index, sample])
        if not self._running:
            return []
        shortest = min(row[0] for row in self._running)
        self.tokens += shortest * len(self._running)
        for row in self._running:
            row[0] -= shortest
        done = [row for row in self._running if row[0] == 0]
        self._running = [row for row in self._running if row[0] > 0]
        return [Completion(request.id, i, sample) for _, request, i, sample in done]

    def receive(self, version: int, source: Any = None) -> None:
        self.version = version

    def take_unfinished(self) -> list[Request]:
        requests = {row[1].id: row[1] for row in self._running}
        written: dict[str, list[Trajectory]] = {name: [] for name in requests}
        for left, request, index, sample in self._running:
            end = len(sample.token_ids) - left
            written[request.id].append(sample.until(end).replace(index=index, text="", finish_reason=None))
        waiting, self._running, self._queue = self._queue, [], []
        return [*(request.left(written[name]) for name, request in requests.items()), *waiting]


class TextVerifier:
    """Correct where the text says `right`; fails where it says `crash`."""

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return [self._verdict(sample.text) for sample in samples]

    @staticmethod
    def _verdict(text: str) -> Verdict:
        if text == "crash":
            return Verdict(0.0, False, "error", detail="ValueError: it crashed")
        right = text == "right"
        return Verdict(1.0 if right else -1.0, right, "correct" if right else "wrong")
