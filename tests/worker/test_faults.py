"""The effects of GPU faults, planted in a suite's device.

Some memory messages mean a broken context, some errors arrive late, and some need a new process.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.errors import WorkerFault
from fp8bench.measure.handle import LocalWorker
from fp8bench.measure.passes import OUT_OF_MEMORY
from fp8bench.model import Case, DeviceFacts, Record, Request, Status
from fp8bench.model.raw import Settings
from fp8bench.protocols import SilentObserver, SilentPhases
from fp8bench.worker.faults import describe_fault
from tests.own_suites import suite_file

SUITE = """
import pathlib

import torch

from fp8bench.devices.cpu import HostStamper
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.protocols import Device
from fp8bench.registry import devices
from fp8bench.suites import Axis, Work, Workload, workloads

ADVICE = (
    "\\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more information."
    "\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"
)
BROKEN = []  # of this process: every call of the device raises it
GONE = pathlib.Path(__file__).with_name("gone")  # of the machine


@devices.register("planted")
class Planted(Device):
    kind = "planted"

    def available(self):
        return (DeviceFacts("planted", 0, "a planted device", 1 << 34, str(torch.__version__)),)

    def stamper(self, index):
        return HostStamper()

    def select(self, index):
        if GONE.exists():
            raise torch.AcceleratorError("CUDA error: no CUDA-capable device is detected")

    def synchronise(self, index):
        if BROKEN:
            raise BROKEN[0]

    def empty_cache(self):
        self.synchronise(0)

    def is_out_of_memory(self, error):
        return "out of memory" in str(error) or "NOT_INITIALIZED" in str(error)


def broken(words):
    BROKEN[:] = [torch.AcceleratorError("CUDA error: " + words + ADVICE)]


@workloads.register("faulty")
class Faulty(Workload):
    name = "faulty"
    summary = "is struck in bf16 as its axis says"

    def axes(self, facts):
        return (Axis("how", "what strikes", ("honest",), str),)

    def work(self, params):
        return Work(1.0)

    def support(self, params, precision, facts):
        return Support(Level.NATIVE, "planted")

    def prepare(self, setup):
        Planted().synchronise(0)
        how = setup.case.param("how") if setup.case.precision == "bf16" else "honest"
        if how == "refused":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`")
        if how == "exhausted":
            raise torch.AcceleratorError("CUDA error: out of memory")
        return [torch.ones(8, 8), how]

    def step(self, state, phase):
        with phase.gemm:
            state[0] @ state[0]
        if state[1] == "asserts":
            broken("device-side assert triggered")
        if state[1] == "says memory":
            broken("an illegal memory access was encountered")
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
        if state[1] == "goes":
            GONE.touch()
            broken("unspecified launch failure")

    def error(self, setup):
        how = setup.case.param("how") if setup.case.precision == "bf16" else ""
        if how == "late":
            broken("misaligned address")
        if how == "reads":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return {"some_error": 0.5}
"""
PLANTED = DeviceFacts("planted", 0, "a planted device", 1 << 34, "2.13")
HOWS = ("asserts", "says memory", "refused", "exhausted", "late", "reads", "goes", "honest")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with suite_file(tmp_path_factory.mktemp("planted"), SUITE) as path:
        yield Path(path)


@pytest.fixture
def worker(file: Path) -> Iterator[LocalWorker]:
    with LocalWorker(Settings()) as local:
        yield local
    next(module for module in sys.modules.values() if getattr(module, "__file__", None) == str(file)).BROKEN.clear()


def case(how: str) -> Case:
    return Case("faulty", (("how", how),), "bf16", "planted:0")


def test_only_exhausted_memory_asks_for_more_memory() -> None:
    for error, asks in ((MemoryError(), True), (OSError(errno.ENOMEM, "x"), True), (OSError(errno.ENOSPC, "x"), False)):
        assert ("ulimit -v" in describe_fault(error).text) is asks


def test_a_reason_is_no_book() -> None:
    found = describe_fault(ValueError("x" * 1_000_000))
    assert found.text == f"{'x' * 1000}... (999000 more characters)" and len(found.trace) > 1_000_000
    assert describe_fault(ValueError("x" * 1000)).text == "x" * 1000


def test_a_phase_that_there_is_not_is_told_those_that_there_are() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = SilentPhases().gem  # type: ignore[attr-defined]
    assert describe_fault(raised.value).text.startswith("unknown phase 'gem'. Did you mean 'gemm'? Known: accumulate, ")


def test_exhausted_memory_is_distinguished_from_a_broken_context(worker: LocalWorker, file: Path) -> None:
    """If the device does not answer after the same message, a smaller batch would not help."""
    with pytest.raises(WorkerFault) as raised:
        worker.with_time_limit(60).prepare("exhausted", case("exhausted"), PLANTED)
    assert raised.value.out_of_memory
    with pytest.raises(WorkerFault, match="CUBLAS_STATUS_NOT_INITIALIZED") as raised:
        worker.with_time_limit(60).prepare("says memory", case("says memory"), PLANTED)
    assert not raised.value.out_of_memory
    file.with_name("gone").touch()
    try:
        with pytest.raises(WorkerFault, match="no CUDA-capable device is detected"):
            worker.with_time_limit(60).answers(PLANTED)
    finally:
        file.with_name("gone").unlink()


def test_an_error_that_a_device_tells_late_belongs_to_the_pass_that_made_it(worker: LocalWorker) -> None:
    """A regression: it failed the next request, of another case."""
    with pytest.raises(WorkerFault, match="misaligned address"):
        worker.with_time_limit(60).error(case("late"), PLANTED)


@pytest.mark.slow
def test_each_fault_ends_its_case_alone_with_its_reason(file: Path, tmp_path: Path) -> None:
    axes = (("how", HOWS),)
    request = Request("faulty", ("fp32", "bf16"), ("planted",), axes=axes, rounds=2, imports=(str(file),), energy=False)
    try:
        run = pipeline.execute(request, tmp_path / "store", SilentObserver(), "a test")
    finally:
        file.with_name("gone").unlink(missing_ok=True)
    found = {(*dict(record.case.params).values(), record.case.precision): record for record in run.records}

    def of(how: str, precision: str = "bf16") -> Record:
        return found[how, precision]

    for how in HOWS[:-2]:
        assert of(how, "fp32").status is Status.OK and of(how, "fp32").timing is not None, of(how, "fp32").reason
    assert "CUDA_LAUNCH_BLOCKING" in of("asserts").detail
    assert of("asserts").reason == "AcceleratorError: CUDA error: device-side assert triggered"
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in of("says memory").reason
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in of("refused").reason
    assert of("exhausted").reason == OUT_OF_MEMORY
    assert of("late").reason == "no numerical error: AcceleratorError: CUDA error: misaligned address"
    assert of("reads").status is Status.OK and "no numerical error: OutOfMemoryError" in of("reads").detail
    # Lost in the middle of a run: the first error names it, and nothing more is tried.
    assert "unspecified launch failure" in of("goes").reason
    lost = "planted:0 does not answer a fresh process either: AcceleratorError: CUDA error: no CUDA-capable device is"
    assert of("goes", "fp32").reason.startswith(lost)
    assert {of("honest", precision).reason for precision in ("fp32", "bf16")} == {of("goes", "fp32").reason}
