"""All that is said of a run: the checklist, and the advice that follows from it."""

from __future__ import annotations

from fp8bench.features.advise import cost_rules, shape_rules, speed_rules
from fp8bench.features.advise.basis import Basis
from fp8bench.features.advise.decide import advice_of, ordered
from fp8bench.features.advise.decision import projections
from fp8bench.features.advise.values import Advised

# In the order of the checklist.
RULES = (*speed_rules.RULES, *shape_rules.RULES, *cost_rules.RULES)


def advised(basis: Basis) -> Advised:
    """Every rule asked of every case that is no reference."""
    asked = (rule.answer(one, basis) for one in basis.besides for rule in RULES)
    answers = tuple(answer for answer in asked if answer is not None)
    return Advised(basis.run.id, ordered((*advice_of(basis, answers), *projections(basis))), answers, basis.least)
