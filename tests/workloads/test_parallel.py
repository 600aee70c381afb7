"""The suite of ways of training in parallel: what is planned of it, and real ranks in every way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.model import Level, Record, Request, Status
from fp8bench.nn.parallel.zero import owners
from fp8bench.nn.sizes import SIZES
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from fp8bench.ways import ways
from tests.facts import CPU

TEXT = "the text that ranks train on, of which every one reads all. " * 40


def planned(ranks: int = 2, **axes: str) -> list[tuple[dict[str, object], str]]:
    """Parameters of every case, and why it is skipped."""
    request = Request("parallel", axes=tuple((name, (value,)) for name, value in axes.items()), ranks=ranks)
    plan = make_plan(request, (replace(CPU, ranks=ranks),))
    return [(dict(one.case.params), one.skip) for group in plan for one in group.cases]


def test_one_process_is_not_parallel() -> None:
    """Every case is skipped, and says how many ranks it takes; 'all' does not ask for it."""
    skipped = [one.skip for group in make_plan(Request("parallel"), (CPU,)) for one in group.cases]
    assert skipped and all("there is 1: add --ranks" in why for why in skipped)
    assert "parallel" not in workloads.names()


def test_every_value_of_a_ways_own_options_is_a_case() -> None:
    """What another way has is no parameter of its cases, and is refused where it was asked for."""
    wires = {params.get("wire") for params, _ in planned(way="ddp")}
    assert wires == {"fp32", "bf16", "fp8_gather", "fp8_twoshot"}
    assert all("amax" not in params and "microbatches" not in params for params, _ in planned(way="ddp"))
    assert {params.get("wire") for params, _ in planned(way="ddp", wire="usual")} == {"fp32"}
    (foreign, *_) = planned(way="ddp", wire="fp8_gather", microbatches="4")
    assert "ddp has no microbatches=4: it takes wire: fp32, bf16, fp8_gather, fp8_twoshot" in foreign[1]


def test_a_batch_has_an_equal_share_for_everybody() -> None:
    (first, *_) = planned(ranks=3, way="ddp", wire="fp32", batch="8")
    assert "8 sequences are no equal share for each of 3 ranks: choose a multiple of 3" in first[1]
    assert {level for _, level in planned(way="ddp", wire="fp32", batch="8")} == {""}


def test_layers_of_a_backend_are_not_divided() -> None:
    request = Request("parallel", dtypes=("fp32", "fp8:backend=torchao"), axes=(("way", ("ddp",)),), ranks=2)
    facts = replace(CPU, ranks=2, packages=("torchao",))
    refused = [one for group in make_plan(request, (facts,)) for one in group.cases if one.case.precision != "fp32"]
    assert refused and all(one.support.level is Level.REFUSED for one in refused)
    assert all(way.summary and way.least_ranks >= 2 for way in map(ways.get, ways.names()))


def test_unequal_rows_are_refused() -> None:
    """Nobody pads, and torchao's layers are those of fp8."""
    (first, *_) = planned(ranks=5, way="fsdp2", wire="fp32", batch="10")
    assert "the vocabulary (256) has no equal part for each of 5 ranks" in first[1]
    torchao = {why for _, why in planned(way="fsdp2", wire="torchao_fp8")}
    assert any("torchao's layers, which multiply in fp8: choose dtype fp8" in why for why in torchao)
    assert any("needs the package torchao" in why for why in torchao)


def test_owners_have_about_the_same() -> None:
    """The largest tensors first, each to whoever has least."""
    sizes = [400, 100, 100, 100, 90, 10]
    found = owners(sizes, 3)
    held = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(held) == [200, 200, 400]


@pytest.mark.slow
def test_real_ranks_train_what_one_rank_does(tmp_path: Path) -> None:
    """Every way once, by 2 ranks: agreement with one rank, bytes by formula, and what a step is made of."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    axes = (("wire", ("auto",)),)
    request = Request("parallel", quick=True, rounds=2, axes=axes, data=str(text), ranks=2)
    run = pipeline.execute(request, tmp_path / "store", SilentObserver(), "")
    records = [record for record in run.records if record.support.level is not Level.REFUSED]
    assert records and {record.status for record in records} == {Status.OK}, [one.reason for one in records]
    for record in records:
        assert record.overlap is not None and record.scaling is not None and {one.rank for one in record.sent} == {0, 1}
        assert all(min(times) > 0 for times in (record.scaling.whole, record.scaling.share, record.scaling.together))
    _data_parallel(records)
    _zero(records)
    _fsdp(records)


CONFIG = replace(SIZES["nano"], sequence=32)
NORMS = 2 * CONFIG.layers * CONFIG.width
IN_BLOCKS = CONFIG.layers * CONFIG.block_weights + NORMS
AROUND = (2 * CONFIG.vocabulary + CONFIG.sequence + 1) * CONFIG.width


def of_way(records: list[Record], way: str, **chosen: str) -> list[Record]:
    """Those of a way, with values of its options."""
    wanted = {"way": way, **chosen}
    return [one for one in records if wanted.items() <= dict(one.case.params).items()]


def sent_by(record: Record, rank: int = 0) -> dict[tuple[str, str], float]:
    return {(one.operation, one.dtype): one.bytes for one in record.sent if one.rank == rank}


def _zero(records: list[Record]) -> None:
    """Gradients go to owners and weights come back; of both ranks together each tensor moves once each way."""
    for record in of_way(records, "zero"):
        each = [sent_by(record, rank) for rank in (0, 1)]
        for operation in ("reduce", "broadcast"):
            assert sum(one[operation, "float32"] for one in each) == 4 * (IN_BLOCKS + AROUND)


def _fsdp(records: list[Record]) -> None:
    """Weights of blocks are gathered twice, those around them once; gradients are scattered once, in float32."""
    scattered = 4 * (IN_BLOCKS + AROUND) / 2
    for record in of_way(records, "fsdp2"):
        sent, wire = sent_by(record), str(record.case.param("wire"))
        assert sent.pop(("reduce_scatter", "float32")) == scattered
        codes = (2 * (IN_BLOCKS + 3 * NORMS)) / 2  # norms travel in their own float32 among the bytes
        wanted = {
            "bf16": {("all_gather", "bfloat16"): 2 * (2 * IN_BLOCKS + AROUND) / 2},
            "torchao_fp8": {
                ("all_gather", "uint8"): codes, ("all_gather", "float32"): 4 * AROUND / 2,
                ("all_reduce", "float32"): 4 * 4 * CONFIG.layers,
            },
        }.get(wire, {("all_gather", "float32"): 4 * (2 * IN_BLOCKS + AROUND) / 2})  # fmt: skip
        assert sent == wanted, (wire, sent, wanted)


def _data_parallel(records: list[Record]) -> None:
    """Gradients of all weights, and what goes with them: of 2 ranks each sends what it has once."""
    weights = IN_BLOCKS + AROUND
    factor = {"fp32": 4, "bf16": 2, "fp8_gather": 1, "fp8_twoshot": 1}
    for record in of_way(records, "ddp"):
        wire = str(record.case.param("wire"))
        sent = sum(sent_by(record).values())
        # Beside codes an amax or two of every bucket.
        assert factor[wire] * weights <= sent <= factor[wire] * weights + 64, (wire, sent)
        dtypes = {one.dtype for one in record.sent}
        assert dtypes == {"fp32": {"float32"}, "bf16": {"bfloat16"}}.get(wire, {"uint8", "float32"})
        gaps = {one.metric: one.samples[0] for one in record.measurements}
        if record.case.precision == wire == "fp32":
            assert gaps["update_error"] < 1e-5 and gaps["loss_gap"] < 1e-5
        assert gaps["update_error"] > 0 or wire == "fp32"
