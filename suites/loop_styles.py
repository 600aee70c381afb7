"""Healthy training loops in many styles: with various models, optimizers, batches and habits."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import SilentPhases

# The number of steps of a healthy training.
WELL_STEPS = 1000


Batch = tuple[Tensor, Tensor]
# Returns the inputs and targets of the batch with a number.
Batches = Callable[[int], Batch]


@dataclass
class Loop:
    """A training loop; illnesses are planted by changing its parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batches
    criterion: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    parts: int = 1
    clip: float = 0.0
    cast: torch.dtype | None = None
    scaler: Any = None
    schedule: Any = None
    others: Sequence[torch.optim.Optimizer] = ()
    zero: Callable[[torch.optim.Optimizer], None] | None = torch.optim.Optimizer.zero_grad
    times: float = 1.0
    step: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def advance(self) -> None:
        for part in range(self.parts):
            inputs, targets = self.batch(self.step * self.parts + part)
            with torch.autocast("cpu", self.cast) if self.cast else nullcontext():
                loss = self.criterion(self.model(inputs), targets) * self.times / self.parts
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in (self.optimizer, *self.others):
            (optimizer.step() if self.scaler is None else self.scaler.step(optimizer))
            if self.zero:
                self.zero(optimizer)
        if self.scaler:
            self.scaler.update()
        if self.schedule:
            self.schedule.step()
        self.step += 1

    def layer(self, kind: type[nn.Module] = nn.Linear, number: int = 0) -> Any:
        return [module for module in self.model.modules() if isinstance(module, kind)][number]

    def change_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def change_batches(self, change: Callable[[Tensor, Tensor], Batch]) -> None:
        inner = self.batch
        self.batch = lambda number: change(*inner(number))


@dataclass(frozen=True)
class Illness:
    """A planted fault of a training loop. Any of the `rules` is a right diagnosis.

    `plant` is called with the loop and the `arguments`: once before a step, or with `each` before every step from then
    on.
    """

    words: str
    style: str
    rules: str
    plant: Callable[..., object]
    arguments: tuple[Any, ...]
    onset: int
    each: bool

    @property
    def title(self) -> str:
        return f"{self.words} ({self.style})"

    def find_onset(self, seed: int) -> int:
        """Returns the step of the onset. Different seeds have different distances to the next watched step."""
        return self.onset + 7 * seed % 10 if self.onset else 0


def in_styles(
    words: str,
    styles: Iterable[str],
    rules: str,
    plant: Callable[..., object],
    *arguments: Any,
    onset: int = 101,
    each: bool = False,
) -> list[Illness]:
    """Returns an illness in each of these styles of loops."""
    return [Illness(words, style, rules, plant, arguments, onset, each) for style in styles]


def healthy_loops(styles: Iterable[str]) -> list[Illness]:
    """Returns loops of these styles in which nothing is planted."""
    return in_styles("well", styles, "", lambda loop: None)


def make_generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + number)


def vectors(seed: int, size: int = 32, wrong: float = 0.1) -> Batches:
    """Makes batches of random vectors, which a random network labels; a share `wrong` of the labels is random."""
    start = make_generator(seed, -1)
    first, second = torch.randn(16, 32, generator=start), torch.randn(32, 10, generator=start)

    def batch(number: int) -> Batch:
        draw = make_generator(seed, number)
        x = torch.randn(size, 16, generator=draw)
        y = (torch.tanh(x @ first / 2) @ second).argmax(-1)
        random_labels = torch.randint(10, (size,), generator=draw)
        return x, torch.where(torch.rand(size, generator=draw) < wrong, random_labels, y)

    return batch


def images(seed: int, size: int = 16) -> Batches:
    shapes = torch.randn(10, 3, 8, 8, generator=make_generator(seed, -1))

    def batch(number: int) -> Batch:
        draw = make_generator(seed, number)
        y = torch.randint(10, (size,), generator=draw)
        return 0.5 * shapes[y] + torch.randn(size, 3, 8, 8, generator=draw), y

    return batch


def chains(seed: int, size: int = 16) -> Batches:
    """Makes batches of sequences of 12 tokens from a Markov chain."""
    table = (2 * torch.randn(24, 24, generator=make_generator(seed, -1))).softmax(-1)

    def batch(number: int) -> Batch:
        draw = make_generator(seed, number)
        rows = [torch.randint(24, (size,), generator=draw)]
        for _ in range(12):
            rows.append(torch.multinomial(table[rows[-1]], 1, generator=draw).squeeze(1))
        text = torch.stack(rows, 1)
        return text[:, :-1], text[:, 1:].reshape(-1)

    return batch


class Recurrent(nn.Module):
    """An LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(24, 32), nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.table(tokens))[0])
        return logits.flatten(0, 1)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter (LoRA)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.up(self.down(x))


class Nano(nn.Module):
    """fp8bench's own GPT in fp32, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = SilentPhases()
        plain = PlainArithmetic(torch.float32)
        self.inner: LanguageModel = GPT(SIZES["nano"], lambda name: plain, torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens[:, :-1], tokens[:, 1:], self.phases)


def mlp(classes: int = 10, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), *between, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def convolutions() -> nn.Sequential:
    first = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()
    second = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))


def adam(model: nn.Module, rate: float = 2e-3, **more: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, fused=True, **more)


def sgd(model: nn.Module, rate: float = 0.05, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True, **more)


Style = Callable[[int], Loop]
Maker = Callable[[nn.Module], torch.optim.Optimizer]


def make_loop(model: nn.Module, make: Maker, batch: Batches, **more: Any) -> Loop:
    return Loop(model, make(model), batch, **more)


def bytes_of(seed: int) -> Batches:
    """Makes batches of windows of fp8bench's own sources."""
    text = b"".join(path.read_bytes() for path in sorted(Path(fp8bench.__file__).parent.glob("analysis/*.py")))
    every = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(number: int) -> Batch:
        starts = torch.randint(len(every) - 33, (2,), generator=make_generator(seed, number))
        return torch.stack([every[start : start + 33] for start in starts]), torch.zeros(())

    return batch


def tables(seed: int) -> Loop:
    """Makes a loop with an embedding with sparse gradients, and a second optimizer for the head."""
    answers = torch.randint(6, (40,), generator=make_generator(seed, -1))
    table, head = nn.EmbeddingBag(40, 16, sparse=True, mode="mean"), nn.Linear(16, 6)

    def batch(number: int) -> Batch:
        words = torch.randint(40, (32, 3), generator=make_generator(seed, number))
        return words, answers[words[:, 0]]

    sparse = torch.optim.SparseAdam(list(table.parameters()), lr=5e-3)
    return Loop(nn.Sequential(table, head), sparse, batch, others=(torch.optim.Adam(head.parameters(), lr=5e-3),))


def adapters() -> nn.Sequential:
    model: Any = mlp()
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in model))


def two_optimizers(seed: int) -> Loop:
    model = mlp()
    head = torch.optim.SGD(model[5:].parameters(), lr=0.05, momentum=0.9)
    return Loop(model, torch.optim.AdamW(model[:5].parameters(), lr=2e-3), vectors(seed), others=(head,))


def gan(seed: int, watches_judge: bool = False) -> Loop:
    """Makes a GAN, whose generator and judge are trained in turn."""
    generator, judge = (nn.Sequential(nn.Linear(a, 32), nn.ReLU(), nn.Linear(32, b)) for a, b in ((4, 2), (2, 1)))
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (generator, judge)]
    watched = (judge, optimizers[1]) if watches_judge else (generator, optimizers[0])
    loop = Loop(*watched, lambda number: (torch.zeros(0), torch.zeros(0)))

    def make_points() -> Tensor:
        return generator(torch.randn(64, 4, generator=make_generator(seed + 7, loop.step)))

    def train(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def judge_loss() -> Tensor:
        points = torch.randn(64, 2, generator=make_generator(seed, loop.step)) * torch.tensor([1.0, 0.3]) + 1
        return F.softplus(-judge(points)).mean() + F.softplus(judge(make_points().detach())).mean()

    def advance() -> None:
        train(optimizers[1], judge_loss)
        train(optimizers[0], lambda: F.softplus(-judge(make_points())).mean())
        loop.step += 1

    loop.advance = advance  # type: ignore[method-assign]
    return loop


def scheduled(style: Style, share: Callable[[int], float]) -> Style:
    def make(seed: int) -> Loop:
        loop = style(seed)
        loop.schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, share)
        return loop

    return make


def regression(seed: int, noise: float) -> Loop:
    inner, target = vectors(seed, wrong=0.0), torch.randn(16, 1, generator=make_generator(seed, -2))

    def batch(number: int) -> Batch:
        x, _ = inner(number)
        return x, torch.tanh(x @ target / 3) + noise * torch.randn(
            len(x), 1, generator=make_generator(seed + 9, number)
        )

    return make_loop(mlp(1), adam, batch, criterion=F.mse_loss)


def mixed(seed: int) -> Loop:
    """Makes a loop that alternates two kinds of batches. One kind is far easier and has larger inputs."""
    usual, easy = vectors(seed), vectors(seed + 50, wrong=0.0)

    def batch(number: int) -> Batch:
        x, y = (usual if number % 2 else easy)(number)
        return (x, y) if number % 2 else (6 * x, y * 0)

    return make_loop(mlp(), adam, batch)


def changed_text(seed: int) -> Batches:
    """Makes batches whose kind of text changes halfway."""
    first, second = chains(seed), chains(seed + 50)
    return lambda number: (first if number < WELL_STEPS // 2 else second)(number)


def words_of_a_bag(seed: int) -> Loop:
    """Makes a loop whose inputs are nearly all zeros."""
    answers = torch.randint(5, (400,), generator=make_generator(seed, -1))

    def batch(number: int) -> Batch:
        words = torch.randint(400, (32, 2), generator=make_generator(seed, number))
        return F.one_hot(words, 400).amax(1).float(), answers[words[:, 0]]

    return make_loop(nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 5)), adam, batch)


def random_labels(seed: int) -> Loop:
    """Makes a loop whose labels depend on nothing, so that only their frequencies can be learned."""
    loop = make_loop(mlp(), sgd, vectors(seed, 64))
    loop.change_batches(lambda x, y: (x, (x[:, 0] * 1e4).long().remainder(10)))
    return loop


def slow_body(seed: int, share: float) -> Loop:
    model = mlp()
    body, rest = model[:3].parameters(), model[3:].parameters()
    groups: list[dict[str, Any]] = [{"params": body, "lr": 2e-3 * share}, {"params": rest}]
    return Loop(model, torch.optim.AdamW(groups, lr=2e-3), vectors(seed))


def in_bf16(seed: int) -> Loop:
    loop = make_loop(mlp().bfloat16(), sgd, vectors(seed))
    loop.change_batches(lambda x, y: (x.bfloat16(), y))
    return loop


def wave(step: int) -> float:
    """Returns the rate's factor at a step: it warms up from 0, then swings."""
    return step / 50 if step < 50 else 0.55 + 0.45 * math.cos(step / 30)


def by_closure(seed: int) -> Loop:
    """Makes a loop whose steps call a closure, as LBFGS needs, always with the same large batch."""
    loop = make_loop(
        mlp(1),
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4),
        vectors(seed, 512),
        criterion=lambda x, y: F.mse_loss(x[:, 0], y / 10),
    )

    def advance() -> None:
        inputs, targets = loop.batch(0)

        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.criterion(loop.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loop.optimizer.step(closure)  # type: ignore[arg-type]
        loop.step += 1

    loop.advance = advance  # type: ignore[method-assign]
    return loop


def style(model: Callable[[], nn.Module] = mlp, make: Maker = adam, batch: Any = vectors, **more: Any) -> Style:
    return lambda seed: make_loop(model(), make, batch(seed), **more)


STYLES: dict[str, Style] = {
    "MLP, AdamW": style(),
    "MLP, SGD with momentum": style(make=sgd),
    "MLP, clipped": style(clip=1.0),
    "MLP, two examples a batch": style(mlp, partial(adam, rate=5e-4), partial(vectors, size=2)),
    "MLP, dropout": style(lambda: mlp(10, nn.Dropout(0.5))),
    "MLP, label smoothing": style(criterion=partial(F.cross_entropy, label_smoothing=0.1)),
    "MLP, margins": style(batch=partial(vectors, wrong=0.0), criterion=F.multi_margin_loss),
    "MLP, labels rare": style(
        partial(mlp, 1), criterion=lambda x, y: F.binary_cross_entropy_with_logits(x[:, 0], (y == 3).float())
    ),
    "MLP, gradients kept as zeros": style(zero=partial(torch.optim.Optimizer.zero_grad, set_to_none=False)),
    "MLP, a rate that warms up and swings": scheduled(style(), wave),
    "MLP, a rate that ends at 0": scheduled(style(make=sgd), lambda step: max(0.0, 1 - step / (WELL_STEPS - 1))),
    "MLP, RMSprop": style(make=lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3)),
    # The model memorizes these eight batches.
    "MLP, learned by heart": style(batch=lambda seed: lambda number: vectors(seed)(number % 8)),
    "MLP, random labels": random_labels,
    "MLP, kinds of batches in turn": mixed,
    "MLP, all data in each step": style(mlp, sgd, lambda seed: lambda number: vectors(seed, 512)(0)),
    "MLP, LBFGS": by_closure,
    "MLP, a body 50 times slower": partial(slow_body, share=0.02),
    "MLP, a body that is frozen": partial(slow_body, share=0.0),
    "MLP in bf16": in_bf16,
    "MLP, autocast": style(cast=torch.bfloat16),
    "MLP, GradScaler": lambda seed: make_loop(
        mlp(), adam, vectors(seed), scaler=torch.amp.GradScaler("cpu", growth_interval=40)
    ),
    "regression to its noise": partial(regression, noise=0.3),
    "regression without noise": partial(regression, noise=0.0),
    "bags of words": words_of_a_bag,
    "CNN with batch norm": style(convolutions, adam, images),
    "CNN with batch norm, SGD and decay": style(
        convolutions, partial(sgd, weight_decay=5e-4), partial(images, size=8)
    ),
    "LSTM, clipped": style(Recurrent, partial(adam, rate=5e-3), chains, clip=1.0),
    "LSTM, SGD": style(Recurrent, partial(sgd, rate=0.3), chains, clip=0.5),
    "LSTM, another text": style(Recurrent, partial(adam, rate=5e-3), changed_text, clip=1.0),
    "sparse tables, two optimizers": tables,
    "adapters of low rank": style(adapters, partial(adam, rate=5e-3)),
    "four micro-batches": style(batch=partial(vectors, size=8), parts=4),
    "CNN, two micro-batches": style(convolutions, adam, partial(images, size=8), parts=2),
    "two optimizers": two_optimizers,
    "a generator and its rival": gan,
    "the rival of a generator": partial(gan, watches_judge=True),
    "nano": style(Nano, partial(adam, rate=1e-3), bytes_of, criterion=lambda loss, _: loss),
}  # fmt: skip
