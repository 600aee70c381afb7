"""`fp8bench duel` for real: planted changes between two interpreters and two revisions, and partners that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8bench.cli.main import main
from fp8bench.model.raw import PROTOCOL
from tests.commands import PROGRAM, ROOT, git, unfolded
from tests.counts import for_each

LIBRARY = """
import torch

COLUMNS = {columns}

def work(x):
    return x @ x[:, :COLUMNS]
"""
# Steps without sizes: sides differ by mylib, by whoami, or by a planted name.
SUITE = """
import os
import signal
import time

import torch

from fp8bench.suites import Axis, Work, Workload, one_of, workloads

import mylib

HAZARDS = ("none", "raise", "kill", "hang", "wait")


@workloads.register("library")
class Library(Workload):
    name = "library"
    version = "1"
    summary = "a library's work"
    dtypes = ("fp32",)

    def axes(self, facts):
        return (Axis("hazard", "what happens on one side", ("none",), one_of(*HAZARDS)),)

    def work(self, params):
        return Work()

    def prepare(self, setup):
        import whoami

        hazard = setup.case.param("hazard")
        strikes = hazard if hazard in whoami.HAZARDS else "none"
        if strikes == "raise":
            raise RuntimeError("this library cannot")
        return torch.ones(256, 256), strikes

    def step(self, state, phase):
        x, strikes = state
        with phase.gemm:
            mylib.work(x)
        if strikes == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if strikes == "wait":
            open(os.environ["MARK"], "w").close()
        if strikes in ("wait", "hang"):
            time.sleep(600)

    def error(self, setup):
        import whoami

        return {"whoami_error": whoami.NUMBER}
"""


def environment(folder: Path, whoami: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # torch's folder is on the path without its .pth files, so an editable fp8bench is not found.
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (packages / "torch.pth").write_text(str(Path(torch.origin).parents[1]))
    (packages / "whoami.py").write_text(whoami)
    return folder


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two environments that differ by one module."""
    folder = tmp_path_factory.mktemp("pythons")
    before = environment(folder / "before", "NUMBER = 1.0\nHAZARDS = ('kill', 'wait')\n")
    after = environment(folder / "after", "NUMBER = 2.0\nHAZARDS = ('raise', 'hang')\n")
    return str(before), str(after / "bin" / "python")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose library does a quarter of the work in commit v1, which is clear even on a busy machine."""
    folder = tmp_path / "project"
    (folder / "src" / "mylib").mkdir(parents=True)
    git(folder, "init", "-q")
    library = folder / "src" / "mylib" / "__init__.py"
    library.write_text(LIBRARY.format(columns=64))
    (folder / "suites.py").write_text(SUITE)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "tag", "v1")
    library.write_text(LIBRARY.format(columns=256))
    return folder


def started(project: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Starts `fp8bench duel` as a process; temporary files are in the test's folder."""
    temporary = project.parent / "temporary"
    installed = project.parent / "site-packages"
    for folder in (temporary, installed):
        folder.mkdir(exist_ok=True)
    # Puts this interpreter's packages on the path; partners must not find them.
    (installed / "whoami.py").write_text("raise ImportError('the other side found this')\n")
    path = os.pathsep.join(map(str, (ROOT, project / "src", installed)))
    return subprocess.Popen(
        [*PROGRAM, "duel", *words],
        cwd=project,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), **variables},
    )


def duelled(project: Path, *words: str) -> tuple[int, str, str]:
    process = started(project, *words)
    out, err = process.communicate(timeout=400)
    left_nothing(project)
    return process.returncode, out, unfolded(err)


def left_nothing(project: Path) -> None:
    """Asserts that neither a folder nor a working tree remains."""
    assert len(git(project, "worktree", "list").splitlines()) == 1
    assert not list((project.parent / "temporary").glob("fp8bench-duel-*"))


@pytest.mark.slow
def test_two_pythons_and_two_revisions(project: Path, pythons: Sequence[str]) -> None:
    python_a, python_b = pythons
    suite = "suite ./suites.py --set hazard=none,raise,kill,hang --quick --case-timeout 10 --json --store kept"
    sides = f"--python-a {python_a} --python-b {python_b} --against v1"
    code, out, err = duelled(project, *f"{sides} {suite}".split())
    assert code == 3, err
    document = json.loads(out)
    changes = {
        (re.findall(r"hazard=(\w+)", change["case"])[0], change["metric"]): change for change in document["comparisons"]
    }
    slower = changes["none", "time"]
    assert slower["direction"] == "worse" and slower["ratio"]["point"] > 1.3 and slower["p_value"] is None
    for hazard, failed, why in (
        ("none", False, ""),
        ("raise", True, "failed on side B: RuntimeError: this library cannot"),
        ("kill", False, "failed on side A: the worker crashed"),
        ("hang", True, "failed on side B: no answer to"),
    ):
        assert changes[hazard, "time"]["failed"] is failed and why in changes[hazard, "time"]["why"]
    whoami = changes["none", "whoami_error"]
    memory = changes["none", "peak_memory"]
    assert (whoami["before"], whoami["after"], whoami["direction"]) == (1.0, 2.0, "worse")
    assert memory["after"] - memory["before"] == 256 * 192 * 4
    for side, python in zip(("before", "after"), pythons, strict=True):
        facts = document[side]["environment"]["facts"]
        assert facts["prefix"] == str(Path(python.removesuffix("/bin/python"))) and facts["protocol"] == PROTOCOL
    assert document["before"]["commit"] == document["after"]["commit"] and "v1" in document["before"]["title"]
    assert "with uncommitted changes" in document["after"]["title"]
    for word, code, told in (
        (document["id"], 0, ("A: v1 (", "FAILED", "worse")),
        ("last", 2, ("has no runs yet",)),  # a duel is not a run
    ):
        done = subprocess.run(
            [*PROGRAM, "show", word, "--store", str(project / "kept")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and all(words in done.stdout + unfolded(done.stderr) for words in told)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly, id="SIGINT"),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="SIGKILL"),
    ],
)
def test_an_end_in_the_middle_leaves_nothing(
    number: signal.Signals, project: Path, pythons: Sequence[str], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    python = pythons[0]
    suite = ["suite", "library", "--import", "suites.py"]
    words = ("--python-a", python, "--python-b", python, "--against", "v1", *suite, "--set", "hazard=wait")
    process = started(project, *words, MARK=str(mark))
    end = time.monotonic() + 280
    while not mark.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=280)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted; finished sessions are stored in" in unfolded(err)
        assert "1 of 1 cases were not measured" in out
    else:
        assert process.returncode == -number
        dies_at_start(project, tmp_path / "python", suite)
    left_nothing(project)


def dies_at_start(project: Path, python: Path, suite: Sequence[str]) -> None:
    """Asserts that nothing was measured or stored."""
    python.write_text("#!/bin/sh\necho Bus error >&2; exit 7\n")
    python.chmod(0o755)
    code, out, err = duelled(project, "--python-a", str(python), "--against", "v1", *suite, "--store", "no")
    assert (code, out) == (3, "")
    assert f"side A ({python}): the worker crashed" in err and "status 7: Bus error" in err
    assert not list((project / "no").rglob("*.jsonl"))


@for_each(
    ("words", "sentence"),
    [
        (["suite", "gemm", "--against", "HEAD"], "needs a git repository"),
        (["suite", "gemm", "--sessions", "0"], "a whole number from 1"),
        (["suite", "gemm", "--python-a", "bare"], "cannot import torch (ModuleNotFoundError"),
    ],
)
def test_bad_arguments_give_one_message(
    words: list[str], sentence: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
    assert main(["duel", *words]) == 2
    out, err = capsys.readouterr()
    err = unfolded(err)
    assert out == "" and sentence in err and len(err.splitlines()) <= 2  # with a command to paste


def test_fp8bench_has_its_own_option_for_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--against would compare fp8bench with itself."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of fp8bench")
    monkeypatch.chdir(ROOT)
    for words, told in (
        ("--against HEAD", "Use --against-self"),
        ("--against-self no-such-revision", "is not a commit"),
    ):
        assert main(["duel", "suite", "gemm", *words.split(), "--store", str(tmp_path)]) == 2
        assert told in unfolded(capsys.readouterr().err)
