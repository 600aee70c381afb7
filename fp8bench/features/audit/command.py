"""`fp8bench audit`: whether a low-precision kernel or converted model does what it promises.

The kernel runs in a separate process: it may crash, hang, or modify anything.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench import __version__, units
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import (
    EXIT_BASELINE,
    EXIT_OK,
    EXIT_REGRESSION,
    UsageError,
    WorkerError,
    WorkerFault,
    WorkerHung,
    as_usage,
)
from fp8bench.features.audit.values import (
    Audit,
    AuditedLayer,
    AuditFinding,
    AuditOutcome,
    worst,
)
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.model import Ceilings, DeviceFacts, Level
from fp8bench.model.codec import encode
from fp8bench.model.promises import SIGNATURE_WORDS, AuditKind, Signature
from fp8bench.model.raw import Settings
from fp8bench.plan.make import device_named
from fp8bench.plan.resolve import switches_of
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.store.ceilings import current_ceilings
from fp8bench.user_code.named import signed

_EXITS = {
    AuditOutcome.PASS: EXIT_OK,
    AuditOutcome.FAIL: EXIT_REGRESSION,
    AuditOutcome.CANNOT_TELL: EXIT_BASELINE,
}
# At most this many failures, and layers, are shown without --all.
_SHOWN, _LISTED = 3, 8
# The fields of a signature besides kind and precision.
_HOW = fields(Signature)[2:]
EXAMPLES = (
    "fp8bench audit kernels.py:my_gemm --kind product --precision fp8",
    "fp8bench audit net.py:make --kind model  # what a converter made of a model",
)
FIRST_OPTIONS = "--kind --precision --takes --device --all --md --explain --json"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Calls a low-precision product, linear layer or attention with inputs that expose mistakes, and "
        "checks that its results are what its precision gives; if not, it names the mistake. Of a converted "
        "model it reports what runs in low precision and what was left out."
    )
    parser.epilog = "Exit codes: 0 PASS, 1 FAIL, 2 wrong usage, 4 CANNOT TELL."
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="the callable, also as file.py:function")
    how: dict[str, dict[str, Any]] = {
        "kind": {"choices": [kind.value for kind in AuditKind]},
        "precision": {"metavar": "DTYPE"},
        "takes": {"choices": ("values", "codes"), "default": "values"},
        "second": {"choices": ("nk", "kn"), "default": "nk"},
        "multiple": {"type": int, "default": 1, "metavar": "N"},
        "causal": {"action": "store_true"},
    }
    for name, words in SIGNATURE_WORDS.items():
        parser.add_argument(f"--{name}", help=words, **how[name])
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common(parser, "--seed", help="for the data; default 0")
    add_common(parser, "--threads", "--store")
    add_common(parser, "--all", help="print every finding and layer, as --md and --json do")
    add_common(parser, "--md", "--explain")
    add_common(parser, "--json", help="print all of it as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    return answer(arguments, TERMINAL).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.jobs.profile import function_named  # heavy

    settings = Settings(threads=arguments.threads, seed=arguments.seed)
    if arguments.precision is not None:
        precisions.canonical(arguments.precision)  # here, so that an invalid word starts no worker
    facts, done = audit(
        function_named(arguments.target), _signature(arguments), arguments.device, settings, arguments.store, observer
    )
    document = {"device": encode(facts), "outcome": done.outcome.value, **encode(done)}
    page, full_page = partial(page_of, facts, done, arguments.all), partial(page_of, facts, done)
    return CommandResult(done, page, lambda: document, whole=full_page, code=_EXITS[done.outcome])


def _signature(arguments: argparse.Namespace) -> Signature | None:
    named = {name: getattr(arguments, name) for name in ("kind", "precision")}
    how = {field.name: getattr(arguments, field.name) for field in _HOW}
    if not any(named.values()):
        if options := [f"--{field.name.replace('_', '-')}" for field in _HOW if how[field.name] != field.default]:
            raise UsageError(f"{' and '.join(options)} go with --kind and --precision. Give these, too.")
        return None
    if not all(named.values()) and named["kind"] != AuditKind.MODEL:
        present, lacks = sorted(named, key=lambda name: named[name] is None)
        raise UsageError(f"--{present} was given without --{lacks}. Give both, or declare them with @fp8bench.audited.")
    return signed(arguments.kind, arguments.precision or "", **how)


# The module that the worker runs.
_MODULE = "fp8bench.features.audit.times"
# Seconds for a whole audit: many times its usual duration.
_LIMIT = 600.0
# Formats whose codes torch can hold, as a dtype or as two per byte.
_IN_TORCH = {E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ}


def audit(
    target: str, signature: Signature | None, device: str | None, settings: Settings, store: Path, observer: JobObserver
) -> tuple[DeviceFacts, Audit]:
    """Returns the device used, and the audit. Without a signature, the decorator's is used.

    Nothing may be faster than the device's ceilings: those of the store, if they are current.
    """
    target = _absolute(target)
    with ProcessWorker(settings, module=_MODULE) as worker:
        devices = worker.probe()
        first = next((facts for facts in devices if facts.accelerated), devices[0])
        facts = device_named(device, devices) if device else first
        try:
            declared = worker.within(START_SECONDS).read_signature(target)  # type: ignore[attr-defined]
        except WorkerFault as fault:
            raise as_usage(fault) from None
        signature = signature or declared
        if signature is None:
            raise UsageError(
                f"{target} does not declare what it promises. Give --kind and --precision, or declare it with "
                '@fp8bench.audited("product", "fp8").',
                instead=("fp8bench", "audit", target, "--kind", "product", "--precision", "fp8"),
            )
        signature = sound(signature, facts)
        ceilings = None if signature.kind is AuditKind.MODEL else _ceilings(worker, facts, settings.threads, store)
        with observer.counting() as tell:
            tell(0, 1, "kernels", target)
            try:
                return facts, worker.within(_LIMIT).audit(target, signature, facts, ceilings)  # type: ignore[attr-defined]
            except WorkerError as error:
                stopped = as_usage(error) if isinstance(error, WorkerFault) else error
                if not isinstance(stopped, WorkerError):
                    raise stopped from None
                raised = isinstance(stopped, WorkerFault)
                code = "raises" if raised else "hangs" if isinstance(stopped, WorkerHung) else "crashes"
                finding = AuditFinding("numbers", AuditOutcome.CANNOT_TELL, code, str(stopped))
                return facts, Audit(target, signature, (finding,))


def _absolute(target: str) -> str:
    """Makes a path absolute: the worker runs in a different working directory."""
    place, _, name = target.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target


def _ceilings(worker: Worker, facts: DeviceFacts, threads: int, store: Path) -> Ceilings | None:
    """Returns current ceilings, measured now if necessary; None if measuring is not allowed, or fails."""
    measured = partial(measure_ceilings, worker, facts)
    may_measure = switches_of(os.environ).ceilings
    try:
        if not may_measure and not store.is_dir():
            return None
        environment = gather(worker.software(), __version__, threads)
        return current_ceilings(store, environment, facts, measured if may_measure else None)
    except WorkerError:
        worker.restart()
        return None


def sound(signature: Signature, facts: DeviceFacts) -> Signature:
    """Returns the signature with the precision's full name; raises UsageError if nothing can be audited."""
    if signature.kind is AuditKind.MODEL and not signature.precision:
        return signature
    name = precisions.canonical(signature.precision)
    precision = precisions.get(name)
    if precision.support(facts).level is Level.REFUSED:
        raise UsageError(f"{facts.key} does no {name}: {precision.support(facts).reason}")
    if precision.tensor_scale is TensorScale.DELAYED:
        raise UsageError(f"{name} scales by what was cast before, which one call cannot show: audit it as fp8.")
    recipe = getattr(precision, "recipe", None)
    if signature.takes == "codes" and (
        recipe is None or not {treatment.fmt for treatment in recipe.treatments[:2]} <= _IN_TORCH
    ):
        raise UsageError(f"torch has no dtype for {name}'s codes: its products take values. Leave --takes out.")
    return replace(signature, precision=name)


_TONES = {AuditOutcome.PASS: Tone.GOOD, AuditOutcome.FAIL: Tone.BAD, AuditOutcome.CANNOT_TELL: Tone.DOUBT}
_LEGEND = (
    "PASS: every result is what the promised casts and products give, up to the order of sums, or has their error",
    "FAIL: it is not; the code says which known mistake explains all of it, or what is wrong",
    "CANNOT TELL: it raised, crashed or did not answer where it should have",
    "error: how far results are from the exact product of what went in; expected: how far the emulation is",
)


def _by_check(audit: Audit) -> dict[str, list[AuditFinding]]:
    return together((finding.check, finding) for finding in audit.findings)


def page_of(facts: DeviceFacts, audit: Audit, everything: bool = True) -> Page:
    signature = audit.signature
    precision = f" in {signature.precision}" * bool(signature.precision)
    title = f"audit of {audit.target}: {signature.kind.value}{precision} on {facts.key} ({facts.name})"
    failed = [finding for finding in audit.findings if finding.outcome is not AuditOutcome.PASS]
    shown = [finding for finding in audit.findings if finding.code] if everything else failed[:_SHOWN]
    tables: list[tuple[str, str, Sequence[Col[Any]], Sequence[Any]]] = [
        ("found", "what was found", _FINDINGS, shown),
        ("layers", "layers", _LAYERS, audit.layers if everything or len(audit.layers) <= _LISTED else ()),
    ]
    parts = (Part(name, words, (table(name, "", cols, rows),)) for name, words, cols, rows in tables if rows)
    verdict = Part("verdict", "", tuple(_verdict(audit, failed)))
    return Page(title, "", (verdict, *parts), _LEGEND)


def _verdict(audit: Audit, failed: Sequence[AuditFinding]) -> Iterator[Text]:
    outcome, checks = audit.outcome, _by_check(audit)
    reason = next((f"{finding.code}: {finding.why}" for finding in failed if finding.outcome is outcome), "")
    low, flops = sum(layer.low for layer in audit.layers), sum(layer.flops for layer in audit.layers)
    share = f", {audit.low_flops / flops:.0%} of the FLOPs of their products" if flops else ""
    right = f"it gives what {audit.signature.precision} gives, by {len(checks)} checks"
    covered = f"{low} of {len(audit.layers)} layers converted{share}" if audit.layers else right
    yield Text(f"{outcome.value}: {reason or covered}", _TONES[outcome])
    if failed and audit.layers:
        yield Text(covered)
    yield Text(f"{units.whole(audit.tried)} results in {units.seconds(audit.seconds)}")
    if names := [name for name, findings in checks.items() if worst(findings) is AuditOutcome.PASS]:
        yield Text(f"right: {', '.join(names)}")


def _percent(error: float) -> str:
    return f"{100 * error:.3g}%"


_FINDINGS: tuple[Col[AuditFinding], ...] = (
    Col("check", lambda finding: finding.check),
    Col("code", lambda finding: finding.code),
    Col("smallest input", lambda finding: finding.input or units.NONE),
    Col("error", lambda finding: finding.error, True, _percent),
    Col("expected", lambda finding: finding.expected, True, _percent),
    Col("why", lambda finding: finding.why, below=True),
)
_LAYERS: tuple[Col[AuditedLayer], ...] = (
    Col("layer", lambda layer: layer.name),
    Col("is", lambda layer: layer.what),
    Col("weight", lambda layer: "x".join(map(str, layer.weight))),
    Col("runs as", lambda layer: layer.runs or (units.NONE if layer.low else "not converted")),
    Col("why not converted", lambda layer: layer.reason, below=True),
)
