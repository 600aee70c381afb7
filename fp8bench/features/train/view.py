"""A training as a page without charts: each arm compared with the reference, bands and events; and the plan of one."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench import units
from fp8bench.features.train import words
from fp8bench.features.train.request import SETTINGS_RULES, TrainerSettings, TrainingRequest
from fp8bench.features.train.values import (
    COVERAGE,
    Arm,
    ArmCost,
    ArmRole,
    ArmState,
    KeptTraining,
    StepRow,
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import Why
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, score_parts, tone_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.model import Level
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.terminal.short_answer import Answer, as_sentence, short_answer
from fp8bench.report.topics.answers import without_option
from fp8bench.report.words.naming import describe_devices, join_words, many

# Stands under the hints of the arms' columns.
_LEGEND = ("a verdict is of this model, text and number of steps: it does not transfer to a model of another size",)
_SHOWN_EVENTS = 12
_ONLY_IN_WHOLE = ("how", "B/param", "on a device", "events", "to the same loss")
POSITION = "position:"
_LOOKS = "After the last step, on text that was never trained on"


def page_of(judged: JudgedTraining) -> Page:
    """The short answer; `whole_page` has the rest."""
    training, kept, verdicts = judged.training, judged.kept, judged.verdicts
    rows = [summary for summary in judged.summaries if not summary.arm.is_band and not summary.arm.skip]
    arms = replace(arms_table(rows, _ONLY_IN_WHOLE), caption="")
    store = shlex.quote(str(Path(kept.path).parent.parent.parent))
    spent = f"{many(training.request.steps, 'step')} in {many(training.request.seeds, 'seed')}"
    part = short_answer(
        f"{title_of(training, settings_of(training.request))} on {describe_devices([training.device])}: {spent}",
        f"Does it learn as well as {verdicts.reference}?",
        find_answers(judged.summaries, verdicts),
        warnings=_warnings(kept),
        action=_propose(judged, store),
        tables=(arms,),
        more=(
            ("Page", f"fp8bench report {training.id} --store {store}"),
            ("More", f"fp8bench show {training.id} --store {store} --all"),
        ),
    )
    return Page("", "", (part,), _legend(arms))


def find_answers(summaries: Sequence[ArmSummary], verdicts: TrainingVerdicts) -> list[Answer]:
    """Returns an answer for each arm that is compared with the reference, and for each that was not trained."""
    peaks = {summary.arm.name: summary.peak_memory for summary in summaries}
    told = []
    for summary in summaries:
        arm, own = summary.arm, summary.verdict
        if arm.skip:
            told.append(Answer(arm.name, "not trained", Tone.DOUBT, reason=arm.skip))
        elif own is not None and own.judged.why is not Why.OTHER_RATE:
            costs = (_speed_of(summary), _memory_of(summary, peaks.get(verdicts.reference)))
            word, reason = words.VERDICTS[own.judged.learned], words.verdict(own, verdicts)
            told.append(Answer(arm.name, word, tone_of(own.judged), costs=costs, reason=reason))
    return told


def _speed_of(summary: ArmSummary) -> str:
    speed = summary.verdict.speed if summary.verdict else None
    if not summary.arm.native:
        return "no speed here (emulated)"
    return f"steps {units.ratio(speed.raw.point)} as fast" if speed is not None else ""


def _memory_of(summary: ArmSummary, peak_of_reference: int | None) -> str:
    """For an emulated arm what a device with its formats would take, which is an estimate."""
    native = summary.arm.native
    peak = summary.peak_memory if native else summary.device_peak_memory
    if not peak or not peak_of_reference:
        return ""
    return f"memory {units.change(peak / peak_of_reference)}{'' if native else ' (est.)'}"


def _warnings(kept: KeptTraining) -> Iterator[Text]:
    yield from _cut_off(kept)
    events = [event for event in kept.of(TrainingEvent) if event.kind != COVERAGE]
    if events:
        rest = f" ({len(events) - 1} more: --all)" if len(events) > 1 else ""
        yield Text(f"{event_words(events[0])}{rest}", Tone.BAD)
    yield from (Text(trouble, Tone.DOUBT) for trouble in kept.troubles)


def _propose(judged: JudgedTraining, store: str) -> str:
    """The command that ends the training, or trains as many seeds as open verdicts need; '' where none would help."""
    request, command = judged.training.request, judged.training.command
    if not judged.kept.finished:
        return f"train the rest: fp8bench train --resume {judged.training.id} --store {store}"
    more = max((arm.judged.more_seeds or 0 for arm in judged.verdicts.arms if not arm.arm.skip), default=0)
    if not more or "fp8bench train" not in command:
        return ""
    seeds = request.seeds + more
    seconds = seeds / request.seeds * math.fsum(row.seconds for row in judged.kept.of(StepRow))
    spent = f" in about {units.clock(seconds)}" if seconds else ""
    command = f"{without_option(command, '--seeds')} --seeds {seeds}"
    return f"train {seeds} seeds{spent}, probably enough for a verdict: {command}"


def whole_page(judged: JudgedTraining, most_events: int = _SHOWN_EVENTS) -> Page:
    training, kept, verdicts = judged.training, judged.kept, judged.verdicts
    arms = arms_table(judged.summaries)
    answer = Items(tuple(map(as_sentence, find_answers(judged.summaries, verdicts))))
    parts = [
        Part("verdict", "Does it still learn?", (answer, arms, *wire_table(judged))),
        *list_of("notes", "Notes", (*bands_of(verdicts), *notes_of(judged))),
        *looks_of(kept),
        *score_parts(judged.scores),
        Part("health", "What happened", tuple(_events(kept, most_events))),
        Part("ending", "", tuple(map(Text, _ending(kept)))),
    ]
    return Page(title_of(training), "", tuple(parts), _legend(arms), tuple(facts_of(training)))


def _legend(arms: Table) -> tuple[str, ...]:
    return (*(f"{column.title}: {column.hint}" for column in arms.columns if column.hint), *_LEGEND)


def wire_table(judged: JudgedTraining) -> Iterator[Table]:
    shown = [summary for summary in judged.summaries if summary.wire and not summary.arm.is_band]
    cols: list[Col[ArmSummary]] = [
        Col("arm", lambda row: row.arm.name),
        Col("sent", lambda row: math.fsum(row.wire.values()), show=units.size),
        Col("as", lambda row: ", ".join(f"{what} {units.size(size)}" for what, size in row.wire.items()), below=True),
    ]
    if shown:
        yield table("wire", "what a rank sends in a step", cols, shown)


def plan_page(training: Training, reference: ArmState) -> Page:
    request, settings = training.request, training.request.settings
    cols: list[Col[Arm]] = [
        Col("arm", lambda arm: arm.name),
        Col("role", lambda arm: arm.role.value),
        Col("how", _how),
        Col("why not", lambda arm: arm.skip, below=True),
    ]
    running = [arm for arm in training.arms if not arm.skip]
    once = sum(arm.role is ArmRole.CHAOS for arm in running)
    steps = request.steps * ((len(running) - once) * request.seeds + once)
    ending = (
        f"parameters: {units.whole(reference.parameters)} ({settings.make or f'{settings.model}, {settings.arch}'})",
        f"steps: {units.whole(steps)} in all, {many(request.steps, 'step')} of {many(len(running), 'arm')} in "
        + many(request.seeds, "seed"),
        *([f"ranks: {request.ranks} by {settings.parallel}"] if request.ranks else []),
        f"tokens: {units.whole(reference.tokens)} a step, {units.whole(steps * reference.tokens)} in all",
    )
    title = f"training of {settings.called} on {training.device.key}, which is {training.device.name}"
    arms = table("arms", "", cols, training.arms)
    return Page(title, "", (Part("arms", "", (arms,)), Part("ending", "", tuple(map(Text, ending)))))


def title_of(training: Training, changed: str = "") -> str:
    settings = training.request.settings
    about = filter(
        None, ("" if settings.make else settings.arch, f"{units.count(training.parameters)} parameters", changed)
    )
    return f"training of {settings.called} ({', '.join(about)})"


def facts_of(training: Training) -> Iterator[tuple[str, str]]:
    request = training.request
    yield "id", training.id
    yield "device", f"{training.device.key} ({training.device.name})"
    yield "steps", f"{units.whole(request.steps)} in {many(request.seeds, 'seed')}"
    if request.ranks is not None:
        yield "ranks", f"{request.ranks} by {request.settings.parallel}"
    yield "text", training.text.identity
    if settings := settings_of(request):
        yield "settings", settings
    yield "margin", units.percent(request.margin)


def settings_of(request: TrainingRequest) -> str:
    """The settings that differ from their defaults, without those in the title."""
    usual, own = TrainerSettings(), request.settings
    others = {"make", "model", "arch", "scales", "parallel"}
    named = [name for name in SETTINGS_RULES if name not in others]
    changed = {name: getattr(own, name) for name in named if getattr(own, name) != getattr(usual, name)}
    changed |= {"scales_from": request.scales_from} if request.scales_from else {}
    return ", ".join(f"{name.replace('_', '-')} {_shown(value)}" for name, value in changed.items())


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _how(arm: Arm) -> str:
    return "skipped" if arm.skip else (Level.NATIVE if arm.native else Level.EMULATED).value


def on_a_device(summary: ArmSummary) -> int | None:
    """What hardware with the formats would hold of an emulated arm."""
    return None if summary.arm.native else summary.device_peak_memory


def arms_table(rows: Sequence[ArmSummary], without: Collection[str] = ()) -> Table:
    cols: tuple[Col[ArmSummary], ...] = (
        Col("arm", lambda row: row.arm.name),
        Col(
            "how",
            lambda row: _how(row.arm),
            hint="native: the device multiplies in it",
            tone=lambda row: Tone.DOUBT if row.arm.skip or not row.arm.native else Tone.PLAIN,
        ),
        Col(
            "loss",
            lambda row: row.loss,
            show=_four_digits,
            hint="training loss, the mean over seeds and the last tenth of the steps",
        ),
        Col(
            "held-out",
            lambda row: row.held_out,
            show=_four_digits,
            hint="the loss on text that was never trained on",
        ),
        Col(
            "tokens/s",
            lambda row: row.tokens_per_second,
            show=units.count,
            hint="by the median step; of native arms",
        ),
        Col("J/step", lambda row: words.joules(row.energy), number=True, hint="by windows of steps of the arm alone"),
        Col(
            "B/param",
            lambda row: None if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.3g}",
            number=True,
            hint="bytes kept between two steps for each parameter, as counted",
        ),
        Col(
            "memory",
            lambda row: row.peak_memory,
            show=units.size,
            hint="tensors at the peak of a step, with no other arm in memory",
        ),
        Col(
            "on a device",
            on_a_device,
            show=units.size,
            hint="derived: the same on hardware that keeps the formats which the arm emulates",
        ),
        Col("events", lambda row: None if row.events is None else str(row.events), number=True),
        Col(
            "to the same loss",
            lambda row: words.speed(row.verdict.speed) if row.verdict else None,
            hint="speed times steps: how much sooner a native arm is as good",
        ),
    )
    shown = [col for col in cols if col.heading not in without]
    return table("arms", "arms", shown, rows, main=True, required=("loss",))


def _four_digits(loss: float) -> str:
    return f"{loss:.4f}"


def looks_of(kept: KeptTraining) -> Iterator[Part]:
    looks, steps = kept.of(Validation), kept.training.request.steps
    last = [look for look in looks if look.step == steps and math.isfinite(look.loss)]
    shown = list(dict.fromkeys(look.of for look in last if not look.of.startswith(POSITION)))
    places = list(dict.fromkeys(look.of for look in last if look.of.startswith(POSITION)))
    shown += [places[0], places[-1]] if len(places) > 1 else []
    means = {key: _mean_of(seen) for key, seen in together(((look.arm, look.of), look) for look in last).items()}
    seen = {look.arm for look in last}
    arms = [
        arm.name for arm in kept.training.arms if arm.role not in (ArmRole.REPEAT, ArmRole.CHAOS) and arm.name in seen
    ]

    def cols(show: Callable[[Validation], Field]) -> Iterator[Col[str]]:
        def cell(of: str, arm: str) -> Field | None:
            return show(means[arm, of]) if (arm, of) in means else None

        yield Col("arm", str)
        yield from (Col(of, partial(cell, of), number=True) for of in shown)

    if arms:
        losses = table("looks", "loss", [*cols(lambda mean: Field(f"{mean.loss:.3f}", mean.loss))], arms)
        of_tokens = [*cols(lambda mean: Field(f"{mean.perplexity:.3g}", mean.perplexity))]
        perplexities = table("perplexities", "perplexity of a token", of_tokens, arms)
        # The loss of a model of one's own may be of anything, and its exponential nothing.
        yield Part("texts", _LOOKS, (losses,) if kept.training.request.settings.make else (losses, perplexities))


def _mean_of(seen: Sequence[Validation]) -> Validation:
    return replace(seen[0], loss=math.fsum(look.loss for look in seen) / len(seen))


def bands_of(verdicts: TrainingVerdicts) -> Iterator[str]:
    if verdicts.repeat_band is not None:
        yield words.repeat_band(verdicts.repeat_band)
    if verdicts.chaos is not None:
        yield words.chaos(verdicts.chaos)
    if all_of := words.chance_of_all(verdicts):
        yield all_of


def notes_of(judged: JudgedTraining) -> Iterator[str]:
    kept, verdicts = judged.kept, judged.verdicts
    yield from dict.fromkeys(event.words for event in kept.of(TrainingEvent) if event.kind == COVERAGE)
    if not verdicts.looks:
        yield "nothing was held out, so that the training loss alone decides: return held_out from make()"
    for verdict in verdicts.arms:
        if not verdict.arm.skip:
            yield from (f"{verdict.arm.name}: {note}" for note in words.notes(verdict))
    yield from (f"{cost.arm}: {cost.why}" for cost in kept.of(ArmCost) if cost.why)
    measured = {cost.arm for cost in kept.of(ArmCost)}
    if names := [arm.name for arm in kept.training.arms if not arm.native and arm.name in measured]:
        memories = [cost.memory for cost in kept.of(ArmCost) if cost.memory and cost.arm in names]
        derived = "; memory on a device is derived" if any(memory.on_device for memory in memories) else ""
        yield f"memory and energy of {join_words(names)} are of emulation, not of a device with the format{derived}"
    if kept.training.request.ranks is not None and not kept.training.device.accelerated:
        yield "ranks on a CPU share its cores: their tokens/s mean nothing"
    energies = ((own.energy.why, own.arm.name) for own in judged.summaries if own.energy and own.energy.why)
    yield from (f"energy of {join_words(arms)}: {why}" for why, arms in together(energies).items())
    yield from kept.troubles


def event_words(event: TrainingEvent) -> str:
    """'fp8, seed 0, step 57: the loss is nan (head output). What may help: a lower learning rate'."""
    where = f"{event.layer} {event.tensor}".strip()
    who = f"{event.arm}, seed {event.seed}, step {event.step}" if event.arm else f"seed {event.seed}"
    helps = f". What may help: {event.remedy}" if event.remedy else ""
    return f"{who}: {event.words}{f' ({where})' if where else ''}{helps}"


def _cut_off(kept: KeptTraining) -> Iterator[Text]:
    if not kept.finished:
        seed, step = max(((row.seed, row.step) for row in kept.of(StepRow)), default=(kept.training.request.seed, -1))
        words = f"cut off in seed {seed} after {many(step + 1, 'step')}: all figures are of what was kept"
        yield Text(words, Tone.DOUBT)


def _events(kept: KeptTraining, most: int) -> Iterator[Element]:
    yield from _cut_off(kept)
    events = [event for event in kept.of(TrainingEvent) if event.kind != COVERAGE]
    if not events:
        yield Text("Nothing: no alarm, and all values were finite.")
        return
    cols: list[Col[TrainingEvent]] = [
        Col("arm", lambda event: event.arm),
        Col("seed", lambda event: event.seed, show=str),
        Col("step", lambda event: event.step, show=str),
        Col("what", lambda event: event.kind),
        Col("where", lambda event: f"{event.layer} {event.tensor}".strip()),
        Col("words", lambda event: event.words),
        Col("what may help", lambda event: event.remedy),
    ]
    yield table("events", "", cols, events[:most], main=True, required=("arm", "seed", "step", "what"))
    if len(events) > most:
        counts = Counter(event.kind for event in events[most:])
        yield Text(f"and {', '.join(f'{count} more of {kind}' for kind, count in counts.items())}: the CSV has them")


def _ending(kept: KeptTraining) -> Iterator[str]:
    store = shlex.quote(str(Path(kept.path).parent.parent.parent))
    yield f"stored in {kept.path}"
    yield f"curves, tensors by layer and events: fp8bench report {kept.training.id} --store {store}"
