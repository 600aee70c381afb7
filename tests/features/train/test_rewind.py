"""Arms that go back to a checkpoint and skip a batch, and seeds that end once all arms have reached a loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.features.train import run as job
from fp8bench.features.train.kind import KIND
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import REWOUND, KeptTraining, StepRow, TrainingEvent, Validation
from fp8bench.features.train.verdicts.curves import Learned, curves_of
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.features.train.words import answer, notes
from fp8bench.measure.handle import LocalWorker
from fp8bench.report.terminal.layout import render
from tests.features.train.conftest import Trained
from tests.trainings import FakeLab, NotedTraining, said, small, strikes, write_tokens

REWIND = TrainerSettings(on_nan="rewind")


def ill(first: int, last: int | None = None) -> FakeLab:
    """A lab whose fp8 has steps that are not finite, in every seed."""
    return FakeLab(bad=lambda arm, seed, step: arm == "fp8" and first <= step <= (first if last is None else last))


def rewinds(kept: KeptTraining) -> list[tuple[str, int, int, int, int]]:
    """Arm, seed, the step gone back to, and the first and last step that is skipped."""
    events = [(event, dict(event.values)) for event in kept.of(TrainingEvent) if event.kind == REWOUND]
    return [(event.arm, event.seed, int(own["to"]), int(own["first"]), event.step) for event, own in events]


def test_a_batch_that_gives_nan_is_skipped(trained: Trained) -> None:
    """From the checkpoint before it every other step is taken once; validations in between are repeated once."""
    whole, _, _ = trained(FakeLab(), small(settings=REWIND))
    lab = FakeLab(bad=lambda *place: place == ("fp8", 1, 13))
    kept, _, _ = trained(lab, small(settings=REWIND, evaluate=4))
    assert kept.finished and rewinds(kept) == [("fp8", 1, 12, 13, 13)]
    rows = [row for row in whole.of(StepRow) if (row.arm, row.seed, row.step) != ("fp8", 1, 13)]
    assert sorted(map(repr, kept.of(StepRow))) == sorted(map(repr, rows))
    looks = [look.step for look in kept.of(Validation) if (look.arm, look.seed) == ("fp8", 1)]
    assert looks == [0, 4, 8, 12, 16, 20]


def test_a_fault_that_returns_goes_further_back_each_time(trained: Trained) -> None:
    """More batches are skipped, from older checkpoints and at last from the first step; then the arm stops."""
    kept, _, _ = trained(ill(16, 99), small(settings=REWIND, seeds=1, keep=5))
    assert rewinds(kept) == [("fp8", 0, 15, 16, 16), ("fp8", 0, 10, 14, 17), ("fp8", 0, 0, 3, 18)]
    (stopped,) = [event for event in kept.of(TrainingEvent) if event.kind == "stopped"]
    assert stopped.step == 19 and "3 rewinds, all that --rewinds allows" in stopped.words
    assert [row.step for row in kept.of(StepRow) if row.arm == "fp8"] == [0, 1, 2, 19]
    verdicts = verdicts_of(kept.training, kept.lines)
    assert verdicts.arms[0].judged.learned is Learned.DIVERGED
    assert "does not learn" in answer(verdicts.arms[0], verdicts)


def test_as_many_rewinds_as_are_allowed(trained: Trained) -> None:
    lab = FakeLab(bad=lambda arm, seed, step: arm == "fp8" and step in (7, 19))
    for allowed in (1, 2):
        kept, _, _ = trained(lab, small(settings=replace(REWIND, rewinds=allowed), seeds=1))
        kinds = {event.kind for event in kept.of(TrainingEvent)}
        assert len(rewinds(kept)) == allowed and ("stopped" in kinds) == (allowed == 1)


@pytest.mark.slow
def test_a_kill_during_a_rewind_changes_no_line(trained: Trained) -> None:
    """Before, within and after it, also with several rewinds in a row."""

    def bad(arm: str, seed: int, step: int) -> bool:
        return arm in ("fp8", "bf16 again") and step in (8, 9, 16)

    request = small(settings=REWIND, seeds=1)
    whole, _, _ = trained(FakeLab(bad=bad), request)
    for strike in range(21, 60, 3):
        asked = [0]

        def fault(name: str, *_: object, strike: int = strike, asked: list[int] = asked) -> BaseException | None:
            asked[0] += name in ("advance", "rewind", "rewinds", "validate")
            return KeyboardInterrupt() if asked[0] == strike else None

        half, _, _ = trained(FakeLab(fault, bad=bad), request)
        rest, _, _ = trained(FakeLab(bad=bad))
        assert not half.finished and rest.finished, strike
        assert list(map(repr, said(rest))) == list(map(repr, said(whole))), strike


def test_a_skipped_batch_counts_for_no_arm(trained: Trained) -> None:
    """Not even in the reference's endpoint; a note names it."""
    kept, _, _ = trained(ill(18), small(settings=REWIND, seeds=5))
    (fp8,) = verdicts_of(kept.training, kept.lines).arms
    curves = curves_of(kept.lines, 20)
    for pair in fp8.pairs:
        base, own = (curves[name, pair.seed] for name in ("bf16", "fp8"))
        assert own.passed == {18} and pair.gap == pytest.approx(own.rows[19].loss / base.rows[19].loss - 1)
    (note,) = notes(fp8)
    assert len(fp8.pairs) == 5 and note.startswith("in seeds 0, 1, 2, 3 and 4 the batches of step 18 were passed over")
    last, _, _ = trained(ill(18, 99), small(settings=REWIND, seeds=1))
    (fp8,) = verdicts_of(last.training, last.lines).arms
    assert [void.value for _, void in fp8.voids] == ["all batches of its last tenth were passed over"]


@pytest.mark.slow
def test_a_real_training_killed_in_a_rewind_has_the_same_bits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With delayed scales, random rounding and dropout."""
    write_tokens(Path("text"))
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
    losses = Trainer._losses
    steps, limit = [0], [10**9]

    def planted(self: Trainer, scale: float, phase: Any = None) -> Any:
        loss = losses(self, scale, *([] if phase is None else [phase]))
        steps[0] += 1
        if steps[0] == limit[0]:
            raise KeyboardInterrupt
        return loss * torch.nan if self.step in (7, 8) and self.arm.name == "fp8-delayed" else loss

    monkeypatch.setattr(Trainer, "_losses", planted)
    request = TrainingRequest(
        dtypes=("bf16", "fp8-delayed"), steps=12, seeds=1, evaluate=4, keep=3, data="text", energy=False,
        bands=("none",), settings=replace(REWIND, batch=1, sequence=16, dropout=0.1),
    )  # fmt: skip
    whole = job.train(request, store, NotedTraining(), "")
    assert [rewind[2:] for rewind in rewinds(whole)] == [(6, 7, 7), (3, 5, 8)]
    for stop in (14, 20, 25):
        steps[0], limit[0] = 0, stop
        half = job.train(request, store, NotedTraining(), "")
        limit[0] = 10**9
        rest = job.resume(Path(half.path), store, NotedTraining())[1]
        assert not half.finished and rest.finished
        assert list(map(repr, said(rest))) == list(map(repr, said(whole))), stop


class Slower(FakeLab):
    """Held-out losses follow 4 / (1 + step / 8), those of fp8 with a third more steps."""

    def _validate(self, arm: str, last: bool = False) -> tuple[Validation, ...]:
        pace = 32 / 3 if arm == "fp8" else 8
        looks = super()._validate(arm, last)
        return tuple(replace(look, loss=4.0 / (1 + look.step / pace)) for look in looks)


def to_a_loss(until: float = 1.8, **changes: Any) -> TrainingRequest:
    return small(until=until, evaluate=4, keep=6, steps=40, **changes)


def test_a_seed_ends_once_all_arms_have_reached_the_loss(trained: Trained) -> None:
    """At the slowest arm's validation, with those of a last step."""
    kept, _, _ = trained(Slower(), to_a_loss(seeds=3))
    assert kept.finished and {row.step for row in kept.of(StepRow)} == set(range(16))
    assert [look.step for look in kept.of(Validation) if look.of != "held-out"] == [16] * 12
    verdicts = verdicts_of(kept.training, kept.lines)
    reference, fp8 = verdicts.reached
    # Exactly 9.78 and 13.04; a straight line between validations crosses a little later.
    assert [place.steps for place in reference.seeds] == [pytest.approx(9.9, abs=0.1)] * 3
    assert reference.seeds[0].tokens == pytest.approx(9.9 * 32, rel=0.02) and fp8.seeds[0].seconds is None
    assert fp8.times == pytest.approx(4 / 3, rel=0.02) and fp8.interval is not None
    told = answer(verdicts.arms[0], verdicts)
    assert "it reaches 1.8 in 1.3" in told and told.endswith("(3 seeds)")
    assert len(verdicts.arms[0].pairs) == 3 and {curve.steps for curve in curves_of(kept.lines, 40).values()} == {16}
    text = " ".join(render(KIND.view(kept).page()).split())
    assert "to a loss of 1.8" in text and "3 of 3" in text and "quantised:fp8" in text


def test_an_arm_that_never_reaches_the_loss_says_so(trained: Trained) -> None:
    """All steps are then taken; a stopped arm delays no other."""
    for until, words in ((0.7, "which bf16 did in 2 of 2 seeds"), (0.1, "and neither did bf16")):
        kept, _, _ = trained(Slower(), to_a_loss(until))
        verdicts = verdicts_of(kept.training, kept.lines)
        assert len(kept.of(StepRow)) == 320 and words in answer(verdicts.arms[0], verdicts)
    lost = Slower(bad=lambda arm, seed, step: arm == "fp8" and step > 3)
    kept, _, _ = trained(lost, to_a_loss(settings=REWIND))
    assert max(row.step for row in kept.of(StepRow)) == 11


def test_a_resumed_seed_ends_at_the_same_step(trained: Trained) -> None:
    whole, _, _ = trained(Slower(), to_a_loss())
    for step in (0, 5, 12):
        half, _, _ = trained(Slower(strikes("fp8", step, KeyboardInterrupt(), seed=1)), to_a_loss())
        assert not half.finished and said(trained(Slower())[0]) == said(whole), step
