"""`fp8bench infer`: times prefill and decode with low-precision caches or weights, and compares predictions."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from fp8bench.features.infer.values import MIN_LINE_CONTEXTS, ServedModel, ServingQuestion, parse_arm
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.model.request import whole_number
from fp8bench.nn.served import CARRIER_BYTES
from fp8bench.nn.sizes import SERVED_SIZES

_CONTEXTS_EXAMPLE = "Give for example 256,1024,2048,4096."
_DEFAULT_ARMS = "bf16,kv=fp8,weights=int8,kv=fp8+weights=int8"
_DEFAULT_TOKENS = {False: 8192, True: 2048}
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
        help="measure quality on the newest checkpoint of a training in the store: of its reference, or of ARM",
    )
    add(
        "--arms",
        default=_DEFAULT_ARMS,
        metavar="A,B",
        help=f"formats of the cache and the weights, for example kv=fp8+weights=int8; default {_DEFAULT_ARMS}",
    )
    add(
        "--reference",
        choices=tuple(CARRIER_BYTES),
        help="precision that the arms are compared with; default fp32 on a CPU, else bf16",
    )
    add(
        "--batch",
        type=types.whole(whole_number(1, 1 << 14)),
        default=1,
        metavar="N",
        help="number of sequences; default 1",
    )
    add(
        "--contexts",
        metavar="A,B",
        help=f"{MIN_LINE_CONTEXTS} context lengths or more, to fit the line; default 256,1024,1025,2048,4096",
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
        help="number of tokens on which predictions are compared; default 8192, 2048 with --quick",
    )
    add_common_options(parser, "--quick")
    add_common_options(parser, "--seed", help="for random weights, tokens and the cache's values; default 0")
    add_common_options(parser, "--threads")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common_options(parser, "--store", help="as in suite")
    add("--all", action="store_true", help="also print the bytes and every figure of quality of each arm")
    add_common_options(parser, "--explain")
    add_common_options(parser, "--json", help="print the whole answer as JSON instead of the table")
    add_common_options(
        parser, "--csv", help="also write a CSV row for each arm; '-' prints the rows instead of the table"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures and shows the answer. After an interrupt, shows what was measured until then."""
    from fp8bench.features.infer.job import answer_question
    from fp8bench.features.infer.view import encode_answer, render_page, table_rows

    check_outputs(arguments)
    question, trained = _make_serving_question(arguments)
    command = shlex.join(["fp8bench", *sys.argv[1:]])
    with interrupt_only_once():
        answer = answer_question(
            question, arguments.store, command, TERMINAL_JOB_OBSERVER, trained, arguments.reference
        )
        # Print the page, JSON or CSV, and write the requested files.
        tell(
            arguments,
            partial(render_page, answer, arguments.all),
            partial(encode_answer, answer),
            partial(table_rows, answer),
        )
    return EXIT_OK if answer.finished else EXIT_INTERRUPTED


def _make_serving_question(arguments: argparse.Namespace) -> tuple[ServingQuestion, ServedModel | None]:
    from fp8bench.features.infer.job import complete_serving_question

    tokens = arguments.tokens or _DEFAULT_TOKENS[arguments.quick]
    size, trained = _choose_model(arguments, tokens)
    # An arm that is named twice is measured once.
    names = list(dict.fromkeys(filter(None, arguments.arms.split(","))))
    arms = [parse_arm(name) for name in names]
    question = ServingQuestion(
        size,
        tuple(dict.fromkeys(arms)),
        _parse_context_lengths(arguments),
        arguments.batch,
        arguments.quick,
        tokens,
        arguments.seed,
        arguments.threads,
        arguments.device or "",
        arguments.rollout,
    )
    # The default contexts depend on the model, and a user's model is not made yet.
    if not question.is_user_model:
        question = complete_serving_question(question)
    return question, trained


def _choose_model(arguments: argparse.Namespace, tokens: int) -> tuple[str, ServedModel | None]:
    """Returns the model to time (a size, or the function that makes a user's model), and the model on which quality is
    measured. The second is None for the default model or a user's model.
    """
    from fp8bench.jobs.profile import check_function_name

    if arguments.make and (arguments.trained or arguments.size):
        raise UsageError(f"{arguments.make} is your own model. Leave --size and --from out.")
    if arguments.make:
        return check_function_name(arguments.make), None
    trained, size = None, "nano"
    if arguments.trained:
        from fp8bench.features.infer.job import find_trained_model

        trained, size = find_trained_model(arguments.trained, arguments.store, tokens)
    size = arguments.size or size
    if size not in SERVED_SIZES:
        raise UsageError(f"--size {size!r} cannot be served. Give one of {', '.join(SERVED_SIZES)}.")
    return size, trained


def _parse_context_lengths(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.contexts is None:
        return ()
    try:
        context_lengths = tuple(sorted({int(word) for word in arguments.contexts.split(",")}))
    except ValueError:
        raise UsageError(
            f"--contexts {arguments.contexts!r} is not a list of whole numbers. {_CONTEXTS_EXAMPLE}"
        ) from None
    if len(context_lengths) < MIN_LINE_CONTEXTS:
        raise UsageError(
            f"--contexts has {len(context_lengths)}, and a line needs {MIN_LINE_CONTEXTS} or more. {_CONTEXTS_EXAMPLE}"
        )
    return context_lengths
