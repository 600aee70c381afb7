"""The suite of ways of training in parallel: what is planned of it, and real ranks in every way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8bench import pipeline
from fp8bench.analysis.metrics import iterate_case_metrics
from fp8bench.errors import WorkerFault
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, DeviceFacts, Request, Status
from fp8bench.model.raw import Settings
from fp8bench.nn.experts import draw_expert_load
from fp8bench.nn.parallel.exchanges import assign_owner_ranks
from fp8bench.nn.sizes import SIZES, MoeSizes
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from tests.counts import sampled
from tests.facts import CPU
from tests.nn.parallel import planted_ways

TEXT = "the text that ranks train on, of which every one reads all. " * 1200


def planned(ranks: int = 2, **axes: str) -> list[tuple[dict[str, object], str]]:
    request = Request("parallel", axes=tuple((name, (value,)) for name, value in axes.items()), ranks=ranks)
    plan = make_plan(request, (replace(CPU, ranks=ranks),))
    return [(dict(one.case.params), one.skip) for group in plan for one in group.cases]


def test_one_process_is_not_parallel() -> None:
    skipped = [one.skip for group in make_plan(Request("parallel"), (CPU,)) for one in group.cases]
    assert skipped and all("ranks, not 1: add --ranks" in why for why in skipped)
    assert "parallel" not in workloads.names()


def test_a_batch_has_an_equal_share_for_everybody() -> None:
    (first, *_) = planned(ranks=3, way="ddp", wire="fp32", batch="8")
    assert "8 sequences have no equal share for each of 3 ranks: choose a multiple of 3" in first[1]
    assert {level for _, level in planned(way="ddp", wire="fp32", batch="8")} == {""}


def test_unequal_rows_are_refused() -> None:
    (first, *_) = planned(ranks=5, way="fsdp2", wire="fp32", batch="10")
    assert "the vocabulary (256) cannot be divided equally among 5 ranks" in first[1]
    torchao = {why for _, why in planned(way="fsdp2", wire="torchao_fp8")}
    assert any("torchao's layers, which multiply in fp8: choose dtype fp8" in why for why in torchao)
    assert any("needs the package torchao" in why for why in torchao)


def test_owners_have_about_the_same() -> None:
    sizes = [400, 100, 100, 100, 90, 10]
    found = assign_owner_ranks(sizes, 3)
    held = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(held) == [200, 200, 400]


CONFIG = replace(SIZES["nano"], sequence=32)
NORMS = 2 * CONFIG.layers * CONFIG.width
IN_BLOCKS = CONFIG.layers * CONFIG.block_weights + NORMS
AROUND = (2 * CONFIG.vocabulary + CONFIG.sequence + 1) * CONFIG.width
TENSORS = 6 * CONFIG.layers + 4
Bytes = dict[tuple[str, str], float]
Ranks = tuple[RanksWorker, DeviceFacts]


@contextmanager
def ranks(size: int, folder: Path) -> Iterator[Ranks]:
    tokens = folder / "tokens"
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(tokens)
    settings = Settings(threads=1, corpus=str(tokens), imports=(str(Path(planted_ways.__file__)),))
    with RanksWorker(settings, size) as worker:
        (facts,) = (one for one in worker.probe() if one.kind == "cpu")
        yield worker, facts


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("two")) as both:
        yield both


@pytest.mark.slow
def test_ways_that_divide_data_train_what_one_rank_does(two: Ranks) -> None:
    """Runs DDP, FSDP2 and ZeRO in every wire format."""
    assert _divided_data(two, 2, "auto") == 11


@pytest.mark.nightly
def test_four_ranks_that_divide_data_do_so_too(tmp_path: Path) -> None:
    with ranks(4, tmp_path) as four:
        assert _divided_data(four, 4, "usual") == 3


def _divided_data(group: Ranks, size: int, wires: str) -> int:
    """Compares a case of each way and wire with one rank; returns their number."""
    worker, facts = group
    axes = (("way", ("ddp", "fsdp2", "zero")), ("wire", (wires,)))
    plan = make_plan(Request("parallel", dtypes=("fp32", "fp8"), axes=axes, quick=True, ranks=size), (facts,))
    for planned_group in plan.groups:
        case = next(one.case for one in planned_group.cases if one.runs)
        gaps = worker.with_time_limit(60).error(case, facts)
        sent, overlap, scaling = worker.ask(60, "step_parts", case, facts)
        assert all(min(times) > 0 for times in (scaling.whole, scaling.share, overlap.communication))
        assert 6 <= len(overlap.both) == len(overlap.in_turn) <= 15
        each = [{(one.operation, one.dtype): one.bytes for one in sent if one.rank == rank} for rank in range(size)]
        _as_one_rank(case, gaps)
        _by_formula(case, each, (size - 1) / size)
    return len(plan.groups)


def _as_one_rank(case: Case, gaps: dict[str, float]) -> None:
    """In float32 only the order of additions differs; otherwise rounding leaves a non-zero difference."""
    if case.precision == "fp32" and dict(case.params).get("wire", "fp32") == "fp32":
        assert gaps["update_error"] < 1e-5 and gaps["loss_gap"] < 1e-5, (case.id, gaps)
    else:
        assert 1e-4 < gaps["update_error"] < 0.3, (case.id, gaps)


def _by_formula(case: Case, each: list[Bytes], share: float) -> None:
    """Bytes that ranks of a ring of n send: (n-1)/n of everything, twice where gradients are summed."""
    wire = dict(case.params).get("wire", "")
    weights = IN_BLOCKS + AROUND
    if wire == "fp8":  # gradients to owners and weights from them, a byte each, plus scales
        for one in each:
            assert {dtype for _, dtype in one} == {"uint8", "float32"}
            assert one["all_to_all", "uint8"] == pytest.approx(2 * weights * share)
            # A scale for each tensor there, the largest magnitudes back; each of two owners has nearly half of them.
            scales = 4 * TENSORS * share
            assert scales <= one["all_gather", "float32"] <= 2 * scales
            assert 2 * scales <= one["all_reduce", "float32"] <= 4 * scales
        return
    if case.param("way") == "zero":
        size, dtype = (2, "bfloat16") if wire == "bf16" else (4, "float32")
        for key in (("reduce", dtype), ("broadcast", dtype)):
            assert [one.pop(key) for one in each] == [pytest.approx(size * weights * share)] * len(each)
        assert not any(each)
        return
    if case.param("way") == "ddp":
        of_weights = {"fp32": 8, "bf16": 4, "fp8_gather": len(each), "fp8_twoshot": 2}[str(wire)] * weights * share
        dtypes = {"fp32": {"float32"}, "bf16": {"bfloat16"}}.get(str(wire), {"uint8", "float32"})
        for one in each:  # codes with scales, padded to a multiple of the number of ranks
            assert of_weights <= sum(one.values()) <= of_weights + 256 and {dtype for _, dtype in one} == dtypes
        return
    gathered = {
        "bf16": {("all_gather", "bfloat16"): 2 * (2 * IN_BLOCKS + AROUND) * share},
        "torchao_fp8": {  # norms are sent as float32 among the bytes
            ("all_gather", "uint8"): 2 * (IN_BLOCKS + 3 * NORMS) * share,
            ("all_gather", "float32"): 4 * AROUND * share,
            ("all_reduce", "float32"): 4 * 4 * CONFIG.layers * 2 * share,
        },
    }.get(str(wire), {("all_gather", "float32"): 4 * (2 * IN_BLOCKS + AROUND) * share})
    assert each == [{**gathered, ("reduce_scatter", "float32"): 4 * weights * share}] * len(each), wire


@pytest.mark.slow
@pytest.mark.usefixtures("short_slots")
def test_a_run_tells_scaling_and_bytes(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    axes = (("way", ("ddp",)), ("wire", ("fp8_twoshot",)))
    request = Request("parallel", dtypes=("fp32",), axes=axes, quick=True, rounds=2, data=str(text), ranks=2)
    (record,) = pipeline.execute(request, tmp_path / "store", SilentObserver(), "").records
    assert record.status is Status.OK, record.reason
    told = {str(one.name) for one in iterate_case_metrics(record, None)}
    assert {"strong_scaling", "weak_scaling", "wire_bytes", "exposed_time", "loss_gap", "update_error"} <= told


@pytest.mark.slow
def test_experts_by_ranks_train_what_one_rank_does(two: Ranks) -> None:
    axes = (("way", ("ep",)), ("wire", ("auto",)), ("load", ("zipf:1",)))
    worker, facts = two
    plan = make_plan(Request("parallel", dtypes=("fp32", "fp8"), axes=axes, quick=True, ranks=2), (facts,))
    cases = [one.case for group in plan for one in group.cases]
    assert len(cases) == 3 * 2
    for case in cases:
        gaps = worker.with_time_limit(60).error(case, facts)
        exact = case.precision == "fp32" and case.param("wire") == "stream"
        assert gaps["update_error"] < (1e-5 if exact else 0.5) and (exact or gaps["update_error"] > 1e-4), case.id
        rows = [gaps[f"rank{rank}_rows"] for rank in range(2)]
        assert sum(rows) == CONFIG.layers * 2 * 4 * CONFIG.sequence
        assert rows[0] > 1.5 * rows[1]
        if case.precision == "fp32":
            sent, _, _ = worker.ask(60, "step_parts", case, facts)
            for rank in range(2):
                of_rank = {(one.operation, one.dtype): one.bytes for one in sent if one.rank == rank}
                assert of_rank == {key: pytest.approx(value) for key, value in _of_experts(case, rank).items()}


def _of_experts(case: Case, rank: int) -> Bytes:
    """Bytes that one of two ranks sends in a step with 4 sequences: both directions, and the gradients of both."""
    out = come = 0
    for layer in range(CONFIG.layers):
        plan = draw_expert_load(str(case.param("load")), 4 * CONFIG.sequence, MoeSizes(1, 1, 8, 2), layer)
        assert plan is not None
        for token, chosen in enumerate(plan.tolist()):
            for expert in chosen:
                out += token // (2 * CONFIG.sequence) == rank != expert // 4
                come += token // (2 * CONFIG.sequence) != rank == expert // 4
    width = CONFIG.width
    wire = case.param("wire")
    everywhere = 4 * CONFIG.layers * CONFIG.width**2 + CONFIG.layers * 8 * CONFIG.width + NORMS + AROUND
    found: Bytes = {("all_reduce", "float32"): 4.0 * everywhere, ("all_gather", "int64"): CONFIG.layers * 8 * 8.0}
    if wire == "fp8":
        return found | {
            ("all_to_all", "uint8"): out * width,
            ("all_to_all", "float32"): out * 4.0,
            ("all_to_all", "bfloat16"): 2.0 * width * (come + come + out),
        }
    dtype, size = ("float32", 4) if wire == "stream" else ("bfloat16", 2)
    return found | {("all_to_all", dtype): 2.0 * (out + come) * width * size}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", sampled(["ep_turned"], ["ep_turned", "ep_alone"]))
def test_mistakes_of_experts_by_ranks_are_found(mistake: str, two: Ranks) -> None:
    worker, facts = two
    params = {"size": "nano", "batch": 4, "sequence": 32, "wire": "stream", "load": "uniform", "way": mistake}
    case = Case("parallel", tuple(params.items()), "fp8", "cpu", ranks=2)
    with pytest.raises(WorkerFault, match="change weights differently from one rank"):
        worker.with_time_limit(60).error(case, facts)
