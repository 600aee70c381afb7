"""Whether quantisers are compiled before they are timed, and why not: decided once a run, in the parent.

An emulated cast is a dozen operations in a row, or one kernel that torch.compile makes of them: the same numbers bit
for bit, many times as fast. Compiling takes seconds, so that it stays outside of everything timed, and --quick does
without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8bench.model.raw import QUANTISERS_VARIABLE
from fp8bench.model.run import is_on

_EAGER = "eager"


@dataclass
class Quantisers:
    """What a run does about its quantisers. `why_eager` is '' as long as they are compiled.

    It is set for good when compiling ends the worker: the next one would end alike.
    """

    why_eager: str = ""


def quantisers_for(quick: bool, environment: Mapping[str, str]) -> Quantisers:
    """Compiled, unless a quick look was asked for, or the variable says eager."""
    if not is_on(QUANTISERS_VARIABLE, environment, "compiled", _EAGER, "to compile no quantisers"):
        return Quantisers(f"{QUANTISERS_VARIABLE}={_EAGER} compiles none")
    return Quantisers("--quick compiles none" if quick else "")
