"""Weights by the bucket: all of them, once, in order, with adapters added in one bucket at a time."""

import gc
import weakref

import pytest
import torch
from support import all_weights, small_model

from dapo_rl.config import LoraSettings
from dapo_rl.models.lora import add_lora
from dapo_rl.models.weights import ModelWeights


@pytest.mark.parametrize("nbytes", [1, 9000, 20_000, 1 << 30])
def test_buckets_hold_every_weight_once_within_their_size(nbytes):
    model = small_model()
    buckets = list(ModelWeights(model).buckets(nbytes))
    own = dict(model.named_parameters())
    assert [name for bucket in buckets for name, _ in bucket] == list(own)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= nbytes
        assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in bucket), "the live tensors"
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    firsts = [bucket[0][1].nbytes for bucket in buckets]
    assert all(size + first > nbytes for size, first in zip(sizes, firsts[1:], strict=False)), "none ends early"


def test_of_merged_weights_there_are_never_more_than_a_bucket_and_the_next_tensor():
    pytest.importorskip("peft")
    model = small_model()
    base = {name: tensor.clone() for name, tensor in model.named_parameters()}
    add_lora(model, LoraSettings(rank=4, alpha=8), 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    weights = all_weights(ModelWeights(model))
    layer = model.model.layers[0].mlp.up_proj
    expected = (
        base["model.layers.0.mlp.up_proj.weight"] + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    torch.testing.assert_close(weights["model.layers.0.mlp.up_proj.weight"], expected)
    assert weights.keys() == base.keys()
    del weights
    gc.collect()
    merged: list[weakref.ref] = []
    for bucket in ModelWeights(model).buckets(1):  # one tensor each
        merged += [weakref.ref(tensor) for name, tensor in bucket if "proj" in name]
        del bucket
        assert sum(ref() is not None for ref in merged) <= 2
