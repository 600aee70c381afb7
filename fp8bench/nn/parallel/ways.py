"""The methods of training one model on several ranks: which cases each method supports, and which class divides the
model. Also defines how tensor parallelism cuts the weights of a block.

A layer that computes features is cut along its outputs. If it joins several parts (queries, keys and values, or gate
and value), each part is cut separately, so that a rank has whole heads. The layer that reads those features is cut
along its inputs, and the ranks' results must be summed. This module must not import torch, because planning imports
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from fp8bench.model import DeviceFacts
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Precision, TensorScale

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.parallel.division import RankModelPart


OUTPUT_DIMENSION = 0
INPUT_DIMENSION = 1
# The values of option `amax`. A rank scales its part of a tensor by the largest magnitude of this part (own), or by
# that of the whole tensor on all ranks (group).
OWN, OF_GROUP = AMAX_GROUPS = ("own", "group")
# Options that only some methods of division have, with their help texts.
DIVISION_OPTIONS = {
    "wire": "the format in which gradients, weights or tokens are sent; stream: the format of the model's stream",
    "microbatches": "the number of parts of a batch that follow each other through a pipeline",
    "load": "how tokens get experts: uniform: round robin; zipf:1: by a Zipf law; router: as the router chooses",
    "amax": "the largest magnitude that scales a part of a tensor: own (that of the rank), or group (of all ranks)",
}
_AMAX_GROUP_OPTION = {"amax": AMAX_GROUPS}
_MICROBATCHES_OPTION = {"microbatches": ("2", "4")}
# The values of option `wire` that replace linear layers by torchao's. Their weights are sent as float32 or as FP8
# codes.
_TORCHAO_WIRE_FORMATS = ("torchao_fp32", "torchao_fp8")


@dataclass(frozen=True)
class ParallelCase:
    """The properties of a case that decide whether a method can divide its model. `batch` is the number of sequences in
    the batch of all ranks together.
    """

    config: GPTConfig
    batch: int
    ranks: int
    precision: Precision
    options: Mapping[str, str]
    facts: DeviceFacts


@dataclass(frozen=True)
class ModelPartSetup:
    """Everything that a rank needs to make its part of a model.

    `make` returns the whole model, with the same weights on every rank. All exchanges use `group`, whose backend may be
    one that sends nothing ('fake'). `emulated` means that the device has no kernels for the precision.
    """

    make: Callable[[], GPT]
    config: GPTConfig
    batch: int
    facts: DeviceFacts
    emulated: bool
    loss_scale: float
    options: Mapping[str, str]
    group: ProcessGroup


@dataclass(frozen=True)
class ParallelMethod:
    """A method of training one model on several ranks, such as tensor parallelism.

    `explain_impossible_case` returns why a case is impossible, or ''. `make_division` makes this rank's part of the
    model, and all ranks call it together. `options` are those of DIVISION_OPTIONS that the method has, with all their
    values. `experts` is the number of experts in each feed-forward part, or 0 for none. Each expert is half as wide as
    a feed-forward part.
    """

    name: str
    summary: str
    explain_impossible_case: Callable[[ParallelCase], str]
    make_division: Callable[[ModelPartSetup], RankModelPart]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least_ranks: int = 2
    experts: int = 0


@dataclass(frozen=True)
class RankWeightCut:
    """How a weight is cut along dimension `dim`. The weight consists of parts with the sizes `parts`. Each rank gets
    its share of every part.
    """

    dim: int
    parts: tuple[int, ...]

    def share(self, weight: Tensor, rank: int, ranks: int) -> Tensor:
        import torch

        weight_parts = torch.split(weight, list(self.parts), self.dim)
        return torch.cat([part.chunk(ranks, self.dim)[rank] for part in weight_parts], self.dim)

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        import torch

        sizes = [size // len(shares) for size in self.parts]
        rank_pieces_by_share = [torch.split(share, sizes, self.dim) for share in shares]
        joined_parts = [torch.cat(rank_pieces, self.dim) for rank_pieces in zip(*rank_pieces_by_share, strict=True)]
        return torch.cat(joined_parts, self.dim)


def list_weight_cuts(config: GPTConfig) -> dict[str, RankWeightCut]:
    keys = config.key_heads * config.head_width
    up_part_sizes = (config.hidden,) * (2 if config.is_llama_like else 1)
    return {
        "attn.qkv": RankWeightCut(OUTPUT_DIMENSION, (config.width, keys, keys)),
        "attn.out": RankWeightCut(INPUT_DIMENSION, (config.width,)),
        "mlp.up": RankWeightCut(OUTPUT_DIMENSION, up_part_sizes),
        "mlp.down": RankWeightCut(INPUT_DIMENSION, (config.hidden,)),
    }


def find_weight_cut(parameter: str, config: GPTConfig) -> RankWeightCut | None:
    path_parts = parameter.split(".")
    return list_weight_cuts(config).get(".".join(path_parts[2:-1])) if path_parts[0] == "blocks" else None


def explain_unequal_division(count: int, things: str, ranks: int, advice: str = "") -> str:
    """Returns why `count` things cannot be divided equally among the ranks, or '' if they can. The sentence ends with
    `advice`.
    """
    return f"{count} {things} have no equal share for each of {ranks} ranks{advice}" if count % ranks else ""


def explain_uncuttable_model(config: GPTConfig, ranks: int) -> str:
    """Returns why tensor parallelism cannot cut blocks into equal shares, or ''."""
    sizes = {"heads": config.heads, "heads of keys": config.key_heads, "hidden features": config.hidden}
    for name, size in sizes.items():
        if reason := explain_unequal_division(size, name, ranks, ": choose another size"):
            return reason
    return "tensor parallelism cannot divide experts: choose a size without experts" if config.experts else ""


def _make_division_factory(path: str) -> Callable[[ModelPartSetup], RankModelPart]:
    """Returns a function that makes this rank's part of a model. `path` names the class of the part, within this
    package. The class needs torch, so it is imported when the function is called.
    """

    def make_division(job: ModelPartSetup) -> RankModelPart:
        return resolve_name(f"{__package__}.{path}")(job)

    return make_division


def refuse_uneven_batch(case: ParallelCase) -> str:
    return explain_unequal_division(case.batch, "sequences", case.ranks, f": choose a multiple of {case.ranks}")


def refuse_uneven_rows(case: ParallelCase) -> str:
    config = case.config
    ranks = case.ranks
    wire_format = case.options["wire"]
    rows = {"the vocabulary": config.vocabulary, "the width": config.width, "the hidden width": config.hidden}
    if not config.is_llama_like:
        rows["the sequence"] = config.sequence
    # fully_shard cuts every weight along its rows.
    for name, count in rows.items():
        if count % ranks:
            return (
                f"{name} ({count}) cannot be divided equally among {ranks} ranks, and unequal parts are padded, "
                "or fail with float8: choose another number of ranks"
            )
    # torchao's layers send weights in FP8 only if they also multiply in FP8.
    if wire_format in _TORCHAO_WIRE_FORMATS and case.precision.mode != "fp8":
        return f"wire={wire_format} uses torchao's layers, which multiply in fp8: choose dtype fp8, or wire=fp32"
    if wire_format in _TORCHAO_WIRE_FORMATS and case.facts.version_of("torchao") is None:
        return f"wire={wire_format} needs the package torchao: pip install torchao"
    return refuse_uneven_batch(case)


def refuse_weight_owners(case: ParallelCase) -> str:
    # Each block has at least two norms and four linear layers.
    weight_count = 6 * case.config.layers
    if case.ranks > weight_count:
        return f"{case.ranks} ranks cannot each own a weight: the blocks of this model have only {weight_count}"
    return refuse_uneven_batch(case)


def refuse_stages(case: ParallelCase, min_microbatches: int = 1) -> str:
    ranks = case.ranks
    microbatches = int(case.options["microbatches"])
    if reason := explain_unequal_division(case.config.layers, "layers", ranks, ": choose another size"):
        return reason
    if case.batch % microbatches:
        return f"{case.batch} sequences cannot be cut into {microbatches} equal microbatches: choose another batch"
    if microbatches < min_microbatches:
        return f"{microbatches} microbatches do not fill {ranks} stages by this schedule: choose {ranks} or more"
    return ""


def refuse_unfilled_stages(case: ParallelCase) -> str:
    return refuse_stages(case, case.ranks)


def refuse_uneven_experts(case: ParallelCase) -> str:
    return explain_unequal_division(case.config.experts, "experts", case.ranks) or refuse_uneven_batch(case)


def refuse_block_cut(case: ParallelCase, ranks: int = 0) -> str:
    """Returns why blocks cannot be cut among `ranks` ranks, or ''. The default is the case's number of ranks."""
    if case.options["amax"] == OF_GROUP and case.precision.tensor_scale is TensorScale.NONE:
        return f"{case.precision.name} has no tensor scale that ranks could share: choose amax=own"
    return explain_uncuttable_model(case.config, ranks or case.ranks)


def refuse_token_cut(case: ParallelCase) -> str:
    return explain_unequal_division(case.config.sequence, "tokens", case.ranks) or refuse_block_cut(case)


def refuse_uneven_pairs(case: ParallelCase) -> str:
    rank_pair_count, remainder = divmod(case.ranks, 2)
    if remainder or case.batch % rank_pair_count:
        return f"{case.batch} sequences have no equal share for each pair of {case.ranks} ranks"
    return refuse_block_cut(case, 2)


class ScaleTraffic(NamedTuple):
    """The exchanges of one step that make ranks agree on scales. `messages` is the number of exchanges, and a rank
    waits for each. `bytes` is what a rank sends.
    """

    messages: int
    bytes: float


def count_scale_traffic(blocks: int, ranks: int) -> ScaleTraffic:
    """Counts the exchanges with which `tp` and `sp` agree on tensor scales (amax=group). Each block has four linear
    layers, and ranks divide two operands of each. Before each cast of such an operand, the ranks exchange its largest
    magnitude.
    """
    # A magnitude has 4 bytes. In a ring of n ranks, a rank sends it 2 (n - 1) / n times.
    divided_operand_cast_count = 2 * 4 * blocks
    return ScaleTraffic(divided_operand_cast_count, 4 * divided_operand_cast_count * 2 * (ranks - 1) / ranks)


WAYS = {
    division.name: division
    for division in (
        ParallelMethod(
            "ddp",
            "torch's DistributedDataParallel: every rank has the whole model, and ranks average their gradients",
            refuse_uneven_batch,
            _make_division_factory("data_parallel:DDPModel"),
            {"wire": ("fp32", "bf16", "fp8_gather", "fp8_twoshot")},
        ),
        ParallelMethod(
            "ep",
            "expert parallelism: tokens are sent to their experts' ranks and back; other weights are on all ranks",
            refuse_uneven_experts,
            _make_division_factory("expert_parallel:ExpertsByRanks"),
            {"wire": ("stream", "bf16", "fp8"), "load": ("uniform", "zipf:1", "router")},
            experts=8,
        ),
        ParallelMethod(
            "fsdp2",
            "torch's fully_shard: each rank has equal rows of weights, gradients and moments",
            refuse_uneven_rows,
            _make_division_factory("data_parallel:FSDPModel"),
            {"wire": ("fp32", "bf16", *_TORCHAO_WIRE_FORMATS)},
        ),
        # pp_1f1b has the same losses and waiting times as pp_gpipe, but keeps the activations of at most as many
        # microbatches as there are stages.
        ParallelMethod(
            "pp_1f1b",
            "a pipeline of blocks, schedule 1F1B: each microbatch runs backward as soon as it can",
            refuse_unfilled_stages,
            _make_division_factory("pipeline:OneForwardOneBackward"),
            _MICROBATCHES_OPTION,
        ),
        # pp_gpipe keeps the activations of all microbatches.
        ParallelMethod(
            "pp_gpipe",
            "a pipeline of blocks, schedule GPipe: all microbatches run forward, then all run backward",
            refuse_stages,
            _make_division_factory("pipeline:GPipe"),
            _MICROBATCHES_OPTION,
        ),
        # sp sends as many bytes as tp, but needs less memory, because it also divides the tensors between the parts of
        # a block.
        ParallelMethod(
            "sp",
            "tp with sequence parallelism: between a block's parts each rank has only its own tokens",
            refuse_token_cut,
            _make_division_factory("tensor_parallel:SequenceCut"),
            {"wire": ("stream", "fp8"), **_AMAX_GROUP_OPTION},
        ),
        # tp has the exchanges of Megatron-LM. In forward, ranks sum the outputs of attention and of feed-forward. In
        # backward they sum the gradients of the inputs of both.
        ParallelMethod(
            "tp",
            "tensor parallelism: ranks divide heads and hidden features, and sum the outputs of a block's parts",
            refuse_block_cut,
            _make_division_factory("tensor_parallel:TensorCut"),
            _AMAX_GROUP_OPTION,
        ),
        # tp_fsdp resembles large trainings, with tensor parallelism within a machine and FSDP between machines.
        ParallelMethod(
            "tp_fsdp",
            "tp in pairs of ranks, and FSDP2 shards the weights of a pair over all pairs",
            refuse_uneven_pairs,
            _make_division_factory("tensor_parallel:TensorFSDP"),
            _AMAX_GROUP_OPTION,
            least_ranks=4,
        ),
        ParallelMethod(
            "zero",
            "ZeRO-1: each weight has one owner, which gets its gradient, updates it and sends it to all",
            refuse_weight_owners,
            _make_division_factory("data_parallel:ZeroModel"),
            {"wire": ("fp32", "bf16", "fp8")},
        ),
    )
}
