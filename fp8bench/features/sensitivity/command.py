"""`fp8bench sensitivity`: which layers suffer most in low precision, and a precision map that keeps the loss."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_files, check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.sensitivity.study import By
from fp8bench.features.sensitivity.view import as_csv, as_json, page_of
from fp8bench.measure.interrupts import only_once
from fp8bench.model import Request
from fp8bench.model.request import PERCENT, whole_number
from fp8bench.model.words import UNTOUCHED
from fp8bench.workloads.model import Model


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the transformer, or a model of your own, with one layer at a time in low precision and the rest in the "
        "reference, then looks for a precision map that keeps the loss, and runs every map that it tries."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 3 the reference's own training failed, 130 interrupted."
    add = parser.add_argument
    words = "a model of your own, as profile takes it, instead of the transformer; its steps are on its one batch"
    add("target", nargs="?", metavar="MODULE:FUNCTION", help=words)
    add("--size", metavar="NAME", help="the model, as in suite transformer; default nano")
    add("--dtype", default="fp8", metavar="DTYPE", help="the low precision; default fp8")
    words = "the precision of the rest; default bf16, and of a model of your own untouched: as it came"
    add("--reference", metavar="DTYPE", help=words)
    add("--by", choices=("layer", "kind"), default="layer", help="what is low at a time; default layer")
    words = "training steps of every run; default 50"
    add("--steps", type=types.whole(whole_number(1, 100_000)), default=50, metavar="N", help=words)
    words = "the largest loss gap that a suggested map may have; default 1"
    add("--tolerance", type=types.number(PERCENT), default=1.0, metavar="PERCENT", help=words)
    words = "also the largest error of its first gradients; it tells layers apart where no loss of a few steps does"
    add("--gradient-tolerance", type=types.number(PERCENT), metavar="PERCENT", help=words)
    shared(parser, "--seed", help="for data and weights; default 0")
    shared(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    shared(parser, "--data")
    shared(parser, "--import", help="as in suite")
    shared(parser, "--case-timeout", help="the most that one training may take; default far more than its work needs")
    shared(parser, "--no-isolation", help="train in this process, without a worker")
    shared(parser, "--store", help="as in suite")
    shared(parser, "--explain")
    shared(parser, "--json", help="print all of it as JSON instead of the tables, every loss included")
    words = "write the suggested map there, as --precision-map takes it"
    parser.add_argument("--write-map", type=types.path, metavar="FILE", help=words)
    shared(parser, "--csv", help="also write the runs there as rows; '-' prints them instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Train, keep, tell. An interrupt ends it early: what was run is told all the same."""
    from fp8bench.features.sensitivity.job import Question, kept, studied, write_map

    check_outputs(arguments)
    check_files({"--write-map": arguments.write_map})
    target = arguments.target or ""
    for option in ("size", "data") if target else ():
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} is of the transformer, and {target} is a model of your own. Leave one out.")
    axis = ("make", (target,)) if target else ("size", (arguments.size or "nano",))
    request = Request(
        Model.name if target else "transformer", (arguments.dtype,), (arguments.device,) if arguments.device else (),
        arguments.reference or (UNTOUCHED if target else "bf16"), (axis,), data=arguments.data, seed=arguments.seed,
        threads=arguments.threads, imports=tuple(arguments.imports), isolation=arguments.isolation,
        case_timeout=arguments.case_timeout,
    )  # fmt: skip
    gradients = None if arguments.gradient_tolerance is None else arguments.gradient_tolerance / 100
    question = Question(request, By(arguments.by), arguments.steps, arguments.tolerance / 100, gradients)
    with only_once():
        study = studied(question, arguments.store, TERMINAL)
        try:
            study = kept(study, arguments.store)
        finally:  # what the store does not take is told at least
            tell(arguments, partial(page_of, study), partial(as_json, study), partial(as_csv, study))
            if arguments.write_map is not None:
                write_map(study, arguments.write_map)
    if not study.finished and not study.baseline.failure:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if study.baseline.failure else EXIT_OK
