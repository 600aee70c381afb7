"""The user's request, and its checks."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.units import size

# Largest magnitudes by precision, layer and role.
KnownScales = tuple[tuple[str, str, str, float], ...]


@dataclass(frozen=True)
class StaticScales:
    """Scales from data, where a tensor has one float32 scale: from the largest magnitudes in `batches` untimed steps,
    or from those `known` of the run `source`.

    All are renewed in every `refresh`-th step (0: never), a tensor's also when more than the share `bound` of its
    values would saturate (None: not checked).
    """

    batches: int
    refresh: int = 0
    bound: float | None = None
    source: str = ""
    known: KnownScales = ()

    def known_for(self, mode: str) -> dict[tuple[str, str], float]:
        """Magnitudes by layer and role for a precision; where the source has none of it, the largest of all."""
        modes = {scaled_mode for scaled_mode, *_ in self.known}
        largest: dict[tuple[str, str], float] = {}
        # For a precision that the source lacks, the largest of all modes is safe against overflow.
        for scaled_mode, layer, role, amax in self.known:
            if scaled_mode == mode or mode not in modes:
                largest[layer, role] = max(amax, largest.get((layer, role), 0.0))
        return largest

    @property
    def words(self) -> str:
        """For example 'static=8:refresh=100:bound=0.001'."""
        refresh = f":refresh={self.refresh}" if self.refresh else ""
        bound = f":bound={self.bound:g}" if self.bound is not None else ""
        return f"static={self.source or self.batches}{refresh}{bound}"


@dataclass(frozen=True)
class Rule:
    """The requirement of a request's value, in words, and its test."""

    words: str
    holds: Callable[[object], bool]


def whole_number(low: int, high: int = (1 << 31) - 1, words: str = "") -> Rule:
    """A whole number within bounds; True does not count as one."""
    most = f" to {high}" if high < 1 << 30 else ""
    return Rule(
        words or f"a whole number from {low}{most}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """A number for which `holds` is true; True does not count as one."""
    return Rule(words, lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value))


def _texts(words: str, of: Callable[[object], bool] = lambda value: isinstance(value, str)) -> Rule:
    return Rule(words, lambda value: isinstance(value, tuple) and all(map(of, value)))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_axis(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], str) and bool(value[1])


_MOST_BYTES = 100 << 40
# The limit of memory that is the device's own, and its name.
ALL_MEMORY = 0
ALL_MEMORY_WORD = "device"
_SIZE_WORDS = f"a size above 0 and up to {size(_MOST_BYTES)}, like 2GiB"
MEMORY_SIZE = whole_number(ALL_MEMORY + 1, _MOST_BYTES, _SIZE_WORDS)
_SECONDS = number("a number of seconds above 0", lambda value: 0 < value < 1e7)
PERCENT = number("a percentage from 0 to below 100", lambda value: 0 <= value < 100)
KNOWN_SCALES = _texts(
    "magnitudes by precision, layer and role",
    lambda scale: isinstance(scale, tuple) and len(scale) == 4 and scale[3] >= 0,
)
_NAMES = _texts("a list of names")
_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_TEXT = Rule("a path", lambda value: isinstance(value, str) and bool(value))


@dataclass(frozen=True)
class RequestOption:
    """How a field is asked for: the command line, option files, Python and the checks read this declaration.

    `group` is where the command line lists the option, '' for not at all; `called` its name where that is not the
    field's; `metavar` stands for a value; `parse` names the parser in cli/option_types where the type does not
    determine it; `choices` are the only values.
    """

    rule: Rule
    help: str = ""
    group: str = ""
    metavar: str = ""
    called: str = ""
    parse: str = ""
    choices: tuple[str, ...] = ()


WHAT = "what to measure"
HOW = "how"


def option(
    default: Any,
    rule: Rule,
    words: str = "",
    metavar: str = "",
    group: str = HOW,
    called: str = "",
    parse: str = "",
    choices: tuple[str, ...] = (),
) -> Any:
    declared = RequestOption(rule, words, group, metavar, called, parse, choices)
    return field(default=default, metadata={"option": declared})


def options_of(kind: type) -> dict[str, RequestOption]:
    return {field.name: field.metadata["option"] for field in fields(kind) if "option" in field.metadata}


def words_of(kind: type) -> dict[str, str]:
    """Python's name of each field: the command line's, unless that is a keyword or another field's."""
    names = [field.name for field in fields(kind)]
    called = {
        name: request_option.called
        for name, request_option in options_of(kind).items()
        if not keyword.iskeyword(request_option.called)
    }
    return {name: word if (word := called.get(name)) and word not in names else name for name in names}


def check_fields(request: Any, rules: Mapping[str, Rule]) -> None:
    """Raises UsageError for the first field that breaks its rule; None is allowed where it is the default."""
    defaults = {field.name: field.default for field in fields(request)}
    words = words_of(type(request))
    for name, rule in rules.items():
        value = getattr(request, name)
        left_out = value is None and defaults[name] is None
        if not left_out and not rule.holds(value):
            raise UsageError(f"{words[name]} must be {rule.words}, got {value!r:.80}.")


# Energy of the whole step only, or of its phases too.
ENERGY_OF = (STEP_ENERGY, PHASE_ENERGY) = ("step", "phases")


@dataclass(frozen=True)
class Request:
    """The user's request; independent of the machine. An impossible request raises UsageError.

    `case_timeout` and `sustained` are seconds, `saturation_bound` is a percentage, `memory_limit` are bytes
    that the largest batch has to fit into, ALL_MEMORY for all that the device has.
    """

    suite: str = option(
        MISSING,
        Rule("a suite's name, several with commas, 'all', or a .py file", lambda value: isinstance(value, str)),
        group="",
    )
    dtypes: tuple[str, ...] = option((), _NAMES, "precisions; default fp32,bf16,fp8", "A,B", WHAT)
    devices: tuple[str, ...] = option((), _NAMES, "cpu, cuda, cuda:1; default the first GPU, else cpu", "A,B", WHAT)
    reference: str | None = option(
        None,
        Rule("a dtype's name", lambda value: isinstance(value, str)),
        "what the others are compared with; default the highest precision",
        "DTYPE",
        WHAT,
    )
    axes: tuple[tuple[str, tuple[str, ...]], ...] = option(
        (),
        _texts("a mapping of axes to values, at least one each, like {'shape': [64, 128]}", _is_axis),
        "values of an axis; `fp8bench list NAME` names the axes of a suite",
        "AXIS=A,B",
        WHAT,
        called="set",
        parse="axis",
    )
    precision_map: tuple[tuple[str, str], ...] = option(
        (),
        _texts("a mapping of layers, or kinds of them, to dtypes, like {'mlp': 'fp8'}", _is_pair),
        (
            "layers with another precision than the case's: a kind (mlp), a name (blocks.0.mlp.up) or the "
            "beginning of names (blocks.0); or a file with one per line; the reference ignores it"
        ),
        "LAYER=DTYPE,...",
        WHAT,
        parse="precision_map",
    )
    data: str | None = option(None, _TEXT, "text to train on; default Python's own sources", "FILE", WHAT)
    quick: bool = option(False, _FLAG, "smoke test: a few rounds")
    brisk: bool = option(
        False,
        _FLAG,
        (
            "about 10 s a group, for a GPU rented by the minute: fewer rounds, two short energy windows a case, "
            "idle power once; default if --budget leaves less than 20 s a group"
        ),
    )
    budget: float | None = option(None, _SECONDS, "time for the whole run; default about 6 s a group", "SECONDS")
    rounds: int | None = option(None, whole_number(1), "number of rounds, without early stop", "N")
    seed: int = option(0, whole_number(0), "for data, weights and order; default 0", "N")
    threads: int = option(1, whole_number(1, 1024), "CPU threads of torch; default 1", "N")
    imports: tuple[str, ...] = option(
        (),
        _NAMES,
        "module or .py file that registers your workloads, precisions or devices",
        "MODULE",
        WHAT,
        called="import",
        parse="each",
    )
    isolation: bool = option(True, _FLAG, "measure in this process, without a worker")
    case_timeout: float | None = option(
        None,
        _SECONDS,
        "longest time to prepare a case or run one slot of it; default 60, more for large cases",
        "SECONDS",
    )
    grid: bool = option(
        False, _FLAG, "the cases of the history, as `asv run` measures them; --set overrides them", "", WHAT
    )
    trace: str | None = option(
        None,
        _TEXT,
        (
            "DIR: also record a few untimed steps of each case, as traces for Perfetto and TensorBoard. nsys, "
            "ncu: run under that profiler (--dry-run prints the command); nvtx: mark a slot of each case"
        ),
        "DIR|nvtx|nsys|ncu",
        parse="path",
    )
    static_scales: int | None = option(
        None,
        whole_number(1, 100_000),
        "fix each tensor's float32 scale from the data of N untimed steps",
        "N",
        WHAT,
    )
    refresh_scales: int | None = option(None, whole_number(1), "renew these scales every M steps", "M", WHAT)
    saturation_bound: float | None = option(
        None,
        PERCENT,
        "renew a tensor's scale whenever more than PERCENT of its values would saturate",
        "PERCENT",
        WHAT,
    )
    energy: bool = option(
        True, _FLAG, "skip energy; it is measured where the device has a counter, in windows of a second or more"
    )
    energy_of: str = option(
        STEP_ENERGY,
        Rule(f"one of {', '.join(ENERGY_OF)}", lambda value: value in ENERGY_OF),
        "phases: also measure the energy of each phase, in windows that repeat this phase alone",
        "OF",
        called="energy",
        choices=ENERGY_OF,
    )
    memory_limit: int | None = option(
        None,
        whole_number(ALL_MEMORY, _MOST_BYTES, f"{_SIZE_WORDS}, or {ALL_MEMORY_WORD}"),
        f"also find the largest batch of each precision in SIZE of memory, like 2GiB, or {ALL_MEMORY_WORD} (all of a "
        "GPU), by running it and the next one; and compare precisions at their largest batches",
        "SIZE",
        called="max_batch",
        parse="memory",
    )
    backend: str = option(
        "auto",
        Rule("a backend's name", lambda value: isinstance(value, str) and bool(value)),
        "library for low-precision products: {backends} (default auto: torch where it can, else emulated); for one "
        "dtype: fp8:backend=torchao",
        "NAME",
        WHAT,
    )
    sustained: float | None = option(
        None,
        number("a number of seconds from 1 to 600", lambda value: 1 <= value <= 600),
        "also run each case for SECONDS without a break, after it has settled: its sustained time",
        "SECONDS",
    )
    tape: bool = option(
        False,
        _FLAG,
        (
            "with --quick: also count operators of compiled steps, repeat steps after timing, and check whether "
            "memory grows; always done without --quick"
        ),
    )
    shares: bool = option(
        False, _FLAG, "also measure the share of each module and each kind of work in a step, in an untimed pass"
    )
    counters: bool = option(
        False,
        _FLAG,
        "also count a step's allocations, their time, and its page faults, in an untimed pass",
    )
    ranks: int | None = option(
        None,
        whole_number(2, 1024),
        "run each case in N processes together, each on its GPU or all on the CPU; the slowest rank's time counts",
        "N",
    )

    scales_from: str | None = option(
        None, _TEXT, "use the scales stored in a run instead: its id, its file, or last", "RUN", WHAT
    )
    # The scales of the run `scales_from`, once it was read.
    known_scales: tuple[tuple[str, str, str, float], ...] = option((), KNOWN_SCALES, group="")

    def __post_init__(self) -> None:
        check_fields(self, REQUEST_RULES)
        # Options that contradict each other are refused before anything is measured.
        if self.case_timeout is not None and not self.isolation:
            raise UsageError(
                "--case-timeout cannot be kept with --no-isolation: only a worker in a process of its own can be "
                "ended. Leave one out."
            )
        if self.counters and not self.isolation:
            raise UsageError(
                "--counters puts a library ahead of the allocator of a worker of its own, and --no-isolation allows "
                "none. Leave one of them out."
            )
        if self.energy_of == PHASE_ENERGY and not self.energy:
            raise UsageError("--energy phases asks for energy, which --no-energy leaves out. Leave one of them out.")
        if self.ranks is not None:
            self._check_ranks()
        for option, value in (("--refresh-scales", self.refresh_scales), ("--saturation-bound", self.saturation_bound)):
            if value is not None and self.static_scales is None and self.scales_from is None:
                raise UsageError(
                    f"{option} says when scales from data are renewed, and there are none. Add --static-scales N, or "
                    f"leave {option} out."
                )
        if self.static_scales is not None and self.scales_from is not None:
            raise UsageError("--static-scales finds scales, and --scales-from has them. Leave one of them out.")

    def _check_ranks(self) -> None:
        # All of these time or count one process; with several the figures could be anyone's.
        alone = {
            "--no-isolation": not self.isolation,
            "--energy phases": self.energy_of == PHASE_ENERGY,
            "--sustained": self.sustained is not None,
            "--tape": self.tape,
            "--shares": self.shares,
            "--max-batch": self.memory_limit is not None,
            "--counters": self.counters,
            "--trace": self.trace is not None,
        }
        for option, is_asked in alone.items():
            if is_asked:
                raise UsageError(f"{option} is of one process, and --ranks asks for several. Leave one of them out.")

    @property
    def scales(self) -> StaticScales | None:
        if self.static_scales is None and self.scales_from is None:
            return None
        bound = None if self.saturation_bound is None else self.saturation_bound / 100
        source = self.scales_from or ""
        return StaticScales(self.static_scales or 0, self.refresh_scales or 0, bound, source, self.known_scales)


# Values of --trace other than a folder: ranges for a profiler that was started already, and those profilers.
NVTX = "nvtx"
PROFILERS = ("nsys", "ncu")

REQUEST_RULES: Mapping[str, Rule] = {name: request_option.rule for name, request_option in options_of(Request).items()}
