"""Packed scores against the model's own."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_models import classifier
from transformers import BertConfig, BertForSequenceClassification, MistralConfig, MistralForSequenceClassification

from dapo_rl.models.sequence_scores import SequenceScores, can_pack_length, sample_to_score

PAD = 0
ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = classifier()
    made.config.pad_token_id = PAD
    return made


def scored(model, rows, shared, packed=True):
    scores = SequenceScores(model, pad_id=PAD, packed=packed)
    assert scores.packed == packed
    samples = [sample_to_score(row, count, PAD) for row, count in zip(rows, shared, strict=True)]
    with torch.inference_mode():
        return scores.of(samples).tolist()


@given(rows=ROWS, shared=st.integers(1, 12))
@settings(max_examples=30)
def test_packed_scores_are_the_model_s_own(model, rows, shared):
    """Whatever the rows share, and also for rows that end with padding tokens or consist of them."""
    rows = [np.array(row, np.int32) for row in rows]
    with torch.inference_mode():
        own = [float(model(torch.from_numpy(row[None]).long()).logits[0, 0]) for row in rows]
    for packed in (True, False):
        assert scored(model, rows, [min(shared, len(row)) for row in rows], packed) == pytest.approx(own, abs=1e-5)


def test_what_rows_share_is_computed_once(model):
    seen = []
    hook = model.base_model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    rows = [np.array([1, 2, 3, 4, 5, end], np.int32) for end in (6, 7, 8)]
    scored(model, rows, [5, 5, 5])
    hook.remove()
    assert seen[-1] == 5 + 3


def test_scores_of_any_size_are_packed(model):
    large = deepcopy(model)
    large.score.weight.data *= 1e6
    assert SequenceScores(large, pad_id=PAD).packed


def test_models_that_are_not_causal_or_have_a_shorter_window_are_padded(model):
    def can_pack(model):
        return SequenceScores(model, pad_id=PAD).packed

    assert can_pack(model)
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_labels": 1, "pad_token_id": PAD}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    assert not can_pack(BertForSequenceClassification(BertConfig(**small)).eval())
    sliding = MistralForSequenceClassification(MistralConfig(**small, num_key_value_heads=1, sliding_window=16)).eval()
    assert can_pack(sliding)
    assert can_pack_length(sliding, 16)
    assert not can_pack_length(sliding, 17)
