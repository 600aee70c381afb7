"""Watches a training by hooks that exist only during watched steps, and makes the lines of these steps. Watching does
not change the training: it reads tensors that the step computes anyway, and draws no random numbers. A tensor is read
once per step, in the first micro-batch, and not again when a block is recomputed. In a compiled module only the weights
are read.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.loop_figures import find_norm_gains, get_local_shard, unwrap_module
from fp8bench.features.train.lab.own_casts import (
    OperandCast,
    find_cast,
    find_recipe_treatments,
    find_stored_scales,
    has_compiled_code,
    observe_attention,
    unpack_fp8,
)
from fp8bench.features.train.lab.readings import (
    FigureValue,
    FigureValues,
    TensorCast,
    describe_cast,
    find_running_mean,
    largest_output,
    make_layer_reading,
    max_attention_score,
    measure_batch_norm_drift,
    measure_embedding_spread,
    measure_largest_row_ratio,
    measure_peak_bytes,
    measure_tensor_figures,
    move_figures_to_host,
    reset_peak_memory,
)
from fp8bench.features.train.values import LayerReading, StepFigure, StreamLine
from fp8bench.model import Params
from fp8bench.nn.around import cast_to
from fp8bench.nn.attention import AttentionCore, SelfAttention
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.whole_layers import LibraryLayerArithmetic
from fp8bench.protocols import Arithmetic, Operand, Role, WatchedArithmetic


class ModelWatch:
    """The watched modules and parameters of a model. Only `scales`, the scales of the last readings, changes between
    steps.
    """

    def __init__(
        self,
        model: nn.Module,
        arm: str = "",
        seed: int = 0,
        inside: bool = True,
        precision: str = "",
        eager: bool = False,
    ) -> None:
        """With `inside` false, only weights are watched, and modules get no hooks. A `precision` means that a user's
        loop trains the model: its layers are measured by the recipe of this precision, unless their casts can be read.
        `eager` means that watched steps run compiled modules without compilation, so that their hooks run.
        """
        self._arm, self._seed, self.is_eager = arm, seed, eager
        self.is_user_loop = bool(precision)
        self.treatments = find_recipe_treatments(precision) if precision else {}
        self.scales: dict[str, float] = {}
        self.model = model
        # Wrappers such as DDP add a prefix to each path.
        inner, prefix = unwrap_module(model)
        hooked_modules = reversed([*_list_modules(model, "", eager)]) if inside else ()
        self.modules = {module: path.removeprefix(prefix) for path, module in hooked_modules}
        self.parameters = {path: parameter for path, parameter in inner.named_parameters() if parameter.requires_grad}
        matrices = (
            (path, parameter) for path, parameter in self.parameters.items() if parameter.ndim >= _MATRIX_DIMENSIONS
        )
        self.weights = {path.removesuffix(".weight"): parameter for path, parameter in matrices}
        self._tables = {path: module for path, module in inner.named_modules() if _is_embedding(path, module)}
        self.embeddings = [path for path in self.weights if path in self._tables or _is_embedding(path)]
        self.gains = find_norm_gains(inner)
        self.device = next(iter(self.parameters.values())).device

    def read_embedding(self, layer: str) -> Tensor:
        """Returns an embedding's values as the model uses them: rounded to the precision of the embedding."""
        module_arithmetic = getattr(self._tables.get(layer), "arithmetic", None)
        arithmetic = getattr(self.model, "around", {}).get(layer, module_arithmetic)
        return cast_to(get_local_shard(self.weights[layer]).detach(), arithmetic, Role.WEIGHT)

    @contextmanager
    def watch_step(self, guard: Callable[[Hook], Hook] = lambda hook: hook) -> Iterator[WatchedStep]:
        """Watches a step inside the `with` block. `guard` wraps every hook to handle its exceptions."""
        with ExitStack() as stack:
            yield WatchedStep(self, stack, guard)

    def make_stream_lines(self, step: int, watched: WatchedStep) -> Iterator[StreamLine]:
        """Yields the readings and figures of a watched step. This waits for the device once."""
        *tensors, numbers = move_figures_to_host([*watched.tensors.values(), watched.figures])
        for (layer, role), tensor in zip(watched.tensors, tensors, strict=True):
            yield self._make_layer_reading(step, layer, role, tensor)
        for (name, layer), number in numbers.items():
            yield StepFigure(self._arm, self._seed, step, name, number, layer)

    def _make_layer_reading(self, step: int, layer: str, role: str, numbers: Mapping[str, float]) -> LayerReading:
        key = f"{layer} {role}"
        reading = make_layer_reading(self._arm, self._seed, step, layer, role, numbers, self.scales.get(key))
        if "scale" in numbers or "octaves" in numbers:
            self.scales[key] = reading.scale
        return reading


_MATRIX_DIMENSIONS = 2
Hook = Callable[..., Any]
# Computes the factor that is applied to a tensor before rounding. Called only if the tensor has NaN or infinity.
FindScale = Callable[[], float]


@dataclass(frozen=True)
class FaultyTensor:
    """The first tensor with NaN or infinity. `share` is the fraction of elements that are not finite, and `amax` the
    largest magnitude of the finite elements. `scale` is the factor that was applied before rounding, or None.
    """

    layer: str
    tensor: str
    direction: str
    amax: float
    share: float
    scale: float | None

    @property
    def description(self) -> str:
        scale_text = "" if self.scale is None else f", scaled by {self.scale:g}"
        return (
            f"the {self.tensor} of {self.layer}, in {self.direction}: {self.share:.3%} of it is not finite, the rest "
            f"is up to {self.amax:g}{scale_text}"
        )

    @property
    def values(self) -> Params:
        scale = () if self.scale is None else (("scale", self.scale),)
        return ("direction", self.direction), ("amax", self.amax), ("share", self.share), *scale


class FaultyTensorFinder:
    """Checks one tensor after the other until one is not finite. Each check waits for the device."""

    def __init__(self) -> None:
        self.faulty_tensor: FaultyTensor | None = None

    def check(self, layer: str, tensor: str, x: Tensor, backward: bool = False, scale: FindScale | None = None) -> None:
        # Report only the first tensor with NaN or infinity, because it is the cause of all later ones.
        if self.faulty_tensor is not None or not x.is_floating_point():
            return
        values = x.detach().to(torch.float32)
        finite_mask = values.isfinite()
        if bool(finite_mask.all()):
            return
        amax = float(values[finite_mask].abs().max()) if bool(finite_mask.any()) else 0.0
        direction, share = "backward" if backward else "forward", 1 - float(finite_mask.double().mean())
        self.faulty_tensor = FaultyTensor(layer, tensor, direction, amax, share, scale and scale())

    @contextmanager
    def attach_hooks(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, parameter in model.named_parameters():
                self.check(name, "parameter", parameter)
                gradient_hook = partial(self._check_gradient, name, "gradient")
                stack.callback(parameter.register_hook(gradient_hook).remove)  # type: ignore[no-untyped-call]
            for name, module in model.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(partial(self._check_module_output, name)).remove)
                if isinstance(arithmetic := getattr(module, "arithmetic", None), Arithmetic):
                    watched_arithmetic = WatchedArithmetic(
                        arithmetic, partial(self._record_cast, name, arithmetic), turned=False
                    )
                    module.arithmetic = watched_arithmetic
                    stack.callback(setattr, module, "arithmetic", arithmetic)
            yield

    def _check_module_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.check(name, "output", output)
            if output.requires_grad:
                gradient_hook = partial(self._check_gradient, name, "gradient of the output")
                output.register_hook(gradient_hook)  # type: ignore[no-untyped-call]

    def _check_gradient(self, name: str, tensor: str, gradient: Tensor) -> None:
        self.check(name, tensor, gradient, backward=True)

    def _record_cast(
        self, name: str, arithmetic: Arithmetic, operand: Operand, source: Tensor | None, role: Role, _: Operand | None
    ) -> None:
        assert source is not None
        backward = role is Role.GRADIENT

        def find_scale_now() -> float:
            (figures,) = move_figures_to_host(
                [measure_tensor_figures(source, describe_cast(arithmetic, operand, source, role))]
            )
            return make_layer_reading("", 0, 0, name, role, figures, None).scale

        find_scale = None if arithmetic.plain else find_scale_now
        self.check(name, role.value, source, backward, find_scale)
        if self.faulty_tensor is None:
            rounded_values = arithmetic.restore(operand, torch.float32)
            self.check(name, f"{role.value} after rounding", rounded_values, backward, find_scale)


def describe_not_finite(faulty: FaultyTensor | None, loss: float, norm: float) -> str:
    if math.isfinite(loss + norm):
        symptom = "the weights are not finite after an update"
    else:
        symptom = f"the loss is {loss:g}" if not math.isfinite(loss) else f"the norm of the gradients is {norm:g}"
    if faulty is None:
        return (
            f"{symptom}; all tensors of the repeated step were finite: the step is not deterministic, or only a sum "
            "overflowed"
        )
    return f"{symptom}; first came {faulty.description}"


class WatchedStep:
    """Collects the figures of one step, by hooks that exist until `stack` is closed."""

    def __init__(self, watch: ModelWatch, stack: ExitStack, guard: Callable[[Hook], Hook]) -> None:
        self._guard = guard
        self.tensors: dict[tuple[str, str], FigureValues] = {}
        self.figures: dict[tuple[str, str], FigureValue] = {}
        self._watch = watch
        # The input measured last, with its version, cast and figures. Queries, keys and values often share one input,
        # which is then measured once.
        self._last_input: tuple[Tensor, int, OperandCast | None, FigureValues] | None = None
        # The paths of the modules whose forwards are running. A call of attention belongs to the last of them.
        self._running_modules: list[str] = []
        reset_peak_memory(watch.device)
        if watch.is_eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, path in watch.modules.items():
            self._attach_hooks(path, module, stack)
        # Compiled code would be compiled again if the attention function were replaced.
        if watch.is_user_loop and (watch.is_eager or not has_compiled_code()):
            stack.enter_context(observe_attention(guard(self._record_attention)))

    def record_gradients(self, norms: Mapping[str, Tensor]) -> None:
        """Records the gradient norms of all matrices except embeddings. `norms` has the gradient norm of each
        parameter, by path.
        """
        for path, gradient_norm in norms.items():
            layer = path.removesuffix(".weight")
            if layer in self._watch.weights and layer not in self._watch.embeddings:
                self.figures["weight_gradient", layer] = gradient_norm

    @torch.no_grad()
    def record_update_norms(self, change_norms: Mapping[str, Tensor], weight_norms: Mapping[str, Tensor]) -> None:
        """Records the weights after an update. `change_norms` has the norm of each parameter's change, and
        `weight_norms` the norm of its values before the update, in the same order.
        """
        self.figures["memory", ""] = measure_peak_bytes(self._watch.device)
        modules = {path: module for module, path in self._watch.modules.items()}
        for layer, weight in self._watch.weights.items():
            self._record_tensor(
                layer, Role.WEIGHT, get_local_shard(weight), self._find_cast(modules.get(layer), Role.WEIGHT)
            )
        if self._watch.is_user_loop:
            self.figures |= {("kept_scale", path): value for path, value in find_stored_scales(self._watch.model)}
        for layer in self._watch.embeddings:
            embedding_rows = self._watch.read_embedding(layer)
            self.figures["embedding_spread", layer] = measure_embedding_spread(embedding_rows)
            self.figures["largest_row", layer] = measure_largest_row_ratio(embedding_rows)
        ratios = torch._foreach_div(list(change_norms.values()), list(weight_norms.values()))
        for path, ratio in zip(change_norms, ratios, strict=True):
            self.figures["update_ratio", path.removesuffix(".weight")] = ratio
        for path, gain in self._watch.gains.items():
            gain_shard = get_local_shard(gain)
            # A norm divided by that of a vector of ones is the root mean square.
            gain_norm_of_ones = math.sqrt(max(gain_shard.numel(), 1))
            self.figures["gain", path] = torch.linalg.vector_norm(gain_shard, dtype=torch.float32) / gain_norm_of_ones

    def _attach_hooks(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        arithmetic: object = getattr(module, "arithmetic", None)
        has_arithmetic = isinstance(arithmetic, Arithmetic) and not isinstance(arithmetic, LibraryLayerArithmetic)
        if isinstance(arithmetic, Arithmetic) and has_arithmetic:
            stack.callback(setattr, module, "arithmetic", arithmetic)
            watched_arithmetic = WatchedArithmetic(
                arithmetic, partial(self._record_cast, path, arithmetic), turned=False
            )
            setattr(module, "arithmetic", watched_arithmetic)  # noqa: B010 - a module declares no such thing
        if has_arithmetic or _has_weights(module):
            output_hook = self._guard(partial(self._record_output, path, not has_arithmetic))
            stack.callback(module.register_forward_hook(output_hook, with_kwargs=True).remove)
        if self._watch.is_user_loop and not _is_torch_layer(module):
            forward_begin_hook = self._guard(lambda *_: self._running_modules.append(path))
            stack.callback(module.register_forward_pre_hook(forward_begin_hook).remove)
            end_forward_hook = self._guard(self._end_forward)
            stack.callback(module.register_forward_hook(end_forward_hook, always_call=True).remove)
        if isinstance(module, SelfAttention):
            stack.callback(setattr, module, "core", module.core)
            module.core = partial(self._record_attention_core, path, module.core)
        if find_running_mean(module) is not None:
            stack.callback(module.register_forward_pre_hook(self._guard(partial(self._record_norm, path))).remove)

    def _record_cast(
        self, path: str, inner: Arithmetic, operand: Operand, source: Tensor | None, role: Role, _: Operand | None
    ) -> None:
        assert source is not None
        self._record_tensor(path, role, source, lambda x: describe_cast(inner, operand, x, role))

    def _record_output(
        self, path: str, both_sides: bool, module: nn.Module, inputs: tuple[Any, ...], named: Any, output: Any
    ) -> None:
        """Records a layer's output. With `both_sides`, also records its input and the gradient of its output."""
        # Layers of Transformer Engine may return a tuple of output and bias.
        output = output[0] if isinstance(output, tuple) and output else output
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return
        # A recomputed block calls its hooks twice.
        if ("output_amax", path) not in self.figures and output.is_floating_point():
            self.figures["output_amax", path] = largest_output(get_local_shard(output))
        if not both_sides:
            return
        first_input = next(filter(lambda value: isinstance(value, Tensor), (*inputs, *named.values())), None)
        if first_input is not None:
            self._record_layer_input(path, first_input, self._find_cast(module, Role.INPUT))
        if output.requires_grad and output.numel() > 1:
            record_gradient = partial(
                self._record_tensor, path, Role.GRADIENT, cast=self._find_cast(module, Role.GRADIENT)
            )
            output.register_hook(self._guard(record_gradient))  # type: ignore[no-untyped-call]

    def _record_layer_input(self, path: str, x: Tensor, cast: OperandCast | None) -> None:
        last_input, key = self._last_input, (path, str(Role.INPUT))
        if last_input is not None and last_input[0] is x and last_input[1:3] == (x._version, cast):
            self.tensors.setdefault(key, last_input[3])
            return
        self._record_tensor(path, Role.INPUT, x, cast)
        if key in self.tensors:
            self._last_input = (x, x._version, cast, self.tensors[key])

    def _find_cast(self, module: nn.Module | None, role: Role) -> OperandCast | None:
        if module is None or not self._watch.is_user_loop:
            return None
        return find_cast(module, role, self._watch.treatments)

    def _end_forward(self, *_: object) -> None:
        # If watching began during this forward, `_running_modules` is empty here.
        del self._running_modules[-1:]

    def _record_attention(self, q: Tensor, k: Tensor, causal: bool, scale: float | None) -> None:
        self._record_attention_scores("".join(self._running_modules[-1:]), q, k, causal, scale)

    def _record_attention_core(
        self, path: str, compute_attention: AttentionCore, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        self._record_attention_scores(path, q, k, getattr(compute_attention, "causal", True))
        return compute_attention(q, k, v)

    @torch.no_grad()
    def _record_attention_scores(
        self, path: str, q: Tensor, k: Tensor, causal: bool, scale: float | None = None
    ) -> None:
        if ("attention_score", path) not in self.figures:
            # `max_attention_score` uses the default scale, 1 / sqrt(head width).
            scale_correction = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
            self.figures["attention_score", path] = max_attention_score(q, k, causal) * scale_correction

    @torch.no_grad()
    def _record_norm(self, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        mean = find_running_mean(module)
        if mean is not None and ("batch_norm_drift", path) not in self.figures:
            drift = measure_batch_norm_drift(inputs[0], mean, channels_last=isinstance(module, BatchNorm))
            self.figures["batch_norm_drift", path] = drift

    def _record_tensor(
        self, layer: str, role: str, x: Tensor, cast: Callable[[Tensor], TensorCast] | OperandCast | None = None
    ) -> None:
        if (layer, role) not in self.tensors and x.is_floating_point() and x.numel() > 1:
            with torch.no_grad():
                x, fp8_cast = unpack_fp8(get_local_shard(x))
                if isinstance(cast, OperandCast) and fp8_cast is None:
                    self.tensors[layer, str(role)] = cast.list_figures(x)
                    return
                tensor_cast = cast(x) if cast is not None and not isinstance(cast, OperandCast) else None
                self.tensors[layer, str(role)] = measure_tensor_figures(x, fp8_cast or tensor_cast)


def is_watched_step(step: int, stride: int) -> bool:
    """Returns whether a step is watched, which means that its tensors are measured: the first step of the training, and
    one random step of each further `stride` steps. Random steps also show periodic effects.
    """
    # Seed by the step alone, so that all arms and resumed trainings watch the same steps.
    watch_stride_index = step // stride
    return step % stride == (random.Random(watch_stride_index).randrange(stride) if watch_stride_index else 0)


def _is_embedding(path: str, module: nn.Module | None = None) -> bool:
    return isinstance(module, nn.Embedding) or path.rpartition(".")[2] == "embedding"


def _has_weights(module: nn.Module) -> bool:
    # Iterating over module.parameters() takes ten times as long.
    parameters = module._parameters.values()
    return any(parameter is not None and parameter.ndim >= _MATRIX_DIMENSIONS for parameter in parameters)


def _is_torch_layer(module: nn.Module) -> bool:
    """Returns whether a module is one of torch's own layers and contains no other modules, such as nn.Linear. Such a
    layer computes no attention.
    """
    return not module._modules and type(module).__module__.startswith("torch.nn.modules.")


def _list_modules(module: nn.Module, path: str, with_compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields the path of each module, starting with `module`, and the module. Compiled modules, whose hooks would not
    run, are left out unless `with_compiled`."""
    if not with_compiled and (hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None):
        return
    yield path, module
    for name, child in module.named_children():
        yield from _list_modules(child, f"{path}.{name}".lstrip("."), with_compiled)
