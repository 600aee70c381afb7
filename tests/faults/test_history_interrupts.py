"""The command as a person runs it: messages on the history, exit codes, and interrupted updates of the view."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from fp8bench.files import lock_folder
from fp8bench.store.asv.view import asv_results_folder, update_view
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from tests.commands import git, unfolded
from tests.counts import sampled
from tests.forked_workers import started as forking
from tests.kept import results_files

SUITE = ("suite", "--no-report", "gemm", "--set", "shape=512", "--dtypes", "fp32", "--rounds", "2")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean repository of one commit, with a separate home folder."""
    home, folder = tmp_path / "home", tmp_path / "repository"
    home.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (folder / ".gitignore").write_text(".fp8bench\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        git(folder, *words)
    return folder


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return forking(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(folder: Path, *words: str) -> tuple[int, str]:
    with started(folder, *words) as process:
        out, err = process.communicate(timeout=240)
    assert out.startswith("gemm ")
    return process.returncode, unfolded(err)


def waits_for_the_lock(process: subprocess.Popen[str], lock: Path) -> bool:
    """Whether the process has the lock file open, as it does while waiting."""
    try:
        return any(link.samefile(lock) for link in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:  # one was closed a moment ago
        return False


@pytest.mark.slow
def test_a_view_that_cannot_be_written_does_not_change_the_exit_code(repository: Path) -> None:
    store = repository / ".fp8bench"
    store.mkdir()
    (store / "asv").write_text("")
    code, err = ended(repository, *SUITE)
    assert code == 0 and err.startswith("fp8bench: history: the lock ") and err.count("\n") == 1
    (store / "asv").unlink()
    code, err = ended(repository, *SUITE)
    assert code == 0 and err.startswith("fp8bench: history: 1 case of commit ") and err.endswith(" in the history\n")
    (repository / ".gitignore").write_text(".fp8bench\n.asv\n")
    code, err = ended(repository, *SUITE)
    assert code == 0 and err.startswith("fp8bench: history: the files differ from commit ") and err.count("\n") == 1
    assert len(list(run_files(store))) == 3 and len(results_files(store)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="sees by /proc that the lock is waited for")
@pytest.mark.parametrize("number", sampled([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]), ids=lambda one: one.name)
def test_an_interrupt_of_the_view_says_what_is_kept(repository: Path, number: signal.Signals) -> None:
    store = repository / ".fp8bench"
    lock = store / "asv" / ".lock"
    with lock_folder(store / "asv", 0), started(repository, *SUITE) as process:
        end = time.monotonic() + 240
        while not waits_for_the_lock(process, lock):
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    (path,) = run_files(store)
    assert process.returncode == 130 and out.startswith("gemm ")
    assert unfolded(err) == (
        f"fp8bench: history: interrupted while asv's view was updated; the run is stored in "
        f"{path.relative_to(repository)}, and `fp8bench history rebuild` updates the view\n"
    )
    run = load_run(path)
    assert run.finished and not asv_results_folder(store).exists()
    assert "1 case of commit" in update_view(run, store) and len(results_files(store)) == 1
