"""The bits of the mask, against pynvml's own."""

from __future__ import annotations

import pynvml
import pytest

from fp8bench.model.consumed import BITS, capped_by_power, reasons_in, slowed_by_hardware


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
    ("mask", "names", "hardware", "capped"),
    [
        (0, (), False, False),
        (0x1, (), False, False),
        (0x4, ("power-cap",), False, True),
        (0x24, ("power-cap", "sw-thermal"), False, True),
        (0x48, ("hw-slowdown", "hw-thermal"), True, False),
        (0x81, ("hw-power-brake",), True, False),
        (0x802, ("application-clocks", "bit 0x800"), False, False),
    ],
)
def test_masks(mask: int, names: tuple[str, ...], hardware: bool, capped: bool) -> None:
    """Idling holds nothing back; a bit without a name yet is shown as it is."""
    assert reasons_in(mask) == names
    assert (slowed_by_hardware(mask), capped_by_power(mask)) == (hardware, capped)
