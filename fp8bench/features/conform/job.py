"""Whether a device's own casts and products give what their emulation gives, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.errors import UsageError, WorkerError
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.promises import Conformity, ModeConformity
from fp8bench.model.raw import Settings
from fp8bench.plan.make import device_named
from fp8bench.registry import precisions


def conformity(
    dtypes: Sequence[str], device: str | None, seed: int, imports: tuple[str, ...], observer: JobObserver
) -> tuple[DeviceFacts, list[ModeConformity]]:
    """The device, and what was found of each precision; by default of all that it does, emulated ones included."""
    named = list(dict.fromkeys(precisions.canonical(word) for word in dtypes))
    with ProcessWorker(Settings(seed=seed, imports=imports)) as worker:
        known = worker.probe()
        facts = device_named(device, known) if device else next((one for one in known if one.accelerated), known[0])
        supports = {name: precisions.get(name).support(facts) for name in named or precisions.names()}
        able = {name: support for name, support in supports.items() if support.level is not Level.REFUSED}
        if not able:
            reasons = "; ".join(f"{name}: {support.reason}" for name, support in supports.items())
            raise UsageError(f"{facts.key} does none of these ({reasons}). Give other --dtypes, or another --device.")
        found: list[ModeConformity] = []
        with observer.counting() as tell:
            for name, support in able.items():
                tell(len(found), len(able), "precisions", name)
                mode = precisions.get(name).mode
                try:
                    conformed = worker.within(COMPILE_SECONDS).conform(name, facts)
                except WorkerError as error:  # another precision may do all the same
                    conformed = (Conformity(mode, "all of it", "", why=str(error)),)
                    worker.restart()
                found.append(ModeConformity(mode, support, conformed))
    return facts, found
