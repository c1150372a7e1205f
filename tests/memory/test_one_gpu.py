"""The memory plan: sums worked out by hand, what is picked for which model on which GPU, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch
from support import small_model

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.memory.check import find_memory, memory_report
from dapo_rl.memory.model_size import KNOWN, ModelSize
from dapo_rl.memory.one_gpu import MOST_TOKENS, MemoryPlan, PlanSettings, find_plan, plan_memory
from dapo_rl.memory.sizes import RUNTIME, run_sizes
from dapo_rl.run.build_policy import memory_plan
from dapo_rl.train.gradient_buffers import Gradients

GIB = 2**30
P7 = 7_615_616_512


def sizes(name, gib, longest=2048, **settings):
    config = Config.build({"model.dtype": "bfloat16"} | {key.replace("__", "."): v for key, v in settings.items()})
    size = KNOWN[name]
    lora = config.model.lora
    trained = size.parameters if lora is None else size.adapter_parameters(lora)
    return run_sizes(config, size, int(gib * GIB), bfloat16=True, trained=trained, longest=longest)


def test_the_sums_of_7_b():
    run = sizes("qwen2.5-7b", 139, sampling__max_batch=128)
    assert (run.weights, run.gradients, run.moments, run.engine) == (4 * P7, 4 * P7, 8 * P7, 2 * P7)
    head = 152_064 * 3584
    assert run.casts == 2 * (P7 - head)
    assert run.layer_casts == 2 * (P7 - head) // 28
    # A chunk of logits in float32 with its exponentials and bfloat16 gradients, and the weight's copy and gradient.
    assert run.head == 10 * 2**27 + 6 * head
    layer = 26 * 3584 + 4 * 3584 + 4 * 512 + 8 * 18944
    assert run.token == 28 * layer + 12 * 3584
    assert run.recomputed_token == 28 * 4 * 3584 + 12 * 3584
    assert run.kv_token == 2 * 28 * 512 * 2
    assert run.kv_least == (2048 + 64) * run.kv_token
    assert run.kv_most == (128 * 2048 + 64) * run.kv_token
    always = RUNTIME + 12 * P7 + 8 * 152_064 * 128
    assert run.sampling(1000) == always + 2 * P7 + 32768 * 2 * (3 * 18944 + 6 * 3584) + 1000
    assert run.updating(5000, recompute=False) == always + 4 * P7 + 5000 * run.token + run.casts + run.head
    many, few = 30_000, 1000  # in the backward pass, one layer is larger than the output layer's memory, or smaller
    kept = always + 4 * P7 + many * run.recomputed_token
    assert run.updating(many, recompute=True) == kept + run.layer_casts + many * layer
    assert run.updating(few, recompute=True) == always + 4 * P7 + few * run.recomputed_token + run.head
    assert run.keeping(1000, 5000, False) == run.updating(5000, False) + 2 * P7 + 1000


def test_a_critic_takes_its_weights_gradients_and_moments():
    run, plain = sizes("qwen2.5-7b", 139, preset="vapo"), sizes("qwen2.5-7b", 139)
    assert run.critic == 16 * P7
    assert run.sampling(1000) == plain.sampling(1000) + 16 * P7
    assert sizes("qwen2.5-7b", 139, preset="vapo", train__optimizer="adamw_8bit").critic == 10 * P7
    with pytest.raises(UserError, match=r"critic 113\.5 GiB"):
        plan_memory(run, PlanSettings())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gigabytes", [8, 20, 60])
def test_as_many_tokens_as_fit(recompute, gigabytes):
    run = sizes("qwen2.5-1.5b", 80)
    tokens = run.tokens_in(gigabytes * 10**9, recompute)
    assert run.working(tokens, recompute) <= gigabytes * 10**9 < run.working(tokens + 1, recompute)


KEEP, TURNS, RECOMPUTE, NOTHING = (False, False), (True, False), (True, True), None


@pytest.mark.parametrize(
    ("name", "picks"),
    [
        ("smollm2-135m", (KEEP, KEEP, KEEP)),
        ("qwen2.5-1.5b", (NOTHING, KEEP, KEEP)),
        ("qwen2.5-3b", (NOTHING, TURNS, KEEP)),
        ("qwen2.5-7b", (NOTHING, NOTHING, RECOMPUTE)),
        ("qwen2.5-14b", (NOTHING, NOTHING, NOTHING)),
        ("qwen2.5-32b", (NOTHING, NOTHING, NOTHING)),
    ],
)
def test_what_is_picked_on_24_80_and_139_gib(name, picks):
    plans = [find_plan(sizes(name, gib), PlanSettings()) for gib in (24, 80, 139)]
    assert tuple(plan and (plan.time_share, plan.recompute) for plan in plans) == picks


def test_a_teacher_is_on_the_host_while_the_engine_samples():
    """In turns it also leaves before there are gradients; a rank keeps its share."""
    plain, run = sizes("qwen2.5-1.5b", 139), sizes("qwen2.5-1.5b", 139, teacher__name="qwen2.5-7b")
    own, gradients = 4 * P7, plain.gradients
    assert own > gradients > 0
    assert (run.reference, run.teacher) == (own, own)
    assert run.sampling(1000) == plain.sampling(1000)
    assert run.updating(5000, recompute=False) == plain.updating(5000, recompute=False) + own - gradients
    assert run.keeping(1000, 5000, recompute=False) == plain.keeping(1000, 5000, recompute=False) + own
    rank = run.divided(4)
    assert rank.sampling(1000) - plain.divided(4).sampling(1000) == own // 4
    small = sizes("qwen2.5-1.5b", 139, teacher__name="qwen2.5-0.5b")
    assert small.updating(5000, recompute=False) == plain.updating(5000, recompute=False)
    initial = sizes("qwen2.5-1.5b", 139, algo__kl_coef=0.1)  # the reference model of a KL penalty stays
    assert (initial.reference, initial.teacher) == (plain.weights, 0)
    assert sizes("qwen2.5-1.5b", 139, teacher__prompt="{prompt} {answer}").reference == plain.weights
    assert sizes("qwen2.5-1.5b", 139, teacher__name="http://localhost:8000/v1").reference == 0


def test_a_plan_that_keeps_everything_changes_nothing():
    assert find_plan(sizes("qwen2.5-1.5b", 139), PlanSettings()) == MemoryPlan()


@pytest.mark.parametrize("settings", [{}, {"sampling__max_batch": 128}, {"sampling__kv_memory_gib": 2.0}])
@pytest.mark.parametrize(("name", "gib"), [("qwen2.5-7b", 139), ("qwen2.5-3b", 80), ("qwen2.5-0.5b", 14)])
def test_turns_use_what_is_there_and_no_more(name, gib, settings):
    run = sizes(name, gib, **settings)
    plan = find_plan(run, PlanSettings("time_share"))
    assert plan.time_share
    assert run.updating(plan.token_budget, plan.recompute) <= run.usable
    assert plan.token_budget == MOST_TOKENS or run.updating(plan.token_budget + 1, plan.recompute) > run.usable
    assert run.sampling(plan.kv_bytes) <= run.usable
    if "sampling__kv_memory_gib" in settings:
        assert plan.kv_bytes == 2 * GIB
    else:
        assert plan.kv_bytes == min(run.kv_most, run.usable - run.sampling(0))


def test_7_b_on_an_h200():
    """The benchmark's work: 128 samples of up to 1,024 tokens."""
    run = sizes("qwen2.5-7b", 139, longest=1296, sampling__max_batch=128, sampling__prompts_per_step=16)
    plan = plan_memory(run, PlanSettings())
    assert (plan.time_share, plan.recompute) == (True, True)
    assert plan.kv_bytes == run.kv_most == (128 * 1344 + 64) * 57_344  # all 128 samples at once
    assert 20_000 < plan.token_budget < 30_000
    assert plan.note == (
        "memory: everything at once would take 164.3 GiB of the usable 132.0 GiB; the engine frees 23.4 GiB for each "
        "update, and rebuilds its weights after it; layers are recomputed in the backward pass, which takes about a "
        "quarter longer"
    )


def test_small_micro_batches_cost_more_than_recomputing():
    """A GPU on which 2,000 tokens fit without recomputing and 2,100 do not."""
    run = sizes("qwen2.5-1.5b", 80, longest=500)
    tight = replace(run, gpu=int(run.updating(2000, recompute=False) / 0.95))
    assert find_plan(tight, PlanSettings()).recompute
    assert find_plan(tight, PlanSettings(recompute=False)).time_share
    roomy = replace(run, gpu=int(run.updating(2100, recompute=False) / 0.95))
    assert not find_plan(roomy, PlanSettings()).recompute
    short = replace(tight, update_tokens=1000)  # a micro-batch never has more tokens than the update
    assert not find_plan(short, PlanSettings()).recompute


def test_an_engine_that_cannot_rest_keeps_its_memory():
    run = sizes("qwen2.5-3b", 80)
    plan = find_plan(run, PlanSettings(engine_releases_memory=False))
    assert not plan.time_share
    assert run.keeping(plan.kv_bytes, plan.token_budget, plan.recompute) <= run.usable
    assert plan.kv_bytes < run.kv_default
    assert f"; the KV cache is limited to {plan.kv_bytes / GIB:.1f} GiB" in plan.note
    with pytest.raises(UserError, match=r"^train\.memory: time_share needs engine=native"):
        plan_memory(run, PlanSettings("time_share", engine_releases_memory=False))


@pytest.mark.parametrize("memory", ["keep", "time_share"])
def test_the_setting_overrules(memory):
    run = sizes("qwen2.5-1.5b", 80)
    assert find_plan(run, PlanSettings(memory)).time_share is (memory == "time_share")
    assert find_plan(run, PlanSettings(memory, recompute=True)).recompute


@pytest.mark.parametrize(
    ("name", "gib", "settings", "ends"),
    [
        ("qwen2.5-1.5b", 24, PlanSettings(), "with train.optimizer=adamw_8bit it fits"),
        ("qwen2.5-7b", 139, PlanSettings("keep"), "with train.memory=auto it fits"),
        ("qwen2.5-7b", 139, PlanSettings(recompute=False), "with train.gradient_checkpointing=true it fits"),
        ("qwen2.5-32b", 139, PlanSettings(), "model.lora, or fewer sampling.max_new_tokens"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_sums(name, gib, settings, ends):
    run = sizes(name, gib)
    with pytest.raises(UserError) as refused:
        plan_memory(run, settings)
    line = str(refused.value)
    assert line.startswith("train.memory: the run needs at least ")
    assert f"weights {run.weights / GIB:.1f} GiB, gradients" in line
    assert f"the GPU has {run.usable / GIB:.1f} GiB to use; " in line
    assert line.endswith(ends)
    assert "\n" not in line
    least = float(re.search(r"needs at least ([\d.]+) GiB", line)[1])
    listed = [float(part) for part in re.findall(r"([\d.]+) GiB", re.search(r"\((.*?)\)", line)[1])]
    # Beside what is listed there are the libraries and the graphs; each figure is rounded.
    assert sum(listed) + (RUNTIME + run.graphs) / GIB == pytest.approx(least, abs=0.05 * (len(listed) + 1))
    assert (f"engine {(run.engine + run.kv_least) / GIB:.1f} GiB" in line) is (settings.memory == "keep")


def test_a_cache_that_is_set_too_large():
    with pytest.raises(UserError, match=r"while sampling .*engine 8\d\.\d GiB.*; with a lower sampling.kv_memory_gib"):
        plan_memory(sizes("qwen2.5-7b", 139, sampling__kv_memory_gib=70), PlanSettings())


def test_lora_and_smaller_moments():
    assert find_plan(sizes("qwen2.5-7b", 139, model__lora__rank=16), PlanSettings()) == MemoryPlan()
    small = find_plan(sizes("qwen2.5-7b", 139, train__optimizer="adamw_8bit"), PlanSettings())
    assert (small.time_share, small.recompute) == (True, False)


@pytest.mark.parametrize("extra", [[], ["train.memory=keep"], ["train.gradient_checkpointing=false"]])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"])
@pytest.mark.parametrize("gpu", ["24", "h100", "h200"])
def test_dapo_check_agrees_with_the_plan(model, gpu, extra, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = Config.load(None, [f"model.name={model}", "model.dtype=bfloat16", *extra])
    machine = find_memory(config, gpu)
    run = sizes(model.split("/")[1].lower(), machine.bytes / GIB)
    plan = find_plan(run, PlanSettings(config.train.memory, config.train.gradient_checkpointing))
    report = memory_report(config, machine)
    assert report.fits is (plan is not None)
    assert ("in turns" in report.verdict) is (plan is not None and plan.time_share)
    assert ("with recomputed layers" in report.verdict) is (plan is not None and plan.recompute)
    if plan is None:
        assert re.search(r"at least [\d.]+ GiB", report.verdict)


def test_updates_alone():
    """7 B without an engine keeps everything, with recomputed layers."""
    run = sizes("qwen2.5-7b", 139).without_engine()
    plan = find_plan(run, PlanSettings(engine_releases_memory=False))
    assert (plan.time_share, plan.recompute, plan.kv_bytes) == (False, True, 0)
    assert 20_000 < plan.token_budget < 30_000
    assert run.keeping(0, plan.token_budget, True) <= run.usable < run.keeping(0, plan.token_budget + 2, True)


def test_a_cpu_has_no_plan():
    model = small_model()
    assert memory_plan(Config(), model, 40, engine_releases_memory=False) == MemoryPlan()
    always = Config.build({"train.gradient_checkpointing": True})
    assert memory_plan(always, model, 40, engine_releases_memory=False) == MemoryPlan(recompute=True)
    with pytest.raises(UserError, match=r"^train\.memory: time_share needs a GPU"):
        memory_plan(Config.build({"train.memory": "time_share"}), model, 40, engine_releases_memory=False)


def test_the_size_of_a_loaded_model():
    model = small_model()
    size = ModelSize.of(model)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert (size.vocabulary, size.hidden) == tuple(model.get_input_embeddings().weight.shape)
    assert size.body + size.head == size.parameters


def test_gradients_that_are_allocated_first_are_the_same():
    def model():
        torch.manual_seed(0)
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("used", "unused")})
        layers["frozen"] = torch.nn.Linear(3, 3).requires_grad_(False)
        return layers

    def backward(layers):
        for seed in (1, 2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            layers["frozen"](layers["used"](x)).square().sum().backward()

    plain, ours = model(), model()
    gradients = Gradients(ours)
    for _ in range(2):  # the second time, what was used before counts no more
        gradients.allocate()
        assert all(p.grad.eq(0).all() for name, p in ours.named_parameters() if "frozen" not in name)
        addresses = [p.grad.data_ptr() for p in ours["used"].parameters()]
        plain.zero_grad()
        backward(plain)
        backward(ours)
        gradients.drop_unused()
        assert [p.grad.data_ptr() for p in ours["used"].parameters()] == addresses
        for (name, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (mine.grad is None) is (theirs.grad is None) is ("used." not in name or "unused" in name)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    gradients.allocate()
    gradients.drop_unused()
    assert all(p.grad is None for p in ours.parameters())
    del gradients
    assert not ours["used"].weight._post_accumulate_grad_hooks
