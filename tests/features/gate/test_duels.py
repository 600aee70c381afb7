"""The gate over real duels: a regression planted in a repository's commit, found in runs, confirmed side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from junitparser import JUnitXml

from tests.commands import git
from tests.counts import SLOW
from tests.features.gate.paced import PacedFolder


@pytest.fixture(scope="module", params=SLOW)
def repository(tmp_path_factory: pytest.TempPathFactory) -> PacedFolder:
    """Two commits, measured one after the other; the second takes three times as long. A gate has held them apart."""
    found = PacedFolder(tmp_path_factory.mktemp("repository"))
    for steps in (20_000, 60_000):
        found.commit(steps)
        found.measure("--quick")
    return found


@pytest.fixture(scope="module")
def duel(repository: PacedFolder) -> Path:
    """With the commit that the baseline is of: code 1, and the duel is kept."""
    done = repository.run("gate", "HEAD~1", "HEAD", "--junit", "gated.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in duel" in done.stdout and "it was so again" in done.stdout
    (path,) = (repository.store / "duels").glob("*.jsonl")
    return path


def test_commits_are_settled_by_a_duel(repository: PacedFolder, duel: Path) -> None:
    xml = JUnitXml.fromfile(str(repository.path / "gated.xml"))
    (failure,) = (result for suite in xml for case in suite for result in case.result if result._tag == "failure")
    assert xml.failures == 1
    assert all(words in failure.text for words in ("first look", "cross-run", "second look", "paired"))


def test_a_duel_of_another_commit_cannot_be_repeated(repository: PacedFolder, duel: Path) -> None:
    """Nor has one that was cut off any result, which is code 3."""
    git(repository.path, "commit", "-q", "--allow-empty", "-m", "later")
    done = repository.run("gate", "--duel", str(duel))
    assert done.returncode == 1 and "the duel was of commit" in " ".join(done.stdout.split())
    duel.with_name("99990101T000000Z-cut.jsonl").write_text(duel.read_text().splitlines()[0] + "\n")
    done = repository.run("gate", "--duel", "last")
    assert done.returncode == 3 and "the duel measured nothing" in done.stdout
