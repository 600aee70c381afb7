"""Fixtures of tests of layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.nn.grouped_kernel import GroupedKernel, exact, exact_grouped_mm, exact_mm


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> GroupedKernel:
    result = GroupedKernel()
    monkeypatch.setattr(torch.ops.aten._scaled_grouped_mm, "default", result)
    return result


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products whose bits do not depend on the CPU, on padding, or on alignment."""
    monkeypatch.setattr("fp8bench.nn.arithmetics.multiply_in_float32", exact)
    monkeypatch.setattr(torch, "mm", exact_mm)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", exact_grouped_mm)
