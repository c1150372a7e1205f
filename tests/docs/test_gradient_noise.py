"""The ratio of signal to noise of a gradient, from the checkpoints of runs of one update."""

import json

import gradient_noise
import numpy as np
import pytest

from dapo_rl import Config, DAPOTrainer
from dapo_rl.recipes import packaged_recipe


@pytest.mark.slow
def test_the_gradient_is_what_the_moments_of_an_update_say(tmp_path):
    """One update with Adam's first moment at 0: its norm is that of the log, and the ratio by hand."""
    words = ["train.steps=1", "train.mini_batches=1", "train.epochs_per_step=1", "train.max_grad_norm=1e6"]
    words += ["checkpoint.every=1", "data.eval.size=4", "sampling.prompts_per_step=2", "log.report=false"]
    run = tmp_path / "run"
    with DAPOTrainer(config=Config.load(packaged_recipe("lab/overlong-filtering"), words), run_dir=run) as trainer:
        trainer.train()
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "grad_norm" in line]
    assert np.linalg.norm(gradient_noise.gradient(run)) == pytest.approx(row["actor/grad_norm"], rel=1e-4)


def test_signal_and_noise_of_gradients_by_hand():
    """Two arms of two seeds. Arm 1: (3, 1) and (3, −1), whose mean is (3, 0): the product of the two is 8, their mean
    squared norm 10, so the noise is 2. Arm 2: (0, 2) and (4, 2), with the product 4 and the squared norms 4 and 20."""
    gradients = np.array([[3.0, 1.0], [3.0, -1.0], [0.0, 2.0], [4.0, 2.0]])
    first, second = gradient_noise.figures(gradients @ gradients.T, 2)
    assert first["snr"] == pytest.approx(8 / 2)
    assert second["snr"] == pytest.approx(4 / 8)
    between = ((12 + 2) + (0 - 2)) / 2  # of seed 0 with seed 1, and of seed 1 with seed 0
    assert first["cosine"] == pytest.approx(between / (8 * 4) ** 0.5)
    assert second["cosine"] == pytest.approx(1.0)
