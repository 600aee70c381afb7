"""Four real ranks in the ways that cut a model train what one rank does, and send what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench import pipeline
from fp8bench.errors import WorkerFault
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, Record, Request, Status
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import owners
from fp8bench.nn.parallel.ways import ScaleTraffic, scale_traffic_of_cuts
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import SilentObserver
from tests.counts import sampled

RANKS = 4
TEXT = "the text that ranks train on, of which every one reads all. " * 1200
CUT = ("tp", "sp", "tp_fsdp")
PIPELINES = ("pp_gpipe", "pp_1f1b")


def trained(size: str, ways: tuple[str, ...], folder: Path) -> tuple[dict[str, Record], list[str]]:
    """What four ranks did, all in one launch, by way; and why the others were skipped."""
    text = folder / "text"
    text.write_text(TEXT)
    axes = (("way", ways), ("size", (size,)), ("batch", ("4",)), ("sequence", ("32",)))
    axes += (("microbatches", ("auto",)), ("amax", ("auto",)), ("wire", ("auto",)))
    request = Request("parallel", quick=True, rounds=1, data=str(text), ranks=RANKS, dtypes=("fp32",), axes=axes)
    run = pipeline.execute(request, folder / "store", SilentObserver(), "")
    records = {named(one): one for one in run.records if one.status is not Status.SKIPPED}
    assert {one.status for one in records.values()} == {Status.OK}, {name: one.reason for name, one in records.items()}
    assert {name.split()[0] for name in records} == set(ways)
    for name, record in records.items():
        least, most = (0.01, 0.15) if name.endswith("fp8") else (0.0, 1e-5)
        assert least <= gaps(record)["update_error"] < most and gaps(record)["loss_gap"] < most, (name, gaps(record))
    return records, [one.reason for one in run.records if one.status is Status.SKIPPED]


@pytest.mark.slow
def test_four_ranks_that_cut_products_train_what_one_does(tmp_path: Path) -> None:
    """And send what formulas say. Without casts there are no amax groups to choose from."""
    records, skipped = trained("nano", CUT, tmp_path)
    assert len(skipped) == 4
    config = replace(SIZES["nano"], sequence=32)
    stream, share = 4 * 4 * config.sequence * config.width, (RANKS - 1) / RANKS
    for rank in range(RANKS):
        assert sent(records["tp"], rank) == {"all_reduce": config.layers * 4 * 2 * stream * share}
        by_sequence, in_fp8 = sent(records["sp stream"], rank), sent(records["sp fp8"], rank)
        assert by_sequence["all_gather"] == by_sequence["reduce_scatter"] == config.layers * 4 * stream * share
        common = config.sequence * config.width + 2 * config.vocabulary * config.width
        norms = (2 * config.layers + 1) * config.width
        assert by_sequence["all_reduce"] == 4 * (common + norms) * 2 * share
        # Beside codes a scale for each part that is gathered, and of each sum the largest magnitude.
        codes, sums, scale = config.layers * stream * share + (common + norms) * share, 4 * config.layers + 1, 4
        assert in_fp8["all_gather"] == pytest.approx(codes + sums * scale * (RANKS - 1), abs=RANKS)
        assert in_fp8["all_to_all"] == pytest.approx(codes, abs=RANKS)
        assert in_fp8["all_reduce"] == sums * scale * 2 * share


@pytest.mark.slow
@pytest.mark.parametrize("size", sampled([2], [2, 4]))
def test_ranks_ask_for_scales_as_often_as_the_formula_says(tmp_path: Path, size: int) -> None:
    tokens = tmp_path / "tokens"
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(tokens)
    config = replace(SIZES["nano"], sequence=32)
    with RanksWorker(Settings(threads=1, corpus=str(tokens)), size) as worker:
        (facts,) = (one for one in worker.probe() if one.kind == "cpu")

        def asked(way: str, precision: str, **own: str) -> ScaleTraffic:
            """In float32, of the first rank."""
            params = {"way": way, "size": "nano", "batch": 4, "sequence": 32, **own}
            sent, *_ = worker.ask(
                60, "step_parts", Case("parallel", tuple(params.items()), precision, "cpu", ranks=size), facts
            )
            scales = [one for one in sent if one.rank == 0 and one.dtype == "float32"]
            return ScaleTraffic(sum(one.calls for one in scales), sum(one.bytes for one in scales))

        for precision in ("fp8", "fp8-delayed"):
            assert asked("tp", precision, amax="own") == (0, 0)
            assert asked("tp", precision, amax="group") == scale_traffic_of_cuts(config.layers, size)
        model = GPT(config, lambda name: PlainArithmetic(torch.float32), torch.float32)
        sizes = [parameter.numel() for parameter in model.parameters()]
        shares = [[n for n, own in zip(sizes, owners(sizes, size), strict=True) if own == rank] for rank in range(size)]
        pieces = max(map(len, shares))
        assert asked("zero", "fp8", wire="fp8") == (2, 12 * pieces * (size - 1))


@pytest.mark.nightly
def test_pairs_share_scales_and_not_those_of_other_pairs(tmp_path: Path) -> None:
    """Beside FSDP, which cuts what a pair has: a wrong scale of a pair is seen."""
    tokens, planted = tmp_path / "tokens", str(Path(__file__).with_name("planted_ways.py"))
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(tokens)
    params = {"size": "nano", "batch": 4, "sequence": 32, "amax": "group"}
    with RanksWorker(Settings(threads=1, corpus=str(tokens), imports=(planted,)), RANKS) as worker:
        (facts,) = (one for one in worker.probe() if one.kind == "cpu")
        ways = "tp_fsdp", "tp_half"
        right, wrong = (Case("parallel", (("way", way), *params.items()), "fp8", "cpu", ranks=RANKS) for way in ways)
        found = worker.within(60).error(right, facts)
        assert isinstance(found, dict) and 1e-4 < found["update_error"] < 0.3
        with pytest.raises(WorkerFault, match=r"rank 1 multiplies the weight of blocks.0.attn.qkv by .* all ranks' sh"):
            worker.within(60).error(wrong, facts)


@pytest.mark.nightly
def test_four_stages_train_what_one_rank_does(tmp_path: Path) -> None:
    """And send what formulas say. What a schedule cannot do with four stages is skipped, with the number."""
    records, skipped = trained("micro", PIPELINES, tmp_path)
    assert skipped == ["2 microbatches do not fill 4 stages by this schedule: choose 4 or more"]
    assert gaps(records["pp_gpipe 4"]) == gaps(records["pp_1f1b 4"])
    stream = 4 * 4 * 32 * SIZES["micro"].width
    for rank in range(RANKS):
        neighbours = (rank > 0) + (rank < RANKS - 1)
        for record in records.values():
            assert sent(record, rank) == {"send": neighbours * stream}


def named(record: Record) -> str:
    """'pp_1f1b 4', 'tp', 'sp fp8'."""
    params = dict(record.case.params)
    return " ".join(str(params[name]) for name in ("way", "microbatches", "wire") if name in params)


def gaps(record: Record) -> dict[str, float]:
    return {one.metric: one.samples[0] for one in record.measurements if one.metric.endswith(("gap", "update_error"))}


def sent(record: Record, rank: int) -> dict[str, float]:
    """Bytes by operation."""
    found: dict[str, float] = {}
    for one in record.sent:
        if one.rank == rank:
            found[one.operation] = found.get(one.operation, 0.0) + one.bytes
    return found
