"""Measures episodes with tools, and the same tokens in one turn, by the same engine in the same process.

Every turn has the same number of tokens. Between two turns a tool call takes a time that is drawn from a lognormal
distribution, and an observation follows. Random weights write no tool calls, so the environment answers each turn as
it is: it sleeps as long as the tool would take. Everything else is what a run does: worker processes, the chat format,
turns that are tokenized once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.protocol import Completion, Engine, EngineInputs, Request, SamplingParams
from dapo_rl.envs.build import Factory
from dapo_rl.envs.chat_format import chat_format
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.protocol import AssistantTurn
from dapo_rl.errors import UserError
from dapo_rl.evals.sampling import answer
from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.roofline import Size
from dapo_rl.lab.bench.timing import measure
from dapo_rl.lab.bench.workload import Measurement, ToolWork, Workload
from dapo_rl.models.load import pick_device
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.types import Group, Prompt

WARMUP_SHARE = 0.1
"""In warm-up rounds, tools take this share of their time."""
BEGINNING = 0.2
"""All episodes begin their first turns together. After this share of the turns, they are at different ones."""


def measure_episodes(work: Workload) -> Measurement:
    assert work.tools is not None
    config, tools = work.config(), work.tools
    factory = Factory(SlowTool if tools.sync else AsyncSlowTool, tools, work.seed, work.warmup)
    with EnvironmentPool(factory, config.env, "tool") as pool:  # its processes fork before a GPU is in use
        model, tokenizer = open_model(work.model, getattr(torch, work.dtype), work.device, work.seed)
        model.requires_grad_(False)
        _check_context(model, work)
        texts = random_prompts(tokenizer, 2 * work.prompts * work.rounds, work.prompt_tokens, work.seed)
        (observation,) = random_prompts(tokenizer, 1, tools.observation_tokens, work.seed + 1)
        columns, n = {"observation": observation}, work.prompts
        every = [
            Prompt(f"{i // n % work.rounds} {i % n}", text, tokenizer(text).input_ids, columns=columns)
            for i, text in enumerate(texts)
        ]
        params = SamplingParams.of(config.sampling)
        engine, conversations = _build(work, config, model, tokenizer, pool)

        def run(offset: int, conversations: Conversations | None) -> Callable[[int], None]:
            def run_round(i: int) -> None:
                engine.begin()
                prompts, seed = every[(offset + i) * n : (offset + i + 1) * n], work.seed + offset + i
                groups = list(
                    answer(
                        engine, None, prompts, params, 1, seed, conversations=conversations, at_a_time=tools.at_a_time
                    )
                )
                check_groups(groups, work, turns=1 if conversations is None else tools.turns)
                busy.append(engine.seconds)
                if conversations is not None:
                    kept.append(engine.kept_tokens)
                    steady.append(steady_state(engine.turn_ends, engine.last_opened, work))

            return run_round

        busy: list[float] = []
        kept: list[int] = []
        steady: list[Steady | None] = []
        device = pick_device(work.device)
        size = asdict(Size.of(model))
        del model
        one_turn = measure(run(work.rounds, None), work, device, {})
        busy.clear()
        result = measure(run(0, conversations), work, device, {"size": size})
        result.facts["engine_seconds"] = median(busy[work.warmup :])
        result.facts["prefix_hits"] = round(median(kept[work.warmup :]))
        result.facts["one_turn_seconds"] = list(one_turn.seconds)
        result.facts["steady"] = [asdict(each) for each in steady[work.warmup :] if each is not None]
        engine.close()
    return result


def check_groups(groups: Sequence[Group], work: Workload, turns: int) -> None:
    """Every episode has all its turns, of equal length."""
    samples = [sample for group in groups for sample in group.samples]
    failed = next((verdict.detail for group in groups for verdict in group.verdicts if verdict.failed), None)
    if failed is not None:
        raise AssertionError(failed)
    wrong = sum(
        sample.written != work.tokens or sum(turn.author == "policy" for turn in sample.turns or ()) not in (0, turns)
        for sample in samples
    )
    if wrong or len(samples) != work.samples:
        raise AssertionError(f"{wrong} of {len(samples)} episodes do not have the turns of the workload")


def _build(
    work: Workload, config: Any, model: Any, tokenizer: Any, pool: EnvironmentPool
) -> tuple[TimedEngine, Conversations]:
    spec = engine_spec(work.engine)
    if spec.needs_cuda and not torch.cuda.is_available():
        raise UserError(f"--engine: {work.engine} needs a GPU here")
    if spec.loads_from_disk:  # it gets the whole GPU
        model.cpu()
        torch.cuda.empty_cache()
    dtype = getattr(torch, work.dtype)
    inputs = EngineInputs(model, tokenizer, config.sampling, dtype, work.longest, copies=False)
    engine = build_engine(work.engine, inputs)
    conversations = Conversations(
        pool, chat_format(tokenizer), config.env, max_new_tokens=work.tokens, context=work.longest
    )
    conversations.cut_turns_continue = True
    return TimedEngine(engine), conversations


def _check_context(model: Any, work: Workload) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and work.longest > limit:
        raise UserError(
            f"--turn-tokens: episodes of up to {work.longest} tokens exceed the model's context of {limit}; lower it, "
            "--turns, --observation-tokens or --prompt-tokens"
        )


@dataclass(frozen=True, slots=True)
class Steady:
    """The part of a round without its beginning and its end."""

    seconds: float
    tokens: int


def steady_state(turn_ends: Sequence[float], last_opened: float, work: Workload) -> Steady | None:
    """From the moment when more than `BEGINNING` of the turns have ended until the last episode begins; None if
    fewer turns than in that beginning end there. `turn_ends` are the times at which turns ended, in order; a turn's
    tokens count at its end."""
    assert work.tools is not None
    beginning = int(BEGINNING * len(turn_ends))
    first = turn_ends[beginning]
    turns = sum(first < end <= last_opened for end in turn_ends)
    if turns <= beginning:
        return None
    return Steady(last_opened - first, turns * (work.tokens // work.tools.turns))


class TimedEngine:
    """An engine, the seconds that it worked, and when it ended turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.begin()

    def begin(self) -> None:
        """Forgets what was measured."""
        self.seconds = self.last_opened = 0.0
        self.turn_ends: list[float] = []
        self._hits = self._engine.prefix_hits

    @property
    def kept_tokens(self) -> int:
        """Tokens of earlier turns that were not computed again."""
        return self._engine.prefix_hits - self._hits

    def submit(self, request: Request) -> None:
        if request.untouched:
            self.last_opened = time.perf_counter()
        self._engine.submit(request)

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        started = time.perf_counter()
        completions = self._engine.poll(timeout_s)
        ended = time.perf_counter()
        self.seconds += ended - started
        self.turn_ends += [ended] * len(completions)
        return completions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Tool:
    """An environment with a tool that takes its time after every turn except the last."""

    def __init__(self, work: ToolWork, seed: int, warmup: int) -> None:
        self._work, self._seed, self._warmup = work, seed, warmup
        self._round = self._episode = 0
        self._observation = ""

    def open(self, prompt: Prompt, seed: int) -> None:
        self._round, self._episode = map(int, prompt.id.split())
        self._observation = prompt.columns["observation"]

    def _seconds(self, turn: AssistantTurn) -> float:
        latency = self._work.latency(self._seed, self._episode, turn.number)
        return latency * (WARMUP_SHARE if self._round < self._warmup else 1)

    def _ends(self, turn: AssistantTurn) -> bool:
        return turn.number >= self._work.turns


class SlowTool(_Tool):
    def step(self, turn: AssistantTurn) -> str | float:
        if self._ends(turn):
            return 1.0
        time.sleep(self._seconds(turn))
        return self._observation


class AsyncSlowTool(_Tool):
    async def step(self, turn: AssistantTurn) -> str | float:
        if self._ends(turn):
            return 1.0
        await asyncio.sleep(self._seconds(turn))
        return self._observation
