"""Cells on a Ray of one node, which the test starts on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.fleet.engines import Order, check_answers, start
from fp8bench.model import Request
from fp8bench.model.run import Cell, FleetPlan
from fp8bench.store.fleet_plans import read_plan, states_of, write_plan
from tests.commands import ROOT, Say

_GEMM = "gemm --quick --no-energy --rounds 2 --dtypes fp32 --no-isolation --set shape=16,32,48"
# Ray maps 127.0.0.1 to the address of another interface, in the node and in whoever calls it.
_LOOPBACK = "from ray._private import services; services.resolve_ip_for_localhost = lambda host: host\n"
_NODE = """
import sys, ray
for left in (2, 1, 0):
    try:
        ray.init("local", num_cpus=2, resources={"fp8bench:cpu": 1}, include_dashboard=False, logging_level="error",
                 _node_ip_address="127.0.0.1", object_store_memory=80_000_000, _temp_dir=sys.argv[1])
        break
    except Exception:  # it gives itself 30 s, which a machine with much to do may need
        ray.shutdown()
        if not left:
            raise
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
_FLEET = "import sys; from fp8bench.__main__ import run; sys.exit(run())"


@pytest.fixture
def plan(store: Path, fp8bench: Say, tmp_path: Path) -> Path:
    code, _, err = fp8bench("suite", *_GEMM.split(), "--dry-run", "--write-plan", str(tmp_path / "plan.json"))
    assert code == 0, err
    return tmp_path / "plan.json"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and the environment of its processes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray (fp8bench[ray])")
    # amdsmi without AMD's library breaks the import of Ray.
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "amdsmi.py").write_text("")
    path = os.pathsep.join((str(tmp_path / "beside"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_AUTH_MODE"] = "token"  # which the node makes, and keeps at home
    environment.pop("OMP_NUM_THREADS", None)
    words = [sys.executable, "-c", _LOOPBACK + _NODE]
    with (
        tempfile.TemporaryDirectory(
            dir="/tmp", prefix="ray-"
        ) as short,  # the names of its sockets may have 107 letters
        subprocess.Popen(
            [*words, short], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as node,
    ):
        assert node.stdin is not None and node.stdout is not None
        address = node.stdout.readline().strip()
        assert address.startswith("127.0.0.1:"), address
        yield address, environment
        node.stdin.close()
        node.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_cell_at_a_time_to_a_device(plan: Path, store: Path, cluster: tuple[str, dict[str, str]]) -> None:
    """Each once, however many may run; none for a device that no node offers. Threads are not Ray's choice."""
    address, environment = cluster
    words = [sys.executable, "-c", _LOOPBACK + _FLEET, "fleet", "submit", "PLAN", "--store", str(store), "--on", "ray"]
    words += ["--option", f"address={address}", "--wait"]

    def submitted(file: Path) -> subprocess.CompletedProcess[str]:
        given = [str(file) if word == "PLAN" else word for word in words]
        return subprocess.run(given, env=environment, capture_output=True, text=True, check=False)

    elsewhere = plan.with_name("h200.json")
    held = read_plan(plan)
    write_plan(replace(held, cells=tuple(replace(cell, kind="h200", gpus=1) for cell in held.cells)), elsewhere)
    refused = submitted(elsewhere)
    assert refused.returncode == 2 and "no node of this Ray cluster offers fp8bench:h200" in refused.stderr
    done = submitted(plan)
    assert done.returncode == 0 and "3 done." in done.stdout, (done.stdout, done.stderr)
    states = states_of(held, store)
    assert [len(state.attempts) for state in states] == [1, 1, 1]
    spans = sorted(
        (begin, begin + timedelta(seconds=attempt.seconds))
        for state in states
        for attempt in state.attempts
        for begin in (datetime.fromisoformat(attempt.started),)
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), spans
    for path in (store / "runs").rglob("*.jsonl"):
        facts = json.loads(path.read_text().splitlines()[0])["header"]["environment"]["facts"]
        assert "env_OMP_NUM_THREADS" not in facts and "threads" in facts
    again = submitted(plan)
    assert again.returncode == 0 and [len(state.attempts) for state in states_of(held, store)] == [1, 1, 1]


def test_what_ray_cannot_do_is_said_before_it_is_asked(tmp_path: Path) -> None:
    cells = (Cell("gemm[m=16]@cpu"),)
    order = Order(FleetPlan("1a2b", "", "", Request("gemm"), cells, ""), tmp_path / "plan.json", tmp_path)
    for given, words in (
        (order, "Add --wait"),
        (replace(order, stays=True, options={"partition": "gpu"}), "takes the option address alone, not partition"),
        (replace(order, stays=True), "does not say what devices it is for"),
    ):
        with pytest.raises(UsageError, match=words):
            start("ray", given)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    """Ray would try it for minutes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{bound.getsockname()[1]}", "127.0.0.1:99999"):
            with pytest.raises(UsageError, match=f"nothing answers at {address}"):
                check_answers(address)
    for of_ray in ("auto", "ray://127.0.0.1:1", "local"):
        check_answers(of_ray)
