"""The suite optimizer: a step of AdamW, whose moments are stored in some precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from fp8bench.model import DeviceFacts, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import find_storage_support
from fp8bench.protocols import Grid, Phases, Precision, Role, Setup, SilentPhases, Workload, limit_to_one_thread
from fp8bench.protocols.axes import Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.nn.moments import MomentBucket, MomentStorageMethod
    from fp8bench.numerics.distributions import GradientSource

# A bucket has at most this many elements, unless a single tensor has more. Its moments are restored and cast together.
# In fp32 the moments take 256 MiB, which makes phases long enough.
BUCKET_ELEMENTS = 1 << 25
# The initial moments resemble those after this many steps.
PRECEDING_STEP_COUNT = 1000
# The error is measured after this many steps. A bf16 second moment keeps growing, because rounding hides a decay of
# 0.001, which shows after a thousand steps, but not after ten.
ERROR_STEPS = 1000
# One small matrix is enough, because each matrix has its own scale, and Adam's updates do not depend on magnitudes.
ERROR_WIDTH = 64


@dataclass
class OptimizerState:
    """All parameters, gradients and moments, grouped into buckets."""

    buckets: list[MomentBucket]

    def parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(bucket.parameters for bucket in self.buckets))

    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        first_moments, second_moments = zip(*(bucket.restore() for bucket in self.buckets), strict=True)
        return list(chain.from_iterable(first_moments)), list(chain.from_iterable(second_moments))

    def copy_gradients(self, gradients: list[Tensor]) -> None:
        import torch

        torch._foreach_copy_(list(chain.from_iterable(bucket.gradients for bucket in self.buckets)), gradients)


@workloads.register("optimizer")
class Optimizer(Workload):
    """Times AdamW on fp32 weights and gradients, with moments in the case's precision.

    fp32 and bf16 moments are stored without scales. fp16 and smaller formats have scales. All moments except fp32
    moments are restored before a step and cast after it. In fp8 and smaller formats, the second moment is stored as
    scaled fp16 by default. In the format of the first moment, small second moments would become zero, and updates would
    explode.
    """

    name = "optimizer"
    summary = "AdamW, fused and not, with its moments in each precision"
    dtypes = ("fp32", "bf16", "fp16", "fp8")
    history = Grid(
        cpu={"width": ("256",), "fused": ("yes",)},
        gpu={"width": ("4096",), "fused": ("yes",)},
        phases=("cast", "optimizer_step"),
        errors=(
            "update_error",
            "first_moment_error",
            "first_moment_vanished",
            "second_moment_error",
            "second_moment_vanished",
        ),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        matrix_width_choices = ("1024", "4096") if facts.accelerated else ("128", "256")
        return (
            Axis.each("fused", "yes: AdamW in torch's fused kernel; no: in several kernels", "yes", "no"),
            Axis.choice(
                "second_moment",
                "format of the second moment in fp8 and below: scaled-fp16, or the format of the first moment",
                "scaled-fp16",
                "same",
            ),
            Axis.count("tensors", "weights, one a layer", "16" if facts.accelerated else "8", high=4096),
            Axis.count("width", "rows and columns of each weight", *matrix_width_choices, high=1 << 16),
        )

    def work(self, params: Scalars) -> Work:
        count = float(int(params["tensors"]) * int(params["width"]) ** 2)
        # The least memory: weights and gradients in fp32, and two moments with half a byte for each element.
        return Work(bytes=8 * count, least_memory=9 * count)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return find_storage_support(precision, facts, "there are no moments of it")

    def prepare(self, setup: Setup) -> OptimizerState:
        state, source = _draw_initial_state(setup, _choose_storages(setup), setup.params["fused"] == "yes")
        state.copy_gradients(source.draw())
        return state

    def step(self, state: OptimizerState, phase: Phases) -> None:
        for bucket in state.buckets:
            if bucket.fp32_moments is not None:
                with phase.optimizer_step:
                    bucket.update(*bucket.fp32_moments)
                continue
            with phase.cast:
                first_moments, second_moments = bucket.restore()
            with phase.optimizer_step:
                bucket.update(first_moments, second_moments)
            with phase.cast:
                bucket.store(first_moments, second_moments)
                del first_moments, second_moments  # the phase includes the time of freeing these tensors

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares 1000 steps of AdamW with the same steps of fused AdamW with fp32 moments. Gradients change from step
        to step.

        One matrix of at most 64 rows and columns is trained, and the change of its weights is compared. Relative to the
        weights themselves, an error would be too small. Moments that became zero are counted separately, because rows
        with large magnitudes dominate the other errors.
        """
        from fp8bench.numerics.norms import compute_vanished_share, joint_relative_frobenius

        # 1. Start twice from the same state: with fp32 moments, and with moments in the case's precision.
        params = setup.params
        params |= {"tensors": 1, "width": min(int(params["width"]), ERROR_WIDTH)}
        one_matrix_setup = replace(setup, case=replace(setup.case, params=tuple(params.items())))
        exact_state, source = _draw_initial_state(one_matrix_setup, _make_exact_storages(), fused=True)
        state, _ = _draw_initial_state(one_matrix_setup, _choose_storages(setup), params["fused"] == "yes")
        initial_weights = [parameter.clone() for parameter in exact_state.parameters()]
        # 2. Run both with the same gradients, on one thread, because sums must not depend on the machine.
        with limit_to_one_thread():
            for _ in range(ERROR_STEPS):
                gradients = source.draw()
                for optimizer_state in (exact_state, state):
                    optimizer_state.copy_gradients(gradients)
                    self.step(optimizer_state, SilentPhases())
        # 3. Compare the change of the weights, and each moment.
        weight_changes = [new - old for new, old in zip(state.parameters(), initial_weights, strict=True)]
        exact_weight_changes = [new - old for new, old in zip(exact_state.parameters(), initial_weights, strict=True)]
        (first_moments, second_moments) = state.moments()
        (exact_first, exact_second) = exact_state.moments()
        return {
            "update_error": joint_relative_frobenius(weight_changes, exact_weight_changes),
            "first_moment_error": joint_relative_frobenius(first_moments, exact_first),
            "second_moment_error": joint_relative_frobenius(second_moments, exact_second),
            "first_moment_vanished": compute_vanished_share(first_moments, exact_first),
            "second_moment_vanished": compute_vanished_share(second_moments, exact_second),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import compute_statistics

        state, source = _draw_initial_state(setup, _make_exact_storages(), fused=False)
        gradients = source.draw()
        first_moments, second_moments = state.moments()
        rows = [("gradient", Role.GRADIENT.value, gradient) for gradient in gradients]
        rows += [("first_moment", "", moment) for moment in first_moments]
        rows += [("second_moment", "", moment) for moment in second_moments]
        return compute_statistics(rows)


def _choose_storages(setup: Setup) -> tuple[MomentStorageMethod, MomentStorageMethod]:
    from fp8bench.nn.moments import choose_storages

    return choose_storages(setup.arithmetic, same_precision=setup.params["second_moment"] == "same")


def _make_exact_storages() -> tuple[MomentStorageMethod, MomentStorageMethod]:
    import torch

    from fp8bench.nn.arithmetics import PlainArithmetic
    from fp8bench.nn.moments import choose_storages

    return choose_storages(PlainArithmetic(torch.float32), same_precision=True)


def _draw_initial_state(
    setup: Setup, storages: tuple[MomentStorageMethod, MomentStorageMethod], fused: bool
) -> tuple[OptimizerState, GradientSource]:
    """Draws weights and moments from the seed. Also returns a source of random gradients that would lead to such
    moments in a training.
    """
    import torch

    from fp8bench.nn import moments
    from fp8bench.numerics.distributions import GradientSource, make_seeded_generator

    tensors, width = read_integers(setup.params, "tensors", "width")
    source = GradientSource([(width, width)] * tensors, make_seeded_generator(setup.facts.key, setup.seed))
    weights = [tensor.mul_(width**-0.5) for tensor in source.draw_unscaled_gradients()]
    # A moving average of noise keeps (1 - beta) / (1 + beta) of the noise's variance. A moving average of squared noise
    # keeps twice as much.
    moment_standard_deviations = [((1 - beta) / (1 + beta)) ** 0.5 for beta in moments.BETAS]
    first_moments = [tensor.mul_(moment_standard_deviations[0]) for tensor in source.draw()]
    # A second moment cannot be negative.
    second_moments = [
        tensor.mul_(moment_standard_deviations[1] * 2**0.5).add_(1).clamp_(min=0).mul_(scale**2)
        for tensor, scale in zip(source.draw_unscaled_gradients(), source.scales, strict=True)
    ]
    gradients = [torch.zeros_like(weight) for weight in weights]
    parts = moments.split_into_buckets([weight.numel() for weight in weights], BUCKET_ELEMENTS)
    buckets = [
        moments.MomentBucket(
            weights[part],
            gradients[part],
            first_moments[part],
            second_moments[part],
            storages,
            PRECEDING_STEP_COUNT,
            fused,
        )
        for part in parts
    ]
    return OptimizerState(buckets), source
