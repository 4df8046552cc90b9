# SPDX-License-Identifier: Apache-2.0
"""Train a small language model: a whole script to copy, which needs commrt and torch only.

::

    torchrun --nproc-per-node 4 training_script.py --folder run

Mixed precision, accumulation, clipping, a learning rate schedule, an average of the weights (EMA),
validation, checkpoints, resuming, and a mean over tokens. The text is the manual that comes with
Python. Run the line again after a crash, or with a larger ``--steps``: it resumes.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import commrt

PADDING = 0


class Letters(nn.Module):
    """Map bytes [batch, length] to scores of the next byte [batch, length, 128]."""

    def __init__(self, width: int = 64, sees: int = 8) -> None:
        super().__init__()
        self.sees = sees
        self.embed = nn.Embedding(128, width)
        self.mix = nn.Conv1d(width, 4 * width, sees)
        self.score = nn.Linear(4 * width, 128)

    def forward(self, codes: Tensor) -> Tensor:
        """Score each next byte from the `sees` bytes before it."""
        seen = pad(self.embed(codes).transpose(1, 2), (self.sees - 1, 0))
        return self.score(self.mix(seen).relu().transpose(1, 2))


def paragraphs() -> list[Tensor]:
    """Return the text as paragraphs of different lengths."""
    parts = (part for _, text in sorted(topics.items()) for part in text.split("\n\n"))
    coded = (part.encode("ascii", "ignore")[:200] for part in parts)
    return [torch.tensor(list(part)) for part in coded if len(part) > 1]


def batch_of(texts: list[Tensor]) -> Tensor:
    """Return paragraphs as one tensor [batch, length], padded at the end."""
    return pad_sequence(texts, batch_first=True, padding_value=PADDING)


def loss_of(model: nn.Module, codes: Tensor) -> tuple[Tensor, int]:
    """Return the mean loss of the tokens in `codes`, and how many they are."""
    follow = codes[:, 1:].flatten()
    loss = cross_entropy(model(codes[:, :-1]).flatten(0, 1), follow, ignore_index=PADDING)
    return loss, int((follow != PADDING).sum())


@torch.no_grad()
def validate(model: nn.Module, texts: list[Tensor], world: commrt.World) -> float:
    """Return the mean loss of all tokens in `texts`; each rank takes a share of them."""
    loss, tokens = loss_of(model, batch_of(texts[world.rank :: world.size]).to(world.device))
    sums = torch.tensor([loss.item() * tokens, tokens], dtype=torch.float64)
    world.all_reduce(sums, "sum")
    return (sums[0] / sums[1]).item()


def accumulate(
    replica: commrt.Replica,
    passes: Sequence[Tensor],
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype,
) -> None:
    """Run forward and backward; all passes but the last only accumulate, so one exchange."""
    for number, codes in enumerate(passes, start=1):
        with nullcontext() if number == len(passes) else replica.no_sync():
            with torch.autocast(codes.device.type, dtype):
                loss, tokens = loss_of(replica.model, codes)
            # divide by nothing: the sum over passes and ranks is divided by all tokens
            scaler.scale(replica.weigh(loss, tokens)).backward()


def save(parts: Mapping[str, Any], path: Path, world: commrt.World) -> None:
    """Save the state of all `parts`: a kill at any time leaves a whole file."""
    world.wait()  # on a GPU, an exchange that failed is known only now
    if world.rank == 0:  # replicas are equal
        new = path.with_suffix(".new")
        torch.save({name: part.state_dict() for name, part in parts.items()}, new)
        new.replace(path)
    world.barrier()


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("run"), help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=200, help="steps to train, with earlier ones")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="paragraphs per pass and rank")
    parser.add_argument("--accumulate", type=int, default=2, help="passes per step")
    return parser.parse_args()


def main() -> None:
    """Train from the checkpoint, or from the start."""
    options = parse_options()
    asked: list[int] = []  # Slurm and Kubernetes may send it during a long start, too
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    with commrt.init() as world:  # after an error, it tells the other ranks at once
        device = world.device
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        torch.manual_seed(0)
        texts = paragraphs()
        test, train = texts[:200], texts[200:]

        model = Letters().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        shares = commrt.Shares(train, options.batch * options.accumulate)  # of this rank, per step
        replica = commrt.attach(model, optimizer, also=[rate, scaler, shares])
        # It begins with rank 0's weights. Only validation runs it, so dropout is off.
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98)).eval()
        loader = DataLoader(train, batch_sampler=shares, collate_fn=batch_of)

        parts = {
            "replica": replica,
            "model": model,
            "optimizer": optimizer,
            "rate": rate,
            "scaler": scaler,
            "ema": ema,
            "shares": shares,
        }
        options.folder.mkdir(parents=True, exist_ok=True)
        checkpoint = options.folder / "checkpoint.pt"
        found = checkpoint.exists()
        world.agree(f"{checkpoint}, which all ranks must see", found=str(found))
        if found:  # after attach, and on all ranks
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            print(f"rank {world.rank} goes on after step {replica.step}", flush=True)

        while replica.step < options.steps and not replica.stopping:
            for codes in shares.batches(loader, replica):
                passes = codes.to(device).split(options.batch)
                if asked:
                    replica.stop()
                accumulate(replica, passes, scaler, dtype)
                # Gradients are averaged now. An infinite one is infinite on all ranks, so all
                # skip the same step.
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:  # it falls after a skipped step
                    rate.step()
                    ema.update_parameters(model)
                optimizer.zero_grad()
                shares.done()

                is_end = replica.step == options.steps or bool(replica.stopping)
                if replica.step % options.every == 0 or is_end:
                    loss_of_test = validate(ema, test, world)
                    save(parts, checkpoint, world)
                    if world.rank == 0:
                        print(f"step {replica.step}: {loss_of_test:.6f} nats per byte", flush=True)
                if is_end:
                    break


if __name__ == "__main__":
    main()
