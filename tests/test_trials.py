"""Commands that trials run."""

from __future__ import annotations

import sys

import pytest

from suites.trials import ran


def test_a_failed_trial_is_not_measured() -> None:
    assert ran([sys.executable, "-c", "import suites, fp8bench; print(1)"]).stdout == "1\n"
    with pytest.raises(RuntimeError, match="ended with 3: why"):
        ran([sys.executable, "-c", "import sys; sys.stderr.write('why'); sys.exit(3)"])
