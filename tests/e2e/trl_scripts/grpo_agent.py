"""The shape of examples/scripts/grpo_agent.py: a tool that queries a database, and rewards that read its results."""

import sqlite3

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


def query(sql: str) -> list[tuple]:
    """
    Runs a read-only SQL query.

    Args:
        sql: The query.

    Returns:
        The rows that it finds.
    """
    connection = sqlite3.connect("file:biogrid.db?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def evidence_reward(completions, answer, **kwargs):
    rewards = []
    for completion, truth in zip(completions, answer, strict=True):
        queries = [
            call["function"]["arguments"].get("sql", "") for turn in completion for call in turn.get("tool_calls") or []
        ]
        found = [turn["content"] for turn in completion if turn["role"] == "tool"]
        rewards.append(1.0 * ("where" in " ".join(queries)) + any(truth in each for each in found))
    return rewards


def structure_reward(completions, **kwargs):
    return [0.1 if any(turn.get("tool_calls") for turn in completion) else 0.0 for completion in completions]


def format_example(example):
    return {"prompt": [{"role": "user", "content": f"Ask the database. {example['question']}"}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()

    genes = load_dataset("qgallouedec/biogrid", split="train").to_pandas()
    connection = sqlite3.connect("biogrid.db")
    genes.to_sql("interactions", connection, if_exists="replace", index=False)
    connection.close()

    dataset = load_dataset("qgallouedec/biogrid_qa", split="train")
    dataset = dataset.filter(lambda example: example["question"].startswith("Does the gene "))
    dataset = dataset.map(format_example, remove_columns=["question"])

    training_args.chat_template_kwargs = {"enable_thinking": False}

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        train_dataset=dataset,
        eval_dataset=None,
        tools=[query],
        reward_funcs=[structure_reward, evidence_reward],
        args=training_args,
    )
    trainer.train()

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
