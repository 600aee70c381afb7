"""A folder with a suite whose speed a neighbouring module sets; commands run there as separate processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fp8bench.store.runs.listing import run_files
from tests.commands import PROGRAM, environment, git

SUITE = """
from fp8bench.suites import Work, Workload, workloads
from pace import FAILS, STEPS


@workloads.register("paced")
class Paced(Workload):
    name = "paced"
    summary = "as slow as the library beside it"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work()

    def prepare(self, setup):
        if setup.case.precision == FAILS:
            raise RuntimeError("planted")
        return STEPS if setup.case.precision == "bf16" else 20_000

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))
"""


class PacedFolder:
    """A folder with a suite whose bf16 runs as many steps as pace.py says.

    A slower pace may be committed, or stay out of what digests see.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = path / ".fp8bench"
        (path / "mine.py").write_text(SUITE)

    def pace(self, steps: int, fails: str = "") -> None:
        (self.path / "pace.py").write_text(f"STEPS, FAILS = {steps}, {fails!r}\n")

    def commit(self, steps: int) -> str:
        self.pace(steps)
        if not (self.path / ".git").exists():
            (self.path / ".gitignore").write_text(".fp8bench\n__pycache__\n*.xml\n")
            git(self.path, "init", "-q")
        git(self.path, "add", ".")
        git(self.path, "commit", "-q", "-m", f"{steps} steps")
        return git(self.path, "rev-parse", "HEAD")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words],
            cwd=self.path,
            text=True,
            capture_output=True,
            timeout=280,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment(GIT_CEILING_DIRECTORIES=str(self.path.parent)),
        )

    def measure(self, *words: str) -> str:
        """Measures a run of the current state; returns its id."""
        done = self.run("suite", "./mine.py", "--dtypes", "fp32,bf16", "--no-report", *words)
        assert done.returncode in (0, 3), done.stderr
        return next(run_files(self.store)).stem.rpartition("-")[2]
