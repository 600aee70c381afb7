"""`fp8bench sensitivity`: finds the layers that suffer most in low precision, and a precision map that keeps the
loss.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from functools import partial

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import CommandResult, check_output_files, check_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.sensitivity.study import (
    FORMATS,
    LossVerdict,
    LoweredLayersTrial,
    LoweredUnit,
    SensitivityStudy,
    averaged_steps,
    encode_study,
    format_map,
)
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.model.request import PERCENT_RULE, whole_number
from fp8bench.model.words import UNTOUCHED
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Code, Element, Field, Page, Part, Table, Text, Tone
from fp8bench.report.panels import format_case_params
from fp8bench.workloads.model import Model

EXAMPLES = (
    "fp8bench sensitivity --dtype mxfp4 --write-map mxfp4.map",
    "fp8bench suite transformer --dtypes mxfp4,bf16 --precision-map mxfp4.map",
)
FIRST_OPTIONS = "--dtype --reference --by --steps --tolerance --size --device --data --write-map --csv --store"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the transformer, or your model, with one layer at a time in low precision and the other layers in "
        "the reference precision. Then searches for a precision map that keeps the loss, and trains with each map that"
        " it tries."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 the reference's own training failed, 130 interrupted."
    add = parser.add_argument
    help_text = "your model instead of the transformer, as for `profile`; it trains on its single batch"
    add("target", nargs="?", metavar="MODULE:FUNCTION", help=help_text)
    add("--size", metavar="NAME", help="size of the model, as in `suite transformer`; default nano")
    add("--dtype", default="fp8", metavar="DTYPE", help="low precision; default fp8")
    help_text = "precision of the other layers; default bf16; for your own model: untouched"
    add("--reference", metavar="DTYPE", help=help_text)
    help_text = (
        "what has low precision at a time; format: try FP8's formats and scales in each layer, and propose one; "
        "default layer"
    )
    add("--by", choices=tuple(by.value for by in LoweredUnit), default="layer", help=help_text)
    help_text = "training steps of every run; default 50"
    add("--steps", type=types.whole(whole_number(1, 100_000)), default=50, metavar="N", help=help_text)
    help_text = "the largest loss gap that a suggested map may have; default 1"
    add("--tolerance", type=types.number(PERCENT_RULE), default=1.0, metavar="PERCENT", help=help_text)
    help_text = (
        "also limit the map's error of first gradients, which shows differences that the loss of few steps hides"
    )
    add("--gradient-tolerance", type=types.number(PERCENT_RULE), metavar="PERCENT", help=help_text)
    add_common_options(parser, "--seed", help="for data and weights; default 0")
    add_common_options(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common_options(parser, "--data")
    add_common_options(parser, "--import", help="as in suite")
    add_common_options(
        parser, "--case-timeout", help="longest time for one training; default far more than its work needs"
    )
    add_common_options(parser, "--no-isolation", help="train in this process, without a worker")
    add_common_options(parser, "--store", help="as in suite")
    add_common_options(parser, "--explain")
    add_common_options(parser, "--json", help="print the study as JSON instead of the tables, with every loss")
    help_text = "write the suggested map to FILE, for --precision-map"
    parser.add_argument("--write-map", type=types.path, metavar="FILE", help=help_text)
    add_common_options(
        parser, "--csv", help="also write a CSV row for each run; '-' prints the rows instead of the tables"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the study. After an interrupt it shows and stores what was trained until then."""
    from fp8bench.features.sensitivity.job import store_study, write_map

    check_outputs(arguments)
    with interrupt_only_once():
        study = _run_study(arguments, TERMINAL_JOB_OBSERVER)
        try:
            study = store_study(study, arguments.store)
        finally:  # show the study even if the store is not writable
            exit_code = _make_result(study).print_result(arguments)
            if arguments.write_map is not None:
                write_map(study, arguments.write_map)
    return exit_code


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.sensitivity.job import store_study, write_map

    study = store_study(_run_study(arguments, observer), arguments.store)
    if arguments.write_map is not None:
        write_map(study, arguments.write_map)
    return _make_result(study)


def _make_result(study: SensitivityStudy) -> CommandResult:
    page, value, rows = partial(render_page, study), partial(encode_study, study), partial(table_rows, study)
    exit_code = EXIT_FAILED if study.baseline.failure else EXIT_OK if study.finished else EXIT_INTERRUPTED
    return CommandResult(study, page, value, rows, code=exit_code)


def _run_study(arguments: argparse.Namespace, observer: JobObserver) -> SensitivityStudy:
    from fp8bench.features.sensitivity.job import StudyRequest, run_study

    check_output_files({"--write-map": arguments.write_map})
    target = arguments.target or ""
    # 1. Reject options that do not apply to a user's model.
    for option in ("size", "data") if target else ():
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} goes with the transformer, and {target} is your model. Leave one out.")
    axis = ("make", (target,)) if target else ("size", (arguments.size or "nano",))
    if arguments.by == LoweredUnit.FORMAT and arguments.dtype != FORMATS[0]:
        raise UsageError(
            f"--by format chooses among {', '.join(FORMATS)}, and not {arguments.dtype}. Leave --dtype out."
        )
    # 2. Request a suite's case in the low and in the reference precision. Maps choose the precision of each layer.
    cases = {
        "suite": Model.name if target else "transformer",
        "axes": [axis],
        "dtypes": (arguments.dtype,),
        "devices": (arguments.device,) if arguments.device else (),
        "reference": arguments.reference or (UNTOUCHED if target else "bf16"),
    }
    request = make_request(argparse.Namespace(**vars(arguments) | cases))
    # 3. Convert percentages to shares.
    gradient_tolerance = None if arguments.gradient_tolerance is None else arguments.gradient_tolerance / 100
    question = StudyRequest(
        request, LoweredUnit(arguments.by), arguments.steps, arguments.tolerance / 100, gradient_tolerance
    )
    return run_study(question, arguments.store, observer)


_LEGEND = (
    "loss gap: difference from the reference's loss after the same steps, as a share of it; above 0 is worse",
    "within the noise: no larger than the effect of other random initial weights on the reference's loss",
    "gradient error: of all gradients of the first step, relative to the reference's; more sensitive than the loss",
    "order: failed runs, gaps beyond the noise, then gradient errors",
    "proposed: the format with the cheapest scales whose error is at most 10% above the smallest error",
)
_VERDICT_TONES = {
    LossVerdict.FAILED: Tone.BAD,
    LossVerdict.WORSE: Tone.BAD,
    LossVerdict.BETTER: Tone.GOOD,
    LossVerdict.WITHIN_NOISE: Tone.DOUBT,
    LossVerdict.NOISE_UNKNOWN: Tone.DOUBT,
}


def render_page(study: SensitivityStudy) -> Page:
    text_by_lowered_unit = {
        LoweredUnit.LAYER: "one layer",
        LoweredUnit.KIND: "one layer kind",
        LoweredUnit.FORMAT: "each format of one layer",
    }
    description = (
        f"{study.low} ({study.level}) in {text_by_lowered_unit[study.by]} at a time, {study.reference} in the rest"
    )
    elements: list[list[Element]] = [[Text(description), Text(_describe_reference(study))]]
    if study.probes:
        elements.append([_formats_table(study) if study.by is LoweredUnit.FORMAT else _make_probes_table(study)])
    if study.candidates:
        elements += [[_make_candidate_trials_table(study)], list(_describe_suggested_trial(study))]
    if study.path:
        elements.append([Text(f"stored in {study.path}")])
    parts = tuple(Part(f"part-{n}", "", tuple(part)) for n, part in enumerate(elements))
    title = f"sensitivity of {study.workload} {format_case_params(study.params)} on {study.device}"
    return Page(title, "", parts, _LEGEND)


def _describe_reference(study: SensitivityStudy) -> str:
    if study.baseline.loss is None:
        return f"the reference itself failed: {study.baseline.failure or 'it was not run'}"
    averaged_steps_text = f"the mean of the last {averaged_steps(study.steps)} of {study.steps} steps"
    sentence = f"reference: loss {study.baseline.loss:.4f}, {averaged_steps_text}"
    sentence += " on its single batch" if "make" in dict(study.params) else ""
    draw_gap_texts = [_signed_percent(gap) for draw in study.draws if (gap := study.gap(draw)) is not None]
    if draw_gap_texts and study.noise is None:
        reason = "for example because make() sets a seed"
        sentence += f"; other initial weights give the same loss, {reason}: the noise is unknown"
    elif draw_gap_texts:
        sentence += (
            f"; with other initial weights {' and '.join(draw_gap_texts)}: a gap up to {_show_noise(study)} is noise"
        )
    return sentence


def _make_probes_table(study: SensitivityStudy) -> Table:
    # If a trial lowers all layers of a kind, its name is the kind already.
    lowers_layer_kinds = study.by is LoweredUnit.KIND
    cols: list[Col[LoweredLayersTrial]] = [
        Col("low" if lowers_layer_kinds else "low layer", "name"),
        Col("kind", "kind", when=not lowers_layer_kinds),
        Col("loss gap", study.gap, show=_signed_percent),
        Col("gradient error", "gradient_error", show=units.percent),
        Col("verdict", study.verdict, tone=lambda trial: _VERDICT_TONES[study.verdict(trial)]),
        Col("why", "failure", below=True),
    ]
    return table("probes", "", cols, study.ranking)


def _formats_table(study: SensitivityStudy) -> Table:
    proposed_formats = study.proposed_formats
    trials_by_name = {trial.name: trial for trial in study.probes}
    cols: list[Col[LoweredLayersTrial]] = [
        Col("layer", "name"),
        *(Col(name, partial(_show_format_error, study, name), number=True) for name in FORMATS),
        Col("proposed", lambda trial: proposed_formats[trial.name]),
    ]
    return table(
        "formats", "error of all gradients of the first step, by the format of one layer", cols, trials_by_name.values()
    )


def _show_format_error(study: SensitivityStudy, form: str, trial: LoweredLayersTrial) -> str:
    return units.percent(study.format_errors(trial.name).get(form), 2)


def _make_candidate_trials_table(study: SensitivityStudy) -> Table:
    def verdict(trial: LoweredLayersTrial) -> Field:
        if study.keeps_loss(trial):
            return Field("keeps the loss", tone=Tone.GOOD)
        if trial.failure:
            return Field("failed", tone=Tone.BAD)
        has_large_gap = (study.gap(trial) or 0) > study.tolerance
        return Field("above the tolerance" if has_large_gap else "its gradient error is too large", tone=Tone.BAD)

    cols: list[Col[LoweredLayersTrial]] = [
        Col("candidate", "name"),
        Col("layers low", lambda trial: str(len(trial.low)), number=True),
        Col("loss gap", study.gap, show=_signed_percent),
        Col("gradient error", "gradient_error", show=units.percent, when=study.gradient_tolerance is not None),
        Col("verdict", verdict),
        Col("why", "failure", below=True),
    ]
    return table("candidates", "", cols, study.candidates)


def _describe_suggested_trial(study: SensitivityStudy) -> Iterator[Element]:
    tolerance_text = units.percentage(100 * study.tolerance)
    suggested_trial = study.suggestion
    if study.gradient_tolerance is not None:
        tolerance_text += f", and its first gradients within {units.percentage(100 * study.gradient_tolerance)}"
    # 1. Explain why no map is suggested: every map lost too much, or every gap is within the noise.
    if suggested_trial is None:
        reason = "every map was tried" if study.finished else "it was interrupted before all maps were tried"
        sentence = f"no map with {study.low} in some layer keeps the loss within {tolerance_text}: {reason}"
        if study.is_undecided:
            sentence = (
                f"no map is suggested: every gap is within the noise of {_show_noise(study)}, so the study can neither "
                f"rank layers nor compare {study.low} with {study.reference}. Repeat it with more --steps, or compare "
                "maps on fresh batches: fp8bench train with --precision-map LAYER=bf16 --seeds 5"
            )
        yield Text(sentence)
        return
    # 2. Suggest a map that was trained as a whole, not one combined from single layers.
    gap = study.gap(suggested_trial)
    assert gap is not None
    layer_count = len(study.candidates[0].low)
    share_text = f" ({len(suggested_trial.low)} of {layer_count})" if len(suggested_trial.low) < layer_count else ""
    yield Text(
        f"suggested: {study.low} in {suggested_trial.name}{share_text}. That map was trained: its loss gap is "
        f"{_signed_percent(gap)}, within the tolerance of {tolerance_text}"
    )
    # 3. Warn if the tolerance may be below the noise.
    if study.noise is None or study.tolerance < study.noise:
        noise = "noise is unknown" if study.noise is None else f"tolerance is below the noise of {_show_noise(study)}"
        yield Text(f"note: the {noise}: a gap may be within the tolerance by chance")
    yield Code(make_trial_command(study, suggested_trial))


def make_trial_command(study: SensitivityStudy, trial: LoweredLayersTrial) -> str:
    """Returns the command, on one line, that measures a map against the reference."""
    params = dict(study.params)
    profile_command = f"fp8bench profile {shlex.quote(str(params.get('make')))}"
    command_line_parts = [
        profile_command if "make" in params else f"fp8bench suite {study.workload} --set size={params['size']}"
    ]
    command_line_parts.append(f"--dtypes {study.low} --reference {study.reference}")
    if precision_map := study.explicit_map(trial):
        command_line_parts.append(f"--precision-map {format_map(precision_map)}")
    return " ".join(command_line_parts)


def _signed_percent(signed_share: float) -> str:
    percent_text = units.percent(signed_share, 2)
    return percent_text if percent_text.startswith("-") else f"+{percent_text}"


def _show_noise(study: SensitivityStudy) -> str:
    return units.percent(study.noise, 2)


def table_rows(study: SensitivityStudy) -> PlainRows:
    baseline = (study.baseline,)
    trials_by_part = {"reference": baseline, "draw": study.draws, "low": study.ranking, "candidate": study.candidates}
    rows: list[dict[str, object]] = []
    for part, trials in trials_by_part.items():
        rows += [_make_table_row(study, part, layer_trial) for layer_trial in trials]
    return tuple(rows[0]), rows


def _make_table_row(study: SensitivityStudy, part: str, trial: LoweredLayersTrial) -> dict[str, object]:
    return {
        "part": part,
        "name": trial.name,
        "kind": trial.kind,
        "precision": trial.precision,
        "precision_map": format_map(trial.precision_map),
        "layers_low": len(trial.low),
        "draw": trial.draw,
        "loss": trial.loss,
        "loss_gap": study.gap(trial),
        "noise": study.noise,
        "gradient_error": trial.gradient_error,
        # A trial of one format takes a single step, so it has no loss to judge.
        "says": "" if trial.form else study.verdict(trial).value,
        "format": trial.form,
        "keeps_loss": study.keeps_loss(trial) if part == "candidate" else None,
        "failure": trial.failure,
    }
