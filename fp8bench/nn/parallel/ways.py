"""The ways of training one model on several ranks: what each can do, what it makes on a rank, how blocks are cut.

A layer that makes features is cut along its outputs, separately in each part that it joins (queries, keys, values;
gate, value), so that a rank has whole heads. The layer that takes those features is cut along its inputs, and the
ranks' sums have to be added up. No torch here: plans read it.
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
    from fp8bench.nn.parallel.division import Division


OUTPUTS = 0
INPUTS = 1
# Which ranks' largest magnitude scales a part of a tensor.
OWN, OF_GROUP = AMAX_GROUPS = ("own", "group")
# Axes that only some ways have, with their explanations.
OPTIONS = {
    "wire": "what gradients, weights or tokens are while they are sent; stream: as a model computes them",
    "microbatches": "parts of a batch that follow each other through a pipeline",
    "load": "who goes to which expert: uniform: round robin; zipf:1: by a Zipf law; router: as the router chooses",
    "amax": "whose largest magnitude scales a part of a tensor: own (the rank's), or group (of all that have parts)",
}
_AMAX = {"amax": AMAX_GROUPS}
_MICROBATCHES = {"microbatches": ("2", "4")}
# torchao's layers, whose weights travel as float32 or as codes.
_TORCHAO = ("torchao_fp32", "torchao_fp8")


@dataclass(frozen=True)
class ParallelCase:
    """A case as rules see it; `batch` is the number of sequences of all ranks together."""

    config: GPTConfig
    batch: int
    ranks: int
    precision: Precision
    options: Mapping[str, str]
    facts: DeviceFacts


@dataclass(frozen=True)
class Job:
    """All that a rank needs to make its part of a model.

    `make` gives the whole model, with the same weights on every rank. Everything is sent through `group`, which may be
    one that sends nothing. `emulated` means that the device has no kernels for the precision.
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
class Way:
    """A way of dividing one model among several ranks.

    `refuse` returns why a case is impossible, or ''. `divide` makes this rank's part of the model; all ranks call it at
    once. `options` are the way's axes, of OPTIONS, with all their values. `experts` is the number of experts
    in each feed-forward block, each half as wide; 0 for none.
    """

    name: str
    summary: str
    refuse: Callable[[ParallelCase], str]
    divide: Callable[[Job], Division]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least_ranks: int = 2
    experts: int = 0


@dataclass(frozen=True)
class Cut:
    """A cut along `dim`: each rank gets its share of every one of the `parts`, which are given by their sizes."""

    dim: int
    parts: tuple[int, ...]

    def share(self, weight: Tensor, rank: int, ranks: int) -> Tensor:
        import torch

        parts = torch.split(weight, list(self.parts), self.dim)
        return torch.cat([part.chunk(ranks, self.dim)[rank] for part in parts], self.dim)

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        import torch

        sizes = [size // len(shares) for size in self.parts]
        pieces = [torch.split(share, sizes, self.dim) for share in shares]
        parts = [torch.cat(of_ranks, self.dim) for of_ranks in zip(*pieces, strict=True)]
        return torch.cat(parts, self.dim)


def cuts(config: GPTConfig) -> dict[str, Cut]:
    keys = config.key_heads * config.head_width
    up = (config.hidden,) * (2 if config.modern else 1)
    return {
        "attn.qkv": Cut(OUTPUTS, (config.width, keys, keys)),
        "attn.out": Cut(INPUTS, (config.width,)),
        "mlp.up": Cut(OUTPUTS, up),
        "mlp.down": Cut(INPUTS, (config.hidden,)),
    }


def cut_of(parameter: str, config: GPTConfig) -> Cut | None:
    words = parameter.split(".")
    return cuts(config).get(".".join(words[2:-1])) if words[0] == "blocks" else None


def uncuttable(config: GPTConfig, ranks: int) -> str:
    """Why blocks cannot be cut into equal shares; '' if they can."""
    sizes = {"heads": config.heads, "heads of keys": config.key_heads, "hidden features": config.hidden}
    for name, size in sizes.items():
        if size % ranks:
            return f"{size} {name} have no equal share for each of {ranks} ranks: choose another size"
    return "experts are not cut here: choose a size without them" if config.experts else ""


def _divide_by(path: str) -> Callable[[Job], Division]:
    """Returns a function that divides a model by a class of this package, imported late because it needs torch."""

    def divide(job: Job) -> Division:
        return resolve_name(f"{__package__}.{path}")(job)

    return divide


def refuse_batch(case: ParallelCase) -> str:
    if case.batch % case.ranks:
        return (
            f"{case.batch} sequences have no equal share for each of {case.ranks} ranks: choose a multiple of "
            f"{case.ranks}"
        )
    return ""


def refuse_rows(case: ParallelCase) -> str:
    config = case.config
    ranks = case.ranks
    wire = case.options["wire"]
    rows = {"the vocabulary": config.vocabulary, "the width": config.width, "the hidden width": config.hidden}
    if not config.modern:
        rows["the sequence"] = config.sequence
    # fully_shard cuts every weight along its rows.
    for name, count in rows.items():
        if count % ranks:
            return (
                f"{name} ({count}) has no equal part for each of {ranks} ranks, and parts of unequal size are padded, "
                "or fail with float8: choose another number of ranks"
            )
    # torchao's layers send FP8 weights only where they also multiply in FP8.
    if wire in _TORCHAO and case.precision.mode != "fp8":
        return f"wire={wire} has torchao's layers, which multiply in fp8: choose dtype fp8, or wire=fp32"
    if wire in _TORCHAO and case.facts.version_of("torchao") is None:
        return f"wire={wire} needs the package torchao: pip install torchao"
    return refuse_batch(case)


def refuse_owners(case: ParallelCase) -> str:
    weights = 6 * case.config.layers
    if case.ranks > weights:
        return f"{case.ranks} ranks have no weight each: the blocks of this model have {weights}"
    return refuse_batch(case)


def refuse_stages(case: ParallelCase, fewest: int = 1) -> str:
    layers = case.config.layers
    ranks = case.ranks
    parts = int(case.options["microbatches"])
    if layers % ranks:
        return f"{layers} layers have no equal share for each of {ranks} ranks: choose another size"
    if case.batch % parts:
        return f"{case.batch} sequences cannot be cut into {parts} equal microbatches: choose another batch"
    if parts < fewest:
        return f"{parts} microbatches do not fill {fewest} stages by this schedule: choose {fewest} or more"
    return ""


def refuse_full_stages(case: ParallelCase) -> str:
    return refuse_stages(case, case.ranks)


def refuse_experts(case: ParallelCase) -> str:
    if case.config.experts % case.ranks:
        return f"{case.config.experts} experts have no equal share for each of {case.ranks} ranks"
    return refuse_batch(case)


def refuse_cut(case: ParallelCase) -> str:
    return _refuse_cut_among(case, case.ranks)


def _refuse_cut_among(case: ParallelCase, ranks: int) -> str:
    if case.options["amax"] == OF_GROUP and case.precision.tensor_scale is TensorScale.NONE:
        return f"{case.precision.name} has no scale of a tensor that ranks could share: choose amax=own"
    return uncuttable(case.config, ranks)


def refuse_token_cut(case: ParallelCase) -> str:
    tokens = case.config.sequence
    if tokens % case.ranks:
        return f"{tokens} tokens have no equal share for each of {case.ranks} ranks"
    return refuse_cut(case)


def refuse_pairs(case: ParallelCase) -> str:
    pairs, remainder = divmod(case.ranks, 2)
    if remainder or case.batch % pairs:
        return f"{case.batch} sequences have no equal share for each pair of {case.ranks} ranks"
    return _refuse_cut_among(case, 2)


class ScaleTraffic(NamedTuple):
    """Exchanges of a step for casts by common scales: messages that are waited for, and bytes of a rank."""

    messages: int
    bytes: float


def scale_traffic_of_cuts(blocks: int, ranks: int) -> ScaleTraffic:
    """For `tp` and `sp` under amax=group with one scale a tensor: in each block two operands of four products are cut,
    and each of their casts asks all ranks first."""
    casts = 2 * 4 * blocks
    return ScaleTraffic(casts, 4 * casts * 2 * (ranks - 1) / ranks)


WAYS = {
    division.name: division
    for division in (
        Way(
            "ddp",
            "the whole model on every rank, torch's DistributedDataParallel; the mean of gradients is sent",
            refuse_batch,
            _divide_by("data_parallel:DDPModel"),
            {"wire": ("fp32", "bf16", "fp8_gather", "fp8_twoshot")},
        ),
        Way(
            "ep",
            "experts by ranks: tokens are sent to the ranks of theirs and back; all else is on every rank",
            refuse_experts,
            _divide_by("expert_parallel:ExpertsByRanks"),
            {"wire": ("stream", "bf16", "fp8"), "load": ("uniform", "zipf:1", "router")},
            experts=8,
        ),
        Way(
            "fsdp2",
            "weights, gradients and moments cut into equal rows, torch's fully_shard",
            refuse_rows,
            _divide_by("data_parallel:FSDPModel"),
            {"wire": ("fp32", "bf16", *_TORCHAO)},
        ),
        # The same losses and wait as pp_gpipe, but it keeps the activations of at most as many microbatches as stages.
        Way(
            "pp_1f1b",
            "blocks cut into stages; each microbatch goes backward as soon as it can",
            refuse_full_stages,
            _divide_by("pipeline:OneForwardOneBackward"),
            _MICROBATCHES,
        ),
        # Keeps the activations of all microbatches.
        Way(
            "pp_gpipe",
            "blocks cut into stages; all microbatches go forward, then all backward",
            refuse_stages,
            _divide_by("pipeline:GPipe"),
            _MICROBATCHES,
        ),
        # As many bytes as tp, but less memory: tensors between the parts of a block are divided as well.
        Way(
            "sp",
            "tp, and between a block's parts a rank has its tokens only: gathered before, scattered after",
            refuse_token_cut,
            _divide_by("tensor_parallel:SequenceCut"),
            {"wire": ("stream", "fp8"), **_AMAX},
        ),
        # Megatron-LM's exchanges: a sum after attention and after feed-forward, and in backward one before each.
        Way(
            "tp",
            "heads and hidden features cut; what blocks make is added up, amax groups are a choice",
            refuse_cut,
            _divide_by("tensor_parallel:TensorCut"),
            _AMAX,
        ),
        # For large trainings: tensors within a machine, FSDP between machines.
        Way(
            "tp_fsdp",
            "pairs of ranks share tensors as tp does, and FSDP2 shards what a pair has over all pairs",
            refuse_pairs,
            _divide_by("tensor_parallel:TensorFSDP"),
            _AMAX,
            least_ranks=4,
        ),
        Way(
            "zero",
            "ZeRO-1: each weight has one owner, which gets its gradient, updates it and sends it to all",
            refuse_owners,
            _divide_by("data_parallel:ZeroModel"),
            {"wire": ("fp32", "bf16", "fp8")},
        ),
    )
}
