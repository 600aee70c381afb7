"""`fp8bench profile`: a run of the workload `model`, for a maker by name or a live model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8bench.errors import NotSent, UsageError
from fp8bench.measure.handle import claim_process
from fp8bench.measure.limits import Limits
from fp8bench.model import Request, Run
from fp8bench.model.run import PROFILE
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.pipeline import examine, execute, worker_for
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Observer
from fp8bench.user_code import own_words
from fp8bench.user_code.named import split_target
from fp8bench.workloads.model import LIVE, MADE, OPTIMIZERS, Model


def profile_dtypes(dtypes: Sequence[str], reference: str | None) -> dict[str, Any]:
    """Adds the untouched model to the dtypes; it is the reference unless another is given."""
    return {
        "suite": Model.name,
        "dtypes": tuple(dict.fromkeys((UNTOUCHED, *(dtypes or Model.dtypes[1:])))),
        "reference": reference or UNTOUCHED,
    }


def profile_axes(
    target: str, forward: bool, optimizer: str, compiled: bool, skip: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if forward and optimizer != OPTIMIZERS[0]:
        raise UsageError("--forward has no optimizer step, so --optimizer would have no effect. Leave one out.")
    chosen = {
        "make": target,
        "pass": "forward" if forward else "training",
        "optimizer": optimizer,
        "compile": "yes" if compiled else "no",
        "skip": ";".join(skip),
    }
    return tuple((name, (value,)) for name, value in chosen.items() if value)


def function_named(target: str) -> str:
    """Checks that the target names a function; a worker finds out whether it exists."""
    split_target(target)
    return target


def profile(request: Request, store: Path, observer: Observer, command: str, note: str = "") -> Run:
    """Profiles like a suite run, including shares, unless it is quick or the model is compiled, which has none."""
    compiled = ("compile", ("yes",)) in request.axes
    try:
        request = replace(request, shares=request.shares or not (request.quick or compiled))
        return execute(request, store, observer, command, PROFILE, note=note)
    finally:
        MADE.clear()


def coverage_of(maker: str) -> Coverage:
    """Runs a step of the model on a CPU, untimed, and returns its products as fp8 would convert them."""
    request = Request(Model.name, ("fp8",), ("cpu",), UNTOUCHED, axes=(("make", (function_named(maker),)),))
    with claim_process(True), worker_for(request, None) as worker:
        facts = worker.probe()
        plan, limits = make_plan(request, facts, None), Limits()
        examine(plan, facts, worker, limits)
        (planned,) = (planned for planned in plan.groups[0].cases if planned.case.precision == "fp8")
        (device,) = (fact for fact in facts if fact.key == "cpu")
        return worker.within(limits.numbers(planned.work)).coverage(planned.case, device) or Coverage()


def profile_live(parts: tuple[Any, ...], request: Request, store: Path, observer: Observer, command: str) -> Run:
    """Profiles a model at hand, which the request names by its class.

    Workers load it from a file. A model that cannot be sent is measured in this process, and the run notes why.
    """
    name = dict(request.axes)["make"][0]
    try:
        if not request.isolation:
            reason = "as was asked"
        else:
            with tempfile.TemporaryDirectory(prefix="fp8bench-model-") as folder:
                try:
                    file = _file_of(parts, name, Path(folder))
                    return profile(replace(request, imports=(*request.imports, str(file))), store, observer, command)
                except NotSent as error:
                    reason = f"it cannot be sent to another one: {error}"
        LIVE[name] = lambda: parts
        in_process = replace(request, isolation=False, case_timeout=None)
        import torch

        begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(range(torch.cuda.device_count()) if begun else ()):  # the caller's numbers stay
            return profile(in_process, store, observer, command, f"{name} was measured in this process: {reason}")
    finally:
        LIVE.pop(name, None)


# The module that workers import.
_MODULE = """\
from functools import partial

from fp8bench.workloads.model import LIVE, load_sent

LIVE[{name!r}] = partial(load_sent, {file!r})
"""


def _file_of(parts: tuple[Any, ...], name: str, folder: Path) -> Path:
    """Writes the model into a file, and a module that loads it; returns the module."""
    import torch

    module, file = folder / "sent.py", folder / "model.pt"
    try:
        torch.save(parts, file)
    except Exception as error:
        raise NotSent(own_words(error)) from error
    module.write_text(_MODULE.format(name=name, file=str(file)))
    return module
