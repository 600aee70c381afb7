"""Checks the numbers of one converted layer against its input, current weight and bias.

A layer is judged as the model calls it, and then alone on random inputs: in both modes, with and without gradients, and
once backward. During that its trainable weight and bias hold random numbers, so that neither a bias of zeros nor a
stale copy of the weight hides a mistake; both are restored.

A difference is measured relative to sqrt(sum of x^2 w^2), the size of a sum of products with random signs. Casts move
every row and column by a few percent of it; a mistake moves some by most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.audit.layer_products import IMAGES, ROWS, LayerProduct, Misses, gain_of, misses
from fp8bench.features.audit.operands import Promised, spread
from fp8bench.nn.holders import CONV1D, CONV2D, kind_of
from fp8bench.user_code import own_words

HIGH, UNKNOWN, WEIGHTS = "as it came", "not known", "weights alone"
WIDE = {HIGH: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The error of rounding a result to bfloat16, and again when its bias is added.
_OUTPUT = 2.0**-7
# Casts that round differently have an error within this band of the emulation's, and a gain within this difference.
_BAND, _GAIN = (0.8, 1.25), 0.01
# A bias that was added more than once is reported beyond this factor.
_CLEARLY = 0.5
# A single row or column may exceed the overall error by this factor and this much.
_WORSE, _LITTLE = 2.5, 0.05
# The largest error of gradients: e5m2 has 0.07, stochastic rounding to four bits 0.3.
_LARGEST, _LARGEST_OF_FEW_BITS, _FEW_BITS = 0.12, 0.45, 6
_FOR_INFERENCE = ", although it is in training mode and has a weight or bias that needs one"
# The rows of a random input if the model showed none.
_UNSEEN = 32
# Names that libraries use for the scales of a weight stored as codes.
_SCALES = ("weight_scale_inv", "weight_scale")


class LayerVerdict(NamedTuple):
    """The precision in which a layer `runs`, '' if no cast was detected; `code` and `why` describe its fault."""

    runs: str = ""
    code: str = ""
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.code not in ("", "other-rounding")


@dataclass
class LayerNumbers:
    """A layer, its possible precisions, and how the model called it. Precisions named in `likely` are tried first, and
    accepted if they explain its results."""

    module: nn.Module
    weight: Tensor
    guesses: Mapping[str, Promised]
    likely: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None

    def check(self, x: Tensor | None, output: Any = None, alone: bool = True) -> LayerVerdict:
        """Judges the output of the layer within the model, if it was called, and then the layer alone."""
        try:
            return self._check(x if x is not None and x.numel() else None, output, alone)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return LayerVerdict("", "unchecked", f"called by itself on random numbers it raises {own_words(error)}")

    def _check(self, x: Tensor | None, output: Any, alone: bool) -> LayerVerdict:
        in_model = LayerVerdict() if x is None else self._judge(self._product(x), output, self.likely)
        if in_model.failed or not alone:
            return in_model
        by_itself = self._check_alone(self._random_input(x), (in_model.runs, *self.likely))
        if by_itself.failed or not in_model.runs:
            return by_itself
        if (in_model.runs in WIDE) is not (by_itself.runs in WIDE):
            return _unsteady("in the model", in_model.runs, by_itself.runs)
        return in_model

    @property
    def _bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.numel() else None

    @property
    def _in_codes(self) -> bool:
        return hasattr(self.weight, "__tensor_flatten__") or self.weight.dtype.itemsize == 1

    def _product(self, x: Tensor) -> LayerProduct:
        wide = x.detach().cpu().float()
        images = wide.reshape(-1, *wide.shape[-3:]) if wide.dim() > 2 else wide
        matrix = images if kind_of(self.module)[0] == CONV2D else wide.reshape(-1, wide.shape[-1])
        return LayerProduct(self.module, matrix, self._decode_weight(), not self._in_codes)

    def _decode_weight(self) -> Tensor:
        weight = self.weight.detach()
        if hasattr(weight, "__tensor_flatten__"):
            return weight.dequantize().cpu().float()
        scales = [scale for name in _SCALES if isinstance(scale := getattr(self.module, name, None), Tensor)]
        if weight.dtype.itemsize > 1 or not scales:
            return weight.cpu().float()
        scale = scales[0].detach().cpu().float()
        return weight.cpu().float() * spread(scale if scale.dim() == 2 else scale.reshape(-1, 1), weight)

    def _judge(self, product: LayerProduct, output: Any, likely: Sequence[str]) -> LayerVerdict:
        """Returns the precision in which an output was computed, or its fault."""
        # 1. Reject outputs of a wrong shape or without numbers.
        shape = product.exact.shape[-1]
        if not isinstance(output, Tensor) or (product.kind != CONV2D and output.shape[-1] != shape):
            return LayerVerdict("", "unchecked", "its output is not the product of its input and its weight")
        result = product.sample(output)
        if not bool(result.isfinite().all()):
            return LayerVerdict(UNKNOWN, "wrong-numbers", "some of its results are not finite")
        # 2. Subtract the bias, because promises are about products; the rounding that it causes is tolerated.
        bias = None if self._bias is None else self._bias.detach().cpu().float()
        product_result = result if bias is None else result - bias
        slack = _OUTPUT * torch.maximum(result.abs(), product_result.abs())

        def misses_of(expected: Tensor) -> Misses:
            return misses(((product_result - expected).abs() - slack).clamp(min=0), product.size)

        # 3. Compare with exact results, stored in each wide format.
        wide = {name: misses_of(product.kept_in(dtype)) for name, dtype in WIDE.items()}
        name = min(wide, key=lambda dtype: wide[dtype].level)
        # 4. Compare with each cast, likely ones first: the first match ends the search.
        guesses = {name: self.guesses[name] for name in (*likely, *self.guesses) if name in self.guesses}
        tight, same_error = dict[str, float](), list[str]()
        for guess, promised in guesses.items():
            for cast in product.casts(promised):
                if (miss := misses_of(cast)).none:
                    tight[guess] = min(miss.level, tight.get(guess, math.inf))
                    break
                same_error += [guess] * _has_error_of(cast, product_result, product)
            if guess in likely and guess in tight:
                break
        # 5. Exact results were not cast; if a cast matches as well, the precision is ambiguous.
        if wide[name].none:
            return LayerVerdict(WEIGHTS if self._in_codes else "" if tight else name)
        if tight:
            return LayerVerdict(min(tight, key=lambda guess: (guess not in likely, tight[guess])))
        # 6. Look for known faults: half a cast, another rounding.
        weight_casts = (cast for guess in guesses.values() for cast in product.casts(guess, inputs=False))
        if not self._in_codes and any(misses_of(cast).none for cast in weight_casts):
            return LayerVerdict(HIGH, "not-cast", "only its weight is cast: its inputs are multiplied as they came")
        if same_error:
            return LayerVerdict(
                same_error[0], "other-rounding", f"not the values of {same_error[0]}, but its error in every row"
            )
        return LayerVerdict(UNKNOWN, "wrong-numbers", _describe(product, product_result, bias, wide[HIGH]))

    def _random_input(self, x: Tensor | None) -> Tensor:
        """Returns random numbers of an input's shape and magnitude, with at most about `ROWS` rows."""
        kind, sides = kind_of(self.module)[0], self.weight.shape
        if x is None:
            dtype = torch.bfloat16 if self._in_codes else self.weight.dtype
            shape: Sequence[int] = (_UNSEEN, sides[0 if kind == CONV1D else 1])
            if kind == CONV2D:
                channels = sides[1] * int(getattr(self.module, "groups", 1))
                shape = (2, channels, *(4 * side + 8 for side in sides[2:]))
            return random_like(torch.zeros((), dtype=dtype, device=self.weight.device), shape)
        if kind == CONV2D:
            return random_like(x, x.shape if x.dim() == 3 else (min(len(x), IMAGES), *x.shape[1:]))
        *outer, rows, columns = x.shape if x.dim() > 1 else (1, *x.shape)
        images = [max(1, min(side, ROWS // rows)) for side in outer]
        return random_like(x, (*images, min(rows, ROWS), columns) if x.dim() > 1 else x.shape)

    def _check_alone(self, x: Tensor, likely: Sequence[str]) -> LayerVerdict:
        with restore_training(self.module), random_parameters(self._trainable(), x):
            product, first = self._product(x), LayerVerdict()
            for mode in (self.module.training, not self.module.training):
                self.module.train(mode)
                for gradients in (False, True):
                    with torch.set_grad_enabled(gradients):
                        output = self._call(x.detach().requires_grad_(gradients))
                    verdict = self._judge(product, output, (first.runs, *likely))
                    first = first if first.runs else verdict
                    how = (
                        f"in {'training' if mode else 'evaluation'} mode with gradients {'on' if gradients else 'off'}"
                    )
                    if verdict.failed:
                        return verdict if verdict is first else verdict._replace(why=f"{how}, {verdict.why}")
                    if verdict.runs != first.runs:
                        return _unsteady(how, verdict.runs, first.runs)
            self.module.train(not self.module.training)
            wrong = self._check_backward(x, product, first.runs)
        return first._replace(code="wrong-gradient", why=wrong) if wrong else first

    def _trainable(self) -> dict[str, Tensor]:
        parameters = {"weight": self.weight, "bias": self._bias}
        return {
            name: tensor
            for name, tensor in parameters.items()
            if tensor is not None and tensor.requires_grad and tensor.is_leaf and not tensor.is_inference()
        }

    def _call(self, x: Tensor) -> Any:
        """Calls the layer as the model did, with x in place of the first tensor."""
        arguments, options = list(self.arguments), dict(self.options or {})
        places = [place for place, value in enumerate(arguments) if isinstance(value, Tensor)]
        names = [name for name, value in options.items() if isinstance(value, Tensor)]
        if places:
            arguments[places[0]] = x
        elif names:
            options[names[0]] = x
        return self.module(*arguments, **options) if places or names else self.module(x)

    def _check_backward(self, x: Tensor, product: LayerProduct, runs: str) -> str:
        """Returns the fault of a gradient, '' for a right one. Only a trainable layer needs gradients."""
        # 1. Backpropagate one random gradient, the same in every audit.
        tensors = {"input": x.detach().requires_grad_(), **self._trainable()}
        is_trained = len(tensors) > 1 and self.module.training
        with torch.enable_grad():
            output = self._call(tensors["input"])
            if not output.requires_grad:
                return f"it has no gradient{_FOR_INFERENCE}" if is_trained else ""
            random = torch.Generator().manual_seed(1)
            gradient = torch.randn(output.shape, generator=random).to(output.device, output.dtype)
            gradients = torch.autograd.grad(output, tuple(tensors.values()), gradient, allow_unused=True)
        # 2. Compute exact gradients, their size from squared terms, and those of the promised cast.
        wide = gradient.cpu().float()
        exact, squares = product.gradients(wide), product.square_sides().gradients(wide.square())
        promised = self.guesses.get(runs)
        emulated = {} if promised is None else product.cast_gradients(wide, promised)
        few_bits = (
            any(cast is not None and cast.fmt.bits <= _FEW_BITS for cast in promised.treatments) if promised else False
        )
        # 3. Each gradient must exist if its tensor is trained, have the right shape, and be near the exact one.
        for (name, _), into in zip(tensors.items(), gradients, strict=True):
            if into is None and is_trained:
                return f"its {name} gradient does not exist{_FOR_INFERENCE}"
            if into is None:
                continue
            if into.numel() != exact[name].numel():
                return f"its {name} gradient has the shape {list(into.shape)}"
            # Formats with few bits lose more than the bound for eight bits allows.
            most = _LARGEST_OF_FEW_BITS if few_bits else _LARGEST
            right, size = exact[name], squares[name].sqrt()
            gain = gain_of(emulated[name], right) if name in emulated else 1.0
            if reason := _wrong_gradient(into.cpu().float().reshape(right.shape), right, size, most, gain):
                return f"its {name} gradient {reason}"
        return ""


def _unsteady(how: str, runs: str, otherwise: str) -> LayerVerdict:
    reason = f"{how} it multiplies {describe_casts(runs)}, and otherwise {describe_casts(otherwise)}"
    return LayerVerdict(runs, "not-cast" if WIDE.keys() & {runs, otherwise} else "unsteady", reason)


def describe_casts(runs: str) -> str:
    """Returns a phrase for how a layer multiplies, to follow that verb."""
    return (
        "operands as they came"
        if runs == HIGH
        else f"in {runs}"
        if runs in WIDE
        else f"as {runs} does"
        if runs
        else "without a cast that shows"
    )


def _has_error_of(cast: Tensor, result: Tensor, product: LayerProduct) -> bool:
    """Whether a result that differs from the cast's has an equivalent error: as large, as even over rows and columns,
    with the same gain."""
    exact, size = product.exact, product.size
    result_misses, cast_misses = (misses(each_result - exact, size) for each_result in (result, cast))
    low, high = (bound * cast_misses.level for bound in _BAND)
    gain = abs(gain_of(result, exact) - gain_of(cast, exact))
    return (
        low <= result_misses.level <= high
        and result_misses.worst <= _WORSE * cast_misses.worst + _LITTLE
        and gain <= _GAIN
    )


def _wrong_gradient(gradient: Tensor, exact: Tensor, size: Tensor, most: float, expected_gain: float) -> str:
    """Describes the fault of a gradient. Casts that saturate shrink it: its gain may be 1 or the expected one."""
    rows = exact.flatten(1) if exact.dim() > 1 else exact[None]
    off = ((gradient - exact).abs() - _OUTPUT * exact.abs()).clamp(min=0).reshape(rows.shape)
    missed, gain = misses(off, size.reshape(rows.shape)), gain_of(gradient, exact)
    level = misses((gradient - gain * exact).reshape(rows.shape), size.reshape(rows.shape)).level
    slack = _GAIN + level**2 + 4 * level / math.sqrt(exact.numel())
    if level <= most and not min(1, expected_gain) - slack <= gain <= max(1, expected_gain) + slack:
        return f"is {gain:.2f} times what its result's gradient gives"
    if missed.level > most or missed.worst > _WORSE * missed.level + _LITTLE:
        return (
            f"is {missed.level:.0%} off, {missed.worst:.0%} in the worst row or column; casts make at most {most:.0%}"
        )
    return ""


def _describe(product: LayerProduct, product_result: Tensor, bias: Tensor | None, missed: Misses) -> str:
    """Names a known mistake, or else describes where results are wrong."""
    exact = product.exact

    def is_near(expected: Tensor) -> bool:
        return float((product_result - expected).norm()) < _LARGEST * float(expected.norm())

    # 1. Known mistakes, the simplest first.
    result = product_result if bias is None else product_result + bias
    if not bool(result.any()):
        return "all of its results are 0"
    if bias is not None:
        added = bias.expand_as(product_result)
        share = gain_of(product_result - exact, added)
        if abs(share) > _CLEARLY and is_near(exact + share * added):
            return "its bias is not added" if abs(1 + share) < _CLEARLY else f"its bias is added {1 + share:.2g} times"
    # 2. One factor for all results: a scale was lost, or applied twice.
    right = exact if bias is None else exact + bias
    gain = gain_of(result, right)
    if abs(gain - 1) > _GAIN and float((result - gain * right).norm()) < _LARGEST * float(result.norm()):
        return f"its results are {gain:.2f} times what its input, current weight and bias give"
    # 3. Whole rows or columns: a shard, or a bias, went to the wrong place.
    for side, lines in (("columns", missed.columns), ("rows", missed.rows)):
        wrong = (lines > 3 * lines.median() + _LITTLE).nonzero().flatten().tolist()
        if wrong:
            return f"{len(wrong)} of {len(lines)} {side} that were looked at are wrong, the first is {wrong[0]}"
    # 4. Unknown: report the distance next to what casts cost.
    head = "its results are not those of its input, current weight and bias"
    return f"{head}: {missed.level:.0%} off, where casts make 1% to 20%"


def random_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns random numbers with a tensor's magnitude, none above its largest."""
    wide = tensor.detach().float()
    size, largest = float(wide.square().mean().sqrt()), float(wide.abs().max())
    random = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(math.prod(shape))) * (size or 1.0)
    return (random.clamp(-largest, largest) if largest else random).to(tensor.device, tensor.dtype)


@contextmanager
def random_parameters(tensors: dict[str, Tensor], x: Tensor) -> Iterator[None]:
    """Fills a layer's weight and bias with random numbers, and restores them afterwards. A bias gets the magnitude of
    results."""
    originals = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.copy_(random_like(tensor, tensor.shape))
            if len(originals) == 2:
                bias, weight = tensors["bias"], tensors["weight"].float()
                size = float(x.float().square().mean().sqrt()) * float(weight.norm()) / math.sqrt(bias.numel())
                bias.copy_(random_like(torch.zeros_like(bias), bias.shape) * size)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(originals[name])


@contextmanager
def restore_training(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
