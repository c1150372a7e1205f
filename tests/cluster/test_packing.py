"""Samples arrive as they were sent: with their masks and versions, and with memory of their own."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.cluster.packing import PackedSamples
from dapo_rl.engines.protocol import Completion
from dapo_rl.types import Sample


@st.composite
def samples(draw):
    count = draw(st.integers(0, 6))
    column = lambda values: np.array(draw(st.lists(values, min_size=count, max_size=count)))  # noqa: E731
    return Sample(
        column(st.integers(0, 99)),
        column(st.integers(-9, 0)),
        draw(st.text(max_size=3)),
        draw(st.sampled_from(["stop", "length"])),
        column(st.integers(0, 2)),
        column(st.booleans()),
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"]), st.integers(0, 3), samples()), max_size=4))
def test_what_is_packed_is_unpacked(entries):
    done = [(number, Completion(name, index, sample)) for number, name, index, sample in entries]
    packed = pickle.loads(pickle.dumps(PackedSamples.of(done)))
    unpacked = list(packed.unpack())
    assert unpacked == done
    for array in (packed.token_ids, packed.logps):
        assert not any(np.shares_memory(array, sent.sample.token_ids) for _, sent in unpacked)
        assert not any(np.shares_memory(array, sent.sample.logps) for _, sent in unpacked)
