"""The environment of TRL's documentation, with the import and the class of the trainer changed.

python examples/trl_environment.py                    # the embedded model, in seconds; it was not trained to call tools
python examples/trl_environment.py Qwen/Qwen3-0.6B
"""

import random
import sys

from trl import GRPOConfig

from dapo_rl import DAPOTrainer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "tiny"
ARGS, CONFIG = {"chat_template_kwargs": {"enable_thinking": False}}, None
if MODEL == "tiny":  # it calls no tools and gets no rewards, so groups without signal fill the batch
    ARGS = {"use_cpu": True, "bf16": False, "max_completion_length": 32}
    CONFIG = {"sampling.on_cap": "fill", "sampling.cap": 2}


class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


if __name__ == "__main__":
    trainer = DAPOTrainer(
        model=MODEL,
        args=GRPOConfig(max_steps=2, **ARGS),
        environment_factory=IncrementEnv,
        config=CONFIG,
    )
    trainer.train()
