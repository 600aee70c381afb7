"""Times each operator of a step and finds the module for which it ran, in the forward and in the backward pass.

In forward an operator belongs to the module that is running. In backward the nodes of different modules alternate, so
each autograd node must be identified. A label is put on a node when its module returns. A node without a label is
identified by its sequence number, because autograd numbers nodes in the order in which modules create them. No
operator is added to the program.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from time import perf_counter_ns
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fp8bench.model.step import Share, ShareKind, Shares, SharesFrom
from fp8bench.tape.formulas import COPY_OPERATORS, CallLocation, classify_call
from fp8bench.tape.recorder import PhaseOperatorWatch, operator_name

_current_autograd_task = torch._C._current_graph_task_id
_next_node_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
# An autograd task is one backward pass. torch reports this task number outside of backward passes, so here all the
# work outside of them counts as one more task.
_FORWARD_TASK_NUMBER = -1
_NODE_LABEL_KEY = "fp8bench.module"
# The sequence number of all autograd nodes that accumulate a parameter's gradient. No module creates such nodes.
_ACCUMULATE_GRAD_NODE_NUMBER = 2**64 - 1
# The type of the labels that the caller assigns to modules.
L = TypeVar("L")


class _NodeRanges(Generic[L]):
    """The autograd nodes that were created during one autograd task, as ranges of sequence numbers. Each range has the
    label of the module that was running.
    """

    def __init__(self, first_number: int, outside_label: L) -> None:
        self.first_number = first_number
        self._outside_label = outside_label
        self._ends: list[int] = []
        self._labels: list[L] = []

    def add_label_range(self, end: int, label: L) -> None:
        """Adds the range from the end of the previous range to `end` (exclusive)."""
        if end > (self._ends[-1] if self._ends else self.first_number):
            self._ends.append(end)
            self._labels.append(label)

    def find_node_label(self, number: int) -> L:
        range_index = bisect_right(self._ends, number)
        return self._labels[range_index] if range_index < len(self._ends) else self._outside_label


@dataclasses.dataclass(slots=True, frozen=True)
class _RunningModule(Generic[L]):
    """A module whose forward pass is running. `task` is the id of the autograd task that runs it, and `first_number`
    the sequence number of the first node that the module may create.
    """

    label: L
    task: int
    first_number: int


class RunningModules(Generic[L]):
    """Tracks which module a step is in while `watch` is open. Modules without a label are ignored."""

    def __init__(self, label_of: Callable[[nn.Module], L | None], outside_label: L) -> None:
        self._label_of = label_of
        self._outside_label = outside_label
        self._running: list[_RunningModule[L]] = []
        self._ranges_by_task: dict[int, _NodeRanges[L]] = {}
        # Maps each backward task to the task that started it. This is the forward task in most cases. A checkpointed
        # block is recomputed within a backward task, which may then start another backward task for the block.
        self._parent_tasks = {_FORWARD_TASK_NUMBER: _FORWARD_TASK_NUMBER}
        self._last_task = _FORWARD_TASK_NUMBER

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._handle_module_start).remove)
            # Call the hook also after an exception, because the module has ended then too.
            hooks.callback(register_module_forward_hook(self._handle_module_end, always_call=True).remove)
            try:
                yield
            finally:
                self._running.clear()

    def locate_running_call(self) -> tuple[L, Any, bool]:
        """Returns where a call runs: the label of the module, the autograd node, and whether a backward pass is
        running. The node is None in forward, and also in a module that is recomputed during backward.
        """
        task = self._track_autograd_task()
        is_backward = task != _FORWARD_TASK_NUMBER
        if self._running and self._running[-1].task == task:
            return self._running[-1].label, None, is_backward
        node: Any = _current_node() if is_backward else None
        label = self._outside_label if node is None else self._find_node_label(node, task)
        return label, node, is_backward

    def enter_module(self, label: L) -> None:
        task, node_number = self._assign_new_nodes()
        self._running.append(_RunningModule(label, task, node_number))

    def leave_module(self) -> _RunningModule[L]:
        self._assign_new_nodes()
        return self._running.pop()

    def _track_autograd_task(self) -> int:
        task = _current_autograd_task()
        if task not in self._parent_tasks:
            self._parent_tasks[task] = self._last_task
        self._last_task = task
        return task

    def _find_node_label(self, node: Any, task: int) -> L:
        if _NODE_LABEL_KEY in node.metadata:
            return node.metadata[_NODE_LABEL_KEY]
        node_number = node._sequence_nr()
        # A node was created in forward, or by the parent task while that recomputed a block. The parent's nodes have
        # larger numbers than those of forward, so the node is the parent's if its number is not below their first.
        for creating_task in (self._parent_tasks[task], _FORWARD_TASK_NUMBER):
            node_ranges = self._ranges_by_task.get(creating_task)
            if node_ranges is not None and node_number >= node_ranges.first_number:
                return node_ranges.find_node_label(node_number)
        return self._outside_label

    def _handle_module_start(self, module: nn.Module, inputs: Any) -> None:
        label = self._label_of(module)
        if label is not None:
            self.enter_module(label)

    def _handle_module_end(self, module: nn.Module, inputs: Any, result: Any) -> None:
        # if this module started before `watch`, no module is recorded as running
        if self._running and self._label_of(module) is not None:
            self._label_autograd_nodes(result, self.leave_module())

    def _assign_new_nodes(self) -> tuple[int, int]:
        """Assigns the autograd nodes that were created since the last call to the module that ran. Returns the current
        autograd task and the next node's number.
        """
        task = self._track_autograd_task()
        node_number = _next_node_number()
        node_ranges = self._ranges_by_task.get(task)
        if node_ranges is None:
            node_ranges = self._ranges_by_task[task] = _NodeRanges(node_number, self._outside_label)
        label = self._outside_label
        # A module that another task runs did not create these nodes.
        if self._running and self._running[-1].task == task:
            label = self._running[-1].label
        node_ranges.add_label_range(node_number, label)
        return task, node_number

    def _label_autograd_nodes(self, result: Any, ended: _RunningModule[L]) -> None:
        """Labels the autograd nodes that a finished module created, as far as the module's result depends on them."""
        nodes_to_visit: list[Any] = [tensor.grad_fn for tensor in _iterate_result_tensors(result)]
        node_ranges = self._ranges_by_task[ended.task]
        visited_nodes = set()
        # Follow the autograd graph back from the result. Stop at nodes that existed before the module started.
        while nodes_to_visit:
            node = nodes_to_visit.pop()
            if node is None or node in visited_nodes or node._sequence_nr() < ended.first_number:
                continue
            visited_nodes.add(node)
            node_number = node._sequence_nr()
            # Nodes that accumulate a gradient are in no range. The first module that reaches such a node labels it.
            label = (
                ended.label if node_number == _ACCUMULATE_GRAD_NODE_NUMBER else node_ranges.find_node_label(node_number)
            )
            # Inner modules end first, so keep the label of a node that an inner module has labelled.
            node.metadata.setdefault(_NODE_LABEL_KEY, label)
            nodes_to_visit += [next_node for next_node, _ in node.next_functions]


class ModulePaths(RunningModules[str]):
    """Labels each module with its path in `named_modules`. A root module gets the name of its class. Models in
    `roots` are labelled at once, and other models when they first run.
    """

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        self._names: dict[nn.Module, str] = {}
        for root in roots:
            self._name_modules(root)
        super().__init__(self._find_module_path, outside_label="")

    def _find_module_path(self, module: nn.Module) -> str:
        if module not in self._names:
            self._name_modules(module)
        return self._names[module]

    def _name_modules(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(module).__name__)


def _iterate_result_tensors(result: Any) -> Iterator[Tensor]:
    """Yields the tensors in a module's result. It looks into nested collections and dataclasses, and into no other
    object.
    """
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _iterate_result_tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


# The prefix of the profiler range's name for an operator. The operator's number follows the prefix.
RANGE_PREFIX = "fp8bench.operator."
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class TimedCall(NamedTuple):
    """A call of an operator, where it ran, and its nanoseconds on the host. Nested operators are included in the
    time.
    """

    operator: Any
    location: CallLocation
    backward: bool
    nanoseconds: int


class OperatorTimes(PhaseOperatorWatch):  # type: ignore[no-untyped-call]
    """Times every operator in a `with` block with `clock`. Backward passes run in the thread that starts them. With
    `in_profiler_ranges`, each operator runs in a profiler range whose name has the operator's number.

    PhaseOperatorWatch passes the operators to `run_call`, and keeps the current phase in `_phase`.
    """

    watches_views = True  # so that `run_call` times views too

    def __init__(
        self,
        roots: Iterable[nn.Module] = (),
        clock: Callable[[], int] = perf_counter_ns,
        in_profiler_ranges: bool = False,
    ) -> None:
        super().__init__()
        self.calls: list[TimedCall] = []
        self._paths = ModulePaths(roots)
        # The task in which an optimizer's step runs. A backward pass inside that step is a separate task.
        self._optimizer_task: int | None = None
        self._clock = clock
        self._open_range: Callable[[str], Any] = (
            _open_range if in_profiler_ranges else lambda name: _NULL_PROFILER_RANGE
        )

    @contextmanager
    def time_calls(self) -> Iterator[list[TimedCall]]:
        """Yields the list of timed calls, which grows with every operator of the `with` block. After the block it
        removes its hooks on modules and optimizers.
        """
        self.calls = []
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._paths.watch())
            begin_hook = register_optimizer_step_pre_hook(
                lambda *ignored: setattr(self, "_optimizer_task", _current_autograd_task())
            )
            stack.callback(begin_hook.remove)
            optimizer_end_hook = register_optimizer_step_post_hook(
                lambda *ignored: setattr(self, "_optimizer_task", None)
            )
            stack.callback(optimizer_end_hook.remove)
            stack.enter_context(self)
            try:
                yield self.calls
            finally:
                self._optimizer_task = None

    def run_call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        module, node, backward = self._paths.locate_running_call()
        # An optimizer's step may call the model again. Operators in a module's forward pass do not count as optimizing.
        # `module` is '' outside of modules.
        is_module_forward = module != "" and not backward
        is_optimizing = (
            self._optimizer_task is not None
            and self._optimizer_task == _current_autograd_task()
            and not is_module_forward
        )
        source_dtype = _find_source_dtype(func, args) if operator_name(func) in COPY_OPERATORS else None
        with self._open_range(f"{RANGE_PREFIX}{len(self.calls)}"):
            call_begin_ns = self._clock()
            result = func(*args, **named)
            call_end_ns = self._clock()
        copy_dtypes = None if source_dtype is None else (source_dtype, _find_dtype(result) or source_dtype)
        call_location = CallLocation(
            self._phase, module, "" if node is None else node.name(), is_optimizing, copy_dtypes
        )
        self.calls.append(TimedCall(func, call_location, backward, call_end_ns - call_begin_ns))
        return result


_NULL_PROFILER_RANGE = nullcontext()


def _find_source_dtype(func: Any, args: tuple[Any, ...]) -> torch.dtype | None:
    """Returns the dtype of the tensor that a copy operator reads, or None if the argument has no tensor."""
    if operator_name(func) in ("_to_copy", "_copy_from"):
        return _find_dtype(args[:1])
    # The other COPY_OPERATORS have the target first and then the source, as in copy_(target, source).
    return _find_dtype(args[1:2] or args[:1])


def _find_dtype(value: Any) -> torch.dtype | None:
    return next((leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def _open_range(name: str) -> Any:
    from torch.autograd.profiler import record_function

    return record_function(name)


def compute_step_shares(steps: Sequence[Sequence[TimedCall]], unwatched_seconds: Sequence[float]) -> Shares:
    """Returns how steps whose operators were timed divide their time among operators, and the median time of steps that
    were not observed. The time of the shortest operator counts as the cost of timing. It is subtracted from every call.
    """
    calls, nanoseconds = _select_typical_step(steps)
    watch_cost_ns = min(nanoseconds, default=0.0)
    return Shares(
        sum_call_shares(calls, [(nanosecond - watch_cost_ns) * 1e-9 for nanosecond in nanoseconds]),
        median(unwatched_seconds),
    )


def compute_kernel_shares(
    calls: Sequence[TimedCall],
    operator_seconds: Mapping[int, float],
    kernel_seconds: Mapping[str, float],
    unwatched_seconds: float,
) -> Shares:
    """Returns how the device time of one step's kernels divides among operators. `operator_seconds` maps an
    operator's number to the seconds of the kernels that it launched. `kernel_seconds` maps the name of each kernel
    that no operator launched to its seconds.
    """
    operator_shares = sum_call_shares(calls, [operator_seconds.get(number, 0.0) for number in range(len(calls))])
    kernel_shares = [
        Share(ShareKind.UNKNOWN, module="", backward=False, seconds=seconds, calls=1, what=name)
        for name, seconds in kernel_seconds.items()
    ]
    return Shares((*operator_shares, *kernel_shares), unwatched_seconds, SharesFrom.KERNELS)


def sum_kernel_seconds(events: Sequence[Mapping[str, Any]]) -> tuple[dict[int, float], dict[str, float]]:
    """Sums the seconds of device kernels in a Chrome trace. Returns two mappings: from the number of each operator to
    the seconds of the kernels that it launched, and from the name of each kernel that no operator launched to its
    seconds.
    """
    operators = _match_launches_to_operators(events)
    operator_seconds: dict[int, float] = defaultdict(float)
    kernel_seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _KERNEL_CATEGORIES:
            operator = operators.get(_get_correlation_id(event))
            seconds = float(event["dur"]) * 1e-6  # Chrome traces count microseconds
            if operator is None:
                kernel_seconds[str(event.get("name"))] += seconds
            else:
                operator_seconds[operator] += seconds
    return dict(operator_seconds), dict(kernel_seconds)


def _match_launches_to_operators(events: Iterable[Mapping[str, Any]]) -> dict[object, int]:
    """Maps the correlation id of each kernel launch to the number of the operator that launched it. That is the
    innermost operator around the launch.
    """
    threads: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and (
            event.get("cat") in _LAUNCH_CATEGORIES or str(event.get("name")).startswith(RANGE_PREFIX)
        ):
            threads[event.get("tid")].append(event)
    operators: dict[object, int] = {}
    for thread in threads.values():
        open_operator_ranges: list[tuple[float, int]] = []  # the end time of each range, and its operator
        # If two ranges begin at the same time, the longer one comes first, because it contains the shorter one.
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_operator_ranges and open_operator_ranges[-1][0] <= event["ts"]:
                open_operator_ranges.pop()
            name = str(event.get("name"))
            if name.startswith(RANGE_PREFIX):
                open_operator_ranges.append((event["ts"] + event["dur"], int(name.removeprefix(RANGE_PREFIX))))
            elif open_operator_ranges:
                operators[_get_correlation_id(event)] = open_operator_ranges[-1][1]
    return operators


def _get_correlation_id(event: Mapping[str, Any]) -> object:
    return (event.get("args") or {}).get("correlation")


def sum_call_shares(calls: Iterable[TimedCall], seconds: Iterable[float]) -> tuple[Share, ...]:
    """Adds up calls of the same kind, module and pass (forward or backward). Returns the longest share first."""
    share_sums: dict[tuple[ShareKind, str, bool, str], Share] = {}
    for call, call_seconds in zip(calls, seconds, strict=True):
        kind, detail = classify_call(call.operator, call.location)
        key = kind, call.location.module, call.backward, detail
        zero_time_share = Share(kind, call.location.module, call.backward, seconds=0.0, calls=0, what=detail)
        share = share_sums.get(key, zero_time_share)
        share_sums[key] = dataclasses.replace(share, seconds=share.seconds + call_seconds, calls=share.calls + 1)
    return tuple(sorted(share_sums.values(), key=lambda share: -share.seconds))


def _select_typical_step(steps: Sequence[Sequence[TimedCall]]) -> tuple[Sequence[TimedCall], list[float]]:
    """Returns the calls of a step, and for each call the median of its time over all steps. If the steps have
    different operators, returns the step of median length and the times of its calls.
    """
    operators = []
    nanoseconds = []
    for step in steps:
        operators.append([call.operator for call in step])
        nanoseconds.append([call.nanoseconds for call in step])
    if all(step_operators == operators[0] for step_operators in operators):
        return steps[0], [median(call_nanoseconds) for call_nanoseconds in zip(*nanoseconds, strict=True)]
    step_numbers_sorted_by_time = sorted(range(len(steps)), key=lambda number: sum(nanoseconds[number]))
    median_step_number = step_numbers_sorted_by_time[len(step_numbers_sorted_by_time) // 2]
    return steps[median_step_number], [float(time) for time in nanoseconds[median_step_number]]
