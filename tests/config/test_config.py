"""Settings: presets, overrides, and one clear line for every mistake."""

import subprocess
import sys
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.config import PRESETS, Config, known_keys
from dapo_rl.config.peers import LIBRARIES
from dapo_rl.errors import UserError


def error_of(*overrides):
    with pytest.raises(UserError) as caught:
        Config.load(None, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_run_directory_is_no_setting():
    for name in ("out", "run", "output_dir"):
        assert "name the run directory with --run DIR" in error_of(f"{name}=r1")


def test_none_is_written_in_lower_case():
    assert Config.load(None, ["eval.every=none"]).eval.every is None
    assert error_of("eval.every=None") == "eval.every: expected a number or none (in lower case), got 'None'"
    assert "none" not in error_of("seed=None")


def test_the_defaults_are_dapo():
    config = Config.load()
    assert (config.algo.clip_low, config.algo.clip_high) == (0.2, 0.28)
    assert config.algo.aggregation == "token-mean"
    assert config.algo.kl_coef == 0
    assert config.sampling.dynamic
    assert config.overlong.shape == "soft"
    assert not config.overlong.mask_truncated
    assert (config.reward.correct, config.reward.wrong) == (1, -1)


def test_grpo_turns_every_technique_off():
    config = Config.load(None, ["preset=grpo"])
    assert (config.algo.clip_low, config.algo.clip_high) == (0.2, 0.2)
    assert config.algo.aggregation == "seq-mean-token-mean"
    assert (config.algo.kl_coef, config.algo.kl_kind) == (0.001, "k3")
    assert not config.sampling.dynamic
    assert config.overlong.shape == "off"
    assert not config.overlong.mask_truncated


def test_dr_grpo_has_mean_only_advantages_and_a_constant_norm():
    config = Config.load(None, ["preset=dr_grpo", "sampling.max_new_tokens=77"])
    assert config.algo.normalize == "none"
    assert config.algo.aggregation == "seq-mean-token-sum-norm"
    assert config.norm_length == 77


@pytest.mark.parametrize(
    ("switch", "read"),
    [
        ("algo.clip_high=0.2", lambda c: c.algo.clip_high == 0.2),
        ("sampling.dynamic=false", lambda c: c.sampling.dynamic is False),
        ("algo.aggregation=seq-mean-token-mean", lambda c: c.algo.aggregation == "seq-mean-token-mean"),
        ("overlong.mask_truncated=on", lambda c: c.overlong.mask_truncated is True),
        ("overlong.shape=off", lambda c: c.overlong.shape == "off"),
    ],
)
def test_each_technique_is_one_switch_that_changes_nothing_else(switch, read):
    changed, plain = Config.load(None, [switch]).resolved(), Config.load().resolved()
    assert read(Config.load(None, [switch]))
    key = switch.partition("=")[0]
    section, name = key.split(".")
    plain[section][name] = changed[section][name]
    assert changed == plain


def test_what_the_recipe_says_wins_over_its_preset_and_the_command_line_over_both(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("preset: grpo\nalgo: {clip_high: 0.3}\ntrain.lr: 1e-5\n")
    config = Config.load(recipe, ["train.lr=2e-5", "sampling.stop=[a, b]"])
    assert config.algo.clip_high == 0.3
    assert config.algo.aggregation == "seq-mean-token-mean"
    assert config.train.lr == 2e-5
    assert config.sampling.stop == ("a", "b")
    assert Config.load(recipe, ["preset=dapo"]).algo.aggregation == "token-mean"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algo.clip_hgih=0.3", "algo.clip_hgih: no such setting; did you mean algo.clip_high?"),
        ("lr=1", "lr: no such setting; did you mean train.lr?"),
        ("train.epsilon_high=0.3", "train.epsilon_high: no such setting; here it is algo.clip_high"),
        ("algo.aggregation=token_mean", "did you mean token-mean?"),
        ("train.steps=many", "train.steps: input should be a valid integer"),
        ("train.steps=0", "train.steps: input should be greater than or equal to 1, got 0"),
        ("model=gpt2", "model: is a section, not a value; for example model.name=gpt2"),
        ("train.lr.x=3", "train.lr"),
        ("train.lr=.inf", "train.lr: input should be a finite number"),
        ("reward.correct=.nan", "reward.correct: input should be a finite number"),
        ("nonsense", "'nonsense': an override is written key=value"),
        ("train.lr=[", "train.lr: '[' is not a value"),
        ("preset=pppo", "preset: 'pppo' is not one of 'dapo', 'grpo', 'dr_grpo', 'vapo' or 'ppo'; did you mean ppo?"),
        ("critic.lamda_policy=1", "critic.lamda_policy: no such setting; did you mean critic.lambda_policy?"),
        ("critic.optim.lr=1e-5", "critic.optim.lr: no such setting; here it is critic.lr=1e-5"),
        ("critic.eps_clip=0.2", "critic.eps_clip: no such setting; here it is critic.value_clip=0.2"),
        ("algorithm.lam=0.9", "algorithm.lam: no such setting; here it is critic.lambda_policy=0.9"),
        ("critic.lambda_policy=adaptve", "critic.lambda_policy: 'adaptve' is not a number in [0, 1] or adaptive"),
        ("critic.lambda_policy=1.5", "critic.lambda_policy: 1.5 is not a number in [0, 1] or adaptive"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_the_nearest_right_one(override, expected):
    assert expected in error_of(override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "here it is algo.clip_high=0.28"),
        ("actor_rollout_ref.rollout.top_k=-1", "here it is sampling.top_k=0"),
        ("trainer.total_epochs=1", "here it is train.steps (counts passes over the data; "),
        ("data.train_batch_size=512", "here it is sampling.prompts_per_step=512"),
        ("actor.overlong_reward_penalty=true", "here it is overlong.shape=soft"),
        ("soft_cache_length=512", "here it is overlong.cache_length=512"),
        ("num_train_epochs=3", "here it is train.steps (counts passes over the data; "),
        ("warmup_ratio=0.05", "here it is train.warmup_steps (a share of the updates; "),
        ("use_peft=true", "here it is model.lora.rank"),
        ("delta=4", "here it is algo.clip_ratio_c=4"),
        ("reward_weights=[1, 2]", "here it is reward.verifier (a list of {verifier: NAME, weight: 0.5})"),
        ("report_to=wandb", "here it is log.trackers=[wandb]"),
        ("output_dir=out", "it has no counterpart here: name the run directory with --run DIR"),
        ("bf16=true", "here it is model.dtype=bfloat16"),
        ("use_vllm=true", "here it is engine=vllm"),
        ("loss_type=luspo", "here it is algo.aggregation, but 'luspo' has no counterpart: another policy loss"),
        ("actor.eps_clip_higher=0.28", "here it is algo.clip_high=0.28"),
        ("algorithm.invented=1", "it looks like a setting of verl: `dapo convert FILE` translates its files"),
    ],
)
def test_a_setting_of_another_library_is_named_as_it_is_here(override, expected):
    key = override.partition("=")[0]
    assert error_of(override).startswith(f"{key}: no such setting; {expected}")


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (["sampling.group_size=1"], "sampling.group_size", "use 2 or more"),
        (["sampling.group_size=1", "sampling.dynamic=false"], "sampling.group_size", "algo.normalize=group"),
        (
            ["sampling.group_size=1", "sampling.dynamic=false", "algo.advantage=opo"],
            "sampling.group_size",
            "=opo: one",
        ),
        (["sampling.group_size=1", "algo.advantage=opo"], "sampling.group_size", "1 with dynamic sampling: one"),
        (["preset=vapo", "train.steps=8", "critic.pretrain_steps=8"], "critic.pretrain_steps", "use 1 or less"),
        (["algo.kl_coef=0.1", "algo.kl_in=reward"], "algo.kl_in", "set algo.kl_in=loss, or algo.advantage=gae"),
        (["algo.kl_coef=0.1", "algo.kl_kind=k1"], "algo.kl_kind", "set algo.kl_kind=k1+"),
        (["algo.importance_cap=2"], "algo.importance_cap", "set algo.proximal=recomputed"),
        (["algo.loss=cispo", "algo.clip_high=-1"], "algo.clip_high", "is not 0 or more"),
        (["cluster.ranks=2"], "cluster.ranks", "2 ranks need Ray; set cluster.backend=ray"),
        (["cluster.backend=ray", "model.lora.dropout=0.1"], "model.lora.dropout", "not supported on ranks"),
        (["overlong.cache_length=1024"], "overlong.cache_length", "not below overlong.max_length 1024"),
        (["overlong.max_length=100", "overlong.cache_length=100"], "overlong.cache_length", "proportion is 20"),
        (["overlong.max_length=2000"], "overlong.max_length", "use 1024 or less"),
        (["algo.clip_low=-0.1"], "algo.clip_low", "outside [0, 1)"),
        (["algo.clip_high=1"], "algo.clip_high", "outside [0, 1)"),
        (["algo.clip_ratio_c=0.9"], "algo.clip_ratio_c", "not above 1"),
        (["train.mini_batches=5"], "train.mini_batches", "the nearest that does is 4"),
        (["train.mini_batches=3", "sampling.prompts_per_step=7"], "train.mini_batches", "the nearest that does is 1"),
        (["sampling.cap=3"], "sampling.cap", "use 16 or more"),
        (["sampling.ahead=0.5", "sampling.surplus=drop"], "sampling.ahead", "set sampling.surplus=carry"),
        (["sampling.ahead=0.5", "sampling.max_staleness=0"], "sampling.ahead", "set sampling.max_staleness=1"),
        (["sampling.ahead=0.5", "sampling.dynamic_batch=true"], "sampling.ahead", "set sampling.ahead=0"),
        (["reward.correct=-1"], "reward.correct", "not above reward.wrong -1"),
        (["overlong.shape=linear"], "overlong.max_length", "overlong.shape=soft"),
        (["overlong.cache_length=0"], "overlong.cache_length", "no response exceeds"),
        (["train.token_budget=100"], "train.token_budget", "use 2048 or more"),
        (["train.betas=[0.9, 1.0]"], "train.betas", "outside [0, 1)"),
        (["sampling.stop=['']"], "sampling.stop", "leave it out"),
        (["sampling.group_size=1", "sampling.dynamic=off", "algo.normalize=none"], "sampling.group_size", "2 or more"),
        (["sampling.dynamic=false", "sampling.dynamic_batch=true"], "sampling.dynamic_batch", "sampling.dynamic=true"),
        (["engine_options.enforce_eager=true"], "engine_options", "engine=native has no options of its own"),
        (["engine=vllm", "engine_options.dtype=half"], "engine_options", "set model.dtype"),
        (["engine=vllm", "engine_options.tensor_parallel_size=2"], "engine_options", "set cluster.engine_gpus"),
        (["cluster.engines=2"], "cluster.engines", "set cluster.backend=ray"),
        (["cluster.placement=separate"], "cluster.placement", "has no effect without Ray; set cluster.backend=ray"),
        (["cluster.address=auto"], "cluster.address", "has no effect without Ray; set cluster.backend=ray"),
        (["cluster.engine_gpus=2"], "cluster.engine_gpus", "set engine=vllm"),
        (["engine=vllm", "cluster.engine_gpus=2"], "cluster.engine_gpus", "set cluster.placement=separate"),
        (["cluster.weights=direct", "cluster.placement=separate"], "cluster.weights", "set it to broadcast"),
        (["cluster.weights=broadcast"], "cluster.weights", "set it to direct"),
        (["cluster.backend=ray", "train.memory=keep"], "train.memory", "set cluster.placement=shared"),
    ],
)
def test_what_cannot_work_together_names_the_key_and_the_remedy(overrides, key, remedy):
    line = error_of(*overrides)
    assert line.startswith(f"{key}: ")
    assert remedy in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.group_size=2"],
        ["preset=vapo", "train.steps=8", "critic.pretrain_steps=7"],
        ["preset=vapo", "algo.kl_coef=0.1", "algo.kl_in=reward"],
        ["algo.kl_coef=0", "algo.kl_kind=k1"],
        ["algo.kl_coef=0.1", "algo.kl_kind=k1+"],
        ["algo.proximal=recomputed", "algo.importance_cap=2"],
        ["algo.clip_low=0", "algo.clip_high=0.999"],
        ["algo.loss=cispo", "algo.clip_low=0", "algo.clip_high=4"],
        ["algo.clip_ratio_c=1.001"],
        ["overlong.cache_length=1023"],
        ["overlong.max_length=1023", "overlong.cache_length=0"],
        ["overlong.max_length=1023", "overlong.shape=linear"],
        ["overlong.max_length=2000", "overlong.shape=off"],
        ["reward.correct=-0.999"],
        ["sampling.cap=16"],
        ["sampling.ahead=0.5"],
        ["sampling.surplus=drop", "sampling.max_staleness=0", "sampling.dynamic_batch=true"],
        ["train.mini_batches=16"],
        ["train.token_budget=2048"],
        ["train.betas=[0, 0]"],
        ["engine=vllm", "engine_options.enforce_eager=true"],
        ["cluster.backend=ray", "cluster.ranks=2", "model.lora.rank=4"],
        ["cluster.backend=ray", "cluster.weights=broadcast", "cluster.placement=separate"],
        ["cluster.backend=ray", "cluster.weights=direct"],
        ["cluster.backend=ray", "train.memory=keep", "cluster.placement=shared"],
        ["cluster.backend=ray", "train.memory=auto"],
        ["train.memory=keep"],
        ["engine=vllm", "cluster.backend=ray", "cluster.engine_gpus=2", "cluster.placement=separate"],
    ],
)
def test_what_only_just_works_together_is_accepted(overrides):
    Config.load(None, overrides)


def test_limits_follow_each_other_by_default():
    config = Config.load(None, ["sampling.max_new_tokens=20480"])
    assert config.overlong_max_length == 20480
    assert config.overlong_cache_length == 4096
    assert config.sampling_cap == 480
    assert config.token_budget == 21504


def test_recipe_files_with_mistakes(tmp_path):
    def message(text):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(UserError) as caught:
            Config.load(tmp_path / "r.yaml")
        return str(caught.value)

    assert "r.yaml:2: not valid YAML" in message("a: 1\nb: ]1\n")
    assert "a recipe is a mapping of sections, not a list" in message("- a\n")
    assert "did you mean algo.clip_high?" in message("algo: {clip_higher: 0.3}\n")
    with pytest.raises(UserError, match=r"rr.yaml: no such recipe; did you mean .*r.yaml\?"):
        Config.load(tmp_path / "rr.yaml")
    with pytest.raises(UserError, match="cannot be read as a recipe"):
        Config.load(tmp_path)
    (tmp_path / "r.yaml").write_text("")
    assert Config.load(tmp_path / "r.yaml") == Config.load()


def test_resolved_settings_load_back_to_the_same(tmp_path):
    config = Config.load(None, ["preset=dr_grpo", "data.train.source=x.jsonl", "data.train.n=3", "seed=5"])
    recipe = tmp_path / "config.yaml"
    recipe.write_text(yaml.safe_dump(config.resolved()))
    assert Config.load(recipe).resolved() == config.resolved()


def test_every_setting_is_documented_and_every_name_elsewhere_leads_to_one():
    keys = known_keys()
    undocumented = [key for key, field in keys.items() if not field.description]
    assert undocumented == []
    sources = {"data.train.name", "data.train.split", "data.eval.split"}
    for library in LIBRARIES.values():
        assert {entry.ours for entry in library.settings.values() if entry.ours} <= {*keys, *sources}
    for changes in PRESETS.values():
        assert {f"{section}.{name}" for section, names in changes.items() for name in names} <= set(keys)


def test_settings_import_no_torch():
    code = "import sys, dapo_rl, dapo_rl.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*known_keys(), "model", "algo", "x", "a.b", ""]), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_fuzz_only_our_own_error_comes_out(value):
    if isinstance(value, dict):
        with suppress(UserError):
            Config.build(value)


def test_brackets_without_end_are_one_line(tmp_path):
    recipe = tmp_path / "deep.yaml"
    recipe.write_text("train: " + "[" * 4000 + "]" * 4000)
    with pytest.raises(UserError, match=r"deep\.yaml: not valid YAML: it is nested too deeply$"):
        Config.load(recipe)


def test_prose_on_the_command_line_needs_no_quotes_of_yaml():
    prompt = 'Solve it. The last line is "Answer: " and the number.'
    assert Config.load(None, [f"data.system_prompt={prompt}"]).data.system_prompt == prompt
    with pytest.raises(UserError, match=r"train\.lr: input should be a valid number"):
        Config.load(None, ["train.lr=about: 1e-6: so"])
    with pytest.raises(UserError, match="is not a value; quote it as in YAML"):
        Config.load(None, ["data.system_prompt={open"])


def test_options_of_an_engine_are_kept_as_they_are():
    options = ["engine=vllm", "engine_options.max_num_batched_tokens=8192", "engine_options={enforce_eager: true}"]
    config = Config.load(None, options)
    assert config.engine_options == {"max_num_batched_tokens": 8192, "enforce_eager": True}
    assert Config.build(config.resolved()).engine_options == config.engine_options


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["cluster.backend=ray"], False),
        (["cluster.backend=ray", "cluster.placement=separate"], True),
        (["cluster.backend=ray", "cluster.placement=shared"], True),
        (["cluster.backend=ray", "cluster.placement=separate", "sampling.max_staleness=0"], False),
        (["cluster.backend=ray", "cluster.placement=separate", "sampling.surplus=drop"], False),
    ],
)
def test_engines_that_sample_during_updates(overrides, expected):
    assert Config.load(None, overrides).during_updates is expected


def optional_keys():
    """Every setting that may be unset, or empty, and is by default."""
    return [key for key, field in known_keys().items() if field.default in (None, ())]


@pytest.mark.parametrize("key", optional_keys())
@pytest.mark.parametrize("word", ["none", "null"])
def test_what_the_help_calls_none_can_be_set_to_it(key, word):
    """Also in a recipe, where `none` is text."""
    changed = {"cluster.address": "cluster.backend=ray"}.get(key)
    config = Config.load(None, [*([changed] if changed else []), f"{key}={word}"])
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == known_keys()[key].default


def test_none_stays_a_choice_where_it_is_one():
    assert Config.build({"algo.normalize": "none"}).algo.normalize == "none"
    with pytest.raises(UserError, match=r"train\.steps"):
        Config.build({"train.steps": "none"})


def test_an_environment_that_gives_rewards_needs_no_verifier():
    """What a run records says so, too: a setting that is recorded is no longer a default."""
    game = Config.build({"env.name": "guess"})
    assert game.reward.verifier == "none"
    assert game.reward.verifiers == ()
    assert Config.build(game.resolved()).reward.verifier == "none"
    assert Config.build({"env.name": "guess", "reward.verifier": "exact"}).reward.verifier == "exact"
    assert Config.build({"env.tools": "calculator"}).reward.verifier == "math"
    assert Config.build({"env.name": "guess", "reward.verifier": None}).reward.verifier == "none"


def test_a_weight_of_a_teacher_needs_one():
    with pytest.raises(UserError, match=r"^teacher\.weight: 0\.5 without a teacher; set teacher\.name, or"):
        Config.build({"teacher.weight": 0.5})
    assert Config.build({"teacher.weight": 0.5, "teacher.name": "tiny"}).teacher.weight == 0.5
    assert Config.build({"teacher.weight": 1}).teacher.weight == 1
