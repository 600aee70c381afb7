"""One kernel under audit, in a process of its own: it may crash, hang, or change whatever it likes."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench import __version__
from fp8bench.errors import UsageError, WorkerError, WorkerFault, WorkerHung, as_usage
from fp8bench.features.audit.bench import MODULE
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, FlatMoments
from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.ceilings import SECONDS, measures_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.model import Ceilings, DeviceFacts, Level
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.model.raw import Settings
from fp8bench.plan.make import device_named
from fp8bench.protocols import TensorScale
from fp8bench.registry import precisions
from fp8bench.store.ceilings import ceilings_of

# Many times what one takes.
_LIMIT = 600.0
# Formats whose codes are a dtype of torch's, or two of them a byte.
_IN_TORCH = {E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ}
# Elements of a block of moments.
_BLOCKS = 16, 4096


def audit(
    target: str, signature: Signature | None, device: str | None, settings: Settings, store: Path, observer: JobObserver
) -> tuple[DeviceFacts, Audit]:
    """The device it ran on, and what was found. Without a signature its decorator's counts.

    Nothing may be faster than the device's ceilings: those of the store, or a quick look's.
    """
    target = _absolute(target)
    with ProcessWorker(settings, module=MODULE) as worker:
        known = worker.probe()
        facts = device_named(device, known) if device else next((one for one in known if one.accelerated), known[0])
        try:
            declared = worker.within(START_SECONDS).declared(target)  # type: ignore[attr-defined]
        except WorkerFault as fault:
            raise as_usage(fault) from None
        signature = signature or declared
        if signature is None:
            raise UsageError(
                f"{target} says nowhere what it promises. Give --kind and --precision, or declare it with "
                '@fp8bench.audited("product", "fp8").'
            )
        signature = replace(sound(signature, facts), baseline=_absolute(signature.baseline))
        ceilings = None if signature.kind is AuditKind.MODEL else _ceilings(worker, facts, settings.threads, store)
        with observer.counting() as tell:
            tell(0, 1, "kernels", target)
            try:
                return facts, worker.within(_LIMIT).audit(target, signature, facts, ceilings)  # type: ignore[attr-defined]
            except WorkerFault as fault:
                raise as_usage(fault) from None
            except WorkerError as error:
                code = "hangs" if isinstance(error, WorkerHung) else "crashes"
                finding = AuditFinding("numbers", AuditOutcome.CANNOT_TELL, code, str(error))
                return facts, Audit(target, signature, (finding,))


def _absolute(target: str) -> str:
    """The worker has another folder."""
    place, _, name = target.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target


def _ceilings(worker: Worker, facts: DeviceFacts, threads: int, store: Path) -> Ceilings | None:
    """Those that are kept, else what a quick look finds now, which is kept where there is a store; None where nothing
    is to be measured, or it cannot be."""
    measured = partial(worker.within(START_SECONDS).ceilings, facts, SECONDS)
    wanted = measures_ceilings(False, os.environ)
    try:
        if not store.is_dir():
            return measured().times(1 if facts.accelerated else threads) if wanted else None
        environment = gather(worker.software(), __version__, threads)
        known = ceilings_of(store, environment, facts, measured if wanted else None)
    except WorkerError:
        worker.restart()
        return None
    return known if known is None or facts.accelerated or known.whole else known.times(threads)


def sound(signature: Signature, facts: DeviceFacts) -> Signature:
    """With the precision's name in full; UsageError for one that promises nothing that could be held against it."""
    if signature.kind is AuditKind.OPTIMIZER:
        moments = signature.precision, signature.second_moment
        first, second = (one if one in ("", "same") else _moments(one, facts) for one in moments)
        return replace(signature, precision=first, second_moment=second)
    if signature.kind is AuditKind.MODEL and not signature.precision:
        return signature
    name = _known(signature.precision, facts)
    recipe = getattr(precisions.get(name), "recipe", None)
    if signature.takes == "codes" and (recipe is None or not {one.fmt for one in recipe.treatments[:2]} <= _IN_TORCH):
        raise UsageError(f"torch has no dtype for {name}'s codes: its products take values. Leave --takes out.")
    if signature.kind is AuditKind.CAST and name == "fp32":
        raise UsageError("nothing is cast in fp32: give the precision that it casts to.")
    return replace(signature, precision=name)


def _known(word: str, facts: DeviceFacts) -> str:
    """A precision's name in full; UsageError for one that the device has not, or that single calls do not show."""
    name = precisions.canonical(word)
    precision = precisions.get(name)
    if precision.support(facts).level is Level.REFUSED:
        raise UsageError(f"{facts.key} does no {name}: {precision.support(facts).reason}")
    if precision.tensor_scale is TensorScale.DELAYED:
        raise UsageError(f"{name} scales by what was cast before, which one call cannot show: audit it as fp8.")
    return name


def _moments(word: str, facts: DeviceFacts) -> str:
    """What moments are kept as."""
    flat = FlatMoments.of(word)
    if flat is None:
        return _known(word, facts)
    if not _BLOCKS[0] <= flat.block <= _BLOCKS[1]:
        raise UsageError(f"{word} has blocks of {flat.block}. Give one of {_BLOCKS[0]} to {_BLOCKS[1]} elements.")
    return word
