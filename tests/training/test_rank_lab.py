"""A training by real ranks: what it gives beside one rank's, and that ranks which do not train the same are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import StoreError, WorkerError, WorkerFault, WorkerLost
from fp8bench.jobs.train.seed import lab_of as asked
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model.raw import Settings
from fp8bench.model.training import Arm, LayerReading, Line, SeedTask, StepRow
from fp8bench.plan.corpus import Corpus
from fp8bench.training.rank_lab import MODULE
from tests.facts import CPU
from tests.training import plants as planted
from tests.training.labs import lab_of, rows, task_of

pytestmark = pytest.mark.slow
RANKS = replace(CPU, ranks=2)
OWN = (("amax_group", "own"),)
ARMS = (
    "fp32", "fp8", "fp8-delayed:history=3", Arm("own", "fp8", settings=OWN),
    Arm("own delayed", "fp8-delayed:history=3", settings=OWN), "nvfp4",
    Arm("low", "bf16", settings=(("optimizer_states", "fp8lm"), ("master", "fp16-scaled"), ("micro_batches", 2))),
    Arm("again", "fp8-delayed", settings=(("checkpointing", "blocks"), ("dropout", 0.1), ("attention", "rounded"))),
)  # fmt: skip
STEPS = 12


def of_ranks(corpus: Corpus, *arms: Arm | str, seed: int = 0) -> SeedTask:
    return replace(task_of(corpus, *arms, seed=seed, steps=STEPS, batch=4, parallel="ddp"), facts=RANKS)


@pytest.fixture
def ranks() -> Iterator[RanksWorker]:
    with RanksWorker(Settings(imports=(planted.FILE,)), 2, 20.0, MODULE) as worker:
        yield worker


def losses(lines: tuple[Line, ...]) -> list[float]:
    return [row.loss for row in rows(lines)]


def readings(lines: tuple[Line, ...], step: int) -> dict[tuple[str, str], LayerReading]:
    return {(one.layer, one.role): one for one in lines if isinstance(one, LayerReading) and one.step == step}


def test_ranks_train_as_one_does_and_go_on_to_the_same_bits(corpus: Corpus, ranks: RanksWorker, tmp_path: Path) -> None:
    """Up to the order of additions in fp32, and in FP8 where scales are those of all ranks: of the tensors of all."""
    task = of_ranks(corpus, *ARMS)
    names = [arm.name for arm in task.arms]
    one = lab_of(replace(task, facts=CPU, settings=replace(task.settings, parallel="")))
    several = asked(ranks, 60)
    several.begin(task)
    first = {name: several.advance(name, 5) for name in names}
    several.save(str(tmp_path / "kept"))
    rest = {name: several.advance(name, STEPS) for name in names}
    looks = {name: several.validate(name) for name in names}
    alone = {name: one.advance(name, STEPS) for name in ("fp32", "fp8", "own")}

    whole = {name: first[name] + rest[name] for name in names}
    assert all(len(losses(lines)) == STEPS for lines in whole.values())
    assert losses(whole["fp32"]) == pytest.approx(losses(alone["fp32"]), rel=2e-6)
    assert losses(whole["fp32"]) != losses(alone["fp32"])  # or nothing was shared
    # The scales of all ranks are those of one rank's whole batch; a rank's own are not.
    mine, theirs = readings(whole["fp8"], 0), readings(alone["fp8"], 0)
    assert {key: (one.amax, one.scale) for key, one in mine.items() if key[1] != "gradient"} == {
        key: (one.amax, one.scale) for key, one in theirs.items() if key[1] != "gradient"
    }
    own = readings(whole["own"], 0)
    assert any(one.least_scale == one.largest_scale and own[key].amax == mine[key].amax for key, one in mine.items())
    assert losses(whole["own"]) != losses(whole["fp8"])
    assert {name: [one.loss for one in some] for name, some in looks.items()}["fp32"] == pytest.approx(
        [one.loss for one in one.validate("fp32")], rel=1e-5
    )
    # Cut off, and gone on with by fresh ranks.
    ranks.restart()
    several.begin(task)
    assert dict(several.restore(str(tmp_path / "kept"))) == dict.fromkeys(names, 5)
    for name in names:
        again = several.advance(name, STEPS)
        assert _timeless(again) == _timeless(rest[name]), name
        assert several.validate(name) == looks[name]
    # A state that one rank cannot read is none for the others, who do not wait for it.
    damaged = next((tmp_path / "kept" / "rank-1").glob("*.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(WorkerFault, match=r"rank 1: the checkpoint's file .* is damaged") as fault:
        several.restore(str(tmp_path / "kept"))
    assert fault.value.kind == StoreError.__name__
    assert several.advance("fp32", 1) == ()


def _timeless(lines: tuple[Line, ...]) -> list[Line]:
    """Without times and the process's memory."""
    timed = ("memory", "watched_seconds")
    kept = (one for one in lines if getattr(one, "name", "") not in timed)
    return [replace(one, seconds=0.0) if isinstance(one, StepRow) else one for one in kept]


@pytest.mark.parametrize("size", [4])
def test_four_ranks_have_the_same_losses(corpus: Corpus, size: int) -> None:
    """Bit by bit on all of them, which is looked at in every step, and those of one rank but for rounding."""
    task = replace(of_ranks(corpus, "fp32", "fp8"), facts=replace(CPU, ranks=size))
    one = lab_of(replace(task, facts=CPU, settings=replace(task.settings, parallel="")))
    with RanksWorker(Settings(imports=(planted.FILE,)), size, 60.0, MODULE) as worker:
        several = asked(worker, 60)
        several.begin(task)
        for name in ("fp32", "fp8"):
            assert losses(several.advance(name, 6)) == pytest.approx(losses(one.advance(name, 6)), rel=2e-3)


def test_ranks_that_do_not_train_the_same_are_found(corpus: Corpus, ranks: RanksWorker) -> None:
    """Another seed, another text, the same part twice, one bit of a weight, a step whose gradients are not averaged."""
    reasons = {
        planted.SEED: "in step 0 rank 1 reads another text, or of another seed, than rank 0",
        planted.TEXT: "in step 0 rank 1 reads another text, or of another seed, than rank 0",
        planted.SHARE: "in step 0 what the ranks have read is not the batch, each sequence once",
        planted.WEIGHTS: "after a slice the weights of rank 1 are not those of rank 0",
        planted.AVERAGE: "after a slice the weights of rank 1 are not those of rank 0",
    }
    several = asked(ranks, 60)
    several.begin(of_ranks(corpus, "fp8-delayed", seed=planted.SCALES))
    with pytest.raises(WorkerError, match="the ranks disagree: after a slice the scales of rank 1 are not those"):
        several.advance("fp8-delayed", 5)
    for seed, reason in reasons.items():
        several.begin(of_ranks(corpus, "fp32", seed=seed))
        if seed == planted.AVERAGE:
            assert len(losses(several.advance("fp32", 5))) == 5
        with pytest.raises(WorkerError, match=f"the ranks disagree: {reason}"):
            several.advance("fp32", 5)


def test_a_rank_that_dies_is_named(corpus: Corpus, ranks: RanksWorker) -> None:
    several = asked(ranks, 60)
    several.begin(of_ranks(corpus, "fp32", seed=planted.KILLED_TWICE))
    with pytest.raises(
        WorkerLost, match=r"crashed during 'advance': rank 1 of 2, in .*'advance', was ended by SIGKILL"
    ):
        several.advance("fp32", STEPS)
