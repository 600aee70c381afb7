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
# The largest relative error that casts may cause in a gradient: e5m2 causes 0.07, and stochastic rounding to four bits
# (at most _FEW_BITS) 0.3. The lower limit also decides whether an output is near an expected one.
_MAX_CAST_ERROR, _MAX_FEW_BITS_CAST_ERROR, _FEW_BITS = 0.12, 0.45, 6
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
    """Judges the numbers of a converted layer. `casts_by_precision` has the casts of each precision in which the layer
    may run. The `likely_precisions` are tried first, and the first that explains the output is accepted. `arguments`
    and `options` are those with which the model called the layer.
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
        is_wide_in_model, is_wide_alone = (
            verdict.runs in WIDE_DTYPES for verdict in (verdict_in_model, random_input_verdict)
        )
        if is_wide_in_model != is_wide_alone:
            return _report_unsteady_precision("in the model", verdict_in_model.runs, random_input_verdict.runs)
        return verdict_in_model

    @property
    def _bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) and bias.numel() else None

    @property
    def _has_quantised_weight(self) -> bool:
        # A quantised weight is a Tensor subclass, or has codes of one byte.
        return hasattr(self.weight, "__tensor_flatten__") or self.weight.dtype.itemsize == 1

    def _make_product(self, x: Tensor) -> LayerProduct:
        float_input = x.detach().cpu().float()
        has_images = classify_module(self.module)[0] == CONV2D_KIND and float_input.dim() > 2
        # The product has one batch dimension, of images or of rows.
        operand_shape = float_input.shape[-3:] if has_images else (float_input.shape[-1],)
        operand = float_input.reshape(-1, *operand_shape)
        return LayerProduct(self.module, operand, self._decode_weight(), casts_weight=not self._has_quantised_weight)

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
        layer_bias = self._bias
        bias = None if layer_bias is None else layer_bias.detach().cpu().float()
        result_without_bias = result if bias is None else result - bias
        rounding_slack = _OUTPUT_ROUNDING_ERROR * torch.maximum(result.abs(), result_without_bias.abs())

        def compare_with_output(expected_output: Tensor) -> RelativeResultDifferences:
            """Measures how far the output is from an expected one, over all elements (`level`) and in each line."""
            return measure_differences(
                ((result_without_bias - expected_output).abs() - rounding_slack).clamp(min=0),
                product.typical_magnitudes,
            )

        # 3. Compare with the products of operands that are rounded to each wide format.
        differences_by_wide_dtype = {
            name: compare_with_output(product.multiply_rounded(dtype)) for name, dtype in WIDE_DTYPES.items()
        }
        nearest_wide_dtype = min(differences_by_wide_dtype, key=lambda name: differences_by_wide_dtype[name].level)
        # 4. Compare with each emulated cast, until a likely precision matches. A precision may have several results,
        # because the layer may round operands to bf16 before the cast.
        ordered_casts = self._order_casts(likely_precisions)
        level_by_match = dict[str, float]()
        precisions_with_same_error = []
        for precision, promised_casts in ordered_casts.items():
            for cast_result in product.iterate_cast_results(promised_casts):
                if (difference := compare_with_output(cast_result)).is_negligible:
                    level_by_match[precision] = difference.level
                    break
                has_same_error = _has_equal_error(cast_result, result_without_bias, product)
                precisions_with_same_error += [precision] if has_same_error else []
            if precision in likely_precisions and precision in level_by_match:
                break
        # 5. An output that matches a wide product was not cast. Without a quantised weight, this is uncertain if the
        # output also matches a cast.
        if differences_by_wide_dtype[nearest_wide_dtype].is_negligible:
            wide_precision = WEIGHTS_ONLY if self._has_quantised_weight else nearest_wide_dtype
            is_certain = self._has_quantised_weight or not level_by_match
            return LayerVerdict(wide_precision if is_certain else "")
        if level_by_match:
            return LayerVerdict(
                min(level_by_match, key=lambda name: (name not in likely_precisions, level_by_match[name]))
            )
        # 6. Look for typical faults: only the weight was cast, or the cast rounds differently.
        is_only_weight_cast = not self._has_quantised_weight and any(
            compare_with_output(cast_result).is_negligible
            for promised_casts in ordered_casts.values()
            for cast_result in product.iterate_cast_results(promised_casts, casts_inputs=False)
        )
        if is_only_weight_cast:
            return LayerVerdict(UNCAST, "not-cast", "only its weight is cast; its inputs are multiplied without a cast")
        if precisions_with_same_error:
            likeliest_precision = precisions_with_same_error[0]
            return LayerVerdict(
                likeliest_precision,
                "other-rounding",
                f"its values differ from those of {likeliest_precision}, but have the same error in every row",
            )
        return LayerVerdict(
            UNKNOWN_PRECISION,
            "wrong-numbers",
            _describe_fault(product, result_without_bias, bias, differences_by_wide_dtype[UNCAST]),
        )

    def _order_casts(self, likely_precisions: Sequence[str]) -> dict[str, PromisedCasts]:
        """Returns the casts of each precision, likely precisions first."""
        ordered_names = (*likely_precisions, *self.casts_by_precision)
        return {name: self.casts_by_precision[name] for name in ordered_names if name in self.casts_by_precision}

    def _make_random_input(self, x: Tensor | None) -> Tensor:
        """Returns random numbers with the shape and magnitude of an input, limited to about `ROWS` rows."""
        kind = classify_module(self.module)[0]
        weight_shape = self.weight.shape
        if x is None:
            dtype = torch.bfloat16 if self._has_quantised_weight else self.weight.dtype
            # The weight of transformers' Conv1D, a linear layer, has the shape (inputs, outputs).
            shape: Sequence[int] = (_DEFAULT_INPUT_ROWS, weight_shape[0 if kind == CONV1D_KIND else 1])
            if kind == CONV2D_KIND:
                channel_count = weight_shape[1] * int(getattr(self.module, "groups", 1))
                # Each side of an image has room for several positions of a kernel without dilation.
                shape = (2, channel_count, *(4 * side + 8 for side in weight_shape[2:]))
            # Numbers like a tensor of zeros have the magnitude 1.
            return draw_random_like(torch.zeros((), dtype=dtype, device=self.weight.device), shape)
        if kind == CONV2D_KIND:
            return draw_random_like(x, x.shape if x.dim() == 3 else (min(len(x), IMAGES), *x.shape[1:]))
        if x.dim() == 1:
            return draw_random_like(x, x.shape)
        # Limit each side: with 512 rows, (8, 1024, 64) becomes (1, 512, 64), and (8, 100, 64) becomes (5, 100, 64).
        *batch_sides, rows, columns = x.shape
        limited_batch_sides = [max(1, min(side, ROWS // rows)) for side in batch_sides]
        return draw_random_like(x, (*limited_batch_sides, min(rows, ROWS), columns))

    def _check_on_random_inputs(self, x: Tensor, likely_precisions: Sequence[str]) -> LayerVerdict:
        with restore_training_modes(self.module), random_parameters(self._find_trainable_parameters(), x):
            product = self._make_product(x)
            first_verdict = LayerVerdict()
            # Begin in the current mode. `first_verdict` is the first one with a precision. All later calls must have
            # the same precision.
            for mode in (self.module.training, not self.module.training):
                self.module.train(mode)
                for are_gradients_enabled in (False, True):
                    with torch.set_grad_enabled(are_gradients_enabled):
                        output = self._call_layer(x.detach().requires_grad_(are_gradients_enabled))
                    verdict = self._judge_output(product, output, (first_verdict.runs, *likely_precisions))
                    is_first_verdict = not first_verdict.runs
                    if is_first_verdict:
                        first_verdict = verdict
                    call_mode_text = f"in {'training' if mode else 'evaluation'} mode"
                    call_mode_text += f" with gradients {'on' if are_gradients_enabled else 'off'}"
                    if verdict.has_failed:
                        return verdict if is_first_verdict else verdict._replace(why=f"{call_mode_text}, {verdict.why}")
                    if verdict.runs != first_verdict.runs:
                        return _report_unsteady_precision(call_mode_text, verdict.runs, first_verdict.runs)
            # The loop ended in the other mode, so switch back before the backward pass.
            self.module.train(not self.module.training)
            gradient_fault = self._check_backward_numbers(x, product, first_verdict.runs)
        return first_verdict._replace(code="wrong-gradient", why=gradient_fault) if gradient_fault else first_verdict

    def _find_trainable_parameters(self) -> dict[str, Tensor]:
        parameters = {"weight": self.weight, "bias": self._bias}
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
        differentiated_tensors = {"input": x.detach().requires_grad_(), **self._find_trainable_parameters()}
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
        # A treatment is the format and scaling to which inputs, weights or gradients are cast.
        treatments = () if precision_casts is None else precision_casts.treatments
        has_low_bit_cast = any(treatment is not None and treatment.fmt.bits <= _FEW_BITS for treatment in treatments)
        gradient_error_limit = _MAX_FEW_BITS_CAST_ERROR if has_low_bit_cast else _MAX_CAST_ERROR
        # 3. Each gradient must have the right shape, and be near the exact one. In training, no gradient may be
        # missing.
        for (name, _), layer_gradient in zip(differentiated_tensors.items(), gradients, strict=True):
            if layer_gradient is None and is_trained:
                return f"its {name} gradient does not exist{_TRAINING_MODE_CLAUSE}"
            if layer_gradient is None:
                continue
            if layer_gradient.numel() != exact_gradients[name].numel():
                return f"its {name} gradient has the shape {list(layer_gradient.shape)}"
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
    # The fitted gain of a right gradient may differ from the expected one: rounding to nearest may change it by about
    # the squared residual, and chance by a few standard errors, which are residual / sqrt(elements).
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
        return float((product_result - expected_result).norm()) < _MAX_CAST_ERROR * float(expected_result.norm())

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
    if abs(gain - 1) > _MIN_GAIN and residual < _MAX_CAST_ERROR * float(result.norm()):
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
    """Returns random numbers of the same magnitude as a tensor, limited to its largest absolute value. For a tensor of
    zeros, the magnitude is 1 without a limit.
    """
    float_tensor = tensor.detach().float()
    size = float(float_tensor.square().mean().sqrt())
    largest_magnitude = float(float_tensor.abs().max())
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
            if "weight" in tensors and "bias" in tensors:
                bias = tensors["bias"]
                weight = tensors["weight"].float()
                result_magnitude = (
                    float(x.float().square().mean().sqrt()) * float(weight.norm()) / math.sqrt(bias.numel())
                )
                unit_random_bias = draw_random_like(torch.zeros_like(bias), bias.shape)
                bias.copy_(unit_random_bias * result_magnitude)
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
