"""The shape of examples/scripts/grpo_continuous_batching.py: GSM8K, a reward function, LoRA."""

import re

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

SYSTEM_PROMPT = "Solve the problem step by step. The last line is: #### <number>"


def correctness_reward(completions, reference_answer, **kwargs):
    rewards = []
    for completion, reference in zip(completions, reference_answer, strict=False):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = re.search(r"(?:####|Answer:)\s*([\d,]+)", text)
        rewards.append(1.0 if found and found[1].replace(",", "") == reference else 0.0)
    return rewards


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()

    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": dtype,
    }
    dataset = load_dataset(
        script_args.dataset_name or "openai/gsm8k",
        script_args.dataset_config or "main",
        split=script_args.dataset_train_split,
    )

    def make_conversation(example):
        return {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": example["question"]},
            ],
            "reference_answer": example["answer"].split("####")[-1].strip().replace(",", ""),
        }

    dataset = dataset.map(make_conversation, remove_columns=dataset.column_names)

    training_args.use_transformers_continuous_batching = True
    if training_args.transformers_continuous_batching_config is None:
        training_args.transformers_continuous_batching_config = {"use_cuda_graph": False}

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=correctness_reward,
        args=training_args,
        train_dataset=dataset,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
