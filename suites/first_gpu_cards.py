"""Limits of GPU cards, published figures, and reasons why the figures of this machine may differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Card(NamedTuple):
    """Figures of a card; None if unknown. `bf16` and `fp8` are FLOPs per second of products, and `copy` is bytes per
    second.

    `in_slots` and `sustained` are the speed-ups of fp8 with casts over bf16 that should be reached.
    """

    name: str
    bf16: float | None = None
    fp8: float | None = None
    copy: float | None = None
    in_slots: float | None = None
    sustained: float | None = None
    watts: float | None = None


# Products: the best figures that MAMF-finder lists for an H200. Copies: measured by this project, or read for each
# card. Speed-ups: computed from products and copies, with casts at 80% of a copy (docs/gpu.md). The longest name that
# matches a device is used.
CARDS = (
    Card("H200", 794.5e12, 1453.4e12, 4.0e12, 1.52, 1.60, 700),
    Card("H200 NVL", 600e12, None, 3.5e12, None, None, 600),
    Card("H100", copy=3.0e12, watts=700),
    Card("L4", copy=0.3e12, watts=72),
)
_UNKNOWN = Card("")


def card_of(name: str) -> Card:
    """Returns the figures of a card by the driver's name for the device, such as 'NVIDIA H100 80GB HBM3'."""
    fitting = (card for card in CARDS if re.search(rf"\b{card.name}\b", name))
    return max(fitting, key=lambda card: len(card.name), default=_UNKNOWN)


class Published(NamedTuple):
    """A published figure, from `low` to `high`, with the card on which it was measured ('' if the source does not
    name it).
    """

    low: float
    high: float
    card: str
    source: str
    conditions: str

    def words(self) -> str:
        figure = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{figure} ({self.source}, {self.card or 'card not named'}; {self.conditions})"


def _figure(value: float, card: str, source: str, conditions: str) -> Published:
    return Published(value, value, card, source, conditions)


_TE = "Transformer Engine, docs/examples/gemm_profiling.rst, May 2026"
_TWELVE = "12 products of m = 15872 with casts, summed"
_MAMF = "MAMF-finder"
_VLLM = "vllm 17126"
TE_FORWARD = _figure(1.64, "H200 NVL", _TE, "4 forward products of m = 15872 with casts")
TE_TWELVE = {
    "fp8": _figure(1.58, "H200 NVL", _TE, f"{_TWELVE}, current scales"),
    "fp8-delayed": _figure(1.69, "H200 NVL", _TE, f"{_TWELVE}, delayed scales"),
    "fp8-block": _figure(1.40, "H200 NVL", _TE, f"{_TWELVE}, blocks"),
}
MAMF = {
    "bf16": _figure(794.5, "H200", _MAMF, "best of many shapes, operands ready"),
    "fp8": _figure(1453.4, "H200", _MAMF, "best of many shapes, operands ready"),
}
TORCHAO_CASTS = Published(79, 87, "H100", "torchao 4128, Mar 2026", "casts in blocks of 128, 32768x4096, % of peak")
TE_LAYER = _figure(1.53, "", "Transformer Engine, getting_started", "a layer of 4096/16384, 2048 x 8 tokens, delayed")
# TFLOP/s of m x 6144 x 4096 products by m: in bf16, in fp8 with ready operands, in fp8 with the cast of the input.
VLLM_BY_ROWS = {
    1: (2.5, 5.4, 4.3),
    16: (39, 87, 70),
    64: (161, 397, 308),
    128: (308, 693, 534),
    256: (544, 956, 761),
}


def vllm_ratio(rows: int, ready: bool) -> Published:
    """Returns vLLM's published speed-up of fp8 over bf16 for m x 6144 x 4096 products."""
    bf16, fp8_ready, fp8_cast = VLLM_BY_ROWS[rows]
    value = round((fp8_ready if ready else fp8_cast) / bf16, 2)
    return _figure(value, "H100", _VLLM, f"{rows} x 6144 x 4096, {'operands ready' if ready else 'with its cast'}")


# Figures of one type of card differ by this share between runs, by temperature and by the voltage of the individual
# card.
_WITHIN = 0.05


def compared(number: float, published: Published, device: Mapping[str, Any], clocks: Mapping[str, float]) -> str:
    """Describes whether a figure is within, above or below a published figure, and what may explain a difference."""
    low, high = published.low * (1 - _WITHIN), published.high * (1 + _WITHIN)
    verdict = "within" if low <= number <= high else "above" if number > high else "below"
    reasons = [] if verdict == "within" else [*_reasons(published, device, clocks)]
    because = f": {', '.join(reasons)}" if reasons else "" if verdict == "within" else ": nothing known explains it"
    return f"{verdict} {published.words()}{because}"


def _reasons(published: Published, device: Mapping[str, Any], clocks: Mapping[str, float]) -> Iterator[str]:
    name = str(device.get("device", {}).get("name", ""))
    if not published.card:
        yield "the source names no card"
    elif card_of(name).name != published.card:
        yield f"another card ({name})"
    driver = device.get("driver", {})
    cap, most = _number(driver.get("power.limit")), _number(driver.get("power.max_limit"))
    if cap and most and cap < most:
        yield f"power cap {cap:g} W of {most:g} W"
    clock, top = clocks.get("clock"), _number(driver.get("clocks.max.sm"))
    if clock and top and clock / 1e6 < (1 - _WITHIN) * top:
        at_cap = " at the power cap" if clocks.get("power", 0.0) > (1 - _WITHIN) * (cap or float("inf")) else ""
        yield f"clock {clock / 1e9:.2f} GHz of {top / 1e3:.2f} GHz{at_cap}"


def _number(word: object) -> float | None:
    """Returns the number that a value of nvidia-smi begins with ('700.00 W'); None for '[N/A]'."""
    match = re.match(r"[\d.]+", str(word or ""))
    return float(match[0]) if match else None


def remarks(device: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each property of the machine that changes the meaning of its figures."""
    driver, energy = device.get("driver", {}), device.get("energy", {})
    card = card_of(str(device.get("device", {}).get("name", "")))
    if not card.name:
        yield "Nothing is known of this card: figures have no target, and published ones are of other cards."
    if driver.get("mig.mode.current") == "Enabled":
        yield (
            "MIG is on: this is a part of a GPU, whose energy and power are known for the whole only. Speeds are the "
            "part's, targets are those of a whole card: expect its share of them."
        )
    cap, most = _number(driver.get("power.limit")), _number(driver.get("power.max_limit"))
    if cap and most and cap < most:
        yield f"The power cap is {cap:g} W of {most:g} W: sustained figures are those of this cap."
    elif cap and card.watts and abs(cap / card.watts - 1) > _WITHIN:
        yield f"The power cap is {cap:g} W; targets are those of a {card.name} with {card.watts:g} W."
    if driver.get("ecc.mode.current") == "Disabled" and card.copy:
        yield "ECC is off: copies and casts may be some percent faster than targets, which were measured with ECC on."
    if source := energy.get("source"):
        if source != "counter":
            yield (
                f"NVML has no energy counter here: joules come from the {source} power sensor, whose error nobody "
                "knows, and no verdict on energy is given."
            )
    elif reason := energy.get("why"):
        yield f"Energy could not be measured ({reason}): there are no joules; sustained figures need `--sustained 2`."
