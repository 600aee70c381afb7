"""What holds for all tests: those that need a GPU are skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Asks torch only when a test is marked, so that a run without such tests never imports it for this."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none on this machine")
