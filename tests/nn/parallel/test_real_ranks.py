"""Four real ranks in the ways that cut a model train what one rank does, and send what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.model import Record, Request, Status
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import SilentObserver

RANKS = 4
TEXT = "the text that ranks train on, of which every one reads all. " * 1200
WAYS = ("tp", "tp_hand", "sp", "sp_torch", "tp_fsdp", "pp_gpipe", "pp_1f1b")


@pytest.mark.slow
def test_four_ranks_train_what_one_does_and_send_what_formulas_say(tmp_path: Path) -> None:
    """All in one launch. What a way cannot do with four ranks is skipped, with the number."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    axes = (("way", WAYS), ("size", ("micro",)), ("batch", ("4",)), ("sequence", ("32",)))
    axes += (("microbatches", ("auto",)), ("amax", ("auto",)))
    request = Request("parallel", quick=True, rounds=1, data=str(text), ranks=RANKS, dtypes=("fp32",), axes=axes)
    run = pipeline.execute(request, tmp_path / "store", SilentObserver(), "")
    skipped = [one.reason for one in run.records if one.status is Status.SKIPPED]
    assert len(skipped) == 3 and "2 microbatches do not fill 4 stages by this schedule: choose 4 or more" in skipped
    records = {named(one): one for one in run.records if one.status is not Status.SKIPPED}
    assert {one.status for one in records.values()} == {Status.OK}, {name: one.reason for name, one in records.items()}
    assert {name.split()[0] for name in records} == set(WAYS)
    for name, record in records.items():
        assert gaps(record)["update_error"] < 1e-5 and gaps(record)["loss_gap"] < 1e-5, (name, gaps(record))
    assert gaps(records["pp_gpipe 4"]) == gaps(records["pp_1f1b 4"])
    _sent_by_formula(records)


def named(record: Record) -> str:
    """'pp_1f1b 4', 'tp'."""
    params = dict(record.case.params)
    return " ".join(str(params[name]) for name in ("way", "microbatches") if name in params)


def gaps(record: Record) -> dict[str, float]:
    return {one.metric: one.samples[0] for one in record.measurements if one.metric.endswith(("gap", "update_error"))}


def sent(record: Record, rank: int) -> dict[str, float]:
    """Bytes by operation."""
    found: dict[str, float] = {}
    for one in record.sent:
        if one.rank == rank:
            found[one.operation] = found.get(one.operation, 0.0) + one.bytes
    return found


def _sent_by_formula(records: dict[str, Record]) -> None:
    config = replace(SIZES["micro"], sequence=32)
    stream, share = 4 * 4 * config.sequence * config.width, (RANKS - 1) / RANKS
    for rank in range(RANKS):
        for way in ("tp", "tp_hand"):
            assert sent(records[way], rank) == {"all_reduce": config.layers * 4 * 2 * stream * share}
        by_sequence = sent(records["sp"], rank)
        assert sent(records["sp_torch"], rank) == by_sequence
        assert by_sequence["all_gather"] == by_sequence["reduce_scatter"] == config.layers * 4 * stream * share
        common = config.sequence * config.width + 2 * config.vocabulary * config.width
        norms = (2 * config.layers + 1) * config.width
        assert by_sequence["all_reduce"] == 4 * (common + norms) * 2 * share
        neighbours = (rank > 0) + (rank < RANKS - 1)
        for name in ("pp_gpipe 2", "pp_gpipe 4", "pp_1f1b 4"):
            assert sent(records[name], rank) == {"send": neighbours * stream}
