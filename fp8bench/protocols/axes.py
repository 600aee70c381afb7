"""Parameters of a workload that `--set` varies, options of a precision, and parsers of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8bench.errors import UsageError
from fp8bench.model import Scalar
from fp8bench.suggestions import meant_name


@dataclass(frozen=True)
class Axis:
    """One parameter of a workload that `--set` can vary; `quick` is its default under --quick, where it has another.
    `--set` knows it by its `alias`, too: values under both names add up.

    The default of a `quiet` axis, of which there is one, is no parameter of a case: so adding an axis to a workload
    does not change the names and the history of existing cases.
    """

    name: str
    description: str
    default: tuple[str, ...]
    parse: Callable[[str], Scalar]
    quiet: bool = False
    quick: tuple[str, ...] = ()
    alias: str = ""

    @staticmethod
    def count(name: str, description: str, *default: str, quick: tuple[str, ...] = (), **bounds: int) -> Axis:
        """Makes an axis of whole numbers; also of 'auto' if that is the default."""
        number = whole_number(**bounds)
        return Axis(name, description, default, auto_or(number) if default == ("auto",) else number, quick=quick)

    @staticmethod
    def choice(name: str, description: str, *choices: str, default: str = "", quiet: bool = False) -> Axis:
        """Makes an axis of words; the first choice is the default if none is given."""
        return Axis(name, description, (default or choices[0],), one_of(*choices), quiet)

    @staticmethod
    def each(name: str, description: str, *choices: str, quick: tuple[str, ...] = ()) -> Axis:
        """Makes an axis of words that are all measured by default."""
        return Axis(name, description, choices, one_of(*choices), quick=quick)

    def values(self, given: Sequence[str]) -> list[Scalar]:
        """Parsed values in the order given, without repetitions. Raises UsageError."""
        # A dictionary keeps the order and drops repetitions.
        parsed: dict[Scalar, None] = {}
        for text in given:
            try:
                parsed[self.parse(text)] = None
            except ValueError as error:
                raise UsageError(f"axis {self.name!r} cannot be {text!r}: {error}.") from None
        return list(parsed)

    def of(self, params: Mapping[str, Scalar]) -> Scalar:
        """Its value in a case's parameters, in which the default of a quiet axis is left out."""
        return self.parse(self.default[0]) if self.quiet and self.name not in params else params[self.name]


@dataclass(frozen=True)
class Option:
    """One option of a precision, as in `fp8-delayed:history=16`; `aliases` are other names."""

    name: str
    description: str
    default: str
    parse: Callable[[str], Scalar]
    aliases: tuple[str, ...] = ()

    def value(self, mode: str, given: str) -> Scalar:
        """Parses a value that was given in a mode. Raises UsageError."""
        try:
            return self.parse(given)
        except ValueError as error:
            raise UsageError(f"{mode}: {self.name} cannot be {given!r}: {error}.") from None


def whole_number(low: int = 1, high: int = 1 << 24) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            # The message of int() is about literals, which does not help users of an option.
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return value

    return parse


def auto_or(parse: Callable[[str], Scalar]) -> Callable[[str], Scalar]:
    """A parser of 'auto', which the workload replaces by what fits the other parameters, or of a value."""
    return lambda text: text if text == "auto" else parse(text)


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            # A typing error is the usual reason, and its cure is the nearest choice.
            nearest = meant_name("choice", text, choices)
            hint = f"; the nearest is {nearest!r}" if nearest else ""
            raise ValueError(f"expected one of {', '.join(choices)}{hint}")
        return text

    return parse


# For every suite that draws its own operands. On a GPU at its power limit they change the clock, and so the time.
VALUES = Axis.choice(
    "values",
    "what operands are made of: normal (standard), uniform (-1 to 1), integers (-4 to 4), ones or zeros",
    "normal",
    "uniform",
    "integers",
    "ones",
    "zeros",
    quiet=True,
)
CONTIGUOUS, TRANSPOSED, PADDED, STRIDED = LAYOUTS = ("contiguous", "transposed", "padded", "strided")
# The memory that a matrix spans, as a multiple of its elements.
SPREAD = {STRIDED: 2}
# For every suite whose operands are single matrices.
LAYOUT = Axis(
    "layout",
    "how matrices lie in memory: contiguous, row by row; transposed, column by column; padded: row by row with gaps "
    "between rows; strided: every second element",
    (CONTIGUOUS,),
    one_of(*LAYOUTS),
    quiet=True,
)
HOT, COLD, ROTATING = "hot", "cold", "rotating"
CACHE = Axis.choice(
    "cache",
    "what the last cache holds when a call begins: hot: what the one before left; cold: nothing of the state; "
    "rotating: other states",
    HOT,
    COLD,
    ROTATING,
    quiet=True,
)
# Flushing writes, and rotating states fill, this multiple of the last cache: its replacement need not be by age.
CACHE_TIMES = 2
# Axes that every workload has. The worker applies them: workloads never see them.
COMMON = (CACHE,)
# Defaults of quiet axes, for cases without such a parameter.
QUIET: dict[str, Scalar] = {axis.name: axis.default[0] for axis in (VALUES, LAYOUT, CACHE)}
