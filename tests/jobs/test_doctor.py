"""The doctor's output on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import BackendMissing, WorkerHung, WorkerLost
from fp8bench.jobs import doctor, several_runs
from fp8bench.jobs.doctor import describe_subject, examine, list_precisions_by_rank
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import DeviceFacts, Request
from fp8bench.model.raw import Settings
from fp8bench.pipeline import execute
from fp8bench.protocols import SilentObserver
from fp8bench.protocols.workload import Layer
from fp8bench.registry import backends, precisions
from fp8bench.store.runs.listing import run_files
from tests.facts import CPU

H200 = DeviceFacts("cuda", 0, "NVIDIA H200", 140 << 30, "2.13.0", (9, 0), "13.0", arch="sm_90")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the worker by one in this process."""
    monkeypatch.setattr(doctor, "ProcessWorker", LocalWorker)


def test_whether_quantisers_compile_is_tried_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that ends the worker is named and breaks nothing else.

    The check has a time limit if nothing is cached.
    """
    assert "compiler  not tried: FP8BENCH_QUANTISERS=eager compiles none" in examine(False)

    def ask(self: LocalWorker, limit: float, name: str, facts: DeviceFacts) -> str:
        if facts.accelerated:
            raise WorkerLost("it crashed") if limit > 5 else WorkerHung("it is silent")
        return "a quantiser compiles in 1.2 s"

    monkeypatch.delenv("FP8BENCH_QUANTISERS")
    monkeypatch.setattr(LocalWorker, "ask", ask)
    words = "cpu: a quantiser compiles in 1.2 s; cuda:0: compiling ended the worker: it crashed"
    assert doctor.describe_compiler(LocalWorker(Settings()), (CPU, H200), 300.0) == words
    shown = doctor.describe_compiler(LocalWorker(Settings()), (CPU, H200), 4.0)
    assert "cuda:0: kernels are probably not compiled yet (no answer in 4 s). The first run compiles" in shown


def test_calibrating_adds_the_harness_own_costs() -> None:
    text = "\n".join(examine(True))
    assert "phase marker on" in text and "phase marker off" in text and "one clock stamp" in text


@pytest.mark.slow
def test_calibrating_measures_a_standard_case_and_later_runs_know_it(tmp_path: Path) -> None:
    """The store keeps the spread of the runs, not the runs."""
    text = "\n".join(several_runs.measure_standard_case(tmp_path, TERMINAL_JOB_OBSERVER))
    assert "difference between runs on cpu" in text and "in 6 fresh processes, " in text
    assert (tmp_path / "reruns").exists() and not list(run_files(tmp_path))
    request = Request("gemm", ("fp32", "bf16"), ("cpu",), axes=(("shape", ("128x128x128",)),), rounds=24)
    run = execute(request, tmp_path, SilentObserver(), "")
    assert all(record.reruns is not None for record in run.records)


def test_a_gpu_that_nothing_runs_on_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(H200, unusable="this torch has no kernels for sm_90")
    monkeypatch.setattr(LocalWorker, "probe", lambda self: (CPU, old))
    lines = list(examine(False))
    assert "  nothing runs on it: this torch has no kernels for sm_90" in lines
    assert not any(line.split()[:2] == ["fp8", "native"] for line in lines)
    assert not any("compiler" in line and "cuda:0" in line for line in lines)


def test_listing_devices_names_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalWorker, "probe", lambda self: (CPU,))
    assert list(describe_subject("devices", ())) == [
        "cpu      a processor, 16.0 GiB",
        "cuda     none on this machine",
        "xpu      none on this machine",
    ]


def test_listing_a_suite_shows_the_defaults_of_the_device_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for device in (CPU, H200):
        monkeypatch.setattr(LocalWorker, "probe", lambda self, device=device: (CPU, device))
        shown[device.kind] = "\n".join(describe_subject("transformer", ()))
    assert "default values on cpu" in shown["cpu"] and "nano" in shown["cpu"]
    assert "default values on cuda:0" in shown["cuda"] and " gpt2-124m " in shown["cuda"]
    assert "by kind attn, mlp, head, embed, residual, logits, norm; by name blocks.0.attn.qkv to head" in shown["cuda"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((Layer("norm.0", "norm", product=False),), "by kind norm; by full name"),
        ((Layer("head", "mlp"),), "by kind mlp; by name head, or a prefix of names"),
    ],
)
def test_listing_a_suite_names_its_layers(
    layers: tuple[Layer, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalWorker, "probe", lambda self: (CPU,))
    monkeypatch.setattr(doctor, "merge_layers", lambda *_: layers)
    assert f"layers for --precision-map: {expected}" in list(describe_subject("gemm", ()))


def test_listing_dtypes_gives_aliases_and_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalWorker, "probe", lambda self: (CPU, H200))
    short = list(describe_subject("precisions", ()))
    names = [line.split()[0] for line in short[:-1] if not line.startswith("  ")]
    assert names == [precision.name for precision in list_precisions_by_rank()]
    assert all(len(line) <= 80 for line in short)
    assert " ".join(precisions.get("fp8").summary.split()) in " ".join(" ".join(short).split()), "no summary is cut"
    assert "list precisions NAME" in short[-1]
    text = "\n".join(line for name in precisions.names() for line in describe_subject("precisions", (), name))
    assert "nvfp4 (also fp4): " in text
    for name in precisions.names():
        for option in precisions.get(name).options:
            assert f"    :{option.name}={option.default}" in text and f"  {option.description}" in text
    assert "(also gw)" in text
    assert "fp8-delayed:history=16:margin=1" in text
    assert text.count("    on cpu ") == text.count("    on cuda:0 ") == len(precisions.names())


def test_a_backend_that_is_installed_and_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(CPU, packages=(("torchao", "0.18.0"),))
    with LocalWorker(Settings()) as worker:
        monkeypatch.setattr(type(backends.get("torchao")), "imported", _broken)
        (line,) = (line for line in doctor.describe_backends(worker, facts) if line.startswith("torchao "))
    assert line.endswith("torchao is installed and cannot be imported (OSError: libcudart.so.13)")


def _broken(self: object) -> None:
    raise BackendMissing("torchao", OSError("libcudart.so.13"))
