"""LoRA's variants in bfloat16 with fused kernels: masks repeat when layers are recomputed, and merged weights compute
what is trained."""

import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import small_model, tokenizer, train_sample

from dapo_rl.config import AlgoSettings, LoraSettings, ModelSettings, TrainSettings
from dapo_rl.models.lora import add_lora, plain_weights
from dapo_rl.train.policy import HFPolicy

pytest.importorskip("peft")
pytestmark = pytest.mark.gpu

PROMPT = tuple(range(40, 52))
SAMPLES = [train_sample(PROMPT, tuple(range(60 + i, 70 + i)), (-3.0,) * 10, (-1.0) ** i, 0) for i in range(4)]


def policy_of(model, lora, **train):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(lr=1e-2, weight_decay=0.0, **train),
        norm_length=20,
        token_budget=10**6,
        dtype=torch.bfloat16,
        settings=ModelSettings(lora=lora),
        tokenizer=tokenizer(),
    )


def gradients(policy):
    policy.update(SAMPLES, lr=0.0)
    return [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_repeats_and_follows_the_seed(dora):
    lora = LoraSettings(rank=4, alpha=8, dropout=0.5, use_dora=dora)
    start = small_model().cuda()
    add_lora(start, lora, 0)
    for name, parameter in start.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    kept, again, recomputed = (
        gradients(policy_of(copy.deepcopy(start), lora, gradient_checkpointing=recompute))
        for recompute in (False, False, True)
    )
    without = gradients(policy_of(copy.deepcopy(start), lora.model_copy(update={"dropout": 0.0})))
    assert all(map(torch.equal, kept, again))
    assert not all(map(torch.equal, kept, without))
    # In bfloat16 a recomputed layer rounds as the first time; other masks would change gradients by their own size.
    for one, other in zip(kept, recomputed, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 * float(one.abs().max()) + 1e-6, rtol=2e-2)


@pytest.mark.parametrize("variant", [{"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "dropout": 0.3}])
def test_merged_weights_compute_what_is_trained(variant):
    lora = LoraSettings(rank=4, alpha=8, **variant)
    model = small_model().cuda()
    add_lora(model, lora, 0)
    policy = policy_of(model, lora)
    for _ in range(3):
        policy.update(SAMPLES, lr=1e-2)
    plain = small_model().cuda()
    plain.load_state_dict(dict(plain_weights(model)), strict=False)
    ids = torch.arange(40, 60, device="cuda")[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)
