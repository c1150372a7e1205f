"""A reward model on a GPU scores the samples of many groups at a time."""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from reward_models import classifier, words_with

from dapo_rl.rewards.model_verifier import Exchange
from dapo_rl.rollout.reward_model import RewardModel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_as_near_to_those_of_a_cpu_in_float32_as_the_model_s_own(dtype):
    torch.manual_seed(0)
    model = classifier(head_dim=16)
    groups = [[Exchange([], [], f"{n}+{n}=?\n" + "1+" * i) for i in range(6)] for n in range(20)]
    expected = np.array(RewardModel(model, words_with(), 100, "rm").score(groups))

    def error(scorer):
        """The root mean square; single scores of a few units are off by 0.2 in bfloat16."""
        return np.sqrt(np.square(np.array(scorer.score(groups)) - expected).mean())

    own = RewardModel(model.to("cuda", dtype), words_with(), 100_000, "rm")
    own._scores = own._padded_scores
    most = max(1.5 * error(own), 1e-5)
    assert most < 0.1
    for budget in (50, 100_000):
        scorer = RewardModel(model, words_with(), budget, "rm")
        assert scorer._scores.packed
        assert (scorer._scores._fusion is not None) == (dtype == torch.bfloat16)
        assert error(scorer) < most
    scorer.release_memory()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert error(scorer) < most
