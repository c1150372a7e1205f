"""The shape of examples/scripts/openenv/echo.py: an environment whose tool echoes a message, with its own reward."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

ASKED = ["Echo 'Hello World!' in the environment.", "Make the environment echo 'Goodbye World!'."]
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in ASKED * 4])


class Server:
    """In place of OpenEnv's client."""

    def step(self, message):
        return message, 0.1 * len(message)


class EchoToolEnv:
    def __init__(self):
        self.client = Server()

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        echoed, self.reward = self.client.step(message)
        return echoed

    def get_reward(self) -> float:
        return self.reward


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=dataset,
    args=GRPOConfig(chat_template_kwargs={"enable_thinking": False}, log_completions=True, logging_steps=2),
    environment_factory=EchoToolEnv,
)
trainer.train()
