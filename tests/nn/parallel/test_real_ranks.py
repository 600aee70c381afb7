"""Four real ranks in the ways that cut a model train what one rank does, and send what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case
from fp8bench.model.ranks import Sent
from fp8bench.model.raw import Settings
from fp8bench.nn.sizes import SIZES

RANKS, BATCH, TOKENS = 4, 4, 16
CONFIG = replace(SIZES["micro"], sequence=TOKENS)
CASES = (
    ("tp",), ("tp_hand", "amax", "own"), ("sp", "amax", "own"), ("sp_torch",), ("tp_fsdp",),
    ("pp_gpipe", "microbatches", 4), ("pp_1f1b", "microbatches", 4),
)  # fmt: skip


@pytest.mark.slow
def test_four_ranks_train_what_one_does_and_send_what_formulas_say(tmp_path: Path) -> None:
    """All in one launch. The norm of an update's distance is that of float32's order of additions."""
    text = tmp_path / "tokens"
    np.random.default_rng(0).integers(0, 256, 1 << 12, dtype=np.uint16).tofile(text)
    gaps, sent = {}, {}
    with RanksWorker(Settings(corpus=str(text)), RANKS) as worker:
        (facts,) = (one for one in worker.within(60).probe() if one.kind == "cpu")
        for way, *option in CASES:
            params = {
                "way": way,
                "size": "micro",
                "batch": BATCH,
                "sequence": TOKENS,
                **dict([option] if option else []),
            }
            case = Case("parallel", tuple(params.items()), "fp32", "cpu", ranks=RANKS)
            gaps[way] = worker.within(120).error(case, facts)
            sent[way] = worker.within(120).step_parts(case, facts)[0]
    for way, found in gaps.items():
        assert found["update_error"] < 1e-5 and found["loss_gap"] < 1e-5, (way, found)
    assert gaps["pp_gpipe"] == gaps["pp_1f1b"]
    _by_formula({way: [_of_rank(found, rank) for rank in range(RANKS)] for way, found in sent.items()})


def _of_rank(sent: tuple[Sent, ...], rank: int) -> dict[str, float]:
    """Bytes by operation."""
    own = [one for one in sent if one.rank == rank]
    return {name: sum(one.bytes for one in own if one.operation == name) for name in {one.operation for one in own}}


def _by_formula(sent: dict[str, list[dict[str, float]]]) -> None:
    stream, share = 4 * BATCH * TOKENS * CONFIG.width, (RANKS - 1) / RANKS
    common = (TOKENS + 2 * CONFIG.vocabulary + 2 * CONFIG.layers + 1) * CONFIG.width
    layers = CONFIG.layers * 4 * stream * share
    for rank in range(RANKS):
        assert sent["tp"][rank] == sent["tp_hand"][rank] == {"all_reduce": 2 * layers}
        halves = {"all_gather": layers, "reduce_scatter": layers, "all_reduce": 2 * 4 * common * share}
        assert sent["sp"][rank] == sent["sp_torch"][rank] == halves
        neighbours = (rank > 0) + (rank < RANKS - 1)
        assert sent["pp_gpipe"][rank] == sent["pp_1f1b"][rank] == {"send": neighbours * stream}
    # A pair has half of the blocks: of two pairs one gathers them twice, and what lies around the blocks once.
    pair = CONFIG.layers * (CONFIG.block_weights // 2 + 2 * CONFIG.width)
    around = common - 2 * CONFIG.layers * CONFIG.width
    for found in sent["tp_fsdp"]:
        assert found["all_reduce"] == CONFIG.layers * 4 * stream / 2
        assert found["all_gather"] == 4 * (2 * pair + around) / 2 and found["reduce_scatter"] == 4 * (pair + around) / 2
