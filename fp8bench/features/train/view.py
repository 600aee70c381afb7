"""A training as a page without charts: each arm compared with the reference, bands and events; and the plan of one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8bench import units
from fp8bench.features.train import words
from fp8bench.features.train.frame import FIGURES, frame_of
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
from fp8bench.features.train.verdicts.curves import HELD_OUT, LEAST_PAIRS, Learned, Why
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, score_parts, tone_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.model import Level
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Elements, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.terminal.short_answer import Answer, as_sentence, short_answer
from fp8bench.report.topics.answers import without_option
from fp8bench.report.topics.own_batch import OwnBatch, own_batches
from fp8bench.report.words.naming import describe_devices, join_words, many

_SHOWN_EVENTS = 12
_ONLY_IN_WHOLE = ("how", "B/param", "on a device", "events", "to the same loss")
POSITION = "position:"
_LOOKS = "After the last step, on text that was never trained on"


def page_of(judged: JudgedTraining) -> Page:
    """Returns the short answer; `whole_page` has the rest."""
    training, stored, verdicts = judged.training, judged.kept, judged.verdicts
    # Bands have no verdict; the whole page shows them.
    rows = [summary for summary in judged.summaries if not summary.arm.is_band and not summary.arm.skip]
    arms = replace(arms_table(rows, _ONLY_IN_WHOLE), caption="")
    store = shlex.quote(str(Path(stored.path).parent.parent.parent))
    spent = f"{many(training.request.steps, 'step')} in {many(training.request.seeds, 'seed')}"
    hint = "" if training.request.settings.make else " (--sweep model=nano,micro)"
    shown = {arm.judged.learned for arm in verdicts.arms} & {Learned.WORSE, Learned.BETTER, Learned.DIVERGED}
    is_enough = training.request.seeds >= LEAST_PAIRS
    if training.request.settings.model == "nano" and hint and is_enough and not shown:
        hint += ". In nano no recipe from fp8 to nvfp4 has been shown to differ (docs/train.md)"
    part = short_answer(
        f"{title_of(training, settings_of(training.request))} on {describe_devices([training.device])}: {spent}",
        f"Does it learn as well as {verdicts.reference}?",
        find_answers(judged.summaries, verdicts),
        warnings=_warnings(stored),
        action=_propose(judged, store),
        tables=(arms, *own_batch_elements(judged), Text(f"What it could show: {words.effect(verdicts)}{hint}")),
        more=(
            ("Page", f"fp8bench report {training.id} --store {store}"),
            ("More", f"fp8bench show {training.id} --store {store} --all"),
        ),
    )
    return Page("", "", (part,), _legend(arms))


def find_answers(summaries: Sequence[ArmSummary], verdicts: TrainingVerdicts) -> list[Answer]:
    """Returns an answer for each arm that is compared with the reference, and for each that was not trained."""
    peaks = {summary.arm.name: summary.peak_memory for summary in summaries}
    answers = []
    for summary in summaries:
        arm, verdict = summary.arm, summary.verdict
        if arm.skip:
            answers.append(Answer(arm.name, "not trained", Tone.DOUBT, reason=arm.skip))
        elif verdict is not None and verdict.judged.why is not Why.OTHER_RATE:
            costs = (_speed_of(summary), _memory_of(summary, peaks.get(verdicts.reference)))
            word, reason = words.VERDICTS[verdict.judged.learned], words.verdict(verdict, verdicts)
            answers.append(Answer(arm.name, word, tone_of(verdict.judged), costs=costs, reason=reason))
    return answers


def _speed_of(summary: ArmSummary) -> str:
    speed = summary.verdict.speed if summary.verdict else None
    if not summary.arm.native:
        return "no speed here (emulated)"
    return f"steps {units.ratio(speed.raw.point)} as fast" if speed is not None else ""


def _memory_of(summary: ArmSummary, peak_of_reference: int | None) -> str:
    """Returns an arm's memory; for an emulated arm the estimate for a device with its formats."""
    native = summary.arm.native
    peak = summary.peak_memory if native else summary.device_peak_memory
    if not peak or not peak_of_reference:
        return ""
    return f"memory {units.change(peak / peak_of_reference)}{'' if native else ' (est.)'}"


def _warnings(stored: KeptTraining) -> Iterator[Text]:
    yield from _cut_off(stored)
    events = [event for event in stored.of(TrainingEvent) if event.kind != COVERAGE]
    if events:
        further = f" ({len(events) - 1} more: --all)" if len(events) > 1 else ""
        yield Text(f"{events[0].sentence}{further}", Tone.BAD)
    yield from (Text(trouble, Tone.DOUBT) for trouble in stored.troubles)


def _propose(judged: JudgedTraining, store: str) -> str:
    """Returns the command that finishes the training, or trains as many seeds as open verdicts need; '' if none would
    help."""
    request, command = judged.request, judged.training.command
    if not judged.kept.finished:
        return f"train the rest: fp8bench train --resume {judged.training.id} --store {store}"
    # The arm that needs most seeds decides how many all get.
    further = max((arm.judged.more_seeds or 0 for arm in judged.verdicts.arms if not arm.arm.skip), default=0)
    if not further or "fp8bench train" not in command:
        return ""
    seeds = request.seeds + further
    seconds = seeds / request.seeds * math.fsum(row.seconds for row in judged.kept.of(StepRow))
    spent = f" in about {units.clock(seconds)}" if seconds else ""
    command = f"{without_option(command, '--seeds')} --seeds {seeds}"
    return f"train {seeds} seeds{spent}, probably enough for a verdict: {command}"


def whole_page(judged: JudgedTraining, most_events: int = _SHOWN_EVENTS) -> Page:
    training, stored, verdicts = judged.training, judged.kept, judged.verdicts
    arms = arms_table(judged.summaries, without=("how",) if training.is_watched else ())
    answers = find_answers(judged.summaries, verdicts)
    answer = [Items(tuple(map(as_sentence, answers)))] if answers else []
    question = "Does it still learn?" if answers else "How it learned"
    own_batch = tuple(own_batch_elements(judged))
    parts = [
        Part("verdict", question, (*answer, arms, *wire_table(judged))),
        *list_of("notes", "Notes", (*bands_of(verdicts), *notes_of(judged))),
        *(() if training.is_watched else looks_of(stored)),
        *score_parts(judged.scores),
        *last_figures(judged),
        *([Part("own-batch", "Each arm at its own batch", own_batch)] if own_batch else []),
        Part("health", "What happened", tuple(_events(stored, most_events))),
        Part("ending", "", tuple(map(Text, _ending(stored)))),
    ]
    return Page(title_of(training), "", tuple(parts), _legend(arms), tuple(facts_of(training)))


def _legend(arms: Table) -> tuple[str, ...]:
    return tuple(f"{column.title}: {column.hint}" for column in arms.columns if column.hint)


def own_batch_elements(judged: JudgedTraining) -> Elements:
    rates = {summary.arm.name: summary.tokens_per_second for summary in judged.summaries}
    rows = []
    for cost in judged.kept.of(ArmCost):
        if cost.capacity is not None and not cost.capacity.batch:
            yield Text(f"{cost.arm}: no largest batch was found: {cost.capacity.why}", Tone.DOUBT)
        elif cost.capacity is not None:
            rows.append(OwnBatch(cost.arm, cost.capacity, rates.get(cost.arm), cost.capacity.update))
    yield from own_batches(rows)


def wire_table(judged: JudgedTraining) -> Iterator[Table]:
    shown = [summary for summary in judged.summaries if summary.wire and not summary.arm.is_band]
    cols: list[Col[ArmSummary]] = [
        Col("arm", attrgetter("arm.name")),
        Col("sent", lambda row: math.fsum(row.wire.values()), number=True, show=units.size),
        Col(
            "as",
            lambda row: ", ".join(f"{operation} {units.size(size)}" for operation, size in row.wire.items()),
            below=True,
        ),
    ]
    if shown:
        yield table("wire", "what a rank sends in a step", cols, shown)


def plan_page(training: Training, reference: ArmState) -> Page:
    request, settings = training.request, training.request.settings
    cols: list[Col[Arm]] = [
        Col("arm", attrgetter("name")),
        Col("role", attrgetter("role.value")),
        Col("how", _how),
        Col("why not", attrgetter("skip"), below=True),
    ]
    running = [arm for arm in training.arms if not arm.skip]
    # The one-ulp arm runs in the first seed only.
    once = sum(arm.role is ArmRole.CHAOS for arm in running)
    steps = request.steps * ((len(running) - once) * request.seeds + once)
    ending = (
        f"parameters: {units.whole(reference.parameters)} ({settings.make or f'{settings.model}, {settings.arch}'})",
        f"steps: {units.whole(steps)} in all, {many(request.steps, 'step')} of {many(len(running), 'arm')} in "
        + many(request.seeds, "seed"),
        *([f"ranks: {request.ranks} by {settings.parallel}"] if request.ranks else []),
        f"tokens: {units.whole(reference.tokens)} a step, {units.whole(steps * reference.tokens)} in all",
    )
    title = f"training of {settings.display_name} on {training.device.key}, which is {training.device.name}"
    arms = table("arms", "", cols, training.arms)
    return Page(title, "", (Part("arms", "", (arms,)), Part("ending", "", tuple(map(Text, ending)))))


def title_of(training: Training, changed: str = "") -> str:
    settings = training.request.settings
    if training.is_watched:
        request = training.request
        names = join_words(arm.name for arm in training.arms)
        seeds = f" in {request.seeds} seeds" if request.seeds > 1 else ""
        return f"watched: {names}, {many(request.steps, 'step')}{seeds}"
    about = filter(
        None, ("" if settings.make else settings.arch, f"{units.count(training.parameters)} parameters", changed)
    )
    return f"training of {settings.display_name} ({', '.join(about)})"


def facts_of(training: Training) -> Iterator[tuple[str, str]]:
    request = training.request
    if training.is_watched:
        return
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
    """Returns the settings that differ from their defaults, without those in the title."""
    usual, settings = TrainerSettings(), request.settings
    titled = {"make", "model", "arch", "scales", "parallel"}
    named = [name for name in SETTINGS_RULES if name not in titled]
    changed = {name: getattr(settings, name) for name in named if getattr(settings, name) != getattr(usual, name)}
    changed |= {"scales_from": request.scales_from} if request.scales_from else {}
    return ", ".join(f"{name.replace('_', '-')} {_show_value(value)}" for name, value in changed.items())


def _show_value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _how(arm: Arm) -> str:
    return "skipped" if arm.skip else (Level.NATIVE if arm.native else Level.EMULATED).value


def _number(heading: str, attribute: str, show: Callable[[Any], str] | None = None, hint: str = "") -> Col[ArmSummary]:
    """Returns a column of numbers, read from `attribute` of a summary."""
    return Col(heading, attrgetter(attribute), number=True, show=show, hint=hint)


def arms_table(rows: Sequence[ArmSummary], without: Collection[str] = ()) -> Table:
    cols: tuple[Col[ArmSummary], ...] = (
        Col("arm", attrgetter("arm.name")),
        Col(
            "how",
            lambda row: _how(row.arm),
            hint="native: the device multiplies in it",
            tone=lambda row: Tone.DOUBT if row.arm.skip or not row.arm.native else Tone.PLAIN,
        ),
        _number("loss", "loss", _FOUR_DIGITS, "training loss, the mean over seeds and the last tenth of the steps"),
        _number("held-out", "held_out", _FOUR_DIGITS, "the loss on text that was never trained on"),
        _number("tokens/s", "tokens_per_second", units.count, "by the median step; of native arms"),
        Col("J/step", lambda row: words.joules(row.energy), number=True, hint="by windows of steps of the arm alone"),
        _number(
            "B/param",
            "bytes_per_parameter",
            "{:.3g}".format,
            "bytes kept between two steps for each parameter, as counted",
        ),
        _number("memory", "peak_memory", units.size, "tensors at the peak of a step, with no other arm in memory"),
        _number(
            "on a device",
            "on_a_device",
            units.size,
            "derived: the same on hardware that keeps the formats which the arm emulates",
        ),
        _number("events", "events", str),
        Col(
            "to the same loss",
            lambda row: words.speed(row.verdict.speed) if row.verdict else None,
            hint="speed times steps: how much sooner a native arm is as good",
        ),
    )
    shown = [col for col in cols if col.heading not in without]
    return table("arms", "arms", shown, rows, main=True, required=("loss",))


_FOUR_DIGITS = "{:.4f}".format


def last_figures(judged: JudgedTraining) -> Iterator[Part]:
    """Yields the declared figures of each arm's last step in the first seed."""
    arms, seed = judged.training.compared_arms, judged.request.seed
    rows = frame_of(arms, judged.kept.lines)
    # Rows are in the order of steps, so that the last one of each figure is kept.
    rows = (row for row in rows if row.seed == seed and not row.layer)
    if judged.training.is_watched:  # only watched steps have a size of their update
        rows = (row for row in rows if row.value == row.value)
    values = {(row.arm, row.figure): row.value for row in rows}
    names = [arm.name for arm in arms if (arm.name, "loss") in values]
    cols = [Col("arm", str)]
    for figure in FIGURES.values():
        if figure.heading:
            get_value = partial(_look_up, values, figure.name)
            cols.append(Col(figure.heading, get_value, number=True, show=figure.show))
    if names:
        title = "In the last step of the first seed" if judged.request.seeds > 1 else "In the last step"
        yield Part("last-step", title, (table("last-step", "", cols, names),))


def _look_up(values: Mapping[tuple[str, str], Any], figure: str, arm: str) -> float | None:
    return values.get((arm, figure))


def looks_of(stored: KeptTraining) -> Iterator[Part]:
    """Yields losses on text that was never trained on, after the last step; the mean over seeds."""
    last = [look for look in stored.of(Validation) if look.step == stored.request.steps]
    losses = together(((look.arm, look.of), look.loss) for look in last if math.isfinite(look.loss))
    means = {key: fmean(values) for key, values in losses.items()}
    texts = list(dict.fromkeys(of for _, of in means))
    positions = [of for of in texts if of.startswith(POSITION)]
    arms = [arm.name for arm in stored.training.arms if not arm.is_band and (arm.name, HELD_OUT) in means]
    cols = [Col("arm", str)]
    for of in texts:
        if of not in positions[1:-1]:  # the first and the last positions of a window are enough
            cols += [Col(of, partial(_look_up, means, of), number=True, show="{:.3f}".format)]
    if not stored.request.settings.make:  # the loss of a user's model may be anything
        perplexities = {key: math.exp(min(loss, 700.0)) for key, loss in means.items()}
        cols.insert(2, Col("perplexity", partial(_look_up, perplexities, HELD_OUT), number=True, show="{:.3g}".format))
    if arms:
        yield Part("texts", _LOOKS, (table("looks", "loss", cols, arms),))


def bands_of(verdicts: TrainingVerdicts) -> Iterator[str]:
    if verdicts.repeat_band is not None:
        yield words.repeat_band(verdicts.repeat_band)
    if verdicts.chaos is not None:
        yield words.chaos(verdicts.chaos)
    if all_of := words.chance_of_all(verdicts):
        yield all_of
    if verdicts.arms:
        yield words.effect(verdicts)


def notes_of(judged: JudgedTraining) -> Iterator[str]:
    stored, verdicts = judged.kept, judged.verdicts
    yield from dict.fromkeys(event.words for event in stored.of(TrainingEvent) if event.kind == COVERAGE)
    is_watched = stored.training.is_watched
    # A single loop has no verdict that anything could decide.
    if not verdicts.looks and (verdicts.arms or not is_watched):
        way = "with fp8bench.watch in the loop, loop.held_out(value) gives one"
        way = way if is_watched else "return held_out from make()"
        yield f"nothing was held out, so that the training loss alone decides: {way}"
    if is_watched and verdicts.arms:
        yield "loops are assumed to have had the same initial weights and batches in each seed: streams do not show it"
    for verdict in verdicts.arms:
        if not verdict.arm.skip:
            yield from words.notes(verdict)
    yield from (f"{cost.arm}: {cost.why}" for cost in stored.of(ArmCost) if cost.why)
    measured = {cost.arm for cost in stored.of(ArmCost)}
    if names := [arm.name for arm in stored.training.arms if not arm.native and arm.name in measured]:
        memories = [cost.memory for cost in stored.of(ArmCost) if cost.memory and cost.arm in names]
        derived = "; memory on a device is derived" if any(memory.on_device for memory in memories) else ""
        yield f"memory and energy of {join_words(names)} are of emulation, not of a device with the format{derived}"
    if stored.request.ranks is not None and not stored.training.device.accelerated:
        yield "ranks on a CPU share its cores: their tokens/s mean nothing"
    energies = (
        (summary.energy.why, summary.arm.name) for summary in judged.summaries if summary.energy and summary.energy.why
    )
    yield from (f"energy of {join_words(arms)}: {reason}" for reason, arms in together(energies).items())
    yield from stored.troubles


def _cut_off(stored: KeptTraining) -> Iterator[Text]:
    if not stored.finished:
        seed, step = max(((row.seed, row.step) for row in stored.of(StepRow)), default=(stored.request.seed, -1))
        words = f"cut off in seed {seed} after {many(step + 1, 'step')}: all figures are of what was kept"
        yield Text(words, Tone.DOUBT)


def _events(stored: KeptTraining, most: int) -> Iterator[Element]:
    yield from _cut_off(stored)
    events = [event for event in stored.of(TrainingEvent) if event.kind != COVERAGE]
    if not events:
        yield Text("Nothing: no alarm, and all values were finite.")
        return
    cols: list[Col[TrainingEvent]] = [
        Col("arm", attrgetter("arm")),
        *([Col("seed", attrgetter("seed"), number=True, show=str)] if stored.request.seeds > 1 else []),
        Col("step", attrgetter("step"), number=True, show=str),
        Col("what", attrgetter("kind")),
        Col("where", attrgetter("place")),
        Col("words", attrgetter("words")),
        Col("what may help", attrgetter("remedy")),
    ]
    yield table("events", "", cols, events[:most], main=True, required=("arm", "step", "what"))
    if len(events) > most:
        yield Text(f"and {len(events) - most} more: the CSV has them")


def _ending(stored: KeptTraining) -> Iterator[str]:
    if stored.training.is_watched:
        yield "curves, tensors by layer and alarms: fp8bench report STREAM"
        return
    store = shlex.quote(str(Path(stored.path).parent.parent.parent))
    yield f"stored in {stored.path}"
    yield f"curves, tensors by layer and events: fp8bench report {stored.training.id} --store {store}"
