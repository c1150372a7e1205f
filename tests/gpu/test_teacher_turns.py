"""In turns, a teacher is on the GPU while it scores, and on the host while the engine samples."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import small_model, train_sample

from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_in_turns_scores_the_same_and_leaves_its_memory(dtype):
    def policy(where, **turns):
        torch.manual_seed(1)
        teacher = small_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4).to(where)
        how = {"algo": AlgoSettings(), "train": TrainSettings(lr=1e-4), "norm_length": 10, "token_budget": 10**4}
        made = HFPolicy(
            small_model().cuda(), pad_id=0, temperature=1.0, reference=teacher.eval(), dtype=dtype, **how, **turns
        )
        return made, teacher

    samples = [train_sample((1, 2), (3, 4, 5 + i), (-1.0,) * 3, 1.0 - 2 * (i % 2), i // 2) for i in range(8)]
    kept, _ = policy("cuda")
    expected = kept.score_reference(samples)
    del kept
    turned, teacher = policy("cpu", time_share=True)
    size = sum(4 * p.numel() for p in teacher.parameters())
    assert size > 128 << 20
    turned.score(samples)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # what is fused stays right when the weights come back
        for ours, theirs in zip(turned.score_reference(samples), expected, strict=True):
            assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)
        assert all(p.device.type == "cpu" for p in teacher.parameters())
        assert torch.cuda.memory_allocated() - before < size // 8
        assert torch.cuda.max_memory_allocated() - before > size
