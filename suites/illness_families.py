"""Illnesses of training in FP8, and the loops in which they are planted, in families: what dies, what grows slowly,
what a loader repeats, what a resume loses.

Families, seeds and pass criteria were written before any rule was tried on them. `SPLIT` divides the titles into two
halves. Thresholds may be tuned on the first half, with seeds 0 and 1; figures of the second half, with seeds 10 and
11, are reported separately. An illness is found if a rule alarms within 100 steps after its onset, and none did
before. The diagnosis is right if one of the first alarms comes from a rule that the illness names. Goals: 90% found,
75% with a right diagnosis, a median delay of 15 steps, and one false alarm in 20,000 healthy steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from suites.loop_styles import (
    Adapted,
    Batch,
    Batches,
    Illness,
    Loop,
    Style,
    adam,
    chains,
    convolutions,
    healthy_loops,
    images,
    in_styles,
    make_generator,
    make_loop,
    mlp,
    scheduled,
    sgd,
    style,
    vectors,
)

SPLIT = 2026


def cast_to_e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Product(torch.autograd.Function):
    """A product whose operands and whose gradient are cast to E4M3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EightBits) -> Tensor:
        operands = cast_to_e4m3(x, layer.scale_of(x, "input")), cast_to_e4m3(weight, layer.scale_of(weight, "weight"))
        ctx.save_for_backward(*operands)
        ctx.layer = layer
        return operands[0] @ operands[1].T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = cast_to_e4m3(gradients[0], ctx.layer.scale_of(gradients[0], "gradient"))
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


class EightBits(nn.Linear):
    """A linear layer that casts its operands. `fixed` has scales that do not follow their tensor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.fixed: dict[str, Tensor | float] = {}
        self.last: dict[str, Tensor | float] = {}

    def scale_of(self, x: Tensor, role: str) -> Tensor | float:
        if role in self.fixed:
            return self.fixed[role]
        self.last[role] = 448 / x.detach().abs().amax().clamp(min=1e-12)
        return self.last[role]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Product.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return result + self.bias


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, linear: type[nn.Linear], causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.project(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))))


class Transformer(nn.Module):
    """A decoder of tokens or, with `classes`, an encoder of sequences. Positions are a learned table."""

    def __init__(
        self,
        words: int = 24,
        linear: type[nn.Linear] = nn.Linear,
        classes: int = 0,
        dropout: float = 0,
    ) -> None:
        super().__init__()
        width = 32
        self.classes = classes
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, linear, not classes, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes or words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1)) if self.classes else self.head(x).flatten(0, 1)


class Experts(nn.Module):
    """Sends each example to one of four experts, with noise. If `masked`, computes all experts and uses one."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.router = masked, nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        shares = logits.softmax(-1)
        chosen = (logits - torch.rand_like(logits).log().neg().log()).argmax(-1)
        for number, expert in enumerate(self.experts):
            if self.masked:
                x = x + expert(x) * (shares[:, number] * (chosen == number))[:, None]
                continue
            places = (chosen == number).nonzero()[:, 0]
            if len(places):
                x = x.index_add(0, places, expert(x[places]) * shares[places, number, None])
        return x


class Residual(nn.Module):
    """Adds two layers to its input, after a norm or with a gate that begins at zero."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32) if normed else nn.Identity()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.gate = None if normed else nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return x + (y if self.gate is None else self.gate * y)


def residuals(normed: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), *(Residual(normed) for _ in range(8)), nn.Linear(32, 10))


class Denoiser(nn.Module):
    """Predicts the noise in a point from its time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(40, 16)
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, times = inputs
        return self.layers(torch.cat([x, self.times(times)], 1))


def diffusion(seed: int) -> Loop:
    """Makes a diffusion loop. Its `notes` record the batch from which times or noise come."""
    centres = 2 * torch.randn(5, 8, generator=make_generator(seed, -1))
    loop = Loop(model := Denoiser(), adam(model), vectors(seed), F.mse_loss)

    def batch(number: int) -> Any:
        kind = torch.randint(5, (32,), generator=make_generator(seed, number))
        times = torch.randint(40, (32,), generator=make_generator(seed + 3, loop.notes.get("times", number)))
        noise = torch.randn(32, 8, generator=make_generator(seed + 5, loop.notes.get("noise", number)))
        if "time" in loop.notes:
            times = torch.full_like(times, loop.notes["time"])
        share = (times[:, None] + 1) / 40
        return ((1 - share).sqrt() * centres[kind] + share.sqrt() * noise, times), noise

    loop.batch = batch
    return loop


class Branched(nn.Module):
    """A model with a second head that only every fifth batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.often = mlp(32), nn.Linear(32, 10)
        self.seldom = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 10))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.body(x)
        logits: Tensor = self.often(hidden)
        return logits if self.calls % 5 else logits + self.seldom(hidden)


class Towers(nn.Module):
    """Finds pairs in a batch, as contrastive training does. The targets are always 0, 1, 2 and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(16), mlp(16)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.normalize(self.first(x), dim=1), F.normalize(self.second(x.flip(1)), dim=1)
        return 10 * first @ second.T


def towers(seed: int) -> Loop:
    loop = make_loop(Towers(), adam, vectors(seed))
    loop.change_batches(lambda x, y: (x, torch.arange(len(x))))
    return loop


def documents(seed: int, weights: Sequence[float] = (1.0,) * 6) -> Batches:
    """Makes batches of token sequences, whose token frequencies depend on their class. Classes have these weights."""
    tables = torch.randn(6, 40, generator=make_generator(seed, -1)).softmax(-1)
    shares = torch.tensor(weights)

    def batch(number: int) -> Batch:
        draw = make_generator(seed, number)
        y = torch.multinomial(shares, 32, replacement=True, generator=draw)
        return torch.multinomial(tables[y], 12, replacement=True, generator=draw), y

    return batch


def finite_set(batch: Batches, count: int) -> Batches:
    """Repeats the first `count` batches over and over."""
    return lambda number: batch(number % count)


def shuffled_set(batch: Batches, count: int) -> Batches:
    """Repeats the first `count` batches in another order in each epoch."""

    def pick(number: int) -> Batch:
        order = torch.randperm(count, generator=make_generator(9, number // count))
        return batch(int(order[number % count]))

    return pick


def autoencoder(seed: int) -> Loop:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(),
                          nn.ConvTranspose2d(4, 3, 2, 2))  # fmt: skip
    loop = make_loop(model, adam, images(seed), criterion=F.mse_loss)
    loop.change_batches(lambda x, y: (x, x))
    return loop


def low_rank(seed: int) -> Loop:
    """Makes a loop with a frozen decoder and adapters in its feed-forward layers, which begin at zero."""
    model: Any = Transformer()
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return make_loop(model, partial(adam, rate=4e-3), chains(seed))


def frozen_norms(seed: int) -> Loop:
    """Makes a loop whose batch norms are in eval mode from the start, as in fine-tuning."""
    loop = make_loop(convolutions(), adam, images(seed))
    for module in loop.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return loop


def interrupted(seed: int) -> Loop:
    """Makes a loop that is evaluated in eval mode every 60 steps, and loads its checkpoint every 150 steps."""
    loop = make_loop(mlp(10, nn.Dropout(0.1)), adam, vectors(seed))
    step = loop.advance

    def advance() -> None:
        if loop.step % 60 == 59:
            loop.model.eval()
            with torch.no_grad():
                loop.model(loop.batch(-7)[0])
            loop.model.train()
        if loop.step % 150 == 149:
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        step()

    loop.advance = advance  # type: ignore[method-assign]
    return loop


def with_warm_up(style: Style) -> Style:
    """Makes the rate rise linearly in the first 60 steps, and stay there."""
    return scheduled(style, lambda step: min(1.0, (step + 1) / 60))


def longer(seed: int) -> Loop:
    """Makes a loop whose sequences grow from 4 to 12 tokens, as in a curriculum."""
    loop = make_loop(Transformer(), adam, chains(seed))

    def shorten(x: Tensor, y: Tensor) -> Batch:
        length = min(12, 4 + loop.step // 60)
        return x[:, :length], y.reshape(-1, 12)[:, :length].reshape(-1)

    loop.change_batches(shorten)
    return loop


DECODER, ENCODER, EIGHT = "decoder with learned positions", "encoder with dropout", "decoder whose layers cast to E4M3"
DEEP, DEEP_SGD, IMAGES = "17 residual matrices, AdamW", "17 residual matrices, SGD", "small images, batch norm"
ROUTED, MASKED, DIFFUSION = "four experts", "four experts, masked", "diffusion of points"
PLAIN, WARM, WARM_DECODER = "layers of 64, AdamW", "SGD, warm-up, constant rate", "decoder, warm-up, constant rate"
ACCUMULATED = "decoder, four micro-batches, clipped"


def routed(masked: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), Experts(masked), nn.Linear(32, 10))


STYLES: dict[str, Style] = {
    DECODER: style(Transformer, adam, chains),
    ENCODER: style(partial(Transformer, 40, classes=6, dropout=0.1), partial(adam, rate=1e-3), documents),
    EIGHT: style(partial(Transformer, linear=EightBits), adam, chains),
    DEEP: style(residuals, partial(adam, weight_decay=0.1), vectors),
    DEEP_SGD: style(residuals, partial(sgd, rate=0.02), vectors),
    IMAGES: style(convolutions, adam, images),
    ROUTED: style(partial(routed, False), adam, vectors),
    MASKED: style(partial(routed, True), adam, partial(vectors, size=64)),
    DIFFUSION: diffusion,
    PLAIN: style(),
    WARM: with_warm_up(style(make=sgd)),
    WARM_DECODER: with_warm_up(style(Transformer, partial(adam, rate=3e-3), chains)),
    ACCUMULATED: style(Transformer, adam, partial(chains, size=4), parts=4, clip=1.0),
}
# Further healthy loops, in which nothing is planted.
HEALTHY_STYLES: dict[str, Style] = {
    "a branch in every fifth step": style(Branched),
    "a branch in every fifth step, gradients kept as zeros":
        style(Branched, lambda model: torch.optim.SGD(model.parameters(), 0.05, 0.9),
              zero=partial(torch.optim.Optimizer.zero_grad, set_to_none=False)),
    "256 examples in each step": style(mlp, adam, lambda seed: lambda number: vectors(seed, 256)(0)),
    "sequences, all 128 in each step": style(Transformer, adam, lambda seed: lambda number: chains(seed, 128)(0)),
    "all data in four micro-batches":
        style(mlp, adam, lambda seed: finite_set(vectors(seed, 64), 4), parts=4),
    "30 batches an epoch, in order": style(Transformer, adam, lambda seed: finite_set(chains(seed), 30)),
    "40 batches an epoch, shuffled": style(convolutions, sgd, lambda seed: shuffled_set(images(seed), 40)),
    "one class in 20 of 23": style(partial(Transformer, 40, classes=6), adam,
                                   partial(documents, weights=(20.0, 1.0, 1.0, 0.5, 0.3, 0.2))),
    "pairs in a batch": towers,
    "autoencoder": autoencoder,
    "adapters in a decoder": low_rank,
    "residuals that begin at zero": style(partial(residuals, False), adam, vectors),
    "frozen batch norms": frozen_norms,
    "evaluated and resumed": interrupted,
    "sequences that grow": longer,
    "a rate that decays to a tenth":
        scheduled(style(Transformer, adam, chains), lambda step: max(0.1, 1 - step / 800)),
}  # fmt: skip


def send_to_one(loop: Loop) -> None:
    loop.layer(Experts).router.bias.detach()[0] = 60.0


def sample_matrices(loop: Loop, count: int) -> list[nn.Parameter]:
    matrices = [parameter for parameter in loop.model.parameters() if parameter.ndim == 2]
    return random.Random(SPLIT).sample(matrices, count)


def freeze(loop: Loop, count: int) -> None:
    for parameter in sample_matrices(loop, count):
        parameter.requires_grad_(False)
        parameter.grad = None


def zero_gradients(loop: Loop, count: int) -> None:
    for parameter in sample_matrices(loop, count):
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


def round_gradients(loop: Loop) -> None:
    """Casts the gradients of two projections to E4M3 without a scale, as if the scale had been forgotten."""

    def round_output(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: cast_to_e4m3(gradient / 8, 1.0) * 8)  # type: ignore[no-untyped-call]

    for block in loop.layer(nn.ModuleList):
        block.project.register_forward_hook(round_output)


def fix_scales(loop: Loop, role: str, scale: float = 0.0) -> None:
    """Fixes the scales of a role at their present value, or at `scale`."""
    for module in loop.model.modules():
        if isinstance(module, EightBits):
            module.fixed[role] = scale or module.last[role]


def grow(loop: Loop, factor: float, kind: type[nn.Module] = nn.Linear, number: int = 0) -> None:
    """Multiplies the weights of one layer of a kind."""
    loop.layer(kind, number).weight.detach().mul_(factor)


def grow_norms(loop: Loop, factor: float) -> None:
    """Multiplies the gains of all norms."""
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.detach().mul_(factor)


def grow_inputs(loop: Loop, factor: float) -> None:
    """Multiplies the gains of all norms, while the scales of the inputs behind them do not change."""
    fix_scales(loop, "input")
    grow_norms(loop, factor)


def grow_rows(loop: Loop, factor: float, kind: type[nn.Module], rows: int | slice) -> None:
    loop.layer(kind).weight.detach()[rows] *= factor


def repeat(loop: Loop, count: int) -> None:
    loop.batch = finite_set(loop.batch, count)


def sort(loop: Loop) -> None:
    """Sorts every eight batches by label and divides them again, so that a batch has few classes."""
    inner = loop.batch

    def batch(number: int) -> Batch:
        batches = [inner(number // 8 * 8 + part) for part in range(8)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        rows = y.argsort().chunk(8)[number % 8]
        return x[rows], y[rows]

    loop.batch = batch


def relabel(loop: Loop, share: float) -> None:
    def change(x: Tensor, y: Tensor) -> Batch:
        return x, y.masked_fill(torch.rand(len(y), generator=make_generator(3, loop.step)) < share, 0)

    loop.change_batches(change)


def note(loop: Loop, name: str, value: int) -> None:
    loop.notes[name] = value


def leave_in_eval(loop: Loop, kind: type[nn.Module]) -> None:
    for module in loop.model.modules():
        if isinstance(module, kind):
            module.eval()


def leave_block_in_eval(loop: Loop) -> None:
    loop.layer(Block).eval()


def zero_moments(loop: Loop, *names: str) -> None:
    for state in loop.optimizer.state.values():
        for name in names:
            state[name].zero_()


def decay(loop: Loop, factor: float) -> None:
    for parameter in loop.model.parameters():
        if parameter.ndim == 2:
            parameter.detach().mul_(factor)


def scale_inputs(loop: Loop, factor: float) -> None:
    loop.change_batches(lambda x, y: (factor * x, y))


def warm_up_to(loop: Loop, times: float) -> None:
    """Makes the rate rise to `times` its value in the next 60 steps."""
    onset = loop.step
    loop.schedule = torch.optim.lr_scheduler.LambdaLR(
        loop.optimizer, lambda step: 1 + (times - 1) * min(1.0, (loop.step - onset) / 60)
    )


GROWS, DEAD = "slow-growth", "layer-stands-still gradient-vanished"
ZEROS, LOGITS, RATE = f"{DEAD} underflow-creep", f"{GROWS} large-logits", "rate-too-high loss-back-up update-norm-burst"
ILLNESSES = tuple(chain(
    in_styles("three of four experts get nothing", (ROUTED, MASKED), DEAD, send_to_one),
    in_styles("9 of 17 matrices are frozen", (DEEP,), DEAD, freeze, 9),
    in_styles("13 of 17 matrices get a gradient of zeros", (DEEP,), DEAD, zero_gradients, 13),
    in_styles("9 of 17 matrices get a gradient of zeros", (DEEP_SGD,), DEAD, zero_gradients, 9),
    in_styles("two projections' gradients in E4M3 without a scale", (DECODER,), ZEROS, round_gradients),
    in_styles("two projections' gradients in E4M3 without a scale, from the start", (DECODER,), ZEROS,
              round_gradients, onset=0),
    in_styles("gradients lose their scale", (EIGHT,), ZEROS, fix_scales, "gradient", 0.02),
    in_styles("scales of inputs stay while those grow 4% a step", (EIGHT,), f"{GROWS} norm-gain lag stale-scale",
              grow_inputs, 1.04, each=True),
    in_styles("weights of one layer grow 3% a step", (DECODER,), f"{GROWS} amax-jump", grow, 1.03, nn.Linear, 1,
              each=True),
    in_styles("one unit grows 6% a step", (DEEP,), f"{GROWS} amax-jump", grow_rows, 1.06, nn.Linear, 3, each=True),
    in_styles("queries and keys grow 3% a step", (DECODER,), f"{GROWS} attention-score-overflow",
              grow_rows, 1.03, nn.Linear, slice(64), each=True),
    in_styles("logits grow 3% a step", (ENCODER, ACCUMULATED), LOGITS, grow, 1.03, nn.Linear, -1, each=True),
    in_styles("gains grow 3% a step", (DECODER,), f"{GROWS} norm-gain", grow_norms, 1.03, each=True),
    in_styles("gains shrink 4% a step", (ENCODER, DEEP_SGD), "norm-gain", grow_norms, 0.96, each=True),
    in_styles("one word's row grows 5% a step", (DECODER, ENCODER), f"embedding-row {GROWS}",
              grow_rows, 1.05, nn.Embedding, 3, each=True),
    in_styles("weights decay 3% a step", (DEEP,), f"{GROWS} loss-back-up", decay, 0.97, each=True),
    in_styles("inputs grow 2% a step", (IMAGES,), f"{GROWS} data-drift amax-jump", scale_inputs, 1.02, each=True),
    in_styles("four batches over and over", (DECODER, IMAGES), "same-inputs", repeat, 4),
    in_styles("four batches over and over from the start", (PLAIN,), "same-inputs", repeat, 4, onset=0),
    in_styles("three batches over and over from the start", (ENCODER,), "same-inputs", repeat, 3, onset=0),
    in_styles("batches sorted by class", (IMAGES,), "label-shift", sort),
    in_styles("batches sorted by class from the start", (PLAIN,), "label-shift", sort, onset=0),
    in_styles("batches sorted by class", (ENCODER,), "label-shift", sort),
    in_styles("80% of labels become the first class", (ENCODER,), "label-shift", relabel, 0.8),
    in_styles("half of the labels become the first class", (PLAIN,), "label-shift", relabel, 0.5),
    in_styles("one time for every example", (DIFFUSION,), "same-conditioning", note, "time", 17),
    in_styles("one time for every example, from the start", (DIFFUSION,), "same-conditioning", note, "time", 17,
              onset=0),
    in_styles("the times of one batch", (DIFFUSION,), "same-conditioning", note, "times", 5),
    in_styles("the noise of one batch", (DIFFUSION,), "same-targets", note, "noise", 5),
    in_styles("the noise of one batch, from the start", (DIFFUSION,), "same-targets", note, "noise", 5, onset=0),
    in_styles("dropout left in eval mode", (ENCODER,), "part-in-eval", leave_in_eval, nn.Dropout),
    in_styles("a block left in eval mode", (ENCODER,), "part-in-eval", leave_block_in_eval),
    in_styles("batch norms left in eval mode", (IMAGES,), "part-in-eval", leave_in_eval, nn.BatchNorm2d),
    in_styles("moments zeroed on resume", (DECODER,), "moments-gone", zero_moments, "exp_avg", "exp_avg_sq"),
    in_styles("second moments zeroed on resume", (DEEP,), "moments-gone", zero_moments, "exp_avg_sq"),
    in_styles("momentum zeroed on resume", (DEEP_SGD,), "moments-gone", zero_moments, "momentum_buffer"),
    # As after a checkpoint with moments, but without the count of steps that corrects them.
    in_styles("the count of steps begins again", (ACCUMULATED,), "moments-gone", zero_moments, "step"),
    in_styles("a warm-up to 40 times the rate", (WARM,), RATE, warm_up_to, 40),
    in_styles("a warm-up to 60 times the rate", (WARM_DECODER,), RATE, warm_up_to, 60),
    in_styles("a warm-up to 30 times the rate", (DEEP_SGD,), RATE, warm_up_to, 30),
))  # fmt: skip
HEALTHY = healthy_loops((*STYLES, *HEALTHY_STYLES))


def split_in_halves() -> dict[str, list[Illness]]:
    """Returns the half on which thresholds may be tuned (tune), and the half that is reported separately (judge)."""
    shuffled = random.Random(SPLIT).sample(ILLNESSES, len(ILLNESSES))
    middle = len(ILLNESSES) // 2
    return {"tune": shuffled[:middle], "judge": shuffled[middle:]}
