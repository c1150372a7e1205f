"""`dapo verify`: a dry run that samples and judges a few prompts, to find mistakes before a run starts.

Everything comes from the code of a run: `build_run` loads the model, the data and the verifier, its engine samples with
the recipe's settings, and rewards are shaped as for a batch. Nothing is trained and no file is written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor
from transformers.utils import logging

from dapo_rl.base.load import load_function
from dapo_rl.base.quote import TRACEBACK_LIMIT, one_line, shorten
from dapo_rl.config import Config, source_name
from dapo_rl.data import stream_of
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.envs.python_tool import containment
from dapo_rl.errors import UserError
from dapo_rl.evals.progress import EvalProgress
from dapo_rl.evals.sampling import answer
from dapo_rl.lab.verify_episodes import DryMessage, conversation_of
from dapo_rl.lab.verify_findings import Advice, Facts, find_all
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.dynamic_sampling import Grading, outcome_of
from dapo_rl.run.build import Run, build_run
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.runs.display import PlainDisplay
from dapo_rl.train.batch import length_penalties, shaped_rewards
from dapo_rl.types import FinishReason, Group, Loggable, RewardPart, VerdictStatus


@dataclass(frozen=True, slots=True)
class DryAnswer:
    text: str
    status: VerdictStatus
    answer: str | None
    score: float
    length_penalty: float
    reward: float
    """The score plus the length penalty, which is 0 or negative."""
    finish_reason: FinishReason | None
    tokens: int
    detail: str
    parts: tuple[RewardPart, ...] = ()
    """The reward functions that the score is the weighted sum of; empty for a built-in verifier."""
    extra: Mapping[str, Loggable] = field(default_factory=dict)
    """Values that the functions log for this response."""
    turns: int = 1
    messages: tuple[DryMessage, ...] = ()
    """The conversation after the prompt, if there is an environment."""


@dataclass(frozen=True, slots=True)
class DryRow:
    row: str
    prompt: str
    """The prompt's tokens as text, with special tokens, as the model sees them."""
    prompt_tokens: int
    ground_truth: str | None
    outcome: Outcome
    answers: tuple[DryAnswer, ...]


@dataclass(frozen=True, slots=True)
class DryRun:
    model: str
    data: str
    prompts: int
    """Prompts in the training data, without those that were dropped."""
    samples: int
    seconds: float
    special_tokens: tuple[str, ...]
    rows: tuple[DryRow, ...]
    findings: tuple[Advice, ...]
    containment: str = ""
    """What the code of the `python` tool is kept from, if the policy has it."""

    @property
    def answers(self) -> tuple[DryAnswer, ...]:
        return tuple(answer for row in self.rows for answer in row.answers)

    @property
    def stops_training(self) -> Advice | None:
        """The finding with which `dapo train` would stop, if any."""
        return next((finding for finding in self.findings if finding.level == "error"), None)


def dry_run(
    config: Config,
    rows: int = 8,
    samples: int = 4,
    given: TrainerInputs | None = None,
    progress: EvalProgress | None = None,
) -> DryRun:
    """Samples `samples` responses to each of the first `rows` prompts that a run would draw.

    Raises the same errors as a run that cannot start.
    """
    logging.disable_progress_bar()
    progress = progress or EvalProgress()
    progress.note(f"loading {config.model.name} and the training data")
    run = build_run(config, given or TrainerInputs(), PlainDisplay(sys.stderr))
    try:
        return _sample(run, rows, samples, progress)
    finally:
        run.close()


def dry_run_json(result: DryRun) -> str:
    rows = asdict(result)
    for each in (each for row in rows["rows"] for each in row["answers"]):
        each["parts"] = [part._asdict() for part in each["parts"]]
    return json.dumps(rows, indent=2)


def check_trainable(result: DryRun) -> None:
    """Raises a UserError if `dapo train` would stop, with the traceback of the verifier if it has one."""
    if stop := result.stops_training:
        tracebacks = (answer.detail.partition("\n")[2] for answer in result.answers)
        more = next((text for text in tracebacks if text), "")
        raise UserError(f"verify: dapo train would stop: {one_line(stop.what)}", shorten(more, TRACEBACK_LIMIT))


def _sample(run: Run, rows: int, samples: int, progress: EvalProgress) -> DryRun:
    config, available = run.config, run.train_prompts.prompts
    in_order = available if run.train_prompts.stream else stream_of(run.train_prompts, config.seed)
    prompts = list(islice(in_order, min(rows, len(available))))
    progress.note(f"sampling {samples} responses to each of {len(prompts)} prompts")
    started = time.monotonic()
    groups: dict[int, Group] = {}
    params = SamplingParams.of(config.sampling)
    with progress.of("sampling", len(prompts)):
        for each in answer(
            run.engine, run.judge, prompts, params, samples, config.seed, conversations=run.conversations
        ):
            progress.advance(each.tokens)
            groups[each.draw] = each
    judged = [groups[i] for i in range(len(prompts))]
    seconds = time.monotonic() - started
    dry = _dry_rows(judged, run)
    rewards = tuple(answer.reward for row in dry for answer in row.answers)
    source = config.data.train
    return DryRun(
        model=f"{config.model.name} ({run.description})",
        data=source_name(source) + (" (the beginning of a stream)" if run.train_prompts.is_stream else ""),
        prompts=len(available),
        samples=samples,
        seconds=seconds,
        special_tokens=_special_tokens(run.tokenizer),
        rows=dry,
        findings=find_all(Facts(run, tuple(judged), tuple(row.outcome for row in dry), rewards)),
        containment=containment() if "python" in config.env.tools else "",
    )


def _dry_rows(groups: Sequence[Group], run: Run) -> tuple[DryRow, ...]:
    rewards = shaped_rewards(groups, run.config)
    own = run.config.sampling.filter
    keep = None if own is None else load_function(own)
    grading = Grading()
    for group in groups:  # as graded as all of them show
        grading.observe(group)
    return tuple(
        DryRow(
            row=group.prompt.id,
            prompt=str(run.tokenizer.decode(_prompt_ids(group), skip_special_tokens=False)),
            prompt_tokens=len(_prompt_ids(group)),
            ground_truth=group.prompt.answer,
            outcome=outcome_of(
                group, run.config.sampling, keep, grading, run.config.masking, run.config.decouples_rewards
            ),
            answers=_dry_answers(group, rewards[group.draw], length_penalties(group, run.config)),
        )
        for group in groups
    )


def _dry_answers(group: Group, rewards: Tensor, penalties: Tensor) -> tuple[DryAnswer, ...]:
    return tuple(
        DryAnswer(
            text=sample.text,
            status=verdict.status,
            answer=verdict.answer,
            score=verdict.score,
            length_penalty=penalty,
            reward=reward,
            finish_reason=sample.finish_reason,
            tokens=length,
            detail=verdict.detail,
            parts=verdict.parts,
            extra=verdict.extra,
            turns=int(sample.scalars.get("turns", 1)),
            messages=conversation_of(group, index),
        )
        for index, (sample, verdict, length, penalty, reward) in enumerate(
            zip(group.samples, group.verdicts, group.lengths, penalties.tolist(), rewards.tolist(), strict=True)
        )
    )


def _prompt_ids(group: Group) -> list[int]:
    """The tokens before the first turn of its first episode."""
    first = next((fork for fork in group.forks if fork.index == 0), group.samples[0])
    ids = first.prompt_ids if len(first.prompt_ids) else group.prompt.token_ids
    return [int(token) for token in ids]


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return tuple(sorted({str(token) for token in added.values() if getattr(token, "special", False)}))
