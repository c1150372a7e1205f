"""Verifiers, which turn responses into verdicts: math, exact, reasoning-gym's scorers, and user-defined functions."""

from dapo_rl.base.load import load_function
from dapo_rl.rewards.answers import answers_equal, extract_answer, normalize_answer
from dapo_rl.rewards.build import as_verifier, build_verifier
from dapo_rl.rewards.combined import CombinedVerifier
from dapo_rl.rewards.custom import CustomVerifier
from dapo_rl.rewards.exact import ExactVerifier
from dapo_rl.rewards.gym import GymVerifier
from dapo_rl.rewards.math import MathVerifier
from dapo_rl.rewards.pool import VerifierPool

__all__ = [
    "CombinedVerifier",
    "CustomVerifier",
    "ExactVerifier",
    "GymVerifier",
    "MathVerifier",
    "VerifierPool",
    "answers_equal",
    "as_verifier",
    "build_verifier",
    "extract_answer",
    "load_function",
    "normalize_answer",
]
