"""Environments: conversations of several turns that end in a verdict."""

from dapo_rl.envs.one_turn import OneTurn

__all__ = ["OneTurn"]
