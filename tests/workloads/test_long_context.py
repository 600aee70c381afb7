"""Long sequences: memory predicted before starting; kernels that store scores, and those that do not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fp8bench.devices.cpu import _read_container_memory, memory_bytes
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import Plan, Request, Scalar
from fp8bench.model.raw import Settings
from fp8bench.nn import attention
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Setup
from fp8bench.registry import devices, precisions, workloads
from fp8bench.worker.memory_pass import try_batch
from fp8bench.workloads.attention import Attention
from fp8bench.workloads.transformer import Transformer
from tests.counts import for_each
from tests.workloads.steps import CPU, SMALL, setup_of, small

SEQUENCE = 2048
CORE: dict[str, Scalar] = {
    **SMALL["attention"],
    "part": "core",
    "sequence": SEQUENCE,
    "batch": 1,
    "key_heads": 4,
    "head_width": 64,
}
MODEL: dict[str, Scalar] = {"size": "nano", "batch": 1, "sequence": 768, "micro_batches": 1}
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")


def peak(setup: Setup) -> int:
    workload = workloads.get(setup.case.workload)

    def prepared() -> tuple[object, object]:
        state = workload.prepare(setup)
        return state, partial(workload.step, state)

    with precisions.get(setup.case.precision).scope():
        counted = try_batch(lambda *_: prepared, devices.get("cpu"), 0, None)  # type: ignore[arg-type, return-value]
    assert counted is not None
    return counted


@pytest.mark.slow
@for_each(
    ("precision", "kernel", "changes"),
    [
        ("fp32", "auto", {}),
        ("fp32", "auto", {"part": "layer"}),
        ("fp32", "math", {"key_heads": 2}),
        ("fp32", "math", {"pass": "forward"}),
        ("bf16", "math", {}),
    ],
    ids=["core", "layer", "grouped", "forward", "bf16"],
)
def test_attention_takes_about_what_was_said(precision: str, kernel: str, changes: dict[str, Scalar]) -> None:
    params = {**CORE, **changes, **({} if kernel == "auto" else {"kernel": kernel})}
    takes = Attention().memory(params, precisions.get(precision))
    assert 0.65 < takes / peak(setup_of("attention", params, precision)) < 1.15
    assert (takes > 4 * 4 * SEQUENCE**2 * 2) == (kernel == "math")


@pytest.mark.slow
@for_each("changes", [{}, {"attention": "math"}, {"checkpointing": "blocks"}], ids=str)
def test_a_training_step_takes_about_what_was_said(changes: dict[str, Scalar], corpus: Corpus) -> None:
    params = {**MODEL, **changes}
    takes = Transformer().memory(params, precisions.get("fp32"))
    assert 0.85 < takes / peak(setup_of("transformer", params, "fp32", corpus=corpus.path)) < 1.15


def test_scores_that_are_written_down_are_counted(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 2 * 4 * 32 * 32 * 4
    assert Attention().error(small("attention", "fp32"))["scores_bytes"] == 0
    assert Attention().error(small("attention", "fp32", kernel="math"))["scores_bytes"] == written
    assert Attention().error(small("attention", "bf16", kernel="math", part="core"))["scores_bytes"] == written
    assert Attention().error(small("attention", "fp8", scores="low"))["scores_bytes"] == written
    monkeypatch.setattr(attention, "compute_fused_attention", lambda q, k, v, causal: (q @ k.mT).softmax(-1) @ v)
    assert Attention().error(small("attention", "fp32", key_heads=4))["scores_bytes"] == written
    monkeypatch.undo()
    for kernel, most in (("auto", 0), ("math", 4 * 48 * 48 * 4)):
        params = {**MODEL, "sequence": 48, "attention": kernel}
        assert Transformer().error(setup_of("transformer", params, "fp32", corpus=corpus.path))["scores_bytes"] == most


def planned(memory: int, **axes: tuple[str, ...]) -> Plan:
    request = Request("attention", ("fp32", "bf16"), axes=tuple({"part": ("core",), **axes}.items()))
    return make_plan(request, (replace(CPU, memory_bytes=memory),))


def test_what_does_not_fit_is_a_row_with_its_reason_and_said_before() -> None:
    plan = planned(4 << 30, sequence=("32768",), kernel=("auto", "math"))
    fused, written = plan.groups
    assert all(one.runs for one in fused.cases) and not any(one.runs for one in written.cases)
    assert "take about 51.5 GiB and cpu has 4.00 GiB" in written.cases[0].skip
    (said,) = plan.memory_notes
    assert "(fp32) takes about 288 MiB, cpu has 4.00 GiB; 2 of 4 cases take more and are skipped" in said
    (alone,) = planned(4 << 30, sequence=("32768",), kernel=("math",)).memory_notes
    assert "does not fit" in alone


PROGRAM = """
import torch
from fp8bench.devices import cpu
cpu.free_bytes = lambda: 256 << 20
cpu.Cpu().end_where_memory_does({ranks})
try:
    kept = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(1024)]
except RuntimeError as error:
    print(cpu.Cpu().is_out_of_memory(error))
"""


@pytest.mark.slow
@linux
@for_each("ranks", [1, 2])
def test_memory_that_ends_is_an_answer_of_the_process(ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ranks=ranks)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@linux
@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU says where its memory ends")
def test_a_worker_ends_where_memory_does() -> None:
    with ProcessWorker(Settings()) as worker:
        worker.probe()
        limits = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    (soft,) = (line.split()[3] for line in limits if line.startswith("Max data size"))
    assert int(soft) < 2 * memory_bytes()


def test_a_container_has_what_it_may_have(tmp_path: Path) -> None:
    assert [*_read_container_memory(tmp_path)] == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("7\n")
    assert [*_read_container_memory(tmp_path)] == []
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("8192\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("9\n")
    assert [*_read_container_memory(tmp_path)] == [(4096, 7), (8192, 9)]
