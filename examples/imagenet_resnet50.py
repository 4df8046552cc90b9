# SPDX-License-Identifier: Apache-2.0
"""Train ResNet-50 on ImageNet with large batches, as the papers did, or on any folder of images.

::

    torchrun --nproc-per-node 8 examples/imagenet_resnet50.py --data /data/imagenet
    srun -N 272 --ntasks-per-node 4 python examples/imagenet_resnet50.py --grid 32x34 --wire fp16

``--data`` is a folder with ``train`` and ``val``. Each has one folder per class, with the same
names in both. Batches grow (``--batch 16 --grow 30:32``), labels are smoothed, and LARS steps fp32
weights. Gradients travel in 16 bits, and are divided by the number of ranks before they are added.
The program saves a checkpoint after each epoch, and resumes from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import commrt
from commrt.data.large_batch import BatchSizeControl, Rate

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
MEAN = torch.tensor([0.485, 0.456, 0.406])
DEVIATION = torch.tensor([0.229, 0.224, 0.225])
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff"}
Add = Callable[..., argparse.Action]
"""What adds an option to a parser."""
SMALLEST_CROP = 0.25
SCALED_UP = 1.143
"""Least share of an image's area in training; image side over crop side in tests."""


class Folder(Dataset[tuple[Tensor, int]]):
    """Images [3, side, side] from one folder per class;
    randomly cropped and mirrored if `augment`.
    """

    def __init__(self, root: Path, side: int, *, augment: bool) -> None:
        if not root.is_dir():
            raise SystemExit(
                f"{root} is no folder: --data must hold train and val, each a folder per class"
            )
        classes = sorted(path for path in root.iterdir() if path.is_dir())
        files = ((number, sorted(path.iterdir())) for number, path in enumerate(classes))
        self.samples = [
            (path, number)
            for number, paths in files
            for path in paths
            if path.suffix.lower() in IMAGES
        ]
        self.classes = [path.name for path in classes]
        self._side = side
        self._augment = augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        path, number = self.samples[place]
        with Image.open(path) as image:
            cut = self._cut(image.convert("RGB"))
        pixels = torch.from_numpy(np.array(cut, dtype=np.float32) / 255)
        if self._augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return ((pixels - MEAN) / DEVIATION).permute(2, 0, 1), number

    def _cut(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        area, aspect, x, y = torch.rand(4).tolist() if self._augment else (1.0, 0.5, 0.5, 0.5)
        if self._augment:
            scale = (SMALLEST_CROP + (1 - SMALLEST_CROP) * area) ** 0.5
            stretch = (4 / 3) ** (aspect - 0.5)
            size = (
                min(width, round(width * scale * stretch)),
                min(height, round(height * scale / stretch)),
            )
        else:
            size = (round(min(width, height) / SCALED_UP),) * 2
        left = round(x * (width - size[0]))
        top = round(y * (height - size[1]))
        box = (left, top, left + size[0], top + size[1])
        return image.resize((self._side, self._side), Image.Resampling.BILINEAR, box=box)


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection. The last normalisation starts at zero."""

    def __init__(self, came: int, width: int, stride: int) -> None:
        super().__init__()
        goes = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(came, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, goes, 1, bias=False), nn.BatchNorm2d(goes)),
        )
        nn.init.zeros_(self.body[-1].weight)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or came != goes:
            self.around = nn.Sequential(
                nn.Conv2d(came, goes, 1, stride, bias=False), nn.BatchNorm2d(goes)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map Map [n, came, h, w] to [n, 4 width, h / stride, w / stride]."""
        return torch.relu(self.body(x) + self.around(x))


def resnet(classes: int, blocks: Sequence[int], width: int) -> nn.Module:
    """Return a ResNet: blocks 3, 4, 6, 3 and width 64 are ResNet-50, 25.6 million parameters for
    1,000 classes.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    layers.append(nn.MaxPool2d(3, 2, 1))
    came = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(came, width << stage, 2 if number == 0 and stage else 1))
            came = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(came, classes))


class Training:
    """The training of one rank: model, data, optimizer, replica."""

    def __init__(self, options: argparse.Namespace, world: commrt.World) -> None:
        self.options = options
        self.world = world
        self.device = world.device
        self.data = Folder(options.data / "train", options.side, augment=True)
        self.test = Folder(options.data / "val", options.side, augment=False)
        if differ := sorted({*self.data.classes} ^ {*self.test.classes}):
            raise SystemExit(f"{options.data}: class {differ[0]} is in one of train and val only")
        torch.manual_seed(options.seed)
        self.model = resnet(len(self.data.classes), options.blocks, options.width).to(self.device)
        self.optimizer = self._lars() if options.lars else self._sgd()
        samples: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
            self.data, world.size, world.rank, seed=options.seed
        )
        self.batches = BatchSizeControl(
            samples, {0: options.batch, **dict(options.grow)}, options.most
        )
        self.rate = Rate(
            self.optimizer,
            self.batches,
            options.epochs,
            warmup_epochs=options.warmup,
            power=options.power,
        )
        self.amp = DTYPES[options.amp]
        # small gradients would become zeros
        is_scaled = torch.float16 in {self.amp, DTYPES[options.wire]}
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=options.loss_scale, enabled=is_scaled
        )
        self.replica = commrt.attach(
            self.model, self.optimizer, algorithm_of(options), world=world,
            wire=DTYPES[options.wire], also=[self.rate, self.scaler],
        )  # fmt: skip
        self.epoch = 0

    def _lars(self) -> torch.optim.Optimizer:
        # only --lars needs it: pip install 'commrt[recipe]'
        from pytorch_optimizer import LARS  # noqa: PLC0415

        large: torch.optim.Optimizer = LARS(
            self.model.parameters(),
            self.options.lr,
            momentum=0.9,
            weight_decay=5e-5,
            trust_coefficient=0.01,
        )
        return large

    def _sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.model.parameters(), self.options.lr, 0.9, weight_decay=5e-5, nesterov=True
        )

    def run(self) -> None:
        """Train from the checkpoint to the end."""
        self.resume()
        loader = DataLoader(self.data, batch_sampler=self.batches, num_workers=self.options.loaders)
        while self.epoch < self.options.epochs:
            begin_s = time.perf_counter()
            seen = self.train(loader)
            seconds = time.perf_counter() - begin_s
            right = self.evaluate()
            self.epoch += 1
            self.save()
            if self.world.rank == self.world.members[0]:
                speed = len(self.world.members) * seen / seconds
                updates = self.replica.step
                told = f"{right:.2%} right, {speed:,.0f} images/s, {updates:,} updates"
                print(f"epoch {self.epoch}: {told}", flush=True)

    def train(self, loader: DataLoader[tuple[Tensor, Tensor]]) -> int:
        """Train one epoch, and return how many images this rank has seen."""
        self.model.train()
        self.batches.set_epoch(self.epoch)
        seen = 0
        for images, labels in loader:
            with self.batches.part(self.replica) as part:
                x = images.to(self.device, non_blocking=True)
                y = labels.to(self.device, non_blocking=True)
                with self._half():
                    loss = cross_entropy(self.model(x), y, label_smoothing=self.options.smoothing)
                self.scaler.scale(part.share * loss).backward()
            seen += len(images)
            if part.is_last:
                self.scaler.step(self.optimizer)
                self.scaler.update(self.options.loss_scale if self.options.static_scale else None)
                self.optimizer.zero_grad()
                self.rate.step()
        return seen

    def _half(self) -> torch.autocast | nullcontext[None]:
        return nullcontext() if self.amp is None else torch.autocast(self.device.type, self.amp)

    def evaluate(self) -> float:
        """Return the share of right test images.

        The statistics of normalisation are of fresh training images.
        """
        self.replica.consolidate()
        if self.options.statistics:
            rng = torch.Generator().manual_seed(
                self.world.size * self.options.seed + self.world.rank
            )
            # others on each rank
            chosen = torch.randperm(len(self.data), generator=rng)[: self.options.statistics]
            loader = DataLoader(
                Subset(self.data, chosen.tolist()),
                self.options.batch,
                num_workers=self.options.loaders,
            )
            update_bn(loader, self.model, self.device)
            for buffer in filter(Tensor.is_floating_point, self.model.buffers()):
                buffer.copy_(self._sum(buffer.double().cpu()) / len(self.world.members))
        self.model.eval()
        counts = torch.zeros(2, dtype=torch.float64)
        for images, labels in self._mine():
            with torch.no_grad(), self._half():
                guesses = self.model(images.to(self.device)).argmax(1).cpu()
            counts += torch.tensor([(guesses == labels).sum(), len(labels)])
        right, seen = self._sum(counts).tolist()
        return float(right / seen)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks that are left."""
        self.world.all_reduce(values, "sum", algorithm=commrt.HalvingDoubling())
        return values

    def _mine(self) -> Iterator[tuple[Tensor, Tensor]]:
        members = list(self.world.members)
        places = range(members.index(self.world.rank), len(self.test), len(members))
        yield from DataLoader(
            Subset(self.test, [*places]), self.options.batch, num_workers=self.options.loaders
        )

    def save(self) -> None:
        """Save a checkpoint atomically, on the first rank that is left."""
        path: Path | None = self.options.checkpoint
        if path is None or self.world.rank != self.world.members[0]:
            return
        # first: with backup workers it brings a late rank up to date
        step = self.replica.state_dict()
        parts = {
            name: getattr(self, name)
            for name in ("model", "optimizer", "rate", "scaler", "batches")
        }
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "replica": step, "epoch": self.epoch}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def resume(self) -> None:
        """Load the checkpoint, if there is one. All ranks must find it, or none."""
        path: Path | None = self.options.checkpoint
        if path is None or self.world.is_replacement:  # it has the others' state
            return
        self.world.agree(
            f"checkpoint {path}, which all ranks must be able to read", found=str(path.exists())
        )
        if not path.exists():
            return
        names = ("model", "optimizer", "rate", "scaler", "batches", "replica")
        state = checkpoint(path, {*names, "epoch"}, self.device)
        for name in names:
            getattr(self, name).load_state_dict(state[name])
        self.epoch = state["epoch"]


def checkpoint(path: Path, names: set[str], device: torch.device) -> dict[str, Any]:
    """Return what `path` holds under `names`. Code in the file does not run."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise SystemExit(
            f"{path} cannot be read as a checkpoint: {error!s:.300}; take another, or remove it"
        ) from error
    if not isinstance(state, dict) or not names <= state.keys():
        raise SystemExit(
            f"{path} is no checkpoint of this program: it must hold {', '.join(sorted(names))};"
            " remove it"
        )
    return state


def growth(text: str) -> tuple[int, int]:
    """Parse the value of --grow."""
    epoch, batch = map(int, text.split(":"))
    return epoch, batch


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_algorithm(parser.add_argument)
    add_steps(parser.add_argument)
    add_numbers(parser.add_argument)
    add_images_and_model(parser.add_argument)
    return parser.parse_args()


def add_algorithm(add: Add) -> None:
    """Add the options that say how ranks exchange; see `algorithm_of`."""
    add(
        "--algorithm",
        choices=["torus2d", "ring", "halving_doubling", "gossip", "backup"],
        default="torus2d",
        help="algorithm to train with",
    )
    add("--grid", type=grid, help="grid of torus2d, for example 32x34")
    add("--backups", type=int, default=1, help="backups of the algorithm backup")
    add("--staleness", type=int, default=0, help="staleness of gossip, in steps")
    add("--wire", choices=DTYPES, default="fp32", help="dtype of gradients on the wire")


def add_steps(add: Add) -> None:
    """Add the options of epochs, batches and the optimizer's steps."""
    add("--epochs", type=int, default=90, help="epochs to train")
    add("--batch", type=int, default=32, help="images per rank and step")
    add(
        "--grow",
        type=growth,
        action="append",
        default=[],
        help="EPOCH:BATCH, the batch from that epoch on",
    )
    add("--most", type=int, help="images that fit into memory; larger batches are split")
    add("--lr", type=float, default=0.1, help="highest learning rate; with --lars some 10 to 30")
    add("--lars", action="store_true", help="use LARS")
    add("--warmup", type=float, default=5.0, help="epochs of warm-up")
    add("--power", type=float, default=2.0, help="power of the decay after the warm-up")
    add("--smoothing", type=float, default=0.1, help="label smoothing")


def add_numbers(add: Add) -> None:
    """Add the options of dtypes, loss scaling and statistics."""
    add("--amp", choices=DTYPES, default="fp32", help="dtype of the passes")
    add("--loss-scale", type=float, default=2.0**16, help="initial loss scale, for --amp fp16")
    add("--static-scale", action="store_true", help="keep the loss scale constant")
    add(
        "--statistics",
        type=int,
        default=0,
        help="images per rank for the statistics of tests; 0: moving averages",
    )


def add_images_and_model(add: Add) -> None:
    """Add the options of images, of the model, and of its checkpoint."""
    add("--data", type=Path, required=True, help="folder of the images")
    add("--side", type=int, default=224, help="side of images, in pixels")
    add("--loaders", type=int, default=4, help="processes per rank that read images")
    add(
        "--blocks",
        type=numbers,
        default=[3, 4, 6, 3],
        help="blocks of each stage, for example 3,4,6,3",
    )
    add("--width", type=int, default=64, help="width of the model")
    add("--checkpoint", type=Path, help="file of the checkpoint")
    add("--seed", type=int, default=0, help="seed of the run")


def grid(text: str) -> tuple[int, ...]:
    """Parse ``32x34``."""
    return tuple(map(int, text.split("x")))


def numbers(text: str) -> list[int]:
    """Parse ``3,4,6,3``."""
    return [*map(int, text.split(","))]


def algorithm_of(options: argparse.Namespace) -> commrt.Algorithm:
    """Return the algorithm that the options describe."""
    if options.algorithm == "gossip":
        return commrt.Gossip(staleness=options.staleness)
    if options.algorithm == "backup":
        return commrt.BackupWorkers(options.backups)
    if options.algorithm == "torus2d":
        return commrt.Torus2D(options.grid)
    if options.algorithm == "ring":
        return commrt.Ring()
    return commrt.HalvingDoubling()


def main() -> None:
    """Run the command."""
    options = parsed()
    with commrt.init() as world:
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        Training(options, world).run()


if __name__ == "__main__":
    main()
