"""Workers handed out for real, to a Slurm and a Ray that the tests start."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.fleet.command import parse_option
from fp8bench.features.fleet.engines import WorkerStartOrder, check_is_reachable, start_workers
from fp8bench.model import Request
from fp8bench.model.run import Cell, FleetPlan
from fp8bench.store.fleet_plans import compute_cell_states, read_fleet_plan, write_plan
from tests.commands import ROOT, Say

# pytest in the background makes its child processes ignore SIGINT.
_MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fp8bench.__main__ import run; sys.exit(run())"
)
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def states(plan: Path, store: Path) -> set[str]:
    return {state.status.value for state in compute_cell_states(read_fleet_plan(plan), store)}


@pytest.mark.nightly
def test_an_interrupt_ends_the_workers_without_a_traceback(plan: Path, store: Path) -> None:
    words = [sys.executable, "-c", _MAIN, "fleet", "work", str(plan), "--store", str(store), "--workers", "2"]
    with subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        until(lambda: "running" in states(plan, store))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err, err
    until(lambda: "running" not in states(plan, store))
    assert states(plan, store) != {"done"}
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert states(plan, store) == {"done"}


def until(true: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.nightly
@pytest.mark.usefixtures("slurm")
def test_slurm_runs_each_worker_as_a_job(plan: Path, fp8bench: Say, store: Path) -> None:
    options = ("--option", "exclusive=no", "--option", "comment=cells")
    code, out, err = fp8bench("fleet", "submit", str(plan), "--on", "slurm", "--workers", "2", "--wait", *options)
    assert code == 0 and "3 done." in out, (out, err)
    assert states(plan, store) == {"done"}
    script = next((store / "cells" / "logs").glob("*_submission.sh")).read_text()
    assert "#SBATCH --no-requeue" in script and "#SBATCH --comment=cells" in script and "--exclusive" not in script
    code, _, err = fp8bench("fleet", "submit", str(plan), "--on", "slurm", "--option", "partition=nowhere")
    assert code == 2 and "Slurm accepted no job" in err and "partition" in err


@pytest.mark.nightly
@pytest.mark.usefixtures("slurm")
def test_an_interrupt_cancels_the_jobs_of_slurm(
    plan: Path, fp8bench: Say, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, first = time.sleep, iter([True])

    def pause(seconds: float) -> None:
        if next(first, False):
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr("fp8bench.features.fleet.engines.time.sleep", pause)
    words = ("fleet", "submit", str(plan), "--on", "slurm", "--option", "exclusive=no", "--wait")
    assert fp8bench(*words)[0] == 130
    assert not subprocess.run(["squeue", "--noheader"], capture_output=True, check=True).stdout
    assert states(plan, store) != {"done"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of only this machine, on loopback and free ports."""
    missing = [name for name in _DAEMONS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="slurm-"))  # socket names are limited to 107 characters
    for part in ("controller", "node"):
        (folder / part).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    host = socket.gethostname().partition(".")[0]  # Slurm's name of this machine
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(folder=folder, host=host, user=user, ports=ports(), cpus=os.cpu_count())
    )
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    parts = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
    paths = [f"--{part}={folder}/{name}" for part, name in parts.items()]
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", *paths]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{words[0]}.out").open("wb") as log:
                started.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        until(lambda: subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, check=False).stdout == b"idle\n")
        yield
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        for held in (one, other):
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in (one, other)]


# Ray maps 127.0.0.1 to a different interface's address, in the node and in its callers.
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
def cluster(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields its address, and the environment of its processes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray (fp8bench[ray])")
    # amdsmi without AMD's library breaks the import of Ray.
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "amdsmi.py").write_text("")
    path = os.pathsep.join((str(tmp_path / "beside"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_AUTH_MODE"] = "token"  # created by the node in its home
    environment.pop("OMP_NUM_THREADS", None)
    words = [sys.executable, "-c", _LOOPBACK + _NODE]
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as short,  # socket names are limited to 107 characters
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


@pytest.mark.nightly
def test_one_cell_at_a_time_to_a_device(plan: Path, store: Path, cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    words = [sys.executable, "-c", _LOOPBACK + _FLEET, "fleet", "submit", "PLAN", "--store", str(store), "--on", "ray"]
    words += ["--option", f"address={address}", "--wait"]

    def submitted(file: Path) -> subprocess.CompletedProcess[str]:
        command = [str(file) if word == "PLAN" else word for word in words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    elsewhere = plan.with_name("h200.json")
    held = read_fleet_plan(plan)
    write_plan(replace(held, cells=tuple(replace(cell, kind="h200", gpus=1) for cell in held.cells)), elsewhere)
    refused = submitted(elsewhere)
    assert refused.returncode == 2 and "no node of this Ray cluster offers fp8bench:h200" in refused.stderr
    done = submitted(plan)
    assert done.returncode == 0 and "3 done." in done.stdout, (done.stdout, done.stderr)
    attempts = [state.attempts for state in compute_cell_states(held, store)]
    assert [len(each) for each in attempts] == [1, 1, 1]
    begun = [(datetime.fromisoformat(attempt.started), attempt.seconds) for (attempt,) in attempts]
    spans = sorted((begin, begin + timedelta(seconds=seconds)) for begin, seconds in begun)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), spans
    for path in (store / "runs").rglob("*.jsonl"):
        facts = json.loads(path.read_text().splitlines()[0])["header"]["environment"]["facts"]
        assert "env_OMP_NUM_THREADS" not in facts and "threads" in facts
    again = submitted(plan)
    assert again.returncode == 0 and [len(state.attempts) for state in compute_cell_states(held, store)] == [1, 1, 1]


def test_unsupported_options_of_an_engine_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cells = (Cell("gemm[m=16]@cpu"),)
    order = WorkerStartOrder(FleetPlan("1a2b", "", "", Request("gemm"), cells, ""), tmp_path / "plan.json", tmp_path)
    for engine, changed_order, words in (
        ("slurm", order, "there is no Slurm here"),
        ("ray", order, "Add --wait"),
        (
            "ray",
            replace(order, waits_for_workers=True, options={"partition": "gpu"}),
            "the option address alone, not partition",
        ),
        ("ray", replace(order, waits_for_workers=True), "does not name its devices"),
    ):
        with pytest.raises(UsageError, match=words):
            start_workers(engine, changed_order, lambda jobs: None)


def test_options_are_names_and_values_and_addresses_answer() -> None:
    assert parse_option("partition=gpu") == ("partition", "gpu") and parse_option("--exclusive") == ("exclusive", "")
    for text in ("", "=3", "a b=c", "$(x)=1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=VALUE"):
            parse_option(text)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for address in (f"127.0.0.1:{bound.getsockname()[1]}", "127.0.0.1:99999"):
            with pytest.raises(UsageError, match=f"nothing answers at {address}"):
                check_is_reachable(address)
    for of_ray in ("auto", "ray://127.0.0.1:1", "local"):
        check_is_reachable(of_ray)
