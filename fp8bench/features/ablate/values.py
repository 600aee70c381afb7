"""The options, arms and results of an ablation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8bench.model import Level, Scalar

FILE_NAME = "ablation.json"


@dataclass(frozen=True)
class AblatedOption:
    """One option that a step may have. It is either a precision, or a value of a suite's axis. With the option, the
    axis has the value `on`. Without it, the axis has the value `off`, where '' means the axis's default.
    """

    name: str
    precision: str = ""
    axis: str = ""
    on: str = ""
    off: str = ""


@dataclass(frozen=True)
class AblatedArm:
    """A step with some of the options. `rounds` are its seconds in each round. They are scaled to the number of
    tokens of the arm without options. `why` is the reason for missing figures.
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
    def is_timed(self) -> bool:
        """Whether the arm's time may be compared with the times of other arms."""
        return bool(self.rounds) and self.level is Level.NATIVE and not self.why


@dataclass(frozen=True)
class Ablation:
    """All arms of an ablation. The first one is the arm without options. `control` has the rounds of a copy of that
    arm, from which the noise floor is computed.
    """

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

    def find_arm(self, options: Sequence[str]) -> AblatedArm:
        # Options are accepted in any order. Arms list them in the order of the ablation.
        ordered_options = tuple(name for name in self.names if name in options)
        return next(arm for arm in self.arms if arm.options == ordered_options)


def iterate_arms(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the options of each arm: no options, each one alone, each one added to all earlier ones, and all but
    one. With k >= 3 options, these are 3k - 1 arms.
    """
    option_combinations = [(), *((name,) for name in names)]
    option_combinations += [tuple(names[:count]) for count in range(2, len(names) + 1)]
    option_combinations += [(*names[:place], *names[place + 1 :]) for place in range(len(names))]
    # With one or two options, some combinations are duplicates.
    yield from dict.fromkeys(option_combinations)
