"""How long to look: `FUZZ=50 pytest tests/fuzz` tries fifty times as many examples."""

import os

from hypothesis import HealthCheck, settings


def fuzz(examples):
    examples *= int(os.environ.get("FUZZ", "1"))
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
