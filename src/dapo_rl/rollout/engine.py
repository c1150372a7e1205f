"""The earlier name of `dapo_rl.engines.protocol`, for engines that users wrote."""

from dapo_rl.engines.protocol import Completion, Engine, Request, SamplingParams

__all__ = ["Completion", "Engine", "Request", "SamplingParams"]
