"""`fp8bench gate` end to end: exit codes and files, over stores made by hand and over workers that really measure."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from junitparser import JUnitXml

from fp8bench.cli.main import build_parser
from fp8bench.features.gate import stored_runs as sides_source
from fp8bench.features.gate.judging import SecondLook
from fp8bench.model import Run, Scalar, Status
from fp8bench.store.runs.listing import run_files
from tests.commands import PROGRAM, Say, environment, git, unfolding
from tests.counts import SLOW, for_each
from tests.histories import commit, history, keep, records, run_at, tree

# Its bf16 does as much work as a file beside it says, which no digest of the code sees: a regression planted anew.
SUITE = """
from pathlib import Path
from fp8bench.suites import Work, Workload, workloads

PACE = Path(__file__).with_name("pace")


@workloads.register("paced")
class Paced(Workload):
    name = "paced"
    summary = "as slow as a file says"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work()

    def prepare(self, setup):
        words = dict(line.split("=") for line in PACE.read_text().split())
        precision = setup.case.precision
        if words.get("fails") == precision:
            raise RuntimeError("planted")
        return 20_000 * int(words.get(precision, 1))

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))
"""
# Whether the machine has slowed down is not what these tests are about, nor what other processes make of some
# milliseconds: what is planted is far beyond five times, which nobody takes for what others did.
RULES = '"*fp32":\n  time: ignore\n"*bf16":\n  relative_time: {relative: 900%}\n'


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run `gate`."""
    return unfolding(fp8bench, "gate")


def test_nothing_is_worse(store: Path, say: Say) -> None:
    """Code 0, and nothing is measured for it."""
    history(store, 1.0, 1.0)
    before = tree(store)
    code, out, err = say(commit(0), commit(1))
    assert (code, err) == (0, "") and "no regression" in out and tree(store) == before


def test_a_regression_that_cannot_be_confirmed_here(store: Path, say: Say) -> None:
    """It fails, says that nobody has confirmed it, and why; all files are written."""
    history(store, 1.0, 1.5)
    code, out, err = say(commit(0), commit(1), "--junit", "out.xml", "--md", "out.md", "--benchmark-json", "out.json")
    assert code == 1 and "1 regression" in out and "not measured again" in out and "suspected" in err
    xml = JUnitXml.fromfile("out.xml")
    assert (xml.failures, xml.errors) == (1, 0) and xml.tests == 3
    assert "regression" in Path("out.md").read_text()
    assert {row["unit"] for row in json.loads(Path("out.json").read_text())} == {"s", "x"}


def test_below_ten_percent_a_stored_number_is_a_suspect_only(store: Path, say: Say) -> None:
    """Whatever the machine may do with it."""
    history(store, 1.0, 1.08)
    code, out, _ = say(commit(0), commit(1), "--no-rerun")
    assert code == 4 and "1 to confirm" in out and "--no-rerun" in out
    command = "fp8bench duel suite gemm --against COMMIT"
    assert f"`{command}` decides" in " ".join(out.split())
    assert build_parser().parse_args(command.split()[1:]).against == "COMMIT"


@pytest.mark.parametrize(("times", "code"), [(1.0, 4), (1.5, 1)])
def test_what_it_could_have_seen_is_told_and_may_be_required(store: Path, say: Say, times: float, code: int) -> None:
    """One run against one cannot see 5%: code 4 if that is asked for, after a regression; every file says how much."""
    history(store, 1.0, times)
    words = (commit(0), commit(1), "--no-rerun", "--junit", "out.xml", "--md", "out.md", "--benchmark-json", "out.json")
    assert say(*words)[0] == (1 if times > 1 else 0)
    ended, out, _ = say(*words, "--require-power", "0.9")
    assert ended == code and "could have seen: at least +" in out and "in 90 of 100 builds" in out
    assert "What could have been seen in 90 of 100 builds" in Path("out.md").read_text()
    assert sum("could have seen" in row["extra"] for row in json.loads(Path("out.json").read_text())) == 2
    assert 'name="sight" value="could have seen at least +' in Path("out.xml").read_text()
    assert JUnitXml.fromfile("out.xml").failures > 0 and "cannot see its threshold" in out


@for_each("share", ["80", "0", "100%", "1", "-5%", "nan", "many", "%"])
def test_a_share_that_is_none_is_refused(say: Say, share: str) -> None:
    code, _, err = say("A", "B", f"--require-power={share}")
    assert code == 2 and "like 80% or 0.8" in err


def test_the_jobs_summary(store: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended to what is there; one that cannot be written fails no build."""
    history(store, 1.0, 1.5)
    Path("summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    assert say(commit(0), commit(1), "--no-rerun")[0] == 1
    text = Path("summary.md").read_text()
    assert text.startswith("before\n# fp8bench gate: 1 regression")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/such/folder")
    code, _, err = say(commit(0), commit(1), "--no-rerun")
    assert code == 1 and "summary" in err


def test_thresholds_from_a_file(store: Path, say: Say) -> None:
    """Higher ones let it pass; a file that speaks of nothing is refused, and leaves no green file behind."""
    history(store, 1.0, 1.5)
    Path("wide.yaml").write_text("gemm:\n  '*time': {relative: 60%}\n")
    assert say(commit(0), commit(1), "--no-rerun", "--thresholds", "wide.yaml")[0] == 0
    Path("idle.yaml").write_text("transformer:\n  time: {relative: 60%}\n")
    code, out, err = say(commit(0), commit(1), "--thresholds", "idle.yaml", "--junit", "out.xml")
    assert code == 2 and not out and "fits any of the" in err and not Path("out.xml").exists()
    Path("half.yaml").write_text("gemm:\n  '*time': {relative: 60%}\nmlp:\n  time: ignore\n")
    code, _, err = say(commit(0), commit(1), "--thresholds", "half.yaml")
    assert code == 0 and "half.yaml:4: 'mlp' 'time' fits no figure" in err


@pytest.mark.parametrize(
    ("facts", "duels"), [({}, True), ({"torch": "9.9.9"}, False), ({"commit": "f" * 40}, False)], ids=str
)
def test_a_duel_where_it_asks_the_same_question(
    store: Path, say: Say, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Scalar], duels: bool
) -> None:
    """With what is here, and one torch on both sides: a slower torch would be cleared, and so would another commit."""
    git(Path(), "init", "-q")
    git(Path(), "commit", "-q", "--allow-empty", "-m", "x")
    here = git(Path(), "rev-parse", "HEAD")
    old = keep(store, run_at(0, facts={"commit": here}))
    new = keep(store, run_at(1, records=tuple(records(1.5)), facts={"commit": here, **facts}))
    asked: list[str] = []

    def duel_with(commit: str, *_: object) -> SecondLook:
        asked.append(commit)
        return SecondLook({}, refused="here is none")

    monkeypatch.setattr(sides_source, "duel_with", duel_with)
    assert say(old.stem, new.stem)[0] == 1
    assert asked == ([here] if duels else [])


def failed(number: int) -> Run:
    return run_at(number, records=tuple(records(status=Status.FAILED)))


def test_a_case_that_failed(store: Path, say: Say) -> None:
    """Code 3 where it is new; what failed before, too, is known."""
    history(store, 1.0)
    keep(store, failed(1))
    code, out, _ = say(commit(0), commit(1), "--junit", "out.xml")
    assert code == 3 and "1 failed" in out and JUnitXml.fromfile("out.xml").errors == 1
    keep(store, failed(2))
    assert say(commit(1), commit(2))[0] == 0


def test_a_run_that_was_cut_off(store: Path, say: Say) -> None:
    """What it was to measure and did not is no green: code 3. Another run of the commit that has it mends it."""
    history(store, 1.0)
    cut = run_at(1, finished=False)
    keep(store, replace(cut, records=cut.records[:1]))
    code, out, _ = say(commit(0), commit(1), "--no-rerun")
    assert code == 3 and "was interrupted before it was measured" in out
    keep(store, run_at(1, 9.0))
    assert say(commit(0), commit(1), "--no-rerun")[0] == 0


def test_where_neither_side_is_there_both_are_named(say: Say, store: Path) -> None:
    """The first one first."""
    keep(store, run_at(0))
    code, _, err = say("1111aaaa", "2222bbbb", "--no-rerun")
    assert (
        code == 2 and err.index("no run '1111aaaa'") < err.index("no run '2222bbbb'") and "neither side is there" in err
    )


EMPTY: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no baseline": (lambda store: keep(store, run_at(1)), 4, "the baseline is missing"),
    "no case in common": (
        lambda store: [
            keep(store, run_at(1)), keep(store, run_at(0, records=())),
        ], 4, "they have no case in common",
    ),
    "another version": (
        lambda store: [
            keep(store, run_at(1)),
            keep(store, run_at(0, records=tuple(
                replace(one, case=replace(one.case, version="0")) for one in records()
            ))),
        ], 4, "the work changed",
    ),
    "other hardware": (
        lambda store: [keep(store, run_at(1)), keep(store, run_at(0, facts={"asv_cpu": "X"}))], 4, "asv_cpu was X and",
    ),
    "an empty run": (lambda store: [keep(store, run_at(0)), keep(store, run_at(1, records=()))], 3, "came to a number"),
    "all skipped": (
        lambda store: [
            keep(store, run_at(0)),
            keep(store, run_at(1, records=tuple(
                replace(one, status=Status.SKIPPED, timing=None, is_reference=False) for one in records()
            ))),
        ], 3, "came to a number",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "code", "expected"), EMPTY.values(), ids=EMPTY)
def test_never_green_for_nothing(
    store: Path, say: Say, make: Callable[[Path], object], code: int, expected: str
) -> None:
    """Each with a code of its own, and a file that a build server shows in red."""
    make(store)
    found, out, _ = say(commit(0), commit(1), "--junit", "out.xml", "--benchmark-json", "out.json")
    assert found == code and expected in " ".join(out.split())
    assert JUnitXml.fromfile("out.xml").errors == 1
    json.loads(Path("out.json").read_text())


REFUSED = {
    "nothing to judge": ([], "nothing was given to judge"),
    "one side": (["last"], "1 side was given. Give two"),
    "three sides": (["a", "b", "c"], "3 sides were given"),
    "two things": (["a", "b", "--duel", "last"], "A B and --duel were given"),
    "no such run": ([commit(0), "nosuch"], "no run 'nosuch'"),
    "no such duel": (["--duel", "nosuch"], "no duel 'nosuch'"),
    "no last duel": (["--duel", "last"], "no duel 'last'"),
    "thresholds that are not there": ([commit(0), commit(1), "--thresholds", "none"], "--thresholds none cannot be"),
    "a file that cannot be": ([commit(0), commit(1), "--junit", "no/such/file"], "--junit 'no/such/file' cannot be"),
    "a folder for a file": ([commit(0), commit(1), "--benchmark-json", "."], "--benchmark-json '.' cannot be written"),
}


@pytest.mark.parametrize(("words", "expected"), REFUSED.values(), ids=REFUSED)
def test_refused(store: Path, say: Say, words: list[str], expected: str) -> None:
    """One sentence on stderr, and exit code 2."""
    history(store, 1.0, 1.5)
    code, out, err = say(*words)
    assert code == 2 and not out and expected in err and err.count("\n") == 1


class Folder:
    """A folder with a suite whose pace is planted, and commands that run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "mine.py").write_text(SUITE)
        (path / "rules.yaml").write_text(RULES)

    def pace(self, words: str) -> None:
        (self.path / "pace").write_text(words)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words], cwd=self.path, capture_output=True, text=True, timeout=240, check=False,
            stdin=subprocess.DEVNULL,
            env=environment(GIT_CEILING_DIRECTORIES=str(self.path.parent), GITHUB_STEP_SUMMARY=""),
        )  # fmt: skip

    def measure(self, words: str) -> str:
        """A run at that pace; its id."""
        self.pace(words)
        done = self.command("suite", "./mine.py", "--dtypes", "fp32,bf16", "--rounds", "10", "--no-report")
        assert done.returncode in (0, 3), done.stderr
        return next(run_files(self.path / ".fp8bench")).stem.rpartition("-")[2]

    def gate(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.command("gate", *words, "--thresholds", "rules.yaml", "--junit", "out.xml")


@pytest.fixture(scope="module", params=SLOW)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("paced"))


@pytest.fixture(scope="module")
def sides(folder: Folder) -> tuple[str, str]:
    """What was, and what takes 32 times as long."""
    return folder.measure("bf16=1"), folder.measure("bf16=32")


def test_a_planted_regression_is_confirmed_by_another_run(folder: Folder, sides: tuple[str, str]) -> None:
    """In a fresh process, kept as a run of its own; code 1."""
    folder.pace("bf16=32")
    kept = len(list(run_files(folder.path / ".fp8bench")))
    done = folder.gate(*sides)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it was so again" in done.stdout and "measured again in run" in done.stdout
    assert len(list(run_files(folder.path / ".fp8bench"))) == kept + 1
    assert JUnitXml.fromfile(str(folder.path / "out.xml")).failures == 1


def test_a_suspect_that_is_none_is_cleared(folder: Folder, sides: tuple[str, str]) -> None:
    """A slow run, and a fast one when it is measured again: code 0, and it is said."""
    folder.pace("bf16=1")
    done = folder.gate(*sides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cleared" in done.stdout and "it was not so" in done.stdout
    assert JUnitXml.fromfile(str(folder.path / "out.xml")).failures == 0


def test_a_suspect_that_fails_when_measured_again(folder: Folder, sides: tuple[str, str]) -> None:
    """Code 3."""
    folder.pace("fails=bf16")
    done = folder.gate(*sides)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "it failed" in done.stdout and "planted" in done.stdout
