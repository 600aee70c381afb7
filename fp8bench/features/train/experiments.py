"""Named experiments: small trainings, each with a hypothesis about one figure of every arm, and a verdict on it.

The figure is compared with the reference's in the same seed, which has the same weights and batches. The hypothesis is
confirmed where the whole interval of 99% over seeds is on its side and the mean is at least `least`; refuted where the
interval excludes `least`; else open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from fp8bench import units
from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import Arm, KeptTraining, StepFigure, Validation
from fp8bench.features.train.verdicts.curves import LEAST_PAIRS, Gap, Learned, gap_of
from fp8bench.features.train.verdicts.summary import JudgedTraining, still_open
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Table, Text
from fp8bench.report.words.naming import many

T = TypeVar("T", TrainingRequest, TrainerSettings)
# A figure of an arm in a seed, given the candidate it is computed for.
Figure = Callable[[JudgedTraining, str, int, Arm], float]


def _mean(seen: JudgedTraining, arm: str, seed: int, first: float, last: float) -> float:
    """The mean loss between two shares of the steps."""
    losses = seen.curves[arm, seed].losses
    return fmean(losses[round(first * len(losses)) : round(last * len(losses))])


def _late(seen: JudgedTraining, arm: str, seed: int, name: str) -> float:
    """The mean of a figure over layers in the last third of the steps."""
    late = (line for line in seen.kept.of(StepFigure) if line.step >= seen.training.request.steps * 2 / 3)
    return fmean(line.value for line in late if (line.arm, line.seed, line.name) == (arm, seed, name))


def _look(seen: JudgedTraining, arm: str, seed: int, of: str) -> float:
    looks = {(look.arm, look.seed, look.step, look.of): look.loss for look in seen.kept.of(Validation)}
    return looks[arm, seed, seen.curves[arm, seed].steps, of]


@dataclass(frozen=True)
class Experiment:
    """`sign` is 1 if the figure is expected above the reference's by a share of at least `least`, -1 if below.
    `changes` and `settings` replace defaults, `base` is the training whose weights arms begin with. The arms of a
    ladder are rungs, each looser than the one before."""

    name: str
    hypothesis: str
    measured: str
    figure: Figure
    sign: int
    least: float
    changes: Mapping[str, Any]
    settings: Mapping[str, Any]
    base: Mapping[str, Any] | None = None
    is_ladder: bool = False


# From the most careful: less margin, then shorter histories, then rarer renewal of scales.
_RUNGS = ("margin=2", "margin=1", "", "history=16", "history=1", "history=16:interval=10", "history=16:interval=100")
_SMALL = {"bands": ("none",), "energy": False, "evaluate": 1000, "keep": 1000}
_TINY = {"batch": 1, "sequence": 64}
EXPERIMENTS = (
    Experiment(
        "embedding-collapse", "a table of embeddings that is looked up, or learns, in low precision collapses",
        "how far its rows lie from their mean, in the last third of the steps",
        lambda seen, arm, seed, of: _late(seen, arm, seed, "embedding_spread"), -1, 0.1,
        {"dtypes": ("fp32", "bf16"), "steps": 60, "sweep": (("gradients", ("fp32", "fp8")),)},
        {"precision_map": (("embed", "fp8"),)},
    ),
    Experiment(
        "batch-norm-drift", "running statistics that are kept in low precision drift away from those of the batches",
        "by how many standard deviations running means are off, in the last third of the steps",
        lambda seen, arm, seed, of: _late(seen, arm, seed, "batch_norm_drift"), 1, 0.1,
        {"dtypes": ("fp32", "bf16", "fp8"), "steps": 60}, {"arch": "cnn", "precision_map": (("norm", "fp8"),)},
    ),
    Experiment(
        "loss-scale", "fp16 learns worse under this loss scale than fp32 does without one",
        "the training loss over the last tenth of the steps",
        lambda seen, arm, seed, of: _mean(seen, arm, seed, 0.9, 1.0), 1, 0.01,
        {"dtypes": ("fp32", "fp16"), "steps": 60,
         "sweep": (("loss-scale", ("1", "256", "65536", "16777216", "4294967296", "dynamic")),)}, {"on_nan": "skip"},
    ),
    Experiment(
        "shift", "another kind of text in the middle of a training hurts low precision more: its scales are of the old",
        "the loss in the tenth of the steps after the shift, over that in the tenth before",
        lambda seen, arm, seed, of: _mean(seen, arm, seed, 0.5, 0.6) / _mean(seen, arm, seed, 0.4, 0.5), 1, 0.01,
        {"dtypes": ("bf16", "fp8", "fp8-delayed"), "steps": 100}, {"shift": 0.5},
    ),
    Experiment(
        "fine-tuning", "a checkpoint of bf16 is tuned to other text less well in low precision than in bf16",
        "the loss on held-out text of the new kind, after the last step",
        lambda seen, arm, seed, of: _look(seen, arm, seed, "held-out"), 1, 0.01,
        # With one sequence a batch, noise would be as large as the effect of tuning.
        {"dtypes": ("bf16", "fp8", "nvfp4"), "steps": 100}, {"shift": 0.0, "batch": 8},
        base={"dtypes": ("bf16", "fp8"), "steps": 120, "seeds": 1, "keep": 119},
    ),
    Experiment(
        "quantises-better", "what was trained in a low precision loses less by being quantised to it",
        "the loss on held-out text with weights quantised to the arm's precision, over that in bf16: how much "
        "more it is than of the arm that was trained in bf16 is an interaction",
        lambda seen, arm, seed, of: _look(seen, arm, seed, f"quantised:{of.precision}")
        / _look(seen, arm, seed, "quantised:bf16"),
        -1, 0.001, {"dtypes": ("bf16", "fp8", "nvfp4"), "steps": 100}, {},
    ),
    Experiment(
        "ladder", "delayed scales that are loosened this far learn worse than bf16",
        "the training loss over the last tenth of the steps",
        lambda seen, arm, seed, of: _mean(seen, arm, seed, 0.9, 1.0), 1, 0.01,
        {"dtypes": ("bf16", *(f"fp8-delayed:{rung}".rstrip(":") for rung in _RUNGS)), "steps": 100}, {}, is_ladder=True,
    ),
)  # fmt: skip


def experiment_named(name: str) -> Experiment:
    for experiment in EXPERIMENTS:
        if experiment.name == name:
            return experiment
    raise UnknownName("experiment", name, [experiment.name for experiment in EXPERIMENTS])


def as_experiment(request: TrainingRequest) -> TrainingRequest:
    if not request.experiment:
        return request
    own = experiment_named(request.experiment)
    if request.settings.make:
        raise UsageError(f"--experiment {own.name} is for the built-in models. Leave {request.settings.make} out.")
    settings = _changed(request.settings, {**_TINY, **own.settings})
    return _changed(replace(request, settings=settings), {**_SMALL, **own.changes})


def base_of(request: TrainingRequest) -> TrainingRequest | None:
    """The training whose weights the arms of an experiment begin with, unless the request names one."""
    own = experiment_named(request.experiment) if request.experiment else None
    if own is None or own.base is None or request.settings.start or request.settings.weights_from:
        return None
    plain = replace(
        request,
        experiment="",
        settings=replace(request.settings, shift=1.0, rate=TrainerSettings().rate, lora=0, tasks=()),
    )
    return replace(plain, **own.base)


def _changed(request: T, changes: Mapping[str, Any]) -> T:
    """What the user has set stays."""
    defaults = type(request)()
    return replace(request, **{
        key: value for key, value in changes.items() if getattr(request, key) == getattr(defaults, key)
    })  # fmt: skip


@dataclass(frozen=True)
class ExperimentArm:
    """`change` is the share by which the arm's figure lies above its reference's, over the seeds that have both."""

    arm: str
    word: str
    change: Gap | None = None


@dataclass(frozen=True)
class ExperimentResult:
    """The outcome of an experiment for each arm; `stopped` says where a ladder ends."""

    name: str
    hypothesis: str
    measured: str
    arms: tuple[ExperimentArm, ...]
    stopped: str = ""


def result_of(judged: JudgedTraining) -> ExperimentResult | None:
    """None for a training that is not an experiment."""
    verdicts, name = judged.verdicts, judged.training.request.experiment
    if not name:
        return None
    own = experiment_named(name)
    arms = tuple(_result_of_arm(own, judged, each.arm) for each in verdicts.arms if not each.arm.skip)
    stopped = _stopped(arms, _alarms(judged.kept, verdicts.reference)) if own.is_ladder else ""
    return ExperimentResult(own.name, own.hypothesis, own.measured, arms, stopped)


def _alarms(kept: KeptTraining, reference: str) -> dict[str, str]:
    """The first alarm of every arm by a rule that did not alarm for the reference."""
    own = {event.rule for event in kept.alarms if event.arm == reference}
    first: dict[str, str] = {}
    for event in kept.alarms:
        if event.rule not in own:
            first.setdefault(event.arm, f"an alarm in seed {event.seed}, step {event.step}: {event.words}")
    return first


def _stopped(arms: tuple[ExperimentArm, ...], alarms: Mapping[str, str]) -> str:
    """The loosest healthy rung, and what speaks against the next one."""
    healthy = ""
    for number, rung in enumerate(arms):
        worse = "the loss is worse" if rung.word == "confirmed" else rung.word
        if why := alarms.get(rung.arm) or ("" if worse.startswith("refuted") else worse):
            until = f"{healthy} is the loosest healthy rung, {number} of {len(arms)}"
            return f"{until if number else 'No rung is healthy'}. {rung.arm}: {why}."
        healthy = rung.arm
    return f"All {len(arms)} rungs are healthy, the loosest is {healthy}."


def _result_of_arm(own: Experiment, seen: JudgedTraining, arm: Arm) -> ExperimentArm:
    changes, verdicts = list[float](), seen.verdicts
    ended = {key for key, curve in seen.curves.items() if curve.whole and not curve.blew_up}
    for seed in verdicts.seeds:
        if not {(arm.name, seed), (verdicts.reference, seed)} <= ended:
            continue
        try:
            ratio = own.figure(seen, arm.name, seed, arm) / own.figure(seen, verdicts.reference, seed, arm)
        except (KeyError, ValueError, ZeroDivisionError):  # one of them lacks the figure in this seed
            continue
        if math.isfinite(ratio):
            changes.append(ratio - 1)
    change, verdict = gap_of(changes), verdicts.of(arm.name)
    word = _word(own, change)
    if verdict is not None and verdict.judged.learned is Learned.DIVERGED:
        word = f"it diverged in {len(verdict.diverged_in)} of {many(len(verdicts.seeds), 'seed')}"
    return ExperimentArm(arm.name, word, change)


def _word(own: Experiment, change: Gap | None) -> str:
    if change is None or change.decides is None or change.pairs < LEAST_PAIRS:
        return still_open(change, own.least)
    low, high = sorted(own.sign * end for end in (change.decides.low, change.decides.high))
    if low > 0 and own.sign * change.point >= own.least:
        return "confirmed"
    return f"refuted: {100 * own.least:g}% or more is excluded" if high < own.least else still_open(change, own.least)


def parts_of(judged: JudgedTraining) -> Iterator[Part]:
    result = result_of(judged)
    if result is None:
        return

    def shown(arm: ExperimentArm) -> str | None:
        if arm.change is None:
            return None
        ends, point = arm.change.decides, f"{100 * arm.change.point:+.2g}%"
        return f"{point} [{100 * ends.low:+.2g}%, {100 * ends.high:+.2g}%]" if ends else point

    cols: list[Col[ExperimentArm]] = [
        Col("arm", lambda arm: arm.arm), Col("change", shown, hint="with the 99% interval over seeds"),
        Col("seeds", lambda arm: arm.change.pairs if arm.change else 0, number=True, show=units.whole),
        Col("word", lambda arm: arm.word),
    ]  # fmt: skip
    words = [f"Hypothesis: {result.hypothesis}.", f"Measured: {result.measured}."]
    words += [result.stopped] if result.stopped else []
    yield Part(
        "experiment", f"Experiment {result.name}",
        (*map(Text, words), table("experiment", "against the reference of the same seed", cols, result.arms)),
    )  # fmt: skip


def listing() -> Page:
    cols: list[Col[Experiment]] = [
        Col("experiment", lambda experiment: experiment.name),
        Col("hypothesis", lambda experiment: experiment.hypothesis),
        Col("measured", lambda experiment: experiment.measured, below=True),
    ]  # fmt: skip
    shown: Table = table("experiments", "", cols, EXPERIMENTS, main=True)
    return Page("fp8bench train --experiment NAME", "", (Part("experiments", "", (shown,)),))
