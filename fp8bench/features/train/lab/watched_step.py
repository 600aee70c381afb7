"""Watches a training through hooks that are attached only during watched steps, and makes the lines of those steps.

Watching changes no number: it reads tensors that the step computes anyway, and draws no random numbers. A tensor is
read once per step, in the first micro-batch, and not again when a block is recomputed. For a compiled module only the
weights are read.
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

from fp8bench.features.train.lab.loop_figures import gains_of, local, without_wrappers
from fp8bench.features.train.lab.own_casts import (
    LayerCast,
    attention_seen,
    declared_treatments,
    find_cast,
    kept_scales,
    unpack,
    uses_compiled_code,
)
from fp8bench.features.train.lab.readings import (
    Figures,
    Number,
    TensorCast,
    attention_score,
    batch_norm_drift,
    begin_peak,
    bytes_in_use,
    cast_of,
    embedding_spread,
    figures_of,
    largest_row,
    read,
    reading_of,
    running_mean,
)
from fp8bench.features.train.values import LayerReading, StepFigure, StreamLine
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.model import Params
from fp8bench.nn.around import cast_to
from fp8bench.nn.attention import Core, SelfAttention
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.whole_layers import WholeLayers
from fp8bench.protocols import Arithmetic, Operand, Role, WatchedArithmetic


class ModelWatch:
    """The watched modules and parameters of one model. Only `scales` change from step to step."""

    def __init__(
        self,
        model: nn.Module,
        arm: str = "",
        seed: int = 0,
        inside: bool = True,
        precision: str = "",
        eager: bool = False,
    ) -> None:
        """Without `inside`, only weights are watched. With a `precision`, layers that are not ours are measured in its
        recipe. `eager`: watched steps run compiled modules without compilation, so that these are watched inside."""
        self._arm, self._seed, self.is_eager = arm, seed, eager
        self.is_foreign = bool(precision)
        self.treatments = declared_treatments(precision) if precision else {}
        self.scales: dict[str, float] = {}
        self.model = model
        # Wrappers prepend a prefix to each path.
        inner, prefix = without_wrappers(model)
        hooked = reversed([*_eager_modules(model, "", eager)]) if inside else ()
        self.modules = {module: path.removeprefix(prefix) for path, module in hooked}
        self.parameters = {path: parameter for path, parameter in inner.named_parameters() if parameter.requires_grad}
        matrices = ((path, parameter) for path, parameter in self.parameters.items() if parameter.ndim >= _MATRIX)
        self.weights = {path.removesuffix(".weight"): parameter for path, parameter in matrices}
        self._tables = {path: module for path, module in inner.named_modules() if _is_embedding(path, module)}
        self.embeddings = {path for path in self.weights if path in self._tables or _is_embedding(path)}
        self.gains = gains_of(inner)
        self.device = next(iter(self.parameters.values())).device

    def table(self, layer: str) -> Tensor:
        """Returns an embedding's values as the model looks them up: rounded to its precision."""
        own_arithmetic = getattr(self._tables.get(layer), "arithmetic", None)
        arithmetic = getattr(self.model, "around", {}).get(layer, own_arithmetic)
        return cast_to(local(self.weights[layer]).detach(), arithmetic, Role.WEIGHT)

    @contextmanager
    def step(self, guard: Callable[[Hook], Hook] = lambda hook: hook) -> Iterator[WatchedStep]:
        """Watches until it is left; `guard` wraps every hook, to handle its exceptions."""
        with ExitStack() as stack:
            yield WatchedStep(self, stack, guard)

    def lines(self, step: int, watched: WatchedStep) -> Iterator[StreamLine]:
        """The readings and figures of a watched step. Waits for the device once."""
        numbers = iter(read([*watched.tensors.values(), *({"": number} for number in watched.named.values())]))
        for layer, role in watched.tensors:
            yield self._reading(step, layer, role, next(numbers))
        for name, layer in watched.named:
            yield StepFigure(self._arm, self._seed, step, name, next(numbers)[""], layer)

    def _reading(self, step: int, layer: str, role: str, numbers: Mapping[str, float]) -> LayerReading:
        key = f"{layer} {role}"
        reading = reading_of(self._arm, self._seed, step, layer, role, numbers, self.scales.get(key))
        if "scale" in numbers or "octaves" in numbers:
            self.scales[key] = reading.scale
        return reading


_MATRIX = 2
Hook = Callable[..., Any]
# Computes what a tensor was multiplied by: only needed for a faulty tensor.
Scale = Callable[[], float]


@dataclass(frozen=True)
class FaultyTensor:
    """The first tensor that was not finite. `amax` is of its finite elements, `share` that of the others, `scale` what
    it was multiplied by before rounding, None if it was not."""

    layer: str
    tensor: str
    direction: str
    amax: float
    share: float
    scale: float | None

    @property
    def words(self) -> str:
        scaled = "" if self.scale is None else f", scaled by {self.scale:g}"
        return (
            f"the {self.tensor} of {self.layer}, in {self.direction}: {self.share:.3%} of it is not finite, the rest "
            f"is up to {self.amax:g}{scaled}"
        )

    @property
    def values(self) -> Params:
        scale = () if self.scale is None else (("scale", self.scale),)
        return ("direction", self.direction), ("amax", self.amax), ("share", self.share), *scale


class Finder:
    """Checks tensors, waiting for each, until one is not finite."""

    def __init__(self) -> None:
        self.place: FaultyTensor | None = None

    def see(self, layer: str, tensor: str, x: Tensor, backward: bool = False, scale: Scale | None = None) -> None:
        # The first faulty tensor is the cause; later ones are consequences.
        if self.place is not None or not x.is_floating_point():
            return
        values = x.detach().to(torch.float32)
        finite = values.isfinite()
        if bool(finite.all()):
            return
        amax = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
        direction, share = "backward" if backward else "forward", 1 - float(finite.double().mean())
        self.place = FaultyTensor(layer, tensor, direction, amax, share, scale and scale())

    @contextmanager
    def attach(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, parameter in model.named_parameters():
                self.see(name, "parameter", parameter)
                hook = partial(self._gradient, name, "gradient")
                stack.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            for name, module in model.named_modules():
                if name:
                    stack.callback(module.register_forward_hook(partial(self._output, name)).remove)
                if isinstance(arithmetic := getattr(module, "arithmetic", None), Arithmetic):
                    watched = WatchedArithmetic(arithmetic, partial(self._cast, name, arithmetic), turned=False)
                    module.arithmetic = watched
                    stack.callback(setattr, module, "arithmetic", arithmetic)
            yield

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self.see(name, "output", output)
            if output.requires_grad:
                hook = partial(self._gradient, name, "gradient of the output")
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, tensor: str, gradient: Tensor) -> None:
        self.see(name, tensor, gradient, backward=True)

    def _cast(
        self, name: str, arithmetic: Arithmetic, operand: Operand, source: Tensor | None, role: Role, _: Operand | None
    ) -> None:
        assert source is not None
        backward = role is Role.GRADIENT

        def scale() -> float:
            (figures,) = read([figures_of(source, cast_of(arithmetic, operand, source, role))])
            return reading_of("", 0, 0, name, role, figures, None).scale

        find_scale = None if arithmetic.plain else scale
        self.see(name, role.value, source, backward, find_scale)
        if self.place is None:
            rounded = arithmetic.restore(operand, torch.float32)
            self.see(name, f"{role.value} after rounding", rounded, backward, find_scale)


def not_finite_words(place: FaultyTensor | None, loss: float, norm: float) -> str:
    if math.isfinite(loss + norm):
        symptom = "the weights are not finite after an update"
    else:
        symptom = f"the loss is {loss:g}" if not math.isfinite(loss) else f"the norm of the gradients is {norm:g}"
    if place is None:
        return f"{symptom}; repeated, the step was finite: it is not deterministic, or only a sum was too large"
    return f"{symptom}; first came {place.words}"


class WatchedStep:
    """Collects figures until `stack` is unwound."""

    def __init__(self, watch: ModelWatch, stack: ExitStack, guard: Callable[[Hook], Hook]) -> None:
        self._guard = guard
        self.tensors: dict[tuple[str, str], Figures] = {}
        self.named: dict[tuple[str, str], Number] = {}
        self._watch = watch
        # The input that was read last, its version and cast: queries, keys and values share one.
        self._last_input: tuple[Tensor, int, LayerCast | None, Figures] | None = None
        # The module that was entered last, whose attention it is.
        self._inside = ""
        begin_peak(watch.device)
        if watch.is_eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module, path in watch.modules.items():
            self._attach(path, module, stack)
        # A changed function would make compiled code compile again.
        if watch.is_foreign and (watch.is_eager or not uses_compiled_code()):
            stack.enter_context(attention_seen(guard(self._see_attention)))

    def see_gradients(self, norms: Mapping[str, Tensor]) -> None:
        """Records the norm of each matrix's gradient, of those by parameter."""
        for path, norm in norms.items():
            layer = path.removesuffix(".weight")
            if layer in self._watch.weights and layer not in self._watch.embeddings:
                self.named["weight_gradient", layer] = norm

    @torch.no_grad()
    def see_update(self, moved: Mapping[str, Tensor], sizes: Mapping[str, Tensor]) -> None:
        """Records an update of the weights: norms of the changes and of the weights, by parameter."""
        self.named["memory", ""] = bytes_in_use(self._watch.device)
        modules = {path: module for module, path in self._watch.modules.items()}
        for layer, weight in self._watch.weights.items():
            self._see(layer, Role.WEIGHT, local(weight), self._find_cast(modules.get(layer), Role.WEIGHT))
        if self._watch.is_foreign:
            self.named |= {("kept_scale", path): value for path, value in kept_scales(self._watch.model)}
        for layer in self._watch.embeddings:
            table = self._watch.table(layer)
            self.named["embedding_spread", layer] = embedding_spread(table)
            self.named["largest_row", layer] = largest_row(table)
        for path, norm in moved.items():
            self.named["update_ratio", path.removesuffix(".weight")] = norm / sizes[path]
        for path, gain in self._watch.gains.items():
            shard = local(gain)
            size = math.sqrt(max(shard.numel(), 1))
            self.named["gain", path] = torch.linalg.vector_norm(shard, dtype=torch.float32) / size

    def _attach(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        arithmetic: object = getattr(module, "arithmetic", None)
        casts = isinstance(arithmetic, Arithmetic) and not isinstance(arithmetic, WholeLayers)
        if isinstance(arithmetic, Arithmetic) and casts:
            stack.callback(setattr, module, "arithmetic", arithmetic)
            watched = WatchedArithmetic(arithmetic, partial(self._cast, path, arithmetic), turned=False)
            setattr(module, "arithmetic", watched)  # noqa: B010 - a module declares no such thing
        if casts or _has_weights(module):
            hook = self._guard(partial(self._see_output, path, not casts))
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        elif self._watch.is_foreign:
            stack.callback(module.register_forward_pre_hook(self._guard(partial(self._enter, path))).remove)
        if isinstance(module, SelfAttention):
            stack.callback(setattr, module, "core", module.core)
            module.core = partial(self._see_scores, path, module.core)
        if running_mean(module) is not None:
            hook = self._guard(partial(self._see_norm, path))
            stack.callback(module.register_forward_pre_hook(hook).remove)

    def _cast(
        self, path: str, inner: Arithmetic, operand: Operand, source: Tensor | None, role: Role, _: Operand | None
    ) -> None:
        assert source is not None
        self._see(path, role, source, lambda x: cast_of(inner, operand, x, role))

    def _see_output(
        self, path: str, both_sides: bool, module: nn.Module, inputs: tuple[Any, ...], named: Any, output: Any
    ) -> None:
        """Records a layer's output; with `both_sides` also its input and the gradient of its output."""
        # Layers of Transformer Engine may return their bias as well.
        output = output[0] if isinstance(output, tuple) and output else output
        if not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return
        # A block that is recomputed passes twice.
        if ("output_amax", path) not in self.named and output.is_floating_point():
            self.named["output_amax", path] = largest_magnitude(local(output))
        if not both_sides:
            return
        first = next(filter(lambda value: isinstance(value, Tensor), (*inputs, *named.values())), None)
        if first is not None:
            self._see_input(path, first, self._find_cast(module, Role.INPUT))
        if output.requires_grad and output.numel() > 1:
            see = partial(self._see, path, Role.GRADIENT, cast=self._find_cast(module, Role.GRADIENT))
            output.register_hook(self._guard(see))  # type: ignore[no-untyped-call]

    def _see_input(self, path: str, x: Tensor, cast: LayerCast | None) -> None:
        last, key = self._last_input, (path, str(Role.INPUT))
        if last is not None and last[0] is x and last[1:3] == (x._version, cast):
            self.tensors.setdefault(key, last[3])
            return
        self._see(path, Role.INPUT, x, cast)
        if key in self.tensors:
            self._last_input = (x, x._version, cast, self.tensors[key])

    def _find_cast(self, module: nn.Module | None, role: Role) -> LayerCast | None:
        if module is None or not self._watch.is_foreign:
            return None
        return find_cast(module, role, self._watch.treatments)

    def _enter(self, path: str, *_: object) -> None:
        self._inside = path

    def _see_attention(self, q: Tensor, k: Tensor, causal: bool, scale: float | None) -> None:
        if ("attention_score", self._inside) not in self.named:
            with torch.no_grad():
                score = attention_score(q, k, causal)
                factor = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
                self.named["attention_score", self._inside] = score * factor

    def _see_scores(self, path: str, core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if ("attention_score", path) not in self.named:
            with torch.no_grad():
                self.named["attention_score", path] = attention_score(q, k, getattr(core, "causal", True))
        return core(q, k, v)

    def _see_norm(self, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        mean, channels_last = running_mean(module), isinstance(module, BatchNorm)
        if mean is not None and ("batch_norm_drift", path) not in self.named:
            with torch.no_grad():
                self.named["batch_norm_drift", path] = batch_norm_drift(inputs[0], mean, channels_last=channels_last)

    def _see(
        self, layer: str, role: str, x: Tensor, cast: Callable[[Tensor], TensorCast] | LayerCast | None = None
    ) -> None:
        if (layer, role) not in self.tensors and x.is_floating_point() and x.numel() > 1:
            with torch.no_grad():
                x, kept_cast = unpack(local(x))
                if isinstance(cast, LayerCast) and kept_cast is None:
                    self.tensors[layer, str(role)] = cast.figures(x)
                    return
                made_cast = cast(x) if cast is not None and not isinstance(cast, LayerCast) else None
                self.tensors[layer, str(role)] = figures_of(x, kept_cast or made_cast)


def is_watched(step: int, stride: int) -> bool:
    """Whether a step is watched: the first one, and a random one per stride, so that periodic effects are not
    missed."""
    number = step // stride
    return step % stride == (random.Random(number).randrange(stride) if number else 0)


def _is_embedding(path: str, module: nn.Module | None = None) -> bool:
    return isinstance(module, nn.Embedding) or path.rpartition(".")[2] == "embedding"


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.ndim >= _MATRIX for parameter in module.parameters(recurse=False))


def _eager_modules(module: nn.Module, path: str, compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and those inside it; without `compiled` ones, whose hooks would not run."""
    if not compiled and (hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None):
        return
    yield path, module
    for name, child in module.named_children():
        yield from _eager_modules(child, f"{path}.{name}".lstrip("."), compiled)
