"""Real workers, and processes of somebody's own, whose switches and clocks are not as they should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import fp8bench
from fp8bench import pipeline
from fp8bench.errors import ImportFailed, UsageError, WorkerFault
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Case, Request, Status
from fp8bench.model.raw import Settings
from fp8bench.protocols import SilentObserver
from fp8bench.user_code import import_user_modules
from fp8bench.user_code.switches import read_values, restore_values
from fp8bench.worker.switches import switches
from tests.counts import for_each
from tests.own_suites import forgotten
from tests.worker.test_switches import KEPT, LEFT

SUITES = """
import os, time
import torch
from fp8bench.suites import Axis, Work, Workload, workloads

# Where a case of the culprit sets switches, and which.
SET = {
    "oneDNN": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "products": lambda: torch.set_float32_matmul_precision("medium"),
    "denormals": lambda: torch.set_flush_denormal(True),
}


@workloads.register("culprit")
class Culprit(Workload):
    name = "culprit"
    summary = "sets switches and leaves them"
    dtypes = ("bf16",)

    def axes(self, facts):
        return (Axis("where", "the method", ("step",), str), Axis("what", "the switch", tuple(SET), str))

    def work(self, params):
        return Work(1.0)

    def at(self, where, case):
        if case.param("where") == where and case.precision == "bf16":
            SET[case.param("what")]()

    def prepare(self, setup):
        self.at("prepare", setup.case)
        return setup.case

    def step(self, state, phase):
        with phase.gemm:
            sum(range(1000))
        self.at("step", state)

    def error(self, setup):
        self.at("error", setup.case)
        return {"some_error": 0.0}

    def check(self, state):
        self.at("check", state)
        return ""


@workloads.register("witness")
class Witness(Culprit):
    name = "witness"
    summary = "tells what switches its steps and passes find"

    def at(self, where, case):
        x = torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(), 5e-324 * 1.0
        if x != (True, "highest", 5e-324):
            raise ValueError(f"{where} found {x}")
"""
WORDS = {
    "oneDNN": "oneDNN at False",
    "products": "float32 products at medium",
    "denormals": "denormals as zero at True",
}
WHERE = ("step", "prepare", "error", "check")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("own") / "own_switches.py"
    path.write_text(SUITES)
    with forgotten(path.parent):
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_switches_that_one_suite_leaves_reach_no_other(own: Path, tmp_path: Path, isolation: bool) -> None:
    """Set in a step or a pass, they are named in the culprit's failure; gemm and a witness find them unchanged.

    Also in one process, where no worker ends with its culprit.
    """
    axes = (("where", WHERE), ("what", tuple(WORDS)), ("shape", ("32",)))
    request = Request(
        f"culprit,gemm,{own}",
        ("fp32", "bf16"),
        ("cpu",),
        axes=axes,
        rounds=2,
        imports=(str(own),),
        energy=False,
        isolation=isolation,
    )
    import_user_modules(request.imports)
    before = read_values(switches())
    run = pipeline.execute(request, tmp_path, SilentObserver(), "a test")
    assert read_values(switches()) == before
    failed = [record for record in run.records if record.status is not Status.OK]
    assert len(failed) == len(WHERE) * len(WORDS)
    for record in failed:
        assert record.case.workload == "culprit" and record.case.precision == "bf16"
        assert f"it left {WORDS[str(record.case.param('what'))]}" in record.reason
    suites = {record.case.workload for record in run.records if record.status is Status.OK}
    assert suites == {"culprit", "gemm", "witness"}


@for_each(
    ("line", "words"),
    [
        ("import time; time.perf_counter = lambda: 0.0", "time.perf_counter at "),
        ("import os; os.environ['OMP_WAIT_POLICY'] = 'active'", "the environment at .*OMP_WAIT_POLICY=active"),
        ("import gc; gc.disable()", "garbage collection at False"),
    ],
)
def test_a_file_whose_import_sets_switches_is_refused(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sets_at_import.py"
    path.write_text(line)
    before = read_values(switches())
    for _ in range(2):
        with pytest.raises(ImportFailed, match=rf"importing '.*sets_at_import.py' leaves {words}.*: all later"):
            import_user_modules([str(path)])
        assert read_values(switches()) == before


def test_a_file_whose_import_sets_switches_of_torch_is_refused_by_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "sets_at_import.py"
    path.write_text("import torch; torch.backends.mkldnn.enabled = False; torch.set_default_dtype(torch.float64)")
    words = r"importing .* leaves the default dtype at torch.float64 .*, oneDNN at False"
    with ProcessWorker(Settings(imports=(str(path),))) as worker:
        with pytest.raises(ImportFailed, match=f"^{words}"):
            worker.probe()
        with pytest.raises(WorkerFault, match=f"^ImportFailed: {words}"):
            worker.probe()


# The message for each switch that a workload may leave changed (`LEFT`, `KEPT`) and that affects a reference.
BENT = {
    "autocast": r"autocast on cpu at True \(expected False\).*set_autocast_enabled",
    "inference": r"inference mode at True \(expected False\).*leave torch.inference_mode",
    "grad": r"gradients at False \(expected True\).*torch.set_grad_enabled\(True\)",
    "dtype": r"the default dtype at torch.bfloat16 \(expected torch.float32\)",
    "device": r"the default device at cpu \(expected None\)",
    "oneDNN": r"oneDNN at False \(expected True\), .*Correct that first \(torch.backends.mkldnn.enabled = True\)",
    "its convolutions": r"oneDNN's float32 convolutions at bf16 \(expected ieee\)",
    "its products": r"float32 products at mixed \(expected highest\)",
    "accumulators": r"fp16's accumulators at True \(expected False\)",
    "flash": r"flash attention at False \(expected T",
    "denormals": r"denormals as zero at True \(expected False\)",
    "anomaly": r"anomaly detection at True \(expected False\)",
    "operators": r"modes of torch's dispatcher at 1 \(expected 0\)",
    "clock": r"time.perf_counter at time.time \(ex",
    "variable": r"the environment at .*ONEDNN_DEFAULT_FPMATH_MODE=BF16.* \(expected none of NVIDIA_TF32_OVER",
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@for_each("which", BENT)
def test_a_process_that_would_bend_its_reference_is_refused(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = read_values(switches())
    with KEPT[which][0]() if which in KEPT else nullcontext():
        if which in LEFT:
            LEFT[which][0]()
        elif which not in KEPT:
            monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        before = read_values(switches())
        with pytest.raises(UsageError, match=BENT[which]):
            fp8bench.run("gemm", dtypes="fp32", set={"shape": 8}, rounds=1, isolation=False, store=tmp_path)
        assert read_values(switches()) == before
    if which in LEFT:
        restore_values(switches(), usual)


@pytest.mark.slow
def test_clocks_replaced_before_the_worker_began_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.perf_counter = time.monotonic\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ProcessWorker(Settings()) as worker, pytest.raises(WorkerFault, match=r"time.perf_counter at time.monotonic"):
        worker.probe()


def test_a_clock_that_looks_as_it_should_and_goes_wrong_fails_the_slot(tmp_path: Path) -> None:
    path = tmp_path / "half_speed.py"
    path.write_text(
        "import time\nfrom fp8bench.devices import cpu\n"
        "cpu.HostStamper.source = lambda self: lambda: time.perf_counter_ns() // 2\n"
    )
    case = Case("gemm", (("m", 64), ("n", 64), ("k", 64), ("product", "forward"), ("operands", "cast")), "fp32", "cpu")
    with ProcessWorker(Settings(imports=(str(path),))) as worker:
        worker.within(60.0).prepare("one", case, worker.probe()[0])
        with pytest.raises(WorkerFault, match="ClocksDisagree: the clock of phases counted "):
            worker.within(60.0).slot("one", 2000, 1)
