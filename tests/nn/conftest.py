"""What tests of layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.nn.grouped_kernel import GroupedKernel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker; tensors this small only wait for each other on more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> GroupedKernel:
    """Grouped products of FP8 are multiplied as a GPU would."""
    found = GroupedKernel()
    monkeypatch.setattr(torch.ops.aten._scaled_grouped_mm, "default", found)
    return found
