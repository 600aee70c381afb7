"""Checks the output of one converted layer against its input, current weight and bias.

A layer is judged as the model calls it, then alone on random inputs: in training and evaluation mode, with and
without gradients, and once backward. During the calls on random inputs, its trainable weight and bias hold random
numbers. So neither a zero bias nor a stale copy of the weight can hide a mistake. Both are restored afterwards.

A difference is measured relative to sqrt(sum of x^2 w^2), the typical size of a sum of products with random signs.
Casts change every row and column by a few percent of that size. A mistake changes some rows or columns by most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.audit.layer_products import (
    IMAGES,
    ROWS,
    LayerProduct,
    RelativeResultDifferences,
    fit_gain,
    measure_differences,
)
from fp8bench.features.audit.operands import PromisedCasts, expand_scales
from fp8bench.nn.holders import CONV1D_KIND, CONV2D_KIND, classify_module
from fp8bench.user_code import own_words

UNCAST, UNKNOWN_PRECISION, WEIGHTS_ONLY = "not cast", "not known", "weights alone"
WIDE_DTYPES = {UNCAST: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The largest relative error of a result that was rounded to bfloat16 twice: after the product, and after adding the
# bias.
_OUTPUT_ROUNDING_ERROR = 2.0**-7
# A correct cast may round differently from the emulation. Then its error, divided by the emulation's error, is within
# this band. Its mean gain differs from the emulation's by less than _MIN_GAIN.
_ERROR_BAND, _MIN_GAIN = (0.8, 1.25), 0.01
# A layer must add its bias once. It fails if the factor by which the bias was added differs from 1 by more than this.
_BIAS_FACTOR_TOLERANCE = 0.5
# The error of one row or column may be at most _LINE_FACTOR times the overall error, plus _LINE_SLACK.
_LINE_FACTOR, _LINE_SLACK = 2.5, 0.05
# The largest relative error of gradients: e5m2 has 0.07, and stochastic rounding to four bits 0.3.
_GRADIENT_ERROR, _FEW_BITS_GRADIENT_ERROR, _FEW_BITS = 0.12, 0.45, 6
_TRAINING_MODE_CLAUSE = ", although it is in training mode and has a weight or bias that needs a gradient"
# The number of rows of a random input if the model never called the layer.
_DEFAULT_INPUT_ROWS = 32
# The names that libraries give to the scales of a weight that is stored as codes.
_WEIGHT_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


class LayerVerdict(NamedTuple):
    """The verdict on the numbers of a layer. `runs` is the precision in which the layer runs; '' if no cast was
    detected. `code` and `why` describe what is wrong with it.
    """

    runs: str = ""
    code: str = ""
    why: str = ""

    @property
    def has_failed(self) -> bool:
        return self.code not in ("", "other-rounding")


@dataclass
class LayerNumbers:
    """Judges the numbers of a converted layer. `casts_by_precision` are the precisions in which the layer may run.
    Those in `likely_precisions` are tried first, and the first that explains the output is accepted. `arguments` and
    `options` are those with which the model called the layer.
    """

    module: nn.Module
    weight: Tensor
    casts_by_precision: Mapping[str, PromisedCasts]
    likely_precisions: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None

    def check(self, x: Tensor | None, output: Any = None, also_alone: bool = True) -> LayerVerdict:
        """Judges the `output` that the layer gave for the input `x` inside the model, unless `x` is None or empty. If
        this output is not wrong and `also_alone` is True, also judges the layer alone on random inputs.
        """
        try:
            return self._check_layer(x if x is not None and x.numel() else None, output, also_alone)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            return LayerVerdict("", "unchecked", f"called alone on random numbers, the layer raises {own_words(error)}")

    def _check_layer(self, x: Tensor | None, output: Any, also_alone: bool) -> LayerVerdict:
        verdict_in_model = (
            LayerVerdict() if x is None else self._judge_output(self._make_product(x), output, self.likely_precisions)
        )
        if verdict_in_model.has_failed or not also_alone:
            return verdict_in_model
        random_input_verdict = self._check_on_random_inputs(
            self._make_random_input(x), (verdict_in_model.runs, *self.likely_precisions)
        )
        if random_input_verdict.has_failed or not verdict_in_model.runs:
            return random_input_verdict
        if (verdict_in_model.runs in WIDE_DTYPES) is not (random_input_verdict.runs in WIDE_DTYPES):
            return _report_unsteady_precision("in the model", verdict_in_model.runs, random_input_verdict.runs)
        return verdict_in_model

    @property
    def _get_layer_bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.numel() else None

    @property
    def _has_quantised_weight(self) -> bool:
        # A quantised weight is a Tensor subclass, or has codes of one byte.
        return hasattr(self.weight, "__tensor_flatten__") or self.weight.dtype.itemsize == 1

    def _make_product(self, x: Tensor) -> LayerProduct:
        float_input = x.detach().cpu().float()
        images = float_input.reshape(-1, *float_input.shape[-3:]) if float_input.dim() > 2 else float_input
        matrix = (
            images if classify_module(self.module)[0] == CONV2D_KIND else float_input.reshape(-1, float_input.shape[-1])
        )
        return LayerProduct(self.module, matrix, self._decode_weight(), not self._has_quantised_weight)

    def _decode_weight(self) -> Tensor:
        weight = self.weight.detach()
        if hasattr(weight, "__tensor_flatten__"):
            return weight.dequantize().cpu().float()
        scales = [
            scale for name in _WEIGHT_SCALE_NAMES if isinstance(scale := getattr(self.module, name, None), Tensor)
        ]
        if weight.dtype.itemsize > 1 or not scales:
            return weight.cpu().float()
        scale = scales[0].detach().cpu().float()
        return weight.cpu().float() * expand_scales(scale if scale.dim() == 2 else scale.reshape(-1, 1), weight)

    def _judge_output(self, product: LayerProduct, output: Any, likely_precisions: Sequence[str]) -> LayerVerdict:
        """Returns the precision in which the layer computed an output, or what is wrong with that output."""
        # 1. Reject outputs with a wrong shape or with NaN or infinity.
        output_column_count = product.exact_result.shape[-1]
        if not isinstance(output, Tensor) or (product.kind != CONV2D_KIND and output.shape[-1] != output_column_count):
            return LayerVerdict(
                "", "unchecked", "its output does not have the shape of a product of its input and weight"
            )
        result = product.sample_output(output)
        if not result.isfinite().all():
            return LayerVerdict(UNKNOWN_PRECISION, "wrong-numbers", "some of its results are NaN or infinite")
        # 2. Subtract the bias, because promises are about products. Tolerate the rounding that adding it caused.
        bias = None if self._get_layer_bias is None else self._get_layer_bias.detach().cpu().float()
        result_without_bias = result if bias is None else result - bias
        rounding_slack = _OUTPUT_ROUNDING_ERROR * torch.maximum(result.abs(), result_without_bias.abs())

        def compare_with_output(expected_output: Tensor) -> RelativeResultDifferences:
            return measure_differences(
                ((result_without_bias - expected_output).abs() - rounding_slack).clamp(min=0),
                product.typical_magnitudes,
            )

        # 3. Compare with exact results, rounded to each wide format.
        output_differences_by_dtype = {
            name: compare_with_output(product.multiply_rounded(dtype)) for name, dtype in WIDE_DTYPES.items()
        }
        name = min(output_differences_by_dtype, key=lambda dtype: output_differences_by_dtype[dtype].level)
        # 4. Compare with each emulated cast, likely ones first. Stop if a likely cast matches.
        casts_by_guessed_precision = {
            name: self.casts_by_precision[name]
            for name in (*likely_precisions, *self.casts_by_precision)
            if name in self.casts_by_precision
        }
        matching_casts = dict[str, float]()
        casts_with_same_error = []
        for guess, promised_casts in casts_by_guessed_precision.items():
            for cast in product.iterate_cast_results(promised_casts):
                if (difference := compare_with_output(cast)).is_negligible:
                    matching_casts[guess] = min(difference.level, matching_casts.get(guess, math.inf))
                    break
                casts_with_same_error += [guess] * _has_equal_error(cast, result_without_bias, product)
            if guess in likely_precisions and guess in matching_casts:
                break
        # 5. An output that matches the exact result was not cast. If the output also matches a cast, its precision is
        # unknown.
        if output_differences_by_dtype[name].is_negligible:
            return LayerVerdict(WEIGHTS_ONLY if self._has_quantised_weight else "" if matching_casts else name)
        if matching_casts:
            return LayerVerdict(
                min(matching_casts, key=lambda guess: (guess not in likely_precisions, matching_casts[guess]))
            )
        # 6. Look for typical faults: only the weight was cast, or the cast rounds differently.
        weight_casts = (
            cast
            for guess in casts_by_guessed_precision.values()
            for cast in product.iterate_cast_results(guess, casts_inputs=False)
        )
        if not self._has_quantised_weight and any(compare_with_output(cast).is_negligible for cast in weight_casts):
            return LayerVerdict(UNCAST, "not-cast", "only its weight is cast; its inputs are multiplied without a cast")
        if casts_with_same_error:
            return LayerVerdict(
                casts_with_same_error[0],
                "other-rounding",
                f"its values differ from those of {casts_with_same_error[0]}, but have the same error in every row",
            )
        return LayerVerdict(
            UNKNOWN_PRECISION,
            "wrong-numbers",
            _describe_fault(product, result_without_bias, bias, output_differences_by_dtype[UNCAST]),
        )

    def _make_random_input(self, x: Tensor | None) -> Tensor:
        """Returns random numbers with the shape and magnitude of an input, limited to about `ROWS` rows."""
        kind = classify_module(self.module)[0]
        weight_shape = self.weight.shape
        if x is None:
            dtype = torch.bfloat16 if self._has_quantised_weight else self.weight.dtype
            shape: Sequence[int] = (_DEFAULT_INPUT_ROWS, weight_shape[0 if kind == CONV1D_KIND else 1])
            if kind == CONV2D_KIND:
                channel_count = weight_shape[1] * int(getattr(self.module, "groups", 1))
                shape = (2, channel_count, *(4 * side + 8 for side in weight_shape[2:]))
            return draw_random_like(torch.zeros((), dtype=dtype, device=self.weight.device), shape)
        if kind == CONV2D_KIND:
            return draw_random_like(x, x.shape if x.dim() == 3 else (min(len(x), IMAGES), *x.shape[1:]))
        *outer, rows, columns = x.shape if x.dim() > 1 else (1, *x.shape)
        batch_dimensions = [max(1, min(side, ROWS // rows)) for side in outer]
        return draw_random_like(x, (*batch_dimensions, min(rows, ROWS), columns) if x.dim() > 1 else x.shape)

    def _check_on_random_inputs(self, x: Tensor, likely_precisions: Sequence[str]) -> LayerVerdict:
        with restore_training_modes(self.module), random_parameters(self._list_trainable_parameters(), x):
            product = self._make_product(x)
            first_verdict = LayerVerdict()
            # Begin in the current mode. The calls in the other mode must have the same precision.
            for mode in (self.module.training, not self.module.training):
                self.module.train(mode)
                for are_gradients_enabled in (False, True):
                    with torch.set_grad_enabled(are_gradients_enabled):
                        output = self._call_layer(x.detach().requires_grad_(are_gradients_enabled))
                    verdict = self._judge_output(product, output, (first_verdict.runs, *likely_precisions))
                    first_verdict = first_verdict if first_verdict.runs else verdict
                    call_mode_text = f"in {'training' if mode else 'evaluation'} mode"
                    call_mode_text += f" with gradients {'on' if are_gradients_enabled else 'off'}"
                    if verdict.has_failed:
                        is_first_verdict = verdict is first_verdict
                        return verdict if is_first_verdict else verdict._replace(why=f"{call_mode_text}, {verdict.why}")
                    if verdict.runs != first_verdict.runs:
                        return _report_unsteady_precision(call_mode_text, verdict.runs, first_verdict.runs)
            # The loop ended in the other mode, so switch back before the backward pass.
            self.module.train(not self.module.training)
            gradient_fault = self._check_backward_numbers(x, product, first_verdict.runs)
        return first_verdict._replace(code="wrong-gradient", why=gradient_fault) if gradient_fault else first_verdict

    def _list_trainable_parameters(self) -> dict[str, Tensor]:
        parameters = {"weight": self.weight, "bias": self._get_layer_bias}
        return {
            name: tensor
            for name, tensor in parameters.items()
            if tensor is not None and tensor.requires_grad and tensor.is_leaf and not tensor.is_inference()
        }

    def _call_layer(self, x: Tensor) -> Any:
        """Calls the layer with the arguments that the model used, but with x in place of the first tensor."""
        arguments = list(self.arguments)
        options = dict(self.options or {})
        tensor_indices = [index for index, value in enumerate(arguments) if isinstance(value, Tensor)]
        tensor_option_names = [name for name, value in options.items() if isinstance(value, Tensor)]
        if tensor_indices:
            arguments[tensor_indices[0]] = x
        elif tensor_option_names:
            options[tensor_option_names[0]] = x
        return self.module(*arguments, **options) if tensor_indices or tensor_option_names else self.module(x)

    def _check_backward_numbers(self, x: Tensor, product: LayerProduct, runs: str) -> str:
        """Returns a description of the first wrong gradient, or '' if all are right. Layers that are not trained may
        have no gradients."""
        # 1. Backpropagate a random gradient, the same in every audit.
        differentiated_tensors = {"input": x.detach().requires_grad_(), **self._list_trainable_parameters()}
        is_trained = len(differentiated_tensors) > 1 and self.module.training
        with torch.enable_grad():
            output = self._call_layer(differentiated_tensors["input"])
            if not output.requires_grad:
                return f"it has no gradient{_TRAINING_MODE_CLAUSE}" if is_trained else ""
            generator = torch.Generator().manual_seed(1)
            gradient = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
            gradients = torch.autograd.grad(output, tuple(differentiated_tensors.values()), gradient, allow_unused=True)
        # 2. Compute the exact gradients, their typical size from squared terms, and the gradients of the emulated
        # cast.
        float_gradient = gradient.cpu().float()
        exact_gradients = product.compute_gradients(float_gradient)
        squared_gradient_sizes = product.square_operands().compute_gradients(float_gradient.square())
        precision_casts = self.casts_by_precision.get(runs)
        emulated_gradients = (
            {} if precision_casts is None else product.compute_cast_gradients(float_gradient, precision_casts)
        )
        promised_treatments = () if precision_casts is None else precision_casts.treatments
        has_low_bit_cast = any(cast is not None and cast.fmt.bits <= _FEW_BITS for cast in promised_treatments)
        # 3. Each gradient must have the right shape, and be near the exact one. In training, no gradient may be
        # missing.
        for (name, _), layer_gradient in zip(differentiated_tensors.items(), gradients, strict=True):
            if layer_gradient is None and is_trained:
                return f"its {name} gradient does not exist{_TRAINING_MODE_CLAUSE}"
            if layer_gradient is None:
                continue
            if layer_gradient.numel() != exact_gradients[name].numel():
                return f"its {name} gradient has the shape {list(layer_gradient.shape)}"
            # Casts to at most _FEW_BITS bits have larger errors, so their gradients get a higher limit.
            gradient_error_limit = _FEW_BITS_GRADIENT_ERROR if has_low_bit_cast else _GRADIENT_ERROR
            exact_gradient = exact_gradients[name]
            emulated_gradient_gain = (
                fit_gain(emulated_gradients[name], exact_gradient) if name in emulated_gradients else 1.0
            )
            gradient = layer_gradient.cpu().float().reshape(exact_gradient.shape)
            size = squared_gradient_sizes[name].sqrt()
            if reason := _describe_wrong_gradient(
                gradient, exact_gradient, size, gradient_error_limit, emulated_gradient_gain
            ):
                return f"its {name} gradient {reason}"
        return ""


def _report_unsteady_precision(call_mode: str, runs: str, other_runs: str) -> LayerVerdict:
    reason = f"{call_mode} it multiplies {describe_casts(runs)}, but otherwise {describe_casts(other_runs)}"
    return LayerVerdict(runs, "not-cast" if WIDE_DTYPES.keys() & {runs, other_runs} else "unsteady", reason)


def describe_casts(runs: str) -> str:
    """Returns the end of a sentence that begins with "layers multiply", such as 'in bf16'."""
    if runs == UNCAST:
        return "operands that are not cast"
    if runs in WIDE_DTYPES:
        return f"in {runs}"
    return f"as {runs} does" if runs else "without a visible cast"


def _has_equal_error(cast: Tensor, result: Tensor, product: LayerProduct) -> bool:
    """Returns whether a result has the error of the emulated cast, although their values differ: the same size and mean
    gain, about evenly spread over rows and columns.
    """
    exact_result = product.exact_result
    size = product.typical_magnitudes
    result_differences, cast_differences = (
        measure_differences(each_result - exact_result, size) for each_result in (result, cast)
    )
    low, high = (bound * cast_differences.level for bound in _ERROR_BAND)
    gain_difference = abs(fit_gain(result, exact_result) - fit_gain(cast, exact_result))
    return (
        low <= result_differences.level <= high
        and result_differences.worst <= _LINE_FACTOR * cast_differences.worst + _LINE_SLACK
        and gain_difference <= _MIN_GAIN
    )


def _describe_wrong_gradient(
    gradient: Tensor, exact: Tensor, size: Tensor, error_limit: float, expected_gain: float
) -> str:
    """Describes what is wrong with a gradient; '' if it is right. The gain of the gradient over the exact one must be
    between 1 and `expected_gain`, which is below 1 if casts saturate and so shrink gradients.
    """
    shape = exact.flatten(1).shape if exact.dim() > 1 else (1, exact.numel())
    gradient, exact, size = (tensor.reshape(shape) for tensor in (gradient, exact, size))
    gain = fit_gain(gradient, exact)
    residual_difference_level = measure_differences(gradient - gain * exact, size).level
    gain_tolerance = _MIN_GAIN + residual_difference_level**2 + 4 * residual_difference_level / math.sqrt(exact.numel())
    has_right_gain = min(1, expected_gain) - gain_tolerance <= gain <= max(1, expected_gain) + gain_tolerance
    if residual_difference_level <= error_limit and not has_right_gain:
        return f"is {gain:.2f} times the exact gradient"
    difference_beyond_rounding = ((gradient - exact).abs() - _OUTPUT_ROUNDING_ERROR * exact.abs()).clamp(min=0)
    differences = measure_differences(difference_beyond_rounding, size)
    worst_difference = differences.worst
    if differences.level <= error_limit and worst_difference <= _LINE_FACTOR * differences.level + _LINE_SLACK:
        return ""
    difference_text = f"is {differences.level:.0%} off, {worst_difference:.0%} in the worst row or column"
    return f"{difference_text}; casts make at most {error_limit:.0%}"


def _describe_fault(
    product: LayerProduct, product_result: Tensor, bias: Tensor | None, differences: RelativeResultDifferences
) -> str:
    """Returns what is wrong with an output: a common mistake that explains it, or else the rows or columns that are
    wrong.
    """
    exact_result = product.exact_result

    def is_near(expected_result: Tensor) -> bool:
        return float((product_result - expected_result).norm()) < _GRADIENT_ERROR * float(expected_result.norm())

    # 1. Try typical mistakes, the simplest first.
    result = product_result if bias is None else product_result + bias
    if not result.any():
        return "all of its results are 0"
    if bias is not None:
        expanded_bias = bias.expand_as(product_result)
        fitted_bias_factor = fit_gain(product_result - exact_result, expanded_bias)
        if abs(fitted_bias_factor) > _BIAS_FACTOR_TOLERANCE and is_near(
            exact_result + fitted_bias_factor * expanded_bias
        ):
            # The bias was subtracted from the result, so a factor of -1 means that the layer did not add it.
            if abs(1 + fitted_bias_factor) < _BIAS_FACTOR_TOLERANCE:
                return "its bias is not added"
            return f"its bias is added {1 + fitted_bias_factor:.2g} times"
    # 2. Look for one factor in all results, which shows that a scale was lost or applied twice.
    exact_layer_output = exact_result if bias is None else exact_result + bias
    gain = fit_gain(result, exact_layer_output)
    residual = float((result - gain * exact_layer_output).norm())
    if abs(gain - 1) > _MIN_GAIN and residual < _GRADIENT_ERROR * float(result.norm()):
        return f"its results are {gain:.2f} times what its input, current weight and bias give"
    # 3. Look for a few wrong rows or columns, which show that a shard or a bias is in the wrong place.
    for line_kind, lines in (("columns", differences.columns), ("rows", differences.rows)):
        wrong_lines = (lines > 3 * lines.median() + _LINE_SLACK).nonzero().flatten().tolist()
        if wrong_lines:
            return f"{len(wrong_lines)} of {len(lines)} checked {line_kind} are wrong, the first is {wrong_lines[0]}"
    # 4. Without a known mistake, report the error next to the error that casts usually cause.
    message_start = "its results do not follow from its input, current weight and bias"
    return f"{message_start}: {differences.level:.0%} off, while casts cause 1% to 20%"


def draw_random_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns random numbers of the same magnitude as a tensor, limited to its largest absolute value."""
    float_tensor = tensor.detach().float()
    size = float(float_tensor.square().mean().sqrt())
    largest_magnitude = float(float_tensor.abs().max())
    # A tensor of zeros has no magnitude, so use 1 instead.
    random_numbers = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(math.prod(shape))) * (
        size or 1.0
    )
    return (random_numbers.clamp(-largest_magnitude, largest_magnitude) if largest_magnitude else random_numbers).to(
        tensor.device, tensor.dtype
    )


@contextmanager
def random_parameters(tensors: dict[str, Tensor], x: Tensor) -> Iterator[None]:
    """Fills a layer's weight and bias with random numbers inside the `with` block, and restores them afterwards. The
    random bias is about as large as the layer's results without it.
    """
    original_values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.copy_(draw_random_like(tensor, tensor.shape))
            if len(original_values) == 2:
                bias = tensors["bias"]
                weight = tensors["weight"].float()
                result_magnitude = (
                    float(x.float().square().mean().sqrt()) * float(weight.norm()) / math.sqrt(bias.numel())
                )
                bias.copy_(draw_random_like(torch.zeros_like(bias), bias.shape) * result_magnitude)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(original_values[name])


@contextmanager
def restore_training_modes(module: nn.Module) -> Iterator[None]:
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
