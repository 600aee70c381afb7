"""What is asked, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.units import size


@dataclass(frozen=True)
class StaticScales:
    """Scales from data, where a tensor has one float32 scale: from the largest magnitudes of `batches` untimed steps.

    They are renewed in every `refresh`-th step (0: never), and a tensor's whenever more than the share `bound` of its
    values would saturate (None: nobody looks).
    """

    batches: int
    refresh: int = 0
    bound: float | None = None

    @property
    def words(self) -> str:
        """'static=8', 'static=8:refresh=100:bound=0.001'."""
        refresh = f":refresh={self.refresh}" if self.refresh else ""
        bound = f":bound={self.bound:g}" if self.bound is not None else ""
        return f"static={self.batches}{refresh}{bound}"


@dataclass(frozen=True)
class Rule:
    """What a value of a request must be, in words, and whether one is."""

    words: str
    holds: Callable[[object], bool]


def whole_number(low: int, high: int = (1 << 31) - 1, words: str = "") -> Rule:
    """A whole number within bounds; True is none."""
    most = f" to {high}" if high < 1 << 30 else ""
    return Rule(
        words or f"a whole number from {low}{most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """A number that something holds for; True is none."""
    return Rule(words, lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value))


def _texts(words: str, of: Callable[[object], bool] = lambda value: isinstance(value, str)) -> Rule:
    return Rule(words, lambda value: isinstance(value, tuple) and all(map(of, value)))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_axis(value: object) -> bool:
    """A name, and at least one value."""
    return isinstance(value, tuple) and isinstance(value[0], str) and bool(value[1])


_MOST_BYTES = 100 << 40
_SECONDS = number("a number of seconds above 0", lambda value: 0 < value < 1e7)
PERCENT = number("a percentage from 0 to below 100", lambda value: 0 <= value < 100)
_NAMES = _texts("a list of names")
_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_TEXT = Rule("a path", lambda value: isinstance(value, str) and bool(value))
# What each field of a request must be, where it is given.
REQUEST_RULES: Mapping[str, Rule] = {
    "suite": Rule("a suite's name, several with commas, 'all', or a .py file", lambda value: isinstance(value, str)),
    "dtypes": _NAMES,
    "devices": _NAMES,
    "reference": Rule("a dtype's name", lambda value: isinstance(value, str)),
    "axes": _texts("a mapping of axes to values, at least one each, like {'shape': [64, 128]}", _is_axis),
    "precision_map": _texts("a mapping of layers, or kinds of them, to dtypes, like {'mlp': 'fp8'}", _is_pair),
    "data": _TEXT,
    "quick": _FLAG,
    "budget": _SECONDS,
    "rounds": whole_number(1),
    "seed": whole_number(0),
    "threads": whole_number(1, 1024),
    "ranks": whole_number(2, 1024),
    "imports": _NAMES,
    "isolation": _FLAG,
    "case_timeout": _SECONDS,
    "grid": _FLAG,
    "trace": _TEXT,
    "static_scales": whole_number(1, 100_000),
    "refresh_scales": whole_number(1),
    "saturation_bound": PERCENT,
    "energy": _FLAG,
    "tape": _FLAG,
    "shares": _FLAG,
    "sustained": number("a number of seconds from 1 to 600", lambda value: 1 <= value <= 600),
    "max_batch": _FLAG,
    "backend": Rule("a backend's name", lambda value: isinstance(value, str) and bool(value)),
    "memory_limit": whole_number(
        1, _MOST_BYTES, f"a size in bytes, or like 2GiB, above 0 and up to {size(_MOST_BYTES)}"
    ),
}


def check_fields(asked: Any, rules: Mapping[str, Rule], called: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise UsageError for the first field that is not what its rule says; None may stand where it is the default.

    `called` is what a person calls a field by another name.
    """
    defaults = {field.name: field.default for field in fields(asked)}
    for name, rule in rules.items():
        value = getattr(asked, name)
        left_out = value is None and defaults[name] is None
        if not left_out and not rule.holds(value):
            raise UsageError(f"{called.get(name, name)} must be {rule.words}, got {value!r:.80}.")


# What energy may be measured of: a whole step alone, or its phases too.
ENERGY_OF = (STEP_ENERGY, PHASE_ENERGY) = ("step", "phases")
# What a person calls a field by another name.
_CALLED = {"axes": "set"}


@dataclass(frozen=True)
class Request:
    """What the user asked for, as given: nothing here depends on the machine. One that cannot be is not made.

    `suite` is a suite's name, several with commas, 'all', or a file that registers some. `case_timeout` is the most
    seconds that a worker may take to prepare a case or to run one slot of it. `grid` asks for the cases whose history
    is kept, instead of the axes' defaults. `trace` is the folder that a trace of every case goes to. `static_scales` is
    the number of steps that scales are found in, `refresh_scales` of those after which they are renewed,
    `saturation_bound` the percentage of a tensor's values above which its scale is. `energy` says whether energy is
    measured where a device can tell it, `energy_of` whether also that of each phase of a step, `tape` that the
    operators of a step are counted in a quick look too, `shares` that what takes how much of a step is found out,
    `sustained` for how many seconds at a time cases also run.
    `max_batch` asks for the largest batch that fits, `memory_limit` is the memory that it has to fit into, in bytes.
    `backend` is who multiplies in dtypes that name none; 'auto' is whoever can. So many `ranks` run each case together,
    each in a process of its own.
    """

    suite: str
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    reference: str | None = None
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    precision_map: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    quick: bool = False
    budget: float | None = None
    rounds: int | None = None
    seed: int = 0
    threads: int = 1
    imports: tuple[str, ...] = ()
    isolation: bool = True
    case_timeout: float | None = None
    grid: bool = False
    trace: str | None = None
    static_scales: int | None = None
    refresh_scales: int | None = None
    saturation_bound: float | None = None
    energy: bool = True
    energy_of: str = STEP_ENERGY
    max_batch: bool = False
    memory_limit: int | None = None
    backend: str = "auto"
    sustained: float | None = None
    tape: bool = False
    shares: bool = False
    ranks: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be, whoever asks: the command line, a call, or a stored run."""
        check_fields(self, REQUEST_RULES, _CALLED)
        if self.case_timeout is not None and not self.isolation:
            raise UsageError(
                "--case-timeout cannot be kept with --no-isolation: only a worker in a process of its own can be "
                "ended. Leave one out."
            )
        if self.memory_limit is not None and not self.max_batch:
            raise UsageError("--memory-limit goes with --max-batch, which was not given. Add it, or leave this out.")
        if self.energy_of not in ENERGY_OF:
            raise UsageError(f"energy is that of one of {', '.join(ENERGY_OF)}, got {self.energy_of!r:.80}.")
        if self.energy_of == PHASE_ENERGY and not self.energy:
            raise UsageError("--energy phases asks for energy, which --no-energy leaves out. Leave one of them out.")
        if self.ranks is not None:
            self._check_ranks()
        for option, given in (
            ("--refresh-scales", self.refresh_scales),
            ("--saturation-bound", self.saturation_bound),
        ):
            if given is not None and self.static_scales is None:
                raise UsageError(
                    f"{option} says when scales from data are renewed, and there are none. Add --static-scales N, or "
                    f"leave {option} out."
                )

    def _check_ranks(self) -> None:
        """Refuse what asks about one process of a run that has several."""
        alone = {
            "--no-isolation": not self.isolation, "--energy phases": self.energy_of == PHASE_ENERGY,
            "--sustained": self.sustained is not None, "--tape": self.tape, "--shares": self.shares,
            "--max-batch": self.max_batch, "--trace": self.trace is not None,
        }  # fmt: skip
        for option, given in alone.items():
            if given:
                raise UsageError(f"{option} is of one process, and --ranks asks for several. Leave one of them out.")

    @property
    def scales(self) -> StaticScales | None:
        """The scales from data that are asked for, as a rule."""
        if self.static_scales is None:
            return None
        bound = None if self.saturation_bound is None else self.saturation_bound / 100
        return StaticScales(self.static_scales, self.refresh_scales or 0, bound)
