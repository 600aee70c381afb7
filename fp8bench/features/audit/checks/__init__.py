"""The checks of an audit, one class a file, in the order in which they run."""

from fp8bench.features.audit.auditor import Check
from fp8bench.features.audit.checks.memory import ManySteps, Memory
from fp8bench.features.audit.checks.numbers import Numbers, OddShapes, Relations, SpecialValues
from fp8bench.features.audit.checks.speed import Speed, Work

CHECKS: tuple[type[Check], ...] = (Numbers, ManySteps, Relations, Memory, SpecialValues, OddShapes, Work, Speed)
