"""Commands that trials run."""

from __future__ import annotations

import sys

import pytest

from suites.trials import run_command


def test_a_failed_trial_is_not_measured() -> None:
    assert run_command([sys.executable, "-c", "import suites, fp8bench; print(1)"]).stdout == "1\n"
    with pytest.raises(RuntimeError, match="ended with 3: why"):
        run_command([sys.executable, "-c", "import sys; sys.stderr.write('why'); sys.exit(3)"])
