"""Named experiments: their requests, and their words on streams with planted answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fp8bench.features.train.arms import check_training, make_arms
from fp8bench.features.train.experiments import (
    EXPERIMENTS,
    ExperimentResult,
    as_experiment,
    base_of,
    experiment_named,
    parts_of,
    result_of,
)
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import StepFigure, StepRow, StreamLine, Training, TrainingEvent, Validation
from fp8bench.report.elements import Page
from fp8bench.report.terminal.layout import render
from tests.commands import Say
from tests.counts import for_each
from tests.facts import CPU
from tests.learning_curves import curve, judged, rows, training

NAMES = [experiment.name for experiment in EXPERIMENTS]


def asked(name: str) -> Training:
    request = as_experiment(TrainingRequest(experiment=name))
    return replace(training(), request=request, arms=make_arms(request, CPU))


def stream(of: Training, effect: float, noise: float, chance: random.Random) -> Iterator[StreamLine]:
    """Every figure of a candidate that an experiment may look at lies above the reference's by `effect`."""
    steps = of.request.steps
    for number, arm in enumerate(of.arms):
        for seed in range(5):
            factor = 1 + (effect + chance.gauss(0, noise)) * bool(number)
            losses = curve(steps, 2.0 + 0.01 * seed)
            shifted = [loss * (factor if step >= steps // 2 else 1) for step, loss in enumerate(losses)]
            yield from rows(arm.name, seed, shifted)
            for step in range(0, steps, 10):
                for figure in ("embedding_spread", "batch_norm_drift"):
                    yield StepFigure(arm.name, seed, step, figure, 0.3 * (factor if step > steps / 2 else 9), "layer")
            looks = {"held-out": 2.1 * factor, "quantised:bf16": 2.1}
            looks |= {f"quantised:{mode}": 2.2 * factor for mode in ("fp8", "nvfp4")}
            for look, loss in looks.items():
                yield Validation(arm.name, seed, steps, look, loss, 1000, 1000)


def result(of: Training, lines: Iterable[StreamLine]) -> ExperimentResult:
    told = result_of(judged(lines, of))
    assert told is not None
    return told


@for_each("name", NAMES)
def test_a_planted_effect_is_confirmed_and_its_absence_refuted(name: str) -> None:
    """A spread as large as the effect leaves it open."""
    of, own = asked(name), experiment_named(name)
    cases = (
        (3 * own.sign * own.least, own.least / 10, "confirmed"), (0.0, own.least / 10, "refuted"),
        (-3 * own.sign * own.least, own.least / 10, "refuted"), (own.sign * own.least, 2 * own.least, "open"),
    )  # fmt: skip
    for effect, noise, word in cases:
        lines = tuple(stream(of, effect, noise, random.Random(name)))
        arms = result(of, lines).arms
        assert {arm.word.partition(":")[0] for arm in arms} == {word}, arms
        assert all(arm.change is not None and arm.change.pairs == 5 for arm in arms)
    text = " ".join(render(Page("", "", tuple(parts_of(judged(lines, of))))).split())
    assert own.hypothesis in text and own.measured in text and word in text


def test_seeds_without_the_figure_do_not_count_and_divergence_is_told() -> None:
    of = asked("loss-scale")
    lines = [line for line in stream(of, 0.1, 0.0, random.Random(1)) if not (line.arm == "fp16" and line.seed > 2)]
    lines = [
        replace(line, loss=9.0) if isinstance(line, StepRow) and line.arm.endswith("=256") else line for line in lines
    ]
    words = {arm.arm: arm.word for arm in result(of, lines).arms}
    assert words["fp16 loss-scale=256"] == "it diverged in 5 of 5 seeds" and words["fp16 loss-scale=1"] == "confirmed"
    assert {arm.word for arm in result(of, ()).arms} == {"open: 0 seeds of the 5 that are needed"}
    of = asked("embedding-collapse")
    cut = [
        line
        for line in stream(of, -0.3, 0.0, random.Random(1))
        if not (isinstance(line, StepRow | StepFigure) and (line.arm, line.seed) == ("fp32", 4) and line.step > 50)
    ]
    assert {arm.word for arm in result(of, cut).arms} == {"open: 4 seeds of the 5 that are needed"}
    of = asked("fine-tuning")  # of a seed that was cut off, held-out losses of the middle are no end
    early = [
        replace(line, step=50) if isinstance(line, Validation) and (line.arm, line.seed) == ("fp8", 4) else line
        for line in stream(of, 0.1, 0.0, random.Random(1))
    ]
    words = {arm.arm: arm.word for arm in result(of, early).arms}
    assert words == {"fp8": "open: 4 seeds of the 5 that are needed", "nvfp4": "confirmed"}


@for_each("name", NAMES)
def test_each_is_a_valid_request(name: str) -> None:
    request = as_experiment(TrainingRequest(experiment=name))
    check_training(request)
    assert request.seeds == 5 and request.steps <= 100 and request.settings.batch <= 8
    longer = as_experiment(TrainingRequest(experiment=name, steps=33, settings=TrainerSettings(batch=4)))
    assert (longer.steps, longer.settings.batch) == (33, 4)
    base = base_of(request)
    assert (base is not None) == (name == "fine-tuning")
    assert base is None or (base.experiment, base.seeds, base.settings.shift) == ("", 1, 1.0)
    assert base_of(replace(request, settings=replace(request.settings, start="last"))) is None


def test_without_a_name_they_are_listed(store: Path, fp8bench: Say) -> None:
    code, out, _ = fp8bench("train", "--experiment")
    assert code == 0 and all(name in out for name in NAMES)
    for words, said in (
        (("--experiment", "shfit"), "Did you mean 'shift'"), (("net:make", "--experiment", "shift"), "net:make out"),
        (("--experiment", "shift", "--ladder"), "not allowed with"),
    ):  # fmt: skip
        code, _, error = fp8bench("train", *words)
        assert code == 2 and said in error
    assert not store.exists()


def test_a_ladder_names_the_last_healthy_rung() -> None:
    of = asked("ladder")
    rungs = [arm.name for arm in of.arms if not arm.is_band][1:]
    assert rungs[0] == "fp8-delayed:margin=2" and len(rungs) == 7

    def stopped(worse: str = "", *alarms: TrainingEvent) -> str:
        lines = [*stream(of, 0.0, 1e-3, random.Random(1)), *alarms]
        return result(of, (
            replace(line, loss=1.1 * line.loss) if isinstance(line, StepRow) and line.arm == worse else line
            for line in lines
        )).stopped  # fmt: skip

    assert stopped() == f"All 7 rungs are healthy, the loosest is {rungs[-1]}."
    assert stopped(rungs[3]) == f"{rungs[2]} is the loosest healthy rung, 3 of 7. {rungs[3]}: the loss is worse."
    assert stopped(rungs[0]).startswith("No rung is healthy")
    alarm = TrainingEvent(rungs[1], 2, 30, "alarm", "it clips", values=(("rule", "saturated"),))
    told = f"{rungs[0]} is the loosest healthy rung, 1 of 7. {rungs[1]}: an alarm in seed 2, step 30: it clips."
    assert stopped("", alarm) == told and stopped(rungs[3], alarm) == told
    assert stopped("", alarm, replace(alarm, arm=of.arms[0].name)).startswith("All 7 rungs")
