"""The earlier name of `dapo_rl.engines.protocol`, for engines that users wrote."""

from dapo_rl.engines.protocol import Completion, Engine, Request, SamplingParams
from dapo_rl.types import Trajectory as Begun

__all__ = ["Begun", "Completion", "Engine", "Request", "SamplingParams"]
