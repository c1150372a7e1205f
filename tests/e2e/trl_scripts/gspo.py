"""The shape of examples/scripts/gspo.py: two reward functions, one of which skips rows, and held-out data."""

from datasets import load_dataset
from math_verify import parse, verify
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from trl.rewards import think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()

    train_dataset, eval_dataset = load_dataset("AI-MO/NuminaMath-TIR", split=["train[:5%]", "test[:5%]"])

    def make_conversation(example):
        return {"prompt": [{"role": "user", "content": example["problem"]}]}

    train_dataset = train_dataset.map(make_conversation).remove_columns(["messages", "problem"])
    eval_dataset = eval_dataset.map(make_conversation).remove_columns(["messages", "problem"])

    def accuracy_reward(completions, solution, **kwargs):
        rewards = []
        for completion, text in zip(completions, solution, strict=False):
            gold = parse(text, parsing_timeout=None)
            answer = parse(completion[0]["content"], parsing_timeout=None)
            rewards.append(float(verify(gold, answer, timeout_seconds=None)) if gold else None)
        return rewards

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
