"""`fp8bench audit`: checks whether a low-precision kernel or a converted model does what it promises.

The kernel runs in a separate process, because it may crash, hang, or modify anything.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench import __version__, units
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import (
    EXIT_BASELINE,
    EXIT_OK,
    EXIT_REGRESSION,
    UsageError,
    WorkerError,
    WorkerFault,
    WorkerHung,
    to_original_error,
)
from fp8bench.features.audit.values import (
    AuditedLayer,
    AuditFinding,
    AuditOutcome,
    AuditReport,
    find_worst_outcome,
)
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.model import Ceilings, DeviceFacts, Level
from fp8bench.model.codec import encode
from fp8bench.model.promises import SIGNATURE_WORDS, AuditedCallableKind, CallablePromise
from fp8bench.model.raw import Settings
from fp8bench.plan.make import find_device
from fp8bench.plan.resolve import read_switches
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.store.ceilings import find_or_measure_ceilings
from fp8bench.user_code.named import make_signature

_EXIT_CODES = {
    AuditOutcome.PASS: EXIT_OK,
    AuditOutcome.FAIL: EXIT_REGRESSION,
    AuditOutcome.CANNOT_TELL: EXIT_BASELINE,
}
# How many failures and layers are shown without --all.
_SHOWN_FAILURES, _SHOWN_LAYERS = 3, 8
# The fields of a signature after kind and precision. Their options are only accepted together with --kind.
_SIGNATURE_OPTIONS = fields(CallablePromise)[2:]
EXAMPLES = (
    "fp8bench audit kernels.py:my_gemm --kind product --precision fp8",
    "fp8bench audit net.py:make --kind model  # a model after conversion",
)
FIRST_OPTIONS = "--kind --precision --takes --device --all --md --explain --json"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Calls a low-precision product, linear layer or attention with inputs that expose mistakes and checks "
        "that the results are what the precision gives; a mistake is named. For a converted model, reports "
        "what runs in low precision and what was left out."
    )
    parser.epilog = "Exit codes: 0 PASS, 1 FAIL, 2 wrong usage, 4 CANNOT TELL."
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="the function to audit, also as file.py:function")
    how: dict[str, dict[str, Any]] = {
        "kind": {"choices": [kind.value for kind in AuditedCallableKind]},
        "precision": {"metavar": "DTYPE"},
        "takes": {"choices": ("values", "codes"), "default": "values"},
        "second": {"choices": ("nk", "kn"), "default": "nk"},
        "multiple": {"type": int, "default": 1, "metavar": "N"},
        "causal": {"action": "store_true"},
    }
    for name, help_words in SIGNATURE_WORDS.items():
        parser.add_argument(f"--{name}", help=help_words, **how[name])
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1; default the first GPU, else cpu")
    add_common_options(parser, "--seed", help="the seed of the random inputs; default 0")
    add_common_options(parser, "--threads", "--store")
    add_common_options(parser, "--all", help="print every finding and layer, as --md and --json do")
    add_common_options(parser, "--md", "--explain")
    add_common_options(parser, "--json", help="print all findings and layers as JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    return answer(arguments, TERMINAL_JOB_OBSERVER).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.jobs.profile import check_function_name  # this import is slow

    settings = Settings(threads=arguments.threads, seed=arguments.seed)
    if arguments.precision is not None:
        # check the name early: an invalid one must not start a worker process
        precisions.find_canonical_name(arguments.precision)
    facts, finished_audit = audit(
        check_function_name(arguments.target),
        _parse_signature(arguments),
        arguments.device,
        settings,
        arguments.store,
        observer,
    )
    document = {"device": encode(facts), "outcome": finished_audit.outcome.value, **encode(finished_audit)}
    page = partial(render_page, facts, finished_audit, arguments.all)
    full_page = partial(render_page, facts, finished_audit)
    return CommandResult(
        finished_audit, page, lambda: document, whole=full_page, code=_EXIT_CODES[finished_audit.outcome]
    )


def _parse_signature(arguments: argparse.Namespace) -> CallablePromise | None:
    kind, precision = arguments.kind, arguments.precision
    options = {field.name: getattr(arguments, field.name) for field in _SIGNATURE_OPTIONS}
    if not kind and not precision:
        chosen_options = [f"--{field.name}" for field in _SIGNATURE_OPTIONS if options[field.name] != field.default]
        if chosen_options:
            raise UsageError(f"{' and '.join(chosen_options)} need --kind and --precision. Give both.")
        return None
    if not kind or (not precision and kind != AuditedCallableKind.MODEL):
        missing_option_text = "--kind was given without --precision" if kind else "--precision was given without --kind"
        raise UsageError(f"{missing_option_text}. Give both, or declare them with @fp8bench.audited.")
    return make_signature(kind, precision or "", **options)


# The module that the judge's process runs.
_TIME_JUDGE_MODULE = "fp8bench.features.audit.times"
# The time limit of an audit in seconds, many times its usual duration.
_AUDIT_TIMEOUT_SECONDS = 600.0
# Formats whose codes torch can store, as a dtype or as two codes per byte.
_TORCH_FORMATS = {E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ}


def audit(
    target: str,
    signature: CallablePromise | None,
    device: str | None,
    settings: Settings,
    store: Path,
    observer: JobObserver,
) -> tuple[DeviceFacts, AuditReport]:
    """Runs the audit, and returns the device and the audit. Without a signature, the one that the decorator declares
    is used. A kernel that is faster than the measured ceilings of the device fails. These ceilings are read from the
    store if they are current.
    """
    target = _make_path_absolute(target)
    with ProcessWorker(settings, module=_TIME_JUDGE_MODULE) as worker:
        devices = worker.probe()
        default_device = next((facts for facts in devices if facts.accelerated), devices[0])
        facts = find_device(device, devices) if device else default_device
        try:
            declared_signature = worker.with_time_limit(START_SECONDS).read_signature(target)  # type: ignore[attr-defined]
        except WorkerFault as fault:
            raise to_original_error(fault) from None
        signature = signature or declared_signature
        if signature is None:
            raise UsageError(
                f"{target} does not declare what it promises. Give --kind and --precision, or declare it with "
                '@fp8bench.audited("product", "fp8").',
                instead=("fp8bench", "audit", target, "--kind", "product", "--precision", "fp8"),
            )
        signature = resolve_signature(signature, facts)
        ceilings = (
            None
            if signature.kind is AuditedCallableKind.MODEL
            else _load_or_measure_ceilings(worker, facts, settings.threads, store)
        )
        with observer.counting() as tell:
            tell(0, 1, "kernels", target)
            try:
                return facts, worker.with_time_limit(_AUDIT_TIMEOUT_SECONDS).audit(target, signature, facts, ceilings)  # type: ignore[attr-defined]
            except WorkerError as error:
                # A refused request (such as a UsageError) is raised to the user. Any other error becomes a finding.
                cause = to_original_error(error) if isinstance(error, WorkerFault) else error
                if not isinstance(cause, WorkerError):
                    raise cause from None
                has_raised = isinstance(cause, WorkerFault)
                failure_code = "raises" if has_raised else "hangs" if isinstance(cause, WorkerHung) else "crashes"
                finding = AuditFinding("numbers", AuditOutcome.CANNOT_TELL, failure_code, str(cause))
                return facts, AuditReport(target, signature, (finding,))


def _make_path_absolute(target: str) -> str:
    """Returns the target with an absolute path, if it has a path. The worker process runs in a different working
    directory.
    """
    place, _, name = target.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target


def _load_or_measure_ceilings(worker: Worker, facts: DeviceFacts, threads: int, store: Path) -> Ceilings | None:
    """Returns the ceilings of the device from the store. If the stored ones are outdated, measures them now. Returns
    None if measuring is not allowed or fails.
    """
    measure = partial(measure_ceilings, worker, facts)
    may_measure = read_switches(os.environ).ceilings
    try:
        if not may_measure and not store.is_dir():
            return None
        environment = gather(worker.software(), __version__, threads)
        return find_or_measure_ceilings(store, environment, facts, measure if may_measure else None)
    except WorkerError:
        # The audit goes on without ceilings, in a new process.
        worker.restart()
        return None


def resolve_signature(signature: CallablePromise, facts: DeviceFacts) -> CallablePromise:
    """Returns the signature with the canonical name of its precision. Raises UsageError if that precision cannot be
    audited."""
    if signature.kind is AuditedCallableKind.MODEL and not signature.precision:
        return signature
    name = precisions.find_canonical_name(signature.precision)
    precision = precisions.get(name)
    if precision.support(facts).level is Level.REFUSED:
        raise UsageError(f"{facts.key} cannot run {name}: {precision.support(facts).reason}")
    if precision.tensor_scale is TensorScale.DELAYED:
        raise UsageError(
            f"{name} takes its scales from earlier casts, which a single call cannot show. Audit it as fp8."
        )
    recipe = getattr(precision, "recipe", None)
    if signature.takes == "codes" and (
        recipe is None or not {treatment.fmt for treatment in recipe.treatments[:2]} <= _TORCH_FORMATS
    ):
        raise UsageError(f"torch has no dtype for the codes of {name}, so its products take values. Omit --takes.")
    return replace(signature, precision=name)


_OUTCOME_TONES = {AuditOutcome.PASS: Tone.GOOD, AuditOutcome.FAIL: Tone.BAD, AuditOutcome.CANNOT_TELL: Tone.DOUBT}
_LEGEND = (
    "PASS: every result equals the promised casts and products for some order of summation, or has their error",
    "FAIL: a result does not; the code names the mistake that explains it, or what is wrong",
    "CANNOT TELL: the callable raised, crashed or did not answer on an input that it must accept",
    "error: the distance of results from the exact product of the inputs; expected: the emulation's distance",
)


def render_page(facts: DeviceFacts, audit: AuditReport, everything: bool = True) -> Page:
    signature = audit.signature
    precision = f" in {signature.precision}" * bool(signature.precision)
    title = f"audit of {audit.target}: {signature.kind.value}{precision} on {facts.key} ({facts.name})"
    failures = [finding for finding in audit.findings if finding.outcome is not AuditOutcome.PASS]
    # The verdict quotes the first finding that has the outcome of the whole audit.
    verdict_finding = next((finding for finding in failures if finding.outcome is audit.outcome), None)
    parts = [Part("verdict", "", tuple(_describe_verdict(audit, verdict_finding)))]
    shown_findings = (
        [finding for finding in audit.findings if finding.code] if everything else failures[:_SHOWN_FAILURES]
    )
    if shown_findings:
        rows = [replace(finding, why="") if finding is verdict_finding else finding for finding in shown_findings]
        parts.append(Part("found", "what was found", (table("found", "", _FINDING_COLUMNS, rows),)))
    if audit.layers and (everything or len(audit.layers) <= _SHOWN_LAYERS):
        parts.append(Part("layers", "layers", (table("layers", "", _LAYER_COLUMNS, audit.layers),)))
    return Page(title, "", tuple(parts), _LEGEND)


def _describe_verdict(audit: AuditReport, verdict_finding: AuditFinding | None) -> Iterator[Text]:
    outcome = audit.outcome
    findings_by_check = together((finding.check, finding) for finding in audit.findings)
    coverage_text = f"{len(findings_by_check)} checks found the results that {audit.signature.precision} gives"
    if audit.layers:
        flops = sum(layer.flops for layer in audit.layers)
        flops_share_text = f", {audit.low_flops / flops:.0%} of the FLOPs of their products" if flops else ""
        coverage_text = (
            f"{sum(layer.low for layer in audit.layers)} of {len(audit.layers)} layers converted{flops_share_text}"
        )
    reason = f"{verdict_finding.code}: {verdict_finding.why}" if verdict_finding else coverage_text
    yield Text(f"{outcome.value}: {reason}", _OUTCOME_TONES[outcome])
    if verdict_finding and audit.layers:
        yield Text(coverage_text)
    yield Text(f"{units.whole(audit.tried)} results in {units.seconds(audit.seconds)}")
    if names := [
        name for name, findings in findings_by_check.items() if find_worst_outcome(findings) is AuditOutcome.PASS
    ]:
        yield Text(f"right: {', '.join(names)}")
    if audit.not_run:
        yield Text(f"not run because of this failure: {', '.join(audit.not_run)}")


def _format_error_percent(error: float) -> str:
    return f"{100 * error:.3g}%"


_FINDING_COLUMNS: tuple[Col[AuditFinding], ...] = (
    Col("check", lambda finding: finding.check),
    Col("code", lambda finding: finding.code),
    Col("input", lambda finding: finding.input or units.NONE),
    Col("error", lambda finding: finding.error, True, _format_error_percent),
    Col("expected", lambda finding: finding.expected, True, _format_error_percent),
    Col("why", lambda finding: finding.why, below=True),
)
_LAYER_COLUMNS: tuple[Col[AuditedLayer], ...] = (
    Col("layer", lambda layer: layer.name),
    Col("is", lambda layer: layer.what),
    Col("weight", lambda layer: "x".join(map(str, layer.weight))),
    Col("runs as", lambda layer: layer.runs or (units.NONE if layer.low else "not converted")),
    Col("why not converted", lambda layer: layer.reason, below=True),
)
