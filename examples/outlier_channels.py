"""A small transformer whose activations have outlier channels, as those of large language models do."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 64, 4, 2, 64, 4
# Every 16th channel is this many times as large as the others, so that each block of NVFP4 has an outlier.
OUTLIER = 60.0


class OutlierNorm(nn.Module):
    """A layer norm that enlarges every 16th channel."""

    gains: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        gains = torch.ones(WIDTH)
        gains[::16] = OUTLIER
        self.register_buffer("gains", gains)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.gains


class Block(nn.Module):
    """Attention and an MLP. Weights that read an outlier are smaller by its factor, so products begin as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = OutlierNorm(), OutlierNorm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():
            self.qkv.weight[:, ::16] /= OUTLIER
            self.up.weight[:, ::16] /= OUTLIER

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first_norm(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Transformer(nn.Module):
    """Predicts the next byte; the forward pass returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.2)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def make() -> dict[str, object]:
    """Returns the model, and batches of bytes of Python's standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    def batch(source: Tensor, step: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(0, len(source) - SEQUENCE - 1, (BATCH,), generator=generator).tolist()
        rows = torch.stack([source[start : start + SEQUENCE + 1] for start in starts])
        return {"x": rows[:, :-1], "y": rows[:, 1:]}

    return {
        "model": Transformer(),
        "batches": lambda step, seed: batch(train, step, seed),
        "held_out": [batch(held_out, number, 77) for number in range(16)],
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    }
