"""What is ablated, and what each arm came to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8bench.model import Level, Scalar

# The file of one, in a folder of its own.
KEPT = "ablation.json"
# Of more options all subsets are more arms than fit into memory, and into anybody's patience.
MOST_BY_SHAPLEY = 4


@dataclass(frozen=True)
class AblatedOption:
    """A precision, or a value of an axis; `off` is what the axis has without it, '' what the suite has by itself."""

    name: str
    precision: str = ""
    axis: str = ""
    on: str = ""
    off: str = ""


@dataclass(frozen=True)
class AblatedArm:
    """Options that hold together, and what was measured with them.

    `rounds` are seconds of whole steps, scaled to the tokens of the arm without options. `why` says what there is not.
    """

    options: tuple[str, ...]
    case: str
    level: Level = Level.NATIVE
    why: str = ""
    rounds: tuple[float, ...] = ()
    memory: float | None = None
    error: float | None = None
    joules: float | None = None
    labels: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether its time is a speed, and may be held against others'."""
        return bool(self.rounds) and self.level is Level.NATIVE and not self.why


@dataclass(frozen=True)
class Ablation:
    """Arms in the order in which they were asked for: none, alone, cumulative, left out. `control` is the first arm
    once more, which says what identical code differs by."""

    suite: str
    setting: tuple[tuple[str, Scalar], ...]
    device: str
    device_name: str
    reference: str
    options: tuple[AblatedOption, ...]
    arms: tuple[AblatedArm, ...]
    error: str = ""
    control: tuple[float, ...] = ()
    shapley: bool = False
    started: str = ""
    environment: Mapping[str, Scalar | None] = field(default_factory=dict)
    path: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(option.name for option in self.options)

    def arm(self, options: Sequence[str]) -> AblatedArm:
        wanted = tuple(name for name in self.names if name in options)
        return next(arm for arm in self.arms if arm.options == wanted)


def arms_of(names: Sequence[str], shapley: bool) -> Iterator[tuple[str, ...]]:
    """None, each alone, each added to those before it, each left out: 3k - 1 of three options or more, each once."""
    wanted = [(), *((name,) for name in names)]
    wanted += [tuple(names[:count]) for count in range(2, len(names) + 1)]
    wanted += [tuple(other for other in names if other != name) for name in names]
    if shapley:
        wanted += [some for count in range(len(names) + 1) for some in itertools.combinations(names, count)]
    yield from dict.fromkeys(wanted)
