"""`dapo convert`: the peers' published runs become recipes, and no setting is dropped in silence."""

import dataclasses
import json
from pathlib import Path

import published
import pytest
from support import REPOSITORY
from transformers import TrainingArguments
from typer.testing import CliRunner

from dapo_rl.cli import app
from dapo_rl.config import Config
from dapo_rl.config.peers import LIBRARIES
from dapo_rl.convert.read_run import read_run, read_script, read_words
from dapo_rl.convert.write_recipe import convert_run
from dapo_rl.errors import UserError

FILES = {
    "dapo.sh": published.VERL_32B,
    "verl.yaml": published.VERL_YAML,
    "swift.sh": published.SWIFT,
    "areal.yaml": published.AREAL,
    "ppo.sh": published.VERL_PPO,
    "areal-ppo.yaml": published.AREAL_PPO,
    "trl.yaml": published.TRL,
}


def verl(*words):
    start = "python3 -m verl.trainer.main_ppo data.train_files=dapo-math-17k.parquet actor_rollout_ref.model.path=m "
    return start + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 " + " ".join(words)


def trl(*words):
    return "trl grpo --num_processes 1 --num_generations 8 --per_device_train_batch_size 16 " + " ".join(words)


@pytest.mark.parametrize("name", FILES)
def test_every_setting_of_a_published_run_is_explained(converted, tmp_path, name):
    result, _, rows = converted(FILES[name], name)
    given = read_run(tmp_path / name).keys
    assert set(given) <= set(rows)
    assert all(row.here or row.note for row in rows.values())
    assert not [row for row in result.rows if row.status == "unknown to dapo convert"]


def test_verls_script_of_the_paper_is_the_papers_recipe(converted):
    _, config, rows = converted(published.VERL_32B)
    paper = Config.load("dapo-math-qwen2.5-32b").resolved()
    ours = config.resolved()
    # Their script differs from the paper in these: dual clip, 10 steps of warm-up, a limit on rollout steps that the
    # paper's 10,000 gradient updates do not reach.
    assert (config.algo.clip_ratio_c, config.train.warmup_steps, config.train.steps) == (10.0, 10, 10_000)
    # And it says more: where files are, the engine, memory, checkpoints and trackers.
    for key in ("algo.clip_ratio_c", "train.warmup_steps", "data.train", "data.eval", "train.token_budget",
                "train.steps", "train.gradient_checkpointing", "checkpoint.every", "log.trackers"):  # fmt: skip
        section, name = key.split(".")
        ours[section][name] = paper[section][name]
    ours["engine"] = paper["engine"]
    assert ours == paper
    assert config.data.train == f"{Path.home()}/verl/data/dapo-math-17k.parquet"
    assert rows["actor_rollout_ref.rollout.top_k"].here == "sampling.top_k: 0"
    assert rows["trainer.experiment_name"].value == "DAPO-Qwen2.5-32B-$(date +%s)"
    assert [row.key for row in rows.values() if row.learns] == ["data.truncation"]


def test_verls_yaml_with_interpolation(converted):
    result, config, rows = converted(published.VERL_YAML, "verl.yaml")
    assert (config.sampling.group_size, config.sampling.max_new_tokens) == (12, 8192)
    assert (config.sampling.prompts_per_step, config.train.mini_batches) == (512, 16)
    assert (config.sampling.cap, config.sampling.metric) == (1_000_000, "score")
    assert (config.overlong.max_length, config.overlong.cache_length) == (8192, 4096)
    assert config.train.warmup_steps == 10  # 0.05 × 200
    # Its defaults are part of the run.
    assert (config.algo.clip_ratio_c, config.train.weight_decay) == (3.0, 0.01)
    assert rows["actor_rollout_ref.actor.clip_ratio_c"].is_set is False
    assert [row.key for row in result.changes] == ["algorithm.filter_groups.metric"]


def test_ms_swift_counts_completions_and_updates(converted):
    result, config, _ = converted(published.SWIFT)
    # 8 processes × 4 × 4 steps per generation = 128 completions = 16 groups of 8; an update has 8 × 4 × 2 = 64.
    assert (config.sampling.prompts_per_step, config.sampling.group_size, config.train.mini_batches) == (16, 8, 2)
    assert (config.train.steps, config.train.warmup_steps, config.checkpoint.every) == (200, 10, 50)
    assert (config.sampling.cap, config.sampling.on_cap) == (64, "fill")
    assert (config.reward.correct, config.reward.wrong) == (1, 0)
    assert (config.overlong.shape, config.overlong.max_length, config.overlong.cache_length) == ("soft", 2048, 512)
    assert config.overlong.mask_truncated
    assert config.train.betas == (0.9, 0.95)
    assert (config.train.lr_schedule, config.train.min_lr_share) == ("cosine", 0)
    assert config.model.lora is None
    assert [row.key for row in result.changes] == ["dataset", "dynamic_sample"]


def test_ms_swift_without_dynamic_sampling_counts_epochs_exactly(converted):
    script = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d#10000 --num_generations 16"
    sizes = " --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_train_epochs 1 --warmup_ratio 0.05"
    result, config, _ = converted(f"{script}{sizes} --train_type full --reward_funcs accuracy")
    assert (config.sampling.prompts_per_step, config.train.steps) == (8, 1250)
    assert (config.train.warmup_steps, config.algo.kl_coef, config.sampling.temperature) == (63, 0.04, 0.9)
    assert not config.sampling.dynamic
    assert [row.key for row in result.changes] == ["dataset"]
    _, config, _ = converted(f"NNODES=2 {script}{sizes} --train_type full --reward_funcs accuracy")
    assert config.sampling.prompts_per_step == 16


TRL_REWARDS = """
model_name_or_path: m
dataset_name: d
num_generations: 8
per_device_train_batch_size: 8
max_steps: 10
max_completion_length: 1024
reward_funcs: [accuracy_reward, think_format_reward, my.rewards.brevity, get_soft_overlong_punishment]
reward_weights: [1.0, 0.5, 0.25, 0.75]
"""


def test_several_rewards_keep_their_weights(converted):
    result, config, _ = converted(TRL_REWARDS, "trl.yaml", processes=1)
    assert [(entry.verifier, entry.weight) for entry in config.reward.verifiers] == [
        ("math", 1.0),
        ("trl.rewards:think_format_reward", 0.5),
        ("my.rewards:brevity", 0.25),
    ]
    assert (config.reward.wrong, config.overlong.shape, config.overlong.factor) == (0, "soft", 0.75)
    assert result.changes == []


def test_a_reward_that_is_not_known_is_named_with_its_weight(converted):
    funcs = "swift rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 --per_device_train_batch_size 8"
    result, config, _ = converted(f"{funcs} --reward_funcs accuracy cosine --reward_weights 2 0.5 --train_type full")
    assert [(entry.verifier, entry.weight) for entry in config.reward.verifiers] == [("math", 2.0)]
    (row,) = [row for row in result.changes if row.key == "reward_funcs"]
    assert row.note.startswith("cosine (weight 0.5): add your own function to reward.verifier")


def test_weights_that_do_not_fit_are_an_error(converted):
    with pytest.raises(UserError, match="reward_weights: expected 4 numbers, one for each of reward_funcs"):
        converted(TRL_REWARDS.replace("1.0, ", ""), "trl.yaml", processes=1)


def test_areal_scales_rewards_and_the_penalty(converted):
    result, config, _ = converted(published.AREAL, "areal.yaml", prompts=7473)
    # (1 − 0.5) × 10 and (0 − 0.5) × 10; the penalty of 1 is scaled with them.
    assert (config.reward.correct, config.reward.wrong, config.overlong.factor) == (5, -5, 10)
    assert (config.sampling.dynamic, config.sampling.dynamic_batch) == (True, True)
    assert (config.sampling.prompts_per_step, config.sampling.group_size) == (256, 4)
    assert (config.algo.clip_high, config.algo.clip_ratio_c, config.algo.normalize) == (0.28, 3, "group")
    assert config.train.steps == 290  # 10 × 29, since 7473 / 256 is rounded down
    assert config.train.warmup_steps == 0  # 0.001 × 290, rounded down
    changed = {row.key for row in result.changes}
    assert {"actor.adv_norm.std_level", "rollout.max_head_offpolicyness"} <= changed
    # Tokens whose ratio is above `upper` are masked.
    assert (config.algo.proximal, config.algo.importance_mode, config.algo.importance_cap) == ("recomputed", "mask", 5)
    assert "actor.rejection_sampling.upper" not in changed
    assert "total_train_epochs" not in changed


def test_trl_has_no_dynamic_sampling_and_decays_to_zero(converted):
    result, config, _ = converted(published.TRL, "trl.yaml")
    assert (config.sampling.prompts_per_step, config.train.mini_batches, config.train.steps) == (32, 4, 100)
    assert not config.sampling.dynamic
    assert config.overlong.shape == "off"
    assert config.algo.advantage_eps == 1e-4
    assert config.resolved()["data"]["train"] == {"source": "BytedTsinghua-SIA/DAPO-Math-17k", "split": "train"}
    assert result.changes == []
    # The mode of the file is sequence_mask, and its upper bound 3.
    assert corrections(config) == ("recomputed", 3.0, "mask")
    assert config.algo.importance_level == "sequence"
    _, config, _ = converted(trl("--max_steps 10"))
    assert (config.train.lr_schedule, config.train.min_lr_share) == ("linear", 0)
    assert (config.train.warmup_steps, config.train.weight_decay, config.algo.clip_high) == (0, 0, 0.2)


CORRECTIONS = [
    ("", ("behaviour", None, "truncate")),
    ("actor_rollout_ref.actor.tis_imp_ratio_cap=-1", ("behaviour", None, "truncate")),
    ("actor_rollout_ref.actor.tis_imp_ratio_cap=2.5", ("recomputed", 2.5, "truncate")),
    ("algorithm.rollout_correction.rollout_is=token", ("recomputed", 2.0, "truncate")),
    (
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=4",
        ("recomputed", 4.0, "truncate"),
    ),
    ("algorithm.rollout_correction.rollout_is=null", ("behaviour", None, "truncate")),
    (
        "algorithm.rollout_is=True algorithm.rollout_is_threshold=3 algorithm.rollout_is_mode=mask "
        "algorithm.rollout_is_level=token",
        ("recomputed", 3.0, "mask"),
    ),
]


def corrections(config):
    return config.algo.old_policy, config.algo.importance_cap, config.algo.importance_mode


@pytest.mark.parametrize(("words", "expected"), CORRECTIONS)
def test_importance_weights_of_verl(converted, words, expected):
    result, config, _ = converted(verl(words))
    assert corrections(config) == expected
    assert not any("rollout_is" in row.key or "tis_" in row.key for row in result.changes)


def test_one_weight_for_a_sequence(converted):
    for words in (
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_is=True algorithm.rollout_is_level=sequence",
    ):
        result, config, _ = converted(verl(f"{words} {words.split('rollout_is')[0]}rollout_is_threshold=3"))
        assert corrections(config) == ("recomputed", 3.0, "truncate")
        assert (config.algo.importance_level, config.algo.importance_normalize) == ("sequence", False)
        assert not any("rollout_is" in row.key for row in result.changes)
    _, config, _ = converted(
        verl(
            "algorithm.rollout_correction.rollout_is=sequence "
            "algorithm.rollout_correction.rollout_is_batch_normalize=true"
        )
    )
    assert config.algo.importance_normalize
    _, config, rows = converted(verl("algorithm.rollout_is=True algorithm.rollout_is_level=geometric"))
    assert corrections(config) == ("behaviour", None, "truncate")
    row = rows["algorithm.rollout_is"]
    assert (row.status, row.learns) == ("no counterpart", True)
    assert row.note.startswith("a sequence's weight is the product of its ratios")
    _, config, _ = converted(
        verl(
            "algorithm.rollout_is=True algorithm.rollout_is_mode=mask algorithm.rollout_is_threshold=4 "
            "algorithm.rollout_is_threshold_lower=0.5 algorithm.rollout_is_veto_threshold=1e-4"
        )
    )
    assert corrections(config) == ("recomputed", 4.0, "mask")
    assert (config.algo.importance_floor, config.algo.reject) == (0.5, {"veto": 1e-4})


REJECTIONS = [
    ("rollout_rs=geometric {}_threshold=1.01 {}_threshold_lower=0.99", {"geometric": (0.99, 1.01)}),
    ("rollout_rs=sequence {}_threshold=4", {"product": (0.25, 4.0)}),
    ("rollout_rs=token {}_threshold=2 {}_threshold_lower=null", {"token": (0.5, 2.0)}),
    # k1 is −log of the ratio: bounds of the inverse.
    ("rollout_rs=token_k1 {}_threshold=0.5_4.0", {"token": (0.25, 2.0)}),
    ("rollout_rs=seq_mean_k3 {}_threshold=0.01", {"k3": 0.01}),
    ("rollout_rs=seq_mean_k1,seq_mean_k3 '{}_threshold=0.8_1.25,0.1'", {"geometric": (0.8, 1.25), "k3": 0.1}),
    ("rollout_rs=seq_sum_k1 {}_threshold=2 rollout_token_veto_threshold=0.0001", {"product": (0.5, 2), "veto": 1e-4}),
    ("rollout_token_veto_threshold=0.0001", {"veto": 1e-4}),
]


@pytest.mark.parametrize(("words", "expected"), REJECTIONS)
def test_rejection_of_verl(converted, words, expected):
    prefix = "algorithm.rollout_correction."
    words = words.replace("{}", "rollout_rs").replace("rollout_rs", f"{prefix}rollout_rs")
    words = words.replace("rollout_token", f"{prefix}rollout_token")
    result, config, _ = converted(verl(words))
    assert {name: pytest.approx(bound) for name, bound in config.algo.reject.items()} == expected
    assert config.algo.old_policy == "recomputed"
    assert not any("rollout_" in row.key for row in result.changes)
    _, config, _ = converted(verl(f"{words} {prefix}bypass_mode=true"))
    assert (config.algo.old_policy, list(config.algo.reject)) == ("behaviour", list(expected))


@pytest.mark.parametrize("words", ["rollout_rs=seq_max_k2 {}_threshold=1", "rollout_rs=token"])
def test_rejection_without_a_counterpart(converted, words):
    prefix = "algorithm.rollout_correction."
    _, config, rows = converted(verl(words.replace("{}", "rollout_rs").replace("rollout_rs", f"{prefix}rollout_rs")))
    assert (config.algo.reject, config.algo.old_policy) == ({}, "behaviour")
    assert rows[f"{prefix}rollout_rs"].learns


def test_importance_weights_of_trl(converted):
    words = "--max_steps 10 --use_vllm true --vllm_importance_sampling_mode token_"
    _, config, _ = converted(trl(f"{words}truncate"))
    assert corrections(config) == ("recomputed", 3.0, "truncate")
    result, config, _ = converted(trl(f"{words}mask --vllm_importance_sampling_clip_max 5"))
    assert corrections(config) == ("recomputed", 5.0, "mask")
    assert "vllm_importance_sampling_correction" not in {row.key for row in result.changes}
    _, config, _ = converted(trl(f"{words}mask --vllm_importance_sampling_cap 4"))
    assert corrections(config) == ("recomputed", 4.0, "mask")
    _, config, _ = converted(trl(f"{words}mask --vllm_importance_sampling_correction false"))
    assert corrections(config) == ("behaviour", None, "truncate")
    both = "truncate --vllm_importance_sampling_clip_min 0.5 --off_policy_mask_threshold 0.7"
    result, config, _ = converted(trl(f"{words.replace('token_', 'sequence_')}{both}"))
    assert corrections(config) == ("recomputed", 3.0, "truncate")
    assert (config.algo.importance_level, config.algo.importance_floor) == ("sequence", 0.5)
    assert config.algo.off_policy_mask_threshold == 0.7
    assert not any("importance" in row.key or "off_policy" in row.key for row in result.changes)
    _, config, rows = converted(trl(f"{words}clip"))
    assert corrections(config) == ("behaviour", None, "truncate")
    assert rows["vllm_importance_sampling_mode"].learns
    _, config, _ = converted(trl("--max_steps 10 --use_vllm true"))  # TRL's default
    assert (*corrections(config), config.algo.importance_level) == ("recomputed", 3.0, "mask", "sequence")
    _, config, _ = converted(trl("--max_steps 10 --vllm_importance_sampling_mode token_mask"))
    assert corrections(config) == ("behaviour", None, "truncate")


def test_importance_weights_of_swift(converted):
    words = published.SWIFT.replace("--rlhf_type grpo", "--rlhf_type grpo --rollout_importance_sampling_mode {}")
    _, config, _ = converted(words.format("token_mask --rollout_importance_sampling_threshold 3"))
    assert corrections(config) == ("recomputed", 3.0, "mask")
    _, config, _ = converted(words.format("sequence_truncate"))
    assert (*corrections(config), config.algo.importance_level) == ("recomputed", 2.0, "truncate", "sequence")
    _, config, rows = converted(words.format("turn_truncate"))
    assert corrections(config) == ("behaviour", None, "truncate")
    assert rows["rollout_importance_sampling_mode"].learns


def test_areal_masks_tokens_above_the_cap(converted):
    _, config, _ = converted(published.AREAL, "areal.yaml", prompts=7473)
    assert corrections(config) == ("recomputed", 5.0, "mask")
    bounded = published.AREAL.replace("upper: 5.0", "upper: 5.0, lower: 0.5")
    _, config, rows = converted(bounded, "areal.yaml", prompts=7473)
    assert (config.algo.importance_floor, rows["actor.rejection_sampling.lower"].status) == (0.5, "same")
    by_k3 = published.AREAL.replace("metric: ratio", "metric: kl_k3, level: sequence")
    _, config, _ = converted(by_k3, "areal.yaml", prompts=7473)
    assert (config.algo.reject, config.algo.old_policy) == ({"k3": 5.0}, "recomputed")
    plain = published.AREAL.replace("use_decoupled_loss: true", "use_decoupled_loss: false")
    _, config, _ = converted(plain, "areal.yaml", prompts=7473)
    assert corrections(config) == ("recomputed", None, "truncate")
    _, config, _ = converted(plain.replace("recompute_logprob: true", ""), "areal.yaml", prompts=7473)
    assert corrections(config) == ("behaviour", None, "truncate")
    gspo = plain.replace("recompute_logprob: true", "recompute_logprob: false\n  importance_sampling_level: sequence")
    _, config, rows = converted(gspo, "areal.yaml", prompts=7473)
    assert corrections(config) == ("recomputed", None, "truncate")
    assert rows["actor.recompute_logprob"].learns


def test_a_grpo_config_as_json(converted):
    settings = json.dumps({"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 6, "fsdp": "",
                           "learning_rate": 2e-6,
                           "generation_kwargs": {"stop": ["\n"]}, "num_iterations": 2})  # fmt: skip
    _, config, rows = converted(settings, "args.json", processes=2)
    assert (config.sampling.prompts_per_step, config.train.steps, config.train.lr) == (4, 3, 2e-6)
    assert config.sampling.stop == ("\n",)
    assert rows["fsdp"].status == "no counterpart"


@pytest.mark.parametrize(("rows", "steps"), [(7473, 105), (2047, 15), (1024, 15), (100, 1)])
def test_rows_that_do_not_fill_a_batch_are_no_steps(converted, rows, steps):
    words = "data.train_batch_size=1024 algorithm.adv_estimator=grpo trainer.total_epochs=15"
    assert converted(verl(words), prompts=rows)[1].train.steps == steps


def test_rloo_of_swift_has_its_kl_penalty_in_the_reward(converted):
    script = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --max_steps 9"
    result, config, _ = converted(f"{script} --advantage_estimator rloo")
    assert (config.algo.normalize, config.algo.kl_coef) == ("leave-one-out", 0.04)
    assert [row.key for row in result.changes] == ["(kl_in_reward)"]
    for words in ("--beta 0", "--kl_in_reward false"):
        assert not converted(f"{script} --advantage_estimator rloo {words}")[0].changes
    assert not converted(script)[0].changes


@pytest.mark.parametrize("name", ["run.sh", "args.yaml"])
def test_eval_strategy_no_evaluates_nothing(converted, name):
    words = {"num_generations": 8, "dataset_name": "d", "dataset_test_split": "test", "eval_strategy": "no"}
    text = "trl grpo" + "".join(f" --{key} {word}" for key, word in words.items())
    text = "".join(f"{key}: {word}\n" for key, word in words.items()) if name == "args.yaml" else text
    _, config, rows = converted(text, name)
    assert (config.data.eval, config.eval.samples) == (None, 1)
    assert rows["eval_strategy"].note.startswith("no: only before the first step")
    _, config, _ = converted(text.replace(" no", " steps"), name)
    assert config.data.eval is not None
    _, _, rows = converted(text.replace(" no", " epoch"), name)
    assert (rows["eval_strategy"].status, rows["eval_strategy"].here) == ("differs", "eval.every")


def test_another_revision_of_the_model_is_marked(converted):
    assert not converted(trl("--model_revision main"))[2]["model_revision"].learns
    assert converted(trl("--model_revision v2"))[2]["model_revision"].learns


def test_frozen_weights_of_swift_are_marked(converted):
    script = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --train_type full "
    for words, learns in (("--freeze_parameters_ratio 0.", False), ("--freeze_parameters_ratio 0.5", True),
                          ("--freeze_parameters lm_head", True), ("--freeze_vit true", False)):  # fmt: skip
        assert converted(script + words)[2][words.split()[0].strip("-")].learns is learns, words


def test_a_beta_of_zero_is_none_of_the_default(converted):
    assert converted(trl("--adam_beta1 0 --adam_beta2 0.95"))[1].train.betas == (0, 0.95)
    assert converted(trl("--adam_beta1 0.8"))[1].train.betas == (0.8, 0.999)


def test_one_stop_string_is_a_list(converted):
    script = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d --stop_words "
    assert converted(f"{script} Stop")[1].sampling.stop == ("Stop",)
    assert converted(f"{script} A B")[1].sampling.stop == ("A", "B")
    for given, stop in (('"</answer>"', ("</answer>",)), ("null", ()), ('["a"]', ("a",))):
        text = f'{{"num_generations": 4, "per_device_train_batch_size": 8, "generation_kwargs": {{"stop": {given}}}}}'
        assert converted(text, "args.json")[1].sampling.stop == stop


def test_a_reward_function_that_only_the_script_has_is_asked_for(converted):
    script = "torchrun --nproc_per_node 1 grpo.py --model_name_or_path m --dataset_name d --beta 0 --max_steps 9"
    result, _, rows = converted(script)
    assert [row.key for row in result.changes] == ["(reward function)"]
    assert "set reward.verifier" in rows["(reward function)"].note
    _, _, rows = converted(f"{script} --reward_funcs accuracy_reward")
    assert "(reward function)" not in rows
    swift = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m --dataset d"
    assert "(reward function)" in converted(swift)[2]
    for words in ("--reward_model r", "--use_gym_env true --gym_env g"):
        assert "(reward function)" not in converted(f"{swift} {words}")[2], words


def test_every_argument_of_transformers_trainer_is_known():
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {name for name in names if LIBRARIES["trl"].find(name) is None} == set()
    assert {name for name in names if LIBRARIES["ms-swift"].find(name) is None} == set()


@pytest.mark.parametrize(
    ("words", "key", "status"),
    [
        (
            "actor_rollout_ref.rollout.repetition_penalty=1.1",
            "actor_rollout_ref.rollout.repetition_penalty",
            "no counterpart",
        ),
        ("actor_rollout_ref.actor.loss_agg_mode=invented", "actor_rollout_ref.actor.loss_agg_mode", "no counterpart"),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.1",
            "algorithm.use_kl_in_reward",
            "no counterpart",
        ),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator", "no counterpart"),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio", "differs"),
        ("data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size", "differs"),
        ("trainer.total_epochs=2", "trainer.total_epochs", "differs"),
        ("trainer.invented=2", "trainer.invented", "unknown to dapo convert"),
        ("actor_rollout_ref.actor.invented=2", "actor_rollout_ref.actor.invented", "unknown to dapo convert"),
        ("actor_rollout_ref.actor.optim.lr=$(cat lr)", "actor_rollout_ref.actor.optim.lr", "differs"),
    ],
)
def test_what_changes_learning_is_marked(converted, words, key, status):
    _, _, rows = converted(verl(words))
    assert (rows[key].status, rows[key].learns) == (status, True)


def test_the_kl_penalty_and_sums_of_verl(converted):
    actor = "actor_rollout_ref.actor"
    words = f"{actor}.use_kl_loss=True {actor}.kl_loss_coef=0.01 {actor}.kl_loss_type=mse {actor}.loss_agg_mode="
    _, config, _ = converted(verl(f"{words}seq-mean-token-sum"))
    assert (config.algo.kl_coef, config.algo.kl_kind) == (0.01, "k2")
    assert (config.algo.aggregation, config.algo.norm_length) == ("seq-mean-token-sum-norm", 1)
    _, config, _ = converted(verl("algorithm.norm_adv_by_std_in_grpo=False"))
    assert config.algo.normalize == "none"
    assert not config.sampling.dynamic
    assert config.algo.clip_high == 0.2


def test_the_kl_estimators_of_verl(converted):
    """One without a gradient is replaced, which is said."""
    actor = "actor_rollout_ref.actor"
    words = f"{actor}.use_kl_loss=True {actor}.kl_loss_coef=0.01 {actor}.kl_loss_type="
    for theirs, ours, learns in [
        ("low_var_kl", "k3", False),
        ("low_var_kl+", "k3+", False),
        ("kl+", "k1+", False),
        ("kl", "k1+", True),
        ("k1", "k1+", True),
        ("abs", "k3", True),
    ]:
        _, config, rows = converted(verl(f"{words}{theirs}"))
        assert (config.algo.kl_kind, rows[f"{actor}.kl_loss_type"].learns) == (ours, learns)


def test_rewards_that_are_normalised_apart(converted):
    words = "algorithm.gdpo_reward_keys=[format,accuracy] algorithm.gdpo_reward_weights=[1,2]"
    _, config, rows = converted(verl(words).replace("=grpo", "=gdpo"))
    assert (config.algo.advantage, config.algo.normalize) == ("gdpo", "group")
    assert rows["algorithm.gdpo_reward_keys"].here == "reward.verifier"
    assert rows["algorithm.gdpo_reward_keys"].learns
    assert rows["algorithm.adv_estimator"].note.startswith("over the samples of the step")
    _, config, _ = converted(verl("algorithm.norm_adv_by_std_in_grpo=False").replace("=grpo", "=gdpo"))
    assert (config.algo.advantage, config.algo.normalize) == ("gdpo", "none")
    result, config, _ = converted(verl(words))
    assert config.algo.advantage == "group"
    assert not any("gdpo" in row.key for row in result.changes)
    _, config, _ = converted(trl("--multi_objective_aggregation normalize_then_sum --scale_rewards batch"))
    assert (config.algo.advantage, config.algo.normalize) == ("gdpo", "group")
    swift = published.SWIFT.replace("--scale_rewards group", "--scale_rewards gdpo")
    _, config, rows = converted(swift)
    assert (config.algo.advantage, config.algo.normalize) == ("gdpo", "group")
    assert (rows["scale_rewards"].status, rows["scale_rewards"].here) == ("same", "algo.advantage: gdpo")


def test_a_reference_of_swift_that_follows_the_policy(converted):
    follows = published.SWIFT.replace("--beta 0.0", "--beta 0.1 --sync_ref_model true --ref_model_sync_steps 6")
    _, config, rows = converted(follows)
    assert (config.algo.ref_sync_steps, config.algo.ref_mixup_alpha) == (6 // config.train.mini_batches, 0.6)
    _, config, rows = converted(follows.replace("--tuner_type full", "--tuner_type lora"))
    assert config.algo.ref_sync_steps is None
    assert (rows["sync_ref_model"].learns, rows["ref_model_sync_steps"].learns) == (True, False)


@pytest.mark.parametrize(
    "prefix",
    [
        "reward_model.overlong_buffer",
        "custom_reward_function.overlong_buffer",
        "+reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_the_overlong_buffer_has_had_several_names(converted, prefix):
    words = f"data.max_response_length=1000 {prefix}.enable=True {prefix}.len=100 {prefix}.penalty_factor=0.5"
    _, config, _ = converted(verl(words))
    assert (config.overlong.shape, config.overlong_max_length) == ("soft", 1000)
    assert (config.overlong.cache_length, config.overlong.factor) == (100, 0.5)
    _, config, _ = converted(verl(words.replace("True", "False")))
    assert config.overlong.shape == "off"


def test_lora_has_the_defaults_of_its_library(converted):
    _, config, _ = converted(verl("actor_rollout_ref.model.lora_rank=8"))
    assert (config.model.lora.rank, config.model.lora.alpha) == (8, 16)
    _, config, _ = converted(trl("--use_peft --lora_r 4 --lora_alpha 8 --lora_target_modules q_proj v_proj"))
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 8)
    assert config.model.lora.targets == ("q_proj", "v_proj")
    _, config, _ = converted("swift rlhf --rlhf_type grpo --model m --per_device_train_batch_size 8 --dataset d")
    assert config.model.lora.rank == 8
    assert config.train.lr == 1e-4
    # args.json of ms-swift, and the files of AReaL, have a list.
    text = '{"rlhf_type": "grpo", "tuner_type": "lora", "target_modules": ["all-linear"], "num_generations": 1}'
    assert converted(text, "args.json")[1].model.lora.targets == "all-linear"


def test_two_names_of_one_setting_must_agree(converted):
    words = "data.max_response_length=100 actor_rollout_ref.rollout.response_length=200"
    with pytest.raises(UserError, match=r"are both sampling.max_new_tokens here, but give 100 and 200; keep one"):
        converted(verl(words))
    with pytest.raises(UserError, match="not whole groups in an update; raise gradient_accumulation_steps"):
        converted("trl grpo --num_processes 1 --num_generations 8 --per_device_train_batch_size 4")


def test_a_command_line_and_its_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("num_generations: 8\nper_device_train_batch_size: 16\nlearning_rate: 1e-5\n")
    words = ["accelerate", "launch", "--num_processes", "2", "grpo.py", "--config", "c.yaml", "--learning_rate", "2e-5"]
    run = read_words(words)
    assert run.keys["learning_rate"] == 2e-5
    assert convert_run(run).settings["sampling.prompts_per_step"] == 4
    with pytest.raises(UserError, match=r"--config 'd.yaml' is not a file here"):
        read_words(["trl", "grpo", "--config", "d.yaml"])
    for command in ("trl grpo --config $D/c.yaml", "python3 rl.py --config=$D/c.yaml gconfig.n_samples=2"):
        with pytest.raises(
            UserError, match=r"--config: '\$D/c.yaml' is not known \(\$D is not set in the script\); convert"
        ):
            read_script(command, "run.sh")
    Path("a.yaml").write_text(published.AREAL)
    run = read_words(["python3", "-m", "areal.launcher.local", "x.py", "--config", "a.yaml", "gconfig.n_samples=6"])
    assert (run.library, run.keys["actor.reward_norm.group_size"]) == ("areal", 6)


def test_the_command_writes_a_recipe_and_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    Path("dapo.sh").write_text(published.VERL_32B)
    result = CliRunner().invoke(app, ["convert", "dapo.sh"])
    assert result.exit_code == 0
    assert result.stdout.startswith("# Converted from dapo.sh (verl) by `dapo convert`.\n")
    assert "algorithm.filter_groups.enable" in result.stderr
    assert CliRunner().invoke(app, ["convert", "dapo.sh", "--out", "r.yaml"]).stdout == ""
    assert Config.load("r.yaml").sampling.cap == 15360
    strict = CliRunner().invoke(app, ["convert", "dapo.sh", "--strict"])
    assert isinstance(strict.exception, UserError)
    assert str(strict.exception) == "--strict: learning would change: data.truncation"
    assert strict.stdout == ""
    script = published.VERL_32B.replace("data.truncation='left'", "data.filter_overlong_prompts=True")
    Path("dapo.sh").write_text(script)
    assert CliRunner().invoke(app, ["convert", "dapo.sh", "--strict"]).exit_code == 0
    Path("dapo.sh").write_text(script.replace("data.prompt_key", "data.prompt_kye"))
    assert "data.prompt_kye" in str(CliRunner().invoke(app, ["convert", "dapo.sh", "--strict"]).exception)


def test_the_help_fits_in_80_columns():
    result = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "80"})
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "  dapo convert -- swift rlhf --rlhf_type grpo --beta 0 ...\n" in result.stdout


@pytest.mark.parametrize("name", FILES)
def test_every_setting_of_the_recipe_has_a_row(converted, name):
    result, _, _ = converted(FILES[name], name)
    told = " ".join(f"{row.here} {row.note}" for row in result.rows)
    assert [key for key in result.settings if key not in told] == []


def test_only_grpo_of_ms_swift_has_a_recipe(converted):
    with pytest.raises(UserError, match=r"learning from preferences \(rlhf_type=dpo\): not supported"):
        converted("swift rlhf --rlhf_type dpo --model m --dataset d")


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "convert.md").read_text()
    script, table, recipe = (block.split("\n", 1)[1] for block in page.split("```")[3:9:2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    Path("run_dapo.sh").write_text(script)
    result = CliRunner().invoke(app, ["convert", "run_dapo.sh"])
    assert result.stdout == recipe
    assert [line.rstrip() for line in result.stderr.splitlines()] == table.splitlines()


@pytest.mark.parametrize("root", ["reward_model", "reward.reward_model"])
def test_a_reward_model_of_verl_is_the_verifier(converted, root):
    words = (f"{root}.enable=True", f"{root}.model.path=rm/mine")
    _, config, rows = converted(verl(*words))
    assert config.reward.verifier == "model:rm/mine"
    assert not rows[f"{root}.enable"].learns
    _, config, _ = converted(verl(*words, "custom_reward_function.path=own.py", "custom_reward_function.name=score"))
    assert config.reward.verifier == "own.py:score"
    _, config, _ = converted(verl(f"{root}.enable=False", f"{root}.model.path=rm/mine"))
    assert config.reward.verifier != "model:rm/mine"


def test_the_losses_of_verl(converted):
    actor = "actor_rollout_ref.actor"
    words = f"{actor}.policy_loss.loss_mode=gspo {actor}.clip_ratio_low=3e-4 {actor}.clip_ratio_high=4e-4"
    _, config, rows = converted(verl(f"{words} {actor}.loss_agg_mode=token-mean {actor}.clip_ratio_c=10.0"))
    assert (config.algo.loss, config.algo.clip_low, config.algo.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (config.algo.aggregation, config.algo.clip_ratio_c) == ("seq-mean-token-mean", None)
    assert rows[f"{actor}.clip_ratio_c"].note == "gspo has no dual clip"
    assert rows[f"{actor}.loss_agg_mode"].note == "gspo always averages so, whatever is set"
    assert config.algo.old_policy == "recomputed"
    words = f"{actor}.policy_loss.loss_mode=cispo {actor}.clip_ratio_low=10 {actor}.clip_ratio_high=0.2"
    _, config, _ = converted(verl(words))
    assert (config.algo.loss, config.algo.clip_low, config.algo.clip_high) == ("cispo", 10, 0.2)
    assert (config.algo.aggregation, config.algo.clip_ratio_c) == ("token-mean", None)
    words = f"{actor}.policy_loss.loss_mode=kl_cov {actor}.policy_loss.kl_cov_ratio=0.02"
    words = f"{words} {actor}.policy_loss.clip_cov_ratio=0.5"
    _, config, rows = converted(verl(f"{words} {actor}.policy_loss.ppo_kl_coef=2 {actor}.tau_pos=3"))
    algo = config.algo
    assert (algo.loss, algo.cov_share, algo.kl_cov_coef, algo.tau_pos) == ("kl-cov", 0.02, 2, 1)
    assert rows[f"{actor}.tau_pos"].note == "an option of the loss sapo"
    _, config, _ = converted(verl(f"{actor}.policy_loss.loss_mode=clip_cov {actor}.policy_loss.clip_cov_ub=4"))
    assert (config.algo.loss, config.algo.clip_cov_high) == ("clip-cov", 4)
    _, config, _ = converted(verl(f"{actor}.policy_loss.loss_mode=sapo {actor}.tau_neg=2"))
    assert (config.algo.loss, config.algo.aggregation, config.algo.tau_neg) == ("sapo", "seq-mean-token-mean", 2)
    _, config, rows = converted(verl(f"{actor}.policy_loss.loss_mode=gpg"))
    assert (config.algo.loss, config.algo.clip_ratio_c) == ("dapo", 3.0)
    assert rows[f"{actor}.policy_loss.loss_mode"].status == "no counterpart"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("grpo", ("group", "group")),
        ("rloo", ("group", "leave-one-out")),
        ("opo", ("opo", "group")),
        ("reinforce_plus_plus", ("reinforce++", "group")),
        ("reinforce_plus_plus_baseline", ("reinforce++-baseline", "group")),
    ],
)
def test_the_advantages_of_verl(converted, theirs, ours):
    _, config, rows = converted(verl("").replace("adv_estimator=grpo", f"adv_estimator={theirs}"))
    assert (config.algo.advantage, config.algo.normalize) == ours
    assert not rows["algorithm.adv_estimator"].learns


def test_a_whole_number_may_be_written_as_a_fraction(converted):
    areal = "actor: {path: m, ppo_n_minibatches: 3}\nrollout: {}\ngconfig: {n_samples: 8}\n"
    _, config, rows = converted(areal + "train_dataset: {path: a.parquet, batch_size: 16.0}", "a.yaml")
    assert (config.sampling.prompts_per_step, config.train.mini_batches) == (16, 2)
    assert rows["train_dataset.batch_size"].here == "sampling.prompts_per_step: 16"
