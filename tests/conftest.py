"""What holds for all tests: no deadlines, nothing compiled unasked; those that need a GPU are skipped without one."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong. CI looks at the same examples each time; elsewhere new ones are tried.
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("house")

# Compiling takes seconds a quantiser. Tests of compiling take it out of their environment.
os.environ["FP8BENCH_QUANTISERS"] = "eager"


@pytest.fixture(scope="module", autouse=True)
def _what_is_here_stays() -> None:
    """A bench in this process collects garbage between cases, as a worker does: seconds a time, once thousands of tests
    have left millions of objects. A worker looks at none of what was there when it began, and neither does this."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Asks torch only when a test is marked, so that a run without such tests never imports it for this."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none on this machine")
