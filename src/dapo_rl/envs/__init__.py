"""Environments: the other half of an episode. They answer the policy's turns, and end it with a verdict."""

from dapo_rl.envs.one_turn import AtHand, OneTurn

__all__ = ["AtHand", "OneTurn"]
