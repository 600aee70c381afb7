"""Work spread over processes is the same work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench.store.figures import forks
from fp8bench.store.figures.forks import spread
from fp8bench.store.figures.history import open_history
from tests.histories import history, read_trends, trends_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were; other tests may have loaded torch."""
    monkeypatch.setattr(forks, "_processors", lambda: 2)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def where(number: int) -> tuple[int, int]:
    return number, os.getpid()


def refuses(number: int) -> int:
    raise ValueError(f"no {number}")


def test_few_jobs_stay_here_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {pid for _, pid in spread(where, range(5))} == {os.getpid()}
    found = list(spread(where, range(100)))
    assert [number for number, _ in found] == list(range(100))
    assert os.getpid() not in {pid for _, pid in found}
    assert not list(spread(where, []))
    with pytest.raises(ValueError, match="no 0"):  # as it would be here
        list(spread(refuses, range(100)))
    with monkeypatch.context() as patch:  # there is nobody else
        patch.setattr(forks, "_processors", lambda: 1)
        assert {pid for _, pid in spread(where, range(100))} == {os.getpid()}
    monkeypatch.setitem(sys.modules, "torch", forks)  # forking is not safe
    assert {pid for _, pid in spread(where, range(100))} == {os.getpid()}


MAIN = os.getpid()


def dies(number: int) -> int:
    """It is killed in any process but this one."""
    if number == 7 and os.getpid() != MAIN:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_process_that_dies_costs_nothing() -> None:
    assert list(spread(dies, range(100))) == list(range(100))


def test_a_long_history_is_read_the_same_way(tmp_path: Path) -> None:
    history(tmp_path, *(1.0 + 0.01 * number for number in range(30)))
    found = open_history(tmp_path, lambda done, runs: None)
    assert found.read == 30 and trends_of(found, lambda _: True) == read_trends(tmp_path, lambda _: True)
    assert open_history(tmp_path, lambda done, runs: None).read == 0


@pytest.mark.slow
def test_commands_at_once(tmp_path: Path) -> None:
    history(tmp_path, *[1.0] * 10, *[1.2] * 10)
    words = (sys.executable, "-m", "fp8bench", "history", "regressions", "--store", str(tmp_path), "--json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    together = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    found = [process.communicate(timeout=240) for process in together]
    alone = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert [process.returncode for process in together] == [alone.returncode] * 2
    assert "track_time" in alone.stdout and found == [(alone.stdout, "")] * 2 and not alone.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "figures.sqlite"}


KILLED = """
import os, time
from fp8bench.store.figures import forks
forks._processors = lambda: 2
def work(_):
    os.write(1, b"begun\\n")
    time.sleep(600)
list(forks.spread(work, range(40)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is ended with another one")
def test_nobody_goes_on_for_a_process_that_was_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen((sys.executable, "-c", KILLED), stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"begun\n"] * 2
        process.kill()
        assert process.communicate(timeout=240) == (b"", None)
