"""What vendors say that a device does at most, by the paths of products; read from datasheet.toml beside this."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

# Where the sums of a path are looked up, by the first word that its dtype begins with.
_PATHS = (
    ("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"), ("fp16", "fp16"), ("float32", "fp32"), ("bfloat16", "bf16"),
    ("float16", "fp16"), ("fp8", "fp8"), ("mxfp8", "fp8"), ("float8", "fp8"), ("e4m3", "fp8"), ("e5m2", "fp8"),
    ("mxfp6", "fp6"), ("mxfp4", "fp4"), ("nvfp4", "fp4"), ("float4", "fp4"), ("e2m1", "fp4"), ("fp4", "fp4"),
)  # fmt: skip


@dataclass(frozen=True)
class Datasheet:
    """Of one device as torch counts them: FLOPs a second by path, bytes a second, watts; where it is said, and when.

    `unverified` are the fields that nobody has seen in a document of the vendor's. `sparse` is of operands with 2:4
    structure, and no peak of anything that fp8bench measures. `exceptions` say why an unusual ratio of two is right.
    `capacity` are bytes of memory, `link` those that it sends to others of its node in a second, one way; None where
    nobody says. Of what is `published` alone fp8bench measures nothing.
    """

    name: str
    match: tuple[str, ...]
    dies: int
    source: str
    date: str
    dense: Mapping[str, float]
    bandwidth: float
    sparse: Mapping[str, float] = field(default_factory=dict)
    watts: float | None = None
    capacity: float | None = None
    link: float | None = None
    published: bool = False
    unverified: tuple[str, ...] = ()
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def peak(self, path: str) -> float | None:
        """Of products in a dtype, or of a precision; None where nobody says."""
        return self.dense.get(kind_of_path(path))

    def told(self, *figures: str) -> str:
        """'datasheet', and that it is unverified where one of its 'dense', 'bandwidth' or 'watts' is."""
        return "datasheet, unverified" if {*figures} & {*self.unverified} else "datasheet"


def kind_of_path(path: str) -> str:
    """The column of the table that a path of products stands in: 'e4m3fn' is fp8; '' of what is none."""
    return next((kind for word, kind in _PATHS if path.startswith(word)), "")


@cache
def datasheets() -> tuple[Datasheet, ...]:
    text = files(__package__).joinpath("datasheet.toml").read_text(encoding="utf-8")
    return tuple(datasheet_from(one) for one in tomllib.loads(text)["device"])


def datasheet_from(entry: Mapping[str, Any]) -> Datasheet:
    peaks = {kind: {name: 1e12 * value for name, value in entry.get(kind, {}).items()} for kind in ("dense", "sparse")}
    lists = {name: tuple(entry.get(name, ())) for name in ("match", "unverified")}
    told = {**entry, **peaks, **lists, "date": str(entry["date"])}
    return Datasheet(**told | {name: 1e9 * entry[name] for name in ("bandwidth", "capacity", "link") if name in entry})


def datasheet_of(device: str) -> Datasheet | None:
    """The one whose words the device's name has, the longest of them; None of a device that nobody has entered.

    A slice of a device has a share of its peaks, and nobody says which.
    """
    if "MIG" in device:
        return None
    found = [
        (len(words), datasheet)
        for datasheet in datasheets()
        for words in datasheet.match
        if re.search(rf"\b{re.escape(words)}\b", device)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None
