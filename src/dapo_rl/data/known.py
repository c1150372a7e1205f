"""Where to get the files that the recipes of the package read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownFile:
    columns: str
    source: str
    """Its data set on the Hub."""
    parameters: tuple[tuple[str, str], ...] = ()

    def how_to_get(self, key: str) -> str:
        """The settings that read it from the Hub, and what a file of one's own must contain."""
        words = [f"{key}={self.source}", *(f"{key}.{name}={value}" for name, value in self.parameters)]
        return (
            f"{' '.join(words)} reads it from the Hub (pip install 'dapo-rl[datasets]'); or put a file with the "
            f"columns {self.columns} there"
        )


_MAIN = ("name", "main")

KNOWN_FILES = {
    "gsm8k-train.jsonl": KnownFile("question and answer", "openai/gsm8k", (_MAIN,)),
    "gsm8k-test.jsonl": KnownFile("question and answer", "openai/gsm8k", (_MAIN, ("split", "test"))),
    "aime-2024.parquet": KnownFile("prompt and reward_model.ground_truth", "BytedTsinghua-SIA/AIME-2024"),
}
