"""Who multiplies in a case: the backend that a request, or a dtype itself, asks for."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.errors import UnknownName
from fp8bench.model import DeviceFacts, Level, Scalar, Support
from fp8bench.protocols import Precision, Workload
from fp8bench.registry import AUTO, backends, precisions, workloads


def multiplied_by(word: str, backend: str) -> str:
    """The mode of a dtype, by that backend if it takes one and names none itself."""
    if backend not in (AUTO, *backends.names()):
        raise UnknownName("backend", backend, [AUTO, *backends.names()])
    precision = precisions.get(word)
    if backend == AUTO or not precision.takes_backend or "backend=" in word:
        return precision.mode
    return precision.by(backends.get(backend)).mode


def layered_support(
    workload: Workload, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts, kind: str = ""
) -> Support:
    """How a device does a workload, or its layers of a kind, in a precision; a backend of whole layers needs some."""
    if precision.whole_layers and not workload.linear_layers:
        assert precision.backend is not None
        having = ", ".join(name for name in workloads.names() if workloads.get(name).linear_layers)
        why = f"{precision.backend.name} multiplies in layers of its own, and suite {workload.name} has none for it"
        return Support(Level.REFUSED, f"{why}: choose {having}")
    refuses = precision.backend.refuses if precision.backend else {}
    for (axis, value), why in refuses.items():
        if params.get(axis) == value:
            return Support(Level.REFUSED, why)
    if kind:
        return workload.layer_support(kind, params, precision, facts)
    return workload.support(params, precision, facts)


def who_multiplies(mode: str, level: Level, facts: DeviceFacts) -> str:
    """The backend of a case with its version: 'torchao 0.18.0', 'emulated (torch 2.13.0)'; '' if it does not run."""
    if level is Level.REFUSED:
        return ""
    chosen = precisions.get(mode).backend
    backend = chosen or backends.get("torch" if level is Level.NATIVE else "emulated")
    version = f"{backend.package} {facts.version_of(backend.package)}"
    return version if backend.name == backend.package else f"{backend.name} ({version})"
