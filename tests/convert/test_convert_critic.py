"""`dapo convert` of PPO runs: verl's and AReaL's critic."""

import published
import pytest

from dapo_rl.config import Config
from dapo_rl.convert.hydra import interpolated
from dapo_rl.errors import UserError

ACTOR = "actor_rollout_ref.actor"


def verl(*words, estimator="gae"):
    start = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator={estimator} trainer.total_training_steps=100"
    return " ".join([start, "data.train_files=dapo-math-17k.parquet actor_rollout_ref.model.path=m", *words])


AREAL_ALWAYS = {"actor.gae_lambda", "rollout.max_head_offpolicyness", "(reward function)"}


def changed(result):
    return {row.key for row in result.changes}


def test_verls_example_of_ppo(converted):
    result, config, rows = converted(published.VERL_PPO, prompts=8192)
    assert (config.algo.advantage, config.sampling.dynamic, config.sampling.group_size) == ("gae", False, 1)
    # verl's defaults: λ 1 for both, a value clip of 0.5, whitened advantages, the policy from the first step.
    critic = config.critic
    assert (critic.lambda_policy, critic.lambda_critic, critic.value_clip) == (1.0, 1.0, 0.5)
    assert (critic.lr, critic.whiten, config.pretrain_steps) == (1e-5, True, 0)
    assert (config.algo.kl_coef, config.train.steps) == (0, 30)
    assert [row.value for row in result.rows if row.here == "critic.whiten: true"] == ["whitens the advantages of GAE"]
    assert rows["algorithm.lam"].is_set is False
    assert rows["critic.model.path"].note.startswith("the critic starts from the policy's weights")
    assert changed(result) == set()
    assert config.reward.verifier == "dapo_rl.rewards.by_source:by_source"


def test_gae_is_what_verl_does_unless_told_otherwise(converted):
    _, config, rows = converted("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m")
    assert config.has_critic
    assert not rows["algorithm.adv_estimator"].is_set


def test_the_settings_of_verls_critic(converted):
    words = "algorithm.lam=0.95 critic.optim.lr=3e-5 critic.cliprange_value=0.2"
    result, config, rows = converted(verl(words, "trainer.critic_warmup=20"))
    critic = config.critic
    assert (critic.lambda_policy, critic.lambda_critic) == (0.95, 0.95)
    assert (critic.lr, critic.value_clip) == (3e-5, 0.2)
    # verl updates the policy if critic_warmup <= step, and counts steps from 1.
    assert critic.pretrain_steps == 19
    assert rows["trainer.critic_warmup"].note == "its step 20 is the first to update the policy"
    assert rows["algorithm.lam"].note == "one λ for both: critic.lambda_policy and critic.lambda_critic"
    assert changed(result) == set()


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (1, 0), (2, 1)])
def test_the_warm_up_of_verls_critic_is_counted_from_one(converted, warmup, steps):
    _, config, _ = converted(verl(f"trainer.critic_warmup={warmup}"))
    assert config.critic.pretrain_steps == steps


@pytest.mark.parametrize(
    ("theirs", "kind"), [("", "k1"), ("algorithm.kl_penalty=low_var_kl", "k3"), ("algorithm.kl_penalty=mse", "k2")]
)
def test_kl_in_the_reward(converted, theirs, kind):
    words = f"algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_ctrl.type=fixed {theirs}"
    result, config, _ = converted(verl(words))
    assert (config.algo.kl_in, config.algo.kl_coef, config.algo.kl_kind) == ("reward", 0.02, kind)
    assert changed(result) == set()
    _, config, _ = converted(verl("algorithm.use_kl_in_reward=True"))
    assert config.algo.kl_coef == 0.001


def test_an_adaptive_weight_of_kl_in_the_reward(converted):
    adaptive = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive"
    result, config, _ = converted(verl(f"{adaptive} algorithm.kl_ctrl.target_kl=0.05 algorithm.kl_ctrl.horizon=5000"))
    assert (config.algo.kl_coef, config.algo.kl_target, config.algo.kl_horizon) == (0.001, 0.05, 5000)
    assert changed(result) == set()
    result, config, _ = converted(verl(adaptive))
    assert (config.algo.kl_target, config.algo.kl_horizon) == (0.1, 10000), "verl's defaults"
    for words in ("algorithm.kl_ctrl.type=fixed algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"):
        result, config, _ = converted(verl(f"{words} algorithm.kl_ctrl.target_kl=0.05"))
        assert config.algo.kl_target is None
        assert changed(result) == set()


def test_what_of_kl_in_the_reward_has_no_counterpart(converted):
    used = "algorithm.use_kl_in_reward=True"
    result, config, _ = converted(verl(used, "algorithm.kl_penalty=abs"))
    assert changed(result) == {"algorithm.kl_penalty"}
    result, config, _ = converted(verl(used, f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.5"))
    assert (config.algo.kl_in, config.algo.kl_coef) == ("reward", 0.001)
    assert changed(result) == {f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"}
    result, config, rows = converted(verl(used, "actor_rollout_ref.rollout.n=8", estimator="grpo"))
    assert (config.algo.kl_in, config.algo.kl_coef) == ("loss", 0)
    assert changed(result) == {"algorithm.use_kl_in_reward"}
    assert rows["algorithm.use_kl_in_reward"].note.startswith("without a critic, the KL penalty is part of the loss")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("critic.optim.weight_decay=0.2", "critic.optim.weight_decay"),
        # verl's critic keeps its own default if only the policy's is set.
        (f"{ACTOR}.optim.weight_decay=0.1", "critic.optim.weight_decay"),
        (f"{ACTOR}.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps"),
        (f"{ACTOR}.grad_clip=0.5", "critic.grad_clip"),
        ("critic.ppo_epochs=4", "critic.ppo_epochs"),
        ("critic.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size"),
        ("critic.loss_agg_mode=seq-mean-token-mean", "critic.loss_agg_mode"),
        ("critic.model.lora_rank=8", "critic.model.lora_rank"),
    ],
)
def test_where_verls_critic_is_not_as_the_policy_learning_changes(converted, words, key):
    result, _, _ = converted(verl(words))
    assert changed(result) == {key}


def test_equal_settings_of_policy_and_critic_change_nothing(converted):
    pairs = ("optim.weight_decay=0.1", "optim.lr_warmup_steps=5", "grad_clip=0.5", "ppo_epochs=2")
    words = [f"{ACTOR}.{pair} critic.{pair}" for pair in pairs]
    explicit = [
        "critic.optim.betas=[0.9,0.999]",
        "critic.ppo_mini_batch_size=256",
        "critic.optim.warmup_style=constant",
    ]
    result, config, rows = converted(verl(*words, *explicit, "critic.loss_agg_mode=token-mean"))
    assert changed(result) == set()
    assert (config.train.weight_decay, config.train.warmup_steps) == (0.1, 5)
    assert rows["critic.optim.weight_decay"].note == "the critic has the policy's (train.weight_decay)"


def test_another_discount_is_refused_in_one_line(converted):
    expected = (
        r"run\.sh: cannot be converted: algorithm\.gamma: rewards are not discounted here, got 0\.99; set it to 1$"
    )
    with pytest.raises(UserError, match=expected):
        converted(verl("algorithm.gamma=0.99"))
    result, _, _ = converted(verl("algorithm.gamma=1.0"))
    assert changed(result) == set()
    with pytest.raises(UserError, match=r"actor\.discount: rewards are not discounted here, got 0\.9; set it to 1$"):
        converted(published.AREAL_PPO.replace("kl_ctl: 0.0", "discount: 0.9"), "areal.yaml")


def test_without_gae_the_critic_of_verl_does_nothing(converted):
    words = "actor_rollout_ref.rollout.n=8 critic.optim.lr=1e-5 algorithm.lam=0.9 trainer.critic_warmup=20"
    result, config, rows = converted(verl(words, estimator="grpo"))
    assert not config.has_critic
    assert config.critic == Config().critic
    for key in ("critic.optim.lr", "algorithm.lam", "trainer.critic_warmup"):
        assert (rows[key].status, rows[key].note) == ("default here", "without adv_estimator=gae it does nothing")
    assert changed(result) == set()


def test_areals_example_of_ppo(converted):
    result, config, rows = converted(published.AREAL_PPO, "areal.yaml", prompts=7473)
    critic = config.critic
    assert (config.algo.advantage, config.pretrain_steps) == ("gae", 0)
    # The critic's optimizer is a reference to the policy's.
    assert (critic.lr, critic.value_clip, critic.whiten) == (1.7e-5, 0.5, True)
    assert (critic.lambda_policy, critic.lambda_critic) == (1.0, 1.0)
    assert rows["critic.optimizer.weight_decay"].value == 0.017
    assert "truncated responses end with their reward here" in rows["actor.gae_lambda"].note
    assert changed(result) == AREAL_ALWAYS


def test_the_settings_of_areals_critic(converted):
    text = published.AREAL_PPO.replace("kl_ctl: 0.0", "kl_ctl: 0.05\n  gae_lambda: 0.95")
    text = text.replace("adv_norm: {mean_level: batch, std_level: batch}", "adv_norm: null")
    text = text.replace("  eps_clip: 0.5\n", "  eps_clip: 0.3\n")
    result, config, _ = converted(text, "areal.yaml", prompts=7473)
    assert (config.critic.lambda_policy, config.critic.lambda_critic) == (0.95, 0.95)
    assert (config.critic.value_clip, config.critic.whiten) == (0.3, False)
    assert (config.algo.kl_in, config.algo.kl_coef, config.algo.kl_kind) == ("reward", 0.05, "k1")
    assert changed(result) == AREAL_ALWAYS


def test_what_of_areals_critic_has_no_counterpart(converted):
    text = published.AREAL_PPO.replace("std_level: batch", "std_level: group").replace(
        "  kl_ctl: 0.0\n", "  kl_ctl: 0.0\n  reward_norm: {mean_level: group, std_level: group, eps: 1e-3}\n"
    )
    text = text.replace("ppo_n_minibatches: ${actor.ppo_n_minibatches}", "ppo_n_minibatches: 2")
    result, config, rows = converted(text, "areal.yaml", prompts=7473)
    norms = {"actor.adv_norm.mean_level", "actor.adv_norm.std_level"}
    norms |= {"actor.reward_norm.mean_level", "actor.reward_norm.std_level"}
    assert changed(result) == norms | AREAL_ALWAYS | {"critic.ppo_n_minibatches"}
    assert (config.algo.normalize, config.algo.advantage_eps) == ("group", 1e-6)
    assert rows["critic.ppo_n_minibatches"].here == "train.mini_batches: 1"


def test_areal_without_a_critic_is_as_ever(converted):
    text = published.AREAL.replace("kl_ctl: 0.0", "kl_ctl: 0.1\n  gae_lambda: 0.9") + "critic: null\n"
    result, config, rows = converted(text, "areal.yaml", prompts=7473)
    assert not config.has_critic
    assert rows["actor.gae_lambda"].note == "without a critic it does nothing"
    assert "actor.kl_ctl" in changed(result)
    assert {"actor.adv_norm.mean_level", "actor.adv_norm.std_level"} <= changed(result)


def test_a_reference_to_a_section_is_its_settings():
    keys = {"a.b": 1, "a.c": "${d}", "d": 2, "e": "${a}", "e.b": 3}
    assert interpolated(keys, {}) == {"a.b": 1, "a.c": 2, "d": 2, "e.b": 3, "e.c": 2}
    many = {f"a.k{i}": i for i in range(101)} | {"e": "${a}"}
    assert interpolated(many, {})["e"] == {f"k{i}": i for i in range(101)}
