"""The callbacks against the packages themselves, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8bench
from fp8bench.errors import UsageError
from fp8bench.features.train.values import LayerReading, Line, StepRow
from tests.features.train.lab.labs import hooks_of


class Rows(torch.utils.data.Dataset[Any]):
    """Tokens to be learnt by heart."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * (index % 5 + 1)) % 50
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    """The losses are those that the Trainer logs, its rates too; nothing stays attached."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    lines: list[Line] = []
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callback = fp8bench.hugging_face_callback(tmp_path / "steps.jsonl", told=lines.extend, stride=3)
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    rows = [line for line in lines if isinstance(line, StepRow)]
    logged = [one for one in trainer.state.log_history if "loss" in one]
    assert [row.step for row in rows] == list(range(6))
    assert [row.loss for row in rows] == pytest.approx([float(one["loss"]) for one in logged], rel=1e-3)
    assert [row.rate for row in rows] == pytest.approx([one["learning_rate"] for one in logged], rel=1e-3)
    read = {(line.layer, line.role) for line in lines if isinstance(line, LayerReading)}
    assert ("transformer.h.0.attn.c_attn", "gradient") in read and ("transformer.wte", "weight") in read
    assert hooks_of(model) == 0 and (tmp_path / "steps.jsonl").read_text().count("\n") == len(lines)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path: Path) -> None:
    """With two micro-batches a step: the loss that was logged, and the noise between them."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module, lines = Module(), list[Line]()
    data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
        callbacks=[fp8bench.lightning_callback(told=lines.extend, stride=2)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    rows = [line for line in lines if isinstance(line, StepRow)]
    means = [sum(module.losses[place : place + 2]) / 2 for place in range(0, 8, 2)]
    assert [row.loss for row in rows] == pytest.approx(means) and len(rows) == 4
    assert {(line.layer, line.role) for line in lines if isinstance(line, LayerReading)} == {
        (layer, role) for layer in ("net.0", "net.2") for role in ("input", "weight", "gradient")
    }
    assert any(getattr(line, "name", "") == "noise_scale" for line in lines) and hooks_of(module) == 0


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do."""
    for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for make, word in ((fp8bench.hugging_face_callback, "transformers"), (fp8bench.lightning_callback, "lightning")):
        with pytest.raises(UsageError, match=f"pip install {word}"):
            make()
