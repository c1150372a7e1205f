"""On-policy distillation of verl and ms-swift, converted to a teacher; and what a critic starts from."""

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
VERL += "actor_rollout_ref.rollout.n=8 "
TEACHER = "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=org/big "
LOSS = "distillation.distillation_loss"
SWIFT = "NPROC_PER_NODE=1 swift rlhf --rlhf_type grpo --model m --dataset d --per_device_train_batch_size 8 "


def test_verl_learns_from_a_teacher_alone(converted):
    words = f"{LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True {LOSS}.use_task_rewards=False "
    _, config, rows = converted(VERL + TEACHER + words + f"{LOSS}.distillation_loss_coef=0.5 {LOSS}.topk=32")
    assert (config.teacher.name, config.teacher.weight) == ("org/big", 0.5)
    assert (config.algo.advantage, config.sampling.dynamic) == ("distill", False)
    assert not [row.key for row in rows.values() if row.key.startswith("distillation") and row.learns]


def test_verl_adds_a_teacher_to_the_rewards(converted):
    words = f"{LOSS}.loss_mode=k3 {LOSS}.use_task_rewards=True {LOSS}.loss_max_clamp=10.0"
    _, config, rows = converted(VERL + TEACHER + words)
    assert (config.teacher.name, config.algo.advantage) == ("org/big", "group")
    assert rows[f"{LOSS}.loss_mode"].learns
    assert rows[f"{LOSS}.loss_max_clamp"].learns
    _, _, rows = converted(VERL + TEACHER)
    assert rows[f"({LOSS}.loss_mode)"].learns  # verl's default is another estimator


def test_verl_without_a_teacher_has_none(converted):
    _, config, rows = converted(VERL + TEACHER.replace("True", "False"))
    assert not config.teacher.given
    assert not rows["distillation.enabled"].learns


def test_the_teacher_of_ms_swift(converted):
    _, config, rows = converted(SWIFT + "--reward_funcs accuracy --teacher_model big --teacher_kl_coef 0.2")
    assert (config.teacher.name, config.teacher.weight) == ("big", 0.2)
    assert not rows["teacher_model"].learns
    assert (config.algo.kl_coef, rows["beta"].learns) == (0, True)  # its default is 0.04
    for url in ("http://host:8000", "http://host:8000/v1/"):
        _, config, _ = converted(SWIFT + f"--reward_funcs accuracy --temperature 1 --teacher_model_server {url}")
        assert (config.teacher.name, config.algo.kl_coef) == ("http://host:8000/v1", 0.04)


def test_a_weight_of_ms_swift_without_a_teacher(converted):
    _, config, rows = converted(SWIFT + "--reward_funcs accuracy --teacher_kl_coef 0.2")
    assert (config.teacher.given, config.teacher.weight) == (False, 1)
    assert rows["teacher_kl_coef"].note == "without a teacher it does nothing"
    assert not rows["teacher_kl_coef"].learns


def test_a_critic_that_starts_from_another_model(converted):
    words = VERL.replace("grpo", "gae") + "actor_rollout_ref.model.path=org/a critic.model.path="
    _, config, rows = converted(words + "org/rm")
    assert config.critic.model == "org/rm"
    assert not rows["critic.model.path"].learns
    assert converted(words + "org/a")[1].critic.model is None
