"""Training steps of a GPT by several ranks, in each way of dividing it among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalar, Scalars, Support, Work
from fp8bench.nn import sizes
from fp8bench.nn.parallel.ways import OPTIONS, WAYS, Job, ParallelCase
from fp8bench.nn.shared_workloads import make_gpt
from fp8bench.protocols import Layer, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis, one_of, whole_number
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
_ALL = "auto"
_FIRST = "usual"
# The option that is a count, of which each rank needs one.
_COUNTED = "microbatches"
_ENOUGH = " that is not less than the ranks"
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
    listed = False
    least_ranks = 2
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
            Axis.each("way", f"how ranks train together: {ways_listed}", *WAYS),
            Axis.choice("size", f"the model: {', '.join(sizes.SIZES)}", *sizes.SIZES, default=size),
            Axis.count("batch", "sequences of all ranks together", "auto", quick=("4",), high=1 << 16),
            Axis.count("sequence", "tokens in a sequence", "auto", quick=("32",), high=1 << 16),
            *options,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        """Makes a case of each value of a way's options; options that a way does not have are dropped."""
        config = sizes.SIZES[str(params["size"])]
        division = WAYS[str(params["way"])]
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
        config = _config(params)
        length = int(params["sequence"])
        sequences = int(params["batch"])
        return Work(config.step_flops(sequences, length), sequences * length, least_memory=4.0 * config.weights)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        config = _config(params)
        return sizes.gpt_layers(config.layers, config.experts)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.gpt_around(_config(params).layers)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. The number of ranks must suit this way.
        division = WAYS[str(params["way"])]
        if facts.ranks < division.least_ranks:
            present = "there is 1" if facts.ranks == 1 else f"there are {facts.ranks}"
            least = division.least_ranks
            return refused(f"{division.name} takes {least} ranks, and {present}: add --ranks {least}")
        # 2. Options of other ways are refused, because they would be ignored silently.
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

        from fp8bench.nn.parallel import step

        state = self._state(setup, dist.group.WORLD, plain=True)
        apart = step.agreement(state, self._alone(setup, plain=True), _AGREEING_STEPS)
        made_in = (setup.case.precision, *(name for _, name in setup.case.precision_map))
        params = setup.params
        limits = step.limits_of(map(precisions.get, made_in), str(params.get("wire", "")), str(params.get("load", "")))
        if excess := limits.describe_excess(apart):
            raise step.NotTheSame(f"{_AGREEING_STEPS} steps change weights differently from one rank alone: {excess}")
        return {**apart.figures(), **state.model.figures()}

    def step_parts(self, setup: Setup) -> StepParts:
        import torch.distributed as dist

        from fp8bench.nn.parallel.division import silent_group
        from fp8bench.nn.parallel.wire import StepWire

        def stepping(state: ParallelState) -> Callable[[], object]:
            return partial(state.train_step, SilentPhases())

        together = self.prepare(setup)
        size = dist.get_world_size()
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
        params = setup.params
        config = _config(params)
        model = make_gpt(self, setup, config)
        if config.experts:
            from fp8bench.nn.experts import set_load

            set_load(model, str(params["load"]), int(params["batch"]) * config.sequence, setup.seed)
        return model


def _word_or_value(option: str, ranks: int) -> Callable[[str], Scalar]:
    """Returns a parser of a value, or of a word for several; the usual count keeps the number of ranks that it must
    serve."""
    parse = _parse(option)
    usual = f"{_FIRST} {ranks}" if option == _COUNTED else _FIRST
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


def _config(params: Scalars) -> sizes.GPTConfig:
    config = replace(sizes.SIZES[str(params["size"])], sequence=int(params["sequence"]))
    experts = WAYS[str(params["way"])].experts
    return replace(config, experts=experts, hidden=config.hidden // 2) if experts else config


def _loader(setup: Setup, parts: int = 1) -> TokenLoader:
    from fp8bench.nn.batches import loader_for

    return loader_for(setup, max(1, int(setup.case.param("batch")) // parts), _config(setup.params))
