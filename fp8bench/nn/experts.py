"""Feed-forward blocks with many experts, of which each token uses a few, and models of such blocks.

The router is computed in fp32, so that its choices do not depend on how products are rounded. As in Mixtral, the
results of the chosen experts are weighted by the softmax of their scores. Tokens are sorted by expert and never
dropped. Each expert's products run in its own arithmetic. If all experts share an arithmetic with grouped products,
they run as one grouped product. The balancing loss is that of the Switch Transformer.

In a `Mixture` the case can also assign tokens to experts, and it sets the format in which rows are sent to their
experts (dispatch) and back (combine). If the case assigns the tokens, the host knows the number of each expert's tokens
before the step and never waits. If the router chooses the experts, the host waits for these numbers. In both cases, the
router's scores weight the combination. Rows are sent in the carrier, in bf16, or as E4M3 codes with a scale for each
128 elements. Gradients are sent in the carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.formats.recipes import round_up
from fp8bench.nn.around import cast_to, start_stream, widen_dtype
from fp8bench.nn.linear import ChooseArithmetic, Linear, grouped_linear, linear, number_layer_parts
from fp8bench.nn.parts import FeedForward, Norm
from fp8bench.nn.sizes import EXPERTS_PER_TOKEN, MoeSizes
from fp8bench.protocols import Arithmetic, Phases, Role

# The weight of the balancing loss, as in Switch and Mixtral.
BALANCE_WEIGHT = 0.01
# The number of which an expert's tokens must be a multiple, because native weight gradients contract over the tokens.
# Rows of zeros pad the tokens.
ROW_MULTIPLE = 32


def copy_counts_to_host(counts: Tensor) -> list[int]:
    """Copies each expert's number of tokens to the host. Within a layer the host waits for the device only here."""
    return counts.tolist()


def count_tokens(chosen_experts: Tensor, experts: int) -> Tensor:
    """Counts the tokens of each expert. torch's bincount would make the host wait."""
    numbers = torch.arange(experts, device=chosen_experts.device)
    return (chosen_experts.view(-1, 1) == numbers).sum(0)


def combine_rows(rows: Tensor, scores: Tensor) -> Tensor:
    """Sums each token's rows (tokens, experts, width), weighted by the softmax of its experts' scores."""
    score_weights = scores.softmax(-1)[..., None]
    return (rows.to(score_weights.dtype) * score_weights).sum(1)


class ServedExperts:
    """Runs the experts of a served model one after the other, with weights in any format. `loads` is how many tokens
    each expert got in the last pass. Rows are not padded, and experts without tokens do not run.
    """

    def __init__(self, router: Tensor, experts: Sequence[Callable[..., Tensor]], top_k: int) -> None:
        self.router = router
        self.experts = experts
        self.top_k = top_k
        self.loads: list[int] = []

    def __call__(self, x: Tensor, phase: Phases) -> Tensor:
        token_rows = x.reshape(-1, x.shape[-1])
        router_dtype = widen_dtype(x.dtype)
        scores, chosen_experts = F.linear(token_rows.to(router_dtype), self.router.to(router_dtype)).topk(self.top_k)
        # The host waits for the device here, because it must know each expert's number of tokens.
        self.loads = copy_counts_to_host(count_tokens(chosen_experts, len(self.router)))
        # Sort the rows by expert, so that each expert's rows are adjacent. The inverse order restores them.
        expert_row_order = chosen_experts.flatten().argsort(stable=True)
        rows_by_expert = torch.split_with_sizes(token_rows[expert_row_order // self.top_k], self.loads)
        experts_and_rows = zip(self.experts, rows_by_expert, strict=True)
        outputs = torch.cat([expert(rows, phase) for expert, rows in experts_and_rows if len(rows)])
        rows = outputs[expert_row_order.argsort()].view(len(token_rows), self.top_k, -1)
        return combine_rows(rows, scores).to(x.dtype).view(x.shape)


class Experts(nn.Module):
    """A feed-forward block of experts. `balance` is the balancing loss of the last pass: 1 if all experts are chosen
    equally often, and larger otherwise.

    `planned_experts` holds the experts of each token; None if the router chooses them. `expert_count` is the number of
    experts on all ranks. With `feeds_empty_experts` an expert without tokens multiplies zeros, so that its weights get
    gradients, which are zero.
    """

    experts: Sequence[FeedForward]
    feeds_empty_experts = True
    planned_experts: Tensor | None = None
    ranks = 1

    def __init__(self, count: int, width: int, hidden: int, gated: bool, gain: float, choose: ChooseArithmetic) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) * 0.02)
        arithmetic_chooser_by_expert = number_layer_parts(choose, "experts", count)
        experts = nn.ModuleList(
            FeedForward(width, hidden, gated, gain, choose_in_expert)
            for choose_in_expert in arithmetic_chooser_by_expert
        )
        self.experts = experts  # type: ignore[assignment]
        self.expert_count = count
        self.balance: Tensor | None = None

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        # 1. Choose the experts of each token by the router's scores, or take them from a plan.
        token_rows = x.reshape(-1, x.shape[-1])
        scores = F.linear(token_rows.to(self.router.dtype), self.router)
        chosen_scores, chosen_experts = self._choose_experts(scores)

        # 2. The balancing loss makes the router choose experts with many tokens less often.
        counts = count_tokens(chosen_experts, self.expert_count)
        expert_load_shares = self._sum_over_ranks(counts).to(scores.dtype) / (chosen_experts.numel() * self.ranks)
        self.balance = self.expert_count * (expert_load_shares * scores.softmax(-1).mean(0)).sum()

        # 3. Sort the rows by expert, run the experts, and restore the order of tokens.
        expert_row_order = chosen_experts.flatten().argsort(stable=True)
        rows = token_rows[:, None].expand(-1, EXPERTS_PER_TOKEN, -1).reshape(-1, token_rows.shape[-1])[expert_row_order]
        outputs = self._run_experts(rows, counts, phase)[expert_row_order.argsort()].view(
            len(token_rows), EXPERTS_PER_TOKEN, -1
        )
        return combine_rows(outputs, chosen_scores).to(x.dtype).view(x.shape)

    def _choose_experts(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.planned_experts is None:
            return scores.topk(EXPERTS_PER_TOKEN)
        chosen_experts = self.planned_experts[: len(scores)]
        return scores.gather(1, chosen_experts), chosen_experts

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        return counts

    def _run_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        rows_by_expert = torch.split_with_sizes(rows, copy_counts_to_host(counts))
        return torch.cat(self._run_experts_on_parts(rows_by_expert, counts, phase))

    def _run_experts_on_parts(self, parts: Sequence[Tensor], counts: Tensor, phase: Phases) -> list[Tensor]:
        """Runs each expert on its part of the rows. Returns the results without padding."""
        # 1. Pad the rows of each expert with zeros to the multiple that products require.
        is_grouped = self._are_groupable()
        row_multiple = self._get_row_multiple(is_grouped)
        min_expert_rows = row_multiple if self.feeds_empty_experts else 0
        padded_sizes = [max(min_expert_rows, round_up(len(part), row_multiple)) for part in parts]
        padded_expert_parts = [
            F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(parts, padded_sizes, strict=True)
        ]

        # 2. Run all experts in one grouped product, or one after the other.
        outputs: Sequence[Tensor]
        if is_grouped:
            # An expert without tokens multiplies `row_multiple` rows of zeros (see `padded_sizes`). So count one row
            # for it, which is then rounded up.
            counts = counts.clamp(min=1) if self.feeds_empty_experts else counts
            part_end_rows = ((counts + row_multiple - 1) // row_multiple * row_multiple).cumsum(0).to(torch.int32)
            first_expert = self.experts[0]

            def multiply(x: Tensor, layers: list[Linear]) -> Tensor:
                weights = [layer.weight for layer in layers]
                operands = [layer.operands for layer in layers]
                return grouped_linear(
                    x, weights, padded_sizes, part_end_rows, first_expert.up.arithmetic, phase, operands
                )

            hidden = first_expert.apply_activation(
                multiply(torch.cat(padded_expert_parts), [expert.up for expert in self.experts])
            )
            outputs = multiply(hidden, [expert.down for expert in self.experts]).split_with_sizes(padded_sizes)
        else:
            experts_and_rows = zip(self.experts, padded_expert_parts, strict=True)
            outputs = [
                expert(part, phase) if len(part) else _run_expert_without_rows(expert, part)
                for expert, part in experts_and_rows
            ]
        return [y[: len(part)] for y, part in zip(outputs, parts, strict=True)]

    def _get_row_multiple(self, is_grouped: bool) -> int:
        return self.experts[0].up.arithmetic.part_rows if is_grouped else ROW_MULTIPLE

    def _are_groupable(self) -> bool:
        """Returns whether the products of all experts can run as one grouped product. For that, all experts must share
        one arithmetic that has grouped products, and the shapes of their weights must fit its multiples.
        """
        first_expert = self.experts[0]
        shared_arithmetic = first_expert.up.arithmetic
        layers = [expert.up for expert in self.experts] + [expert.down for expert in self.experts]
        if shared_arithmetic.groups <= 0 or any(layer.arithmetic is not shared_arithmetic for layer in layers):
            return False
        return not any(
            side % shared_arithmetic.groups for side in (*first_expert.up.weight.shape, *first_expert.down.weight.shape)
        )


def _run_expert_without_rows(expert: FeedForward, part: Tensor) -> Tensor:
    """Runs the expert's products without any rows, so that its weights get gradients."""
    converted_part = part.to(expert.up.weight.dtype)
    return F.linear(expert.apply_activation(F.linear(converted_part, expert.up.weight)), expert.down.weight).to(
        part.dtype
    )


def attach_balancing_loss(loss: Tensor, experts: Sequence[Experts], is_trained: bool) -> Tensor:
    """Returns the loss, and makes its backward pass also compute the gradients of the balancing losses if `is_trained`.
    The value of the loss does not change. The balancing losses are cleared.
    """
    balancing_losses = [layer.balance for layer in experts if layer.balance is not None]
    for layer in experts:
        layer.balance = None
    if not is_trained:
        return loss
    weighted_balancing_loss = BALANCE_WEIGHT * torch.stack(balancing_losses).sum()
    # The difference is 0, but its gradient is that of the balancing losses.
    return loss + (weighted_balancing_loss - weighted_balancing_loss.detach())


_ELEMENTS_PER_SCALE = 128
_E4M3_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True)
class RowTransferFormats:
    """The formats in which rows are sent to their experts (`dispatch_format`) and back (`return_format`). `router` is
    the router's arithmetic. Each expert's rows are padded to a multiple of `row_multiple`.
    """

    dispatch_format: str
    return_format: str
    router: Arithmetic
    row_multiple: int


def draw_expert_load(load: str, tokens: int, sizes: MoeSizes, seed: int) -> Tensor | None:
    """Returns the experts of each token, either round robin or drawn by a Zipf law without repetition. Returns None
    if the router chooses the experts.

    The draw runs on the host and depends only on the seed, so it is the same for every precision and device.
    """
    if load == "router":
        return None
    if load == "uniform":
        return torch.arange(tokens * sizes.top_k).view(tokens, sizes.top_k) % sizes.experts
    generator = torch.Generator("cpu").manual_seed(seed)
    ranks = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu")
    uniform_numbers = torch.rand(tokens, sizes.experts, dtype=torch.float64, generator=generator, device="cpu")
    # Gumbel's trick: the largest keys are a draw without replacement, weighted by the Zipf law.
    # The clamp avoids log(0).
    keys = -float(load.removeprefix("zipf:")) * ranks.log() - (-uniform_numbers.clamp(min=1e-300).log()).log()
    return keys.topk(sizes.top_k).indices


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    # A width that is not a multiple of the block gets one scale for each row.
    block = _ELEMENTS_PER_SCALE if x.shape[1] % _ELEMENTS_PER_SCALE == 0 else x.shape[1]
    row_blocks = x.float().view(len(x), x.shape[1] // block, block)
    scale = row_blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(_E4M3_DTYPE).max
    return (row_blocks / scale).to(_E4M3_DTYPE).view(torch.uint8), scale


def decode_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.view(_E4M3_DTYPE).float() * scale).flatten(1).to(dtype)


def set_expert_load(model: nn.Module, load: str, tokens: int, seed: int) -> None:
    blocks = [block for block in model.modules() if isinstance(block, Experts)]
    for number, block in enumerate(blocks):
        width = block.router.shape[1]
        expert_load_plan = draw_expert_load(
            load, tokens, MoeSizes(width, width, block.expert_count, EXPERTS_PER_TOKEN), seed + number
        )
        block.planned_experts = None if expert_load_plan is None else expert_load_plan.to(block.router.device)


class _RowTransport(torch.autograd.Function):
    """Selects rows of x by index, and rounds them to the format in which they are sent. Gradients keep their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_indices: Tensor, row_format: str) -> Tensor:
        ctx.save_for_backward(row_indices)
        ctx.rows = len(x)
        if row_format == "carrier":
            return x[row_indices]
        if row_format == "bf16":
            return x.to(torch.bfloat16)[row_indices].to(x.dtype)
        codes, scale = encode_rows(x)
        return decode_rows(codes[row_indices], scale[row_indices], x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (row_indices,) = ctx.saved_tensors
        row_gradients = gradients[0].new_zeros(ctx.rows, gradients[0].shape[1])
        # A token's row may go to several experts, so its gradients are summed.
        return row_gradients.index_add_(0, row_indices, gradients[0]), None, None


def transport(x: Tensor, row_indices: Tensor, row_format: str) -> Tensor:
    return _RowTransport.apply(x, row_indices, row_format)  # type: ignore[no-untyped-call]


class LoadedExperts(Experts):
    """Experts whose tokens may be assigned by a `plan`, and whose rows are sent in the formats of `travel`. If
    `is_watched`, a pass stores two things in `last_routing`: the router's choices, and each expert's number of tokens.
    """

    feeds_empty_experts = False
    plan: Tensor | None

    def __init__(
        self, sizes: MoeSizes, plan: Tensor | None, travel: RowTransferFormats, choose: ChooseArithmetic
    ) -> None:
        super().__init__(sizes.experts, sizes.width, sizes.hidden, True, 1.0, choose)
        # These weights give scores of order one. With smaller scores all experts would have nearly equal weights.
        self.router = nn.Parameter(torch.randn(sizes.experts, sizes.width) / sizes.width**0.5)
        self.top_k = sizes.top_k
        self.travel = travel
        self.register_buffer("plan", None if plan is None else plan.to(self.router.device))
        self._planned_sizes = None if plan is None else plan.flatten().bincount(minlength=sizes.experts).tolist()
        self.is_watched = False
        self.last_routing = (torch.empty(0), list[int]())

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        # 1. Choose the experts of each token by the router's scores, or take them from a plan.
        scores = linear(x, self.router, self.travel.router, phase)
        scores = scores.to(widen_dtype(scores.dtype))
        chosen_experts = scores.topk(self.top_k).indices if self.plan is None else self.plan
        counts = count_tokens(chosen_experts, len(self.experts))
        sizes = copy_counts_to_host(counts) if self._planned_sizes is None else self._planned_sizes
        if self.is_watched:
            self.last_routing = scores.detach().topk(self.top_k).indices, sizes

        # 2. Rows travel to their experts, sorted by expert, and back.
        expert_row_order = chosen_experts.flatten().argsort(stable=True)
        rows = transport(x, expert_row_order // self.top_k, self.travel.dispatch_format)
        outputs = torch.cat(self._run_experts_on_parts(torch.split_with_sizes(rows, sizes), counts, phase))
        returned_rows = transport(outputs, expert_row_order.argsort(), self.travel.return_format).view(
            len(x), self.top_k, -1
        )
        return combine_rows(returned_rows, scores.gather(1, chosen_experts)).to(x.dtype)

    def _get_row_multiple(self, is_grouped: bool) -> int:
        arithmetic = self.experts[0].up.arithmetic
        if not is_grouped:
            product_row_multiple = 1
        elif not arithmetic.plain:
            product_row_multiple = arithmetic.part_rows
        else:
            # Only the weight gradient contracts over rows. So plain products need padded rows only if there is a
            # backward pass.
            product_row_multiple = arithmetic.groups if torch.is_grad_enabled() else 1
        return max(self.travel.row_multiple, product_row_multiple)


class Mixture(nn.Module):
    """Layers of experts, each after a norm and with a residual connection."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))
    blocks: Sequence[LoadedExperts]

    def __init__(
        self, sizes: MoeSizes, plans: Sequence[Tensor | None], travel: RowTransferFormats, choose: ChooseArithmetic
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(sizes.width, True) for _ in plans)
        arithmetic_choosers = number_layer_parts(choose, "blocks", len(plans))
        layers = [
            LoadedExperts(sizes, plan, travel, choose_in_block)
            for plan, choose_in_block in zip(plans, arithmetic_choosers, strict=True)
        ]
        self.blocks = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        dtype = x.dtype
        residual_arithmetic = self.around["residual"]
        x = start_stream(x, dtype, residual_arithmetic)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = cast_to(x + block(norm(x), phase).to(x.dtype), residual_arithmetic)
        return x.to(dtype)

    def expert_bytes(self) -> int:
        """Returns the bytes of one expert's weights in the format that its products read."""
        first_expert = self.blocks[0].experts[0]
        byte_count = 0
        for layer in (first_expert.up, first_expert.down):
            operands = layer.operands or (layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT),)
            byte_count += sum(tensor.nbytes for tensor in operands[0].tensors)
        return byte_count

    def record_routing(self, run: Callable[[], object]) -> list[tuple[Tensor, list[int]]]:
        """Calls `run` and returns, for each layer, the router's choices and each expert's number of tokens."""
        for block in self.blocks:
            block.is_watched = True
        run()
        for block in self.blocks:
            block.is_watched = False
        return [block.last_routing for block in self.blocks]


def compute_disagreement_shares(choices: Sequence[Tensor], exact_choices: Sequence[Tensor]) -> list[float]:
    """Returns, for each layer, the fraction of the router's choices that differ from the exact pass. A choice differs
    if the exact pass does not choose that expert for the same token. The order of a token's experts does not count.
    """
    differing_choice_shares = []
    for layer_choices, exact_layer_choices in zip(choices, exact_choices, strict=True):
        is_exact_choice = (layer_choices[:, :, None] == exact_layer_choices[:, None, :]).any(-1)
        differing_choice_shares.append(float(1 - is_exact_choice.double().mean()))
    return differing_choice_shares


def summarise_load(counts: Sequence[Sequence[int]], expert_bytes: int) -> dict[str, float]:
    """Returns figures about the load of the experts in all layers: the largest imbalance of any layer, the number of
    experts that have tokens, the bytes of their weights, and the minimum and median rows of such an expert.
    """
    rows_per_used_expert: list[int] = []
    largest_load_imbalance = 0.0
    for layer in counts:
        rows_per_used_expert += filter(None, layer)
        largest_load_imbalance = max(largest_load_imbalance, max(layer) * len(layer) / sum(layer))
    return {
        "load_ratio": largest_load_imbalance,
        "distinct_experts": float(len(rows_per_used_expert)),
        "expert_bytes": float(len(rows_per_used_expert) * expert_bytes),
        "rows_least": float(min(rows_per_used_expert)),
        "rows_median": float(median(rows_per_used_expert)),
    }
