"""The gate over real duels: a regression planted in a repository's commit, found in runs, confirmed side by side."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from junitparser import JUnitXml

from tests.commands import PROGRAM, environment, git
from tests.counts import SLOW

SUITE = """
from fp8bench.suites import Work, Workload, workloads
from pace import STEPS


@workloads.register("paced")
class Paced(Workload):
    name = "paced"
    summary = "as slow as the library beside it"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work()

    def prepare(self, setup):
        return STEPS if setup.case.precision == "bf16" else 20_000

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))
"""


class Repository:
    """With a library, a suite that uses it, and commands that run in it."""

    gated: subprocess.CompletedProcess[str]
    duel: Path

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "mine.py").write_text(SUITE)
        (path / ".gitignore").write_text(".fp8bench\n__pycache__\n*.xml\n")
        self.git("init", "-q")

    def git(self, *words: str) -> str:
        return git(self.path, *words)

    def commit(self, steps: int) -> str:
        (self.path / "pace.py").write_text(f"STEPS = {steps}\n")
        self.git("add", ".")
        self.git("commit", "-q", "-m", f"{steps} steps")
        return self.git("rev-parse", "HEAD")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words], cwd=self.path, env=environment(GITHUB_STEP_SUMMARY=""), text=True,
            capture_output=True, timeout=280, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def measure(self) -> None:
        done = self.run("suite", "./mine.py", "--dtypes", "fp32,bf16", "--quick", "--no-report")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=SLOW)
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Two commits, measured one after the other; the second takes three times as long. A gate has held them apart."""
    found = Repository(tmp_path_factory.mktemp("repository"))
    for steps in (20_000, 60_000):
        found.commit(steps)
        found.measure()
    found.gated = found.run("gate", "HEAD~1", "HEAD", "--junit", "gated.xml")
    (found.duel,) = (found.path / ".fp8bench" / "duels").glob("*.jsonl")
    return found


def test_commits_are_settled_by_a_duel(repository: Repository) -> None:
    """With the commit that the baseline is of: code 1, and the duel is kept."""
    done = repository.gated
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in duel" in done.stdout and "it was so again" in done.stdout
    xml = JUnitXml.fromfile(str(repository.path / "gated.xml"))
    (failure,) = (one for suite in xml for case in suite for one in case.result if one._tag == "failure")
    assert xml.failures == 1
    assert all(words in failure.text for words in ("first look", "cross-run", "second look", "paired"))


def test_a_duel_of_another_commit_cannot_be_repeated(repository: Repository) -> None:
    repository.git("commit", "-q", "--allow-empty", "-m", "later")
    done = repository.run("gate", "--duel", str(repository.duel))
    repository.git("reset", "-q", "--hard", "HEAD~1")
    assert done.returncode == 1 and "the duel was of commit" in " ".join(done.stdout.split())


def test_a_duel_that_was_cut_off(repository: Repository) -> None:
    """Its header stands, and no result: code 3."""
    cut = repository.duel.with_name("99990101T000000Z-cut.jsonl")
    cut.write_text(repository.duel.read_text().splitlines()[0] + "\n")
    done = repository.run("gate", "--duel", "last")
    cut.unlink()
    assert done.returncode == 3 and "the duel measured nothing" in done.stdout
