"""Records: the same whichever way they lie, gone with what holds them, and the way to the device."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.formats.codes import torch_codes
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import TENSOR
from fp8bench.formats.scaled import factor
from fp8bench.nn.batches import (
    Bytes,
    CompressedRecords,
    DecodedRecords,
    Destination,
    Records,
    normalised,
    text_records,
)
from fp8bench.protocols import Operand
from tests.counts import for_each

TEXT = bytes(range(32, 127)) * 40


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "some.tokens"
    path.write_bytes(np.frombuffer(TEXT, dtype=np.uint8).astype(np.uint16).tobytes())
    return str(path)


def records(tokens: str, seed: int = 0, size: int = 300) -> Bytes:
    return text_records(tokens, 20, size, np.random.default_rng(seed))


def test_records_are_windows_of_the_text(tokens: str) -> None:
    found = records(tokens)
    assert found.shape == (20, 300) and found.dtype == np.uint8
    assert all(record.tobytes() in TEXT for record in found) and len({record.tobytes() for record in found}) > 10
    assert np.array_equal(found, records(tokens)) and not np.array_equal(found, records(tokens, seed=1))
    assert np.array_equal(records(tokens, size=len(TEXT))[0], np.frombuffer(TEXT, dtype=np.uint8))


def test_a_text_shorter_than_a_record_says_so(tokens: str) -> None:
    with pytest.raises(ValueError, match=f"{len(TEXT)} bytes of text; a record of 5000 needs more"):
        records(tokens, size=5000)


@pytest.mark.parametrize("kind", [CompressedRecords, DecodedRecords])
def test_a_batch_is_the_records_of_its_indices(tokens: str, kind: type[Records]) -> None:
    """In their order, repeated ones too, as fp32 that one may write to."""
    text = records(tokens)
    indices = np.array([7, 0, 19, 7])
    batch = kind(text).batch(indices)  # type: ignore[call-arg]
    assert batch.dtype == torch.float32 and batch.shape == (4, 300)
    assert torch.equal(batch, torch.from_numpy(normalised(text[indices])))


def mappings(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see what is mapped")
def test_the_file_has_no_name_and_ends_with_its_object(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    one = CompressedRecords(records(tokens))
    assert list(folder.iterdir()) == [] and len(mappings(folder)) == 1
    assert one.batch(np.array([3])).shape == (1, 300)
    del one
    gc.collect()
    assert mappings(folder) == []


def test_batches_go_into_the_same_memory() -> None:
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    there = Destination(Operand(first), "cpu")
    (buffer,) = there.buffers
    address = buffer.data_ptr()
    there.take(Operand(first))
    assert torch.equal(there.buffers[0], first) and buffer.data_ptr() != first.data_ptr()
    there.take(Operand(second))
    assert torch.equal(there.buffers[0], second) and there.buffers[0].data_ptr() == address


def test_codes_travel_with_their_scale() -> None:
    x = torch.randn(4, 8)
    scale, inverse = factor(x, E4M3, TENSOR)
    operand = Operand(torch_codes(x, E4M3, scale), inverse)
    there = Destination(operand, "cpu")
    there.take(operand)
    data, scale = there.buffers
    assert data.element_size() == 1 and torch.equal(data.float(), operand.data.float())
    assert operand.scale is not None and torch.equal(scale, operand.scale)


@for_each(("device", "pinned"), [("cpu", 0), ("meta", 1)])
def test_memory_is_pinned_on_the_way_to_another_device(
    device: str, pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (seen.append(tensor), tensor)[1])
    batch = torch.randn(4, 8)
    there = Destination(Operand(batch), device)
    there.take(Operand(batch))
    assert len(seen) == pinned and there.buffers[0].device.type == device
