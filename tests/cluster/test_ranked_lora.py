"""Adapters on ranks are those of one process."""

import json
import math

import peft
import pytest
import torch
from rank_parts import WarmRanks, assert_close, make_samples, one_process, weights_of_policy
from safetensors.torch import load_file
from support import THOROUGH, with_reference
from test_ranked_policy import assert_same_gradients, assert_same_update, write
from test_ranked_run import engine_here
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster import build_policy
from dapo_rl.config import AlgoSettings, LoraSettings, ModelSettings, TrainSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_model
from dapo_rl.run import backend

pytestmark = pytest.mark.slow


def lora(**settings):
    return {"settings": ModelSettings(lora=LoraSettings(rank=3, alpha=6, **settings))}


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (1, {}),
        (2, {}),
        (2, {"algo": AlgoSettings(kl_coef=0.1), "reference": True}),
        (2, {"train": TrainSettings(max_grad_norm=0.1, gradient_checkpointing=True)}),
    ],
    ids=["one rank", "two ranks", "reference", "recomputed"],
)
def test_updates_are_those_of_one_process(policy_on, world_size, how):
    one, ranked = one_process(**lora(), **how), policy_on(world_size, **lora(), **how)
    before = weights_of_policy(one)
    assert before.keys() == weights_of_policy(one_process()).keys()
    for name, weight in weights_of_policy(ranked).items():
        assert torch.equal(weight, before[name]), "the same product of the same matrices"
    for seed in range(2):
        samples = make_samples(seed, masked=(4,))
        if one._reference is not None:
            for mine, theirs in zip(ranked.score_reference(samples), one.score_reference(samples), strict=True):
                assert mine == pytest.approx(theirs, abs=2e-5)
            samples = with_reference(one, samples)
        assert_same_update(ranked.update(samples, 1e-4), one.update(samples, 1e-4))
        assert_same_gradients(ranked, one)
    expected, mine = weights_of_policy(one), weights_of_policy(ranked)
    assert list(mine) == list(expected)
    for name, weight in expected.items():
        assert_close(mine[name], weight, atol=1e-5, rtol=0)
        assert torch.equal(weight, before[name]) is ("_proj" not in name)
        assert torch.equal(mine[name], before[name]) is ("_proj" not in name)


def test_the_reference_is_the_model_without_adapters(policy_on):
    samples = make_samples()
    ranked = policy_on(2, reference=True, **lora())
    for mine, theirs in zip(ranked.score_reference(samples), one_process().score(samples), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)
    ranked.update(samples, 1e-2)
    for mine, theirs in zip(ranked.score_reference(samples), one_process().score(samples), strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)


def test_a_checkpoint_holds_the_adapters_and_continues_on_another_number_of_ranks(policy_on, tmp_path):
    first, second = make_samples(0), make_samples(1)
    two = policy_on(2, **lora())
    two.update(first, 1e-4)
    write(two, tmp_path)
    stored = FileSystemReader(tmp_path / "shards").read_metadata().state_dict_metadata
    assert {name.split(".")[-3] for name in stored if name.startswith("weights.")} == {"lora_A", "lora_B"}
    weights = weights_of_policy(two)
    expected = two.update(second, 1e-4)
    after = weights_of_policy(two)
    for world_size in (2, 1):
        other = policy_on(world_size, **lora())
        other.update(second, 1e-3)  # what it has learned is replaced
        other.load(tmp_path)
        for name, weight in weights_of_policy(other).items():
            assert torch.equal(weight, weights[name])
        assert_same_update(other.update(second, 1e-4), expected)
        for name, weight in weights_of_policy(other).items():
            assert_close(weight, after[name], atol=0 if world_size == 2 else 1e-5, rtol=0)


def test_a_checkpoint_of_another_base_is_rejected(policy_on, tmp_path):
    ranked = policy_on(2, **lora())
    write(ranked, tmp_path)
    ranked.load(tmp_path)
    ranked = policy_on(2, **lora())
    ranked.ranks.call("spoil", 0.25)
    with pytest.raises(UserError, match="different model: the weights that are not trained are others; resume with"):
        ranked.load(tmp_path)
    with pytest.raises(UserError, match=r"belongs to a different model: it has weights\.[\w.]+lora_A"):
        policy_on(2).load(tmp_path)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("save", ["merged", "adapter"])
def test_the_export_is_that_of_one_process(policy_on, tmp_path, world_size, save):
    mine, theirs = tmp_path / "ranks", tmp_path / "one"
    policy_on(world_size, **lora(save=save)).export(mine)
    one_process(**lora(save=save)).export(theirs)
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in mine.iterdir()) == names
    assert ("adapter_config.json" in names) is (save == "adapter")
    for name in names:
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name


@pytest.fixture
def quick_start(ray_instance):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_policy, "RayRanks", WarmRanks)
        patch.setattr(backend, "build_engine_pool", engine_here)
        yield


RUN = [
    "algo.kl_coef=0.01", "train.warmup_steps=0", "train.lr_schedule=constant", "checkpoint.every=1",
    "data.eval=null", "eval.every=null",
]  # fmt: skip


def run(path, *settings, resume=False, **given):
    config = Config.load("demo", [*THOROUGH, *RUN, *settings])
    with DAPOTrainer(config=config, run_dir=path, **given) as trainer:
        assert trainer.train(resume=resume)["finished"]
    return path


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    aside = ("timing_s/", "perf/", "rank/")
    return [{k: math.nan if v is None else v for k, v in row.items() if not k.startswith(aside)} for row in rows]


def test_a_run_resumes_on_another_number_of_ranks(quick_start, tmp_path):
    plain = run(tmp_path / "plain", "model.lora.rank=4", "train.steps=3")
    path, on_ranks = tmp_path / "run", ["model.lora.rank=4", "cluster.backend=ray"]
    run(path, *on_ranks, "cluster.ranks=2", "train.steps=2")
    run(path, *on_ranks, "cluster.ranks=1", "train.steps=3", resume=True)
    for a, b in zip(metrics(path), metrics(plain), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5, nan_ok=True)
    theirs = load_file(plain / "model" / "model.safetensors")
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-5, rtol=0)
    assert AutoModelForCausalLM.from_pretrained(path / "model").config.architectures == ["LlamaForCausalLM"]


def test_a_peft_config(quick_start, tmp_path):
    """Its adapters are saved in peft's format, and belong to the model that the settings name."""
    given = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    path = run(tmp_path / "run", "cluster.backend=ray", "cluster.ranks=2", "train.steps=1", peft_config=given)
    base = load_model(ModelSettings(device="cpu"))[0]
    merged = peft.PeftModel.from_pretrained(base, path / "model").merge_and_unload()
    assert peft.PeftConfig.from_pretrained(path / "model").base_model_name_or_path == "tiny"
    before = load_model(ModelSettings(device="cpu"))[0].state_dict()
    for name, weight in merged.state_dict().items():
        assert torch.equal(weight, before[name]) is not any(target in name for target in ("q_proj", "up_proj")), name
