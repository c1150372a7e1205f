"""`dapo plan`: rates, simulated engines, ways of sampling, and memory."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from fit_rates import MEASURED, errors, fit_shares

from dapo_rl.config import Config
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.lab.plan.layout import GpuMemory, Layout, choose_layout
from dapo_rl.lab.plan.picture import draw_plan
from dapo_rl.lab.plan.planning import Question, limiting, plan_run
from dapo_rl.lab.plan.rates import ERROR, SPECS, Rates, Shares, find_gpu, largest_load, update_time
from dapo_rl.lab.plan.report import plan_json, print_plan
from dapo_rl.lab.plan.simulation import Simulation, simulated_share
from dapo_rl.lab.simulated_engine import Replica, SimulatedEngine
from dapo_rl.lab.simulated_world import NoWeights, World
from dapo_rl.memory.check import Need
from dapo_rl.memory.model_size import KNOWN

IDEAL = Shares(matmul=1.0, bandwidth=1.0, layer_s=0.0, passes=0.0)
PAPER = "dapo-math-qwen2.5-32b"
SHORT = ["sampling.max_new_tokens=2048", "overlong.shape=off"]


def small(*overrides):
    """A recipe whose simulation takes a fraction of a second."""
    settings = ["sampling.prompts_per_step=8", "sampling.group_size=4", "sampling.max_new_tokens=2048"]
    more = ["overlong.shape=off", "data.max_prompt_tokens=128", "train.mini_batches=1", "model.name=Qwen/Qwen2.5-7B"]
    return Config.load(PAPER, [*settings, *more, *overrides])


def simulation(config, layout, seed=0, acceptance=0.5, **changes):
    size, gpu = KNOWN["qwen2.5-7b"], SPECS["h200"]
    memory = GpuMemory(config, size, gpu, layout)
    sampling = config.sampling
    world = World(acceptance, sampling.group_size, seed, 256, 0.993, sampling.max_new_tokens)
    return Simulation(memory, Rates(size, gpu, layout.tensor_parallel), world, 64, **changes)


# Rates


def test_decoding_few_samples_reads_the_weights():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    # 28 layers of 3584 · (2 · 3584 + 2 · 512 + 3 · 18944), and an output layer of 3584 · 152064, in two bytes each
    assert rates.matrices == 28 * 3584 * (7168 + 1024 + 56832) + 3584 * 152064 == 7_070_285_824
    assert rates.decode_fixed(1) == pytest.approx(2 * 7_070_285_824 / 4.8e12, rel=1e-3)


def test_decoding_many_samples_is_bound_by_matrix_products():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    assert rates.decode_fixed(4096) == pytest.approx(2 * 7_070_285_824 * 4096 / 989e12, rel=1e-3)


def test_each_token_of_context_is_read():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    assert rates.kv_token == 2 * 28 * 512 * 2
    assert rates.decode(10, 1000) - rates.decode_fixed(10) == pytest.approx(10 * 1000 * 57344 / 4.8e12)


def test_an_update_takes_six_flop_per_parameter_and_token_or_eight():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    assert rates.update(1000, 0, recompute=False) == pytest.approx(6 * 7_070_285_824 * 1000 / 989e12)
    assert rates.update(1000, 0, recompute=True) == pytest.approx(8 * 7_070_285_824 * 1000 / 989e12)


def test_weights_are_gathered_over_links_or_the_network():
    h800, l40s = (Rates(KNOWN["qwen2.5-32b"], SPECS[name]) for name in ("h800", "l40s"))
    assert h800.gather(1e9, 1) == 0
    assert h800.gather(1e9, 8) == pytest.approx(7 / 8 / (0.8 * 200))
    assert h800.gather(1e9, 128) == pytest.approx(127 / 128 / (0.8 * 200))  # NVLink is slower than eight adapters
    assert l40s.gather(1e9, 8) == pytest.approx(7 / 8 / (0.8 * 32))


def test_tensor_parallel_engines_divide_the_work_and_add_up_the_parts():
    one, four = (Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], tp, IDEAL) for tp in (1, 4))
    added = 2 * 28 * (10e-6 + 4 * 3584 * 3 / 4 / (0.8 * 450e9))
    assert four.decode_fixed(1) == pytest.approx(one.decode_fixed(1) / 4 + added)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda measured: f"{type(measured).__name__}-{measured.model}")
def test_measurements_are_reproduced_within_the_stated_error(measured):
    assert measured.predicted(Shares()) == pytest.approx(measured.seconds, rel=ERROR)


def test_the_shares_are_those_of_the_fit():
    fitted = fit_shares(Shares(0.5, 0.5, 50e-6, 4.0))
    for name in ("matmul", "bandwidth", "layer_s", "passes"):
        assert getattr(Shares(), name) == pytest.approx(getattr(fitted, name), rel=0.005)
    worst = max(map(abs, errors(Shares()).values()))
    assert ERROR / 2 < worst <= ERROR  # neither too good nor too cautious


def test_an_unknown_gpu_has_a_suggestion():
    assert find_gpu("H800").name == "h800"
    with pytest.raises(UserError, match="there is no data sheet of 'h80'; did you mean h800"):
        find_gpu("h80")
    with pytest.raises(UserError, match="known are a100"):
        find_gpu("tpu-v5")


# The simulated engine


def engine(lengths=(5, 9), replicas=1, pages=10**6, slots=64, rates=None):
    rates = rates or Rates(KNOWN["qwen2.5-7b"], SPECS["h200"])
    return SimulatedEngine(Fixed(lengths), [Replica(rates, pages, slots, 10) for _ in range(replicas)])


class Fixed:
    """A world with given lengths."""

    longest = 10**6

    def __init__(self, lengths):
        self._lengths = tuple(lengths)

    def lengths(self, prompt):
        return self._lengths

    def passes(self, prompt):
        return True


def request(name="a", count=2):
    return Request(name, np.array([0], np.int32), count, SamplingParams(10**6), 0)


def test_a_sample_takes_as_long_as_its_steps():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"])
    simulated = engine((3,))
    simulated.submit(request(count=1))
    (done,) = simulated.poll()
    assert len(done.sample.token_ids) == 3
    steps = sum(rates.decode(1, 10 + step) for step in range(3))
    assert simulated.now == pytest.approx(rates.prefill(10) + steps)
    assert simulated.poll() == []


def test_the_engine_continues_where_it_stopped():
    simulated = engine((5, 9))
    simulated.submit(request())
    (first,) = simulated.poll()
    assert (first.index, len(first.sample.token_ids)) == (0, 5)
    (left,) = simulated.take_unfinished()
    assert simulated.poll() == []
    assert left.tokens == 5
    assert left.starting == ()
    simulated.receive(3, NoWeights())
    simulated.submit(left)
    (second,) = simulated.poll()
    assert second.index == 1
    assert second.sample.versions.tolist() == [0] * 5 + [3] * 4


def test_weights_arrive_while_it_samples():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"])
    simulated = engine((100,))
    simulated.submit(request(count=1))
    simulated.receive_at(rates.prefill(10) + 39.5 * rates.decode(1, 30), 1, 7.0)
    (done,) = simulated.poll()
    versions = done.sample.versions.tolist()
    assert versions == sorted(versions)
    assert 38 <= versions.count(0) <= 41
    assert simulated.now > 7.0
    assert simulated.version == 1


def test_cancelled_tokens_are_counted():
    simulated = engine((5, 9))
    simulated.submit(request("a"))
    simulated.submit(request("b"))
    assert {completion.request_id for completion in simulated.poll()} == {"a", "b"}
    assert simulated.cancel(["a"]) == 5
    assert [completion.request_id for completion in simulated.poll()] == ["b"]
    assert simulated.poll() == []


def test_requests_go_to_the_replica_with_the_fewest_samples():
    simulated = engine((5, 9), replicas=2)
    simulated.submit(request("a"))
    simulated.submit(request("b"))
    assert [replica.load for replica in simulated.replicas] == [2, 2]


def test_a_sample_without_pages_waits_and_is_not_lost():
    simulated = engine((40, 40, 40, 40), pages=120)
    simulated.submit(request(count=4))
    lengths = []
    while completions := simulated.poll():
        lengths += [len(completion.sample.token_ids) for completion in completions]
    assert lengths == [40] * 4
    assert simulated.preempted > 0
    assert simulated.replicas[0].context == 0


# The ways of sampling


@pytest.mark.parametrize("seed", range(4))
def test_streaming_is_not_slower_than_rounds_of_one_batch(seed):
    run = simulation(small(), Layout(1), seed, steps=6, warmup=1, round_size=1)
    rounds, streaming = run.run("rounds"), run.run("streaming")
    assert streaming.step_seconds <= rounds.step_seconds
    assert run.run("streaming").step_seconds == streaming.step_seconds  # the same seed, the same plan


@pytest.mark.parametrize("seed", range(2))
def test_streaming_is_faster_than_rounds_of_three_where_engines_are_full(seed):
    """With few samples, rounds of three may end earlier: a redrawn group starts late. They generate more tokens."""
    run = simulation(small("sampling.prompts_per_step=64", "sampling.kv_memory_gib=2"), Layout(1), seed)
    rounds, streaming = run.run("rounds"), run.run("streaming")
    assert streaming.step_seconds < rounds.step_seconds
    assert streaming.tokens[0] < 0.8 * rounds.tokens[0]


@pytest.mark.parametrize("seed", range(2))
def test_drawing_ahead_is_the_fastest_where_engines_are_spare(seed):
    def run(*overrides):
        return simulation(small("sampling.prompts_per_step=32", *overrides), Layout(8), seed)

    ahead = run("sampling.surplus=carry", "sampling.ahead=0.5").run("streaming")
    plain, rounds = run().run("streaming"), run().run("rounds")
    assert ahead.step_seconds < rounds.step_seconds < plain.step_seconds
    assert ahead.tokens[0] < 0.8 * rounds.tokens[0]
    assert plain.staleness < ahead.staleness <= 1


@pytest.mark.parametrize("way", ["rounds", "streaming"])
def test_with_a_dynamic_batch_a_step_draws_once(way):
    config = small("sampling.prompts_per_step=32", "sampling.dynamic_batch=true")
    generated, trained = simulation(config, Layout(2)).run(way).tokens
    plain = simulation(small("sampling.prompts_per_step=32", "sampling.dynamic=false"), Layout(2), acceptance=1)
    assert generated == plain.run(way).tokens[0]
    assert 0.3 < trained / generated < 0.7, "half of the groups pass"


def test_without_a_filter_streaming_takes_as_long_as_rounds():
    run = simulation(small("sampling.dynamic=false"), Layout(1), acceptance=1.0)
    rounds, streaming = run.run("rounds"), run.run("streaming")
    assert streaming.step_seconds == pytest.approx(rounds.step_seconds)
    assert streaming.tokens == rounds.tokens


def test_asynchronous_steps_overlap():
    config = small("sampling.dynamic=false")
    both = simulation(config, Layout(2, rollout_gpus=1), acceptance=1.0, steps=8, warmup=2).run("asynchronous")
    assert both.step_seconds >= 0.99 * max(both.sampling_seconds, both.update_seconds)
    assert both.step_seconds < 1.02 * max(both.sampling_seconds, both.update_seconds)
    assert max(step.stale for step in both.steps) <= 1


def test_asynchronous_with_equal_sides_is_twice_as_fast():
    """One GPU samples and one trains; in turns, one GPU does both. Updates are made to take as long as sampling."""
    config = small("sampling.dynamic=false")
    once = simulation(config, Layout(1), acceptance=1.0, steps=8, warmup=2).run("streaming")
    epochs = round(once.sampling_seconds / once.update_seconds)
    equal = small("sampling.dynamic=false", f"train.epochs_per_step={epochs}")
    turns = simulation(equal, Layout(1), acceptance=1.0, steps=8, warmup=2).run("streaming")
    overlapped = simulation(equal, Layout(2, rollout_gpus=1), acceptance=1.0, steps=8, warmup=2).run("asynchronous")
    assert 1.6 < turns.step_seconds / overlapped.step_seconds <= 2.0


def test_a_share_of_the_engines_stands_for_all():
    assert simulated_share(512, 64) == 4
    assert simulated_share(512, 3) == 1
    assert simulated_share(100, 64) == 1
    config = small("sampling.prompts_per_step=64")
    whole = simulation(config, Layout(8), steps=2, warmup=0).run("rounds")
    part = simulation(config, Layout(8), steps=2, warmup=0, share=4).run("rounds")
    assert part.step_seconds == pytest.approx(whole.step_seconds, rel=0.15)
    assert part.tokens[1] == pytest.approx(whole.tokens[1], rel=0.25)


def test_ranks_wait_for_the_longest_sample():
    assert largest_load([5, 4, 3, 3], 2) == 8
    assert largest_load([9, 1, 1], 2) == 9
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    time = update_time(rates, [9, 1], 0, gpus=2, token_budget=10**6, recompute=False, mini_batches=1, transfer=0.5)
    assert (time.even + time.uneven) / time.even == pytest.approx(9 / 5)
    assert time.total == pytest.approx(time.updating + 0.5)


def test_a_critic_is_trained_as_long_as_the_policy_and_scores_once():
    rates = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL)
    how = {"gpus": 2, "token_budget": 10**6, "recompute": False, "mini_batches": 2, "epochs": 3, "transfer": 0.5}
    plain, both = (update_time(rates, [9, 1, 4, 6], 0, critic=c, **how) for c in (False, True))
    assert both.even == pytest.approx(plain.even * (6 + 1 / 3) / 3)
    assert both.optimizer == pytest.approx(2 * plain.optimizer)
    assert both.transfer == plain.transfer


def test_what_scores_the_batch_before_the_update_takes_a_forward_pass():
    def update(*overrides):
        config = small("train.mini_batches=2", *overrides)
        return simulation(config, Layout(2), steps=1, warmup=0).run("rounds").steps[0].update

    plain = update()
    for setting in ("algo.kl_coef=0.01", "algo.proximal=recomputed", "algo.top_entropy_quantile=0.2"):
        assert update(setting).even == pytest.approx(plain.even * 4 / 3), setting
    assert update("algo.kl_coef=0.01", "algo.proximal=recomputed").even == pytest.approx(plain.even * 5 / 3)


def test_adapters_are_trained_without_gradients_of_the_weights():
    rates, adapters = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL), 10**8
    for recompute, flop in ((False, 4), (True, 6)):
        seconds = (flop * 7_070_285_824 + (flop + 2) * adapters) * 1000 / 989e12
        assert rates.update(1000, 0, recompute, adapters) == pytest.approx(seconds)
    assert rates.optimizer(1, adapters) == pytest.approx(rates.optimizer(1) * adapters / 7_615_616_512)
    # Weights are gathered twice in bfloat16, and only gradients of the adapters are added up in float32.
    assert rates.gradients(1, 8, adapters) == pytest.approx(rates.gather(4 * (7_615_616_512 + adapters), 8))


def test_a_plan_of_lora_has_shorter_updates():
    def update(*overrides):
        return simulation(small(*overrides), Layout(2), steps=1, warmup=0).run("rounds").steps[0].update

    full, lora = update(), update("model.lora.rank=16")
    assert 0.6 * full.even < lora.even < 0.8 * full.even
    assert lora.optimizer < 0.02 * full.optimizer
    assert lora.transfer == full.transfer


def test_the_critic_of_a_policy_with_adapters_is_trained_whole():
    rates, adapters = Rates(KNOWN["qwen2.5-7b"], SPECS["h200"], shares=IDEAL), 10**8
    how = {"gpus": 2, "token_budget": 10**6, "recompute": False, "mini_batches": 1, "adapters": adapters}
    alone, both = (update_time(rates, [9, 1, 4, 6], 0, critic=c, **how) for c in (False, True))
    whole = update_time(rates, [9, 1, 4, 6], 0, **how | {"adapters": None})
    assert both.even == pytest.approx(alone.even + whole.even * 4 / 3)
    assert both.optimizer == pytest.approx(alone.optimizer + whole.optimizer)


# Memory


def parts(found):
    return {part.name: part.bytes for part in found}


@pytest.mark.parametrize("recipe", ["gsm8k-qwen2.5-0.5b", "gsm8k-qwen2.5-1.5b"])
def test_one_gpu_needs_what_check_says(recipe):
    config = Config.load(recipe)
    size = KNOWN[recipe.removeprefix("gsm8k-")]
    memory = GpuMemory(config, size, SPECS["h200"], Layout(1))
    need = Need(config, size, SPECS["h200"].memory)
    ours, theirs = parts(memory.updating()), parts(need.parts())
    cache, pages = theirs.pop("KV cache"), ours.pop("KV cache")
    assert ours == theirs
    assert 0 <= pages - cache <= 2 * need.budget.capacity(config.longest_sample) * need.budget.token_bytes


def test_the_trainer_is_divided_over_its_gpus_and_an_engine_over_its_own():
    config, size = Config.load(PAPER), KNOWN["qwen2.5-32b"]
    memory = GpuMemory(config, size, SPECS["h800"], Layout(128, tensor_parallel=2, rollout_gpus=64))
    during, sampling = parts(memory.updating()), parts(memory.sampling())
    assert during["weights"] == during["gradients"] == 4 * size.parameters // 64
    assert during["optimizer"] == 8 * size.parameters // 64
    assert "KV cache" not in during
    assert sampling["engine's weights"] == 2 * size.parameters // 2
    assert "optimizer" not in sampling
    assert memory.pages * memory.sizes.kv_token <= sampling["KV cache"]
    assert sum(sampling.values()) <= 0.95 * 80 * 2**30


@pytest.mark.parametrize(("gpu", "gpus"), [("a100", 4), ("a100", 1), ("rtx4090", 8)])
@pytest.mark.parametrize("recipe", ["gsm8k-qwen2.5-0.5b", "gsm8k-qwen2.5-1.5b"])
def test_micro_batches_have_as_many_tokens_as_fit(recipe, gpu, gpus):
    size = KNOWN[recipe.removeprefix("gsm8k-")]
    memory = GpuMemory(Config.load(recipe), size, SPECS[gpu], Layout(gpus))
    assert memory.fits
    assert sum(parts(memory.updating()).values()) <= memory.sizes.usable
    asked = replace(memory, config=Config.load(recipe, ["train.token_budget=200000", "train.mini_batches=1"]))
    if asked.token_budget > memory.token_budget:
        assert not asked.fits
        assert sum(parts(asked.updating()).values()) > asked.sizes.usable
        (fitting,) = re.findall(r"; with (train\.token_budget=\d+) it fits$", asked.remedy())
        assert replace(asked, config=Config.load(recipe, [fitting, "train.mini_batches=1"])).fits


def test_the_smallest_engine_with_room_is_chosen():
    config, size = Config.load(PAPER), KNOWN["qwen2.5-32b"]
    assert choose_layout(config, size, SPECS["h800"], Layout(128), None).tensor_parallel == 2
    assert choose_layout(config, size, SPECS["h800"], Layout(128), 4).tensor_parallel == 4
    assert choose_layout(config, size, SPECS["b200"], Layout(128), None).tensor_parallel == 1


def test_what_does_not_fit_names_a_remedy():
    config, size = Config.load(PAPER), KNOWN["qwen2.5-32b"]
    few = GpuMemory(config, size, SPECS["h800"], Layout(8, tensor_parallel=8))
    assert not few.fits
    assert few.remedy().endswith("with --gpus 32 --tensor-parallel 8 it fits")
    assert GpuMemory(config, size, SPECS["h800"], Layout(32, tensor_parallel=8)).fits
    narrow = GpuMemory(config, size, SPECS["h800"], Layout(128, tensor_parallel=1))
    assert not narrow.fits
    assert narrow.remedy().endswith("with --tensor-parallel 2 it fits")
    # Engines divide the GPUs, or dapo plan refuses what was named.
    for gpus, tensor_parallel, said in (
        (3, 1, "--gpus 12 --tensor-parallel 4"),
        (5, 5, "--gpus 10 --tensor-parallel 2"),
    ):
        odd = GpuMemory(Config.load(PAPER, SHORT), size, SPECS["h100"], Layout(gpus, tensor_parallel))
        assert odd.remedy().endswith(f"with {said} it fits")
    for rollout_gpus, said in ((6, "with --tensor-parallel 2 it fits"), (5, "fewer sampling.max_new_tokens")):
        apart = GpuMemory(Config.load(PAPER, SHORT), size, SPECS["l40s"], Layout(64, 1, rollout_gpus))
        assert apart.remedy().endswith(said)


# The plan


def test_a_plan_has_all_ways_and_a_picture(tmp_path, capsys):
    plan = plan_run(Question(small(), SPECS["h200"], 4))
    assert [result.way for result in plan.results] == ["rounds", "streaming", "asynchronous"]
    assert not plan.problems
    figures = json.loads(json.dumps(plan_json(plan)))
    seconds = figures["ways"]["streaming"]["step_seconds"]
    assert figures["ways"]["streaming"]["run_hours"] == pytest.approx(plan.steps * seconds / 3600, rel=0.01)
    assert limiting(plan.results[1])[0] == "tail"
    draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    print_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("asynchronous") for line in lines)


def test_one_gpu_cannot_be_split():
    plan = plan_run(Question(small("model.name=Qwen/Qwen2.5-1.5B"), SPECS["h200"], 1))
    assert [result.way for result in plan.results] == ["rounds", "streaming"]
    assert plan.problems == ("asynchronous: needs two GPUs or more",)
    assert plan.apart is None


@pytest.mark.parametrize(("gpus", "engine"), [(8, 8), (4, 4), (3, 3)])
def test_engines_of_all_gpus_leave_none_to_train_on(gpus, engine):
    plan = plan_run(Question(small("model.name=Qwen/Qwen2.5-1.5B"), SPECS["h200"], gpus, tensor_parallel=engine))
    assert [result.way for result in plan.results] == ["rounds", "streaming"]
    assert plan.problems == (f"asynchronous: an engine of {engine} GPUs leaves none to train on",)


def test_separate_gpus_have_whole_engines():
    plan = plan_run(Question(small("model.name=Qwen/Qwen2.5-1.5B"), SPECS["h200"], 18, tensor_parallel=3))
    assert plan.apart.layout.rollout_gpus % 3 == 0


def test_a_plan_says_that_it_leaves_out_a_policy_that_judges_itself(tmp_path, capsys):
    judge = tmp_path / "own.yaml"
    judge.write_text("endpoint: policy\nprompt: '{response}'\nparse: (x)\n")
    print_plan(plan_run(Question(small(f"reward.verifier={judge}"), SPECS["h200"], 1)))
    printed = " ".join(capsys.readouterr().out.split())  # the path is broken where the line is full
    assert ": the policy also reads and judges each sample" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_gpus": 4}, "--rollout-gpus: 4 leaves no GPU to train on, of 4"),
        ({"tensor_parallel": 3}, "--tensor-parallel: 3 does not divide --gpus 4"),
        ({"acceptance": 0.0}, "--acceptance: 0 is not above 0"),
    ],
)
def test_impossible_questions_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        plan_run(replace(Question(small(), SPECS["h200"], 4), **changes))
