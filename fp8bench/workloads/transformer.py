"""A training step of a GPT: data, forward, backward, accumulation over micro-batches, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8bench.axes import Axis, one_of, whole_number
from fp8bench.model import DeviceFacts, Level, Params, Scalar, Support, Work
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.tokens import TokenLoader


@dataclass
class State:
    """Everything one arm trains: model, optimiser, fp32 gradient buffers, data."""

    model: GPT
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    buffers: list[Tensor]
    loader: TokenLoader
    micro_batches: int
    loss_scale: float


@workloads.register("transformer")
class Transformer(Workload):
    """Every phase of training: the main road of this tool."""

    name = "transformer"
    summary = "a GPT training step with every phase, from data loading to the optimiser"
    uses_corpus = True
    layer_kinds = ("attn", "mlp", "head")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size = "gpt2-124m" if facts.accelerated else "nano"
        return (
            Axis("size", f"the model: {', '.join(SIZES)}", (size,), one_of(*SIZES)),
            Axis("batch", "sequences in a micro-batch", ("auto",), _auto(4096)),
            Axis("sequence", "tokens in a sequence", ("auto",), _auto(1 << 16)),
            Axis("micro_batches", "micro-batches accumulated in a step", ("2",), whole_number(high=1024)),
        )

    def expand(self, params: Mapping[str, Scalar]) -> tuple[Params, ...]:
        config = SIZES[str(params["size"])]
        own: dict[str, Scalar] = {"batch": config.batch, "sequence": config.sequence}
        return (tuple((name, own[name] if value == "auto" else value) for name, value in params.items()),)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        sequences = int(params["batch"]) * int(params["micro_batches"])
        length = int(params["sequence"])
        config = SIZES[str(params["size"])]
        # In fp32: weights, two moments, gradient buffers; and the logits of a micro-batch.
        least = 16.0 * config.weights + 4.0 * int(params["batch"]) * length * config.vocabulary
        return Work(config.step_flops(sequences, length), sequences * length, least_memory=least)

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        along = precision.multiples[0]
        tokens = int(params["batch"]) * int(params["sequence"])
        if support.level is Level.NATIVE and tokens % along:
            return Support(
                Level.REFUSED,
                f"native {precision.name} contracts weight gradients over the tokens, in multiples of {along}; batch x "
                f"sequence is {tokens}: choose another batch or sequence",
            )
        return support

    def prepare(self, setup: Setup) -> State:
        import torch

        model = _model(setup, setup.arithmetic, setup.high)
        parameters = list(model.parameters())
        return State(
            model,
            torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=True),
            parameters,
            [torch.zeros_like(parameter) for parameter in parameters],
            _loader(setup),
            int(setup.case.param("micro_batches")),
            setup.loss_scale,
        )

    def step(self, state: State, phase: Phases) -> None:
        for micro_batch in range(state.micro_batches):
            _micro_batch(state, phase, first=micro_batch == 0)
        with phase.optimizer_step:
            for parameter, buffer in zip(state.parameters, state.buffers, strict=True):
                parameter.grad = buffer
            state.optimizer.step()
            for parameter in state.parameters:
                parameter.grad = None

    def error(self, setup: Setup) -> dict[str, float]:
        """Loss and all gradients of one step against the same step in fp64 throughout, from identical state."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.numerics.errors import joint_relative_frobenius

        exact = PlainArithmetic(torch.float64)
        reference_loss, reference = _gradients(setup, exact, exact, {}, 1.0)
        loss, gradients = _gradients(setup, setup.arithmetic, setup.high, setup.layers, setup.loss_scale)
        return {
            "loss_error": abs(loss - reference_loss) / abs(reference_loss),
            "gradient_error": joint_relative_frobenius(gradients, reference),
        }


def _micro_batch(state: State, phase: Phases, first: bool) -> None:
    """One forward and backward, its gradients added to the buffers. Reads no value, which would wait for the device."""
    import torch

    with phase.data_load:
        tokens, targets = state.loader.next()
    with phase.elementwise:
        loss = state.model(tokens, targets, phase) * state.loss_scale
    with phase.elementwise:
        loss.backward()
        del loss
    with phase.accumulate:
        # Fresh gradients, added by hand: left to autograd, the second micro-batch's add would run inside whatever
        # phase is open in backward.
        gradients = [parameter.grad for parameter in state.parameters if parameter.grad is not None]
        share = 1.0 / (state.loss_scale * state.micro_batches)
        if first:
            torch._foreach_zero_(state.buffers)
        torch._foreach_add_(state.buffers, gradients, alpha=share)
        for parameter in state.parameters:
            parameter.grad = None


def _auto(high: int) -> Callable[[str], Scalar]:
    """A parser of 'auto' (the model's own) or a whole number."""
    number = whole_number(high=high)

    def parse(text: str) -> Scalar:
        return "auto" if text == "auto" else number(text)

    return parse


def _config(setup: Setup) -> GPTConfig:
    return replace(SIZES[str(setup.case.param("size"))], sequence=int(setup.case.param("sequence")))


def _device(setup: Setup) -> str:
    return setup.facts.key


def _model(setup: Setup, low: Arithmetic, high: Arithmetic, layers: Mapping[str, Arithmetic] | None = None) -> GPT:
    """The model of a case from its seed, on its device; weights are the same for every arithmetic."""
    import torch

    from fp8bench.nn.gpt import GPT, LayerArithmetic

    chosen = setup.layers if layers is None else layers
    arithmetic = LayerArithmetic(chosen.get("attn", low), chosen.get("mlp", low), chosen.get("head", high))
    gpus = [setup.facts.index] if setup.facts.accelerated else []
    # The process's own random state is put back: without isolation it is the user's.
    with torch.random.fork_rng(devices=gpus), torch.device(_device(setup)):
        torch.manual_seed(setup.seed)
        return GPT(_config(setup), arithmetic, low.carrier)


def _loader(setup: Setup) -> TokenLoader:
    from fp8bench.nn.tokens import TokenLoader

    if setup.corpus is None:
        raise ValueError("the transformer needs a token file and was given none")
    config = _config(setup)
    batch = int(setup.case.param("batch"))
    return TokenLoader(setup.corpus, batch, config.sequence, _device(setup), setup.seed, config.vocabulary)


def _gradients(
    setup: Setup, low: Arithmetic, high: Arithmetic, layers: Mapping[str, Arithmetic], loss_scale: float
) -> tuple[float, list[Tensor]]:
    """Mean loss and summed gradients of one step's micro-batches, in the model's own initial state."""
    import torch

    model = _model(setup, low, high, layers)
    if low.carrier is torch.float64:
        model = model.double()
    loader = _loader(setup)
    micro_batches = int(setup.case.param("micro_batches"))
    total = 0.0
    for _ in range(micro_batches):
        tokens, targets = loader.next()
        loss = model(tokens, targets, SilentPhases()) / micro_batches
        (loss * loss_scale).backward()
        total += float(loss.detach())
    return total, [parameter.grad / loss_scale for parameter in model.parameters() if parameter.grad is not None]
