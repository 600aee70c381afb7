"""Shared facilities of ranks on one machine: a barrier, rounds, a launcher; and checking a peer's process."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8bench.model import Case, DeviceFacts
from fp8bench.worker.ranks import bench
from fp8bench.worker.ranks.bench import (
    RankBarrier,
    RankBench,
    RankSyncFunctions,
    StepPartsAnswer,
    check_new_process_groups,
    refuse_other_users,
    time_rounds,
)
from fp8bench.worker.ranks.launcher import _end_rank_processes
from tests.counts import for_each
from tests.fakes import CPU


def test_no_rank_begins_before_all_have_come(tmp_path: Path) -> None:
    """Three ranks meet 50 times: when one continues, all have arrived equally often."""
    lines = [RankBarrier(tmp_path, rank, 3, 240.0) for rank in range(3)]
    come = [0, 0, 0]
    wrong = list[tuple[int, ...]]()

    def run(rank: int) -> None:
        for turn in range(1, 51):
            come[rank] += 1
            lines[rank].wait_for_ranks()
            seen = tuple(come)
            if min(seen) < turn or max(seen) > turn + 1:
                wrong.append(seen)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert come == [50, 50, 50] and not wrong


def _case(precision: str, way: str, elements: int = 64) -> Case:
    params = (("collective", "all_reduce"), ("elements", elements), ("fp8", way), ("scaling", "pre"))
    return Case("collective", params, precision, "cpu", ranks=2)


def test_a_plain_collective_is_measured_once_for_all_variants_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(bench: RankBench, case: Case, facts: DeviceFacts) -> StepPartsAnswer:
        measured.append(case)
        return (), {"compute": [float(len(measured))]}

    monkeypatch.setattr(RankBench, "_measure_step_parts", measure)
    bench = RankBench.__new__(RankBench)
    bench._parts = {}
    plain = [bench.step_parts(_case("bf16", way), CPU) for way in ("fp8_gather", "fp8_ring")]
    assert plain == [((), {"compute": [1.0]})] * 2 and len(measured) == 1
    others = [_case("bf16", "fp8_ring", 128), _case("fp32", "fp8_ring"), _case("fp8", "fp8_ring"), _case("fp8", "pre")]
    found = [bench.step_parts(one, CPU) for one in others]
    assert found == [((), {"compute": [float(turn)]}) for turn in (2, 3, 4, 5)]


@for_each(("seconds", "count"), [(1.0, 6), (0.01, 15)])
def test_rounds_are_as_many_of_each_part_in_the_same_order_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    monkeypatch.setattr(bench, "_find_largest_of_ranks", lambda own: seconds)
    names = ["one", "two", "both", "in_turn"]
    ran = {0: list[str](), 1: list[str]()}
    for said in ran.values():
        parts = {name: partial(said.append, name) for name in names}
        found = time_rounds(parts, RankSyncFunctions(lambda: None, partial(said.append, "met")), 7)
        assert {name: len(times) for name, times in found.items()} == dict.fromkeys(names, count)
    assert ran[0] == ran[1] and ran[0][:3] == ["one", "two", "met"] and ran[0].count("met") == 4 * count
    order = random.Random(7)
    assert [name for name in ran[0][2:] if name != "met"] == [
        name for _ in range(count) for name in order.sample(names, len(names))
    ]


def test_the_launcher_is_waited_for(tmp_path: Path) -> None:
    """If it were killed at once, its ranks would never be reaped."""
    (folder := tmp_path / "launch").mkdir()
    with subprocess.Popen(("sleep", "0.5")) as launcher:
        waiting = threading.Thread(target=launcher.wait)
        waiting.start()
        _end_rank_processes(str(folder), launcher.pid)
        waiting.join()  # the number disappears a moment before Popen has its exit code
    assert launcher.returncode == 0 and not folder.exists()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells whose a connection is")


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as other:
        taken, _ = door.accept()
        with taken:
            yield other


@LINUX
def test_own_processes_alone_may_be_connected(accepted: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_users()
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with pytest.raises(PermissionError, match=rf"another user \(number {ours}\) has connected to this rank"):
        refuse_other_users()
    accepted.close()  # a closed peer sends nothing
    refuse_other_users()


@LINUX
def test_connections_that_this_process_has_opened_may_be_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = (
        "import socket, sys\n"
        "other = socket.socket(fileno=int(sys.argv[1])).accept()[0]\n"
        "other.send(b'accepted')\n"
        "other.recv(1)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as door:
        descriptor = door.fileno()
        address = door.getsockname()
        other = subprocess.Popen([sys.executable, "-c", accepts, str(descriptor)], pass_fds=(descriptor,))
    with other, socket.create_connection(address) as opened:
        assert opened.recv(8) == b"accepted"  # until then the other end is closed
        ours = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
        refuse_other_users()


@LINUX
def test_no_group_is_made_with_a_stranger(accepted: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_groups = SimpleNamespace(_new_process_group_helper=lambda name: f"the group {name}")
    check_new_process_groups(torch_groups)
    assert torch_groups._new_process_group_helper("a") == "the group a"
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with pytest.raises(PermissionError):
        torch_groups._new_process_group_helper("a")
