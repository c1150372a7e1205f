"""Held-out accuracy: on correctness, never on shaped reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo_rl.algo import pass_at_k
from dapo_rl.rollout.draw import derive_seed
from dapo_rl.rollout.engine import Engine, Request, SamplingParams, set_aside
from dapo_rl.rollout.verdicts import submit
from dapo_rl.types import Pending, Prompt, Sample, Verifier


@dataclass(frozen=True, slots=True)
class Evaluation:
    accuracy: float
    """The mean over all samples (avg@k)."""
    pass_at_k: float
    """The chance that one of k samples is correct, k the number of samples."""
    prompts: int
    samples: int
    """For each prompt."""
    response_length: float
    truncated: float
    verifier_errors: int
    """Samples without a verdict; they count in no accuracy."""
    first_error: str = ""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            f"eval/pass@{self.samples}": self.pass_at_k,
            "eval/response_length": self.response_length,
            "eval/truncated": self.truncated,
            "eval/verifier_errors": self.verifier_errors,
        }


def evaluate(
    engine: Engine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    samples: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Samples every prompt `samples` times. The same seed gives the same random numbers at every evaluation."""
    finished: list[list[Sample]] = [[] for _ in prompts]
    pending: dict[int, Pending] = {}
    with set_aside(engine):
        for i, prompt in enumerate(prompts):
            engine.submit(Request(f"eval-{i}", prompt.token_ids, samples, params, derive_seed(seed, "eval", prompt.id)))
        while engine.pending:
            for completion in engine.poll():
                i = int(completion.request_id.removeprefix("eval-"))
                finished[i].append(completion.sample)
                if len(finished[i]) == samples:
                    pending[i] = submit(verifier, prompts[i], finished[i])
            on_progress(len(pending), len(prompts))
    verdicts = [pending[i].result() for i in range(len(prompts))]
    judged = [[v.correct for v in group if not v.failed] for group in verdicts]
    answers = [correct for group in judged for correct in group]
    whole = [group for group in judged if len(group) == samples]
    everything = [sample for group in finished for sample in group]
    return Evaluation(
        accuracy=sum(answers) / len(answers) if answers else math.nan,
        pass_at_k=sum(pass_at_k(samples, sum(g), samples) for g in whole) / len(whole) if whole else math.nan,
        prompts=len(prompts),
        samples=samples,
        response_length=sum(len(s.token_ids) for s in everything) / len(everything),
        truncated=sum(s.truncated for s in everything) / len(everything),
        verifier_errors=len(everything) - len(answers),
        first_error=next((v.detail for group in verdicts for v in group if v.failed), ""),
    )
