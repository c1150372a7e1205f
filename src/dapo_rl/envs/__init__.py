"""Environments: the other half of an episode. They answer the policy's turns, and end it with a reward."""

from dapo_rl.envs.one_turn import AtHand, OneTurn
from dapo_rl.envs.protocol import AssistantTurn, Environment, Message, Observation, Opening, ToolCall, ToolSchema

__all__ = [
    "AssistantTurn",
    "AtHand",
    "Environment",
    "Message",
    "Observation",
    "OneTurn",
    "Opening",
    "ToolCall",
    "ToolSchema",
]
