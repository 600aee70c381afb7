"""An arm that goes back to a checkpoint, past a batch that spoilt it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fp8bench.plan.corpus import Corpus
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, rows, task_of


@for_each("mode", ["bf16", "fp8-delayed", "nvfp4"])
def test_the_weights_are_those_of_an_arm_that_never_met_the_batch(corpus: Corpus, tmp_path: Path, mode: str) -> None:
    """Bit for bit, whatever casts remember and draw: the same steps without that one, from a checkpoint that has been
    through a file."""
    task = task_of(corpus, mode, on_nan="rewind", dropout=0.1, steps=20)
    lab, never = lab_of(task), lab_of(task)
    before = lab.advance(mode, 10)
    folder = str(tmp_path / "kept")
    lab.save(folder)
    never._trainers[mode].rewinds = ((13, 13),)
    whole = never.advance(mode, 20)
    trainer = lab._trainers[mode]
    windows = trainer._read_in(0)
    drawn = windows.drawn
    parameter = next(iter(trainer._parameters.values()))

    def spoilt(seed: int, step: int, *rest: int) -> Any:
        if step == 13:
            with torch.no_grad():
                parameter.mul_(torch.nan)
        return drawn(seed, step, *rest)

    windows.drawn = spoilt  # type: ignore[method-assign]
    lines = lab.advance(mode, 10)
    assert rows(lines)[-1].step == 13 and trainer.stopped and lab.advance(mode, 3) == ()
    assert lab.rewinds(mode) == () and lab.rewind(folder, mode, ((13, 13),)) == 10
    again = lab.advance(mode, 10)
    assert rows(before) + rows(again) == rows(whole) and [row.step for row in rows(again)] == [
        10,
        11,
        12,
        *range(14, 20),
    ]
    for name, own in lab._trainers[mode]._parameters.items():
        assert torch.equal(own, never._trainers[mode]._parameters[name]), name
    lab.save(str(tmp_path / "later"))
    lab.restore(str(tmp_path / "later"))
    assert lab.rewinds(mode) == ((13, 13),)
    assert lab.rewind("", mode, ((0, 2), (13, 13))) == 0
    assert [row.step for row in rows(lab.advance(mode, 20))] == [*range(3, 13), *range(14, 20)]
