"""`fp8bench gate` end to end: exit codes and files, over stores made by hand, workers that measure, and duels."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from fp8bench.cli.main import build_parser
from fp8bench.features.gate.judging import SecondMeasurement
from fp8bench.features.gate.stored_runs import SuspectRemeasurer
from fp8bench.model import Record, Run, Scalar, Status
from fp8bench.store.runs.listing import run_files
from tests.commands import Say, git, only_sentence, unfolding
from tests.counts import SLOW, for_each
from tests.features.gate.paced import PacedFolder
from tests.histories import commit, history, keep, records, run_at, tree

# These tests are not about a machine that slowed down, nor about noise of a few milliseconds: planted slow-downs are
# far above a factor of five, the limit for noise.
RULES = '"*fp32":\n  time: ignore\n"*bf16":\n  relative_time: {relative: 900%}\n'
FEW, MANY = 20_000, 32 * 20_000


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "gate")


def measured(store: Path, number: int, milliseconds: float = 1.0, status: Status = Status.OK) -> None:
    """Five runs of a commit, 0.5% apart: enough power together with five more."""
    for run in range(5):
        some = tuple(records(milliseconds * (1 + 0.001 * run), status))
        keep(store, run_at(number, number + 1 + run / 10, records=some))


def test_unchanged_runs_pass(store: Path, say: Say) -> None:
    for number in range(2):
        measured(store, number)
    before = tree(store)
    code, out, err = say(commit(0), commit(1))
    assert (code, err) == (0, "") and "no regression" in out and tree(store) == before


def test_a_regression_that_cannot_be_confirmed_here(store: Path, say: Say) -> None:
    measured(store, 0)
    measured(store, 1, 1.5)
    code, out, err = say(commit(0), commit(1), "--junit", "out.xml", "--md", "out.md")
    assert code == 1 and "1 regression" in out and "not measured again" in out and "suspected" in err
    xml = JUnitXml.fromfile("out.xml")
    assert (xml.failures, xml.errors, xml.tests) == (1, 0, 3) and "regression" in Path("out.md").read_text()


def test_suspects_of_each_run_are_measured_again(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def again(_: object, run: Run, cases: set[str]) -> tuple[None, str]:
        asked.append((run.id, cases))
        return None, "not here"

    monkeypatch.setattr(SuspectRemeasurer, "measure_cases", again)
    for number, time in ((0, 1.0), (1, 1.5)):
        others = tuple(replace(one, case=replace(one.case, workload="copy")) for one in records(time))
        for hour, some in ((1, tuple(records(time))), (1.5, others)):
            keep(store, run_at(number, number + hour, records=some))
    assert say(commit(0), commit(1))[0] == 1
    suites = {}
    for run, cases in asked:
        suites[run] = {case.partition("[")[0] for case in cases}
    assert len(asked) == 2 and suites == {"000000c8": {"gemm"}, "000000fa": {"copy"}}


def test_below_ten_percent_a_stored_number_is_a_suspect_only(store: Path, say: Say) -> None:
    history(store, 1.0, 1.08)
    code, out, _ = say(commit(0), commit(1), "--no-rerun")
    assert code == 4 and "1 suspected" in out and "--no-rerun" in out
    command = "fp8bench duel suite gemm --against COMMIT"
    assert f"`{command}`" in " ".join(out.split())
    assert build_parser().parse_args(command.split()[1:]).against == "COMMIT"


@for_each(("times", "code"), [(1.0, 4), (1.5, 1)])
def test_a_gate_that_cannot_see_does_not_pass(tmp_path: Path, say: Say, times: float, code: int) -> None:
    history(tmp_path, 1.0, times)
    ended, out, _ = say(commit(0), commit(1), "--no-rerun", "--store", str(tmp_path), "--junit", "out.xml")
    assert ended == code and "smallest slow-down: at least +" in out and ", threshold +5.0%" in out
    assert ("1 regression" if code == 1 else "cannot tell whether 2 times") in out and "no regression" not in out
    assert code == 1 or "that would have been found is at least +" in " ".join(out.split())
    assert 'name="smallest slow-down" value="at least +' in Path("out.xml").read_text()
    assert JUnitXml.fromfile("out.xml").errors > 0


def test_thresholds_from_a_file(store: Path, say: Say) -> None:
    measured(store, 0)
    measured(store, 1, 1.5)
    Path("wide.yaml").write_text("gemm:\n  '*time': {relative: 60%}\n")
    assert say(commit(0), commit(1), "--no-rerun", "--thresholds", "wide.yaml")[0] == 0
    Path("idle.yaml").write_text("transformer:\n  time: {relative: 60%}\n")
    code, out, err = say(commit(0), commit(1), "--thresholds", "idle.yaml", "--junit", "out.xml")
    assert code == 2 and not out and "matches any of the" in err and not Path("out.xml").exists()
    Path("half.yaml").write_text("gemm:\n  '*time': {relative: 60%}\nmlp:\n  time: ignore\n")
    code, _, err = say(commit(0), commit(1), "--thresholds", "half.yaml")
    assert code == 0 and "half.yaml: 'mlp' 'time' matches no figure" in err


@for_each("facts", [{}, {"imports_sha256": "9"}, {"commit": "f" * 40}])
def test_a_duel_runs_only_for_the_current_code(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Scalar]
) -> None:
    """A duel measures the current tree: for other user code or another commit it would clear the wrong code."""
    monkeypatch.chdir(tmp_path)
    git(Path(), "init", "-q")
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    here = git(Path(), "rev-parse", "HEAD")
    store = Path(".fp8bench")
    old = keep(store, run_at(0, facts={"commit": here}))
    new = keep(store, run_at(1, records=tuple(records(1.5)), facts={"commit": here, **facts}))
    asked = []

    def duel_with_commit(_: object, commit: str, *__: object) -> SecondMeasurement:
        asked.append(commit)
        return SecondMeasurement({}, refused="here is none")

    monkeypatch.setattr(SuspectRemeasurer, "duel_with_commit", duel_with_commit)
    assert say(old.stem, new.stem)[0] == 1
    assert asked == ([] if facts else [here])


def test_a_case_that_failed_or_was_never_measured(store: Path, say: Say) -> None:
    measured(store, 0)
    measured(store, 1, status=Status.FAILED)
    code, out, _ = say(commit(0), commit(1), "--junit", "out.xml")
    assert code == 3 and "1 failed" in out and JUnitXml.fromfile("out.xml").errors == 1
    measured(store, 2, status=Status.FAILED)
    assert say(commit(1), commit(2))[0] == 0
    cut = run_at(3, 3.9, finished=False)
    keep(store, replace(cut, records=cut.records[:1]))
    code, out, _ = say(commit(0), commit(3), "--no-rerun")
    assert code == 3 and "was interrupted" in out
    measured(store, 3)
    assert say(commit(0), commit(3), "--no-rerun")[0] == 0


def changed(**changes: Any) -> tuple[Record, ...]:
    return tuple(replace(record, **changes) for record in records())


@for_each(
    ("runs", "code", "expected"),
    [
        ([run_at(1)], 4, "the baseline is missing"),
        ([run_at(1), run_at(0, records=())], 4, "no case in common"),
        (
            [
                run_at(1),
                run_at(
                    0, records=tuple(replace(record, case=replace(record.case, version="0")) for record in records())
                ),
            ],
            4,
            "the work changed",
        ),
        ([run_at(1), run_at(0, facts={"asv_cpu": "X"})], 4, "asv_cpu was X and"),
        ([run_at(1), run_at(0, facts={"threads": 4})], 4, "threads was 4 and"),
        ([run_at(1), run_at(0, facts={"torch": "9.9.9"})], 4, "torch was 9.9.9 and"),
        ([run_at(0), run_at(1, records=())], 3, "no case of"),
        (
            [run_at(0), run_at(1, records=changed(status=Status.SKIPPED, timing=None, is_reference=False))],
            3,
            "no case of",
        ),
    ],
)
def test_a_gate_without_figures_does_not_pass(
    tmp_path: Path, say: Say, runs: list[Run], code: int, expected: str
) -> None:
    for run in runs:
        keep(tmp_path, run)
    ended, out, _ = say(commit(0), commit(1), "--store", str(tmp_path), "--junit", "out.xml")
    assert ended == code and expected in " ".join(out.split())
    assert JUnitXml.fromfile("out.xml").errors == 1


SIDES = [commit(0), commit(1)]


@for_each(
    ("words", "expected"),
    [
        ([], "nothing was given to judge"),
        (["last"], "1 side was given. Give two"),
        (["a", "b", "c"], "3 sides were given"),
        (["a", "b", "--duel", "last"], "A B and --duel were given"),
        ([commit(0), "nosuch"], "no run 'nosuch'"),
        (["--duel", "nosuch"], "no duel 'nosuch'"),
        (["--duel", "last"], "no duel 'last'"),
        (["1111aaaa", "2222bbbb", "--no-rerun"], "no run '1111aaaa'"),
        (["1111aaaa", "2222bbbb", "--no-rerun"], "no run '2222bbbb'"),
        ([*SIDES, "--thresholds", "none"], "--thresholds none cannot be"),
        ([*SIDES, "--junit", "no/such/file"], "--junit 'no/such/file' cannot be"),
    ],
)
def test_bad_arguments_are_refused(store: Path, say: Say, words: list[str], expected: str) -> None:
    if not store.exists():
        history(store, 1.0, 1.5)
    code, out, err = say(*words)
    assert code == 2 and not out and expected in only_sentence(err)


@pytest.mark.slow
def test_another_run_confirms_or_clears_a_suspect(tmp_path: Path) -> None:
    folder = PacedFolder(tmp_path)
    (tmp_path / "rules.yaml").write_text(RULES)
    sides = []
    for steps in (FEW, MANY):
        folder.pace(steps)
        sides.append(folder.measure("--rounds", "10"))
    for steps, fails, code, failures, told in (
        (MANY, "", 1, 1, ("it was worse again", "measured again in run")),
        (FEW, "", 0, 0, ("cleared", "it was not worse")),
        (FEW, "bf16", 3, 0, ("it failed", "planted")),
    ):
        folder.pace(steps, fails)
        done = folder.run("gate", *sides, "--thresholds", "rules.yaml", "--junit", "out.xml")
        assert done.returncode == code and all(words in done.stdout for words in told), done.stdout + done.stderr
        assert JUnitXml.fromfile(str(tmp_path / "out.xml")).failures == failures
    assert len(list(run_files(folder.store))) == 5


@pytest.fixture(scope="module", params=SLOW)
def repository(tmp_path_factory: pytest.TempPathFactory) -> PacedFolder:
    """Two commits, measured one after the other and gated; the second takes three times as long."""
    found = PacedFolder(tmp_path_factory.mktemp("repository"))
    for steps in (20_000, 60_000):
        found.commit(steps)
        found.measure("--quick")
    return found


@pytest.fixture(scope="module")
def duel(repository: PacedFolder) -> Path:
    """With the commit of the baseline: code 1, and the duel is stored."""
    done = repository.run("gate", "HEAD~1", "HEAD", "--junit", "gated.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in duel" in done.stdout and "it was worse again" in done.stdout
    (path,) = (repository.store / "duels").glob("*.jsonl")
    return path


def test_commits_are_settled_by_a_duel(repository: PacedFolder, duel: Path) -> None:
    xml = JUnitXml.fromfile(str(repository.path / "gated.xml"))
    results = chain.from_iterable(case.result for case in chain.from_iterable(xml))
    (failure,) = (result for result in results if result._tag == "failure")
    assert xml.failures == 1
    assert all(words in failure.text for words in ("first look", "cross-run", "second look", "paired"))


def test_a_duel_of_another_commit_cannot_be_repeated(repository: PacedFolder, duel: Path) -> None:
    git(repository.path, "commit", "-q", "--allow-empty", "-m", "later")
    done = repository.run("gate", "--duel", str(duel))
    assert done.returncode == 1 and "the duel was of commit" in " ".join(done.stdout.split())
    duel.with_name("99990101T000000Z-cut.jsonl").write_text(duel.read_text().splitlines()[0] + "\n")
    done = repository.run("gate", "--duel", "last")
    assert done.returncode == 3 and "the duel measured nothing" in done.stdout
