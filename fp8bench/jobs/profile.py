"""Runs the suite `model` for `fp8bench profile`, with a user's function that makes a model, or with a live model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8bench.errors import ModelNotSendable, UsageError
from fp8bench.measure.handle import register_process_run
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.model import Request, Run
from fp8bench.model.run import PROFILE_ORIGIN
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.pipeline import examine, execute, open_worker
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Observer
from fp8bench.user_code import own_words
from fp8bench.user_code.named import split_target
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS, OPTIMIZERS, Model


def profile_dtypes(dtypes: Sequence[str], reference: str | None) -> dict[str, Any]:
    """Returns those fields of a request that define what to compare: the suite, the dtypes and the reference. The
    untouched model is the first dtype, and by default the reference.
    """
    return {
        "suite": Model.name,
        "dtypes": tuple(dict.fromkeys((UNTOUCHED, *(dtypes or Model.dtypes[1:])))),
        "reference": reference or UNTOUCHED,
    }


def make_profile_axes(
    target: str, forward: bool, optimizer: str, compiled: bool, skip: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if forward and optimizer != OPTIMIZERS[0]:
        raise UsageError("--forward has no optimizer step, so --optimizer would have no effect. Leave one out.")
    value_by_axis = {
        "make": target,
        "pass": "forward" if forward else "training",
        "optimizer": optimizer,
        "compile": "yes" if compiled else "no",
        "skip": ";".join(skip),
    }
    return tuple((name, (value,)) for name, value in value_by_axis.items() if value)


def check_function_name(target: str) -> str:
    """Returns the target if it has the form of a function's name. Only a worker finds out whether the function
    exists.
    """
    split_target(target)
    return target


def profile(request: Request, store: Path, observer: Observer, command: str, note: str = "") -> Run:
    """Profiles a model as a run of the suite `model`. Unless the run is quick or the model is compiled, also measures
    how much of a step's time each part of the model takes.
    """
    is_compiled = ("compile", ("yes",)) in request.axes
    try:
        request = replace(request, shares=request.shares or not (request.quick or is_compiled))
        return execute(request, store, observer, command, PROFILE_ORIGIN, note=note)
    finally:
        LOADED_MODELS.clear()


def find_model_coverage(maker: str) -> Coverage:
    """Runs one untimed step of the model on a CPU, and returns which of its products would be converted to fp8."""
    request = Request(Model.name, ("fp8",), ("cpu",), UNTOUCHED, axes=(("make", (check_function_name(maker),)),))
    with register_process_run(True), open_worker(request, None) as worker:
        facts = worker.probe()
        plan = make_plan(request, facts, None)
        limits = RequestTimeLimits()
        examine(plan, facts, worker, limits)
        planned_case = next(
            planned_case for planned_case in plan.groups[0].cases if planned_case.case.precision == "fp8"
        )
        device = next(fact for fact in facts if fact.key == "cpu")
        return (
            worker.with_time_limit(limits.for_untimed_pass(planned_case.work)).coverage(planned_case.case, device)
            or Coverage()
        )


def profile_live_model(parts: tuple[Any, ...], request: Request, store: Path, observer: Observer, command: str) -> Run:
    """Profiles a live model. The request contains only the name of its class.

    Workers load the model from a file. A model that cannot be pickled is measured in this process, and a note in the
    run explains why.
    """
    name = dict(request.axes)["make"][0]
    try:
        if not request.isolation:
            reason = "isolation=False"
        else:
            with tempfile.TemporaryDirectory(prefix="fp8bench-model-") as folder:
                try:
                    file = _write_model(parts, name, Path(folder))
                    return profile(replace(request, imports=(*request.imports, str(file))), store, observer, command)
                except ModelNotSendable as error:
                    reason = f"it cannot be sent to a worker process: {error}"
        MODEL_MAKERS_IN_PROCESS[name] = lambda: parts
        in_process_request = replace(request, isolation=False, case_timeout=None)
        import torch

        uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(
            range(torch.cuda.device_count()) if uses_cuda else ()
        ):  # do not change the caller's random state
            return profile(
                in_process_request, store, observer, command, f"{name} was measured in this process: {reason}"
            )
    finally:
        MODEL_MAKERS_IN_PROCESS.pop(name, None)


# The source code of a module that workers import in order to load the model.
_MODEL_LOADER_SOURCE = """\
from functools import partial

from fp8bench.workloads.model import MODEL_MAKERS_IN_PROCESS, load_transferred_model

MODEL_MAKERS_IN_PROCESS[{name!r}] = partial(load_transferred_model, {file!r})
"""


def _write_model(parts: tuple[Any, ...], name: str, folder: Path) -> Path:
    """Writes the model to a file, and a module that loads it. Returns the path of the module."""
    import torch

    module = folder / "sent.py"
    file = folder / "model.pt"
    try:
        torch.save(parts, file)
    except Exception as error:
        raise ModelNotSendable(own_words(error)) from error
    module.write_text(_MODEL_LOADER_SOURCE.format(name=name, file=str(file)))
    return module
