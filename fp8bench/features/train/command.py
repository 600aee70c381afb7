"""`fp8bench train`: trains a model in several precisions side by side, or resumes a training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import cast

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options, add_request_options, refuse_other_options
from fp8bench.cli.outputs import check_outputs, format_store_option, tell
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSION, NotKept, UnknownName
from fp8bench.features.train.arms import check_training, split_request_by_model
from fp8bench.features.train.kind import KIND, MODEL_SIZES_KIND, find_training
from fp8bench.features.train.request import (
    LEARNING_TITLE,
    MODEL,
    QUICK_STEPS,
    TRAINING_LENGTH_TITLE,
    TRAINING_RULES,
    TrainerSettings,
    TrainingRequest,
    request_with_defaults,
)
from fp8bench.features.train.values import ModelSweep, StoredTraining, TrainingEvent, TrainingObserver
from fp8bench.measure.environment import command_line
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.model.request import PERCENT_RULE

_ALLOWED_WITH_RESUME = {
    "--resume",
    "--store",
    "--json",
    "--csv",
    "--explain",
    "--log",
    "--fail-on",
    "--live",
    "--on-alarm",
}
_DEFAULT_REQUEST = TrainingRequest()

EXAMPLES = (
    "fp8bench train --dtypes bf16,fp8  # does fp8 learn as bf16 does?",
    "fp8bench train --quick  # does it run?",
)
FIRST_OPTIONS = "--dtypes --model --arch --steps --seeds --quick --data --device --dry-run --resume --fail-on"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the same model on the same batches in several precisions, and reports for each whether its "
        "loss differs from the reference's, and whether by more than --margin: the gap is paired over seeds "
        "and has an interval. Without options it trains nano 16 times, which takes about three minutes on one"
        " core; --quick takes some seconds."
    )
    parser.epilog = (
        "Exit codes: 0 fine, 1 something that --fail-on names, 2 wrong usage, 3 an arm could not be trained to its "
        "end, 130 interrupted. Without --fail-on verdicts do not change the exit code."
    )
    parser.add_argument(
        "make",
        nargs="?",
        default="",
        metavar="MODULE:FUNCTION",
        help="instead of a built-in model: a function without arguments that returns yours, as for `profile`",
    )
    model_group = parser.add_argument_group(MODEL)
    add_common_options(
        model_group,
        "--dtypes",
        help=f"precisions, also msamp-o1 to msamp-o3; default {','.join(_DEFAULT_REQUEST.dtypes)}",
    )
    length_option_group = parser.add_argument_group(TRAINING_LENGTH_TITLE)
    learning_argument_group = parser.add_argument_group(LEARNING_TITLE)
    _add_length_options(length_option_group)
    for argument_group in (model_group, length_option_group, learning_argument_group):
        add_request_options(argument_group, TrainerSettings)
        add_request_options(argument_group, TrainingRequest)
    length_option_group.add_argument(
        "--dry-run", action="store_true", help="print the arms, their steps and tokens; train nothing"
    )
    _add_storage_options(parser.add_argument_group("where"))


def _add_length_options(group: argparse._ArgumentGroup) -> None:
    """Adds --steps, --seeds, --margin (the largest tolerated loss gap, in percent) and --quick."""
    for name, help_text in (
        ("steps", "optimizer steps of an arm"),
        ("seeds", "trainings of an arm, each with other weights and batches"),
    ):
        group.add_argument(
            f"--{name}",
            type=types.whole(TRAINING_RULES[name]),
            metavar="N",
            help=f"{help_text}; default {getattr(_DEFAULT_REQUEST, name)}",
        )
    group.add_argument(
        "--margin",
        type=types.number(PERCENT_RULE),
        default=100 * _DEFAULT_REQUEST.margin,
        metavar="PERCENT",
        help="the largest tolerated loss gap, in percent of the reference's loss; default 1",
    )
    add_common_options(
        group, "--quick", help=f"one seed of {QUICK_STEPS} steps, a smoke test: too little for a verdict"
    )


def _add_storage_options(group: argparse._ArgumentGroup) -> None:
    add_common_options(group, "--store", help="where trainings are kept, below trainings/; default .fp8bench")
    group.add_argument(
        "--config",
        type=types.path,
        metavar="FILE",
        help="options in YAML, by name without dashes; the command line overrides it",
    )
    group.add_argument("--resume", metavar="TRAINING", help="resume what was cut off: an id, its folder, or last")
    group.add_argument(
        "--fail-on",
        type=types.words,
        default=(),
        metavar="WHAT,...",
        help="exit with 1 if an arm is worse (unless surely by less than --margin), diverged, did-not-learn or "
        "inconclusive, or has an alarm",
    )
    group.add_argument(
        "--live", type=Path, metavar="FILE", help="write the page to FILE during training, for a browser"
    )
    add_common_options(group, "--explain")
    add_common_options(
        group, "--json", help="print the training as JSON, every line of it and the verdicts, instead of the table"
    )
    add_common_options(
        group, "--csv", help="also write the figures to PATH, one a row; '-' prints them instead of the table"
    )
    group.add_argument(
        "--on-alarm",
        default="",
        metavar="COMMAND",
        help="run a command of the shell for each alarm, with FP8BENCH_ALARM, _RULE, _ARM and _STEP in its environment",
    )
    add_common_options(
        group, "--log", help="log curves during training to tensorboard[:DIR] or wandb[:PROJECT]; repeatable"
    )


def request_from(arguments: argparse.Namespace) -> TrainingRequest:
    values = vars(arguments)
    settings = {field.name: values[field.name] for field in fields(TrainerSettings) if field.name in values}
    request_fields = {field.name: values[field.name] for field in fields(TrainingRequest) if field.name in values}
    # Repeated --sweep options of one name combine their values.
    values_by_axis: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.sweep:
        values_by_axis[name] = (*values_by_axis.get(name, ()), *values)
    request_fields |= {"sweep": tuple(values_by_axis.items()), "imports": tuple(arguments.imports)}
    request_fields["margin"] = arguments.margin / 100
    return request_with_defaults(arguments.quick, **request_fields, settings=TrainerSettings(**settings))


def run(arguments: argparse.Namespace) -> int:
    from fp8bench.features.train.run import plan_training, resume, train
    from fp8bench.features.train.words import FAILURE_WORDS
    from fp8bench.jobs.after_run import log_result

    check_outputs(arguments)
    # --fail-on with a misspelt reason would never fail.
    for name in arguments.fail_on:
        if name not in FAILURE_WORDS:
            raise UnknownName("reason to fail", name, FAILURE_WORDS)
    if arguments.resume is not None:
        # A function from --config was not typed on the command line, and is stored with the training. So it does not
        # conflict with --resume.
        is_make_option_typed = arguments.make in arguments.words
        refuse_other_options(
            arguments.words, _ALLOWED_WITH_RESUME, [arguments.make] if is_make_option_typed and arguments.make else []
        )
        path = find_training(arguments.resume, arguments.store)
        with _observe_training(arguments) as observer:
            has_trained, stored = resume(path, arguments.store, observer)
        if not has_trained:
            write_sentence_to_stderr(f"training {stored.training.id} is finished; nothing was missing")
            log_result(KIND, stored, arguments.log, write_sentence_to_stderr)
        return _finish_training(stored, arguments)
    requests = split_request_by_model(request_from(arguments))
    # A mistake in any request has to show up before the first training.
    for request in requests:
        check_training(request)
    if arguments.dry_run:
        from fp8bench.features.train.view import render_plan

        for request in requests:
            tell(arguments, partial(render_plan, *plan_training(request, arguments.store)))
        return EXIT_OK
    stored_trainings: list[StoredTraining] = []
    for request in requests:
        with _observe_training(arguments) as observer:
            stored_trainings.append(train(request, arguments.store, observer, command_line()))
        # An interrupt ends the whole sweep, not only the training of one model.
        if not stored_trainings[-1].finished:
            break
    if untrained_models := [request.settings.model for request in requests[len(stored_trainings) :]]:
        write_sentence_to_stderr(
            f"not begun: --model {', '.join(untrained_models)}. Train these by themselves, and compare all by their ids"
        )
    if len(stored_trainings) == 1 or not stored_trainings[-1].finished:
        return _finish_training(stored_trainings[-1], arguments)
    return _report_model_sweep(stored_trainings, arguments)


def _report_model_sweep(trained: Sequence[StoredTraining], arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import report_result

    ids = [stored.training.id for stored in trained]
    tell(arguments, *MODEL_SIZES_KIND.view(ModelSweep(tuple(trained), "+".join(ids))))
    for stored in trained:
        report_result(stored, arguments.store, write_sentence_to_stderr)
    write_sentence_to_stderr(
        f"all sizes on a page: fp8bench report {' '.join(ids)}{format_store_option(arguments.store)}"
    )
    return max(_find_exit_code(stored, arguments) for stored in trained)


@contextmanager
def _observe_training(arguments: argparse.Namespace) -> Iterator[TrainingObserver]:
    from fp8bench.features.train.progress import add_training_outputs, observe_on_terminal

    try:
        targets = arguments.store, arguments.live, arguments.log, arguments.on_alarm
        with (
            interrupt_only_once(),
            observe_on_terminal() as observer,
            add_training_outputs(observer, *targets) as outer,
        ):
            yield outer
    except NotKept as error:
        stored_training = cast(StoredTraining, error.run)
        tell(arguments, *KIND.view(stored_training))
        _print_resume_command(stored_training, arguments)
        raise


def _finish_training(stored: StoredTraining, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import report_result

    if not stored.finished:
        _print_resume_command(stored, arguments)
    tell(arguments, *KIND.view(stored))
    if not stored.finished:
        return EXIT_INTERRUPTED
    report_result(stored, arguments.store, write_sentence_to_stderr)
    return _find_exit_code(stored, arguments)


def _find_exit_code(stored: StoredTraining, arguments: argparse.Namespace) -> int:
    if any(event.kind == "out" for event in stored.select_lines(TrainingEvent)):
        return EXIT_FAILED
    return _check_requested_failures(stored, arguments.fail_on)


def _check_requested_failures(stored: StoredTraining, requested_failures: Sequence[str]) -> int:
    """Returns the exit code for --fail-on, and prints a sentence for each reason to fail. That an arm was not trained
    is also a reason.
    """
    from fp8bench.features.train.verdicts.summary import JudgedTraining
    from fp8bench.features.train.words import list_failures

    if not requested_failures:
        return EXIT_OK
    for arm in (untrained := [arm for arm in stored.training.arms if arm.skip]):
        write_sentence_to_stderr(f"--fail-on: {arm.name} was not trained: {arm.skip}")
    reasons = list(list_failures(JudgedTraining(stored), requested_failures))
    for reason in reasons:
        write_sentence_to_stderr(f"--fail-on: {reason}")
    if untrained:
        return EXIT_FAILED
    return EXIT_REGRESSION if reasons else EXIT_OK


def _print_resume_command(stored: StoredTraining, arguments: argparse.Namespace) -> None:
    command = f"fp8bench train --resume {stored.training.id}{format_store_option(arguments.store)}"
    write_sentence_to_stderr(f"interrupted; the trained part is stored in {stored.path}.\n  To continue: {command}")
