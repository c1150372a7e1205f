"""Rows that are read several times, and the sum of their gradients."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.models.packing import Reads, pack, reads_by_row

CPU = torch.device("cpu")


def test_the_reads_of_each_row_by_hand():
    order, starts = reads_by_row(np.array([0, 1, 3, 0, 1, 4, 0]), 6)
    assert order.tolist() == [0, 3, 6, 1, 4, 2, 5]
    assert starts.tolist() == [0, 3, 5, 5, 6, 7, 7]
    assert order.dtype == starts.dtype == np.int32


@given(st.lists(st.integers(0, 9)), st.integers(10, 12))
def test_every_read_is_listed_once_in_order(indices, rows):
    order, starts = reads_by_row(np.array(indices, np.int64), rows)
    lists = [order[a:b].tolist() for a, b in pairwise(starts)]
    assert lists == [[r for r, i in enumerate(indices) if i == row] for row in range(rows)]


def test_reads_on_a_cpu():
    reads = Reads(np.array([2, 0, 2]), 3, CPU)
    x = torch.arange(12.0).reshape(3, 2, 2).requires_grad_()
    read = reads.of(x)
    assert torch.equal(read, x[[2, 0, 2]])
    read.sum().backward()
    assert x.grad[:, 0, 0].tolist() == [1, 0, 2]


def test_a_shared_prompt_is_read_by_each_sample():
    row, predictors = pack([((5, 6, 7), (8, 9)), ((5, 6, 7), (4, 4, 4))], CPU)
    _, starts = reads_by_row(row._ragged.keys.indices.numpy(), row.tokens)
    assert np.diff(starts).tolist() == [2, 2, 2, 1, 1, 1]
    _, starts = reads_by_row(predictors.indices.numpy(), row.tokens)
    assert np.diff(starts).tolist() == [0, 0, 2, 1, 1, 1]
