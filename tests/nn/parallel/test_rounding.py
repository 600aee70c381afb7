"""What rounds in a case explains how far ranks may be from one; mistakes are further away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8bench.errors import WorkerFault
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, Scalar
from fp8bench.model.raw import Settings
from fp8bench.nn.parallel.rounding import most_apart
from fp8bench.registry import precisions


@pytest.mark.parametrize(
    ("modes", "wire", "limit"),
    [
        (("fp32",), "fp32", 1e-3), (("fp32",), "", 1e-3), (("fp32",), "bf16", 0.03), (("fp32",), "fp8_gather", 0.12),
        (("bf16",), "", 0.03), (("fp16",), "fp32", 0.03), (("tf32",), "fp32", 0.03), (("bf16",), "fp8_twoshot", 0.12),
        (("fp8",), "torchao_fp32", 0.4), (("fp8",), "torchao_fp8", 0.4), (("fp8-block",), "bf16", 0.2),
        (("mxfp8",), "", 0.2), (("mxfp6",), "", 0.65), (("nvfp4",), "fp8_gather", 0.65), (("fp32", "nvfp4"), "", 0.65),
        (("fp32", "bf16"), "fp32", 0.03),
    ],
)  # fmt: skip
def test_the_limit_is_that_of_what_rounds_most(modes: tuple[str, ...], wire: str, limit: float) -> None:
    assert most_apart(map(precisions.get, modes), wire) == limit


def case(precision: str, way: str, **own: Scalar) -> Case:
    params: dict[str, Scalar] = {"way": way, "size": "nano", "batch": 4, "sequence": 32, **own}
    return Case("parallel", tuple(params.items()), precision, "cpu", ranks=2)


@pytest.mark.slow
def test_mistakes_are_further_away_than_rounding(tmp_path: Path) -> None:
    """Of two real ranks one makes each in turn: not much above the limit of what rounds there."""
    tokens = tmp_path / "tokens"
    np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16).tofile(tokens)
    planted = str(Path(__file__).with_name("planted_ways.py"))
    honest = [
        case("fp32", "ddp", wire="bf16"), case("bf16", "ddp", wire="bf16"), case("fp32", "ddp", wire="fp8_gather"),
        case("bf16", "ddp", wire="fp8_twoshot"), case("fp8", "ddp", wire="fp8_twoshot"),
        case("mxfp8", "ddp", wire="bf16"), case("fp8", "tp_hand", amax="own"), case("fp8", "tp_hand", amax="group"),
        case("nvfp4", "tp_hand", amax="own"),
    ]  # fmt: skip
    mistaken = [
        case("fp32", "ddp_1.06", wire="bf16"), case("bf16", "ddp_1.06", wire="bf16"),
        case("fp32", "ddp_1.2", wire="fp8_gather"), case("bf16", "ddp_1.2", wire="fp8_twoshot"),
        case("mxfp8", "ddp_1.4", wire="bf16"), case("fp8", "ddp_1.6", wire="bf16"), case("nvfp4", "ddp_2", wire="bf16"),
        case("fp8", "hand_quarter", amax="group"), case("fp32", "ddp_forgets", wire="fp32"),
        case("fp8", "ddp_forgets", wire="fp8_gather"), case("nvfp4", "ddp_forgets", wire="fp32"),
    ]  # fmt: skip
    with RanksWorker(Settings(threads=1, corpus=str(tokens), imports=(planted,)), 2) as worker:
        (facts,) = (one for one in worker.probe() if one.kind == "cpu")
        for one in honest:
            found = worker.within(60).error(one, facts)
            limit = most_apart([precisions.get(one.precision)], str(dict(one.params).get("wire", "")))
            assert isinstance(found, dict) and found["update_error"] < 0.75 * limit, (one.id, found)
        for one in mistaken:
            with pytest.raises(WorkerFault, match="3 steps change weights otherwise than one rank alone does"):
                worker.within(60).error(one, facts)
