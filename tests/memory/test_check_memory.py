"""What fits: the estimate against measurements, hand-computed parts, and the verdicts of `dapo check`."""

import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from support import dapo, small_model, train_sample
from transformers import LlamaConfig, Qwen2Config

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.check import conformance, print_conformance
from dapo_rl.memory.check import Need, find_memory, memory_report
from dapo_rl.memory.model_size import KNOWN, ModelSize, count_parameters, size_of
from dapo_rl.memory.report import GIB, Memory, memory_json
from dapo_rl.models.load import TINY
from dapo_rl.models.response_logps import ResponseLogps
from dapo_rl.recipes import packaged_recipe

H200 = Memory("h200", "cuda", 140 * GIB, here=False)
PAPER = packaged_recipe("dapo-math-qwen2.5-32b")
GSM8K = packaged_recipe("gsm8k-qwen2.5-0.5b")


def need(name="qwen2.5-0.5b", machine=H200, **settings):
    config = Config.build({"model.dtype": "bfloat16"} | {key.replace("__", "."): v for key, v in settings.items()})
    return Need(config, KNOWN[name], machine)


def sizes(parts):
    return {part.name: part.bytes for part in parts}


@pytest.mark.parametrize(("recompute", "measured"), [(False, 39.5), (True, 10.8)])
def test_the_update_of_one_long_sample(recompute, measured):
    """Peaks of tests/gpu/test_update.py on an H200: 20,480 tokens on Qwen2.5-0.5B's shape."""
    parts = sizes(need(train__gradient_checkpointing=recompute).parts(tokens=20480))
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert state / GIB == pytest.approx(8.2, rel=0.25)
    assert (state + parts["activations"] + parts["update"]) / GIB == pytest.approx(measured, rel=0.1)


def kept_for_backward(model, tokens, dtype, recompute=False):
    """Bytes of activations that autograd keeps for one more token, without parameters and views of the same storage."""

    def kept(tokens):
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages = {}
        alive = []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                alive.append(tensor)
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        zeros = np.zeros(tokens - 1, np.float32)
        sample = train_sample(np.zeros(1, np.int32), np.zeros(tokens - 1, np.int32), zeros, zeros, group=0)
        responses = ResponseLogps(model, temperature=1.0, pad_id=0, dtype=dtype, recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), responses.compute([sample]):
            return sum(storages.values())

    return (kept(2 * tokens) - kept(tokens)) / tokens


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_autograd_keeps(dtype, recompute):
    """Few heads and a small vocabulary, so that the head's own memory does not count for much."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    model = small_model(**shape, num_attention_heads=4, num_key_value_heads=2)
    size = count_parameters(model.config)
    config = Config.build({"model.dtype": str(dtype).removeprefix("torch."), "train.gradient_checkpointing": recompute})
    estimate = Need(config, size, Memory("CPU", "cpu", 16 * GIB)).token_bytes
    assert estimate == pytest.approx(kept_for_backward(model, 64, dtype, recompute), rel=0.25)


def test_the_parts_of_a_run_by_hand():
    parts = sizes(need(sampling__max_new_tokens=1024, data__max_prompt_tokens=1024).parts())
    p = 494_032_768
    assert parts["weights"] == parts["gradients"] == 4 * p
    assert parts["optimizer"] == 8 * p
    assert parts["engine's weights"] == 2 * p
    # 24 layers × 2 key-value heads × 64 wide, keys and values, 2 bytes each; 1,024 sequences and a spare page.
    assert parts["KV cache"] == (1024 * 2048 + 64) * 24 * 2 * 64 * 2 * 2
    assert parts["activations"] == 16384 * (24 * (26 * 896 + 4 * 896 + 4 * 128 + 8 * 4864) + 12 * 896)
    assert "reference model" not in parts


@pytest.mark.parametrize(
    ("settings", "part", "per_parameter"),
    [
        ({"train__optimizer": "adamw_8bit"}, "optimizer", 2),
        ({"algo__kl_coef": 0.001}, "reference model", 4),
        ({"model__dtype": "float32"}, "engine's weights", 4),
        ({"engine": "hf"}, "engine's weights", 0),
    ],
)
def test_settings_that_change_a_part(settings, part, per_parameter):
    assert sizes(need(**settings).parts()).get(part, 0) == per_parameter * 494_032_768


def test_lora_trains_only_its_adapters():
    # Per layer and rank: in + out of q, k, v, o, gate, up and down.
    adapters = 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    parts = sizes(need(model__lora__rank=8, algo__kl_coef=0.1).parts())
    assert parts["gradients"] == 4 * adapters
    assert parts["optimizer"] == 8 * adapters
    assert "reference model" not in parts
    only = need(**{"model__lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}})
    assert only.sizes.gradients == 4 * 24 * 8 * ((896 + 896) + (896 + 128))


def test_a_teacher_in_turns_is_what_it_takes_beyond_the_gradients():
    teacher = {"teacher__name": "qwen2.5-1.5b"}
    kept, turned = need(**teacher), need(**teacher, train__memory="time_share")
    own = 4 * KNOWN["qwen2.5-1.5b"].parameters
    assert sizes(kept.parts())["reference model"] == own
    assert sizes(turned.parts())["reference model"] == own - 4 * 494_032_768
    small = need("qwen2.5-1.5b", teacher__name="qwen2.5-0.5b", train__memory="time_share")
    assert "reference model" not in sizes(small.parts())


def test_vllm_takes_its_share():
    parts = sizes(need(engine="vllm").parts())
    assert parts["engine's weights"] == pytest.approx(0.4 * 140 * GIB, abs=1)
    assert "KV cache" not in parts


def test_a_cpu_samples_from_the_trained_weights():
    cpu = Memory("CPU", "cpu", 16 * GIB)
    parts = sizes(need(machine=cpu, model__dtype="float32", sampling__prompts_per_step=4).parts())
    assert "engine's weights" not in parts
    assert parts["KV cache"] == 64 * 2048 * 24 * 2 * 64 * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_sizes_are_those_of_the_architecture(name):
    size = KNOWN[name]
    tied = size.parameters < 4e9
    kind = LlamaConfig if name.startswith("smollm2") else Qwen2Config
    config = kind(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=tied,
    )
    assert count_parameters(config) == size


def test_sizes_come_from_the_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    # Embeddings, 4 layers of 4 square matrices, 3 of the feed-forward layer and 2 norms, and the last norm.
    assert 261 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 == 886_528
    tiny = ModelSize(886_528, 128, 384, 4, 4, 4, 32, 261)
    assert size_of("tiny") == size_of(str(TINY)) == tiny
    assert size_of("Qwen/Qwen2.5-32B") == size_of("someone/Qwen2.5-32B-Instruct") == KNOWN["qwen2.5-32b"]
    assert size_of("Qwen/Qwen2.5-Coder-1.5B-Instruct") == size_of("Qwen/Qwen2.5-Math-1.5B") == KNOWN["qwen2.5-1.5b"]
    assert size_of("smollm2-135m") == KNOWN["smollm2-135m"]  # not downloaded yet
    with pytest.raises(UserError, match="is not in the local cache of the hub; hf download some/model-9b config"):
        size_of("some/model-9b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is unknown: "):
        size_of(str(tmp_path))


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [("24", 24), ("24g", 24), ("7.5", 7.5), ("h100-80g", 80), ("H100", 80), ("h200", 140), ("rtx 4090 24 GB", 24),
     ("RTX 4090", 24), ("rtx-3090", 24), ("rtx 6000 48", 48)],
)  # fmt: skip
def test_names_of_gpus(gpu, gib):
    memory = find_memory(Config(), gpu)
    assert (memory.bytes, memory.kind, memory.here) == (int(gib * GIB), "cuda", False)


@pytest.mark.parametrize("gpu", ["", "0", "-5", "big", "h100-80x", "nan", "1e3", "9" * 400, "rtx 6000", "gtx-1080"])
def test_a_gpu_that_nobody_knows(gpu):
    with pytest.raises(UserError, match=r"^--gpu: "):
        find_memory(Config(), gpu)


@pytest.mark.parametrize(
    ("recipe", "gpu", "fits", "words"),
    [
        (PAPER, "h200", False, "does not fit on h200 (140.0 GiB): it needs 594.6 GiB for everything at once, and at "),
        (
            PAPER,
            "h200",
            False,
            "at least 528.0 GiB if the engine frees its memory during updates (train.memory); use a",
        ),
        (GSM8K, "h100-80g", True, "fits on h100-80g (80.0 GiB): about 49"),
        (GSM8K, "32", True, "with less than the recipe's 47.0 GiB: set train.token_budget=5275"),
        (GSM8K, "24", True, "in turns (train.memory): about 22.8 GiB while updating, 21.8 GiB while sampling"),
        (GSM8K, "14", True, "in turns (train.memory): about 13.3 GiB while updating with recomputed layers"),
        (
            GSM8K,
            "12",
            False,
            "and at least 11.6 GiB if the engine frees its memory during updates (train.memory); with ",
        ),
        (GSM8K, "12", False, "; with train.optimizer=adamw_8bit it fits"),
        (GSM8K, "6", False, "; use a larger GPU, a smaller model, model.lora, or fewer sampling.max_new_tokens"),
    ],
)
def test_verdicts(recipe, gpu, fits, words):
    config = Config.load(recipe)
    report = memory_report(config, find_memory(config, gpu))
    assert report.fits is fits
    assert words in report.verdict


LORA = "model.lora.rank=8"
ON_RANKS = ("cluster.backend=ray", "cluster.ranks=64", "cluster.offload=true", "cluster.placement=separate")


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (Memory("a GPU", "cuda", 2 * GIB, here=False), ()),
        (Memory("a GPU", "cuda", 2 * GIB, here=False), (*ON_RANKS, "train.optimizer=adamw_8bit")),
        (Memory("CPU", "cpu", 2 * GIB), ()),
    ],
    ids=["gpu", "ranks", "cpu"],
)
def test_lora_is_advised_unless_it_is_on(machine, settings):
    without, on = (memory_report(Config.load(GSM8K, [*settings, *lora]), machine) for lora in ((), (LORA,)))
    assert without.fits is on.fits is False
    assert "model.lora" in without.verdict
    assert "lora" not in on.verdict
    assert "a smaller model" in on.verdict


def test_the_advice_fits():
    """The settings that the verdict names are enough."""
    config = Config.load(GSM8K)
    for gpu in ("28", "32", "40"):
        machine = find_memory(config, gpu)
        verdict = memory_report(config, machine).verdict
        advice = verdict.partition(": set ")[2].replace(" and ", " ").split()
        assert advice, verdict
        changed = memory_report(Config.load(GSM8K, advice), machine)
        assert changed.total <= machine.bytes
        assert changed.verdict.startswith("fits on"), changed.verdict


def test_a_cache_that_holds_no_sequence():
    config = Config.load(GSM8K, ["sampling.kv_memory_gib=0.01"])
    report = memory_report(config, find_memory(config, "h200"))
    assert report.fits is False
    assert "10.2 MiB for the KV cache, less than one sequence needs; set sampling.kv_memory_gib=0.013" in report.verdict


@pytest.mark.parametrize("tokens", [1000, 43_000, 46_000, 131_000])
def test_the_cache_that_a_message_recommends_is_enough(tokens):
    def verdict(gibibytes):
        settings = {"model.name": "qwen2.5-0.5b", "model.dtype": "float32", "sampling.max_new_tokens": tokens}
        config = Config.build({**settings, "sampling.kv_memory_gib": gibibytes, "data.max_prompt_tokens": 1024})
        return memory_report(config, Memory("big", "cuda", 400 * GIB, here=False)).verdict

    said = re.search(r"less than one sequence needs; set sampling\.kv_memory_gib=(\S+) or more", verdict(0.01))
    assert said
    assert "KV cache" not in verdict(float(said[1]))


def test_what_cannot_be_estimated_is_said():
    config = Config.build({"model.name": "some/model-9b"})
    report = memory_report(config, find_memory(config, "80"))
    assert (report.fits, report.parts) == (None, ())
    assert report.verdict.startswith("memory not estimated: the size of some/model-9b is unknown")
    on_gpu = Config.build({"model.device": "cuda"})
    nowhere = memory_report(on_gpu, Memory("CPU", "cpu", GIB))
    assert nowhere.fits is False
    assert nowhere.verdict.startswith("cannot run here: model.device is cuda")


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_has_the_memory_and_its_verdict_last(width):
    config = Config.load(PAPER)
    stream = io.StringIO()
    report = conformance(config, memory_report(config, find_memory(config, "h100-80g")))
    print_conformance(report, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (place,) = (i for i, line in enumerate(lines) if line.startswith("conformant: every row"))
    assert lines[place + 1].startswith("does not fit on h100-80g (80.0 GiB): it needs ")
    (weights,) = (line.split() for line in lines if "M parameters" in line)
    assert weights[1:4] == ["122.1", "GiB", "153%"]


def test_json_in_gib():
    config = Config.load(GSM8K)
    document = memory_json(memory_report(config, find_memory(config, "24")))
    assert document["gib"] == 24
    assert document["parts"]["weights"] == 1.84
    assert document["total"] == pytest.approx(sum(document["parts"].values()), abs=0.01)
    assert document["share"] == pytest.approx(document["total"] / 24, abs=0.001)


def test_the_total_and_the_least_are_both_explained():
    """The verdict's figures are the table's total, and the total without what the engine frees."""
    config = Config.load(PAPER)
    report = memory_report(config, find_memory(config, "h200"))
    parts = sizes(report.parts)
    freed = parts["engine's weights"] + parts["KV cache"]
    assert report.total - freed == pytest.approx(report.least, rel=1e-3)
    keeps = memory_report(Config.load(PAPER, ["train.memory=keep"]), find_memory(config, "h200"))
    assert "frees" not in keeps.verdict
    cpu = memory_report(Config.load(GSM8K), Memory("CPU", "cpu", 4 * GIB))
    assert f"it needs {cpu.total / GIB:.1f} GiB for everything at once, and at least " in cpu.verdict
    assert cpu.verdict.endswith("; --gpu h100-80g estimates it for a GPU of another machine")


@pytest.mark.slow
def test_the_command(tmp_path):
    result = dapo("check", "--gpu", "24", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    assert memory["fits"] is True
    assert memory["parts"]["runtime"] == 1.0
    here = json.loads(dapo("check", "--json", "model.device=cpu", cwd=tmp_path).stdout)["memory"]
    assert here["machine"] == "CPU"
    large = dapo("check", "gsm8k-qwen2.5-1.5b", "--gpu", "6", "--json", cwd=tmp_path)
    assert (large.returncode, json.loads(large.stdout)["memory"]["fits"]) == (2, False)
    assert large.stderr.rstrip() == "dapo: check: the run does not fit on a GPU (6.0 GiB)"
    wrong = dapo("check", "--gpu", "fast", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("dapo: --gpu: fast: give its memory in GiB")


def test_the_size_of_a_teacher_may_be_unknown_too():
    config = Config.build({"teacher.name": "some/teacher-9b"})
    for gpu in ("80", None):
        report = memory_report(config, find_memory(config, gpu))
        assert (report.fits, report.parts) == (None, ())
        assert report.verdict.startswith(
            "memory not estimated: teacher.name: the size of some/teacher-9b is unknown: its config.json is not in"
        )
