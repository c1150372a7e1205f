"""The generation of TRL's GRPOTrainer with `environment_factory`, on the work of `bench episodes`.

Written for TRL 1.16. The trainer's own code makes a batch up to the point where it would compute rewards: `reset`,
prompts, `generate` for all samples, tools, `generate` again, …; that is timed. Random weights write no tool calls, so
`parse_response` is replaced by one that decodes a turn and adds a call of the environment's tool; what the parsing
itself costs is not counted. Every turn has its fixed length by `generation_kwargs`, and
`max_tool_calling_iterations` ends the episodes.

TRL makes the calls of different samples one after the other, synchronous or not (`one-by-one`). Where that takes more
than `trl_wait_s`, the latencies are added to the time without them. `at-once` is kinder than TRL is: all calls of a
turn take as long as the longest of them, which is the least that waiting for all of them can take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.roofline import Size
from dapo_rl.lab.bench.timing import PeakMemory
from dapo_rl.lab.bench.trl import trl_arguments, trl_trainer, trl_variant
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.models.load import pick_device

BACKENDS = {"generate": "whole", "vllm": "vllm"}
"""The variant of `bench step` with the same settings."""
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message['content'] }}
{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}
{% endfor %}{% endfor %}"""
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"query": "it"}}}


class GeneratedError(Exception):
    """Ends a batch after its generation."""


def measure_trl_episodes(work: Workload, variant: str) -> Measurement:
    how = trl_variant(BACKENDS[variant])
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    assert work.tools is not None
    tools, device = work.tools, pick_device(work.device)
    count = max(min(tools.at_a_time, work.prompts) // 2 * 2, 2)  # TRL wants groups
    latencies = tools.latencies(work.seed, count)
    grpo_trainer.parse_response = _parse_as_call
    with TemporaryDirectory(prefix="dapo-bench-trl-") as directory:
        dtype = getattr(torch, work.dtype)
        model, tokenizer = open_model(work.model, dtype, work.device, work.seed)
        size = asdict(Size.of(model))
        tokenizer.chat_template = TEMPLATE
        tokenizer.response_template = {"defaults": {"role": "assistant"}}
        texts = random_prompts(tokenizer, count * 3, work.prompt_tokens, work.seed)
        (observation,) = random_prompts(tokenizer, 1, tools.observation_tokens, work.seed + 1)
        rows = [
            {"prompt": [{"role": "user", "content": text}], "episode": i % count, "round": i // count}
            for i, text in enumerate(texts)
        ]
        clock = _Clock(latencies, observation)
        more = {"train_dataset": Dataset.from_list(rows), "environment_factory": lambda: _environment(clock)}
        arguments = _arguments(work, how, count)
        trainer = trl_trainer(how, model, tokenizer, directory, dtype, arguments, reward_funcs=_no_rewards, **more)
        trainer.max_tool_calling_iterations = tools.calls
        generate = trainer._generate

        def timed(prompts: list[Any]) -> None:
            started = time.perf_counter()
            _, _, mask, *_ = generate(prompts)
            clock.seconds = time.perf_counter() - started
            clock.tokens = [sum(own) for own in mask]
            raise GeneratedError

        trainer._generate = timed
        trainer.model.train()

        def run(number: int, waits: str) -> float:
            clock.waits, clock.calls = waits, [0] * tools.calls
            with suppress(GeneratedError):
                trainer._generate_and_score_completions(rows[number * count : (number + 1) * count])
            if set(clock.tokens) != {work.tokens} or len(clock.tokens) != count:
                raise AssertionError(f"TRL's episodes have {sorted(set(clock.tokens))} tokens, not {work.tokens}")
            return clock.seconds

        run(0, "never")
        memory = PeakMemory(device)
        memory.start()
        at_once = run(1, "at-once")
        total = sum(map(sum, latencies))
        is_measured = total <= tools.trl_wait_s
        if is_measured:
            one_by_one = run(2, "one-by-one")
        else:
            one_by_one = at_once - sum(map(max, zip(*latencies, strict=True))) + total
        memory.stop()
    facts = {"size": size, "episodes": count, "at_once_seconds": at_once, "tool_seconds": total, "waited": is_measured}
    return Measurement((one_by_one,), memory.peak, memory.how, facts=facts)


def _arguments(work: Workload, how: Any, count: int) -> dict[str, Any]:
    assert work.tools is not None
    turn = work.tokens // work.tools.turns
    length = {"max_tokens": turn, "ignore_eos": True} if how.vllm else {"max_new_tokens": turn, "min_new_tokens": turn}
    return {
        **trl_arguments(replace(work, prompts=count // 2, group=2), how),
        "max_completion_length": work.longest - work.prompt_tokens,
        "generation_kwargs": length,
        "max_tool_calling_iterations": work.tools.calls,
    }


class _Clock:
    """What the environments and the timing share."""

    def __init__(self, latencies: Sequence[Sequence[float]], observation: str) -> None:
        self.latencies, self.observation = latencies, observation
        self.waits = "never"
        self.calls: list[int] = []
        """Calls so far after each turn."""
        self.seconds = 0.0
        self.tokens: list[int] = []

    def wait_s(self, episode: int, turn: int) -> float:
        self.calls[turn] += 1
        if self.waits == "one-by-one":
            return self.latencies[episode][turn]
        is_first = self.calls[turn] == 1
        return max(row[turn] for row in self.latencies) if self.waits == "at-once" and is_first else 0.0


def _environment(clock: _Clock) -> Any:

    class Environment:
        def reset(self, episode: int, **_: Any) -> None:
            self._episode, self._turn = episode, 0

        def look_up(self, query: str) -> str:
            """
            Looks something up.

            Args:
                query: What to look for.
            """
            seconds = clock.wait_s(self._episode, self._turn)
            self._turn += 1
            time.sleep(seconds)
            return clock.observation

    return Environment()


def _parse_as_call(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [CALL]}


def _no_rewards(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
