"""Scales that are renewed in training, and arms that change their precision."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8bench.features.train.health.health import TrainingHealth
from fp8bench.features.train.values import COVERAGE_EVENT, Arm, LayerReading, StreamLine, TrainingEvent
from fp8bench.plan.corpus import Corpus
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, rows, task_of

LAYER = "blocks.0.mlp.up"
E4M3 = 448.0


def scales_of(corpus: Corpus, role: str, **settings: object) -> list[tuple[float, float]]:
    """The scale and the largest magnitude of a layer's tensor in each of ten steps."""
    arm = Arm("fp8", "fp8", settings=tuple(settings.items()))  # type: ignore[arg-type]
    task = replace(task_of(corpus, arm, steps=10, rate=0.02), stride=1)
    lines = lab_of(task).advance("fp8", 10)
    readings = (line for line in lines if isinstance(line, LayerReading))
    return [(line.scale, line.amax) for line in readings if (line.layer, line.role) == (LAYER, role)]


def test_scales_are_renewed_in_every_third_step_and_fixed_between(corpus: Corpus) -> None:
    """A renewed scale fits its tensor; in between it is that of the step of its renewal."""
    read = scales_of(corpus, "input", refresh_scales=3)
    assert len(read) == 10 and len({amax for _, amax in read}) > 5
    for step, (scale, amax) in enumerate(read):
        _, amax_then = read[step - step % 3]
        assert abs(scale * amax_then / E4M3 - 1) < 1e-6
        assert step % 3 == 0 or scale * amax != E4M3


def test_a_bound_renews_a_scale_when_too_much_saturates(corpus: Corpus) -> None:
    """With a bound of nothing no value is ever cut off; a loose one keeps the first scale."""
    strict, loose = (scales_of(corpus, "weight", saturation_bound=bound) for bound in (0.0, 99.0))
    assert all(scale * amax <= E4M3 * (1 + 1e-6) for scale, amax in strict)
    assert len({scale for scale, _ in loose}) == 1 and any(scale * amax > 1.01 * E4M3 for scale, amax in loose)
    assert len({scale for scale, _ in strict}) > 1


def test_an_arm_goes_on_in_its_later_precision_from_the_same_weights_and_moments(corpus: Corpus) -> None:
    then = Arm("then", "fp8", settings=(("then", "bf16@60%"),))
    lab = lab_of(task_of(corpus, then, "fp8", "bf16", steps=10, rate=0.01))
    before = lab.advance("fp8", 6)
    assert rows(lab.advance("then", 6)) == [replace(row, arm="then") for row in rows(before)]
    moments = lab._trainers["then"].optimizer.get_state()
    later = lab.advance("then", 1)
    # A trainer that was in bf16 from the beginning, given the weights of the sixth step, has the same loss.
    fresh = lab._trainers["bf16"]
    fresh.step = 6
    with torch.no_grad():
        for own, trained in zip(fresh.parameters.values(), lab._trainers["fp8"].parameters.values(), strict=True):
            own.copy_(trained)
    (row,) = rows(lab.advance("bf16", 1))
    assert [changed.loss for changed in rows(later)] == [row.loss] and row.loss != rows(lab.advance("fp8", 1))[0].loss
    assert [line.words for line in later if isinstance(line, TrainingEvent)] == [
        "then is trained in bf16 from step 6 on"
    ]
    assert moments.keys() == lab._trainers["then"].optimizer.get_state().keys()
    assert len(rows(lab.advance("then", 9))) == 3 and lab._trainers["then"].arm.precision == "bf16"


@for_each("changes", [True, False])
def test_a_change_of_precision_is_no_illness_of_a_scale(changes: bool) -> None:
    arm = Arm("fp8", "fp8")
    health = TrainingHealth((arm,))

    def readings(first: int, scale: float) -> list[StreamLine]:
        scales = (scale, scale, scale)
        steps = range(first, first + 60, 10)
        return [LayerReading("fp8", 0, step, "head", "input", 1.0, 0.1, 0.0, 1.0, 0.0, *scales) for step in steps]

    event = TrainingEvent("fp8", 0, 60, COVERAGE_EVENT, "fp8 is trained in bf16 from step 60 on")
    lines = [*readings(0, 1000.0), *([event] if changes else []), *readings(60, 1.0)]
    alarms = {alarm.rule for alarm in health.find_alarms(lines)}
    assert ("scale-falls" in alarms) is not changes
