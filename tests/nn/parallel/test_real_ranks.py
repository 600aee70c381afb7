"""Real ranks train like one rank and send as many bytes as formulas predict.

Planted mistakes differ from one rank by more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench import pipeline
from fp8bench.errors import WorkerFault
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, DeviceFacts, Record, Request, Scalar, Status
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import assign_owner_ranks
from fp8bench.nn.parallel.step import find_difference_limits
from fp8bench.nn.parallel.ways import ScaleTraffic, count_scale_traffic
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import SilentObserver
from fp8bench.registry import precisions
from tests.counts import sampled

RANKS = 4
TEXT = "the text that ranks train on, of which every one reads all. " * 1200
CUT = ("tp", "sp", "tp_fsdp")
PIPELINES = ("pp_gpipe", "pp_1f1b")


@dataclass
class Ranks:
    """A worker of several ranks, and its CPU."""

    worker: RanksWorker
    facts: DeviceFacts


@contextmanager
def ranks(size: int, folder: Path) -> Iterator[Ranks]:
    tokens = folder / "tokens"
    planted = tuple(str(Path(__file__).with_name(name)) for name in ("planted_ways.py", "tied_size.py"))
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(tokens)
    with RanksWorker(Settings(threads=1, corpus=str(tokens), imports=planted), size) as worker:
        (facts,) = (item for item in worker.probe() if item.kind == "cpu")
        yield Ranks(worker, facts)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("two")) as result:
        yield result


def case(precision: str, way: str, size: int = 2, **own: Scalar) -> Case:
    params: dict[str, Scalar] = {"way": way, "size": "nano", "batch": 4, "sequence": 32, **own}
    return Case("parallel", tuple(params.items()), precision, "cpu", ranks=size)


def trained(size: str, ways: tuple[str, ...], folder: Path) -> tuple[dict[str, Record], list[str]]:
    text = folder / "text"
    text.write_text(TEXT)
    axes = (("way", ways), ("size", (size,)), ("batch", ("4",)), ("sequence", ("32",)))
    axes += (("microbatches", ("auto",)), ("amax", ("auto",)), ("wire", ("auto",)))
    request = Request("parallel", quick=True, rounds=1, data=str(text), ranks=RANKS, dtypes=("fp32",), axes=axes)
    run = pipeline.execute(request, folder / "store", SilentObserver(), "")
    records = {named(item): item for item in run.records if item.status is not Status.SKIPPED}
    assert {item.status for item in records.values()} == {Status.OK}, {
        name: item.reason for name, item in records.items()
    }
    assert {name.split()[0] for name in records} == set(ways)
    for name, record in records.items():
        least, most = (0.01, 0.15) if name.endswith("fp8") else (0.0, 1e-5)
        assert least <= gaps(record)["update_error"] < most and gaps(record)["loss_gap"] < most, (name, gaps(record))
    return records, [item.reason for item in run.records if item.status is Status.SKIPPED]


@pytest.mark.nightly
@pytest.mark.usefixtures("short_slots")
def test_four_ranks_that_cut_products_train_what_one_does(tmp_path: Path) -> None:
    """They also send the predicted bytes. Without casts there are no amax groups to choose from."""
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
        # With codes a scale for each gathered part, and for each sum the largest magnitude.
        codes, sums, scale = (
            config.layers * stream * share + (common + norms) * share,
            4 * config.layers + 1,
            4,
        )
        assert in_fp8["all_gather"] == pytest.approx(codes + sums * scale * (RANKS - 1), abs=RANKS)
        assert in_fp8["all_to_all"] == pytest.approx(codes, abs=RANKS)
        assert in_fp8["all_reduce"] == sums * scale * 2 * share


@pytest.mark.slow
def test_ranks_ask_for_scales_as_often_as_the_formula_says(two: Ranks) -> None:
    assert_asked(two, 2, "fp8-delayed")


@pytest.mark.nightly
def test_four_ranks_do_so_too_and_pairs_share_scales(tmp_path: Path) -> None:
    with ranks(RANKS, tmp_path) as four:
        assert_asked(four, RANKS, "fp8", "fp8-delayed")
        right, wrong = (case("fp8", way, RANKS, amax="group") for way in ("tp_fsdp", "tp_half"))
        result = four.worker.with_time_limit(60).error(right, four.facts)
        assert isinstance(result, dict) and 1e-4 < result["update_error"] < 0.3
        with pytest.raises(WorkerFault, match=r"rank 1 multiplies the weight of blocks.0.attn.qkv by .* all ranks' sh"):
            four.worker.with_time_limit(60).error(wrong, four.facts)


def assert_asked(group: Ranks, size: int, *modes: str) -> None:
    def asked(way: str, precision: str, **own: str) -> ScaleTraffic:
        sent, *_ = group.worker.ask(60, "step_parts", case(precision, way, size, **own), group.facts)
        scales = [item for item in sent if item.rank == 0 and item.dtype == "float32"]
        return ScaleTraffic(sum(item.calls for item in scales), sum(item.bytes for item in scales))

    config = replace(SIZES["nano"], sequence=32)
    for mode in modes:
        assert asked("tp", mode, amax="own") == (0, 0)
        assert asked("tp", mode, amax="group") == count_scale_traffic(config.layers, size)
    model = GPT(config, lambda name: PlainArithmetic(torch.float32), torch.float32)
    sizes = [parameter.numel() for parameter in model.parameters()]
    shares = [
        [n for n, own in zip(sizes, assign_owner_ranks(sizes, size), strict=True) if own == rank]
        for rank in range(size)
    ]
    assert asked("zero", "fp8", wire="fp8") == (2, 12 * max(map(len, shares)) * (size - 1))


@pytest.mark.nightly
def test_four_stages_train_what_one_rank_does(tmp_path: Path) -> None:
    records, skipped = trained("micro", PIPELINES, tmp_path)
    assert skipped == ["2 microbatches do not fill 4 stages by this schedule: choose 4 or more"]
    assert gaps(records["pp_gpipe 4"]) == gaps(records["pp_1f1b 4"])
    stream = 4 * 4 * 32 * SIZES["micro"].width
    for rank in range(RANKS):
        neighbours = (rank > 0) + (rank < RANKS - 1)
        for record in records.values():
            assert sent(record, rank) == {"send": neighbours * stream}


HONEST = [
    case("fp32", "ddp", wire="bf16"), case("fp32", "ddp", wire="fp8_gather"), case("fp8", "ddp", wire="fp8_twoshot"),
    case("mxfp8", "ddp", wire="bf16"), case("fp8", "tp", amax="own"), case("fp8", "tp", amax="group"),
    case("nvfp4", "tp", amax="own"), case("fp8-delayed", "tp", amax="group"),
    case("fp8", "sp", amax="group", wire="fp8"), case("bf16", "sp", amax="own", wire="fp8"),
    case("fp32", "zero", wire="bf16"), case("fp16", "zero", wire="fp32"), case("mxfp8", "zero", wire="fp8"),
    case("bf16", "fsdp2", wire="bf16"),
]  # fmt: skip
ROUNDING = "3 steps change weights differently from one rank alone"
BY_SCALE = "rank 1 multiplies the weight of blocks.0.attn.qkv by .* in cast 1, where the largest magnitudes of all"
BY_MEANS = "rank [01] has received .* FP8 numbers that do not follow from all ranks' values"
MISTAKEN = [
    (case("fp32", "ddp_1.06", wire="bf16"), ROUNDING), (case("bf16", "ddp_1.06", wire="bf16"), ROUNDING),
    (case("fp32", "ddp_1.06", wire="fp8_gather"), BY_MEANS), (case("fp8", "ddp_1.2", wire="fp8_twoshot"), BY_MEANS),
    (case("mxfp8", "ddp_1.2", wire="bf16"), ROUNDING), (case("fp8", "ddp_1.4", wire="bf16"), ROUNDING),
    (case("nvfp4", "ddp_2", wire="bf16"), ROUNDING), (case("fp8", "tp_quarter", amax="group"), BY_SCALE),
    (case("fp8", "tp_twice", amax="group"), BY_SCALE), (case("fp8", "tp_half", amax="group"), BY_SCALE),
    (case("fp8-delayed", "tp_twice", amax="group"), BY_SCALE.replace("cast 1,", "cast 2,")),
    (case("fp8", "tp_alone", amax="group"), BY_SCALE.replace("rank 1", "rank [01]")),
    (case("fp32", "ddp_forgets", wire="fp32"), ROUNDING), (case("fp8", "ddp_forgets", wire="fp8_gather"), BY_MEANS),
    (case("nvfp4", "ddp_forgets", wire="fp32"), ROUNDING), (case("fp8", "ddp_seen_twice", wire="fp32"), ROUNDING),
    (case("nvfp4", "ddp_seen_twice", wire="fp32"), ROUNDING), (case("fp8", "ddp_undivided", wire="fp32"), ROUNDING),
    (case("nvfp4", "ddp_undivided", wire="fp32"), ROUNDING),
    (case("fp32", "ddp_stale", wire="fp8_gather"), BY_MEANS),
    (case("fp8", "ddp_stale", wire="fp8_twoshot"), BY_MEANS),
    (case("fp8", "ddp_forgets_layer", wire="fp8_gather"), BY_MEANS),
    (case("fp8", "ddp_forgets_layer", wire="bf16"), "change of blocks.1.mlp.down.weight"),
    (case("fp8", "tp_forgets", amax="group"), ROUNDING),
    (case("fp8", "sp_wire", amax="group", wire="fp8"), BY_MEANS), (case("bf16", "zero_wire", wire="fp8"), BY_MEANS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled([0], range(4)))
def test_mistakes_are_further_away_than_rounding(two: Ranks, first: int) -> None:
    """One of two real ranks makes each mistake: slightly above the limit of rounding."""
    for item in HONEST[first::4]:
        result = two.worker.with_time_limit(60).error(item, two.facts)
        limits = find_difference_limits([precisions.get(item.precision)], str(dict(item.params).get("wire", "")))
        assert isinstance(result, dict), (item.id, result)
        held = result["update_error"], result["furthest_error"], result["gain_error"]
        assert all(value < 0.8 * most for value, most in zip(held, limits, strict=True)), (item.id, result)
    for item, message in MISTAKEN[first::4]:
        with pytest.raises(WorkerFault, match=message):
            two.worker.with_time_limit(60).error(item, two.facts)


TIED = {
    "ddp": {"wire": "fp32"},
    "zero": {"wire": "fp32"},
    "fsdp2": {"wire": "fp32"},
    "tp": {"amax": "own"},
    "sp": {"amax": "own", "wire": "stream"},
    "pp_gpipe": {"microbatches": 2},
    "pp_1f1b": {"microbatches": 2},
}


@pytest.mark.slow
def test_a_tied_head_is_trained_by_all_ways(two: Ranks) -> None:
    """In float32 only the order of sums differs, so a lost or doubled half of its gradient would show."""
    for way, options in TIED.items():
        for precision, most in (("fp32", 1e-5), ("fp8", 0.3)):
            plain = case(precision, way, **options)
            tied = replace(plain, params=tuple((name, "tied" if name == "size" else v) for name, v in plain.params))
            result = two.worker.with_time_limit(60).error(tied, two.facts)
            assert isinstance(result, dict) and result["update_error"] < most, (way, precision, result)
    forgotten = replace(tied, params=(("way", "pp_forgets_tie"), *tied.params[1:]), precision="fp32")
    with pytest.raises(WorkerFault, match=r"change of embedding|all weights' changes"):
        two.worker.with_time_limit(60).error(forgotten, two.facts)


def named(record: Record) -> str:
    params = dict(record.case.params)
    return " ".join(str(params[name]) for name in ("way", "microbatches", "wire") if name in params)


def gaps(record: Record) -> dict[str, float]:
    return {
        item.metric: item.samples[0] for item in record.measurements if item.metric.endswith(("gap", "update_error"))
    }


def sent(record: Record, rank: int) -> dict[str, float]:
    result: dict[str, float] = {}
    for item in record.sent:
        if item.rank == rank:
            result[item.operation] = result.get(item.operation, 0.0) + item.bytes
    return result
