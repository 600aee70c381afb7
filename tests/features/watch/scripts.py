"""Training scripts as people write them, which tests run with and without `fp8bench watch`."""

PLAIN = """
import argparse, os, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--end", default="")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(16 * asked.steps, 8), torch.randint(4, (16 * asked.steps,)))
    context = "spawn" if asked.workers else None
    loader = DataLoader(data, batch_size=16, num_workers=asked.workers, multiprocessing_context=context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(step, loss.item(), flush=True)
        if asked.end == "waits" and step == 9:
            time.sleep(60)
    print(sys.argv, __name__, __file__, os.environ.get("OMP_NUM_THREADS"))
    if asked.end == "exit":
        sys.exit(3)
    if asked.end == "words":
        sys.exit("the end")
    if asked.end == "raise":
        raise ValueError("planted")

if __name__ == "__main__":
    main()
"""

GAN = """
import torch
from torch import nn

class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

torch.manual_seed(0)
gan = Gan()
for_generator = torch.optim.Adam(gan.generator.parameters(), lr=1e-3)
for_critic = torch.optim.Adam(gan.critic.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
for step in range(8):
    fake = gan.generator(torch.randn(32, 4))
    for_critic.zero_grad()
    loss = bce(gan.critic(torch.randn(32, 2) + 3), torch.ones(32, 1))
    loss = loss + bce(gan.critic(fake.detach()), torch.zeros(32, 1))
    loss.backward()
    for_critic.step()
    for_generator.zero_grad()
    judged = bce(gan.critic(fake), torch.ones(32, 1))
    judged.backward()
    for_generator.step()
    print(loss.item(), judged.item())
"""

# The first argument selects how the model is split: none, ddp or fsdp.
RANKS = """
import sys
import torch
import torch.distributed as dist
from torch import nn

how = sys.argv[1]
if how != "one":
    dist.init_process_group("gloo")
rank, size = (0, 1) if how == "one" else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3, bias=False))
if how == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
if how == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = torch.Generator().manual_seed(1)
for step in range(9):
    tokens = torch.randint(32, (16,), generator=batches).chunk(size)[rank]
    nn.functional.cross_entropy(model(tokens), tokens % 3).backward()
    optimizer.step()
    optimizer.zero_grad()
if how != "one":
    dist.destroy_process_group()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(4, (160,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
for first, second in zip(losses[::2], losses[1::2]):
    print((first + second) / 2)
"""

TRAINER = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
data = []
for number in range(60):
    # Unequal numbers of tokens, so that a mean of parts is not the loss.
    labels = torch.randint(64, (16,)).where(torch.arange(16) > number % 14, -100)
    data.append({"input_ids": torch.randint(64, (16,)), "labels": labels})
options = TrainingArguments(
    sys.argv[1], max_steps=6, per_device_train_batch_size=3, gradient_accumulation_steps=3, use_cpu=True,
    logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=options, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    print("logged", entry["loss"], entry["grad_norm"])
"""
