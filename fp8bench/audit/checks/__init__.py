"""The checks of an audit, one class a file, in the order in which they run."""

from fp8bench.audit.auditor import Check
from fp8bench.audit.checks.many_steps import ManySteps
from fp8bench.audit.checks.memory import Memory
from fp8bench.audit.checks.numbers import Numbers
from fp8bench.audit.checks.odd_shapes import OddShapes
from fp8bench.audit.checks.relations import Relations
from fp8bench.audit.checks.special_values import SpecialValues
from fp8bench.audit.checks.speed import Speed
from fp8bench.audit.checks.work import Work

CHECKS: tuple[type[Check], ...] = (Numbers, ManySteps, Relations, Memory, SpecialValues, OddShapes, Work, Speed)
