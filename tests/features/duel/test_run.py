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
from typing import Any

import pytest

from fp8bench.cli.main import main
from fp8bench.model.raw import PROTOCOL
from tests.commands import complaints, git, unfolded
from tests.counts import for_each

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = """
import torch

COLUMNS = {columns}

def work(x):
    return x @ x[:, :COLUMNS]
"""
# Steps that need no size of their own: what differs between the sides is in mylib, in whoami, or planted by a name.
SUITE = """
import os
import signal
import time

import torch

from fp8bench.suites import Axis, Work, Workload, one_of, workloads

import mylib

HERE = os.path.dirname(os.path.abspath(mylib.__file__))


class Mine(Workload):
    summary = "a library's work"
    dtypes = ("fp32",)

    def axes(self, facts):
        return (Axis("hazard", "what happens on one side", ("none",), one_of("none", "raise", "kill", "hang", "wait")),)

    def work(self, params):
        return Work()

    def prepare(self, setup):
        import whoami

        hazard = setup.case.param("hazard")
        if hazard == whoami.HAZARDS.get("raise"):
            raise RuntimeError("this library cannot")
        return torch.ones(256, 256), hazard, whoami

    def step(self, state, phase):
        x, hazard, whoami = state
        with phase.gemm:
            mylib.work(x)
        if hazard != "none" and hazard == whoami.HAZARDS.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if hazard != "none" and hazard == whoami.HAZARDS.get("hang"):
            time.sleep(600)

    def error(self, setup):
        import whoami

        return {"whoami_error": whoami.NUMBER}


@workloads.register("library")
class Library(Mine):
    name = "library"
    version = "1"


@workloads.register("changed")
class Changed(Mine):
    name = "changed"
    version = str(mylib.COLUMNS)


@workloads.register("waiting")
class Waiting(Mine):
    name = "waiting"
    version = "1"

    def step(self, state, phase):
        open(os.environ["MARK"], "w").close()
        time.sleep(600)
"""


def environment(folder: Path, whoami: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # The folder that has torch is looked into, and .pth files in there are not: an editable fp8bench stays out.
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    (packages / "torch.pth").write_text(str(Path(torch.origin).parents[1]))
    (packages / "whoami.py").write_text(whoami)
    return folder


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pythons")
    before = environment(folder / "before", "NUMBER = 1.0\nHAZARDS = {'kill': 'kill'}\n")
    after = environment(folder / "after", "NUMBER = 2.0\nHAZARDS = {'raise': 'raise', 'hang': 'hang'}\n")
    return str(before), str(after / "bin" / "python")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose library does half as much in its commit (v1) as it does in its tree."""
    folder = tmp_path / "project"
    (folder / "src" / "mylib").mkdir(parents=True)
    git(folder, "init", "-q")
    library = folder / "src" / "mylib" / "__init__.py"
    library.write_text(LIBRARY.format(columns=128))
    (folder / "suites.py").write_text(SUITE)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "tag", "v1")
    library.write_text(LIBRARY.format(columns=256))
    return folder


def started(project: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """`fp8bench duel` with these words, in a process of its own; what is temporary lies in the test's folder."""
    temporary = project.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    # This interpreter's packages on the path, as if somebody had put them there: no partner may find them.
    installed = project.parent / "site-packages"
    installed.mkdir(exist_ok=True)
    (installed / "whoami.py").write_text("raise ImportError('the other side found this')\n")
    path = os.pathsep.join(map(str, (ROOT, project / "src", installed)))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "fp8bench", "duel", *words], cwd=project, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), **variables},
    )  # fmt: skip


def duelled(project: Path, *words: str) -> tuple[int, str, str]:
    process = started(project, *words)
    out, err = process.communicate(timeout=400)
    left_nothing(project)
    return process.returncode, out, unfolded(err)


def left_nothing(project: Path) -> None:
    assert len(git(project, "worktree", "list").splitlines()) == 1
    assert not list((project.parent / "temporary").glob("fp8bench-duel-*"))


def times(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The comparisons of times, by what their cases are called in SUITE."""
    return {
        re.sub(r"\[hazard=(\w+)\].*", r" \1", one["case"]): one
        for one in document["comparisons"] if one["metric"] == "time"
    }  # fmt: skip


@pytest.mark.slow
def test_two_pythons_and_two_revisions(project: Path, pythons: Sequence[str]) -> None:
    """Each side runs its own library and its own packages; what fails does so on its side, and costs nothing else."""
    code, out, err = duelled(
        project, "--python-a", pythons[0], "--python-b", pythons[1], "--against", "v1", "suite", "./suites.py",
        "--set", "hazard=none,raise,kill,hang", "--quick", "--case-timeout", "8", "--json", "--store", "kept",
    )  # fmt: skip
    assert code == 3, err
    document = json.loads(out)
    found = times(document)
    library = found["library none"]
    assert library["direction"] == "worse" and library["ratio"]["point"] > 1.3 and library["p_value"] is None
    assert {name: one["failed"] for name, one in found.items() if name.startswith("library ")} == {
        "library none": False, "library raise": True, "library kill": False, "library hang": True,
    }  # fmt: skip
    for hazard, why in (("raise", "B: RuntimeError"), ("kill", "A: the worker crashed"), ("hang", "B: no answer to")):
        assert f"failed on side {why}" in found[f"library {hazard}"]["why"]
    assert all("version 128 on side A and 256 on side B" in found[f"changed {one}"]["why"] for one in ("none", "kill"))
    values = {one["metric"]: one for one in document["comparisons"] if one["case"] == library["case"]}
    whoami, memory = values["whoami_error"], values["peak_memory"]
    assert (whoami["before"], whoami["after"], whoami["direction"]) == (1.0, 2.0, "worse")
    assert memory["after"] - memory["before"] == 256 * 128 * 4
    for side, python in zip(("before", "after"), pythons, strict=True):
        facts = document[side]["environment"]["facts"]
        assert facts["prefix"] == str(Path(python.removesuffix("/bin/python"))) and facts["protocol"] == PROTOCOL
    assert document["before"]["commit"] == document["after"]["commit"] and "v1" in document["before"]["title"]
    assert "with uncommitted changes" in document["after"]["title"]
    shown(project / "kept", document["id"])


def shown(store: Path, name: str) -> None:
    """`fp8bench show` prints the table; 'last' means no duel."""
    for word, code, told in ((name, 0, ("A: v1 (", "FAILED", "skipped", "worse")), ("last", 2, ("has no runs yet",))):
        command = [sys.executable, "-m", "fp8bench", "show", word, "--store", str(store)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code and all(words in done.stdout + unfolded(done.stderr) for words in told)


@pytest.mark.nightly
def test_three_sessions_tell_a_slower_revision_with_an_interval(project: Path, pythons: Sequence[str]) -> None:
    """Of the same Python: exit code 1, an interval that has the truth in it, and a chance below 1%."""
    code, out, err = duelled(
        project, "--python-a", pythons[0], "--python-b", pythons[0], "--against", "HEAD", "suite", "library",
        "--import", "suites.py", "--rounds", "8", "--sessions", "3", "--json",
    )  # fmt: skip
    assert (code, complaints(err)) == (1, "")
    document = json.loads(out)
    found = times(document)["library none"]
    assert found["direction"] == "worse" and found["p_value"] <= 0.01
    assert 1.2 < found["ratio"]["low"] < found["ratio"]["point"] < found["ratio"]["high"] < 3
    (result,) = document["results"]
    assert [len(one["before"]) + len(one["after"]) for one in result["sessions"]] == [4, 4, 4]
    assert {len(timing["slots"]) for one in result["sessions"] for timing in (*one["before"], *one["after"])} == {8}


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
    """Interrupted, it tells what there is and clears up; killed, the next duel clears up after it."""
    mark = tmp_path / "mark"
    process = started(
        project, "--python-a", pythons[0], "--python-b", pythons[0], "--against", "v1", "suite", "waiting", "--import",
        "suites.py", MARK=str(mark),
    )  # fmt: skip
    end = time.monotonic() + 200
    while not mark.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted; what was finished is kept in" in unfolded(err)
        assert "1 of 1 cases were not measured" in out
    else:
        assert list((tmp_path / "temporary").glob("fp8bench-duel-*"))
        dies_at_start(project, tmp_path / "python")
    left_nothing(project)


def dies_at_start(project: Path, python: Path) -> None:
    """A partner that says which Python it is, and no more: nothing was measured, and nothing is kept."""
    python.write_text("#!/bin/sh\n[ $1 = -I ] && echo python 3.12.0 || { echo Bus error >&2; exit 7; }\n")
    python.chmod(0o755)
    words = f"--python-a {python} --against v1 suite library --import suites.py --store no"
    code, out, err = duelled(project, *words.split())
    assert (code, out) == (3, "")
    assert f"side A ({python}): the worker crashed" in err and "status 7: Bus error" in err
    assert not list((project / "no").rglob("*.jsonl"))


@for_each(
    ("words", "sentence"),
    [
        (["gemm"], "choose from"),
        (["suite"], "NAME"),
        (["suite", "gem"], "Did you mean 'gemm'"),
        (["suite", "gemm", "--dtypes", "fb8"], "unknown dtype 'fb8'"),
        (["suite", "gemm", "--against", "HEAD"], "wants a git repository"),
        (["suite", "gemm", "--sessions", "0"], "a whole number from 1"),
        (["suite", "gemm", "--pythona", "x"], "Did you mean --python-a"),
        (["suite", "gemm", "--python-a", "bare"], "cannot import torch (ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    words: list[str], sentence: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
    assert main(["duel", *words]) == 2
    out, err = capsys.readouterr()
    err = unfolded(err)
    assert out == "" and sentence in err and len(err.splitlines()) == 1


def test_fp8bench_has_its_own_option_for_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--against would leave it as it is, and duel a thing with itself."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of fp8bench")
    monkeypatch.chdir(ROOT)
    for words, told in (("--against HEAD", "Use --against-self"), ("--against-self no-such-revision", "is no commit")):
        assert main(["duel", "suite", "gemm", *words.split(), "--store", str(tmp_path)]) == 2
        assert told in unfolded(capsys.readouterr().err)
