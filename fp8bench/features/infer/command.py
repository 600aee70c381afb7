"""`fp8bench infer`: prefill and decode with a cache and weights in low precision, and what that does to predictions."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.infer.values import LEAST_CONTEXTS, ServingQuestion, arm_in_words, checked_arm
from fp8bench.features.infer.view import page_of, rows_of, value_of
from fp8bench.measure.interrupts import only_once
from fp8bench.model.request import whole_number
from fp8bench.nn.served import CARRIERS
from fp8bench.nn.sizes import SERVED_SIZES

_ARMS = "bf16,kv=fp8,weights=int8,kv=fp8+weights=int8"
_CONTEXTS = {False: (256, 1024, 2048, 4096), True: (128, 512, 1024, 2048)}
_TOKENS = {False: 8192, True: 2048}
_BATCHES = (1, 8, 16, 32, 64, 128, 256)
EXAMPLES = ("fp8bench infer --quick", "fp8bench infer --arms kv=fp8,weights=int8 --batch 8 --contexts 512,2048,8192")
FIRST_OPTIONS = "--size --arms --reference --batch --contexts --sweep --check-layers --quick --json --csv --explain"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures decode steps over contexts and a prompt, arms interleaved with a reference, fits TPOT = a + b x "
        "context, says from which context an arm pays, and compares its predictions token by token."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 130 interrupted."
    add = parser.add_argument
    add(
        "--size",
        default="nano",
        metavar="NAME",
        help=f"the model that is timed: {', '.join(SERVED_SIZES)}; default nano",
    )
    words = f"what is kept in which format, as in kv=fp8@0-1=bf16+weights=int8; default {_ARMS}"
    add("--arms", default=_ARMS, metavar="A,B", help=words)
    add("--reference", choices=tuple(CARRIERS), help="what they are held against; default fp32 on a CPU, else bf16")
    add("--batch", type=types.whole(whole_number(1, 1 << 14)), default=1, metavar="N", help="sequences; default 1")
    words = f"{LEAST_CONTEXTS} contexts or more, for the line; default 256,1024,2048,4096"
    add("--contexts", metavar="A,B", help=words)
    add(
        "--sweep",
        choices=("batch",),
        help=f"batch: at which batch arms stop paying, over {', '.join(map(str, _BATCHES))}",
    )
    words = "kv or weights: one layer low at a time, ranked by what it does to predictions"
    add("--check-layers", choices=("kv", "weights"), help=words)
    words = "tokens that predictions are compared on; default 8192, 2048 with --quick"
    add("--tokens", type=types.whole(whole_number(256, 1 << 20)), metavar="N", help=words)
    shared(parser, "--quick")
    shared(parser, "--seed", help="for random weights, tokens and the cache's values; default 0")
    shared(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    shared(parser, "--store", help="as in suite")
    shared(parser, "--explain")
    shared(parser, "--json", help="print all of it as JSON instead of the table")
    shared(parser, "--csv", help="also write a row for each arm there; '-' prints them instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, then tell; after an interrupt what was found."""
    from fp8bench.features.infer.job import answered

    check_outputs(arguments)
    question = _question(arguments)
    command = shlex.join(["fp8bench", *sys.argv[1:]])
    with only_once():
        answer = answered(question, arguments.store, command, TERMINAL)
        tell(arguments, partial(page_of, answer), partial(value_of, answer), partial(rows_of, answer))
    return EXIT_OK if answer.finished else EXIT_INTERRUPTED


def _question(arguments: argparse.Namespace) -> ServingQuestion:
    if arguments.size not in SERVED_SIZES:
        raise UsageError(
            f"--size {arguments.size!r} is no model that is served. Give one of {', '.join(SERVED_SIZES)}."
        )
    config = SERVED_SIZES[arguments.size]
    reference = arguments.reference or ("fp32" if (arguments.device or "cpu") == "cpu" else "bf16")
    words = list(dict.fromkeys(filter(None, arguments.arms.split(","))))
    arms = [checked_arm(arm_in_words(word, "bf16"), config.layers) for word in words]
    lead = arm_in_words(reference, reference)
    return ServingQuestion(
        arguments.size, tuple(dict.fromkeys((lead, *arms))), _contexts(arguments, config.sequence), arguments.batch,
        arguments.quick, arguments.tokens or _TOKENS[arguments.quick], arguments.seed, arguments.threads,
        arguments.device or "", check_layers=arguments.check_layers or "",
        batches=_BATCHES if arguments.sweep else (),
    )  # fmt: skip


def _contexts(arguments: argparse.Namespace, longest: int) -> tuple[int, ...]:
    if arguments.contexts is None:
        usual = _CONTEXTS[arguments.quick]
        return usual if usual[-1] <= longest else tuple(sorted({longest * part // 8 for part in (1, 2, 4, 8)}))
    try:
        contexts = tuple(sorted({int(word) for word in arguments.contexts.split(",")}))
    except ValueError:
        raise UsageError(
            f"--contexts {arguments.contexts!r} is no list of whole numbers. Give 256,1024,2048,4096, say."
        ) from None
    if len(contexts) < LEAST_CONTEXTS and not arguments.sweep:
        raise UsageError(
            f"--contexts has {len(contexts)} and a line needs {LEAST_CONTEXTS}. Give 256,1024,2048,4096, say."
        )
    if contexts[0] < 1 or contexts[-1] > longest:
        raise UsageError(
            f"--contexts goes from {contexts[0]} to {contexts[-1]}: {arguments.size} has positions for 1 to {longest}."
        )
    return contexts
