"""The library for products is chosen inside, and given back outside."""

import platform
import warnings

import pytest
import torch
from support import small_model

from dapo_rl.models.device import ALONE, enough_threads, largest_product, quick_products

CPU = torch.device("cpu")


@pytest.mark.parametrize(("machine", "dtype", "inside"), [
    ("aarch64", torch.float32, False),
    ("arm64", torch.float32, False),
    ("aarch64", torch.bfloat16, True),
    ("x86_64", torch.float32, True),
])  # fmt: skip
def test_onednn_is_left_out_where_it_is_slow(monkeypatch, machine, dtype, inside):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quick_products(CPU, dtype):
            assert torch.backends.mkldnn.enabled is inside
    assert torch.backends.mkldnn.enabled is True


def test_it_is_given_back_after_an_error(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    with pytest.raises(ValueError, match="broken"), quick_products(CPU, torch.float32):
        raise ValueError("broken")
    assert torch.backends.mkldnn.enabled is True


@pytest.mark.parametrize(("multiplications", "inside"), [(ALONE, 1), (ALONE + 1, 2)])
def test_small_products_have_one_thread(multiplications, inside):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with enough_threads(multiplications):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="broken"), enough_threads(multiplications):
            raise ValueError("broken")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_largest_product_is_a_layers():
    """The vocabulary of 261 would be larger than 32 × 64 of the MLP."""
    assert largest_product(small_model()) == 32 * 64
    assert largest_product(small_model(tie_word_embeddings=False)) == 32 * 64
