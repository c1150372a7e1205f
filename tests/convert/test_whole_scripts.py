"""Scripts as people write them: arrays, several files, asynchronous trainers, what is not known, and two commands."""

import pytest
import yaml
from typer.testing import CliRunner

from dapo_rl.cli import app
from dapo_rl.convert.read_run import read_run
from dapo_rl.convert.write_recipe import convert_run, recipe_text
from dapo_rl.errors import UserError

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
START = "data.train_files=dapo-math-17k.parquet actor_rollout_ref.model.path=m trainer.total_training_steps=100"
START += " data.filter_overlong_prompts=True algorithm.adv_estimator=grpo"


def verl(*words, module="verl.trainer.main_ppo"):
    return " ".join([f"python3 -m {module} {START}", *words])


@pytest.fixture
def recipe(tmp_path):
    """The recipe's text as YAML, and the rows by their keys."""

    def convert(text, name="run.sh", **options):
        (tmp_path / name).write_text(text)
        result = convert_run(read_run(tmp_path / name), **options)
        return yaml.safe_load(recipe_text(result)), {row.key: row for row in result.rows}

    return convert


ARRAYS = f"""
DEVICE=${{DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}}
ENGINE=${{ENGINE:-vllm}}
ROLLOUT=(
    {ROLLOUT}.n=5
)
case "${{ENGINE}}" in
    sglang) ROLLOUT+=({ROLLOUT}.temperature=0.5) ;;
    vllm) ROLLOUT+=({ROLLOUT}.temperature=0.7) ;;
esac
RAY=(ray_kwargs.ray_init.runtime_env.py_executable=null)
if [ "${{DEVICE}}" = gpu ]; then
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --extra ${{ENGINE}}")
fi
"""


def test_an_array_that_is_extended_in_case_is_part_of_the_command(recipe):
    text, rows = recipe(ARRAYS + verl(f"{ROLLOUT}.n=1", '"${ROLLOUT[@]}"', '"${RAY[@]}"'))
    assert (text["sampling"]["group_size"], text["sampling"]["temperature"]) == (5, 0.7)
    assert not [row for row in rows.values() if row.learns]
    assert "$RAY" not in rows


def test_several_files_are_a_list_of_sources(recipe):
    words = (
        "data.train_files='[\"gsm8k/train.parquet\",\"math/train.parquet\"]' data.val_files=['a.parquet','b.parquet']"
    )
    text, rows = recipe(verl(f"{ROLLOUT}.n=8", words))
    assert text["data"]["train"] == ["gsm8k/train.parquet", "math/train.parquet"]
    assert text["data"]["eval"] == ["a.parquet", "b.parquet"]
    assert not rows["data.train_files"].learns
    script = (
        "NPROC_PER_NODE=1 swift rlhf --rlhf_type grpo --model m --num_generations 8 --per_device_train_batch_size 8 "
    )
    text, rows = recipe(script + "--dataset a b#500 --reward_funcs accuracy")
    assert text["data"]["train"] == ["a", "b"]
    assert rows["dataset"].learns
    text, rows = recipe(script + "--dataset a#1000 b#500 --num_train_epochs 2 --reward_funcs accuracy")
    assert text["data"]["train"] == [{"source": "a", "weight": 1000.0}, {"source": "b", "weight": 500.0}]
    assert text["train"]["steps"] == 3000
    text, _ = recipe(script + "--dataset a/b:main#8 hf::c/d e:x/y --val_dataset a/b:test --reward_funcs accuracy")
    assert text["data"]["train"] == [{"source": "a/b", "name": "main"}, "hf::c/d", "e:x/y"]
    assert text["data"]["eval"] == {"source": "a/b", "name": "test"}
    text, _ = recipe(script + "--dataset a:main#8 b#2 --reward_funcs accuracy")
    assert text["data"]["train"][0] == {"source": "a", "name": "main", "weight": 8.0}


def test_a_mixture_of_trl_is_a_list_of_sources(recipe):
    datasets = "datasets: [{path: a, name: main}, {path: b, split: train}]\n"
    text, _ = recipe(f"model_name_or_path: m\nnum_generations: 8\n{datasets}", "trl.yaml")
    assert text["data"]["train"] == [{"source": "a", "name": "main"}, {"source": "b", "split": "train"}]
    with pytest.raises(UserError, match="datasets: columns of 'a' has no counterpart"):
        recipe("num_generations: 8\ndatasets: [{path: a, columns: [x]}]\n", "trl.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "data.train_files=null", "data.train_files=$TRAIN_FILES", "data.train_files=[]"])
def test_a_recipe_never_falls_back_to_the_data_of_the_demo(recipe, tmp_path, words):
    script = f"python3 -m verl.trainer.main_ppo {ROLLOUT}.n=8 algorithm.adv_estimator=grpo {words}"
    text, rows = recipe(script)
    assert text["data"]["train"] == "TRAIN_DATA.parquet"
    assert text["model"]["name"] == "path/to/the/model"
    assert rows["(data.train)"].learns
    assert rows["(model.name)"].learns
    (tmp_path / "recipe.yaml").write_text(recipe_text(convert_run(read_run(tmp_path / "run.sh"))))
    assert "train: TRAIN_DATA.parquet  # not known: write it here" in (tmp_path / "recipe.yaml").read_text()
    run = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml"), "model.name=tiny", "train.steps=1"])
    assert str(run.exception) == "data.train: TRAIN_DATA.parquet: no such file"


ASYNC = "verl.experimental.fully_async_policy.fully_async_main"


def test_verls_asynchronous_trainer_learns_in_rounds(recipe):
    words = f"data.train_batch_size=0 data.gen_batch_size=1 {ROLLOUT}.n=16 {ACTOR}.ppo_mini_batch_size=32"
    words += " rollout.total_rollout_steps=51200 rollout.nnodes=1 async_training.require_batches=2"
    words += f" async_training.trigger_parameter_sync_step=8 {ACTOR}.optim.lr_warmup_steps=20"
    script = verl(words, "async_training.staleness_threshold=0", module=ASYNC)
    text, rows = recipe(script.replace("trainer.total_training_steps=100", ""))
    # 8 rounds of 2 × 32 prompts between two synchronisations; 20 rounds of warm-up are 2.5 of these.
    assert (text["sampling"]["prompts_per_step"], text["train"]["mini_batches"]) == (512, 16)
    assert (text["train"]["steps"], text["train"]["warmup_steps"]) == (100, 3)
    assert not [row for row in rows.values() if row.learns]
    _, rows = recipe(verl(words, "async_training.staleness_threshold=0.5", module=ASYNC))
    assert [row.key for row in rows.values() if row.learns] == ["async_training.staleness_threshold"]
    _, rows = recipe(verl(f"{ROLLOUT}.n=8", module="verl.experimental.one_step_off_policy.main_ppo"))
    assert [row.key for row in rows.values() if row.learns] == ["(trainer)"]


def test_one_sample_per_prompt_is_compared_with_other_prompts(recipe):
    text, rows = recipe(verl(f"{ROLLOUT}.n=1"))
    assert (text["sampling"]["group_size"], text["sampling"]["dynamic"]) == (1, False)
    assert text["algo"]["advantage"] == "reinforce++"
    assert rows[f"{ROLLOUT}.n"].learns
    # With a critic, one sample is enough.
    text, rows = recipe(verl(f"{ROLLOUT}.n=1").replace("grpo", "gae"))
    assert text["algo"]["advantage"] == "gae"
    assert not rows[f"{ROLLOUT}.n"].learns


def test_a_token_budget_holds_one_sample(recipe):
    words = (
        f"{ROLLOUT}.n=8 data.max_prompt_length=2048 data.max_response_length=8192 {ACTOR}.ppo_max_token_len_per_gpu="
    )
    text, rows = recipe(verl(f"{words}2560"))
    row = rows[f"{ACTOR}.ppo_max_token_len_per_gpu"]
    assert text["train"]["token_budget"] == 10240
    assert (row.status, row.learns) == ("differs", False)
    assert "2560 tokens do not hold one sample of up to 10240" in row.note
    assert recipe(verl(f"{words}20480"))[0]["train"]["token_budget"] == 20480


TWO = "trl grpo --model_name_or_path m --dataset_name d --num_processes 1 --beta {}\n"


def test_of_two_training_commands_one_is_chosen_and_the_row_says_so(recipe, tmp_path):
    text, rows = recipe(TWO.format(0.1) + TWO.format(0.2))
    assert text["algo"]["kl_coef"] == 0.1
    assert (rows["(command)"].value, rows["(command)"].learns) == ("1 of 2", True)
    path = str(tmp_path / "run.sh")
    result = CliRunner().invoke(app, ["convert", path, "--command", "2"])
    assert "kl_coef: 0.2" in result.stdout
    assert "(command)" not in result.stderr
    with pytest.raises(UserError, match="--command 3: it has 2 training commands"):
        read_run(tmp_path / "run.sh", 3)
    assert "(command)" not in recipe(TWO.format(0.1) * 2)[1]


def test_the_arguments_of_a_function_are_not_left_out(recipe):
    call = verl(f"{ROLLOUT}.n=8")
    _, rows = recipe(f'train() {{\n{call} "$@"\n}}\ntrain {ROLLOUT}.n=4\n')
    assert (rows["(arguments)"].learns, rows["(arguments)"].note) == (
        True,
        "it is known only where the function is called",
    )
    assert "(arguments)" not in recipe(f'{call} "$@"\n')[1]


def test_a_file_of_settings_has_no_commands_to_choose_from(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_files: a.parquet}\nactor_rollout_ref: {rollout: {n: 8}}\n")
    result = convert_run(read_run(path))
    assert "data.train_files" in [row.key for row in result.rows]
    assert "(command)" not in [row.key for row in result.rows]


def test_icepop_has_two_bounds(recipe):
    prefix = "algorithm.rollout_correction"
    text, rows = recipe(verl(f"{ROLLOUT}.n=8 {prefix}.rollout_is=token {prefix}.rollout_is_threshold=0.5_4.0"))
    algo = text["algo"]
    assert (algo["importance_cap"], algo["importance_floor"], algo["importance_mode"]) == (4.0, 0.5, "mask")
    assert algo["proximal"] == "recomputed"
    row = rows[f"{prefix}.rollout_is_threshold"]
    assert (row.status, row.here) == ("same", "algo.importance_floor: 0.5, algo.importance_cap: 4")
    # Without weights it is not read.
    text, rows = recipe(verl(f"{ROLLOUT}.n=8 {prefix}.rollout_is_threshold=0.5_4.0"))
    assert "importance_cap" not in text["algo"]
    assert rows[f"{prefix}.rollout_is_threshold"].status == "default here"
    with pytest.raises(UserError, match=f"{prefix}.rollout_is_threshold: expected a positive number, or two as in"):
        recipe(verl(f"{ROLLOUT}.n=8 {prefix}.rollout_is=token {prefix}.rollout_is_threshold=low_4.0"))


def test_with_bypass_mode_the_ratio_is_relative_to_the_engine(recipe):
    prefix = "algorithm.rollout_correction"
    text, rows = recipe(verl(f"{ROLLOUT}.n=8 {prefix}.bypass_mode=True {prefix}.rollout_is=token"))
    assert text["algo"]["proximal"] == "behaviour"
    assert "importance_cap" not in text["algo"]
    assert not [row for row in rows.values() if row.learns]
    _, rows = recipe(verl(f"{ROLLOUT}.n=8 {prefix}.bypass_mode=True {prefix}.loss_type=reinforce"))
    assert rows[f"{prefix}.loss_type"].learns


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", verl(f"{ROLLOUT}.n=8 {ACTOR}.policy_loss.loss_mode=gspo")),
        ("run.sh", TWO.format(0).strip() + " --importance_sampling_level sequence"),
        ("a.yaml", "gconfig: {n_samples: 4}\nactor: {path: m, importance_sampling_level: sequence}\n"),
    ],
)
def test_the_ratio_of_a_sequence_is_relative_to_recomputed_log_probabilities(recipe, name, text):
    text, rows = recipe(text, name)
    assert (text["algo"]["loss"], text["algo"]["proximal"]) == ("gspo", "recomputed")
    assert not rows["(algo.proximal)"].learns


def test_null_is_the_librarys_default_or_sets_nothing(recipe):
    text, rows = recipe(
        "data: {train_files: a.parquet, seed: None, train_batch_size: null}\n"
        "actor_rollout_ref: {model: {path: m}, actor: {optim: {lr: null}}, rollout: {n: 8, max_num_seqs: null}}\n"
        "algorithm: {adv_estimator: grpo}\ntrainer: {test_freq: false, total_training_steps: 5}\n",
        "verl.yaml",
    )
    assert "seed" not in text
    assert (text["sampling"]["prompts_per_step"], text["train"]["lr"]) == (1024, 1e-6)
    assert rows["data.seed"].note == "null sets nothing"
    areal = "total_train_steps: null\ntotal_train_epochs: 2\ngconfig: {n_samples: 4, top_k: null}\n"
    text, _ = recipe(f"{areal}train_dataset: {{path: d, batch_size: 10}}\nactor: {{path: m}}\n", "a.yaml", prompts=100)
    assert text["train"]["steps"] == 20


def test_areal_evaluates_on_another_split_of_the_same_data(recipe):
    areal = (
        "gconfig: {{n_samples: 4}}\nactor: {{path: m}}\ntrain_dataset: {{path: {0}}}\nvalid_dataset: {{path: {1}}}\n"
    )
    data = recipe(areal.format("openai/gsm8k", "openai/gsm8k"), "a.yaml")[0]["data"]
    assert data["train"] == {"source": "openai/gsm8k", "name": "main"}
    assert data["eval"] == {"source": "openai/gsm8k", "name": "main", "split": "test"}
    data = recipe(areal.format("a/b", "c/d"), "a.yaml")[0]["data"]
    assert (data["train"], data["eval"]) == ("a/b", "c/d")


def test_updates_that_do_not_divide_a_step_are_as_many_as_divide_it(recipe):
    areal = (
        "gconfig: {n_samples: 4}\ntrain_dataset: {path: d, batch_size: 10}\nactor: {path: m, ppo_n_minibatches: 4}\n"
    )
    text, rows = recipe(areal, "a.yaml")
    assert text["train"]["mini_batches"] == 5
    assert rows["actor.ppo_n_minibatches"].learns


SKY = """
envs: {MODEL: Qwen/Qwen3-8B}
setup: pip install verl
run: |
  if [ "$SKYPILOT_NODE_RANK" == "0" ]; then
    python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=$MODEL \\
      algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8
  fi
"""


def test_the_command_in_a_file_of_skypilot_is_read(recipe, tmp_path, monkeypatch):
    text, _ = recipe(SKY, "sky.yaml")
    assert (text["model"]["name"], text["sampling"]["group_size"]) == ("Qwen/Qwen3-8B", 8)
    # A file that the command names lies below the directory that the command is run in.
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "c.yaml").write_text(
        "gconfig: {n_samples: 4}\nactor: {path: m}\ntrain_dataset: {path: d}\n"
    )
    sky = "run: python3 examples/rl.py --config examples/c.yaml train_dataset.batch_size=4 cluster.n_nodes=$N\n"
    text, rows = recipe(sky, "examples/sky.yaml")
    assert (text["sampling"]["prompts_per_step"], text["sampling"]["group_size"]) == (4, 4)
    assert not rows["cluster.n_nodes"].learns


def test_ms_swift_with_megatron_counts_completions_in_the_global_batch(recipe):
    script = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 --lr 5e-5 "
    script += "--global_batch_size 64 --micro_batch_size 2 --steps_per_generation 2 --train_iters 100 --min_lr 5e-6 "
    text, rows = recipe(script + "--tuner_type full --reward_funcs accuracy --tensor_model_parallel_size 2 --finetune")
    assert (text["sampling"]["prompts_per_step"], text["train"]["mini_batches"], text["train"]["steps"]) == (16, 2, 50)
    assert (text["train"]["lr"], round(text["train"]["min_lr_share"], 6)) == (5e-5, 0.1)
    assert not [row for row in rows.values() if row.learns]


def test_megatron_has_defaults_of_its_own(recipe, tmp_path):
    script = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model m --dataset d --train_iters 10"
    text, rows = recipe(script)
    assert ("lora" in text["model"], text["train"]["lr"], text["sampling"]["prompts_per_step"]) == (False, 1e-5, 2)
    text, rows = recipe(f"{script} --train_type lora")
    assert (text["model"]["lora"]["rank"], text["train"]["lr"], "tuner_type" in rows) == (8, 1e-4, False)
    text, rows = recipe(f"{script} --steps_per_generation 2 --lr_warmup_iters 5")
    assert (text["train"]["warmup_steps"], rows["lr_warmup_iters"].here) == (3, "train.warmup_steps: 3")
    # A file for Ray has sections, also where a command names it.
    (tmp_path / "ray.yaml").write_text(
        "model: m\ntrain: {tuner_type: lora, lora_rank: 4, gpus: 8}\nrollout: {gpus: 8}\n"
    )
    text, rows = recipe(f"{script} --use_ray --config ray.yaml")
    assert (text["model"]["lora"]["rank"], rows["lora_rank"].here) == (4, "model.lora.rank: 4")


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("run.sh", "trl grpo --num_processes 1 --num_generations 8", " --max_prompt_length 64"),
        ("run.sh", "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model m", " --max_length 64"),
        ("a.yaml", "gconfig: {n_samples: 4}\ntrain_dataset: {path: d, batch_size: 4", ", max_length: 64"),
    ],
)
def test_prompts_without_a_limit_have_a_row(recipe, name, text, limit):
    end = "}\nactor: {path: m}\n" if name == "a.yaml" else ""
    assert recipe(text + end, name)[1]["(prompt length)"].here == "data.max_prompt_tokens: 1024, the default"
    written, rows = recipe(text + limit + end, name)
    assert (written["data"]["max_prompt_tokens"], "(prompt length)" in rows) == (64, False)


def test_the_fewest_processes_that_give_whole_groups(recipe):
    script = "trl grpo --model_name_or_path m --dataset_name d --num_generations 8 --per_device_train_batch_size 4"
    text, rows = recipe(script)
    assert text["sampling"]["prompts_per_step"] == 1
    row = rows["per_device_train_batch_size"]
    assert row.learns
    assert "on 2 processes, the fewest that fit; --processes sets them" in row.note
    assert recipe(script, processes=8)[0]["sampling"]["prompts_per_step"] == 4


@pytest.mark.parametrize(
    ("launcher", "prompts", "known"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=4", 8, True),
        ("torchrun --nproc-per-node 4", 4, True),
        ("torchrun --nnodes $N --nproc_per_node 4", 1, False),
        ("torchrun --nproc_per_node=gpu", 1, False),
        ("accelerate launch --num_machines 2 --num_processes 4", 4, True),
    ],
)
def test_torchrun_counts_processes_per_node(recipe, launcher, prompts, known):
    script = f"{launcher} grpo.py --model_name_or_path m --dataset_name d --reward_funcs accuracy --max_steps 9 "
    text, rows = recipe(f"{script} --num_generations 8 --per_device_train_batch_size 8")
    assert text["sampling"]["prompts_per_step"] == prompts
    assert rows["num_processes"].learns is rows["per_device_train_batch_size"].learns is not known


def test_weights_of_reward_models_come_after_those_of_functions(recipe):
    script = "NPROC_PER_NODE=1 swift rlhf --rlhf_type grpo --model m --dataset d --per_device_train_batch_size 8 "
    text, rows = recipe(script + "--reward_funcs accuracy --reward_model a b --reward_weights 0.5 1 1")
    assert text["reward"]["verifier"] == [{"verifier": "math", "weight": 0.5}, "model:a", "model:b"]
    assert not rows["reward_model"].learns
    text, rows = recipe(script + "--reward_model a")
    assert text["reward"]["verifier"] == "model:a"
    script = "trl grpo --model_name_or_path m --dataset_name d --num_generations 8 --num_processes 1 "
    text, rows = recipe(script + "--reward_funcs accuracy_reward org/rm --reward_model_name_or_path a")
    assert text["reward"]["verifier"] == ["model:a", "math", "model:org/rm"]
    assert not rows["reward_model_name_or_path"].learns


@pytest.mark.parametrize(
    ("file", "verifier", "learns"),
    [
        ("data/gsm8k/train.parquet", "dapo_rl.rewards.by_source:by_source", False),
        ("data/math/train.parquet", "dapo_rl.rewards.by_source:by_source", False),
        ("[gsm8k/train.parquet,dapo-math-17k.parquet]", "dapo_rl.rewards.by_source:by_source", False),
        ("dapo-math-17k.parquet", "math", False),
        ("mine.parquet", "dapo_rl.rewards.by_source:by_source", True),
    ],
)
def test_verls_scoring_by_data_source_has_a_row(recipe, file, verifier, learns):
    text, rows = recipe(verl(f"{ROLLOUT}.n=8 data.train_files={file}"))
    assert text.get("reward", {"verifier": "math"})["verifier"] == verifier
    assert rows["(data_source)"].learns == learns
    text, rows = recipe(verl(f"{ROLLOUT}.n=8 data.train_files={file} custom_reward_function.path=r.py"))
    assert text["reward"]["verifier"] == "r.py:compute_score"
    assert "(data_source)" not in rows


IRRELEVANT = [
    *("model_engine=megatron", "rollout.nnodes=2", "rollout.n_gpus_per_node=8", "skip.rollout.enable=True"),
    *(f"{ACTOR}.model_engine=x", f"{ACTOR}.engine.tp=2", f"{ROLLOUT}.seed=1", f"{ROLLOUT}.full_determinism=True"),
    *("actor_rollout_ref.model.trust_remote_code=True", "data.trust_remote_code=True", "trainer.worker_env.A=b"),
    f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
    *("ray_kwargs.ray_init.num_cpus=8", "actor@actor_rollout_ref.actor=megatron", "--config-name=ppo_megatron_trainer"),
    *("actor_rollout_ref.model.lora.merge=True", "algorithm.rollout_correction.bypass_mode=False"),
]  # fmt: skip
RELEVANT = [
    *(f"{ROLLOUT}.enable_rollout_routing_replay=True", f"{ACTOR}.router_replay.mode=R2", "--config-name=mine"),
    "actor_rollout_ref.model.mtp.enable_train=True",
    *("data.shuffle=False", f"{ACTOR}.qat.enable=True", f"+{ACTOR}.optim.override_optimizer_config.x=1"),
]  # fmt: skip


def test_settings_that_do_not_affect_learning_raise_no_alarm(recipe):
    for word in IRRELEVANT:
        _, rows = recipe(verl(f"{ROLLOUT}.n=8 {word}"))
        assert not [row for row in rows.values() if row.learns], word
    for word in RELEVANT:
        _, rows = recipe(verl(f"{ROLLOUT}.n=8 {word}"))
        assert len([row for row in rows.values() if row.learns]) == 1, word
