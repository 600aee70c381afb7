"""Limits of GPU cards, published figures, and reasons why the figures of this machine may differ."""

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
# card. Speed-ups: computed from products and copies, with casts at 80% of a copy (CONTRIBUTING.md). The longest name
# that matches a device is used.
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


def card_of_probe(probe: Mapping[str, Any]) -> Card:
    return card_of(str(probe.get("device", {}).get("name", "")))


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


def compare(number: float, published: Published, probe: Mapping[str, Any], clocks: Mapping[str, float]) -> str:
    """Describes whether a figure is within, above or below a published figure, and what may explain a difference."""
    if published.low * (1 - _WITHIN) <= number <= published.high * (1 + _WITHIN):
        return f"within {published.words()}"
    side = "above" if number > published.high else "below"
    reasons = ", ".join(find_reasons(published, probe, clocks))
    return f"{side} {published.words()}: {reasons or 'nothing known explains it'}"


def find_reasons(published: Published, probe: Mapping[str, Any], clocks: Mapping[str, float]) -> Iterator[str]:
    driver = probe.get("driver", {})
    if not published.card:
        yield "the source names no card"
    elif card_of_probe(probe).name != published.card:
        yield f"another card ({probe.get('device', {}).get('name', '')})"
    cap, most = _number(driver, "power.limit"), _number(driver, "power.max_limit")
    if 0 < cap < most:
        yield f"power cap {cap:g} W of {most:g} W"
    clock, top = clocks.get("clock", 0.0) / 1e9, _number(driver, "clocks.max.sm") / 1e3
    if 0 < clock < (1 - _WITHIN) * top:
        is_at_cap = 0 < (1 - _WITHIN) * cap < clocks.get("power", 0.0)
        yield f"clock {clock:.2f} GHz of {top:.2f} GHz{' at the power cap' if is_at_cap else ''}"


def _number(driver: Mapping[str, str], field: str) -> float:
    """Returns the number that a value of nvidia-smi begins with ('700.00 W'); 0 for '[N/A]'."""
    match = re.match(r"[\d.]+", driver.get(field, ""))
    return float(match[0]) if match else 0.0


def describe_conditions(probe: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each property of the machine that changes the meaning of its figures."""
    driver, energy, card = probe.get("driver", {}), probe.get("energy", {}), card_of_probe(probe)
    if not card.name:
        yield "Nothing is known of this card: figures have no target, and published ones are of other cards."
    if driver.get("mig.mode.current") == "Enabled":
        yield (
            "MIG is on: this is a part of a GPU, whose energy and power are known for the whole only. Speeds are the "
            "part's, targets are those of a whole card: expect its share of them."
        )
    cap, most = _number(driver, "power.limit"), _number(driver, "power.max_limit")
    if 0 < cap < most:
        yield f"The power cap is {cap:g} W of {most:g} W: sustained figures are those of this cap."
    elif cap and card.watts and abs(cap / card.watts - 1) > _WITHIN:
        yield f"The power cap is {cap:g} W; targets are those of a {card.name} with {card.watts:g} W."
    if driver.get("ecc.mode.current") == "Disabled" and card.copy:
        yield "ECC is off: copies and casts may be some percent faster than targets, which were measured with ECC on."
    if "why" in energy:
        reason = energy["why"]
        yield f"Energy could not be measured ({reason}): there are no joules; sustained figures need `--sustained 2`."
    elif energy.get("source", "counter") != "counter":
        yield (
            f"NVML has no energy counter here: joules come from the {energy['source']} power sensor, whose error "
            "nobody knows, and no verdict on energy is given."
        )
