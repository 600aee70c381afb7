"""What a gate could have seen, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.gate.sight import NIGHTS, Sight, Sights


def seen(one: Sight) -> str:
    """'+3.1%', 'at least +12.0%' where nobody knows the noise, 'nothing' where no slow-down is large enough."""
    return _at_least(one.seen, bool(one.unknown))


def summary(sights: Sights) -> str:
    """'+3.1% in 80 of 100 builds (median of 40 figures; worst CASE time: +9.0%); the threshold is +5.0%'."""
    worst = sights.figures[0]
    count = len(sights.figures)
    least = {one.threshold for one in sights.figures}
    of = f"median of {count} figures; worst" if count > 1 else "the only figure that varies is"
    limits = f"; its threshold is {share(worst.threshold)}" if len(least) > 1 else ""
    middle = _at_least(sights.median, any(one.unknown for one in sights.figures))
    return (
        f"{middle} in {100 * sights.power:.3g} of 100 builds ({of} {worst.case} {worst.metric}: {seen(worst)}{limits})"
        + ("" if limits else f"; the threshold is {share(worst.threshold)}")
    )


def sentence(one: Sight, power: float) -> str:
    """What could have been seen of one figure, and what would have failed."""
    words = f"could have seen {seen(one)} in {100 * power:.3g} of 100 builds, and failed from {share(one.fails)} on"
    return f"{words} ({why})" if (why := _why(one)) else words


def warnings(sights: Sights, most: int) -> Iterator[str]:
    """Figures whose threshold cannot be seen, and those of a history that is too young to say."""
    for one in sights.blind[:most]:
        need = (
            f"{one.case} {one.metric} cannot see its threshold of {share(one.threshold)}: {sentence(one, sights.power)}"
        )
        yield need
    if len(sights.blind) > most:
        yield f"and {len(sights.blind) - most} more that cannot see their thresholds"
    if sights.young:
        count, known = len(sights.young), [one.missing for one in sights.young if one.missing is not None]
        words = f"history too young: {count} of {len(sights.figures)} figures cannot see their thresholds yet"
        words += f"; {max(known)} more night{'s' * (max(known) != 1)} at this noise would do" if known else ""
        lost = count - len(known)
        yield words + (f"; {lost} will not, and fail from {NIGHTS} nights on" if lost else "")


def _why(one: Sight) -> str:
    if one.missing is not None:
        reason = one.unknown or f"{one.nights} nights"
        return f"{reason}; {one.missing} more night{'s' * (one.missing != 1)} would do"
    if one.nights is not None and not one.enough:
        return f"{one.nights} nights, and no number of them would do at this noise"
    return one.unknown


def _at_least(value: float, is_bound: bool) -> str:
    return f"{'at least ' if is_bound and math.isfinite(value) else ''}{share(value)}"


def share(value: float) -> str:
    """'+3.1%'."""
    return "nothing" if math.isinf(value) or math.isnan(value) else units.change(1 + value)
