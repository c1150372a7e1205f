"""The forward pass over padded samples: padding changes nothing, whatever a model does with positions."""

import pytest
import torch
from support import small_model, tokenizer, train_sample
from transformers import GPT2Config, GPT2LMHeadModel

from dapo_rl.algo import entropy_from_logits
from dapo_rl.models.response_logps import pad, response_logps


def gpt2():
    """Its positions are learnt, so that a shifted prompt is another prompt."""
    torch.manual_seed(0)
    settings = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(settings).eval()


SAMPLES = [
    train_sample((5, 6, 7, 8, 9, 10), (11, 12), 0.0, 0.0, 0),
    train_sample((5,), (20, 21, 22, 23, 24), 0.0, 0.0, 0),
    train_sample((30, 31, 32), (40,), 0.0, 0.0, 0),
]


@pytest.mark.parametrize("make", [small_model, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_together_equals_plain_and_alone(make, temperature):
    model = make()
    with torch.no_grad():
        together = response_logps(model, SAMPLES, temperature, tokenizer().pad_token_id)
        for row, sample in enumerate(SAMPLES):
            ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
            start = len(sample.prompt_ids)
            logits = model(ids).logits[0, start - 1 : -1] / temperature
            expected = torch.log_softmax(logits, -1)[range(len(sample.token_ids)), list(sample.token_ids)]
            count = len(sample.token_ids)
            assert together.mask[row].sum() == count
            torch.testing.assert_close(together.logps[row, :count], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(together.entropy[row, :count], entropy_from_logits(logits), atol=1e-5, rtol=1e-5)


def test_padding_on_either_side():
    ids, mask = pad([[1, 2, 3], [4]], 0, side="left")
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[True] * 3, [False, False, True]])
    ids, mask = pad([[1, 2, 3], [4]], 0, side="right")
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [4, 0, 0]], [[True] * 3, [True, False, False]])
