"""Values of `ablate`: options, arms and the whole ablation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8bench.model import Level, Scalar

KEPT = "ablation.json"


@dataclass(frozen=True)
class AblatedOption:
    """A precision, or the value `on` of an axis; without the option the axis has the value `off` ('': its default)."""

    name: str
    precision: str = ""
    axis: str = ""
    on: str = ""
    off: str = ""


@dataclass(frozen=True)
class AblatedArm:
    """A step with these options. `rounds` are seconds, scaled to the tokens of the arm without options; `why` explains
    what is missing."""

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
    def is_timed(self) -> bool:
        """Whether its time is a speed that can be compared."""
        return bool(self.rounds) and self.level is Level.NATIVE and not self.why


@dataclass(frozen=True)
class Ablation:
    """All arms, the one without options first; `control` are the rounds of a copy of it, for the noise floor."""

    suite: str
    setting: tuple[tuple[str, Scalar], ...]
    device: str
    device_name: str
    reference: str
    options: tuple[AblatedOption, ...]
    arms: tuple[AblatedArm, ...]
    error: str = ""
    control: tuple[float, ...] = ()
    started: str = ""
    environment: Mapping[str, Scalar | None] = field(default_factory=dict)
    path: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(option.name for option in self.options)

    def arm(self, options: Sequence[str]) -> AblatedArm:
        # Accept options in any order: arms list them in that of the ablation.
        key = tuple(name for name in self.names if name in options)
        return next(arm for arm in self.arms if arm.options == key)


def arms_of(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields no option, each alone, each added to those before it, and all without each: 3k - 1 arms for k >= 3
    options."""
    combinations = [(), *((name,) for name in names)]
    combinations += [tuple(names[:count]) for count in range(2, len(names) + 1)]
    combinations += [(*names[:place], *names[place + 1 :]) for place in range(len(names))]
    # With one or two options the same arm occurs twice.
    yield from dict.fromkeys(combinations)
