"""Loading data: what arrives, under which phases, and what low precision does to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import TENSOR
from fp8bench.formats.scaled import values
from fp8bench.model import Level, Scalar
from fp8bench.nn.batches import DecodedRecords, IndexArray, draw_text_records
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.data import DEFAULT_BATCHES, PREPARED_BATCH_COUNT, RECORD_COUNT, Data, DataLoadState
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, SMALL, phases, setup_of

SIZES = SMALL["data"]
KINDS = for_each("kind", DEFAULT_BATCHES)


def setup_for(corpus: Corpus, precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    return setup_of("data", {**SIZES, **changes, "data": corpus.identity}, precision, seed, corpus.path)


def arrived(state: DataLoadState) -> torch.Tensor:
    Data().step(state, SilentPhases())
    (batch,) = state.destination.buffers
    return batch.clone()


def by_hand(corpus: Corpus, steps: int) -> list[np.ndarray]:
    """The batches of the first steps, decoded from the text itself; preparing draws one."""
    random = np.random.default_rng(0)
    text = draw_text_records(corpus.path, RECORD_COUNT, 512, random)
    batches = [text[random.integers(0, RECORD_COUNT, 4)] for _ in range(steps + 1)]
    return [(one.astype(np.float32) - np.float32(127.5)) / np.float32(63.75) for one in batches[1:]]


@KINDS
def test_a_step_brings_the_next_records_to_the_device(corpus: Corpus, kind: str) -> None:
    state = Data().prepare(setup_for(corpus, kind=kind))
    for wanted in by_hand(corpus, 3):
        assert torch.equal(arrived(state), torch.from_numpy(wanted))


@for_each(("batch", "ready"), [(4, PREPARED_BATCH_COUNT), (RECORD_COUNT + 1, 1)])
def test_a_transfer_gathers_nothing_in_its_steps(
    corpus: Corpus, batch: int, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering a batch takes longer than copying it."""
    gathered = []
    gather = DecodedRecords.read_batch

    def watched(self: DecodedRecords, indices: IndexArray) -> torch.Tensor:
        gathered.append(len(indices))
        return gather(self, indices)

    monkeypatch.setattr(DecodedRecords, "read_batch", watched)
    state = Data().prepare(setup_for(corpus, kind="transfer", batch=batch))
    assert gathered == [batch] * ready
    came = [arrived(state) for _ in range(2 * ready)]
    assert gathered == [batch] * ready
    assert all(torch.equal(one, other) for one, other in zip(came[:ready], came[ready:], strict=True))
    assert len({float(one.sum()) for one in came}) == ready


@for_each(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
@KINDS
def test_batches_travel_in_their_precision(corpus: Corpus, kind: str, precision: str, dtype: torch.dtype) -> None:
    batch = arrived(Data().prepare(setup_for(corpus, precision, kind=kind)))
    assert batch.dtype == dtype and torch.equal(batch, torch.from_numpy(by_hand(corpus, 1)[0]).to(dtype))


def test_emulated_batches_hold_rounded_values(corpus: Corpus) -> None:
    batch = arrived(Data().prepare(setup_for(corpus, "fp8")))
    assert torch.equal(batch, values(torch.from_numpy(by_hand(corpus, 1)[0]), E4M3, TENSOR))


FIRST = {"reading": "decode", "transfer": "data_load"}


@for_each(("precision", "casts"), [("fp32", []), ("bf16", ["cast"])])
@KINDS
def test_all_but_the_cast_is_loading(corpus: Corpus, kind: str, precision: str, casts: list[str]) -> None:
    assert phases(Data(), setup_for(corpus, precision, kind=kind)) == [FIRST[kind], *casts, "data_load"]


def test_kept_buffers_hold_the_same_batches_in_one_place(corpus: Corpus) -> None:
    fresh, kept = (Data().prepare(setup_for(corpus, "fp32", buffers=one)) for one in ("fresh", "kept"))
    places = set()
    for _ in range(3):
        one = next(fresh.batches)
        other = next(kept.batches)
        assert torch.equal(one, other)
        places.add(other.data_ptr())
    assert len(places) == 1
    (params,) = Data().expand({"kind": "transfer", "batch": "auto", "record": 8, "cast_on": "host", "buffers": "kept"})
    refused = Data().support(dict(params), precisions.get("fp32"), CPU)
    assert refused.level is Level.REFUSED and "kind=reading" in refused.reason


@KINDS
def test_what_is_cast_on_the_device_travels_as_it_comes(corpus: Corpus, kind: str) -> None:
    here, there = (setup_for(corpus, "fp8", kind=kind, **more) for more in ({}, {"cast_on": "device"}))
    assert phases(Data(), there) == [FIRST[kind], "data_load", "cast"]
    state = Data().prepare(there)
    other = Data().prepare(here)
    fp32 = by_hand(corpus, 1)[0]
    assert torch.equal(arrived(state), torch.from_numpy(fp32))
    assert state.last_cast_batch is not None and torch.equal(state.last_cast_batch.data, arrived(other))
    assert Data().error(there) == Data().error(here)
    plain = setup_for(corpus, "fp32", kind=kind, cast_on="device")
    assert phases(Data(), plain) == [FIRST[kind], "data_load"]  # there is nothing to cast


def test_axes_and_defaults() -> None:
    """A GPU casts by itself; a case that is cast on the host keeps its old id."""
    for facts, where in ((CPU, "host"), (H200, "device")):
        axes = {axis.name: axis for axis in Data().axes(facts)}
        assert axes["kind"].default == ("reading", "transfer") and axes["cast_on"].default == (where,)
    for where, more in (("host", ()), ("device", (("cast_on", "device"),))):
        assert Data().expand({**SIZES, "cast_on": where}) == ((*SIZES.items(), *more),)


def test_without_a_text_it_says_so(corpus: Corpus, tmp_path: Path) -> None:
    setup = setup_for(corpus)
    with pytest.raises(ValueError, match="but there is none"):
        Data().prepare(replace(setup, corpus=None))
    short = tmp_path / "short.tokens"
    short.write_bytes(b"\1\0" * 10)
    with pytest.raises(ValueError, match="10 bytes of text; a record of 512 needs more"):
        Data().prepare(replace(setup, corpus=str(short)))
