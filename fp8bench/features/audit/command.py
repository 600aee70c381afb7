"""`fp8bench audit`: whether a low-precision kernel computes what it promises."""

from __future__ import annotations

import argparse
from functools import partial

from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_files, check_outputs, tell, write_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_BASELINE, EXIT_OK, EXIT_REGRESSION, UsageError
from fp8bench.features.audit.job import audit
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.features.audit.view import as_json, as_junit, page_of
from fp8bench.model.promises import AuditKind, KeptWeights, Signature, UpdateRule
from fp8bench.model.raw import Settings
from fp8bench.user_code.named import signed

_EXITS = {
    AuditOutcome.PASS: EXIT_OK, AuditOutcome.FAIL: EXIT_REGRESSION, AuditOutcome.CANNOT_TELL: EXIT_BASELINE,
}  # fmt: skip

# What a signature says besides kind and precision, and what it is if nothing is said.
_HOW = {
    "takes": "values", "second": "nk", "multiple": 1, "causal": False, "rule": "adamw", "second_moment": "",
    "weights": "fp32", "baseline": "",
}  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Gives a product, cast, linear layer, attention or optimizer of low precision inputs in which mistakes show, "
        "and says whether what comes out is what its precision gives, and if not, which mistake it is. Of a model that "
        "somebody has converted it says what runs in low precision, and what was left out."
    )
    parser.epilog = "Exit codes: 0 PASS, 1 FAIL, 2 wrong usage, 4 CANNOT TELL."
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="the callable; file.py:function, too")
    kinds = [one.value for one in AuditKind]
    parser.add_argument("--kind", choices=kinds, help="what it is; default as it is declared")
    words = "what it promises, as in suite --dtypes: fp8, mxfp8, ...; an optimizer's first moment dynamic8-256, too"
    parser.add_argument("--precision", metavar="DTYPE", help=words)
    words = "what a product is given: values, or codes with the scales that decode them; default values"
    parser.add_argument("--takes", choices=("values", "codes"), default="values", help=words)
    words = "how a product's second operand lies: (N, K) or (K, N); default nk"
    parser.add_argument("--second", choices=("nk", "kn"), default="nk", help=words)
    words = "sizes that are no multiples of it may be refused; default 1"
    parser.add_argument("--multiple", type=int, default=1, metavar="N", help=words)
    parser.add_argument("--causal", action="store_true", help="of attention: no place sees a later one")
    rules, kept = [one.value for one in UpdateRule], [one.value for one in KeptWeights]
    parser.add_argument("--rule", choices=rules, default="adamw", help="of an optimizer; default adamw")
    words = "of an optimizer: same, or a precision; default fp16 with a scale beside fp8 and below, else the same"
    parser.add_argument("--second-moment", default="", metavar="DTYPE", help=words)
    words = "what an optimizer keeps of the weights; default fp32"
    parser.add_argument("--weights", choices=kept, default="fp32", help=words)
    words = "what its time is compared with: whether that does more than it has to"
    parser.add_argument("--baseline", default="", metavar="MODULE:FUNCTION", help=words)
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    shared(parser, "--seed", help="for the data; default 0")
    shared(parser, "--threads", "--store")
    parser.add_argument("--junit", type=types.path, metavar="PATH", help="also write it there as JUnit XML")
    shared(parser, "--md", "--explain")
    shared(parser, "--json", help="print all of it as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Audit, tell, and end with the verdict's code."""
    check_outputs(arguments)
    check_files({"--junit": arguments.junit})
    settings = Settings(threads=arguments.threads, seed=arguments.seed)
    facts, found = audit(arguments.target, _signature(arguments), arguments.device, settings, arguments.store, TERMINAL)
    with write_outputs({"--junit": (arguments.junit, as_junit(found))}):
        tell(arguments, partial(page_of, facts, found), partial(as_json, facts, found))
    return _EXITS[found.outcome]


def _signature(arguments: argparse.Namespace) -> Signature | None:
    """What the options say; None where they say nothing, and its decorator has to."""
    given = {name: getattr(arguments, name) for name in ("kind", "precision")}
    how = {name: getattr(arguments, name) for name in _HOW}
    if not any(given.values()):
        if said := [f"--{name.replace('_', '-')}" for name, default in _HOW.items() if how[name] != default]:
            raise UsageError(f"{' and '.join(said)} go with --kind and --precision. Give these, too.")
        return None
    if not all(given.values()) and given["kind"] != AuditKind.MODEL:
        there, lacks = sorted(given, key=lambda name: given[name] is None)
        raise UsageError(f"--{there} was given without --{lacks}. Give both, or declare them with @fp8bench.audited.")
    return signed(arguments.kind, arguments.precision or "", **how)
