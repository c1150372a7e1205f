"""The memory plan of ranks on GPUs: sums worked out by hand, what is picked, and what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import REPOSITORY, small_model, tokenizer

from dapo_rl.cluster.build_policy import RankRecipe
from dapo_rl.cluster.ray_ranks import Place
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.plan.layout import GpuMemory, Layout
from dapo_rl.lab.plan.rates import SPECS
from dapo_rl.memory.model_size import KNOWN
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.memory.ranks import RankMemory
from dapo_rl.memory.sizes import RUNTIME, run_sizes

GIB = 2**30
HOST = 1000 * GIB
EIGHT_BIT = "train.optimizer=adamw_8bit"
P7, HEAD7 = 7_615_616_512, 152_064 * 3584
LAYER7, ROOT7 = (P7 - 2 * HEAD7) // 28, 2 * HEAD7


def memory(name="qwen2.5-7b", ranks=4, **settings):
    size = KNOWN[name]
    given = {
        "model.dtype": "bfloat16",
        "cluster.backend": "ray",
        "cluster.ranks": ranks,
        "cluster.engines": ranks,
        "data.max_prompt_tokens": 1024,
        "sampling.max_new_tokens": 1024,
    }
    config = Config.build(given | {key.replace("__", "."): value for key, value in settings.items()})
    root = (2 if size.parameters > 7e9 else 1) * size.head  # from 7 B on, embeddings are not tied
    return RankMemory(config, size, (size.parameters - root) // size.layers, root, True, 2048)


def test_the_sums_of_7_b_on_4_ranks():
    sizes = memory().sizes(80 * GIB)
    assert (sizes.weights, sizes.gradients, sizes.moments, sizes.engine) == (P7, P7, 2 * P7, 2 * P7)
    # Two layers in bfloat16; the gradients of one in bfloat16, and of two in float32.
    assert sizes.casts == (2 * 2 + 2 + 2 * 4) * LAYER7
    # Embeddings and head in bfloat16; beside layers the head's gradient, and at the end all gradients in both types.
    assert sizes.layer_casts == sizes.casts + 2 * ROOT7 + 2 * HEAD7
    assert sizes.head == (2 + 2 + 4) * ROOT7
    assert memory(ranks=1).sizes(80 * GIB).weights == 4 * P7
    layer = 26 * 3584 + 4 * 3584 + 4 * 512 + 8 * 18944
    assert memory().tokens == 16384
    taken = RUNTIME + 4 * P7 + 16384 * (28 * 4 * 3584 + 12 * 3584) + sizes.layer_casts + 16384 * layer
    assert memory(cluster__placement="separate").updating(sizes, 16384, recompute=True) == taken
    assert memory().updating(sizes, 16384, recompute=True) == taken + RUNTIME + 8 * 152_064 * 1024


def test_the_shards_are_those_of_dapo_plan():
    ours = memory(cluster__placement="separate", algo__kl_coef=0.1, preset="vapo")
    theirs = GpuMemory(ours.config, ours.size, SPECS["h100"], Layout(8, rollout_gpus=4)).sizes
    sizes = ours.sizes(80 * GIB)
    shards = ("weights", "gradients", "moments", "reference", "critic")
    for part in (*shards, "casts", "layer_casts", "head", "token", "layer_token", "update_tokens"):
        assert getattr(sizes, part) == getattr(theirs, part) > 0, part


def test_adapters_have_few_gradients():
    lora = memory(model__lora__rank=16)
    adapters = lora.size.adapter_parameters(lora.config.model.lora)
    sizes = lora.sizes(80 * GIB)
    assert (sizes.weights, sizes.gradients, sizes.moments) == (P7, adapters, 2 * adapters)
    assert sizes.casts == sizes.layer_casts - 2 * ROOT7 == 4 * LAYER7 + 10 * (adapters // 28)
    assert sizes.head == 2 * ROOT7 + 10 * 2**27  # a chunk of logits


def test_offloaded_shards_are_on_the_host():
    offloaded = memory(cluster__offload=True, preset="vapo")
    sizes = offloaded.sizes(80 * GIB)
    assert (sizes.weights, sizes.gradients, sizes.moments, sizes.critic) == (0, 0, 0, 0)
    shards = 2 * 16 * P7 // 4  # the policy's and the critic's
    assert offloaded.find(80 * GIB, shards)
    with pytest.raises(
        UserError, match=r"the shards of a rank need 56\.7 GiB of the host, which has 56\.7 GiB for each"
    ):
        offloaded.plan(80 * GIB, shards - 1)
    assert memory(preset="vapo").find(80 * GIB, 0)


def test_what_engines_keep():
    gpu, graphs = 80 * GIB, 8 * 152_064 * 1024
    prefill = 32768 * 2 * (3 * 18944 + 6 * 3584)

    def kept(**settings):
        ours = memory(**settings)
        return ours.engines(ours.sizes(gpu))

    assert kept(cluster__placement="separate") == 0
    assert kept() == RUNTIME + graphs  # it rests
    assert kept(engine="vllm") == RUNTIME
    assert kept(engine="vllm", cluster__placement="shared") == int(0.4 * gpu)
    one_sequence = (2048 + 64) * 2 * 28 * 512 * 2
    assert kept(engine="hf") == RUNTIME + 4 * P7 + prefill + one_sequence
    each = RUNTIME + graphs + 2 * P7 + prefill
    assert kept(cluster__placement="shared") == each + int(0.4 * (gpu - RUNTIME - P7 - each))
    two = {"cluster__placement": "shared", "cluster__engines": 8}
    assert kept(**two, sampling__kv_memory_gib=2) == 2 * (each + 2 * GIB)


@pytest.mark.parametrize(
    ("name", "placement", "picks"),
    [
        ("qwen2.5-1.5b", "separate", (True, False, False)),
        ("qwen2.5-1.5b", "shared", (True, True, True)),
        ("qwen2.5-7b", "colocated", (None, True, True)),
        ("qwen2.5-7b", "shared", (None, None, True)),
        ("qwen2.5-32b", "separate", (None, None, None)),
    ],
)
def test_what_is_picked_on_1_2_and_8_gpus_of_80_gib(name, placement, picks):
    plans = [memory(name, ranks, cluster__placement=placement).find(80 * GIB, HOST) for ranks in (1, 2, 8)]
    assert tuple(plan and plan.recompute for plan in plans) == picks


@pytest.mark.parametrize("placement", ["colocated", "separate", "shared"])
@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b"])
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_plan_takes_no_more_than_there_is(name, ranks, placement):
    ours = memory(name, ranks, cluster__placement=placement)
    for gpu in (24 * GIB, 80 * GIB, 139 * GIB):
        plan, sizes = ours.find(gpu, HOST), ours.sizes(gpu)
        if plan is None:
            continue
        tokens = plan.token_budget or ours.tokens
        assert ours.updating(sizes, tokens, plan.recompute) <= sizes.usable
        assert ours.sampling(sizes, sizes.kv_default if plan.kv_bytes is None else plan.kv_bytes) <= sizes.usable
        if plan.recompute:
            assert ours.updating(sizes, ours.tokens, recompute=False) > sizes.usable
        if tokens < ours.tokens:
            assert ours.updating(sizes, tokens + 1, plan.recompute) > sizes.usable
        if tokens > ours.tokens:
            assert ours.updating(sizes, tokens, plan.recompute) <= 0.75 * sizes.usable


def test_micro_batches_are_larger_where_there_is_room():
    assert memory("qwen2.5-1.5b", 1).plan(139 * GIB, HOST).token_budget > 16384
    assert memory("qwen2.5-1.5b", 1, train__token_budget=16384).plan(139 * GIB, HOST).token_budget is None
    few = {"sampling__prompts_per_step": 5, "sampling__group_size": 2, "train__mini_batches": 1}
    # No more than an update has, with a sample by which the shares of ranks may differ.
    assert memory("qwen2.5-1.5b", 1, **few).plan(139 * GIB, HOST).token_budget == 5 * (1024 + 2 * 1024) + 2048


def test_one_line_says_what_was_picked():
    assert memory(ranks=64).plan(80 * GIB, HOST).note == (
        "memory: a GPU needs about 59.9 GiB of its usable 76.0 GiB during updates"
    )
    assert memory(ranks=2, train__token_budget=8192).plan(80 * GIB, HOST).note == (
        "memory: a GPU needs about 71.4 GiB of its usable 76.0 GiB during updates, with layers that are recomputed in "
        "the backward pass; without, 127.2 GiB; the KV cache is limited to 11.3 GiB"
    )
    fewer = memory("qwen2.5-14b", cluster__placement="separate").plan(80 * GIB, HOST)
    assert fewer.note.endswith(f"; micro-batches have {fewer.token_budget:,} tokens instead of 16,384")


def test_the_settings_overrule():
    always = memory(ranks=64, train__gradient_checkpointing=True).plan(80 * GIB, HOST)
    assert always.recompute
    assert "recomputed" not in always.note
    assert memory(ranks=8, train__gradient_checkpointing=False).find(80 * GIB, HOST).token_budget < 16384
    assert memory("qwen2.5-14b", cluster__placement="separate", train__token_budget=16384).find(80 * GIB, HOST) is None


@pytest.mark.parametrize(
    ("name", "settings", "remedies"),
    [
        ("qwen2.5-7b", {"ranks": 1}, ["cluster.offload=true", "cluster.ranks=2"]),
        (
            "qwen2.5-7b",
            {"ranks": 4, "train__gradient_checkpointing": False, "train__token_budget": 16384},
            ["train.gradient_checkpointing=true", "train.token_budget=4863", "cluster.ranks=64"],
        ),
        (
            "qwen2.5-14b",
            {"cluster__placement": "separate", "train__token_budget": 16384},
            ["train.token_budget=8610", EIGHT_BIT, "cluster.offload=true", "cluster.ranks=8"],
        ),
        (
            "qwen2.5-7b",
            {"cluster__placement": "shared"},
            [
                *("sampling.kv_memory_gib=1.0", EIGHT_BIT, "cluster.offload=true"),
                *("cluster.placement=separate", "cluster.ranks=8"),
            ],
        ),
        (
            "qwen2.5-32b",
            {"ranks": 16},
            ["cluster.offload=true", "cluster.placement=separate", "cluster.ranks=128"],
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_sums_and_the_remedies(name, settings, remedies):
    ours = memory(name, **settings)
    with pytest.raises(UserError) as refused:
        ours.plan(80 * GIB, HOST)
    line = str(refused.value)
    assert line.startswith("cluster.ranks: each GPU needs at least ")
    assert f"(weights {ours.sizes(80 * GIB).weights / GIB:.1f} GiB, " in line
    assert ", and has 76.0 GiB to use; " in line
    assert line.endswith(f"; with {' or '.join(remedies)} it fits")
    for remedy in remedies:
        if changed := re.fullmatch(r"([\w.]+)=(\w.*)", remedy):
            key, value = changed[1].replace("cluster.ranks", "ranks").replace(".", "__"), changed[2]
            given = int(value) if value.isdigit() else value
            assert memory(name, **(settings | {key: given})).find(80 * GIB, HOST), remedy


def test_the_line_of_the_docs():
    with pytest.raises(UserError) as refused:
        memory(ranks=1).plan(80 * GIB, HOST)
    assert f"dapo: {refused.value}\n" in (REPOSITORY / "docs" / "cluster.md").read_text()


def test_while_sampling_the_engine_may_be_what_does_not_fit():
    with pytest.raises(
        UserError, match=r"at least 76\.7 GiB while sampling \(weights 13\.8 GiB, optimizer 27\.5 GiB, en"
    ):
        memory("qwen2.5-14b").plan(80 * GIB, HOST)


def test_a_run_that_no_setting_mends():
    with pytest.raises(UserError, match=r"; use larger GPUs, a smaller model, model\.lora, or fewer sampling\.max_new"):
        memory("qwen2.5-72b").plan(16 * GIB, 0)


def test_the_sizes_of_a_model():
    model = small_model(tie_word_embeddings=False)
    ours = RankMemory.of(Config(), model, True, 40)
    assert ours.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    outside = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
    assert ours.root == sum(p.numel() for p in outside)
    assert ours.can_recompute


def test_ranks_plan_for_the_smallest_gpu(monkeypatch):
    """On a GPU before the model is loaded; a CPU has no plan."""
    ours = memory("qwen2.5-1.5b", ranks=1, cluster__placement="separate")
    recipe = RankRecipe(ours.config, "none", tokenizer(), 2048, torch.bfloat16, None, recompute=True)
    place = Place(0, 1, torch.device("cpu"))
    assert recipe._plan(place) == MemoryPlan(recompute=True)
    of_rank = SimpleNamespace(total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_rank)
    monkeypatch.setattr(dist, "all_gather_object", lambda result, own: result.__setitem__(slice(None), [own] * 1))
    small = RankRecipe(ours.config, "none", tokenizer(), 2048, torch.bfloat16, ours, recompute=False)
    with pytest.raises(UserError, match=r"^cluster\.ranks: each GPU needs at least "):
        small(place)
    of_rank.total_memory = 80 * GIB
    assert small._plan(place).recompute


def test_sizes_without_a_cluster_are_untouched():
    whole = run_sizes(memory().config, KNOWN["qwen2.5-7b"], 0, bfloat16=True, trained=P7, longest=2048)
    assert memory(ranks=1).shards(whole).weights == whole.weights == 4 * P7
