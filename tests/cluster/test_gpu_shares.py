"""What Ray sets aside of a GPU for engines and ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.cluster.build_engines import COLOCATED_GPUS, _memory_share, check_engines, gpu_share
from dapo_rl.cluster.build_policy import RANK_GPUS
from dapo_rl.config import ClusterSettings
from dapo_rl.errors import UserError


@given(engines=st.integers(1, 64), ranks=st.integers(1, 16))
def test_engines_fit_beside_the_ranks_that_they_share_gpus_with(engines, ranks):
    cluster = ClusterSettings(backend="ray", engines=engines, ranks=ranks, placement="shared")
    assert cluster.engines_per_gpu * ranks >= engines > (cluster.engines_per_gpu - 1) * ranks
    # Ray counts in ten-thousandths.
    assert RANK_GPUS["shared"] + cluster.engines_per_gpu * round(gpu_share(cluster) + 5e-5, 4) <= 1.0


@pytest.mark.parametrize(("placement", "engine_gpus"), [("colocated", 0.4), ("separate", 2), ("shared", 0.22)])
def test_an_engine(placement, engine_gpus):
    cluster = ClusterSettings(backend="ray", engines=2, engine_gpus=2, placement=placement)
    assert gpu_share(cluster) == engine_gpus


@pytest.mark.parametrize(("placement", "memory"), [("colocated", None), ("separate", 0.85), ("shared", 0.1)])
def test_the_memory_of_an_engine(placement, memory):
    """Four engines on a GPU that they share with a rank get 40 % of it together."""
    cluster = ClusterSettings(backend="ray", engines=8, ranks=2, placement=placement)
    assert _memory_share(cluster) == memory


@pytest.mark.parametrize("share", RANK_GPUS.values())
def test_no_two_ranks_get_the_same_gpu(share):
    assert 0.5 < share <= 1.0


def test_more_engines_than_ranks_do_not_take_turns_on_gpus():
    assert RANK_GPUS["colocated"] + 2 * COLOCATED_GPUS > 1
    crowded = ClusterSettings(backend="ray", engines=3, ranks=2)
    with pytest.raises(UserError, match=r"cluster\.engines: 3 engines .* use 2, or cluster\.placement=shared"):
        check_engines(crowded, torch.device("cuda"))
    check_engines(crowded, torch.device("cpu"))
    for fits in ({"engines": 2}, {"placement": "shared"}, {"placement": "separate"}):
        check_engines(crowded.model_copy(update=fits), torch.device("cuda"))
