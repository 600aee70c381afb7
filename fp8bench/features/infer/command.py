"""`fp8bench infer`: times prefill and decode with low-precision caches or weights, and compares predictions."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.infer.values import LEAST_CONTEXTS, ServedModel, ServingQuestion, arm_in_words
from fp8bench.measure.interrupts import only_once
from fp8bench.model.request import whole_number
from fp8bench.nn.served import CARRIERS, ServedArm
from fp8bench.nn.sizes import SERVED_SIZES

_CONTEXTS_LIKE = "Give 256,1024,2048,4096, say."
_ARMS = "bf16,kv=fp8,weights=int8,kv=fp8+weights=int8"
_TOKENS = {False: 8192, True: 2048}
EXAMPLES = ("fp8bench infer --quick", "fp8bench infer my_package:make", "fp8bench infer --from last --arms kv=fp8")
FIRST_OPTIONS = "--size --from --arms --reference --batch --contexts --rollout --quick --all --json --csv --explain"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures decode steps over contexts and a prompt, arms interleaved with a reference, fits TPOT = a + b x "
        "context, finds the context from which an arm pays, and compares its predictions token by token."
    )
    parser.epilog = "Exit codes: 0 fine, 2 wrong usage, 130 interrupted."
    add = parser.add_argument
    add(
        "make",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="module:function, or file.py:function, that returns a causal model with a cache, or (model, token ids)",
    )
    add("--size", metavar="NAME", help=f"the model to time: {', '.join(SERVED_SIZES)}; default nano")
    add(
        "--from",
        dest="trained",
        metavar="TRAINING[:ARM]",
        help="read quality on the newest checkpoint of a training in the store: of its reference, or of that arm",
    )
    add(
        "--arms",
        default=_ARMS,
        metavar="A,B",
        help=f"formats of cache and weights, as in kv=fp8+weights=int8; default {_ARMS}",
    )
    add(
        "--reference", choices=tuple(CARRIERS), help="what the arms are compared with; default fp32 on a CPU, else bf16"
    )
    add("--batch", type=types.whole(whole_number(1, 1 << 14)), default=1, metavar="N", help="sequences; default 1")
    add(
        "--contexts",
        metavar="A,B",
        help=f"{LEAST_CONTEXTS} context lengths or more, to fit the line; default 256,1024,1025,2048,4096",
    )
    add(
        "--rollout",
        action="store_true",
        help="also sample texts in each arm, and compare its log-probabilities of these tokens with the reference's",
    )
    add(
        "--tokens",
        type=types.whole(whole_number(256, 1 << 20)),
        metavar="N",
        help="tokens that predictions are compared on; default 8192, 2048 with --quick",
    )
    add_common(parser, "--quick")
    add_common(parser, "--seed", help="for random weights, tokens and the cache's values; default 0")
    add_common(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common(parser, "--store", help="as in suite")
    add("--all", action="store_true", help="also print the bytes and every figure of quality of each arm")
    add_common(parser, "--explain")
    add_common(parser, "--json", help="print all of it as JSON instead of the table")
    add_common(parser, "--csv", help="also write a row for each arm there; '-' prints them instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Measures and shows the result; after an interrupt, shows what was measured until then."""
    from fp8bench.features.infer.job import answer_question
    from fp8bench.features.infer.view import page_of, rows_of, value_of

    check_outputs(arguments)
    question, trained = _question(arguments)
    command = shlex.join(["fp8bench", *sys.argv[1:]])
    with only_once():
        answer = answer_question(question, arguments.store, command, TERMINAL, trained)
        tell(arguments, partial(page_of, answer, arguments.all), partial(value_of, answer), partial(rows_of, answer))
    return EXIT_OK if answer.finished else EXIT_INTERRUPTED


def _question(arguments: argparse.Namespace) -> tuple[ServingQuestion, ServedModel | None]:
    from fp8bench.features.infer.job import complete_question

    tokens = arguments.tokens or _TOKENS[arguments.quick]
    size, trained = _model(arguments, tokens)
    # The usual precision for serving without low precision: fp32 on a CPU, bf16 elsewhere.
    reference = arguments.reference or ("fp32" if (arguments.device or "cpu") == "cpu" else "bf16")
    # Measure arms that are named twice only once.
    words = list(dict.fromkeys(filter(None, arguments.arms.split(","))))
    arms = [arm_in_words(word) for word in words]
    baseline = ServedArm(reference)
    question = ServingQuestion(
        size,
        tuple(dict.fromkeys((baseline, *arms))),
        _contexts(arguments),
        arguments.batch,
        arguments.quick,
        tokens,
        arguments.seed,
        arguments.threads,
        arguments.device or "",
        arguments.rollout,
    )
    return question if question.is_own else complete_question(question), trained


def _model(arguments: argparse.Namespace, tokens: int) -> tuple[str, ServedModel | None]:
    """Returns the size to time, and the model for quality: None for the default one."""
    from fp8bench.jobs.profile import function_named

    if arguments.make and (arguments.trained or arguments.size):
        raise UsageError(f"{arguments.make} is your own model. Leave --size and --from out.")
    if arguments.make:
        return function_named(arguments.make), None
    trained, size = None, "nano"
    if arguments.trained:
        from fp8bench.features.infer.job import trained_model

        trained, size = trained_model(arguments.trained, arguments.store, tokens)
    size = arguments.size or size
    if size not in SERVED_SIZES:
        raise UsageError(f"--size {size!r} cannot be served. Give one of {', '.join(SERVED_SIZES)}.")
    return size, trained


def _contexts(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.contexts is None:
        return ()
    try:
        contexts = tuple(sorted({int(word) for word in arguments.contexts.split(",")}))
    except ValueError:
        raise UsageError(
            f"--contexts {arguments.contexts!r} is not a list of whole numbers. {_CONTEXTS_LIKE}"
        ) from None
    if len(contexts) < LEAST_CONTEXTS:
        raise UsageError(f"--contexts has {len(contexts)}, and a line needs {LEAST_CONTEXTS} or more. {_CONTEXTS_LIKE}")
    return contexts
