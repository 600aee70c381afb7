"""The suite parallel: training steps of a GPT on several ranks, for each method of dividing the training among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Params, Scalar, Scalars, Support, Work
from fp8bench.nn import sizes
from fp8bench.nn.parallel.ways import DIVISION_OPTIONS, WAYS, ModelPartSetup, ParallelCase
from fp8bench.nn.shared_workloads import make_gpt
from fp8bench.protocols import Layer, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis, one_of, read_integers, whole_number
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fp8bench.nn.batches import TokenLoader
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.parallel.step import ParallelState

# The default batch of all ranks together is the model's default batch times this factor.
_DEFAULT_BATCH_FACTOR = 4
# Words for the values of an option: all values that the parallel method supports, or the first of them.
_ALL_VALUES_WORD = "auto"
_FIRST_VALUE_WORD = "usual"
# This option has numbers as values. `usual` stands for the first number that is at least the number of ranks.
_MICRO_BATCHES_OPTION = "microbatches"
_MICRO_BATCHES_SUFFIX = " that is at least the number of ranks"
# This many warm-up steps run before messages are counted. In its second step, DDP once sends the order of its buckets.
_STEPS_BEFORE_COUNTING = 2
# This many steps on several ranks are compared with the same steps on one rank.
_COMPARED_STEPS = 3


@workloads.register("parallel")
class Parallel(Workload):
    """Times training steps of several ranks. Each rank has a part of the model, of the batch, or of both. The parameter
    `batch` counts the sequences of all ranks together, so that throughputs can be compared. Errors are differences from
    one rank that trains alone with the same arithmetic.
    """

    name = "parallel"
    version = "2"  # since version 2 of this suite, the head shares the embedding's weights
    summary = "training steps of a GPT by several ranks (--ranks): data, sharded, tensor and pipeline parallel"
    listed = False
    least_ranks = 2
    uses_corpus = True
    linear_layers = True
    layer_kinds = ("attn", "mlp", "head")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size = "gpt2-124m" if facts.accelerated else "nano"
        parallel_methods_text = "; ".join(
            f"{parallel_method.name} ({parallel_method.summary})" for parallel_method in WAYS.values()
        )
        options = (
            Axis(
                name,
                f"{text}; {_ALL_VALUES_WORD}: all values that a way allows; {_FIRST_VALUE_WORD}: the first of them"
                f"{_MICRO_BATCHES_SUFFIX * (name == _MICRO_BATCHES_OPTION)}",
                (_ALL_VALUES_WORD,),
                _make_option_parser(name, facts.ranks),
                quick=(_FIRST_VALUE_WORD,),
            )
            for name, text in DIVISION_OPTIONS.items()
        )
        return (
            Axis.each("way", f"how ranks train together: {parallel_methods_text}", *WAYS),
            Axis.choice("size", f"the model: {', '.join(sizes.SIZES)}", *sizes.SIZES, default=size),
            Axis.count("batch", "sequences of all ranks together", "auto", quick=("4",), high=1 << 16),
            Axis.count("sequence", "tokens in a sequence", "auto", quick=("32",), high=1 << 16),
            *options,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        """Makes one case for each combination of option values that the parallel method (`way`) allows. Options that
        the method does not have are dropped.
        """
        config = sizes.SIZES[str(params["size"])]
        parallel_method = WAYS[str(params["way"])]
        default_sizes: dict[str, Scalar] = {"batch": config.batch * _DEFAULT_BATCH_FACTOR, "sequence": config.sequence}
        params_with_sizes = {
            name: default_sizes.get(name, value) if value == "auto" else value for name, value in params.items()
        }
        single_value_params = {
            name: value
            for name, value in params_with_sizes.items()
            if name not in DIVISION_OPTIONS or str(value).partition(" ")[0] not in (_ALL_VALUES_WORD, _FIRST_VALUE_WORD)
        }
        names = [name for name in parallel_method.options if name not in single_value_params]
        values = [
            map(_make_value_parser(name), _expand_option_word(parallel_method.options[name], str(params[name])))
            for name in names
        ]
        return tuple(
            (*single_value_params.items(), *zip(names, chosen_values, strict=True))
            for chosen_values in product(*values)
        )

    def work(self, params: Scalars) -> Work:
        config = _make_config(params)
        length, sequences = read_integers(params, "sequence", "batch")
        return Work(config.step_flops(sequences, length), sequences * length, least_memory=4.0 * config.weights)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        config = _make_config(params)
        return sizes.gpt_layers(config.layers, config.experts)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.make_gpt_surrounding_layers(_make_config(params).layers)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. Refuse too few ranks for the method.
        parallel_method = WAYS[str(params["way"])]
        if facts.ranks < parallel_method.least_ranks:
            min_ranks = parallel_method.least_ranks
            return refused(
                f"{parallel_method.name} needs {min_ranks} ranks, not {facts.ranks}: add --ranks {min_ranks}"
            )
        # 2. Refuse options of other methods, because they would have no effect.
        options = _read_options(params)
        unknown_options = [
            name
            for name, value in options.items()
            if name not in parallel_method.options
            or (isinstance(params[name], str) and value not in parallel_method.options[name])
        ]
        if unknown_options:
            name = unknown_options[0]
            option_values_text = "; ".join(
                f"{option}: {', '.join(values)}" for option, values in parallel_method.options.items()
            )
            return refused(
                f"{parallel_method.name} has no {name}={options[name]}: it takes {option_values_text or 'none'}"
            )
        # 3. Refuse layers that cannot be divided, and sizes that cannot be divided equally.
        if precision.whole_layers:
            return refused(
                f"{precision.mode} brings its own layers, which cannot be divided among ranks: leave the backend out"
            )
        case = ParallelCase(_make_config(params), int(params["batch"]), facts.ranks, precision, options, facts)
        reason = parallel_method.explain_impossible_case(case)
        return refused(reason) if reason else precision.support(facts)

    def prepare(self, setup: Setup) -> ParallelState:
        import torch.distributed as dist

        return self._make_parallel_state(setup, dist.group.WORLD)

    def step(self, state: ParallelState, phase: Phases) -> None:
        state.train_step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares a few steps of plain gradient descent on all ranks with the same steps of one rank alone. Raises
        RanksDisagree if weights differ too much.
        """
        import torch.distributed as dist

        from fp8bench.nn.parallel import step

        params = setup.params
        state = self._make_parallel_state(setup, dist.group.WORLD, plain=True)
        single_rank_training_state = self._make_single_rank_state(setup, plain=True)
        differences = step.compare_with_one_rank(state, single_rank_training_state, _COMPARED_STEPS)
        modes = map(precisions.get, (setup.case.precision, *dict(setup.case.precision_map).values()))
        limits = step.find_difference_limits(modes, str(params.get("wire", "")), str(params.get("load", "")))
        if excess_text := limits.describe_exceeded_limit(differences):
            raise step.RanksDisagree(
                f"{_COMPARED_STEPS} steps change weights differently from one rank alone: {excess_text}"
            )
        return {**differences.figures(), **state.model.figures()}

    def step_parts(self, setup: Setup) -> StepParts:
        import torch.distributed as dist

        from fp8bench.nn.parallel.division import make_silent_process_group
        from fp8bench.nn.parallel.wire import StepTrafficWatch

        def bind_step(state: ParallelState) -> Callable[[], object]:
            return partial(state.train_step, SilentPhases())

        # 1. Record the messages of a step on all ranks.
        state_with_communication = self.prepare(setup)
        size = dist.get_world_size()
        for _ in range(_STEPS_BEFORE_COUNTING):
            state_with_communication.train_step(SilentPhases())
        with StepTrafficWatch(dist.get_rank()) as step_wire:
            state_with_communication.train_step(SilentPhases())
        # 2. Make steps of a single rank: with the whole batch, and with one rank's part of it.
        full_batch_step = bind_step(self._make_single_rank_state(setup))
        part_batch_step = bind_step(self._make_single_rank_state(setup, parts=size))
        # 3. A group that sends nothing gives the same step without communication.
        return StepParts(
            bind_step(self._make_parallel_state(setup, make_silent_process_group())),
            step_wire.repeat_exchanges,
            bind_step(state_with_communication),
            step_wire.list_sent_bytes(dist.get_rank()),
            (full_batch_step, part_batch_step),
        )

    def _make_parallel_state(self, setup: Setup, group: ProcessGroup | None, plain: bool = False) -> ParallelState:
        from fp8bench.nn.parallel.step import make_parallel_state

        assert group is not None
        model = WAYS[str(setup.params["way"])].make_division(self._make_parallel_job(setup, group))
        return make_parallel_state(model, _make_loader(setup), setup.facts, plain)

    def _make_single_rank_state(self, setup: Setup, plain: bool = False, parts: int = 1) -> ParallelState:
        """Returns the training state of a single rank. It trains on the whole batch, or on one of `parts` equal parts
        of it.
        """
        from fp8bench.nn.parallel.division import UndividedModel
        from fp8bench.nn.parallel.step import make_parallel_state

        model = UndividedModel(self._make_model(setup), setup.loss_scale)
        return make_parallel_state(model, _make_loader(setup, parts), setup.facts, plain)

    def _make_parallel_job(self, setup: Setup, group: ProcessGroup) -> ModelPartSetup:
        params = setup.params
        return ModelPartSetup(
            lambda: self._make_model(setup),
            _make_config(params),
            int(params["batch"]),
            setup.facts,
            precisions.get(setup.case.precision).support(setup.facts).is_emulated,
            setup.loss_scale,
            _read_options(params),
            group,
        )

    def _make_model(self, setup: Setup) -> GPT:
        params = setup.params
        config = _make_config(params)
        model = make_gpt(self, setup, config)
        if config.experts:
            from fp8bench.nn.experts import set_expert_load

            set_expert_load(model, str(params["load"]), int(params["batch"]) * config.sequence, setup.seed)
        return model


def _read_options(params: Scalars) -> dict[str, str]:
    return {name: str(params[name]) for name in DIVISION_OPTIONS if name in params}


def _make_option_parser(option: str, ranks: int) -> Callable[[str], Scalar]:
    """Returns a parser for one value of an option, or for a word that stands for several values. For the option of
    micro-batches, 'usual' becomes 'usual N', where N is the number of ranks.
    """
    parse = _make_value_parser(option)
    first_value_word = f"{_FIRST_VALUE_WORD} {ranks}" if option == _MICRO_BATCHES_OPTION else _FIRST_VALUE_WORD
    return lambda text: (
        text if text == _ALL_VALUES_WORD else first_value_word if text == _FIRST_VALUE_WORD else parse(text)
    )


def _expand_option_word(values: tuple[str, ...], word: str) -> tuple[str, ...]:
    """Returns the option values for a word: all values, or a single one. For 'usual', this is the first value. For
    'usual N', it is the first number that is at least N, or the last number if all are smaller.
    """
    if word == _ALL_VALUES_WORD:
        return values
    _, _, min_value = word.partition(" ")
    large_enough_values = [value for value in values if not min_value or int(value) >= int(min_value)]
    return (large_enough_values[0] if large_enough_values else values[-1],)


def _make_value_parser(option: str) -> Callable[[str], Scalar]:
    """Returns a parser for an option of the division among ranks: for whole numbers if all parallel methods have
    only numbers for it, otherwise for the words that they accept.
    """
    values: dict[str, None] = {}
    for parallel_method in WAYS.values():
        values |= dict.fromkeys(parallel_method.options.get(option, ()))
    return whole_number() if all(value.isdecimal() for value in values) else one_of(*values)


def _make_config(params: Scalars) -> sizes.GPTConfig:
    config = replace(sizes.SIZES[str(params["size"])], sequence=int(params["sequence"]))
    experts = WAYS[str(params["way"])].experts
    return replace(config, experts=experts, hidden=config.hidden // 2) if experts else config


def _make_loader(setup: Setup, parts: int = 1) -> TokenLoader:
    from fp8bench.nn.batches import make_loader

    return make_loader(setup, max(1, int(setup.params["batch"]) // parts), _make_config(setup.params))
