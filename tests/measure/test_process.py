"""Worker processes: one that is started ahead of its run, and what is reported about one that has vanished."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from fp8bench.devices import cpu
from fp8bench.measure.handle import ProcessWorker, start_workers_early
from fp8bench.measure.process import describe_exit, describe_last_line
from fp8bench.model import Request
from fp8bench.model.raw import Settings
from fp8bench.pipeline import execute, open_worker
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentObserver
from tests.counts import for_each


@for_each(
    ("log", "words"),
    [
        (b"", ""),
        (b"\n  \n", ""),
        (b"killed", ": killed"),
        (b"Traceback (most recent call last):\n  File x\nValueError: no\n\n", ": ValueError: no"),
        (b"terminate called after throwing\n  what():  no memory\nAborted\n", ": what():  no memory"),
        (b"Fatal Python error: Aborted\nThread 0x1\n  File x\n", ": Fatal Python error: Aborted"),
        (b"x" * 3000 + b"\n\xff cut", ": \ufffd cut"),
    ],
)
def test_the_last_error_of_a_log_is_quoted(log: bytes, words: str) -> None:
    assert describe_last_line(io.BytesIO(log)) == words


def test_exit_statuses_have_words() -> None:
    assert describe_exit(0) == "exited with status 0"
    assert describe_exit(-11) == "was ended by SIGSEGV"
    assert describe_exit(-64) in ("was ended by SIGRTMAX", "was ended by signal 64")
    assert describe_exit(-9).endswith("when memory runs out)")


def test_workers_started_ahead_are_those_of_the_run_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with start_workers_early(Request("gemm", ("fp32",), seed=7), with_second=True) as (begun, second):
        assert begun.pid is not None and second.pid is not None and begun.pid != second.pid
        corpus = Corpus("/tokens", "text", "0" * 64, 1)
        with open_worker(Request("gemm", ("fp32",), seed=7), corpus, begun) as worker:
            assert worker is begun and begun.settings == Settings(seed=7, corpus="/tokens")
        assert begun.pid is None and second.pid is not None
    assert second.pid is None


@for_each(
    ("request", "second", "count"),
    [
        (Request("gemm", ("fp32",), threads=2), True, 2),
        (Request("gemm", ("fp32",), threads=2), False, 1),
        (Request("gemm", ("fp32",), threads=3), True, 1),  # they would share cores
        (Request("gemm", ("fp32",), isolation=False), True, 0),
        (Request("collective", ("fp32",), ranks=2), True, 0),
    ],
)
def test_a_run_gets_as_many_workers_ahead_as_it_has_cores_for(
    request: Request, second: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    with start_workers_early(request, second) as begun:
        assert len(begun) == count


def test_a_machine_with_little_memory_gets_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cpu, "free_bytes", lambda: 1 << 30)
    with start_workers_early(Request("gemm", ("fp32",)), with_second=True) as begun:
        assert len(begun) == 1


def test_the_second_worker_is_ready_before_steps_are_timed_and_measures_memory_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8BENCH_SECOND_WORKER")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    asked: list[tuple[int, str]] = []
    ask = ProcessWorker.ask

    def log(worker: ProcessWorker, limit: float, name: str, *arguments: Any) -> Any:
        asked.append((id(worker), name))
        return ask(worker, limit, name, *arguments)

    monkeypatch.setattr(ProcessWorker, "ask", log)
    request = Request("gemm", ("fp32", "bf16"), axes=(("shape", ("64",)),), rounds=2)
    run = execute(request, tmp_path, SilentObserver(), "")
    assert run.ok and all(record.memory is not None for record in run.records)
    workers = {name: {worker for worker, asked_name in asked if asked_name == name} for _, name in asked}
    (timing,), (second,) = workers["slot"], workers["memory"]
    assert timing != second
    by_second = [(place, name) for place, (worker, name) in enumerate(asked) if worker == second]
    rounds = [place for place, (_, name) in enumerate(asked) if name == "slot"][-2 * 3 :]
    assert {name for place, name in by_second if place < rounds[0]} == {"versions", "error"}
    assert {name for place, name in by_second if place > rounds[0]} == {"memory"}
    assert all(place > rounds[-1] for place, name in by_second if name == "memory")
