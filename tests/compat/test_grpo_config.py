"""`GRPOConfig` in a script: every field is mapped, ignored or refused by name."""

import dataclasses
from types import SimpleNamespace

import pytest
from grpo_fields import decisions

from dapo_rl.compat.trl.check_arguments import REFUSED, refuse_arguments, refuse_processor, with_reward_models
from dapo_rl.compat.trl.grpo_config import is_grpo_config, read_grpo_config, script_settings
from dapo_rl.config import Config
from dapo_rl.config.peers import LIBRARIES
from dapo_rl.config.peers.values import NoCounterpartError
from dapo_rl.convert.draft import default_of
from dapo_rl.errors import UserError
from dapo_rl.models.tokenizer import build_tokenizer

trl = pytest.importorskip("trl")
rewards = pytest.importorskip("trl.rewards")


def grpo(**fields):
    return trl.GRPOConfig(**{"output_dir": "out", "use_cpu": True, "bf16": False, "max_steps": 10, **fields})


def moved(rows=100, **fields):
    return read_grpo_config(grpo(**fields), lambda: rows)


def settings(config=None, rows=100, reward_funcs=None, **fields):
    return script_settings(grpo(**fields), config, reward_funcs, lambda _: rows)


def default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_every_field_has_a_decision():
    """A version of TRL that adds a field fails here, with its name."""
    made = decisions(trl.GRPOConfig)
    assert set(made) == {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert [name for name, (what, _) in made.items() if what == "unknown"] == []
    assert {name for name, (what, _) in made.items() if what == "differs"} == set()


def test_a_field_left_at_its_default_has_the_same_value_here():
    fields = {field.name: default(field) for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: fields[name] for name in LIBRARIES["trl"].defaults} == LIBRARIES["trl"].defaults
    for name, value in fields.items():
        entry = LIBRARIES["trl"].find(name)
        depends = ("epsilon_high", "bf16", "max_tool_calling_iterations")
        if entry.ours is None or entry.joint or name in LIBRARIES["trl"].defaults or name in depends:
            continue
        here = entry.convert(value) if entry.convert else value
        expected = default_of(entry.ours)
        assert (list(here) if isinstance(here, tuple) else here) == expected, name


def test_what_would_change_learning_is_refused_by_name():
    """Every field that the table says is refused is, for a value that is not its default."""
    odd = {bool: lambda value: not value, str: lambda value: f"{value}x", float: lambda value: value + 0.5}
    refused = [name for name, (what, _) in decisions(trl.GRPOConfig).items() if what == "refused"]
    assert len(refused) > 12
    for name in refused:
        args = grpo()
        value = getattr(args, name)
        other = {"a": 1} if name.endswith("kwargs") else "x"
        setattr(args, name, odd[type(value)](value) if type(value) in odd else other)
        with pytest.raises(UserError, match=rf"args: {name}[.a]*=.*; leave it (at .+|out) to train without it$"):
            read_grpo_config(args, lambda: 100)


def test_what_learning_does_not_depend_on_is_ignored_in_one_line():
    result = moved(logging_steps=1, tf32=False, save_only_model=True, hub_strategy="end")
    line = "GRPOConfig: ignored, because learning does not depend on them here: "
    assert result.notes == (line + "tf32, logging_steps, save_only_model, hub_strategy",)


def test_batches_count_completions_and_steps_count_groups():
    fields = {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    config = settings(**fields, steps_per_generation=8, max_steps=20, warmup_steps=4, num_iterations=2).config
    assert (config.sampling.prompts_per_step, config.sampling.group_size) == (16, 4)
    assert (config.train.mini_batches, config.train.epochs_per_step) == (4, 2)
    assert (config.train.steps, config.train.warmup_steps) == (3, 1), "8 updates per step"
    with pytest.raises(UserError, match=r"not whole groups in an update; raise gradient_accumulation_steps"):
        settings(per_device_train_batch_size=1, steps_per_generation=8)


def test_epochs_need_the_number_of_rows():
    fields = {"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": -1, "num_train_epochs": 2}
    assert settings(rows=50, **fields).config.train.steps == 50
    with pytest.raises(UserError, match="num_train_epochs: the data set has no length; set max_steps"):
        settings(rows=None, **fields)


def test_dapos_techniques_are_on_unless_the_fields_say_otherwise():
    config = settings().config
    assert config.sampling.dynamic
    assert (config.algo.clip_low, config.algo.clip_high) == (0.2, 0.28)
    assert (config.algo.aggregation, config.overlong.shape) == ("token-mean", "soft")
    assert settings(epsilon=0.1).config.algo.clip_high == 0.1, "epsilon_high is epsilon, as in TRL"
    assert settings(epsilon_high=0.2).config.algo.clip_high == 0.2
    assert settings(loss_type="grpo").config.algo.aggregation == "seq-mean-token-mean"
    punishment = rewards.get_soft_overlong_punishment(20, 10)
    assert settings(reward_funcs=[punishment]).config.overlong.shape == "off", "not punished twice"
    assert settings().notes[0] == (
        "GRPOConfig: 1 prompt × 8 samples per step, 10 steps; Dynamic Sampling on, clipping at 1 − 0.2 and 1 + 0.28, "
        "loss token-mean, Soft Overlong Punishment over the last 102 of 512 tokens"
    )


def test_the_other_values_are_trls():
    config = settings().config
    assert (config.train.lr, config.train.weight_decay, config.seed) == (1e-6, 0.0, 42)
    assert (config.algo.advantage_eps, config.sampling.max_new_tokens) == (1e-4, 512)
    # The rate of the last of 10 updates that decay linearly to 0.
    assert (config.train.lr_schedule, config.train.min_lr_share) == ("linear", 0.1)
    assert settings(warmup_steps=2).config.train.min_lr_share == 1 / 8, "of 8 updates after the warm-up"
    assert settings(lr_scheduler_type="cosine", max_steps=1).config.train.min_lr_share == 1
    assert settings({"train.steps": 20}).config.train.min_lr_share == 1 / 20, "of the steps that config sets"
    assert settings({"train.min_lr_share": 0}).config.train.min_lr_share == 0
    scheduled = settings(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.25}).config
    assert (scheduled.train.lr_schedule, scheduled.train.min_lr_share) == ("cosine", 0.25)


def test_devices_and_types():
    assert (settings().config.model.device, settings().config.model.dtype) == ("cpu", "float32")
    script_dtype = {"model_init_kwargs": {"dtype": "float32", "revision": "main", "attn_implementation": None}}
    assert settings(bf16=True, **script_dtype).config.model.dtype == "auto"
    assert settings(model_init_kwargs={"dtype": "bfloat16"}).config.model.dtype == "bfloat16"
    with pytest.raises(UserError, match=r"model_init_kwargs\.revision='v2': give a directory"):
        settings(model_init_kwargs={"revision": "v2"})


def test_evaluation_samples_as_often_as_training():
    fields = {"eval_strategy": "steps", "per_device_eval_batch_size": 8, "temperature": 0.7}
    config = settings(eval_steps=5, **fields).config
    assert (config.eval.every, config.eval.samples, config.eval.temperature) == (5, 8, 0.7)
    assert settings(eval_steps=0.5, num_generations_eval=2, **fields).config.eval.every == 5
    assert settings(eval_steps=0.5, num_generations_eval=2, **fields).config.eval.samples == 2
    assert settings(eval_steps=5).config.eval.every is None, "eval_strategy is no"
    assert settings(eval_strategy="epoch", per_device_eval_batch_size=8, rows=7).config.eval.every == 7


def test_checkpoints():
    assert settings(save_steps=4, save_total_limit=3).config.checkpoint.every == 4
    assert settings(save_steps=4, save_total_limit=3).config.checkpoint.keep == 3
    assert settings(save_strategy="no").config.checkpoint.every == 10, "only the last step"
    assert settings(save_strategy="epoch", rows=5).config.checkpoint.every == 5


def test_what_is_not_a_setting_goes_to_the_trainer():
    result = settings(reward_weights=[1.0, 0.5], push_to_hub=True)
    assert (result.run_dir, result.reward_weights) == ("out", [1.0, 0.5])
    assert result.pushes
    assert settings(output_dir=None).run_dir is None, "a new directory under runs/"
    assert settings(report_to=["tensorboard"]).config.log.trackers == ("tensorboard",)


def test_config_overrides_args_and_says_so():
    script = settings({"train": {"lr": 1e-4}, "sampling.dynamic": False}, learning_rate=1e-5)
    assert (script.config.train.lr, script.config.sampling.dynamic) == (1e-4, False)
    assert script.notes[-1] == "config overrides args: train.lr=0.0001 (learning_rate gives 1e-05)"
    preset = settings({"preset": "grpo"}, epsilon_high=0.25).config
    assert (preset.algo.aggregation, preset.algo.clip_high) == ("seq-mean-token-mean", 0.25)
    named = settings("gsm8k-smollm2-135m", learning_rate=1e-3).config
    recipe = Config.load("gsm8k-smollm2-135m")
    assert (named.train.lr, named.data.train) == (recipe.train.lr, recipe.data.train), "a recipe by its name"
    whole = settings(Config.build({"train.lr": 1e-4}), learning_rate=1e-5, num_generations=4).config
    assert (whole.train.lr, whole.sampling.group_size) == (1e-4, 4)


def test_only_a_grpo_config_is_one():
    class Mine(trl.GRPOConfig):
        pass

    assert is_grpo_config(Mine(output_dir="out", use_cpu=True, bf16=False))
    for other in ({"train.steps": 1}, [{"prompt": "1"}], Config()):
        with pytest.raises(UserError, match=r"args: expected TRL's GRPOConfig, got a \w+; settings go to config="):
            script_settings(other, None, None, lambda _: 1)


def test_a_field_of_ones_own_class_is_ignored():
    @dataclasses.dataclass
    class GRPOConfig(trl.GRPOConfig):
        benchmarks: str = ""

    args = GRPOConfig(output_dir="out", use_cpu=True, bf16=False, max_steps=1, benchmarks="aime")
    assert read_grpo_config(args, lambda: 1).notes[0].endswith(": benchmarks")


def test_arguments_of_the_chat_template_are_carried_over():
    moved = read_grpo_config(grpo(chat_template_kwargs={"enable_thinking": False}), lambda: 1)
    assert moved.settings["data.chat_template_kwargs"] == {"enable_thinking": False}


def test_several_processes_are_refused():
    args = grpo()
    many = SimpleNamespace(**{**vars(args), "world_size": 2})
    with pytest.raises(UserError, match="args: 2 processes; start the script with `python`: a run is one process"):
        read_grpo_config(many, lambda: 1)


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_without_a_counterpart_are_refused_by_name(name):
    refuse_arguments(**{name: None, "optimizers": (None, None)})
    with pytest.raises(UserError, match=f"^{name}: .* (is|are) not supported; "):
        refuse_arguments(**{name: (object(), None)})


def test_names_and_models_become_reward_models():
    plain = ["math", "rewards.py:score", "rules/judge.yaml", "rules/rewards.py:score", len]
    assert with_reward_models(plain, None) == plain
    model, words = SimpleNamespace(forward=None, parameters=None), build_tokenizer()
    first, second, third = with_reward_models([len, "org/reward-model", model], [None, None, words])
    assert first is len
    assert (second.model, second.processing_class) == ("org/reward-model", None)
    assert (third.model, third.processing_class) == (model, words)
    assert with_reward_models("model:org/m", words).model == "org/m"
    with pytest.raises(UserError, match=r"^reward_processing_classes: 1 for 2 reward functions; give one for each"):
        with_reward_models([len, "org/m"], [words])
    with pytest.raises(UserError, match=r"^reward_processing_classes: 'math' is no model; give None for it"):
        with_reward_models(["math"], [words])


def test_processors_are_refused():
    with pytest.raises(UserError, match="is a processor of images or audio, which are not supported; to train on text"):
        refuse_processor(SimpleNamespace(image_processor=None, tokenizer=None))


def test_a_value_without_a_counterpart_says_why():
    with pytest.raises(NoCounterpartError):
        LIBRARIES["trl"].find("loss_type").convert("luspo")
    with pytest.raises(UserError, match="loss_type='luspo': another policy loss; write it as"):
        moved(loss_type="luspo")


def test_the_entropy_bonus_of_trl():
    assert settings(entropy_coef=0.01, entropy_target=0.7).config.algo.entropy_target is None
    algo = settings(entropy_coef=0.01, use_adaptive_entropy=True, entropy_coef_delta=0.1).config.algo
    assert (algo.entropy_coef, algo.entropy_target, algo.entropy_coef_delta) == (0.01, 0.2, 0.1)
    algo = settings(use_adaptive_entropy=True, entropy_target=0.7, entropy_coef_max=0.5).config.algo
    assert (algo.entropy_target, algo.entropy_coef_max) == (0.7, 0.5)
    with pytest.raises(UserError, match=r"entropy_coef_min=0\.1: the weight of an adaptive entropy bonus falls to 0"):
        moved(use_adaptive_entropy=True, entropy_coef_min=0.1)


def test_rewards_of_trl_that_are_normalised_apart():
    config = settings(multi_objective_aggregation="normalize_then_sum", scale_rewards="none").config
    assert (config.algo.advantage, config.algo.normalize, config.algo.advantage_eps) == ("gdpo", "group", 1e-4)
    config = settings(scale_rewards="none").config
    assert (config.algo.advantage, config.algo.normalize) == ("group", "none")


def test_the_kl_penalty_of_trl():
    algo = settings(beta=0.04).config.algo
    assert (algo.kl_coef, algo.kl_kind, algo.kl_unbiased) == (0.04, "k3", True), "TRL's default"
    assert not settings(beta=0.04, use_bias_correction_kl=False).config.algo.kl_unbiased
    assert not settings().config.algo.kl_unbiased, "there is no penalty"
    (note,) = [note for note in moved(beta=0.04, importance_sampling_level="sequence").notes if "bias" in note]
    assert note.endswith("differs here: by the ratio of each token; theirs is that of its sequence")


def test_a_reference_of_trl_that_follows_the_policy():
    """512 updates by default, with two per step 256 steps; TRL mixes 0.6 of the policy in."""
    follows = {"beta": 0.04, "sync_ref_model": True}
    algo = settings(**follows).config.algo
    assert (algo.ref_sync_steps, algo.ref_mixup_alpha) == (512, 0.6)
    algo = settings(**follows, ref_model_sync_steps=7, ref_model_mixup_alpha=1.0, steps_per_generation=2).config.algo
    assert (algo.ref_sync_steps, algo.ref_mixup_alpha) == (4, 1.0)
    assert settings(beta=0.04, ref_model_sync_steps=7).config.algo.ref_sync_steps is None
    assert settings(sync_ref_model=True).config.algo.ref_sync_steps is None, "there is no penalty"


def test_the_losses_of_trl():
    sapo = settings(loss_type="sapo", sapo_temperature_neg=2.0, top_entropy_quantile=0.2).config.algo
    assert (sapo.loss, sapo.aggregation, sapo.tau_pos, sapo.tau_neg) == ("sapo", "seq-mean-token-mean", 1.0, 2.0)
    assert sapo.top_entropy_quantile == 0.2
    assert settings(sapo_temperature_neg=2.0).config.algo.tau_neg == 1.05
    gspo = settings(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, delta=2.0).config.algo
    assert (gspo.loss, gspo.clip_low, gspo.clip_high, gspo.clip_ratio_c) == ("gspo", 3e-4, 4e-4, None)
    (note,) = [note for note in moved(importance_sampling_level="sequence", delta=2.0).notes if "delta" in note]
    assert note == "GRPOConfig: delta=2.0 differs here: gspo has no dual clip"
    cispo = settings(loss_type="cispo", epsilon_high=5.0).config.algo
    assert (cispo.loss, cispo.aggregation, cispo.clip_low, cispo.clip_high) == ("cispo", "token-mean", 1.0, 4.0)
    with pytest.raises(UserError, match="loss_type cispo: epsilon_high is the upper bound of the ratio, 1 or more"):
        moved(loss_type="cispo")
    with pytest.raises(UserError, match="loss_type cispo with importance_sampling_level"):
        moved(loss_type="cispo", epsilon_high=5.0, importance_sampling_level="sequence")
