"""A reward model on a GPU scores the samples of many groups at a time."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from reward_models import classifier, words_with

from dapo_rl.rewards.model_verifier import Exchange
from dapo_rl.rollout.reward_model import RewardModel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_scores_are_those_of_a_cpu_in_float32(dtype, tolerance):
    torch.manual_seed(0)
    model = classifier(head_dim=16)
    groups = [[Exchange([], [], f"{n}+{n}=?\n" + "1+" * i) for i in range(6)] for n in range(20)]
    expected = RewardModel(model, words_with(), 100, "rm").score(groups)
    for budget in (50, 100_000):
        scorer = RewardModel(model.to("cuda", dtype), words_with(), budget, "rm")
        assert scorer._scores.packed
        assert (scorer._scores._fusion is not None) == (dtype == torch.bfloat16)
        for ours, theirs in zip(scorer.score(groups), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance)
    scorer.release_memory()
    assert all(p.device.type == "cpu" for p in model.parameters())
    for ours, theirs in zip(scorer.score(groups), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)
