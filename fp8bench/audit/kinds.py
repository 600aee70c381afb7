"""The kinds of callables that can be audited."""

from __future__ import annotations

from fp8bench.audit.attention import Attention
from fp8bench.audit.optimizer import Optimizer
from fp8bench.audit.subjects import Cast, Linear, Product, Subject
from fp8bench.model.audit import AuditKind

SUBJECTS: dict[AuditKind, type[Subject]] = {one.kind: one for one in (Product, Cast, Linear, Attention, Optimizer)}
