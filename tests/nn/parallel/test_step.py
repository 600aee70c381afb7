"""Agreement with one rank, by models that are planted in its place: what rounds in a case explains how far ranks may be
from one, and mistakes are further away."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.errors import WorkerFault
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, Scalar
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.batches import TokenLoader
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.model import AloneModel
from fp8bench.nn.parallel.step import Apart, ParallelState, WeightUpdate, agreement, begun, most_apart
from fp8bench.nn.sizes import GPTConfig
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU

CONFIG = GPTConfig(256, 32, 1, 2, 2, 64, batch=2, sequence=8)


class Twice(AloneModel):
    """Adds gradients up where it should take their mean: AdamW would not see it."""

    def gradients(self) -> list[Tensor]:
        return [one * 2 for one in super().gradients()]


def state(folder: Path, kind: type[AloneModel]) -> ParallelState:
    tokens = folder / "tokens"
    np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16).tofile(tokens)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = GPT(CONFIG, lambda name: PlainArithmetic(torch.float32), torch.float32)
    loader = TokenLoader(str(tokens), 2, CONFIG.sequence, "cpu", 1, CONFIG.vocabulary)
    return begun(kind(model, 1.0), loader, CPU, plain=True)


def test_the_same_model_agrees_bit_for_bit(tmp_path: Path) -> None:
    found = agreement(state(tmp_path, AloneModel), state(tmp_path, AloneModel), 2)
    assert set(found.figures().values()) == {0.0} and found.update.gain == 1.0


def test_sums_in_place_of_means_are_seen(tmp_path: Path) -> None:
    """Twice the gradients are twice the update, which is a distance of 1."""
    found = agreement(state(tmp_path, Twice), state(tmp_path, AloneModel), 2)
    assert 0.9 < found.update.error < 1.1 and 1.9 < found.update.gain < 2.1 and found.weight > 0


@for_each(
    ("modes", "wire", "limit"),
    [
        (("fp32",), "fp32", 1e-3), (("fp32",), "", 1e-3), (("fp32",), "bf16", 0.03), (("fp32",), "fp8_gather", 0.12),
        (("bf16",), "", 0.03), (("fp16",), "fp32", 0.03), (("tf32",), "fp32", 0.03), (("bf16",), "fp8_twoshot", 0.12),
        (("fp8",), "torchao_fp32", 0.4), (("fp8",), "torchao_fp8", 0.4), (("fp8-block",), "bf16", 0.2),
        (("mxfp8",), "", 0.2), (("mxfp6",), "", 0.65), (("nvfp4",), "fp8_gather", 0.65), (("fp32", "nvfp4"), "", 0.65),
        (("fp32", "bf16"), "fp32", 0.03), (("fp32",), "stream", 1e-3), (("bf16",), "fp8", 0.2022),
        (("mxfp8",), "fp8", 0.2828),
    ],
)  # fmt: skip
def test_the_limits_are_those_of_what_rounds_most(modes: tuple[str, ...], wire: str, limit: float) -> None:
    assert most_apart(map(precisions.get, modes), wire).update == pytest.approx(limit, rel=1e-3)


def test_each_limit_is_held_and_named() -> None:
    """All weights together, one alone, and what is twice as large everywhere; noise shortens by half its square."""
    limits = most_apart([precisions.get("fp8")], "fp32")
    updates = {"a": WeightUpdate(1.0, 100.0, 100.0), "b": WeightUpdate(0.01, 1.0, 1.0)}
    assert limits.why_not(Apart(0.0, 0.0, updates)) == ""
    one = limits.why_not(Apart(0.0, 0.0, updates | {"b": WeightUpdate(0.36, 1.0, 1.0)}))
    assert one == "the relative distance of the change of b is 0.6, and at most 0.5 of it may be rounding"
    every = limits.why_not(Apart(0.0, 0.0, {"a": WeightUpdate(1.0, 100.0, 110.0)}))
    assert every == "the distance from 1 of their gain 1.1 is 0.1, and at most 0.08 of it may be rounding"
    assert "all weights' changes is 0.5," in limits.why_not(Apart(0.0, 0.0, {"a": WeightUpdate(25.0, 100.0, 100.0)}))
    assert limits.why_not(Apart(0.0, 0.0, {"a": WeightUpdate(math.nan, 1.0, 1.0)}))
    for known in (most_apart([precisions.get(mode)], "") for mode in ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")):
        assert known.gain > 0.99 * known.update**2 / 2 and known.update <= known.furthest


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
        case("mxfp8", "ddp", wire="bf16"), case("fp8", "tp", amax="own"), case("fp8", "tp", amax="group"),
        case("nvfp4", "tp", amax="own"),
        case("fp8-delayed", "tp", amax="group"), case("fp8-delayed", "ddp", wire="fp8_gather"),
        case("fp8", "sp", amax="group", wire="stream"), case("fp8", "sp", amax="group", wire="fp8"),
        case("bf16", "sp", amax="own", wire="fp8"), case("fp8", "zero", wire="fp32"), case("bf16", "zero", wire="fp8"),
        case("fp32", "zero", wire="bf16"), case("fp8", "zero", wire="bf16"),
        case("fp16", "zero", wire="fp32"), case("mxfp8", "zero", wire="fp8"), case("bf16", "fsdp2", wire="bf16"),
    ]  # fmt: skip
    rounding = "3 steps change weights otherwise than one rank alone does"
    by_scale = "rank 1 multiplies the weight of blocks.0.attn.qkv by .* in cast 1, where the largest magnitudes of all"
    by_means = "rank [01] has got .* numbers in FP8 that are not those of all ranks' values"
    mistaken = [
        (case("fp32", "ddp_1.06", wire="bf16"), rounding), (case("bf16", "ddp_1.06", wire="bf16"), rounding),
        (case("fp32", "ddp_1.06", wire="fp8_gather"), by_means), (case("fp8", "ddp_1.2", wire="fp8_twoshot"), by_means),
        (case("mxfp8", "ddp_1.2", wire="bf16"), rounding), (case("fp8", "ddp_1.4", wire="bf16"), rounding),
        (case("nvfp4", "ddp_2", wire="bf16"), rounding), (case("fp8", "tp_quarter", amax="group"), by_scale),
        (case("fp8", "tp_twice", amax="group"), by_scale), (case("fp8", "tp_half", amax="group"), by_scale),
        (case("fp8-delayed", "tp_twice", amax="group"), by_scale.replace("cast 1,", "cast 2,")),
        (case("fp8", "tp_alone", amax="group"), by_scale.replace("rank 1", "rank [01]")),
        (case("fp32", "ddp_forgets", wire="fp32"), rounding), (case("fp8", "ddp_forgets", wire="fp8_gather"), by_means),
        (case("nvfp4", "ddp_forgets", wire="fp32"), rounding), (case("fp8", "ddp_seen_twice", wire="fp32"), rounding),
        (case("nvfp4", "ddp_seen_twice", wire="fp32"), rounding), (case("fp8", "ddp_undivided", wire="fp32"), rounding),
        (case("nvfp4", "ddp_undivided", wire="fp32"), rounding),
        (case("fp32", "ddp_stale", wire="fp8_gather"), by_means),
        (case("fp8", "ddp_stale", wire="fp8_twoshot"), by_means),
        (case("fp8", "ddp_forgets_layer", wire="fp8_gather"), by_means),
        (case("fp8", "ddp_forgets_layer", wire="bf16"), "change of blocks.1.mlp.down.weight"),
        (case("fp8", "tp_forgets", amax="group"), rounding),
        (case("fp8", "sp_wire", amax="group", wire="fp8"), by_means), (case("bf16", "zero_wire", wire="fp8"), by_means),
    ]  # fmt: skip
    with RanksWorker(Settings(threads=1, corpus=str(tokens), imports=(planted,)), 2) as worker:
        (facts,) = (one for one in worker.probe() if one.kind == "cpu")
        for one in honest:
            found = worker.within(60).error(one, facts)
            limits = most_apart([precisions.get(one.precision)], str(dict(one.params).get("wire", "")))
            assert isinstance(found, dict), (one.id, found)
            held = found["update_error"], found["furthest_error"], found["gain_error"]
            assert all(value < 0.8 * most for value, most in zip(held, limits, strict=True)), (one.id, found)
        for one, named in mistaken:
            with pytest.raises(WorkerFault, match=named):
                worker.within(60).error(one, facts)
