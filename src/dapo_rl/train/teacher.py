"""On-policy distillation: a teacher's log-probabilities as advantages of the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_model
from dapo_rl.objectives.advantages import distilled
from dapo_rl.train.served_teacher import ServedTeacher
from dapo_rl.train.teacher_prompts import TeacherPrompts
from dapo_rl.types import Batch, FloatArray, Trajectory

Score = Callable[[Sequence[Trajectory]], list[FloatArray]]


def load_teacher(config: Config, tokenizer: Any, device: str | None = None) -> Any:
    """The frozen teacher; raises a UserError if it reads other tokens than the policy."""
    assert config.teacher.name is not None
    settings = config.model.model_copy(update={"name": config.teacher.name, "device": device or config.model.device})
    try:
        model, own = load_model(settings)
    except UserError as error:
        raise UserError(str(error).replace("model.name", "teacher.name"), error.more) from None
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"teacher.name: {config.teacher.name} has another vocabulary than {config.model.name}; a teacher needs the "
            "tokenizer of its pupil"
        )
    return model.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Teacher:
    prompts: TeacherPrompts | None = None
    """What it reads in place of the prompts; None: the prompts."""
    served: ServedTeacher | None = None
    """None: it is the reference model of the policy."""

    def scored(self, batch: Batch, reference: Score) -> Batch:
        """The batch with the teacher's log-probabilities; `reference` scores by the reference model."""
        read = batch.trained
        if self.prompts is not None:
            groups = [(group, [s for s in group.trajectories if s.trained_tokens]) for group in batch]
            tokens = self.prompts.tokens([group.prompt for group, _ in groups])
            read = [s.replace(prompt_ids=ids) for (_, own), ids in zip(groups, tokens, strict=True) for s in own]
        rows = reference(read) if self.served is None else self.served.score(read)
        return batch.with_trained(
            sample.replace(teacher_logps=row) for sample, row in zip(batch.trained, rows, strict=True)
        )


def with_teacher(batch: Batch, weight: float) -> Batch:
    """The batch with the teacher's part in the advantages of its tokens, and how far the policy is from it."""
    trained = [_taught(sample, weight) for sample in batch.trained]
    if not trained:
        return batch
    behind = np.concatenate([(s.logps - s["teacher_logps"])[s.loss_mask] for s in trained])
    return replace(batch.with_trained(trained), metrics={**batch.metrics, "teacher/kl": float(behind.mean())})


def _taught(sample: Trajectory, weight: float) -> Trajectory:
    columns = (
        torch.from_numpy(np.array(sample[name])) for name in ("advantages", "teacher_logps", "logps", "loss_mask")
    )
    return sample.replace(advantages=distilled(*columns, weight=weight).numpy())
