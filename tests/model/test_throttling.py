"""The bits of the mask, against pynvml's own."""

from __future__ import annotations

import pynvml
import pytest

from fp8bench.model.consumed import BITS, reasons_in


def test_every_bit_that_pynvml_knows_has_a_name() -> None:
    """Under both names that NVML has had for them."""
    prefixes = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")
    values = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith(prefixes) and not name.endswith(("All", "None"))
    }
    assert values == set(BITS)


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0, ()),
        (0x1, ()),
        (0x4, ("power-cap",)),
        (0x24, ("power-cap", "sw-thermal")),
        (0x48, ("hw-slowdown", "hw-thermal")),
        (0x81, ("hw-power-brake",)),
        (0x802, ("application-clocks", "bit 0x800")),
    ],
)
def test_masks(mask: int, names: tuple[str, ...]) -> None:
    """Idling holds nothing back; a bit without a name yet is shown as it is."""
    assert reasons_in(mask) == names
