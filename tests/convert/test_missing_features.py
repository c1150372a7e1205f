"""A run that needs a feature that is missing here is refused by the feature's name."""

import pytest

from dapo_rl.convert.unsupported import reads_images
from dapo_rl.errors import UserError

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
ROLLOUT = "actor_rollout_ref.rollout"
SWIFT = "swift rlhf --rlhf_type grpo --dataset d --num_generations 8 --per_device_train_batch_size 8 "
TAUGHT = "distillation.enabled=True distillation.teacher_models.a.model_path=t "
AREAL = "gconfig: {n_samples: 4}\ntrain_dataset: {path: d, batch_size: 16}\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", VERL + "data.image_key=images", "images (data.image_key=images): not supported; dapo-rl trains text"),
        ("a.sh", VERL + "data.video_key=clips", "images (data.video_key=clips)"),
        ("a.sh", VERL + "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "is a vision-language model): not"),
        ("a.sh", VERL + 'actor_rollout_ref.model.path="$ROOT/Qwen3-VL-8B"', "images (actor_rollout_ref.model.path="),
        ("a.sh", VERL.replace("trainer", "experimental.vla"), "vision-language-action models ((trainer)=vla)"),
        ("a.sh", VERL + "distillation.enabled=True", "by another loss (distillation with no model_path of a teacher)"),
        ("a.sh", VERL + TAUGHT + "distillation.distillation_loss.use_policy_gradient=False",
         "by another loss (distillation.distillation_loss.use_policy_gradient=False, distillation.distillation_loss."),
        ("a.sh", VERL + TAUGHT + "distillation.teacher_models.b.model_path=c", "(distillation with several teachers)"),
        ("a.yaml", "data: {image_key: pictures}\nactor_rollout_ref: {rollout: {n: 8}}\n", "images (data.image_key="),
        ("a.sh", SWIFT + "--model OpenGVLab/InternVL3-8B", "images (model=OpenGVLab/InternVL3-8B is a vision-language"),
        ("a.sh", "swift rlhf --rlhf_type gkd --model m --dataset d", "distillation by another loss (rlhf_type=gkd)"),
        ("a.sh", "python trl/scripts/rloo.py --model_name_or_path m --dataset_name d", "TRL's RLOO trainer (rloo.py)"),
        ("a.sh", "trl rloo --model_name_or_path m --dataset_name d", "TRL's RLOO trainer (trl rloo)"),
        ("a.yaml", AREAL + "actor: {path: llava-hf/llava-1.5-7b-hf}", "images (actor.path=llava-hf/llava-1.5-7b-hf"),
        ("a.yaml", AREAL + "teacher: {path: t}", "distillation by another loss (teacher.path=t)"),
        ("a.yaml", "train_dataset: {path: d, type: sft}\nactor: {path: m}", "supervised fine-tuning (train_dataset."),
        ("a.yaml", "train_dataset: {path: d, type: rw}\nactor: {path: m}", "training a reward model"),
        ("a.yaml", "train_dataset: {path: d, type: dpo}\nactor: {path: m}", "learning from preferences"),
        ("a.yaml", "num_generations: 8\nrollout_func: mine.sample\n", "rollout functions (rollout_func=mine.sample)"),
        ("a.yaml", "num_generations: 8\nmodel_name_or_path: google/paligemma-3b\n", "images (model_name_or_path="),
    ],
)  # fmt: skip
def test_a_missing_feature_is_named(converted, tmp_path, name, text, said):
    with pytest.raises(UserError) as caught:
        converted(text, name)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / name}: ")
    assert said in line
    assert "not supported" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", VERL + "data.image_key=null distillation.enabled=False"),
        ("a.sh", VERL + f"{ROLLOUT}.multi_turn.enable=False {ROLLOUT}.agent.num_workers=4"),
        ("a.sh", VERL + f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"),
        ("a.yaml", "data: {image_key: images, video_key: videos}\nactor_rollout_ref: {rollout: {n: 8}}\n"),
        ("a.yaml", AREAL + "max_turns: null\nactor: {is_critic: false}"),
    ],
)
def test_a_feature_that_is_off_or_a_default_of_a_whole_file_is_none(converted, name, text):
    converted(text, name)


def test_models_that_read_images_are_known_by_name():
    for name in ("Qwen/Qwen2-VL-7B", "qwen25vl", "Qwen3-VL-30B-A3B-Instruct", "OpenGVLab/InternVL2_5-8B", "llava-v1.6",
                 "Llama-3.2-11B-Vision", "MiniCPM-V-2_6", "GLM-4.1V-9B", "deepseek-vl2", "HuggingFaceTB/SmolVLM2",
                 "Qwen2.5-Omni-7B", "Phi-4-multimodal-instruct", "openvla-7b", "AIDC-AI/Ovis2-8B"):  # fmt: skip
        assert reads_images(name), name
    for name in ("Qwen/Qwen3-8B", "models/vl/Qwen3-8B", "meta-llama/Llama-3.1-8B", "GLM-4-9B", "MiniCPM3-4B", "vllm",
                 "deepseek-v3", "openai/gpt-oss-20b", "Novison-7B"):  # fmt: skip
        assert not reads_images(name), name
