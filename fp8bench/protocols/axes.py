"""Defines the axes of workloads (parameters that `--set` varies), the options of precisions, and parsers of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8bench.errors import UsageError
from fp8bench.model import Scalar
from fp8bench.suggestions import guess_intended_name


@dataclass(frozen=True)
class Axis:
    """A parameter of a workload that `--set` can vary.

    `default` has the values that are measured by default, and `quick` those under --quick if they differ. `alias` is a
    second name of the axis in `--set`; values given under both names are combined. A `quiet` axis has one default
    value, which is left out of the parameters of a case. So a new quiet axis does not change the names and the history
    of existing cases.
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
        """Makes an axis whose values are whole numbers within `bounds`. If `default` is 'auto', the axis also accepts
        this word.
        """
        parse_number = whole_number(**bounds)
        return Axis(
            name,
            description,
            default,
            make_auto_parser(parse_number) if default == ("auto",) else parse_number,
            quick=quick,
        )

    @staticmethod
    def choice(name: str, description: str, *choices: str, default: str = "", quiet: bool = False) -> Axis:
        """Makes an axis that accepts `choices`. Its default value is `default`, or the first choice."""
        return Axis(name, description, (default or choices[0],), one_of(*choices), quiet)

    @staticmethod
    def each(name: str, description: str, *choices: str, quick: tuple[str, ...] = ()) -> Axis:
        """Makes an axis that accepts `choices`. By default all of them are measured."""
        return Axis(name, description, choices, one_of(*choices), quick=quick)

    def values(self, given: Sequence[str]) -> list[Scalar]:
        """Returns the parsed values in the given order, each value once. Raises UsageError for a value that cannot be
        parsed.
        """
        # A dictionary keeps the order and drops repetitions.
        parsed_values: dict[Scalar, None] = {}
        for text in given:
            try:
                parsed_values[self.parse(text)] = None
            except ValueError as error:
                raise UsageError(f"axis {self.name!r} cannot be {text!r}: {error}.") from None
        return list(parsed_values)

    def of(self, params: Mapping[str, Scalar]) -> Scalar:
        """Returns the value of this axis in the parameters of a case. If a quiet axis is missing there, it has its
        default value.
        """
        return self.parse(self.default[0]) if self.quiet and self.name not in params else params[self.name]


@dataclass(frozen=True)
class Option:
    """An option of a precision, such as history in `fp8-delayed:history=16`. `aliases` are other names for it."""

    name: str
    description: str
    default: str
    parse: Callable[[str], Scalar]
    aliases: tuple[str, ...] = ()

    def value(self, mode: str, given: str) -> Scalar:
        """Parses the text of a value of this option. Raises UsageError with a message that names the mode."""
        try:
            return self.parse(given)
        except ValueError as error:
            raise UsageError(f"{mode}: {self.name} cannot be {given!r}: {error}.") from None


def whole_number(low: int = 1, high: int = 1 << 24) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            # Replace the message of int(), which explains number literals and does not help the user of an option.
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return value

    return parse


def read_integers(params: Mapping[str, Scalar], *names: str) -> list[int]:
    """Returns the values of the parameters in `names`, in this order, as whole numbers."""
    return [int(params[name]) for name in names]


def make_auto_parser(parse: Callable[[str], Scalar]) -> Callable[[str], Scalar]:
    """Returns a parser that accepts 'auto' and everything that `parse` accepts. The workload later replaces 'auto' by a
    value that fits its other parameters.
    """
    return lambda text: text if text == "auto" else parse(text)


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            # A wrong word is usually a typing error, so the message suggests the most similar choice.
            nearest_choice = guess_intended_name("choice", text, choices)
            hint = f"; the nearest is {nearest_choice!r}" if nearest_choice else ""
            raise ValueError(f"expected one of {', '.join(choices)}{hint}")
        return text

    return parse


# Every suite that draws random operands has this axis. On a GPU at its power limit, the clock, and so the time, depend
# on the values of operands.
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
CONTIGUOUS, TRANSPOSED, PADDED, STRIDED = MATRIX_LAYOUTS = ("contiguous", "transposed", "padded", "strided")
# The bytes that a matrix with this layout spans in memory, divided by the bytes of its elements. 1 for other layouts,
# also for 'padded', whose gaps of a few elements per row are not counted.
SPAN_FACTORS = {STRIDED: 2}
# Every suite whose operands are single matrices has this axis.
LAYOUT = Axis(
    "layout",
    "how matrices lie in memory: contiguous, row by row; transposed, column by column; padded: row by row with gaps "
    "between rows; strided: every second element",
    (CONTIGUOUS,),
    one_of(*MATRIX_LAYOUTS),
    quiet=True,
)
HOT, COLD, ROTATING = "hot", "cold", "rotating"
CACHE = Axis.choice(
    "cache",
    "what the last-level cache holds when a call begins: hot: what the previous call left; cold: nothing "
    "of the state; rotating: other states",
    HOT,
    COLD,
    ROTATING,
    quiet=True,
)
# The number of bytes that flush the last-level cache, as a multiple of its size. With cache=rotating, all states
# together are at least this large. A multiple of 1 would not suffice, because caches need not replace their oldest
# lines first.
CACHE_FLUSH_FACTOR = 2
# The axes that every workload has. The worker applies their values, and workloads never see them.
COMMON_AXES = (CACHE,)
# The default values of the quiet axes above, which may be missing in the parameters of a case.
QUIET_AXIS_DEFAULTS: dict[str, Scalar] = {axis.name: axis.default[0] for axis in (VALUES, LAYOUT, CACHE)}
