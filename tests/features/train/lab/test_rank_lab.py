"""Trainings by real ranks, compared with one rank's; ranks that do not train the same are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import StoreError, WorkerError, WorkerFault
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.rank_lab import MERGE_BY_METHOD, MODULE
from fp8bench.features.train.request import PARALLEL, TENSOR_CUTTING_METHODS, WIRE_FORMATS
from fp8bench.features.train.seed import call_lab as asked
from fp8bench.features.train.values import (
    WIRE_BYTES,
    Arm,
    LayerReading,
    SeedTask,
    StepFigure,
    StreamLine,
)
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from tests.counts import sampled
from tests.facts import CPU
from tests.features.train.lab import plants as planted
from tests.features.train.lab.labs import TINY_TIED, lab_of, rows, task_of
from tests.trainings import replaced

pytestmark = pytest.mark.slow
RANKS = replace(CPU, ranks=2)
ARMS = (
    "fp32",
    "fp8",
    "fp8-delayed:history=3",
    "nvfp4",
    Arm("low", "bf16", settings=(("optimizer_states", "fp8lm"), ("master", "fp16-scaled"), ("micro_batches", 2))),
    Arm("again", "fp8-delayed", settings=(("checkpointing", "blocks"), ("dropout", 0.1), ("attention", "rounded"))),
)
STEPS = 12


def of_ranks(corpus: Corpus, *arms: Arm | str, seed: int = 0, parallel: str = "ddp", **settings: Any) -> SeedTask:
    task = task_of(corpus, *arms, seed=seed, steps=STEPS, batch=4, parallel=parallel, **settings)
    return replace(task, facts=RANKS)


@pytest.fixture
def ranks() -> Iterator[RanksWorker]:
    with RanksWorker(Settings(imports=(planted.FILE,)), 2, 20.0, MODULE, MERGE_BY_METHOD) as worker:
        yield worker


def losses(lines: tuple[StreamLine, ...]) -> list[float]:
    return [row.loss for row in rows(lines)]


def numbers(lines: tuple[StreamLine, ...]) -> list[float]:
    """Loss and norms of each step; norms count each parameter once."""
    return [
        value for row in rows(lines) for value in (row.loss, row.gradient_norm, row.parameter_norm, row.update_ratio)
    ]


def readings(lines: tuple[StreamLine, ...]) -> dict[tuple[str, str], LayerReading]:
    """The readings of the first step."""
    return {(line.layer, line.role): line for line in lines if isinstance(line, LayerReading) and line.step == 0}


def alone(task: SeedTask) -> Lab:
    """A lab that trains the task with one rank."""
    return lab_of(replace(task, facts=CPU, settings=replace(task.settings, parallel="")))


Lines = dict[str, tuple[StreamLine, ...]]


def up_to_and_behind(several: Any, task: SeedTask, folder: Path) -> tuple[Lines, Lines]:
    """The lines of each arm before a checkpoint, and those after it."""
    first = {arm.name: several.advance(arm.name, 5) for arm in task.arms}
    several.save(str(folder))
    return first, {arm.name: several.advance(arm.name, STEPS) for arm in task.arms}


def assert_fresh_ranks_go_on(ranks: RanksWorker, several: Any, task: SeedTask, folder: Path, rest: Lines) -> None:
    ranks.restart()
    several.begin(task)
    assert dict(several.restore(str(folder))) == dict.fromkeys(rest, 5)
    for name, lines in rest.items():
        assert _timeless(several.advance(name, STEPS)) == _timeless(lines), name


def test_ranks_train_a_tied_head_as_one_does(corpus: Corpus, ranks: RanksWorker) -> None:
    """For every way of splitting, also with an FP8 head."""
    arms = "fp32", Arm("head", "bf16", settings=(("precision_map", (("head", "fp8"),)),))
    for parallel in PARALLEL:
        task = of_ranks(corpus, *arms, parallel=parallel, model=TINY_TIED)
        lab = alone(task)
        several = asked(ranks, 60)
        several.begin(task)
        assert numbers(several.advance("fp32", 5)) == pytest.approx(numbers(lab.advance("fp32", 5)), rel=2e-6)
        assert losses(several.advance("head", 5)) == pytest.approx(losses(lab.advance("head", 5)), rel=1e-3)


@pytest.mark.parametrize("parallel", sampled(["fsdp"], PARALLEL))
def test_ranks_train_as_one_does_and_go_on_to_the_same_bits(
    corpus: Corpus, ranks: RanksWorker, tmp_path: Path, parallel: str
) -> None:
    """Up to the order of additions in fp32."""
    task = of_ranks(corpus, *ARMS, parallel=parallel)
    folder = tmp_path / "kept"
    lab = alone(task)
    several = asked(ranks, 60)
    several.begin(task)
    first, rest = up_to_and_behind(several, task, folder)
    looks = {name: several.validate(name) for name in rest}
    whole = {name: first[name] + lines for name, lines in rest.items()}
    single = {name: lab.advance(name, STEPS) for name in ("fp32", "fp8")}
    assert all(len(losses(lines)) == STEPS for lines in whole.values())
    assert numbers(whole["fp32"]) == pytest.approx(numbers(single["fp32"]), rel=2e-6)
    assert losses(whole["fp32"]) != losses(single["fp32"])  # otherwise nothing was shared
    # Scales are those of one rank's whole batch.
    mine = readings(whole["fp8"])
    theirs = readings(single["fp8"])
    near = (
        0.03 if parallel in TENSOR_CUTTING_METHODS else 0.0
    )  # where bfloat16 products are rounded before they are added
    for key, seen in mine.items():
        if key[1] != "gradient":
            whole_batch = theirs[key].amax, theirs[key].scale
            assert (seen.amax, seen.scale) == pytest.approx(whole_batch, rel=near, abs=0), key
    assert any(seen.least_scale == seen.largest_scale for seen in mine.values())
    for look, wanted in zip(looks["fp32"], lab.validate("fp32"), strict=True):
        quantised = parallel in TENSOR_CUTTING_METHODS and look.of.startswith(
            "quantised"
        )  # a shard of NVFP4 also has its own scale
        assert look.loss == pytest.approx(wanted.loss, rel=5e-3 if quantised else 1e-5), look.of

    assert_fresh_ranks_go_on(ranks, several, task, folder, rest)
    assert all(several.validate(name) == look for name, look in looks.items())
    # If one rank cannot read its state, the other ranks fail too, without waiting.
    damaged = next((folder / "rank-1").glob("*.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(WorkerFault, match=r"rank 1: .* is damaged") as fault:
        several.restore(str(folder))
    assert fault.value.kind == StoreError.__name__
    assert several.advance("fp32", 1) == ()


def sent(lines: tuple[StreamLine, ...]) -> dict[int, dict[str, float]]:
    figures = [line for line in lines if isinstance(line, StepFigure) and line.name == WIRE_BYTES]
    steps = {figure.step for figure in figures}
    return {step: {figure.layer: figure.value for figure in figures if figure.step == step} for step in steps}


@pytest.mark.parametrize("parallel", sampled(["sp"], ["zero", "sp"]))
def test_what_travels_in_fp8_has_half_the_bytes_and_goes_on_to_the_same_bits(
    corpus: Corpus, ranks: RanksWorker, tmp_path: Path, parallel: str
) -> None:
    task = of_ranks(
        corpus, *(Arm(name, "bf16", settings=(("wire", name),)) for name in WIRE_FORMATS), parallel=parallel
    )
    several = asked(ranks, 60)
    several.begin(task)
    first, rest = up_to_and_behind(several, task, tmp_path / "kept")
    sizes = {name: sent(first[name] + rest[name]) for name in WIRE_FORMATS}
    assert all(each.keys() == {0, 10} and each[0] == each[10] for each in sizes.values())
    whole = {name: sum(each[0].values()) for name, each in sizes.items()}
    assert whole["fp8"] < 0.7 * whole["bf16"] and "float8" not in str(sizes) and "uint8" in str(sizes["fp8"])
    assert whole["bf16"] < 0.7 * whole["fp32"] or parallel == "sp"  # whose stream is bf16 in each
    learnt = {name: losses(first[name] + rest[name]) for name in WIRE_FORMATS}
    assert learnt["fp8"] != learnt["bf16"] and (learnt["bf16"] == learnt["fp32"]) == (parallel == "sp")
    for name in ("bf16", "fp8"):
        assert learnt[name] == pytest.approx(learnt["fp32"], rel=0.02)
    assert_fresh_ranks_go_on(ranks, several, task, tmp_path / "kept", rest)


def _timeless(lines: tuple[StreamLine, ...]) -> list[StreamLine]:
    return list(map(replaced, lines))


def test_ranks_that_do_not_train_the_same_are_found(corpus: Corpus, ranks: RanksWorker) -> None:
    """For example by seed, one bit of a weight, or gradients."""
    weights = "the weights of rank 1 differ from those of rank 0"
    several = asked(ranks, 60)
    for seed, reason in (
        (planted.SEED, weights),
        (planted.WEIGHTS, weights),
        (planted.AVERAGE, weights),
        (planted.SCALES, "the scales of rank 1 differ from those of rank 0"),
    ):
        arm = "fp8-delayed" if seed == planted.SCALES else "fp32"
        several.begin(of_ranks(corpus, arm, seed=seed))
        if seed == planted.AVERAGE:
            assert len(losses(several.advance(arm, 5))) == 5
        with pytest.raises(WorkerError, match=f"the ranks disagree: {reason}"):
            several.advance(arm, 5)
