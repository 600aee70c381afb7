"""`fp8bench sensitivity`: which layers suffer most in low precision, and a precision map that keeps the loss."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from functools import partial

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import CommandResult, check_files, check_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.sensitivity.study import FORMATS, By, LayerTrial, LossVerdict, Study, as_words, last_of, value_of
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import only_once
from fp8bench.model import Request
from fp8bench.model.request import PERCENT, whole_number
from fp8bench.model.words import UNTOUCHED
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Code, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.panels import show_params
from fp8bench.workloads.model import Model

EXAMPLES = (
    "fp8bench sensitivity --dtype mxfp4 --write-map mxfp4.map",
    "fp8bench suite transformer --dtypes mxfp4,bf16 --precision-map mxfp4.map",
)
FIRST_OPTIONS = "--dtype --reference --by --steps --tolerance --size --device --data --write-map --csv --store"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the transformer, or your model, with one layer at a time in low precision and the others in "
        "the reference, then searches for a precision map that keeps the loss, and trains with every map that"
        " it tries."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 the reference's own training failed, 130 interrupted."
    add = parser.add_argument
    words = "your model instead, as profile takes it; it trains on its one batch"
    add("target", nargs="?", metavar="MODULE:FUNCTION", help=words)
    add("--size", metavar="NAME", help="the model, as in suite transformer; default nano")
    add("--dtype", default="fp8", metavar="DTYPE", help="the low precision; default fp8")
    words = "the precision of the other layers; default bf16; for your model untouched"
    add("--reference", metavar="DTYPE", help=words)
    words = (
        "what to lower at a time; format: also try FP8's formats and scales in each layer, and propose one; "
        "default layer"
    )
    add("--by", choices=tuple(by.value for by in By), default="layer", help=words)
    words = "training steps of every run; default 50"
    add("--steps", type=types.whole(whole_number(1, 100_000)), default=50, metavar="N", help=words)
    words = "the largest loss gap that a suggested map may have; default 1"
    add("--tolerance", type=types.number(PERCENT), default=1.0, metavar="PERCENT", help=words)
    words = "also limit the error of its first gradients, which separates layers that the loss of few steps cannot"
    add("--gradient-tolerance", type=types.number(PERCENT), metavar="PERCENT", help=words)
    add_common(parser, "--seed", help="for data and weights; default 0")
    add_common(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common(parser, "--data")
    add_common(parser, "--import", help="as in suite")
    add_common(
        parser, "--case-timeout", help="the most that one training may take; default far more than its work needs"
    )
    add_common(parser, "--no-isolation", help="train in this process, without a worker")
    add_common(parser, "--store", help="as in suite")
    add_common(parser, "--explain")
    add_common(parser, "--json", help="print all of it as JSON instead of the tables, every loss included")
    words = "write the suggested map there, as --precision-map takes it"
    parser.add_argument("--write-map", type=types.path, metavar="FILE", help=words)
    add_common(parser, "--csv", help="also write the runs there as rows; '-' prints them instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Runs the study; after an interrupt, shows and stores what was trained until then."""
    from fp8bench.features.sensitivity.job import keep_study, write_map

    check_outputs(arguments)
    with only_once():
        study = _study(arguments, TERMINAL)
        try:
            study = keep_study(study, arguments.store)
        finally:  # if the store is not writable, the study is at least shown
            code = _result(study).print_result(arguments)
            if arguments.write_map is not None:
                write_map(study, arguments.write_map)
    return code


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.sensitivity.job import keep_study, write_map

    study = keep_study(_study(arguments, observer), arguments.store)
    if arguments.write_map is not None:
        write_map(study, arguments.write_map)
    return _result(study)


def _result(study: Study) -> CommandResult:
    page, value, rows = partial(page_of, study), partial(value_of, study), partial(rows_of, study)
    cut_off = not study.finished and not study.baseline.failure
    code = EXIT_INTERRUPTED if cut_off else EXIT_FAILED if study.baseline.failure else EXIT_OK
    return CommandResult(study, page, value, rows, code=code)


def _study(arguments: argparse.Namespace, observer: JobObserver) -> Study:
    from fp8bench.features.sensitivity.job import StudyQuestion, run_study

    check_files({"--write-map": arguments.write_map})
    target = arguments.target or ""
    # 1. Reject options that a user's model does not have.
    for option in ("size", "data") if target else ():
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} goes with the transformer, and {target} is your model. Leave one out.")
    axis = ("make", (target,)) if target else ("size", (arguments.size or "nano",))
    if arguments.by == By.FORMAT and arguments.dtype != FORMATS[0]:
        raise UsageError(
            f"--by format chooses among {', '.join(FORMATS)}, and not {arguments.dtype}. Leave --dtype out."
        )
    # 2. Plan two cases of an ordinary suite; maps consist of their layers.
    request = Request(
        Model.name if target else "transformer",
        (arguments.dtype,),
        (arguments.device,) if arguments.device else (),
        arguments.reference or (UNTOUCHED if target else "bf16"),
        (axis,),
        data=arguments.data,
        seed=arguments.seed,
        threads=arguments.threads,
        imports=tuple(arguments.imports),
        isolation=arguments.isolation,
        case_timeout=arguments.case_timeout,
    )
    # 3. Convert percentages to shares, only here.
    gradients = None if arguments.gradient_tolerance is None else arguments.gradient_tolerance / 100
    question = StudyQuestion(request, By(arguments.by), arguments.steps, arguments.tolerance / 100, gradients)
    return run_study(question, arguments.store, observer)


_LEGEND = (
    "loss gap: after the same steps from the same weights and data, relative to the reference's loss; above 0 is worse",
    "within the noise: no larger than what another draw of the reference's weights does to its loss",
    "gradient error: of all gradients of the first step, relative to the reference's; it sees what a loss does not",
    "order: failed runs, gaps beyond the noise, then gradient errors",
    "proposed: the format with the cheapest scales whose error is at most 10% above the least of all",
)
_TONES = {
    LossVerdict.FAILED: Tone.BAD,
    LossVerdict.WORSE: Tone.BAD,
    LossVerdict.BETTER: Tone.GOOD,
    LossVerdict.NOISE: Tone.DOUBT,
    LossVerdict.UNKNOWN: Tone.DOUBT,
}


def page_of(study: Study) -> Page:
    text = {By.KIND: "one layer kind", By.FORMAT: "each format of one layer"}.get(study.by, "one layer")
    description = f"{study.low} ({study.level}) in {text} at a time, {study.reference} in the rest"
    elements: list[list[Element]] = [[Text(description), Text(_reference(study))]]
    if study.probes:
        elements.append([_formats(study) if study.by is By.FORMAT else _probes(study)])
    if study.candidates:
        elements += [[_candidates(study)], list(_suggestion(study))]
    if study.path:
        elements.append([Text(f"stored in {study.path}")])
    parts = tuple(Part(f"part-{n}", "", tuple(part)) for n, part in enumerate(elements))
    title = f"sensitivity of {study.workload} {show_params(study.params)} on {study.device}"
    return Page(title, "", parts, _LEGEND)


def _reference(study: Study) -> str:
    if study.baseline.loss is None:
        return f"the reference itself failed: {study.baseline.failure or 'it was not run'}"
    words = (
        f"reference: loss {study.baseline.loss:.4f}, the mean of the last {last_of(study.steps)} of {study.steps} steps"
    )
    words += " on its one batch" if "make" in dict(study.params) else ""
    gaps = [_percent(gap) for draw in study.draws if (gap := study.gap(draw)) is not None]
    if gaps and study.noise is None:
        words += "; other draws of its weights are the same, as where make() sets a seed: what is noise is unknown"
    elif gaps:
        words += f"; other draws of its weights: {' and '.join(gaps)}, so that a gap up to {_noise(study)} is noise"
    return words


def _probes(study: Study) -> Table:
    by_kind = study.by is By.KIND  # then it needs no separate column
    cols: list[Col[LayerTrial]] = [
        Col("low" if by_kind else "low layer", lambda trial: trial.name),
        Col("kind", lambda trial: trial.kind, when=not by_kind),
        Col("loss gap", lambda trial: _gap(study, trial), number=True),
        Col("gradient error", lambda trial: units.percent(trial.gradient_error), number=True),
        Col("verdict", lambda trial: study.verdict(trial).value, tone=lambda trial: _TONES[study.verdict(trial)]),
        Col("why", lambda trial: trial.failure, below=True),
    ]
    return table("probes", "", cols, study.ranking)


def _formats(study: Study) -> Table:
    forms = study.proposed_forms
    trials = {trial.name: trial for trial in study.probes}
    cols: list[Col[LayerTrial]] = [
        Col("layer", lambda trial: trial.name),
        *(Col(form, partial(_form_error, study, form), number=True) for form in FORMATS),
        Col("proposed", lambda trial: forms[trial.name]),
    ]
    return table(
        "formats", "error of all gradients of the first step, by the format of one layer", cols, trials.values()
    )


def _form_error(study: Study, form: str, trial: LayerTrial) -> str:
    return units.percent(study.form_errors(trial.name).get(form), 2)


def _candidates(study: Study) -> Table:
    def verdict(trial: LayerTrial) -> Field:
        if study.keeps(trial):
            return Field("keeps the loss", tone=Tone.GOOD)
        lost = "above the tolerance" if (study.gap(trial) or 0) > study.tolerance else "its gradients are too far off"
        return Field("failed" if trial.failure else lost, tone=Tone.BAD)

    cols: list[Col[LayerTrial]] = [
        Col("candidate", lambda trial: trial.name),
        Col("layers low", lambda trial: str(len(trial.low)), number=True),
        Col("loss gap", lambda trial: _gap(study, trial), number=True),
        Col(
            "gradient error",
            lambda trial: units.percent(trial.gradient_error),
            number=True,
            when=study.gradient_tolerance is not None,
        ),
        Col("verdict", verdict),
        Col("why", lambda trial: trial.failure, below=True),
    ]
    return table("candidates", "", cols, study.candidates)


def _suggestion(study: Study) -> Iterator[Element]:
    tolerance = units.percentage(100 * study.tolerance)
    trial = study.suggestion
    if study.gradient_tolerance is not None:
        tolerance += f", and its first gradients within {units.percentage(100 * study.gradient_tolerance)}"
    # 1. No map: none was good enough, or noise is as large as every gap.
    if trial is None:
        reason = "every map was tried" if study.finished else "it was interrupted before all maps were tried"
        words = f"no map with {study.low} in some layer keeps the loss within {tolerance}: {reason}"
        if study.is_undecided:
            words = f"no map is suggested: every gap lies within the noise of {_noise(study)}, which tells neither one "
            words += f"layer from another nor {study.low} from {study.reference}; more --steps may"
        yield Text(words)
        return
    # 2. The map that was trained, not one combined from single layers.
    gap = study.gap(trial)
    assert gap is not None
    every = len(study.candidates[0].low)
    of_all = f" ({len(trial.low)} of {every})" if len(trial.low) < every else ""
    yield Text(
        f"suggested: {study.low} in {trial.name}{of_all}. That map was trained: its loss gap is {_percent(gap)}, "
        f"within the tolerance of {tolerance}"
    )
    # 3. With a tolerance below the noise, chance decides.
    if study.noise is None or study.tolerance < study.noise:
        noise = "noise is unknown" if study.noise is None else f"tolerance is below the noise of {_noise(study)}"
        yield Text(f"mind: the {noise}: a gap may be within it by chance")
    yield Code(command_of(study, trial))


def command_of(study: Study, trial: LayerTrial) -> str:
    """Returns the command, on one line, that measures this map against the reference."""
    params = dict(study.params)
    profile_command = f"fp8bench profile {shlex.quote(str(params.get('make')))}"
    words = [profile_command if "make" in params else f"fp8bench suite {study.workload} --set size={params['size']}"]
    words.append(f"--dtypes {study.low} --reference {study.reference}")
    if stated := study.stated_map(trial):
        words.append(f"--precision-map {as_words(stated)}")
    return " ".join(words)


def _gap(study: Study, trial: LayerTrial) -> str:
    gap = study.gap(trial)
    return units.NONE if gap is None else _percent(gap)


def _percent(share: float) -> str:
    text = units.percent(share, 2)
    return text if text.startswith("-") else f"+{text}"


def _noise(study: Study) -> str:
    return units.percent(study.noise, 2)


def rows_of(study: Study) -> Rows:
    baseline = (study.baseline,)
    parts = {"reference": baseline, "draw": study.draws, "low": study.ranking, "candidate": study.candidates}
    rows: list[dict[str, object]] = []
    for part, trials in parts.items():
        rows += [_row_of(study, part, trial) for trial in trials]
    return tuple(rows[0]), rows


def _row_of(study: Study, part: str, trial: LayerTrial) -> dict[str, object]:
    return {
        "part": part,
        "name": trial.name,
        "kind": trial.kind,
        "precision": trial.precision,
        "precision_map": as_words(trial.precision_map),
        "layers_low": len(trial.low),
        "draw": trial.draw,
        "loss": trial.loss,
        "loss_gap": study.gap(trial),
        "noise": study.noise,
        "gradient_error": trial.gradient_error,
        "says": "" if trial.form else study.verdict(trial).value,
        "format": trial.form,
        "keeps_loss": study.keeps(trial) if part == "candidate" else None,
        "failure": trial.failure,
    }
