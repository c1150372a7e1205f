from datasets import load_dataset
from trl import GRPOTrainer


def reward_unique(completions, **kwargs):
    return [len(set(completion.lower())) for completion in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    reward_funcs=reward_unique,
)
trainer.train()
