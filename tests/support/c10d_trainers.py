# SPDX-License-Identifier: Apache-2.0
"""One small model, trained by Accelerate, Lightning, Transformers and torchft on two backends of torch.distributed.

Each trainer takes the name of a backend. It returns the backend that was used, and losses, the last of them those of
the trained model: a way to train that differs in any step shows there.
"""

import os
import tempfile
import warnings
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_pool import KEPT
from small_models import sgd
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import commrt.c10d
from commrt.store.launcher import LOOPBACK

EPOCHS = 3
TIMEOUT = timedelta(seconds=60)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def samples():
    source = torch.Generator().manual_seed(1)
    x = torch.randn(128, 6, generator=source)
    return TensorDataset(x, x[:, :3].argmax(1))


def loader():
    return DataLoader(samples(), batch_size=8)


def loss_of(model):
    """What the model has learnt, with all samples."""
    with torch.no_grad():
        return float(cross_entropy(model(samples().tensors[0]), samples().tensors[1]))


def accelerate(backend):
    """With accumulation, clipping, and losses that all ranks gather."""
    from accelerate import Accelerator  # noqa: PLC0415  # takes seconds
    from accelerate.state import AcceleratorState  # noqa: PLC0415

    model, losses = network(), []
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    for _ in range(EPOCHS):
        for x, y in batches:
            with accelerator.accumulate(wrapped):
                loss = cross_entropy(wrapped(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses += accelerator.gather(loss.detach()[None]).tolist()
    used = _end()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    return used, [*losses, loss_of(model)]


def lightning(backend):
    """With `sync_dist`, accumulation, clipping, validation and checkpoints."""
    import lightning as pl  # noqa: PLC0415  # takes seconds
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    losses = []

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            loss = cross_entropy(self.network(batch[0]), batch[1])
            losses.append(float(loss))
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            self.log("batches", torch.tensor(1), sync_dist=True, reduce_fx="sum")
            return loss

        def validation_step(self, batch, _):
            self.log("checked", cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            return sgd(self)

    module, folder = Classifier(), tempfile.mkdtemp()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_epochs=EPOCHS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader())
    logged = [float(value) for _, value in sorted(trainer.callback_metrics.items())]
    return _end(), [*losses, *logged, loss_of(module.network)]


def transformers(backend):
    """With accumulation, clipping, and an evaluation after each epoch."""
    from accelerate.state import AcceleratorState  # noqa: PLC0415
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415  # takes seconds

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, x, labels):
            outputs = self.network(x)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    dist.init_process_group(backend)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        num_train_epochs=EPOCHS,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in samples()]
    trainer = Trainer(Classifier(), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]
    used, model = _end(), trainer.model.network
    AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate keeps one for a process
    return used, [*losses, loss_of(model)]


def torchft(backend):
    """Each rank is a replica of torchft's, whose manager opens a process group for them."""
    from torchft import DistributedDataParallel, Manager, Optimizer  # noqa: PLC0415  # not on all platforms
    from torchft.coordination import LighthouseServer  # noqa: PLC0415
    from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415

    dist.init_process_group(backend)
    rank, ranks, model, losses = dist.get_rank(), dist.get_world_size(), network(), []
    lighthouse = LighthouseServer(bind=f"{LOOPBACK}:0", min_replicas=ranks) if rank == 0 else None
    address = [lighthouse and lighthouse.address()]
    dist.broadcast_object_list(address)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT) if backend == "gloo" else process_group_of_torchft()(TIMEOUT),
        min_replica_size=ranks,
        use_async_quorum=False,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        replica_id=str(rank),
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=address[0],
    )
    optimizer, wrapped = Optimizer(manager, sgd(model)), DistributedDataParallel(manager, model)
    for _ in range(EPOCHS):
        for x, y in zip(*(part.chunk(8) for part in samples().tensors), strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(wrapped(x[rank::ranks]), y[rank::ranks])
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    used = manager._pg.getBackendName().removeprefix("torchft-")
    dist.barrier()
    manager.shutdown(wait=False)
    _end()
    return used, [*losses, loss_of(model)]


def process_group_of_torchft():
    """The class of docs/ddp.md."""
    from torchft.process_group import ProcessGroupWrapper  # noqa: PLC0415

    class ProcessGroupCommrt(ProcessGroupWrapper):
        def _create_pg(self, store, rank, world_size):
            found = {"group_rank": rank, "group_size": world_size, "global_ranks_in_group": []}
            return commrt.c10d.create(SimpleNamespace(store=store, timeout=self._timeout, group_id="torchft", **found))

        def getBackendName(self):  # noqa: N802
            return self._pg.name()

    return ProcessGroupCommrt


def _end():
    """Return the name of the group's backend, and end the group."""
    used = dist.get_backend()
    KEPT.append(dist.group.WORLD)
    dist.destroy_process_group()
    return used


def trained(tell, trainer):
    """{backend: the losses} of `trainer`, by the backend that torch says was used."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        return dict(_over(backend, trainer) for backend in ("gloo", "commrt"))


def _over(backend, trainer):
    with patch.dict(os.environ):  # Lightning takes a launcher's variables away at its end
        return trainer(backend)
