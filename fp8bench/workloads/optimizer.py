"""A step of AdamW with its moments in some precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from fp8bench.model import DeviceFacts, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import storage_support
from fp8bench.protocols import Grid, Phases, Precision, Role, Setup, SilentPhases, Workload, one_thread
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.nn.moments import Bucket, Storage
    from fp8bench.numerics.distributions import GradientSource

# Moments are restored and cast for this many elements at a time: 256 MiB of fp32 moments, in phases of a suitable
# length.
BUCKET_ELEMENTS = 1 << 25
# The moments are those of a training after this many steps with gradients of steady magnitudes.
STEPS_BEFORE = 1000
# A bf16 second moment keeps growing, because a decay of 0.001 is below its rounding: ten steps hide that, a thousand do
# not. One small matrix is enough: each has a separate scale, and Adam's updates do not depend on magnitudes.
STEPS_OF_ERROR = 1000
WIDTH_OF_ERROR = 64


@dataclass
class OptimizerState:
    """Everything that is trained, in buckets."""

    buckets: list[Bucket]

    def parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(bucket.parameters for bucket in self.buckets))

    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        first, second = zip(*(bucket.restore() for bucket in self.buckets), strict=True)
        return list(chain.from_iterable(first)), list(chain.from_iterable(second))

    def take(self, gradients: list[Tensor]) -> None:
        import torch

        torch._foreach_copy_(list(chain.from_iterable(bucket.gradients for bucket in self.buckets)), gradients)


@workloads.register("optimizer")
class Optimizer(Workload):
    """Weights and gradients are fp32; the case's precision is that of the moments.

    fp32 and bf16 moments are stored unchanged, those of fp16 and below with scales; all but fp32 are restored before a
    step and cast after it. For fp8 and below the second moment is scaled fp16 by default: in the first one's format
    small values become zero, and the update explodes.
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
        widths = ("1024", "4096") if facts.accelerated else ("128", "256")
        tensors = "16" if facts.accelerated else "8"
        return (
            Axis.each("fused", "torch's fused AdamW, or what it takes without", "yes", "no"),
            Axis.choice(
                "second_moment",
                "that of fp8 and below: scaled-fp16, or the same format as the first's",
                "scaled-fp16",
                "same",
            ),
            Axis.count("tensors", "weights, one a layer", tensors, high=4096),
            Axis.count("width", "rows and columns of each weight", *widths, high=1 << 16),
        )

    def work(self, params: Scalars) -> Work:
        count = float(int(params["tensors"]) * int(params["width"]) ** 2)
        # Weights and gradients in fp32, and two moments of at least half a byte per element each.
        return Work(bytes=8 * count, least_memory=9 * count)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return storage_support(precision, facts, "there are no moments of it")

    def prepare(self, setup: Setup) -> OptimizerState:
        state, source = _begin(setup, _storages(setup), setup.case.param("fused") == "yes")
        state.take(source.draw())
        return state

    def step(self, state: OptimizerState, phase: Phases) -> None:
        for bucket in state.buckets:
            if bucket.plain is not None:
                with phase.optimizer_step:
                    bucket.update(*bucket.plain)
                continue
            with phase.cast:
                first, second = bucket.restore()
            with phase.optimizer_step:
                bucket.update(first, second)
            with phase.cast:
                bucket.keep(first, second)
                del first, second  # freeing memory takes time that must count for a phase

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares 1000 steps with changing gradients with the same under fp32 moments, fused, from the same state.

        It trains one matrix of at most 64 rows and columns. The update is the change of the weights, because the
        weights themselves would hide it. Moments that vanished are counted separately, because errors are dominated by
        the rows of the largest magnitudes.
        """
        from fp8bench.numerics.norms import joint_relative_frobenius, vanished_share

        # 1. Start twice from the same state, exact and stored.
        small = _small(setup)
        exact, source = _begin(small, _plain(), fused=True)
        state, _ = _begin(small, _storages(small), fused=small.case.param("fused") == "yes")
        start = [parameter.clone() for parameter in exact.parameters()]
        # 2. Use the same gradients for both, on one thread: sums must not depend on the machine.
        with one_thread():
            for _ in range(STEPS_OF_ERROR):
                gradients = source.draw()
                for optimizer_state in (exact, state):
                    optimizer_state.take(gradients)
                    self.step(optimizer_state, SilentPhases())
        # 3. Compare the change of the weights, and each moment.
        update = [new - old for new, old in zip(state.parameters(), start, strict=True)]
        exact_update = [new - old for new, old in zip(exact.parameters(), start, strict=True)]
        (first, second) = state.moments()
        (exact_first, exact_second) = exact.moments()
        return {
            "update_error": joint_relative_frobenius(update, exact_update),
            "first_moment_error": joint_relative_frobenius(first, exact_first),
            "second_moment_error": joint_relative_frobenius(second, exact_second),
            "first_moment_vanished": vanished_share(first, exact_first),
            "second_moment_vanished": vanished_share(second, exact_second),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import statistics_of

        state, source = _begin(setup, _plain(), fused=False)
        gradients = source.draw()
        first, second = state.moments()
        rows = [("gradient", Role.GRADIENT.value, gradient) for gradient in gradients]
        rows += [("first_moment", "", moment) for moment in first]
        rows += [("second_moment", "", moment) for moment in second]
        return statistics_of(rows)


def _small(setup: Setup) -> Setup:
    params = setup.params
    width = min(int(params["width"]), WIDTH_OF_ERROR)
    case = replace(setup.case, params=tuple((params | {"tensors": 1, "width": width}).items()))
    return replace(setup, case=case)


def _storages(setup: Setup) -> tuple[Storage, Storage]:
    from fp8bench.nn.moments import storages

    return storages(setup.arithmetic, same=setup.case.param("second_moment") == "same")


def _plain() -> tuple[Storage, Storage]:
    import torch

    from fp8bench.nn.arithmetics import PlainArithmetic
    from fp8bench.nn.moments import storages

    return storages(PlainArithmetic(torch.float32), same=True)


def _begin(setup: Setup, storages: tuple[Storage, Storage], fused: bool) -> tuple[OptimizerState, GradientSource]:
    """Draws weights and moments from the seed, and returns the source of gradients that lead to such moments."""
    import torch

    from fp8bench.nn import moments
    from fp8bench.numerics.distributions import GradientSource, seeded_generator

    case = setup.case
    shape = (int(case.param("width")), int(case.param("width")))
    shapes = [shape] * int(case.param("tensors"))
    generator = seeded_generator(setup.facts.key, setup.seed)
    source = GradientSource(shapes, generator)
    weights = [tensor.mul_(shape[1] ** -0.5) for tensor in source.normal()]
    # A moving average of noise has (1 - beta) / (1 + beta) of the noise's variance; that of its squares twice as much.
    spread = [((1 - beta) / (1 + beta)) ** 0.5 for beta in moments.BETAS]
    first = [tensor.mul_(spread[0]) for tensor in source.draw()]
    second = [
        tensor.mul_(spread[1] * 2**0.5).add_(1).clamp_(min=0).mul_(scale**2)
        for tensor, scale in zip(source.normal(), source.scales, strict=True)
    ]
    gradients = [torch.zeros_like(weight) for weight in weights]
    parts = moments.split_into_buckets([weight.numel() for weight in weights], BUCKET_ELEMENTS)
    buckets = [
        moments.Bucket(weights[part], gradients[part], first[part], second[part], storages, STEPS_BEFORE, fused)
        for part in parts
    ]
    return OptimizerState(buckets), source
