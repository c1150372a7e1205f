"""A script of TRL on a GPU: a model that is loaded on the CPU is trained on the GPU, as TRL does."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from transformers import AutoModelForCausalLM

from dapo_rl import DAPOTrainer
from dapo_rl.models.load import TINY

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.gpu


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def test_a_loaded_model_moves_to_the_gpu(tmp_path):
    args = trl.GRPOConfig(output_dir=str(tmp_path / "run"), max_steps=1, num_generations=4, max_completion_length=16,
                          per_device_train_batch_size=8)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(TINY)
    with DAPOTrainer(model, length, args, [{"prompt": f"1+{n}=?\n"} for n in range(8)]) as trainer:
        assert next(model.parameters()).is_cuda
        assert trainer.train()["steps"] == 1
