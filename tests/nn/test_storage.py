"""What can be kept in a precision."""

from __future__ import annotations

import pytest

from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.support import storage_support
from fp8bench.registry import precisions
from tests.facts import CPU, H200


@pytest.mark.parametrize("facts", [CPU, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", precisions.names())
def test_all_but_a_switch_of_products_can_keep_tensors(name: str, facts: DeviceFacts) -> None:
    """TF32 has no tensors; what it lacks is said in a sentence."""
    precision = precisions.get(name)
    support = storage_support(precision, facts, "there is no such buffer")
    if name == "tf32":
        assert support.level is Level.REFUSED
        assert support.reason == (
            "tf32 changes what products read and leaves tensors float32: there is no such buffer, and fp32 is that case"
        )
    else:
        assert support == precision.support(facts)
