"""Training steps of a GPT by several ranks, in each way of dividing it among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalar, Scalars, Support, Work
from fp8bench.nn.parallel.ways import OPTIONS, WAYS, Job, ParallelCase
from fp8bench.nn.sizes import SIZES, GPTConfig, gpt_around, gpt_layers
from fp8bench.protocols import Layer, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis, auto_or, one_of, whole_number
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fp8bench.nn.batches import TokenLoader
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.parallel.step import ParallelState

# The batch of all ranks is this many times the model's own.
_BATCHES = 4
# Words for the values of a way's options: all of them, or the first.
_ALL, _FIRST = "auto", "usual"
# The option that is a count, of which each rank needs one.
_COUNTED, _ENOUGH = "microbatches", " that is not less than the ranks"
# One-time messages do not belong to a step: in its second one DDP sends the others the order of its buckets.
_STEPS_BEFORE = 2
# How many steps are compared with those of one rank.
_AGREEING_STEPS = 3


@workloads.register("parallel")
class Parallel(Workload):
    """Steps by several ranks, each with its part of the model, the batch or both. The batch is that of all ranks,
    however it is divided, so that throughputs compare. Errors are distances from one rank that trains alone, with the
    same arithmetic."""

    name = "parallel"
    version = "2"  # tied heads
    summary = "training steps of a GPT by several ranks (--ranks): data, sharded, tensor and pipeline parallel"
    listed, least_ranks = False, 2
    uses_corpus = True
    linear_layers = True
    layer_kinds = ("attn", "mlp", "head")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size = "gpt2-124m" if facts.accelerated else "nano"
        ways_listed = "; ".join(f"{division.name} ({division.summary})" for division in WAYS.values())
        options = (
            Axis(
                name,
                f"{text}; {_ALL}: each that a way has; {_FIRST}: its first{_ENOUGH * (name == _COUNTED)}",
                (_ALL,),
                _word_or_value(name, facts.ranks),
                quick=(_FIRST,),
            )
            for name, text in OPTIONS.items()
        )
        return (
            Axis("way", f"how ranks train together: {ways_listed}", tuple(WAYS), one_of(*WAYS)),
            Axis("size", f"the model: {', '.join(SIZES)}", (size,), one_of(*SIZES)),
            Axis(
                "batch", "sequences of all ranks together", ("auto",), auto_or(whole_number(high=1 << 16)), quick=("4",)
            ),
            Axis("sequence", "tokens in a sequence", ("auto",), auto_or(whole_number(high=1 << 16)), quick=("32",)),
            *options,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        """Makes a case of each value of a way's options; options that a way does not have are dropped."""
        config, division = SIZES[str(params["size"])], WAYS[str(params["way"])]
        usual_sizes: dict[str, Scalar] = {"batch": config.batch * _BATCHES, "sequence": config.sequence}
        usual = {name: usual_sizes.get(name, value) if value == "auto" else value for name, value in params.items()}
        plain = {
            name: value
            for name, value in usual.items()
            if name not in OPTIONS or str(value).partition(" ")[0] not in (_ALL, _FIRST)
        }
        names = [name for name in division.options if name not in plain]
        values = [map(_parse(name), _values_of_word(division.options[name], str(params[name]))) for name in names]
        return tuple((*plain.items(), *zip(names, chosen, strict=True)) for chosen in product(*values))

    def work(self, params: Scalars) -> Work:
        config, length, sequences = _config(params), int(params["sequence"]), int(params["batch"])
        return Work(config.step_flops(sequences, length), sequences * length, least_memory=4.0 * config.weights)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        config = _config(params)
        return gpt_layers(config.layers, config.experts)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return gpt_around(_config(params).layers)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. The number of ranks must suit this way.
        division = WAYS[str(params["way"])]
        if facts.ranks < division.least_ranks:
            present, least = "there is 1" if facts.ranks == 1 else f"there are {facts.ranks}", division.least_ranks
            return refused(f"{division.name} takes {least} ranks, and {present}: add --ranks {least}")
        # 2. Options of another way are refused, because they would be ignored silently.
        options = {name: str(params[name]) for name in OPTIONS if name in params}
        foreign = [
            name
            for name, value in options.items()
            if name not in division.options or (isinstance(params[name], str) and value not in division.options[name])
        ]
        if foreign:
            takes = "; ".join(f"{name}: {', '.join(values)}" for name, values in division.options.items()) or "none"
            return refused(f"{division.name} has no {foreign[0]}={options[foreign[0]]}: it takes {takes}")
        # 3. Layers must be divisible, with sizes that divide evenly.
        if precision.whole_layers:
            return refused(
                f"{precision.mode} brings its own layers, which cannot be divided among ranks: leave the backend out"
            )
        case = ParallelCase(_config(params), int(params["batch"]), facts.ranks, precision, options, facts)
        reason = division.refuse(case)
        return refused(reason) if reason else precision.support(facts)

    def prepare(self, setup: Setup) -> ParallelState:
        import torch.distributed as dist

        return self._state(setup, dist.group.WORLD)

    def step(self, state: ParallelState, phase: Phases) -> None:
        state.train_step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a few steps of plain gradient descent with one rank alone; raises NotTheSame if they differ too
        much."""
        import torch.distributed as dist

        from fp8bench.nn.parallel.step import NotTheSame, agreement, limits_of

        state = self._state(setup, dist.group.WORLD, plain=True)
        apart = agreement(state, self._alone(setup, plain=True), _AGREEING_STEPS)
        made_in = (setup.case.precision, *(name for _, name in setup.case.precision_map))
        params = setup.params
        limits = limits_of(map(precisions.get, made_in), str(params.get("wire", "")), str(params.get("load", "")))
        if excess := limits.describe_excess(apart):
            raise NotTheSame(f"{_AGREEING_STEPS} steps change weights differently from one rank alone: {excess}")
        return {**apart.figures(), **state.model.figures()}

    def step_parts(self, setup: Setup) -> StepParts:
        import torch.distributed as dist

        from fp8bench.nn.parallel.division import silent_group
        from fp8bench.nn.parallel.wire import StepWire

        def stepping(state: ParallelState) -> Callable[[], object]:
            return partial(state.train_step, SilentPhases())

        together, size = self.prepare(setup), dist.get_world_size()
        for _ in range(_STEPS_BEFORE):
            together.train_step(SilentPhases())
        with StepWire(dist.get_rank()) as wire:
            together.train_step(SilentPhases())
        alone = stepping(self._alone(setup)), stepping(self._alone(setup, parts=size))
        silent = stepping(self._state(setup, silent_group()))
        return StepParts(silent, wire.send_again, stepping(together), wire.list_sent(dist.get_rank()), alone)

    def _state(self, setup: Setup, group: ProcessGroup | None, plain: bool = False) -> ParallelState:
        from fp8bench.nn.parallel.step import new_state

        assert group is not None
        model = WAYS[str(setup.case.param("way"))].divide(self._job(setup, group))
        return new_state(model, _loader(setup), setup.facts, plain)

    def _alone(self, setup: Setup, plain: bool = False, parts: int = 1) -> ParallelState:
        """Returns the state of one rank with the whole batch, or with one of `parts` of it."""
        from fp8bench.nn.parallel.division import Undivided
        from fp8bench.nn.parallel.step import new_state

        model = Undivided(self._make_model(setup), setup.loss_scale)
        return new_state(model, _loader(setup, parts), setup.facts, plain)

    def _job(self, setup: Setup, group: ProcessGroup) -> Job:
        params = setup.params
        options = {name: str(params[name]) for name in OPTIONS if name in params}
        emulated = precisions.get(setup.case.precision).support(setup.facts).is_emulated
        return Job(
            lambda: self._make_model(setup),
            _config(params),
            int(setup.case.param("batch")),
            setup.facts,
            emulated,
            setup.loss_scale,
            options,
            group,
        )

    def _make_model(self, setup: Setup) -> GPT:
        from fp8bench.nn.around import set_around
        from fp8bench.nn.experts import set_load
        from fp8bench.nn.gpt import GPT
        from fp8bench.nn.training_step import seed_weights

        params = setup.params
        config = _config(params)
        with seed_weights(setup):
            model = GPT(config, self.arithmetics(setup), setup.arithmetic.carrier)
        set_around(model, setup.around(self.around(params)))
        if config.experts:
            set_load(model, str(params["load"]), int(params["batch"]) * config.sequence, setup.seed)
        return model


def _word_or_value(option: str, ranks: int) -> Callable[[str], Scalar]:
    """Returns a parser of a value, or of a word for several; the usual count keeps the number of ranks that it must
    serve."""
    parse, usual = _parse(option), f"{_FIRST} {ranks}" if option == _COUNTED else _FIRST
    return lambda text: text if text == _ALL else usual if text == _FIRST else parse(text)


def _values_of_word(values: tuple[str, ...], word: str) -> tuple[str, ...]:
    """Returns the values that a word stands for: all, or the first; for counts the first that suffices, else the
    last."""
    if word == _ALL:
        return values
    _, _, fewest = word.partition(" ")
    enough = [value for value in values if not fewest or int(value) >= int(fewest)]
    return (enough[0] if enough else values[-1],)


def _parse(option: str) -> Callable[[str], Scalar]:
    """Returns a parser of an option: of the words that ways have for it, or of any number if they have numbers."""
    values: dict[str, None] = {}
    for division in WAYS.values():
        values |= dict.fromkeys(division.options.get(option, ()))
    return whole_number() if all(value.isdecimal() for value in values) else one_of(*values)


def _config(params: Scalars) -> GPTConfig:
    config = replace(SIZES[str(params["size"])], sequence=int(params["sequence"]))
    experts = WAYS[str(params["way"])].experts
    return replace(config, experts=experts, hidden=config.hidden // 2) if experts else config


def _loader(setup: Setup, parts: int = 1) -> TokenLoader:
    from fp8bench.nn.batches import loader_for

    return loader_for(setup, max(1, int(setup.case.param("batch")) // parts), _config(setup.params))
