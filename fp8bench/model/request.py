"""Defines the request of a user: what to measure and how, the options that set this, and the checks of their values."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.units import size

# The largest magnitudes of tensors, by precision, layer and role.
KnownScales = tuple[tuple[str, str, str, float], ...]


@dataclass(frozen=True)
class StaticScales:
    """The rule for static scales, which are derived from data, for formats with one float32 scale per tensor. They are
    computed from the largest magnitudes in `batches` untimed steps, or from those that the run `source` has stored
    (`known`).

    All scales are renewed in every `refresh`-th step (0: never). The scale of a tensor is also renewed if more than
    the share `bound` of its values would saturate (None: not checked).
    """

    batches: int
    refresh: int = 0
    bound: float | None = None
    source: str = ""
    known: KnownScales = ()

    def find_magnitudes(self, mode: str) -> dict[tuple[str, str], float]:
        """Returns the largest known magnitude of each tensor in a precision, by layer and role. If none are known for
        this precision, returns the largest magnitudes over all precisions.
        """
        modes_with_magnitudes = {scaled_mode for scaled_mode, *_ in self.known}
        largest_magnitude_by_tensor: dict[tuple[str, str], float] = {}
        # For an unknown precision, the largest magnitude over all precisions is safe against overflow.
        for scaled_mode, layer, role, amax in self.known:
            if scaled_mode == mode or mode not in modes_with_magnitudes:
                largest_magnitude_by_tensor[layer, role] = max(
                    amax, largest_magnitude_by_tensor.get((layer, role), 0.0)
                )
        return largest_magnitude_by_tensor

    @property
    def words(self) -> str:
        """The rule as a text, such as 'static=8:refresh=100:bound=0.001'."""
        refresh_suffix = f":refresh={self.refresh}" if self.refresh else ""
        bound_suffix = f":bound={self.bound:g}" if self.bound is not None else ""
        return f"static={self.source or self.batches}{refresh_suffix}{bound_suffix}"


@dataclass(frozen=True)
class Rule:
    """The requirement for a value of a request: a description, and a function that tests the value."""

    words: str
    holds: Callable[[object], bool]


def whole_number(low: int, high: int = (1 << 31) - 1, words: str = "") -> Rule:
    """Returns a rule that requires a whole number within bounds. True does not count as a number."""
    upper_limit_text = f" to {high}" if high < 1 << 30 else ""
    return Rule(
        words or f"a whole number from {low}{upper_limit_text}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """Returns a rule that requires a number for which `holds` is true; `words` describes it. True does not count as a
    number.
    """
    return Rule(words, lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value))


def _make_tuple_rule(
    words: str, is_valid_item: Callable[[object], bool] = lambda value: isinstance(value, str)
) -> Rule:
    return Rule(words, lambda value: isinstance(value, tuple) and all(map(is_valid_item, value)))


def _is_text_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _is_axis_with_values(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], str) and bool(value[1])


_MAX_MEMORY_BYTES = 100 << 40
# The memory limit that means all of a device's memory, and the word for it on the command line.
ALL_MEMORY = 0
ALL_MEMORY_WORD = "device"
_MEMORY_SIZE_DESCRIPTION = f"a size above 0 and up to {size(_MAX_MEMORY_BYTES)}, like 2GiB"
MEMORY_SIZE_RULE = whole_number(ALL_MEMORY + 1, _MAX_MEMORY_BYTES, _MEMORY_SIZE_DESCRIPTION)
_POSITIVE_SECONDS_RULE = number("a number of seconds above 0", lambda value: 0 < value < 1e7)
PERCENT_RULE = number("a percentage from 0 to below 100", lambda value: 0 <= value < 100)
KNOWN_SCALES = _make_tuple_rule(
    "magnitudes by precision, layer and role",
    lambda scale: isinstance(scale, tuple) and len(scale) == 4 and scale[3] >= 0,
)
_NAME_LIST_RULE = _make_tuple_rule("a list of names")
_BOOLEAN_RULE = Rule("True or False", lambda value: isinstance(value, bool))
_NONEMPTY_PATH_RULE = Rule("a path", lambda value: isinstance(value, str) and bool(value))


@dataclass(frozen=True)
class RequestOption:
    """Declares how a field of a request is set. The command line, option files, Python calls and the checks all read
    this declaration.

    `group` is the section of the help that lists the option, '' if the command line cannot set the field. `called` is
    the name of the option if it differs from the name of the field. `metavar` is the placeholder of the value in the
    help. `parse` names the parser in cli/option_types if the field's type does not determine it. `choices` are the
    only allowed values.
    """

    rule: Rule
    help: str = ""
    group: str = ""
    metavar: str = ""
    called: str = ""
    parse: str = ""
    choices: tuple[str, ...] = ()


WHAT_TO_MEASURE = "what to measure"
HOW_TO_MEASURE = "how"


def option(
    default: Any,
    rule: Rule,
    words: str = "",
    metavar: str = "",
    group: str = HOW_TO_MEASURE,
    called: str = "",
    parse: str = "",
    choices: tuple[str, ...] = (),
) -> Any:
    request_option = RequestOption(rule, words, group, metavar, called, parse, choices)
    return field(default=default, metadata={"option": request_option})


def list_request_options(kind: type) -> dict[str, RequestOption]:
    return {field.name: field.metadata["option"] for field in fields(kind) if "option" in field.metadata}


def name_fields(kind: type) -> dict[str, str]:
    """Returns the name that each field has in Python calls: the name of its option on the command line, unless that is
    a keyword of Python or the name of a different field.
    """
    names = [field.name for field in fields(kind)]
    option_name_by_field = {
        name: request_option.called
        for name, request_option in list_request_options(kind).items()
        if not keyword.iskeyword(request_option.called)
    }
    return {name: word if (word := option_name_by_field.get(name)) and word not in names else name for name in names}


def check_request_fields(request: Any, rules: Mapping[str, Rule]) -> None:
    """Raises UsageError for the first field whose value breaks its rule. A field may be None if this is its default."""
    default_by_field_name = {field.name: field.default for field in fields(request)}
    option_names = name_fields(type(request))
    for name, rule in rules.items():
        value = getattr(request, name)
        is_field_omitted = value is None and default_by_field_name[name] is None
        if not is_field_omitted and not rule.holds(value):
            raise UsageError(f"{option_names[name]} must be {rule.words}, got {value!r:.80}.")


# The choices of --energy: the energy of complete steps only, or also that of each phase.
ENERGY_PARTS = (STEP_ENERGY, PHASE_ENERGY) = ("step", "phases")


@dataclass(frozen=True)
class Request:
    """The request of a user, independent of the machine. Creating an impossible request raises UsageError.

    `case_timeout` and `sustained` are in seconds, and `saturation_bound` is a percentage. `memory_limit` is the
    number of bytes into which the largest batch must fit. ALL_MEMORY means all memory of the device.
    """

    suite: str = option(
        MISSING,
        Rule("a suite's name, several with commas, 'all', or a .py file", lambda value: isinstance(value, str)),
        group="",
    )
    dtypes: tuple[str, ...] = option((), _NAME_LIST_RULE, "precisions; default fp32,bf16,fp8", "A,B", WHAT_TO_MEASURE)
    devices: tuple[str, ...] = option(
        (), _NAME_LIST_RULE, "cpu, cuda, cuda:1; default the first GPU, else cpu", "A,B", WHAT_TO_MEASURE
    )
    reference: str | None = option(
        None,
        Rule("a dtype's name", lambda value: isinstance(value, str)),
        "the precision that others are compared with; default the highest",
        "DTYPE",
        WHAT_TO_MEASURE,
    )
    axes: tuple[tuple[str, tuple[str, ...]], ...] = option(
        (),
        _make_tuple_rule(
            "a mapping of axes to values, at least one each, like {'shape': [64, 128]}", _is_axis_with_values
        ),
        "values of an axis; `fp8bench list NAME` names the axes of a suite",
        "AXIS=A,B",
        WHAT_TO_MEASURE,
        called="set",
        parse="axis",
    )
    precision_map: tuple[tuple[str, str], ...] = option(
        (),
        _make_tuple_rule("a mapping of layers, or kinds of them, to dtypes, like {'mlp': 'fp8'}", _is_text_pair),
        (
            "layers in a different precision than the case: a kind (mlp), a name (blocks.0.mlp.up) or the "
            "beginning of names (blocks.0); or a file with one such entry per line; the reference ignores it"
        ),
        "LAYER=DTYPE,...",
        WHAT_TO_MEASURE,
        parse="precision_map",
    )
    data: str | None = option(
        None, _NONEMPTY_PATH_RULE, "text to train on; default Python's own sources", "FILE", WHAT_TO_MEASURE
    )
    quick: bool = option(False, _BOOLEAN_RULE, "quick test with few rounds")
    brisk: bool = option(
        False,
        _BOOLEAN_RULE,
        (
            "about 10 s per group, for a GPU rented by the minute: fewer rounds, two short energy windows per case, "
            "idle power once; default if --budget allows less than 20 s per group"
        ),
    )
    budget: float | None = option(
        None, _POSITIVE_SECONDS_RULE, "time for the whole run; default about 6 s per group", "SECONDS"
    )
    rounds: int | None = option(None, whole_number(1), "the number of rounds, without an early stop", "N")
    seed: int = option(0, whole_number(0), "the seed of data, weights and order; default 0", "N")
    threads: int = option(1, whole_number(1, 1024), "CPU threads of torch; default 1", "N")
    imports: tuple[str, ...] = option(
        (),
        _NAME_LIST_RULE,
        "a module or .py file that registers your workloads, precisions or devices",
        "MODULE",
        WHAT_TO_MEASURE,
        called="import",
        parse="each",
    )
    isolation: bool = option(True, _BOOLEAN_RULE, "measure in this process, without a worker")
    case_timeout: float | None = option(
        None,
        _POSITIVE_SECONDS_RULE,
        "the longest time to prepare a case or run one slot of it; default 60, more for large cases",
        "SECONDS",
    )
    grid: bool = option(
        False,
        _BOOLEAN_RULE,
        "measure the cases of the history, as `asv run` does; --set overrides them",
        "",
        WHAT_TO_MEASURE,
    )
    trace: str | None = option(
        None,
        _NONEMPTY_PATH_RULE,
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
        "set the float32 scale of each tensor from the data of N untimed steps",
        "N",
        WHAT_TO_MEASURE,
    )
    refresh_scales: int | None = option(
        None, whole_number(1), "renew static scales every M steps", "M", WHAT_TO_MEASURE
    )
    saturation_bound: float | None = option(
        None,
        PERCENT_RULE,
        "renew a tensor's scale whenever more than PERCENT of its values would saturate",
        "PERCENT",
        WHAT_TO_MEASURE,
    )
    energy: bool = option(
        True,
        _BOOLEAN_RULE,
        "do not measure energy; by default it is measured if the device has a counter, in windows of a second or more",
    )
    energy_of: str = option(
        STEP_ENERGY,
        Rule(f"one of {', '.join(ENERGY_PARTS)}", lambda value: value in ENERGY_PARTS),
        "phases: also measure the energy of each phase, in windows that only repeat this phase",
        "OF",
        called="energy",
        choices=ENERGY_PARTS,
    )
    memory_limit: int | None = option(
        None,
        whole_number(ALL_MEMORY, _MAX_MEMORY_BYTES, f"{_MEMORY_SIZE_DESCRIPTION}, or {ALL_MEMORY_WORD}"),
        f"also find the largest batch of each precision in SIZE of memory, like 2GiB, or {ALL_MEMORY_WORD} (all of a "
        "GPU), by running it and the next one; and compare precisions at their largest batches",
        "SIZE",
        called="max_batch",
        parse="memory",
    )
    backend: str = option(
        "auto",
        Rule("a backend's name", lambda value: isinstance(value, str) and bool(value)),
        "the library for low-precision products: {backends} (default auto: torch if it can, else emulated); for one "
        "dtype: fp8:backend=torchao",
        "NAME",
        WHAT_TO_MEASURE,
    )
    sustained: float | None = option(
        None,
        number("a number of seconds from 1 to 600", lambda value: 1 <= value <= 600),
        "also run each case for SECONDS without a break, after the device has settled, for its sustained time",
        "SECONDS",
    )
    tape: bool = option(
        False,
        _BOOLEAN_RULE,
        (
            "with --quick: also count operators of compiled steps, repeat steps after timing, and check whether "
            "memory grows; always done without --quick"
        ),
    )
    shares: bool = option(
        False,
        _BOOLEAN_RULE,
        "also measure the share of each module and each kind of work in a step, in an untimed pass",
    )
    counters: bool = option(
        False,
        _BOOLEAN_RULE,
        "also count a step's allocations and page faults, and the time of its allocations, in a separate pass",
    )
    ranks: int | None = option(
        None,
        whole_number(2, 1024),
        "run each case in N processes together, each on its GPU or all on the CPU; the slowest rank's time counts",
        "N",
    )

    scales_from: str | None = option(
        None,
        _NONEMPTY_PATH_RULE,
        "use the scales stored in a run instead: its id, its file, or last",
        "RUN",
        WHAT_TO_MEASURE,
    )
    # The largest magnitudes of tensors, read from the run that `scales_from` names.
    known_scales: tuple[tuple[str, str, str, float], ...] = option((), KNOWN_SCALES, group="")

    def __post_init__(self) -> None:
        check_request_fields(self, REQUEST_RULES)
        # Refuse contradictory options before anything is measured.
        if self.case_timeout is not None and not self.isolation:
            raise UsageError(
                "--case-timeout is impossible with --no-isolation: only a worker in a separate process can be "
                "ended. Omit one."
            )
        if self.counters and not self.isolation:
            raise UsageError(
                "--counters preloads a library into a separate worker process, and --no-isolation has none. Omit one."
            )
        if self.energy_of == PHASE_ENERGY and not self.energy:
            raise UsageError("--energy phases measures energy, but --no-energy does not. Omit one.")
        if self.ranks is not None:
            self._check_rank_options()
        for option, value in (("--refresh-scales", self.refresh_scales), ("--saturation-bound", self.saturation_bound)):
            if value is not None and self.static_scales is None and self.scales_from is None:
                raise UsageError(
                    f"{option} renews scales from data, but the request has none. Add --static-scales N, or "
                    f"omit {option}."
                )
        if self.static_scales is not None and self.scales_from is not None:
            raise UsageError("--static-scales measures scales, but --scales-from reads them from a run. Omit one.")

    def _check_rank_options(self) -> None:
        # Refuse options that time or count a single process: it would be unclear to which rank their figures belong.
        single_process_options = {
            "--no-isolation": not self.isolation,
            "--energy phases": self.energy_of == PHASE_ENERGY,
            "--sustained": self.sustained is not None,
            "--tape": self.tape,
            "--shares": self.shares,
            "--max-batch": self.memory_limit is not None,
            "--counters": self.counters,
            "--trace": self.trace is not None,
        }
        for option, is_asked in single_process_options.items():
            if is_asked:
                raise UsageError(f"{option} measures a single process, but --ranks starts several. Omit one.")

    @property
    def scales(self) -> StaticScales | None:
        if self.static_scales is None and self.scales_from is None:
            return None
        bound = None if self.saturation_bound is None else self.saturation_bound / 100
        source = self.scales_from or ""
        return StaticScales(self.static_scales or 0, self.refresh_scales or 0, bound, source, self.known_scales)


# The values of --trace that are not folders: `nvtx` marks slots for a profiler that already runs, the others name a
# profiler to start.
NVTX = "nvtx"
PROFILERS = ("nsys", "ncu")

REQUEST_RULES: Mapping[str, Rule] = {
    name: request_option.rule for name, request_option in list_request_options(Request).items()
}
