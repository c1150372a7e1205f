"""Evaluation on held-out prompts, by correctness rather than by shaped reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dapo_rl.engines.protocol import Engine, SamplingParams
from dapo_rl.evals.metrics import avg, mean, passed
from dapo_rl.evals.sampling import answer
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.pending_steps import check_nothing
from dapo_rl.types import Group, Prompt, Verifier


@dataclass(frozen=True, slots=True)
class Evaluation:
    accuracy: float
    """The share of correct samples, averaged over prompts (avg@k)."""
    pass_at_k: float
    """The probability that at least one of k samples is correct, where k is the number of samples."""
    prompts: int
    samples: int
    """Samples per prompt."""
    response_length: float
    truncated: float
    verifier_errors: int
    """Samples without a verdict; accuracies exclude them."""
    first_error: str = ""
    reward: float = math.nan
    """The score, before the length penalty, averaged over prompts."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The accuracy on each entry of a list of sources."""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            f"eval/pass@{self.samples}": self.pass_at_k,
            "eval/response_length": self.response_length,
            "eval/truncated": self.truncated,
            "eval/verifier_errors": self.verifier_errors,
            **{f"eval/accuracy/{source}": accuracy for source, accuracy in self.by_source.items()},
        }


def evaluate(
    engine: Engine,
    verifier: Verifier | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    samples: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[], None] = check_nothing,
    conversations: Conversations | None = None,
) -> Evaluation:
    """Samples every prompt `samples` times. The same seed gives the same random numbers in every evaluation.

    `check` is called every fraction of a second; it raises to abandon the evaluation.
    """
    answered: list[Group] = []
    on_progress(0, len(prompts))
    for problem in answer(engine, verifier, prompts, params, samples, seed, check=check, conversations=conversations):
        answered.append(problem)
        on_progress(len(answered), len(prompts))
    answered.sort(key=lambda problem: problem.draw)
    verdicts = [problem.verdicts for problem in answered]
    judged = [[v.correct for v in group if not v.failed] for group in verdicts]
    scores = [[v.score for v in group if not v.failed] for group in verdicts]
    by_source: dict[str, list[list[bool]]] = {}
    for problem, group in zip(answered, judged, strict=True):
        if origin := problem.prompt.origin:
            by_source.setdefault(origin, []).append(group)
    everything = [sample for problem in answered for sample in problem.samples]
    return Evaluation(
        accuracy=mean([avg(group) for group in judged]),
        pass_at_k=mean([passed(group, samples) for group in judged]),
        prompts=len(prompts),
        samples=samples,
        response_length=sum(sum(problem.lengths) for problem in answered) / len(everything),
        truncated=sum(s.truncated for s in everything) / len(everything),
        verifier_errors=len(everything) - sum(map(len, judged)),
        first_error=next((v.detail for group in verdicts for v in group if v.failed), ""),
        reward=mean([mean(group) for group in scores]),
        by_source={origin: mean([avg(group) for group in groups]) for origin, groups in by_source.items()},
    )
