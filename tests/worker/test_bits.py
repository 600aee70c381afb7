"""The bits of fixed numbers: the same every time, in any number of threads, and other ones where a bit is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8bench.registry import devices
from fp8bench.worker.bits import bits_of
from tests.runs import CPU


def taken() -> dict[tuple[str, str], tuple[str, ...]]:
    return {(sums.dtype, sums.operation): sums.digests for sums in bits_of(devices.get("cpu"), CPU)}


def test_they_repeat_and_tell_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in float32 sums changes only these; one that flips now and then shows that results do not
    repeat."""
    before = taken()
    assert before == taken() and all(len(digests) == 1 for digests in before.values())
    assert {dtype for dtype, _ in before} >= {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    true, calls = torch.Tensor.sum, iter(range(99))

    def flipped(self: torch.Tensor, *arguments: Any, always: bool = True) -> torch.Tensor:
        found = true(self, *arguments)
        if found.dtype is torch.float32 and (always or next(calls) == 0):
            found.view(torch.int32)[3] ^= 1
        return found

    monkeypatch.setattr(torch.Tensor, "sum", flipped)
    after = taken()
    assert {name for name in before if before[name] != after[name]} == {("float32", "sum")}
    assert len(after["float32", "sum"]) == 1
    monkeypatch.setattr(torch.Tensor, "sum", lambda self, *rest: flipped(self, *rest, always=False))
    assert len(taken()["float32", "sum"]) == 2

    def none(*arguments: Any, **named: Any) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch, "_scaled_mm", none)
    found = taken()
    assert ("float8_e4m3fn", "product") not in found and ("float8_e4m3fn", "cast") in found
