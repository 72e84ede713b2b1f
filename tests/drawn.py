"""How properties are tested: a few examples, the same each time, or many new ones in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

FUZZ = int(os.environ.get("FUZZ", "0"))


def drawn(examples):
    """Settings for so many examples, or for FUZZ times as many."""
    return settings(
        max_examples=examples * FUZZ or examples,
        deadline=None,
        derandomize=not FUZZ,
        suppress_health_check=[HealthCheck.too_slow],
    )
