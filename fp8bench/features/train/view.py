"""Shows a training as a page without charts: each arm compared with the reference, the effect of chance, and events.
Also shows the plan of a training.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from fp8bench import units
from fp8bench.analysis.energy import energy_samples
from fp8bench.features.train import words
from fp8bench.features.train.frame import FIGURES, list_rows
from fp8bench.features.train.request import SETTINGS_RULES, TrainerSettings, TrainingRequest
from fp8bench.features.train.values import (
    COVERAGE_EVENT,
    Arm,
    ArmCost,
    ArmRole,
    ArmState,
    StepRow,
    StoredTraining,
    Training,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.curves import HELD_OUT_PART, MIN_PAIRS, InconclusiveReason
from fp8bench.features.train.verdicts.summary import ArmSummary, JudgedTraining, find_verdict_tone, render_scores
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.model import Level
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Elements, Page, Part, Table, Text, TextList, Tone
from fp8bench.report.panels import join_parts, together
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.terminal.short_answer import PrecisionAnswer, as_sentence, short_answer
from fp8bench.report.topics.answers import remove_option
from fp8bench.report.topics.own_batch import LargestBatch, own_batch_table
from fp8bench.report.words.naming import describe_devices, join_words, many

_MAX_SHOWN_EVENTS = 12
# Columns of the complete page that the short answer leaves out.
_COMPLETE_PAGE_ONLY_COLUMNS = ("how", "B/param", "on a device", "events", "to the same loss")
POSITION_LOSS_PREFIX = "position:"
_VALIDATION_TITLE = "After the last step, on text that was never trained on"


def render_answer(judged: JudgedTraining) -> Page:
    """Returns a page with the short answer. `render_all` shows everything else."""
    training = judged.training
    stored = judged.stored
    verdicts = judged.verdicts
    # Arms that repeat the reference have no verdict, so the short answer leaves them out.
    rows = [summary for summary in judged.summaries if not summary.arm.is_chance_arm and not summary.arm.skip]
    arms = replace(render_arm_table(rows, _COMPLETE_PAGE_ONLY_COLUMNS), caption="")
    store = _format_store_option(stored)
    training_length_words = f"{many(training.request.steps, 'step')} in {many(training.request.seeds, 'seed')}"
    hint = "" if training.request.settings.make else " (--sweep model=nano,micro)"
    size_advice = f". {words.MODEL_SIZE_ADVICE.capitalize()}{hint}" if training.request.seeds >= MIN_PAIRS else ""
    title = make_title(training, describe_changed_settings(training.request))
    answer_part = short_answer(
        f"{title} on {describe_devices([training.device])}: {training_length_words}",
        f"Does it learn as well as {verdicts.reference}?",
        find_arm_answers(judged.summaries, verdicts),
        warnings=_list_warnings(stored),
        action=_propose_command(judged, store),
        tables=(
            arms,
            *render_own_batches(judged),
            Text(f"Smallest visible gap: {words.describe_smallest_visible_gap(verdicts)}{size_advice}"),
        ),
        closing_facts=(("More", f"fp8bench show {training.id}{store} --all"),),
    )
    return Page("", "", (answer_part,), _list_arm_column_hints(arms))


def _format_store_option(stored: StoredTraining) -> str:
    """Returns ' --store DIR', with which another command finds the training. Returns '' for the default store."""
    # The path is STORE/trainings/<training>/<file>.
    store = Path(stored.path).parent.parent.parent
    return "" if store == Path(".fp8bench") else f" --store {shlex.quote(str(store))}"


def find_arm_answers(summaries: Sequence[ArmSummary], verdicts: TrainingVerdicts) -> list[PrecisionAnswer]:
    """Returns the answer of each arm: whether it learns as well as the reference, or why it was not trained. Leaves out
    the reference, its repeats, and arms that learn better at another learning rate.
    """
    peak_memory_by_arm = {summary.arm.name: summary.peak_memory for summary in summaries}
    arm_answers = []
    for summary in summaries:
        arm = summary.arm
        verdict = summary.verdict
        if arm.skip:
            arm_answers.append(PrecisionAnswer(arm.name, "not trained", Tone.DOUBT, reason=arm.skip))
        elif verdict is not None and verdict.judged.why is not InconclusiveReason.OTHER_RATE:
            cost_texts = (
                _describe_speed(summary),
                _describe_memory(summary, peak_memory_by_arm.get(verdicts.reference)),
            )
            verdict_word = words.VERDICT_WORDS[verdict.judged.learned]
            # The answer begins with these words already.
            reason = words.describe_verdict(verdict, verdicts).removeprefix(f"{verdict_word}: ")
            arm_answers.append(
                PrecisionAnswer(
                    arm.name, verdict_word, find_verdict_tone(verdict.judged), costs=cost_texts, reason=reason
                )
            )
    return arm_answers


def _describe_speed(summary: ArmSummary) -> str:
    speed = summary.verdict.speed if summary.verdict else None
    if not summary.arm.native:
        return "speed unknown (emulated)"
    return f"steps {units.ratio(speed.raw.point)} as fast" if speed is not None else ""


def _describe_memory(summary: ArmSummary, peak_of_reference: int | None) -> str:
    """Returns an arm's memory relative to the reference's. The memory of an emulated arm is an estimate for a device
    with its formats.
    """
    is_native = summary.arm.native
    peak = summary.peak_memory if is_native else summary.device_peak_memory
    if not peak or not peak_of_reference:
        return ""
    return f"memory {units.change(peak / peak_of_reference)}{'' if is_native else ' (est.)'}"


def _list_warnings(stored: StoredTraining) -> Iterator[Text]:
    yield from _warn_of_missing_steps(stored)
    events = [event for event in stored.select_lines(TrainingEvent) if event.kind != COVERAGE_EVENT]
    if events:
        further_events_text = f" ({len(events) - 1} more: --all)" if len(events) > 1 else ""
        yield Text(f"{events[0].describe()}{further_events_text}", Tone.BAD)
    yield from (Text(trouble, Tone.DOUBT) for trouble in stored.troubles)


def _propose_command(judged: JudgedTraining, store: str) -> str:
    """Returns the command that would help most; '' if none would. The command resumes an unfinished training. For a
    finished one, it trains as many seeds as the undecided verdicts need.
    """
    request = judged.request
    command = judged.training.command
    if not judged.stored.finished:
        return f"train the rest: fp8bench train --resume {judged.training.id}{store}"
    # All arms train with the same seeds, so propose the largest number of further seeds.
    further_seed_count = max(
        (arm.judged.more_seeds or 0 for arm in judged.verdicts.arms if not arm.arm.skip), default=0
    )
    if not further_seed_count or "fp8bench train" not in command:
        return ""
    seeds = request.seeds + further_seed_count
    seconds = seeds / request.seeds * math.fsum(row.seconds for row in judged.stored.select_lines(StepRow))
    duration_words = f" in about {units.clock(seconds)}" if seconds else ""
    command = f"{remove_option(command, '--seeds')} --seeds {seeds}"
    return f"train {seeds} seeds{duration_words}, probably enough for a verdict: {command}"


def render_all(judged: JudgedTraining, most_events: int = _MAX_SHOWN_EVENTS) -> Page:
    training = judged.training
    stored = judged.stored
    verdicts = judged.verdicts
    arms = render_arm_table(judged.summaries, without=("how",) if training.is_watched else ())
    arm_answers = find_arm_answers(judged.summaries, verdicts)
    sentences = tuple(map(as_sentence, arm_answers))
    # A single recorded loop is compared with nothing, so describe what it did.
    if training.is_watched and not arm_answers:
        sentences = tuple(words.describe_loops(judged))
    answer = [TextList(sentences)] if sentences else []
    question = "Does it still learn?" if arm_answers else "How it learned"
    own_batch_elements = tuple(render_own_batches(judged))
    size_advice = (words.MODEL_SIZE_ADVICE,) if arm_answers else ()
    parts = (
        Part("verdict", question, (*answer, arms, *render_wire_table(judged))),
        *make_list_part(
            "notes", "Notes", (*words.describe_chance(verdicts), *size_advice, *list_training_notes(judged))
        ),
        *(() if training.is_watched else render_validations(stored)),
        *render_scores(judged.scores),
        *render_last_figures(judged),
        *([Part("own-batch", "Each arm at its own batch", own_batch_elements)] if own_batch_elements else []),
        Part("health", "What happened", tuple(_render_training_events(stored, most_events))),
        Part("ending", "", tuple(map(Text, _list_closing_lines(stored)))),
    )
    return Page(make_title(training), "", parts, _list_arm_column_hints(arms), tuple(list_training_facts(training)))


def _list_arm_column_hints(arms: Table) -> tuple[str, ...]:
    return tuple(f"{column.title}: {column.hint}" for column in arms.columns if column.hint)


def render_own_batches(judged: JudgedTraining) -> Elements:
    rates = {summary.arm.name: summary.tokens_per_second for summary in judged.summaries}
    rows = []
    for cost in judged.stored.select_lines(ArmCost):
        capacity = cost.capacity
        if capacity is None:
            continue
        if capacity.batch:
            rows.append(LargestBatch(cost.arm, capacity, rates.get(cost.arm), capacity.update))
        else:
            yield Text(f"{cost.arm}: no largest batch was found: {capacity.why}", Tone.DOUBT)
    yield from own_batch_table(rows)


def render_wire_table(judged: JudgedTraining) -> Iterator[Table]:
    summaries = [summary for summary in judged.summaries if summary.wire and not summary.arm.is_chance_arm]
    columns: list[Col[ArmSummary]] = [
        Col("arm", "arm.name"),
        Col("sent", lambda row: math.fsum(row.wire.values()), show=units.size),
        Col(
            "as",
            lambda row: ", ".join(f"{operation} {units.size(size)}" for operation, size in row.wire.items()),
            below=True,
        ),
    ]
    if summaries:
        yield table("wire", "bytes that a rank sends in a step", columns, summaries)


def render_plan(training: Training, reference: ArmState) -> Page:
    request = training.request
    settings = training.request.settings
    columns: list[Col[Arm]] = [
        Col("arm", "name"),
        Col("role", "role.value"),
        Col("how", _describe_support_level),
        Col("why not", "skip", below=True),
    ]
    trained_arms = [arm for arm in training.arms if not arm.skip]
    # The one-ulp arm is trained in the first seed only.
    chaos_arm_count = sum(arm.role is ArmRole.CHAOS for arm in trained_arms)
    steps = request.steps * ((len(trained_arms) - chaos_arm_count) * request.seeds + chaos_arm_count)
    training_fact_texts = (
        f"parameters: {units.whole(reference.parameters)} ({settings.make or f'{settings.model}, {settings.arch}'})",
        f"steps: {units.whole(steps)} in all, {many(request.steps, 'step')} of {many(len(trained_arms), 'arm')} in "
        + many(request.seeds, "seed"),
        *([f"ranks: {request.ranks} by {settings.parallel}"] if request.ranks else []),
        f"tokens: {units.whole(reference.tokens)} a step, {units.whole(steps * reference.tokens)} in all",
    )
    title = f"training of {settings.display_name} on {training.device.key}, which is {training.device.name}"
    arms = table("arms", "", columns, training.arms)
    return Page(title, "", (Part("arms", "", (arms,)), Part("ending", "", tuple(map(Text, training_fact_texts)))))


def make_title(training: Training, changed: str = "") -> str:
    settings = training.request.settings
    if training.is_watched:
        request = training.request
        names = join_words(arm.name for arm in training.arms)
        seeds = f" in {request.seeds} seeds" if request.seeds > 1 else ""
        return f"watched: {names}, {many(request.steps, 'step')}{seeds}"
    architecture = "" if settings.make else settings.arch
    model_details = join_parts(architecture, f"{units.count(training.parameters)} parameters", changed)
    return f"training of {settings.display_name} ({model_details})"


def list_training_facts(training: Training) -> Iterator[tuple[str, str]]:
    request = training.request
    if training.is_watched:
        return
    yield "id", training.id
    yield "device", f"{training.device.key} ({training.device.name})"
    yield "steps", f"{units.whole(request.steps)} in {many(request.seeds, 'seed')}"
    if request.ranks is not None:
        yield "ranks", f"{request.ranks} by {request.settings.parallel}"
    yield ("batches", request.settings.make) if request.settings.make else ("text", training.text.identity)
    if settings := describe_changed_settings(request):
        yield "settings", settings
    yield "margin", units.percent(request.margin)


def describe_changed_settings(request: TrainingRequest) -> str:
    """Returns the settings that differ from their defaults, without those that the title shows."""
    default_trainer_settings = TrainerSettings()
    settings = request.settings
    setting_names_in_title = {"make", "model", "arch", "scales", "parallel"}
    names = [name for name in SETTINGS_RULES if name not in setting_names_in_title]
    changed_settings = {
        name: getattr(settings, name)
        for name in names
        if getattr(settings, name) != getattr(default_trainer_settings, name)
    }
    changed_settings |= {"scales_from": request.scales_from} if request.scales_from else {}
    return ", ".join(f"{name.replace('_', '-')} {_format_value(value)}" for name, value in changed_settings.items())


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_support_level(arm: Arm) -> str:
    return "skipped" if arm.skip else (Level.NATIVE if arm.native else Level.EMULATED).value


def render_arm_table(rows: Sequence[ArmSummary], without: Collection[str] = ()) -> Table:
    columns: tuple[Col[ArmSummary], ...] = (
        Col("arm", lambda row: f"{row.arm.name}{' (first seed)' * (row.arm.role is ArmRole.CHAOS)}"),
        Col(
            "how",
            lambda row: _describe_support_level(row.arm),
            hint="native: the device multiplies in this precision",
            tone=lambda row: Tone.DOUBT if row.arm.skip or not row.arm.native else Tone.PLAIN,
        ),
        Col(
            "loss",
            "loss",
            show="{:.4f}".format,
            hint="training loss, the mean over seeds and the last tenth of the steps; a verdict compares the last "
            "third",
        ),
        Col("held-out", "held_out", show="{:.4f}".format, hint="the loss on text that was never trained on"),
        Col(
            "tokens/s",
            "tokens_per_second",
            show=units.count,
            hint="tokens per second in the median step; native arms only",
        ),
        Col(
            "J/step",
            lambda row: words.format_joules(row.joules_per_step),
            number=True,
            hint="energy of a step, measured over windows of steps of this arm only",
        ),
        Col(
            "B/param",
            "bytes_per_parameter",
            show="{:.3g}".format,
            hint="bytes in memory between two steps per parameter, counted from the tensors",
        ),
        Col(
            "memory", "peak_memory", show=units.size, hint="peak memory of tensors in a step, with no other arm loaded"
        ),
        Col(
            "on a device",
            "on_a_device",
            show=units.size,
            hint="estimate: the same on hardware that stores the formats that the arm emulates",
        ),
        Col("events", "events", show=str),
        Col(
            "to the same loss",
            lambda row: words.format_adjusted_speed(row.verdict.speed) if row.verdict else None,
            hint="how much sooner a native arm reaches the same loss: by the speed and the number of its steps",
        ),
    )
    shown_columns = [col for col in columns if col.heading not in without]
    return table("arms", "arms", shown_columns, rows, main=True, required_headings=("loss",))


def render_last_figures(judged: JudgedTraining) -> Iterator[Part]:
    """Yields a table with the figures that each arm had in its last step of the first seed."""
    arms = judged.training.compared_arms
    seed = judged.request.seed
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in list_rows(arms, judged.stored.lines):
        # In recorded loops, an update ratio is NaN in steps that were not watched.
        is_value_unknown = judged.training.is_watched and row.value != row.value
        if row.seed == seed and not row.layer and not is_value_unknown:
            # Rows are in the order of steps, so that later values of a figure replace earlier ones.
            values[row.figure][row.arm] = row.value
    names = [arm.name for arm in arms if arm.name in values["loss"]]
    figures = (figure for figure in FIGURES.values() if figure.heading)
    columns: list[Col[str]] = [Col("arm", str)]
    columns += [Col(figure.heading, values[figure.name].get, show=figure.show) for figure in figures]
    if names:
        title = "In the last step of the first seed" if judged.request.seeds > 1 else "In the last step"
        yield Part("last-step", title, (table("last-step", "each arm", columns, names),))


def render_validations(stored: StoredTraining) -> Iterator[Part]:
    """Yields a table of the losses on held-out text after the last step, as means over seeds."""
    losses = together(
        ((validation.of, validation.arm), validation.loss)
        for validation in stored.select_lines(Validation)
        if validation.step == stored.request.steps and math.isfinite(validation.loss)
    )
    means_by_text: dict[str, dict[str, float]] = {}
    for (name, arm_name), values in losses.items():
        means_by_text.setdefault(name, {})[arm_name] = fmean(values)
    position_range_names = [name for name in means_by_text if name.startswith(POSITION_LOSS_PREFIX)]
    held_out = means_by_text.get(HELD_OUT_PART, {})
    arms = [arm.name for arm in stored.training.arms if not arm.is_chance_arm and arm.name in held_out]
    cols: list[Col[str]] = [Col("arm", str)]
    for name, mean_by_arm in means_by_text.items():
        if name not in position_range_names[1:-1]:  # show only the first and the last range of positions
            cols.append(Col(name, mean_by_arm.get, show="{:.3f}".format))
    if not stored.request.settings.make:  # the loss of a user's model may not be a cross entropy
        perplexities = {arm: math.exp(min(loss, 700.0)) for arm, loss in held_out.items()}
        cols.insert(2, Col("perplexity", perplexities.get, show="{:.3g}".format))
    if arms:
        yield Part("texts", _VALIDATION_TITLE, (table("looks", "loss", cols, arms),))


def list_training_notes(judged: JudgedTraining) -> Iterator[str]:
    stored = judged.stored
    verdicts = judged.verdicts
    arm_costs = stored.select_lines(ArmCost)
    yield from dict.fromkeys(
        event.words for event in stored.select_lines(TrainingEvent) if event.kind == COVERAGE_EVENT
    )
    is_watched = stored.training.is_watched
    # A single watched loop is compared with nothing, so held-out text would not improve a verdict.
    if not verdicts.has_held_out and (verdicts.arms or not is_watched):
        held_out_advice = "with fp8bench.watch in the loop, loop.held_out(value) gives one"
        advice = held_out_advice if is_watched else "return held_out from make()"
        yield f"nothing was held out, so that the training loss alone decides: {advice}"
    if is_watched and verdicts.arms:
        yield "loops are assumed to have had the same initial weights and batches in each seed: streams do not show it"
    for verdict in verdicts.arms:
        if not verdict.arm.skip:
            yield from words.list_void_seeds(verdict)
    yield from (f"{cost.arm}: {cost.why}" for cost in arm_costs if cost.why)
    measured_arm_names = {cost.arm for cost in arm_costs}
    if names := [arm.name for arm in stored.training.arms if not arm.native and arm.name in measured_arm_names]:
        has_derived_memory = any(cost.memory and cost.memory.on_device for cost in arm_costs if cost.arm in names)
        derived_words = "; memory on a device is derived" if has_derived_memory else ""
        yield (
            f"memory and energy of {join_words(names)} are of emulation, not of a device with the format{derived_words}"
        )
    if stored.request.ranks is not None and not stored.training.device.accelerated:
        yield "ranks on a CPU share its cores: their tokens/s mean nothing"
    # A resumed training may measure energy again. The last measurement of an arm replaces earlier ones.
    energies = {cost.arm: cost.energy for cost in arm_costs if cost.energy}
    reasons = {
        arm: use.why or ("" if energy_samples(use) else "no window was measured") for arm, use in energies.items()
    }
    arms_by_reason = together((reason, arm) for arm, reason in reasons.items() if reason)
    yield from (f"energy of {join_words(arms)}: {reason}" for reason, arms in arms_by_reason.items())
    yield from stored.troubles


def _warn_of_missing_steps(stored: StoredTraining) -> Iterator[Text]:
    if not stored.finished:
        steps = ((row.seed, row.step) for row in stored.select_lines(StepRow))
        seed, step = max(steps, default=(stored.request.seed, -1))
        sentence = f"cut off in seed {seed} after {many(step + 1, 'step')}: figures cover only what was stored"
        yield Text(sentence, Tone.DOUBT)


def _render_training_events(stored: StoredTraining, most: int) -> Iterator[Element]:
    yield from _warn_of_missing_steps(stored)
    events = [event for event in stored.select_lines(TrainingEvent) if event.kind != COVERAGE_EVENT]
    if not events:
        yield Text("No alarm, and all values were finite.")
        return
    cols: list[Col[TrainingEvent]] = [
        Col("arm", "arm", when=len(stored.training.arms) > 1),
        Col("seed", "seed", show=str, when=stored.request.seeds > 1),
        Col("step", "step", show=str),
        Col("what", "kind"),
        Col("where", "place"),
        Col("words", "words"),
        Col("what may help", "remedy"),
    ]
    event_noun = "alarm" if all(event.kind == "alarm" for event in events) else "event"
    yield Text(f"{many(len(events), event_noun)}, the first in step {events[0].step}: {events[0].words}", Tone.BAD)
    yield table("events", "", cols, events[:most], main=True, required_headings=("arm", "step", "what"))
    if len(events) > most:
        yield Text(f"and {len(events) - most} more: the CSV has them")


def _list_closing_lines(stored: StoredTraining) -> Iterator[str]:
    if stored.training.is_watched:
        yield "curves, tensors by layer and alarms: fp8bench report STREAM"
    else:
        yield f"stored in {stored.path}"
        yield f"curves, tensors by layer and events: fp8bench report {stored.training.id}{_format_store_option(stored)}"
