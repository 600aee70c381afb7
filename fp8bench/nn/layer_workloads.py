"""Base classes of workloads that run one layer. This module must not import torch, because planning imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.model import Scalars, TensorStatistics
from fp8bench.nn.shared_workloads import explain_missing_errors, is_training
from fp8bench.protocols import Arithmetic, Phases, Setup, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic
    from fp8bench.numerics.ranges import TallyLedger


class LayerWorkload(Workload):
    """Runs one layer on random inputs, forward only or forward and backward.

    A subclass makes the layer (`layer`) and returns the `shapes` of its inputs. Or it makes layer and inputs together
    (`exercise`).
    """

    def layer(self, params: Scalars, choose: ChooseArithmetic) -> nn.Module:
        """Makes the layer. `choose` returns the arithmetic of each product by name."""
        raise NotImplementedError

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def exercise(self, setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> LayerExercise:
        """Makes the layer, and its inputs in the dtype `carrier`."""
        from fp8bench.nn.exercise import make_exercise

        params = setup.params
        return make_exercise(
            setup, lambda: self.layer(params, choose), self.shapes(params), carrier, is_training(params)
        )

    def prepare(self, setup: Setup) -> LayerExercise:
        state = self.exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        # A precision map may also name layers without products, such as norms.
        layers_without_products = self.around(setup.params)
        if arithmetic_by_layer := setup.around(layers_without_products):
            from fp8bench.nn.around import set_surrounding_arithmetics

            set_surrounding_arithmetics(state.layer, arithmetic_by_layer)
        return state

    def step(self, state: LayerExercise, phase: Phases) -> None:
        state.step(phase)

    def error_refused(self, params: Scalars) -> str:
        """Returns why the errors of a case are not measured, or '' if they are."""
        return explain_missing_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        # With `settles`, scales depend on earlier passes: a first pass fills their history, a second one is measured.
        return self.prepare(setup).measure_errors(self.exact(setup), setup.settles)

    def exact(self, setup: Setup) -> LayerExercise:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return self.make_exercise_in_arithmetic(setup, PlainArithmetic(torch.float64))

    def make_exercise_in_arithmetic(self, setup: Setup, arithmetic: Arithmetic) -> LayerExercise:
        return self.exercise(setup, lambda name: arithmetic, arithmetic.carrier)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import TallyLedger

        value_range_ledger = TallyLedger()
        state = self.exercise(setup, self.count_operands(setup, value_range_ledger), setup.arithmetic.carrier)
        value_range_ledger.tally_by_kind_and_role.clear()  # making a training case ran a forward pass
        state.outcome()  # runs the layer, whose casts the ledger counts
        return value_range_ledger.statistics()

    def count_operands(self, setup: Setup, ledger: TallyLedger) -> ChooseArithmetic:
        """Returns a `choose` function for `layer`, whose arithmetics also record every tensor that they cast in
        `ledger`.
        """
        from fp8bench.nn.arithmetics import count_casts

        choose_arithmetic = self.arithmetics(setup)
        return lambda name: count_casts(choose_arithmetic(name), name, ledger)


class ConvolvedWorkload(LayerWorkload):
    """A workload whose layers include convolutions. Its casts are counted by the kind of layer."""

    def count_operands(self, setup: Setup, ledger: TallyLedger) -> ChooseArithmetic:
        """Returns a `choose` function that records operands in `ledger`. Each pixel of an image counts once, even if an
        arithmetic copies overlapping windows.
        """
        from fp8bench.nn.arithmetics import PlainArithmetic, count_casts

        choose_arithmetic = self.arithmetics(setup)
        kinds = {layer.name: layer.kind for layer in self.layers(setup.params)}

        def choose_arithmetic_with_ledger(name: str) -> Arithmetic:
            arithmetic = choose_arithmetic(name)
            # An explicit arithmetic casts copies of overlapping windows, which repeat pixels. So count the casts of a
            # plain arithmetic, which casts the images.
            if arithmetic.explicit:
                arithmetic = PlainArithmetic(arithmetic.carrier)
            return count_casts(arithmetic, kinds[name], ledger)

        return choose_arithmetic_with_ledger
