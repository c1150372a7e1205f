"""Shapes, their tokenizer and prompts, and the floor under a time."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_rl.errors import UserError
from dapo_rl.lab.bench.model_shapes import SHAPES, check_model, random_prompts, shape_config, synthetic_tokenizer
from dapo_rl.lab.bench.peer_variants import all_variants, variants_of, vllm_options
from dapo_rl.lab.bench.roofline import Limit, Size, rollout_floor, update_floor
from dapo_rl.lab.bench.workload import Workload
from dapo_rl.models.load import TINY
from dapo_rl.train.disk_space import DiskNeed

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
}


def work(**changes):
    settings = {
        "kind": "rollout",
        "model": "tiny",
        "prompts": 2,
        "group": 3,
        "tokens": 4,
        "prompt_tokens": 5,
        "dtype": "float32",
        "engine": "hf",
        "device": "cpu",
        "repeats": 2,
        "warmup": 1,
    }
    return Workload(**(settings | changes))


def on_meta(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name):
    model = on_meta(name)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    theta = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
    assert theta["rope_theta"] == SHAPES[name]["rope_theta"]


def test_size_counts_what_is_multiplied():
    size = Size.of(on_meta("smollm2-135m"))
    assert size.head == 49152 * 576
    assert size.body == 134_515_008 - 49152 * 576
    assert size.attention_width == 576 * 30
    assert size.kv_width == 2 * 3 * 64 * 30


def test_size_of_a_model_whose_output_layer_is_its_own():
    size = Size.of(on_meta("qwen2.5-7b"))
    assert size.head == 152_064 * 3584
    assert size.body == 7_615_616_512 - 2 * 152_064 * 3584
    assert size.kv_width == 2 * 4 * 128 * 28


def test_a_misspelt_shape_is_answered_with_the_right_one():
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        check_model("smollm2-135")
    for name in ("tiny", "smollm2-135m", "owner/name", str(TINY)):
        check_model(name)


def test_a_directory_that_is_not_there_is_found_before_anything_is_measured():
    with pytest.raises(UserError, match=r"no directory \./nowhere/at-all"):
        check_model("./nowhere/at-all")


def test_prompts_have_the_length_and_differ_and_their_text_gives_the_same_tokens():
    tokenizer = synthetic_tokenizer(100)
    assert len(tokenizer) == 100
    prompts = random_prompts(tokenizer, 20, 7, seed=0)
    assert len(set(prompts)) == 20
    assert prompts == random_prompts(tokenizer, 20, 7, seed=0)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    assert {len(row) for row in ids} == {7}
    assert [tokenizer(tokenizer.decode(row)).input_ids for row in ids] == ids
    assert not {0, 1, 2} & {i for row in ids for i in row}


def test_the_floor_of_a_rollout_by_hand():
    # 10 parameters in the body, 4 in the head; attention costs nothing at width 0, keys and values are 3 numbers.
    size = Size(body=10, head=4, attention_width=0, kv_width=3, parameters=14)
    job = work(tokens=3)
    slow_memory = Limit(bandwidth_bytes_per_s=1.0, matmul_flops_per_s=1e12)
    weights, prompt = 14 * 4, 2 * 5
    steps = sum(weights + (prompt + 6 * position) * 3 * 4 for position in (1, 2))
    assert rollout_floor(job, size, slow_memory) == weights + steps
    slow_multiplier = Limit(bandwidth_bytes_per_s=1e12, matmul_flops_per_s=1.0)
    prefill = 2 * 10 * prompt + 2 * 4 * 2
    assert rollout_floor(job, size, slow_multiplier) == prefill + 2 * (2 * 14 * 6)


def test_the_floor_of_an_update_by_hand():
    size = Size(body=10, head=4, attention_width=2, kv_width=0, parameters=14)
    prompt, response = 2 * 5, 2 * 3 * 4
    forward = 2 * 10 * (prompt + response) + 2 * 4 * response + 4 * 2 * prompt * 2.5 + 4 * 2 * response * (5 + 2)
    assert update_floor(work(), size, Limit(1.0, 1.0)) == 3 * forward


def test_the_settings_of_a_run_do_the_work_and_what_the_user_names_wins():
    config = work(kind="step", settings=("train.lr=1e-5", "sampling.max_batch=3")).config()
    sampling = config.sampling
    assert (sampling.prompts_per_step, sampling.group_size, sampling.max_new_tokens) == (2, 3, 4)
    assert sampling.ignore_eos
    assert not sampling.dynamic
    assert config.updates_per_step == 1
    assert (config.train.lr, sampling.max_batch) == (1e-5, 3)


def test_variants_are_those_that_make_sense_here():
    on_cpu = variants_of("trl", cuda=False, bfloat16=False, samples=8)
    assert on_cpu == ["whole", "accumulate", "static-cache", "continuous"]
    assert {"autocast", "pure-bfloat16"} <= set(variants_of("trl", cuda=False, bfloat16=True, samples=8))
    assert variants_of("vllm", cuda=True, bfloat16=True, samples=512) == ["in-process", "runner-v2", "separate-process"]
    assert variants_of("vllm", cuda=True, bfloat16=True, samples=1024)[-1] == "default"
    assert variants_of("hf", cuda=False, bfloat16=False, samples=8) == [""]
    assert all_variants("hf") == []


def test_vllm_has_room_and_graphs_for_all_samples():
    wide = vllm_options("in-process", max_batch=1000, longest=8464)
    assert wide == {
        "in_process": True,
        "max_num_seqs": 1008,
        "max_model_len": 8464,
        "gpu_memory_utilization": 0.85,
        "max_cudagraph_capture_size": 1008,
    }
    assert vllm_options("runner-v2", max_batch=1000, longest=8464) == wide | {"model_runner_v2": True}
    assert not vllm_options("separate-process", max_batch=8, longest=99)["in_process"]
    assert "max_cudagraph_capture_size" not in vllm_options("default", max_batch=1024, longest=99)


def test_a_benchmark_needs_no_disk_space_for_checkpoints(tmp_path):
    """It writes none, however large the model is."""
    DiskNeed(checkpoint=10**18, model=10**18).check(work(kind="step").config(), tmp_path / "run", 0)
