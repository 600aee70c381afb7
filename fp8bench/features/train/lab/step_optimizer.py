"""StepOptimizer updates an arm's weights by an optimizer of torch: one that is listed by name, or a user's.
HighAccumulation wraps any torch optimizer for weights in low precision. Gradients add up in high precision, but the
updates are applied in low precision.

    optimizer = fp8bench.HighAccumulation(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1))

Each parameter has a float32 master, which the inner optimizer updates. As soon as the gradient of a micro-batch is
there, it is added to the master's float32 gradient. `step` lets the optimizer change the masters, rounds their updates,
and copies the masters to the parameters in their dtypes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.loop_figures import list_parameters
from fp8bench.features.train.lab.low_precision import (
    WEIGHTS_BY_MASTER,
    Gradients,
    LowPrecisionGradients,
    NamedParameters,
    TensorSequence,
    Weights,
    make_state_storages,
    make_update_rounding,
)
from fp8bench.features.train.lab.rates import find_clip_group, find_learning_rate_factor, find_parameter_kind
from fp8bench.features.train.request import UNSUPPORTED_OPTIMIZERS, TrainerSettings, parse_clip_option, parse_optimizer
from fp8bench.features.train.values import State
from fp8bench.nn.moments import MomentStorageMethod, split_into_buckets
from fp8bench.protocols import Operand
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named


def derive_seed(purpose: str, *numbers: int) -> int:
    """Returns a seed that almost surely differs from the seeds for all other arguments. A seed has 32 bits, because a
    CPU generator takes no more.
    """
    text = "/".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


# Fused optimizers divide gradients and skip a step on the device, and the host need not wait.
_OPTIMIZERS_BY_NAME: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, fused=True),
    "sgd": partial(SGD, fused=True),
    "adafactor": Adafactor,
}
# A bucket has at most this many weights, because measuring its update takes a copy of them.
_MAX_BUCKET_ELEMENTS = 1 << 24
# Gradients or states in low precision are restored for an update. To limit their memory, a model is then divided into
# at least this many buckets.
_LOW_PRECISION_BUCKET_COUNT = 16
# The names that reports give to the states of torch's optimizers.
_OPTIMIZER_STATE_NAMES = {
    "exp_avg": "first moment",
    "momentum_buffer": "first moment",
    "row_var": "first moment",
    "exp_avg_sq": "second moment",
    "col_var": "second moment",
    "variance": "second moment",
    "step": "steps",
}


@dataclass(eq=False)
class ParameterBucket:
    """Parameters that one torch optimizer updates together. `gradient_holders` are the tensors with the gradients: the
    parameters themselves, or the masters of a HighAccumulation. Before an update, all of these gradients are divided by
    the same divisor: entry `place` of the model's list. A user's optimizer has no `place`. Each of its gradients has a
    separate divisor, and parameters without a gradient do not change. `storages` hold the moments between steps;
    without `storages`, the optimizer holds them.
    """

    optimizer: Optimizer
    parameters: list[Tensor]
    gradient_holders: TensorSequence
    place: int | None = None
    storages: tuple[MomentStorageMethod, MomentStorageMethod] | None = None
    _stored_optimizer_states: dict[tuple[Tensor, str], Operand] = field(default_factory=dict)

    def create_optimizer_states(self) -> None:
        """Makes torch create the optimizer's states now. For this the optimizer takes a step with zero gradients and
        a rate of 0, which changes no weight and is not counted.
        """
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        (group,) = self.optimizer.param_groups
        rate = group["lr"]
        weight_decay = group["weight_decay"]
        group["lr"] = group["weight_decay"] = 0.0
        self.optimizer.step()
        group["lr"] = rate
        group["weight_decay"] = weight_decay
        for parameter in self.parameters:
            parameter.grad = None
            for value in self.optimizer.state[parameter].values():
                # The optimizer has counted the step, so set its count back to 0.
                if isinstance(value, Tensor):
                    value.zero_()
        self.store_states()

    def restore_moment_states(self) -> None:
        for (parameter, name), operand in self._stored_optimizer_states.items():
            self.optimizer.state[parameter][name] = self._find_moment_storage(name).restore(operand)

    def store_states(self) -> None:
        if self.storages is None:
            return
        for parameter, state in self.optimizer.state.items():
            for name, value in list(state.items()):
                # Only moments are stored in low precision: they have the shape of their parameter.
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    self._stored_optimizer_states[parameter, name] = self._find_moment_storage(name).store(
                        state.pop(name)
                    )

    def _find_moment_storage(self, name: str) -> MomentStorageMethod:
        assert self.storages is not None
        return self.storages[_OPTIMIZER_STATE_NAMES.get(name) == "second moment"]

    def update(self, rate_share: float, divisors: TensorSequence, is_skipped: Tensor) -> bool:
        """Takes a step of the optimizer, with all rates multiplied by `rate_share`. Changes nothing if `is_skipped`
        is 1. Returns False if the optimizer's step was not called.
        """
        optimizer: Any = self.optimizer
        groups = optimizer.param_groups
        # Save the rates and restore them after the step, because a user's schedule may compute the next rates from
        # them.
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * rate_share
        try:
            if self.place is not None and groups[0].get("fused"):  # a fused optimizer divides and skips on the device
                optimizer.grad_scale = divisors[self.place]
                optimizer.found_inf = is_skipped
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf
                return True
            if bool(is_skipped):
                return False
            if self.place is not None:
                divisors = [divisors[self.place]] * len(self.gradient_holders)
            for holder, gradient_divisor in zip(self.gradient_holders, divisors, strict=True):
                if holder.grad is not None:
                    holder.grad.div_(gradient_divisor.to(holder.grad.dtype))
            optimizer.step()
            return True
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def list_state_tensors(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields all tensors of the optimizer's states, each with the name that torch gives it."""
        for state in self.optimizer.state.values():
            yield from ((name, [value]) for name, value in state.items() if isinstance(value, Tensor))
        yield from ((name, operand.tensors) for (_, name), operand in self._stored_optimizer_states.items())

    def get_state(self) -> State:
        numbers = {parameter: number for number, parameter in enumerate(self.gradient_holders)}
        stored_tensors_by_key = {
            f"{numbers[parameter]}/{name}": operand.tensors
            for (parameter, name), operand in self._stored_optimizer_states.items()
        }
        return {"torch": self.optimizer.state_dict(), "stored": stored_tensors_by_key}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["torch"])
        for key, tensors in state["stored"].items():
            number, _, name = key.partition("/")
            parameter = self.gradient_holders[int(number)]
            self._stored_optimizer_states[parameter, name] = Operand(
                *(tensor.to(parameter.device) for tensor in tensors)
            )


@dataclass(eq=False)
class StepOptimizer:
    """Updates an arm's weights. `updates` is the format to which updates are rounded. A user's optimizer has no
    `full_learning_rate`, but may have a `schedule`.
    """

    parameters: NamedParameters
    buckets: Sequence[ParameterBucket]
    gradients: Gradients
    weights: Weights
    updates: str
    full_learning_rate: float | None = None
    schedule: Any = None

    def __post_init__(self) -> None:
        self._round_updates = make_update_rounding(self.updates)
        # By the parameter's id: the norm of its last update, and the norm of its weights. The order is that of the
        # model's parameters, not of the buckets.
        self._norms = {id(parameter): (torch.zeros(()), torch.zeros(())) for parameter in self.parameters.values()}

    @property
    def rate(self) -> float:
        """Returns the full learning rate. For a user's optimizer, returns the current rate of its first group."""
        return (
            float(self.buckets[0].optimizer.param_groups[0]["lr"])
            if self.full_learning_rate is None
            else self.full_learning_rate
        )

    @torch.no_grad()
    def step(self, rate_share: float, divisors: TensorSequence, skip: Tensor, is_measured: bool = True) -> None:
        """Updates the weights, with the learning rate multiplied by `rate_share`. Each gradient is divided by its entry
        in `divisors`. If `skip` is 1, nothing changes. Without `is_measured`, the norms of updates may be reported as
        0, which saves a copy of the weights.
        """
        self.weights.load_high_precision()
        has_stepped = True
        # Copying, restoring and rounding only one bucket at a time limits the memory.
        for bucket in self.buckets:
            measured_parameters = bucket.parameters if is_measured or self._round_updates else []
            old_weights = [parameter.detach().clone() for parameter in measured_parameters]
            if bucket.place is not None:
                self.gradients.restore_gradients(bucket.gradient_holders)
            bucket.restore_moment_states()
            has_stepped = bucket.update(rate_share, divisors, skip)
            if self._round_updates is not None:
                self._round_updates(old_weights, bucket.parameters)
            bucket.store_states()
            self.gradients.free_gradients(bucket.gradient_holders)
            self.weights.round_weights(bucket.parameters)
            weight_norms = torch._foreach_norm(bucket.parameters)
            change_norms = [torch.zeros_like(size) for size in weight_norms]
            if old_weights:
                torch._foreach_sub_(old_weights, bucket.parameters)
                change_norms = list(torch._foreach_norm(old_weights))
            for parameter, change, size in zip(bucket.parameters, change_norms, weight_norms, strict=True):
                self._norms[id(parameter)] = change.to(torch.float32), size.to(torch.float32)
        # The schedule does not advance if the optimizer skipped its step.
        if self.schedule is not None and has_stepped:
            self.schedule.step()
        self.gradients.finish_step()

    @property
    def update_norms(self) -> list[Tensor]:
        return [update_norm for update_norm, _ in self._norms.values()]

    @property
    def weight_norms(self) -> list[Tensor]:
        return [weight_norm for _, weight_norm in self._norms.values()]

    def stored_tensors(self) -> dict[str, list[Tensor]]:
        """Returns all tensors that stay in memory between two steps, by their purpose, such as 'first moment'."""
        tensors_by_purpose: dict[str, list[Tensor]] = {name: [] for name in _OPTIMIZER_STATE_NAMES.values()}
        for bucket in self.buckets:
            for name, tensors in bucket.list_state_tensors():
                tensors_by_purpose.setdefault(_OPTIMIZER_STATE_NAMES.get(name, name.replace("_", " ")), []).extend(
                    tensors
                )
        states = {name: tensors for name, tensors in tensors_by_purpose.items() if tensors}
        return {"weights": self.weights.stored_tensors(), "gradients": self.gradients.stored_tensors(), **states}

    def get_state(self) -> State:
        """Returns the state on which the next step depends. Gradients are not part of it, because the next step
        computes them. The scales of stored gradients are part of it.
        """
        schedule_state = {} if self.schedule is None else self.schedule.state_dict()
        bucket_states = [bucket.get_state() for bucket in self.buckets]
        weights = self.weights.stored_tensors()
        gradients = self.gradients.list_scale_shares()
        return {"weights": weights, "gradients": gradients, "buckets": bucket_states, "schedule": schedule_state}

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Any]) -> None:
        for tensors, name in (
            (self.weights.stored_tensors(), "weights"),
            (self.gradients.list_scale_shares(), "gradients"),
        ):
            for tensor, values in zip(tensors, state[name], strict=True):
                tensor.copy_(values)
        for bucket, values in zip(self.buckets, state["buckets"], strict=True):
            bucket.set_state(values)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])


def make_step_optimizer(parameters: NamedParameters, settings: TrainerSettings) -> StepOptimizer:
    """Returns the optimizer that --optimizer names. All parameters of one of its buckets have the same rate, weight
    decay and clipping.
    """
    trained_parameters = list(parameters.values())
    gradient_format = settings.gradients
    # with ZeRO, a rank receives the mean gradient of all micro-batches at once
    gradients_per_step = 1 if settings.parallel == "zero" else settings.micro_batches
    gradients = (
        Gradients(trained_parameters)
        if gradient_format == "fp32"
        else LowPrecisionGradients(trained_parameters, gradients_per_step, gradient_format == "fp8")
    )
    layers = [
        parameter for name, parameter in parameters.items() if find_parameter_kind(name, parameter.ndim) == "layer"
    ]
    name, keys = parse_optimizer(settings.optimizer)
    weight_decay = float(keys.get("weight_decay", 0.0))
    _, clip_group = parse_clip_option(settings.clip)
    parameter_numbers_by_group: dict[tuple[float, float, str], list[int]] = {}
    for number, (path, parameter) in enumerate(parameters.items()):
        factor = find_learning_rate_factor(path, parameter.ndim, settings.rates)
        group = find_clip_group(path, parameter.ndim, clip_group)
        parameter_numbers_by_group.setdefault((factor, weight_decay if parameter.ndim > 1 else 0.0, group), []).append(
            number
        )
    max_bucket_elements = _MAX_BUCKET_ELEMENTS
    if (settings.optimizer_states, settings.gradients) != ("fp32", "fp32"):
        max_bucket_elements = min(
            max_bucket_elements,
            sum(parameter.numel() for parameter in trained_parameters) // _LOW_PRECISION_BUCKET_COUNT,
        )
    buckets = []
    for (factor, bucket_weight_decay, _), numbers in parameter_numbers_by_group.items():
        if "weight_decay" in keys:  # norms and biases have no weight decay
            keys["weight_decay"] = bucket_weight_decay
        for part in split_into_buckets([trained_parameters[number].numel() for number in numbers], max_bucket_elements):
            tensors: list[Tensor] = [trained_parameters[number] for number in numbers[part]]
            optimizer = _make_named_optimizer(name, tensors, settings.rate * factor, keys)
            storages = make_state_storages(settings.optimizer_states)
            bucket = ParameterBucket(optimizer, tensors, tensors, numbers[part][0], storages)
            if name in _OPTIMIZERS_BY_NAME:
                bucket.create_optimizer_states()
            buckets.append(bucket)
    # Create the stored weights after the optimizers, because this frees the initial values that optimizers need.
    weights = WEIGHTS_BY_MASTER[settings.master](trained_parameters, layers)
    return StepOptimizer(parameters, buckets, gradients, weights, settings.updates, settings.rate)


def _make_named_optimizer(name: str, parameters: TensorSequence, rate: float, keys: Mapping[str, Any]) -> Optimizer:
    if name in _OPTIMIZERS_BY_NAME:
        return _OPTIMIZERS_BY_NAME[name](parameters, lr=rate, **keys)
    try:
        optimizer = named(name)(parameters, lr=rate, **keys)
    except Exception as error:
        raise UsageError(f"--optimizer {name} cannot be made: {own_words(error)}.") from error
    return _check_optimizer(optimizer, f"--optimizer {name}", "Give a class of torch optimizers: FILE.py:CLASS.")


def wrap_user_optimizer(
    name: str, model: nn.Module, make: Callable[..., Any], schedule: Callable[..., Any] | None, updates: str = "fp32"
) -> StepOptimizer:
    """Wraps the optimizer and the schedule of the user's function `name`. In every step, the host waits for the device
    to learn whether the step is skipped. Raises UsageError for unsupported optimizers.
    """
    try:
        optimizer = make(model)
        scheduler = schedule(optimizer) if schedule is not None else None
    except Exception as error:
        raise UsageError(f"{name}: its optimizer or schedule cannot be made: {own_words(error)}.") from error
    advice = (
        "Give a function that takes the model and returns a torch optimizer: lambda model: "
        "torch.optim.SGD(model.parameters(), lr=0.1)."
    )
    optimizer = _check_optimizer(optimizer, f"{name}: its optimizer function", advice)
    scheduler_needs_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if scheduler is not None and (scheduler_needs_loss or not callable(getattr(scheduler, "step", None))):
        raise UsageError(
            f"{name}: its schedule function returns {type(scheduler).__name__}. Give a function that takes the "
            "optimizer and returns a torch scheduler whose step() takes no argument."
        )
    optimizer_parameters = list_parameters(optimizer)
    low_weights, high_weights = (getattr(optimizer, word, optimizer_parameters) for word in ("trained", "masters"))
    # A HighAccumulation updates master weights, so its gradients belong to the masters.
    master_by_id = dict(zip(map(id, low_weights), high_weights, strict=True))
    parameters = {path: parameter for path, parameter in model.named_parameters() if id(parameter) in master_by_id}
    if len(parameters) < len(master_by_id):
        raise UsageError(f"{name}: its optimizer has parameters that are not the model's. Make it from the model.")
    trained_parameters = list(parameters.values())
    holders = [master_by_id[id(parameter)] for parameter in trained_parameters]
    bucket = ParameterBucket(optimizer, list[Tensor](trained_parameters), holders)
    return StepOptimizer(
        parameters, [bucket], Gradients(holders), Weights(trained_parameters), updates, schedule=scheduler
    )


def _check_optimizer(optimizer: object, source: str, advice: str) -> Optimizer:
    """Returns the optimizer if it can be used. Raises UsageError if it is not a torch optimizer, or if it needs
    sparse gradients or a closure.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"{source} returns {type(optimizer).__name__}. {advice}")
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        name = type(optimizer).__name__
        raise UsageError(
            f"{source} returns {name}, which cannot be used: {UNSUPPORTED_OPTIMIZERS[name.lower()]}. Choose another."
        )
    return optimizer


class HighAccumulation(torch.optim.Optimizer):
    """Lets a torch optimizer train weights in low precision. `trained` are the model's parameters and `masters` their
    float32 copies in the same order: clip and read the gradients of `masters`.

    parameters: the model's
    make: a function of the copies that returns their optimizer
    updates: the format to which each update is rounded: fp8 (E4M3, scaled by tensor), bf16, or fp32 for none
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        updates: str = "fp8",
    ) -> None:
        if updates not in ("fp8", "bf16", "fp32"):
            raise UsageError(f"updates must be fp8, bf16 or fp32, got {updates!r:.40}.")
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().to(torch.float32, copy=True)) for parameter in self.trained]
        self._inner_optimizer = make(self.masters)
        self._round_updates = make_update_rounding(updates)
        super().__init__(self.masters, {})
        # Schedulers change `param_groups`, so the inner optimizer has to use the same groups.
        self.param_groups = self._inner_optimizer.param_groups
        self.state = self._inner_optimizer.state
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient_to_master, master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        masters_before_step = [master.detach().clone() for master in self.masters]
        self._inner_optimizer.step()
        if self._round_updates is not None:
            self._round_updates(masters_before_step, self.masters)
        self._copy_masters()
        return loss

    def _copy_masters(self) -> None:
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> State:
        return {"inner": self._inner_optimizer.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        # Loading replaces the groups and the states of the inner optimizer by new objects.
        self._inner_optimizer.load_state_dict(state_dict["inner"])
        self.param_groups = self._inner_optimizer.param_groups
        self.state = self._inner_optimizer.state
        for master, values in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(values)
        self._copy_masters()


def _add_gradient_to_master(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    # Move the gradient: if it stayed in the parameter, the next micro-batch would add to it in low precision.
    gradient = parameter.grad.to(torch.float32)
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None
