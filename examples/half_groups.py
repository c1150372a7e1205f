"""A batch transform that trains on half of each group, which takes little more than half the time of an update.

    dapo train train.transforms=[half_groups.py:half_groups]

It draws right and wrong samples apart, as many of each if there are enough, and scales their advantages by how many
samples each stands for, so that the sum over a group is on average half of that of all its samples.
"""

import numpy as np

from dapo_rl.types import Batch, Group


def half_groups(batch: Batch) -> Batch:
    samples = []
    for group in batch:
        weights = drawn(group, np.random.default_rng([batch.step, group.draw]))
        for sample in group.trajectories:
            weight = weights.get(sample.index)
            if weight is None:
                samples.append(sample.replace(loss_mask=False))
            else:
                samples.append(sample.replace(advantages=sample["advantages"] * np.float32(weight)))
    return batch.with_samples(samples)


def drawn(group: Group, rng: np.random.Generator) -> dict[int, float]:
    """The samples to train on, by index, and the factor of each one's advantage."""
    by_kind = ([s.index for s in group.samples if s.correct], [s.index for s in group.samples if not s.correct])
    fewer, more = sorted(by_kind, key=len)
    half = len(group.samples) // 2
    count = min(len(fewer), half // 2)
    weights = {}
    for kind, kept in ((fewer, count), (more, half - count)):
        weights |= {int(i): len(kind) / kept / 2 for i in rng.permutation(kind)[:kept]}
    return weights
