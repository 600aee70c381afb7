"""Auditors of kernels that run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.features.audit.auditor import SUBJECT_BY_KIND, AuditSession
from fp8bench.features.audit.host import KernelHost
from fp8bench.user_code.named import make_signature
from tests.facts import CPU


def make_auditor(
    function: Callable[..., Any],
    precision: str = "fp8",
    kind: str = "product",
    seed: int = 0,
    host: type[KernelHost] = KernelHost,
) -> AuditSession:
    signature = make_signature(kind, precision)
    return AuditSession(SUBJECT_BY_KIND[signature.kind](host(function, signature, CPU), signature, CPU), seed)
