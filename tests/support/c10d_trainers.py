# SPDX-License-Identifier: Apache-2.0
"""One small model, trained by Accelerate and by Lightning on two backends of torch.distributed."""

from __future__ import annotations

import os
import warnings
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import commrt.c10d  # noqa: F401  # it registers the backend

EPOCHS = 3
KEPT = []
"""Groups of Gloo, which live until the process ends. Under load, a process hung once where one was deleted; perhaps it
waited for a thread of Gloo's that waited for Python's lock."""


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def data():
    source = torch.Generator().manual_seed(1)
    pairs = TensorDataset(torch.randn(64, 6, generator=source), torch.randint(0, 3, (64,), generator=source))
    return DataLoader(pairs, batch_size=8)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accelerate(backend):
    from accelerate import Accelerator  # noqa: PLC0415  # takes seconds
    from accelerate.state import AcceleratorState  # noqa: PLC0415

    model = network()
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer_of(model), data())
    for _ in range(EPOCHS):
        for x, y in loader:
            accelerator.backward(cross_entropy(wrapped(x), y))
            optimizer.step()
            optimizer.zero_grad()
    used = dist.get_backend()
    KEPT.append(dist.group.WORLD)
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    return used, model


def lightning(backend):
    return fitted(backend)[:2]


def fitted(backend):
    """The backend that Lightning used, the model, and what it logged of all ranks."""
    import lightning as pl  # noqa: PLC0415  # takes seconds
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch, _):
            self.log("loss of validation", self.loss(batch), sync_dist=True)
            self.log("images", len(batch[0]), sync_dist=True, reduce_fx="sum")

        def loss(self, batch):
            x, y = batch
            return cross_entropy(self.network(x), y)

        def configure_optimizers(self):
            return optimizer_of(self)

    module = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data(), data())
    used = dist.get_backend()
    KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    return used, module.network, {name: float(value) for name, value in trainer.callback_metrics.items()}


def logs(tell):
    """What Lightning logs on each backend."""
    warnings.simplefilter("ignore")
    found = []
    for backend in ("gloo", "commrt"):
        with patch.dict(os.environ):
            found.append(fitted(backend)[2])
    return found


def compare(tell, trainer):
    """The backends that `trainer` used, and the distance of their weights in parts of their length."""
    warnings.simplefilter("ignore")
    used, rows = [], []
    for backend in ("gloo", "commrt"):
        with patch.dict(os.environ):  # Lightning takes a launcher's variables away at its end
            name, model = trainer(backend)
        used.append(name)
        rows.append(torch.cat([param.detach().view(-1) for param in model.parameters()]))
    moved = torch.cat([param.detach().view(-1) for param in network().parameters()]) - rows[0]
    return used, float((rows[1] - rows[0]).norm() / rows[0].norm()), float(moved.norm() / rows[0].norm())
