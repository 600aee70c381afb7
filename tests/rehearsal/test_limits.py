"""Products that measure ceilings follow GPU rules: accepted, one launch per call, no waiting."""

from __future__ import annotations

import pytest

from fp8bench.model import DeviceFacts, Level, Limit
from fp8bench.registry import precisions
from fp8bench.worker.ceilings import PRECISION_NAMES, list_shapes, make_call
from tests.facts import B200, H200, MI300X
from tests.rehearsal.stage import Stage


@pytest.mark.parametrize("facts", [H200, B200, MI300X], ids=lambda facts: str(facts.name))
def test_a_product_is_one_launch_of_its_precision(facts: DeviceFacts, stage: Stage) -> None:
    for name in (one for one in PRECISION_NAMES if precisions.get(one).support(facts).level is Level.NATIVE):
        for shape in list_shapes(Limit.PRODUCT, facts):
            with precisions.get(name).scope():
                call = make_call(Limit.PRODUCT, shape, facts, precisions.get(name).arithmetic(facts), 1)
                with stage.ledger(facts) as ledger:
                    result = call()
            assert tuple(result.shape) == shape[:2] and ledger.done.launches == 1, (name, shape)


@pytest.mark.parametrize("limit", [one for one in Limit if one is not Limit.PRODUCT])
def test_all_else_is_one_launch_too(limit: Limit, stage: Stage) -> None:
    arithmetic = precisions.get("fp32").arithmetic(H200)
    for shape in list_shapes(limit, H200):
        call = make_call(limit, shape, H200, arithmetic, 1)
        with stage.ledger(H200) as ledger:
            call()
        assert ledger.done.launches == 1, shape
