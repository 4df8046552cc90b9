# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on Python's reference manual letter by letter, with any of the algorithms.

::

    torchrun --nproc-per-node 4 examples/char_gpt.py --algorithm gossip --wire bf16

The text is that of ``help()``, 460 KB of English that comes with CPython. The program prints the
loss on a part that it did not train on (3.25 nats per letter if one knows only how frequent letters
are). Then it writes some text.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import commrt
from commrt.algorithms.catalogue import by_name

WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """Causal attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.ask = nn.Linear(width, 3 * width)
        self.answer = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        parts = self.ask(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heard = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.answer(heard.transpose(1, 2).flatten(-2))
        return x + self.think(self.second(x))


class GPT(nn.Module):
    """A GPT: it takes letters, and returns the scores of the next letter at each position."""

    def __init__(self, letters: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.letter.weight  # tied: one gradient, sent once
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Map Map [batch, length] to [batch, length, letters]."""
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.blocks(self.letter(codes) + self.place(places)))

    @torch.no_grad()
    def write(self, codes: Tensor, count: int, draw: torch.Generator) -> Tensor:
        """Return `codes` [length] and `count` new letters."""
        for _ in range(count):
            likely = self(codes[None, -self.length :])[0, -1].softmax(0).cpu()
            codes = torch.cat(
                [codes, torch.multinomial(likely, 1, generator=draw).to(codes.device)]
            )
        return codes


def batch_of(text: Tensor, count: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random pieces [count, length] of the text, and the same pieces one letter later."""
    begin = torch.randint(len(text) - length, (count, 1), generator=draw)
    pieces = text[begin + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    algorithms = ["torus2d", "ring", "halving_doubling", "gossip", "backup", "local"]
    add("--algorithm", choices=algorithms, default="torus2d", help="algorithm to train with")
    add("--wire", choices=WIRES, default="fp32", help="dtype of gradients or weights on the wire")
    add("--period", type=int, default=16, help="with local: steps that ranks train alone")
    add("--delay", type=int, default=4, help="with local: steps after which an average is merged")
    add("--steps", type=int, default=500, help="training steps")
    add("--batch", type=int, default=16, help="pieces of text, per rank")
    add("--length", type=int, default=64, help="letters per piece")
    add("--width", type=int, default=96, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=3, help="layers of the model")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--write", type=int, default=300, help="letters to write at the end")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> commrt.Algorithm:
    """Return the algorithm to train with."""
    if options.algorithm == "local":
        return commrt.LocalSGD(options.period, options.delay)
    return by_name(options.algorithm)


def main() -> None:
    """Train, evaluate, and write some text."""
    options = parsed()
    text = "\n".join(topics.values())
    letters = sorted({*text})
    number_of = {letter: number for number, letter in enumerate(letters)}
    codes = torch.tensor([number_of[letter] for letter in text])
    train = codes[: len(codes) * 9 // 10]
    test = codes[len(codes) * 9 // 10 :]

    with commrt.init() as world:
        device = world.device
        torch.manual_seed(0)
        model = GPT(len(letters), options.length, options.width, options.heads, options.layers).to(
            device
        )
        optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.95))
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        replica = commrt.attach(
            model, optimizer, chosen(options), wire=WIRES[options.wire],
            also=[rate],  # with backup workers, a late rank gets it with the weights
        )  # fmt: skip

        draw = torch.Generator().manual_seed(world.rank)  # different pieces of text on each rank
        # count steps, not batches: backup workers may skip some
        while replica.step < options.steps:
            x, y = (
                part.to(device) for part in batch_of(train, options.batch, options.length, draw)
            )
            optimizer.zero_grad()
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            rate.step()
            if replica.step % 100 == 0 and world.rank == world.members[0]:
                print(f"step {replica.step}: {loss.item():.2f}", flush=True)

        # gossip and local SGD leave replicas different, backup workers leave late ranks behind
        replica.consolidate()
        if world.rank == world.members[0]:  # rank 0, unless it was lost
            draw = torch.Generator().manual_seed(0)
            x, y = (part.to(device) for part in batch_of(test, 128, options.length, draw))
            with torch.no_grad():
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            print(
                f"{world.size} ranks, {options.algorithm}: {loss.item():.2f} nats per letter of the"
                " test text\n"
            )
            written = model.write(x[0], options.write, draw)[len(x[0]) :]
            print("".join(letters[code] for code in written.tolist()))


if __name__ == "__main__":
    main()
