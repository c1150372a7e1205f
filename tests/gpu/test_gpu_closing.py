"""A trainer on a GPU gives its memory back: when it is closed, and when the last reference goes."""

import gc
import io
from contextlib import redirect_stdout

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE

pytestmark = pytest.mark.gpu
QUICK = [*SMALL[:5], "data.eval=null", "eval.every=null", "train.steps=1", "model.device=cuda"]


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """What they have left would be freed in the middle of a test."""
    gc.collect()
    held()
    torch.cuda.empty_cache()


def trainer_for(path, *overrides):
    return DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*QUICK, *overrides]), run_dir=path)


def train(trainer):
    with redirect_stdout(io.StringIO()):
        trainer.train()


def held():
    """Bytes in tensors. Workspaces are cuBLAS's own, which it keeps for every stream."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("overrides", [[], ["model.dtype=bfloat16"], ["engine=hf", "algo.kl_coef=0.1"]])
def test_closing_frees_the_gpu(tmp_path, overrides):
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for number in range(3):
        trainer = trainer_for(tmp_path / f"run{number}", *overrides)
        assert torch.cuda.memory_allocated() > before
        train(trainer)
        trainer.close()
        assert torch.cuda.memory_allocated() <= before
        assert torch.cuda.memory_reserved() <= reserved


def test_dropping_the_last_reference_frees_the_gpu_at_once(tmp_path):
    before = held()
    trainer = trainer_for(tmp_path / "run")
    train(trainer)
    gc.collect()
    gc.disable()
    try:
        assert held() > before
        del trainer
        assert held() <= before
    finally:
        gc.enable()
