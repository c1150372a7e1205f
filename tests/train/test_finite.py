"""Numbers that are not finite are found before they are saved, and not gone on with where they were."""

import json

import pytest
import torch
from checkpoint_parts import policy_of
from support import small_model
from test_policy import samples_for

from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.finite import not_finite
from dapo_rl.models.weights import ModelWeights
from dapo_rl.train import checkpoint as checkpoint_module
from dapo_rl.train.checkpoint import MANIFEST, Checkpoints

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_number_among_many_is_found(bad, dtype):
    values = {"a": torch.ones(3), "b": {"c": [torch.zeros(2), torch.full((5, 7), 2.0, dtype=dtype)]}}
    assert not_finite(values) is None
    values["b"]["c"][1][4, 6] = bad
    assert not_finite(values) == "b.c.1"


def test_what_is_finite_is_so_however_large_and_whatever_else_there_is():
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    values = {"w": largest, "double": torch.tensor([1e300], dtype=torch.float64), "int": torch.arange(3)}
    assert not_finite({**values, "none": None, "number": INF, "empty": torch.empty(0)}) is None
    assert not_finite({}) is None


class Quantized(torch.Tensor):
    """A tensor that is made of others, as an 8-bit optimizer has them."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


@pytest.mark.parametrize(("scale", "found"), [(1.0, None), (NAN, "moment.scale")])
def test_tensors_made_of_others(scale, found):
    moment = Quantized()
    moment.codes, moment.scale = torch.zeros(4, dtype=torch.uint8), torch.tensor([scale])
    assert not_finite({"moment": moment}) == found


def save(checkpoints, step, weight=1.0, moment=1.0):
    """With these numbers somewhere, although none that is not finite is saved."""
    model = small_model()
    policy = policy_of(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = weight
    checkpoint = checkpoints.save(step, [policy])
    if moment != 1.0:
        torch.save({"optimizer": {"moment": torch.tensor([moment])}}, checkpoint.path / "optimizer.pt")
        (checkpoint.path / MANIFEST).unlink()
        checkpoint_module._write_manifest(checkpoint.path, step, {})
    return checkpoint


def test_moments_that_are_not_finite_are_not_saved(tmp_path):
    model = small_model()
    policy = policy_of(model)
    policy.update(samples_for(model), lr=1e-3)
    next(iter(policy.optimizer.state.values()))["exp_avg_sq"][0] = INF
    with pytest.raises(NonFiniteError, match=r"the state of the optimizer is not finite, in optimizer\.state\."):
        Checkpoints(tmp_path, keep=3).save(1, [policy])
    assert list(tmp_path.iterdir()) == []


def test_weights_are_looked_at_bucket_by_bucket():
    model = small_model()
    assert ModelWeights(model).not_finite() is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = NAN
    assert ModelWeights(model).not_finite() == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"weight": INF}, "its weights are not finite, in model.layers.1.mlp.up_proj.weight"),
        ({"moment": NAN}, "the state of its optimizer is not finite, in optimizer.moment"),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_not_gone_on_with(tmp_path, bad, said):
    checkpoints = Checkpoints(tmp_path, keep=3)
    good = save(checkpoints, 1)
    last = save(checkpoints, 2, **bad)
    damaged, model = [], small_model()
    assert checkpoints.restore([policy_of(model)], damaged.append) == good
    assert damaged == [f"{last.path}: {said}"]
    assert model.model.layers[1].mlp.up_proj.weight[3, 5] == 1
    assert checkpoints.latest() == good, "what a diverged run calls its last good one"
    (good.path / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"every checkpoint is damaged: .*not finite.*manifest\.json is missing"):
        checkpoints.restore([policy_of(small_model())])


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    good = save(checkpoints, 1)
    save(checkpoints, 2).path.rename(tmp_path / "step-7")
    damaged = []
    assert checkpoints.restore([], damaged.append) == good
    assert damaged == [f"{tmp_path / 'step-7'}: manifest.json belongs to step 2"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000, "1", "null", '{"sha256": 3}', '{"step": 1e999}'])
def test_any_manifest_is_damaged_or_sound(tmp_path, text):
    checkpoints = Checkpoints(tmp_path, keep=3)
    (save(checkpoints, 1).path / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=r"step-1: manifest\.json is damaged"):
        checkpoints.restore([])


def forge(path, **changes):
    """A manifest that vouches for itself."""
    manifest = json.loads((path / MANIFEST).read_text()) | changes
    manifest["sha256"] = checkpoint_module._own_checksum(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "files",
    [[], "x", {"stream.json": None}, {"stream.json": {"size": "1"}}, {"\0": {"size": 1}}, {"a" * 5000: {}}, {"x": []}],
    ids=repr,
)
def test_a_manifest_that_vouches_for_itself_is_damaged_or_sound(tmp_path, files):
    checkpoints = Checkpoints(tmp_path, keep=3)
    forge(save(checkpoints, 1).path, files=files)
    with pytest.raises(UserError, match=r"every checkpoint is damaged: .*step-1: "):
        checkpoints.restore([])


def test_what_only_has_the_name_of_a_checkpoint_is_none_and_is_removed_in_time(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    elsewhere = save(Checkpoints(tmp_path / "elsewhere", keep=1), 2)
    (tmp_path / "step-2").symlink_to(elsewhere.path)
    (tmp_path / "step-3").symlink_to("step-3")
    (tmp_path / "step-4").write_text("")
    assert checkpoints.restore([]).step == 2
    save(checkpoints, 9)
    assert (elsewhere.path / MANIFEST).is_file(), "a link goes, and not what it leads to"
    assert [c.step for c in checkpoints.all()] == [9]
