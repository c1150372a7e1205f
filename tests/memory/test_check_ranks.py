"""`dapo check` of a run on ranks: the sums of the plan that ranks make."""

import pytest

from dapo_rl import Config
from dapo_rl.memory.check import find_memory, memory_report
from dapo_rl.memory.model_size import KNOWN
from dapo_rl.memory.ranks import rank_memory

RAY = ["model.name=qwen2.5-7b", "sampling.max_new_tokens=2048", "cluster.backend=ray"]


def report(*settings, gpu="h100"):
    config = Config.load(None, [*RAY, *settings])
    return memory_report(config, find_memory(config, gpu))


def parts(found):
    return {part.name: part.bytes for part in found.parts}


def test_shards_are_divided_over_the_ranks():
    found = report("cluster.ranks=8")
    weights = 4 * KNOWN["qwen2.5-7b"].parameters
    assert found.fits
    assert parts(found)["weights"] == parts(found)["gradients"] == weights // 8
    assert parts(found)["optimizer"] == 2 * weights // 8
    assert found.verdict.startswith("fits on 8 ranks (h100): a GPU needs about ")
    assert f"about {found.total / 2**30:.1f} GiB of its usable 76.0 GiB" in found.verdict


def test_a_run_that_does_not_fit_is_told_what_mends_it():
    found = report("cluster.ranks=1")
    assert (found.fits, found.parts) == (False, ())
    assert found.verdict.startswith("does not fit on 1 rank (h100): each GPU needs at least ")
    assert found.verdict.endswith("with cluster.offload=true or cluster.ranks=2 it fits")
    assert report("cluster.ranks=2").fits
    assert "weights" not in parts(report("cluster.ranks=1", "cluster.offload=true"))


def test_engines_of_their_own_take_nothing():
    assert "engines" in parts(report("cluster.ranks=4"))
    assert "engines" not in parts(report("cluster.ranks=4", "cluster.placement=separate"))


@pytest.mark.parametrize(("name", "tied"), [("qwen2.5-1.5b", True), ("smollm2-135m", True), ("qwen2.5-7b", False)])
def test_layers_are_counted_from_the_size(name, tied):
    size = KNOWN[name]
    memory = rank_memory(Config.load(None, []), size, bfloat16=True)
    assert memory.root == size.head * (1 if tied else 2)
    assert 0 <= size.parameters - memory.root - size.layers * memory.layer < size.layers
