"""Figures of a user's training loop: how it treats gradients and optimizer state between steps, what the model
predicts, and the gains of its norm layers. Between watched steps the host reads no tensor, because reading would wait
for the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8bench.features.train.lab.low_precision import NamedParameters, TensorSequence
from fp8bench.features.train.lab.readings import FigureValue
from fp8bench.features.train.values import GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN

# Inputs are compared by a sample of at most this many values.
_MAX_SAMPLED_VALUES = 1 << 12
# With fewer examples, or with fewer values per example, duplicate examples are normal.
_MIN_BATCH_EXAMPLES = 8
_NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_TENSOR_TYPES = (Tensor, nn.Parameter)


def list_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def get_local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor. Any other tensor is returned unchanged."""
    # `hasattr` is slow for a tensor without the attribute.
    return tensor if type(tensor) in _TENSOR_TYPES or not hasattr(tensor, "to_local") else tensor.to_local()


def unwrap_module(module: nn.Module) -> tuple[nn.Module, str]:
    """Returns the module inside wrappers such as DDP and torch.compile, and the prefix that they add to parameter
    paths."""
    prefix = ""
    while (names := [name for name, _ in module.named_children()]) in (["module"], ["_orig_mod"]):
        prefix += f"{names[0]}."
        module = getattr(module, names[0])
    return module, prefix


class GradientIdentity(NamedTuple):
    """Identifies the gradient of a parameter by a weak reference, which does not keep it in memory, and by its version.
    Also stores the version of the parameter. An `id` would be ambiguous, because the next gradient often gets the same
    memory.
    """

    parameter: Tensor
    gradient: weakref.ref[Tensor]
    version: int
    weight_version: int

    @property
    def is_gradient_untouched(self) -> bool:
        gradient = self.parameter.grad
        # weakref.ref returns the same object for the same tensor.
        return (
            gradient is not None
            and weakref.ref(gradient) is self.gradient
            and get_local_shard(gradient)._version == self.version
        )

    @property
    def is_gradient_cleared(self) -> bool:
        gradient = self.parameter.grad
        if gradient is None:
            return True
        # An unchanged gradient was not cleared. Reading its values would wait for the device.
        return not self.is_gradient_untouched and not bool(get_local_shard(gradient).any())


class LoopMistakeDetector:
    """Detects mistakes that a loop makes with the gradients and the optimizer of a module. `pop_new_mistakes` returns
    each new mistake once.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # A script may replace its optimizer by a new one: watching must not keep the old one in memory.
        self._optimizer_ref = weakref.ref(optimizer)
        self._module_ids = {id(parameter) for parameter in module.parameters()}
        self._record_gradient_marks()
        self._are_gradients_cleared = self._had_backward = self._others_stepped = False
        self._state_count, self._state_steps = 0, 0.0
        self._new_mistakes: list[str] = []
        self._current_mistakes: set[str] = set()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    @contextmanager
    def watch_other_optimizers(self) -> Iterator[None]:
        hook_handle = register_optimizer_step_post_hook(self._note_other_optimizer_step)
        try:
            yield
        finally:
            hook_handle.remove()

    def list_figures(self, parameters: NamedParameters) -> dict[tuple[str, str], Tensor | float]:
        """Returns the parameters whose learning rate is below the highest one, each with its rate as a share of the
        highest.
        """
        # Groups of an optimizer may have different rates, and health rules treat slow ones differently.
        highest_rate = self.highest_rate()
        rate_share_by_parameter_id: dict[int, float] = {}
        for rate, group in self._list_rates():
            if highest_rate > 0:
                rate_share_by_parameter_id |= dict.fromkeys(map(id, group["params"]), rate / highest_rate)
        return {
            ("rate_share", name.removesuffix(".weight")): rate_share
            for name, parameter in parameters.items()
            if (rate_share := rate_share_by_parameter_id.get(id(parameter), 1.0)) < 1
        }

    def begin_backward(self) -> None:
        """Detects that the loop did not clear its gradients before this backward: none has changed since the last
        backward. The new gradients would then be added to the old ones.
        """
        self._had_backward = True
        if not self._are_gradients_cleared:
            # Usually the first gradient was cleared, and `all` does not check the others.
            are_gradients_untouched = all(mark.is_gradient_untouched for mark in self._marks)
            self._are_gradients_cleared = not self._marks or not are_gradients_untouched

    def end_backward(self) -> bool:
        """Returns whether the backward changed gradients of the optimizer's parameters."""
        has_gradient_changed = any(not mark.is_gradient_untouched for mark in self._marks)
        has_changed_gradients = has_gradient_changed or any(
            parameter.grad is not None for parameter in self._without_gradient
        )
        self._record_gradient_marks()
        self._others_stepped = False
        return has_changed_gradients

    def find_discarded_gradients(self) -> str:
        """Returns what happened to the last backward's gradients before they were cleared. 'skipped': the weights
        were not updated. 'used': the weights have changed, or another optimizer has stepped since. Returns '' if the
        gradients were not cleared, or if no backward ran.
        """
        if not (self._had_backward and self._marks) or not all(mark.is_gradient_cleared for mark in self._marks):
            return ""
        # In a GAN, the loss of the other model's optimizer passes through this module too.
        has_weight_changed = any(mark.parameter._version != mark.weight_version for mark in self._marks)
        return "used" if self._others_stepped or has_weight_changed else "skipped"

    def forget_gradients(self) -> None:
        """Makes the next backward count as the first of a step."""
        self._record_gradient_marks()
        self._are_gradients_cleared, self._had_backward = True, False

    def begin_update(self, moments_zeroed: bool = False) -> None:
        self._track_mistake(GRADIENTS_LEFT, self._had_backward and not self._are_gradients_cleared)
        state_count, state_steps = self._measure_state()
        self._track_mistake(
            MOMENTS_GONE, state_count < self._state_count or state_steps < self._state_steps or moments_zeroed
        )

    def highest_rate(self) -> float:
        """Returns the highest rate of all groups; NaN for an optimizer without rates."""
        return max((rate for rate, _ in self._list_rates()), default=math.nan)

    def end_update(self) -> None:
        self._record_gradient_marks()
        self._are_gradients_cleared = self._had_backward = False
        self._state_count, self._state_steps = self._measure_state()

    def pop_new_mistakes(self) -> list[str]:
        new_mistakes, self._new_mistakes = self._new_mistakes, []
        return new_mistakes

    def _track_mistake(self, mistake: str, is_present: bool) -> None:
        """Stores whether the loop currently makes this mistake. A mistake that was absent before counts as new."""
        if is_present and mistake not in self._current_mistakes:
            self._new_mistakes.append(mistake)
        (self._current_mistakes.add if is_present else self._current_mistakes.discard)(mistake)

    def _note_other_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        outside_module_flags = (id(parameter) not in self._module_ids for parameter in list_parameters(optimizer))
        if optimizer is not self._optimizer_ref() and any(outside_module_flags):
            self._others_stepped = True
            self._track_mistake(OTHERS_TRAIN, True)

    def _list_rates(self) -> Iterator[tuple[float, dict[str, Any]]]:
        return ((float(group["lr"]), group) for group in self.optimizer.param_groups if group.get("lr") is not None)

    def _record_gradient_marks(self) -> None:
        self._marks: list[GradientIdentity] = []
        self._without_gradient: list[Tensor] = []
        # A plain loop without function calls, because it runs twice per step over all parameters.
        for parameter in list_parameters(self.optimizer):
            gradient = parameter.grad
            if gradient is None:
                self._without_gradient.append(parameter)
                continue
            # FSDP2 adds gradients to the shard, which does not change the version of the DTensor.
            gradient_shard = gradient if type(gradient) is Tensor else get_local_shard(gradient)
            self._marks.append(
                GradientIdentity(parameter, weakref.ref(gradient), gradient_shard._version, parameter._version)
            )

    def _measure_state(self) -> tuple[int, float]:
        """Returns the number of parameters with optimizer state, and the optimizer's step count. A count that is on a
        GPU is returned as 0, because reading it would wait.
        """
        state = self.optimizer.state
        steps = next(iter(state.values())).get("step", 0) if state else 0
        would_read_wait_for_device = isinstance(steps, Tensor) and steps.device.type != "cpu"
        return len(state), 0.0 if would_read_wait_for_device else float(steps)


# A function that is called with the loss when a backward begins, and with the detached loss when the backward ends. The
# argument is None if the loss is not a single number.
LossListener = Callable[[Tensor | None], None]
_backward_listeners: list[tuple[LossListener, LossListener]] = []
_running_backwards: list[bool] = []
_torch_backward = torch.autograd.backward


@contextmanager
def call_around_backward(begins: LossListener, ends: LossListener) -> Iterator[None]:
    """Calls `begins` before and `ends` after every backward that runs inside the `with` block, but not around nested
    backwards as in checkpointing. For this it replaces `torch.autograd.backward`, which every backward calls.
    """
    backward_listener = begins, ends
    _backward_listeners.append(backward_listener)
    torch.autograd.backward = _backward_with_listeners  # type: ignore[assignment]
    try:
        yield
    finally:
        _backward_listeners.remove(backward_listener)
        # Other code may have replaced the function in the meantime. Then leave its replacement.
        if not _backward_listeners and torch.autograd.backward is _backward_with_listeners:
            torch.autograd.backward = _torch_backward


def _backward_with_listeners(tensors: Tensor | TensorSequence, *args: Any, **named: Any) -> None:
    if _running_backwards:
        return _torch_backward(tensors, *args, **named)
    listeners, roots = tuple(_backward_listeners), [tensors] if isinstance(tensors, Tensor) else list(tensors)
    # Only a single number is a loss. A backward from anything else is a part of a larger backward.
    loss_tensor = roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None
    for begin_listener, _ in listeners:
        begin_listener(loss_tensor)
    # A nested backward, as in checkpointing, is not a step of the loop.
    _running_backwards.append(True)
    try:
        _torch_backward(tensors, *args, **named)
    finally:
        _running_backwards.pop()
    for _, ends in listeners:
        ends(None if loss_tensor is None else loss_tensor.detach().reshape(()))
    return None


@lru_cache(maxsize=8)
def _make_fingerprint_weights(shape: torch.Size, device: torch.device) -> Tensor:
    # 2.399963 is the golden angle. Cosines of its multiples do not repeat, so the order of values matters.
    return torch.arange(shape.numel(), device=device).mul(2.399963).cos().reshape(shape)


def tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)


def sample_tensor_values(tensor: Tensor) -> Tensor:
    """Returns at most 4,096 evenly spaced values of a tensor, so that comparing takes the same time at any size."""
    flat_values = tensor.detach().flatten()
    return flat_values[:: -(-len(flat_values) // _MAX_SAMPLED_VALUES)]


def compute_fingerprint(samples: Sequence[Tensor]) -> Tensor:
    """Returns a number that is equal for equal samples, and almost surely different for different ones."""
    total = torch.zeros((), dtype=torch.float64, device=samples[0].device)
    for sample in samples:
        weighted_values = sample.to(torch.float64) * _make_fingerprint_weights(sample.shape, sample.device)
        total = total + weighted_values.sum().to(total.device)
    return total


def measure_input_figures(inputs: Any) -> dict[str, FigureValue]:
    """Returns figures of the first input of a model, from a sample of its values: the mean, the deviation, and the
    share of duplicate examples.
    """
    tensors = (tensor.detach() for tensor in tensors_in(inputs) if tensor.numel() > 1 and tensor.dtype != torch.bool)
    tensor = next(tensors, None)
    if tensor is None or tensor.is_complex():
        return {}
    values = sample_tensor_values(tensor).to(torch.float64)
    figures: dict[str, FigureValue] = {"input_mean": values.mean(), "input_deviation": values.std()}
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    if min(rows.shape) >= _MIN_BATCH_EXAMPLES:
        values = rows[:, :: -(-rows.shape[1] // _MAX_SAMPLED_VALUES)].to(torch.float64)
        # After sorting, equal examples are neighbours.
        fingerprints = (values * _make_fingerprint_weights(values.shape[1:], values.device)).sum(1).sort().values
        are_neighbours_equal = fingerprints[1:] == fingerprints[:-1]
        is_duplicate = pad(are_neighbours_equal, (0, 1)) | pad(are_neighbours_equal, (1, 0))
        figures["duplicates"] = is_duplicate.to(torch.float64).mean()
    return figures


def find_norm_gains(model: nn.Module) -> dict[str, Tensor]:
    gains = (
        (path, getattr(module, "weight", None))
        for path, module in model.named_modules()
        if isinstance(module, _NORM_LAYERS) or "Norm" in type(module).__name__
    )
    return {path: gain for path, gain in gains if isinstance(gain, nn.Parameter) and gain.ndim == 1}


# Between its loss function and the backward, a loss passes at most this many operations, such as scaling or
# averaging.
_MAX_LOSS_OPERATIONS = 8
# The mean entropy of predictions is computed from at most this many examples.
_SAMPLED_EXAMPLES = 256


def find_loss_node(loss: Tensor, *names: str) -> Any:
    """Returns the autograd node of the loss function that computed a loss, or None. The node is recognized by the
    beginning of its name.
    """
    graph_node: Any = loss.grad_fn
    for _ in range(_MAX_LOSS_OPERATIONS + 1):
        if graph_node is None or graph_node.name().startswith(names):
            return graph_node
        inputs = [function for function, _ in graph_node.next_functions if function is not None]
        # A sum of several losses has more than one loss function.
        graph_node = inputs[0] if len(inputs) == 1 else None
    return None


def measure_predictions(loss: Tensor) -> dict[str, FigureValue]:
    """Returns figures of a cross entropy: the number of classes, the mean entropy of a sample of predictions, and the
    largest range of logits. Returns {} for any other loss.
    """
    loss_node = find_loss_node(loss, "NllLoss")
    log_softmax_node: Any = loss_node.next_functions[0][0] if loss_node is not None else None
    if log_softmax_node is None or not log_softmax_node.name().startswith("LogSoftmax"):
        return {}
    dim = log_softmax_node._saved_dim
    dim -= (dim > 1 << 63) << 64  # autograd stores a negative dimension as an unsigned number
    with torch.no_grad():
        log_probabilities: Tensor = log_softmax_node._saved_result.movedim(dim, -1)
        log_probabilities = log_probabilities[None] if log_probabilities.ndim == 1 else log_probabilities
        # On a CPU aminmax() takes ten times as long.
        logit_ranges = log_probabilities.amax(-1).to(torch.float32) - log_probabilities.amin(-1)
        # Use a sample only: the exponentials of all examples would take as much memory as the logits.
        indices = torch.unravel_index(_sample_indices(logit_ranges.numel(), logit_ranges.device), logit_ranges.shape)
        sample = log_probabilities[indices].to(torch.float32)
        # A probability of 0 has the logarithm -inf, and 0 * -inf would be NaN.
        entropy = -(sample.exp() * sample.clamp(min=-1e4)).sum(-1).mean()
        return {"classes": float(log_probabilities.shape[-1]), "entropy": entropy, "logit_range": logit_ranges.amax()}


def _sample_indices(count: int, device: torch.device) -> Tensor:
    """Returns the indices of a sample of `count` examples: all, or 256 that are spread by the golden ratio. With equal
    distances, every sampled example could be the first of a sequence.
    """
    if count <= _SAMPLED_EXAMPLES:
        return torch.arange(count, device=device)
    golden_ratio_fractions = (
        torch.arange(_SAMPLED_EXAMPLES, dtype=torch.float64, device=device) * ((math.sqrt(5) - 1) / 2) % 1
    )
    return (golden_ratio_fractions * count).to(torch.int64)
