# SPDX-License-Identifier: Apache-2.0
"""A cluster, as far as the price of an exchange depends on it: what a message waits for, and what shares which port.

Described in a TOML file; the ones that ship with the package lie in ``clusters`` beside this module. Ranks fill one
node after the other. Bandwidths are those of one direction, in GB (10^9 bytes) per second.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from math import ceil, inf
from pathlib import Path
from typing import Any, Self, TypeVar

from commrt.errors import UsageError

__all__ = ["Between", "Cluster", "Link", "Racks", "shipped"]

T = TypeVar("T")


MOST = 1e9
"""Of all figures, and one over the least of those above 0: products of a few of them are still numbers."""


def _require(what: str, *, least: float = 0.0, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
            must = f"it must be a number of at least {least:g}, and finite: up to {MOST:g}"
            raise UsageError(f"{what}: {name} is {_short(value)}: {must}")


def _require_whole(what: str, **values: float) -> None:
    _require(what, least=1, **values)
    if broken := [name for name, value in values.items() if not isinstance(value, int)]:
        raise UsageError(f"{what}: {broken[0]} is {values[broken[0]]}: it must be a whole number")


def _require_positive(what: str, **values: float) -> None:
    _require(what, **values)
    if small := [name for name, value in values.items() if value < 1 / MOST]:
        must = f"leave out what takes no time, and give a number above 0 otherwise, {1 / MOST:g} at least"
        raise UsageError(f"{what}: {small[0]} is {values[small[0]]:g}: {must}")


def _require_a(kind: type, what: str, value: object) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{what} is {_short(value)}: it must be a {kind.__name__}")


def _short(value: object) -> str:
    """As a part of a sentence."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # so Python says of whole numbers of more than 4,300 digits
        return "a number of thousands of digits"


@dataclass(frozen=True, slots=True)
class Link:
    """From one rank to another of its node; each rank has one such port for what it sends, one for what it receives."""

    latency_us: float
    """From the call until the first byte is there, of a transfer between two ranks that are both ready."""
    gbytes_per_s: float

    def __post_init__(self) -> None:
        _require("within", latency_us=self.latency_us)
        _require_positive("within", gbytes_per_s=self.gbytes_per_s)


@dataclass(frozen=True, slots=True)
class Between:
    """From one node to another, through network cards that its ranks share."""

    latency_us: float
    gbytes_per_s: float
    """Of one card."""
    nics: int = 1
    """Of a node."""
    nics_per_rank: int = 1
    """How many one rank can use at the same time."""

    def __post_init__(self) -> None:
        _require("between", latency_us=self.latency_us)
        _require_positive("between", gbytes_per_s=self.gbytes_per_s)
        _require_whole("between", nics=self.nics, nics_per_rank=self.nics_per_rank)
        if self.nics_per_rank > self.nics:
            raise UsageError(f"between: a rank cannot use {self.nics_per_rank} cards of a node that has {self.nics}")


@dataclass(frozen=True, slots=True)
class Racks:
    """Groups of nodes, whose way to the others is narrower than what is inside."""

    nodes: int
    oversubscription: float = 1.0
    """The bandwidth of a rack's nodes together, over that of its way out."""

    def __post_init__(self) -> None:
        _require_whole("racks", nodes=self.nodes)
        _require("racks", least=1, oversubscription=self.oversubscription)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal make.

    >>> abci = Cluster.named("abci")
    >>> abci.gpus_per_node, abci.between.nics
    (4, 2)
    """

    name: str
    about: str
    """Where its figures come from."""
    gpus_per_node: int
    within: Link
    between: Between
    nodes: int | None = None
    """How many there are; None if that does not matter."""
    racks: Racks | None = None
    reduce_gbytes_per_s: float | None = None
    """At which a rank adds up what it receives, counted in bytes received; None if that takes no time."""
    pack_gbytes_per_s: float | None = None
    """At which it packs gradients into what travels, and unpacks them, counted in bytes that travel; likewise."""
    compute: Mapping[str, float] = field(default_factory=dict)
    """Images, or what a model counts, per second and GPU, by model; where they were published or measured."""

    def __post_init__(self) -> None:
        for what, text in {"name": self.name, "about": self.about}.items():
            if not isinstance(text, str):
                raise UsageError(f"{_short(self.name)}: {what} is {_short(text)}: it must be a text")
        _require_a(Link, f"{self.name}: within", self.within)
        _require_a(Between, f"{self.name}: between", self.between)
        _require_a(Racks, f"{self.name}: racks", self.racks or Racks(1))
        _require_a(Mapping, f"{self.name}: compute", self.compute)
        _require_whole(self.name, gpus_per_node=self.gpus_per_node, nodes=1 if self.nodes is None else self.nodes)
        if self.reduce_gbytes_per_s is not None:
            _require_positive(self.name, reduce_gbytes_per_s=self.reduce_gbytes_per_s)
        if self.pack_gbytes_per_s is not None:
            _require_positive(self.name, pack_gbytes_per_s=self.pack_gbytes_per_s)
        for model, speed in self.compute.items():
            _require_positive(f"{self.name}: compute", **{f"of {model}": speed})

    @classmethod
    def named(cls, name: str) -> Self:
        """One that ships with the package, or that of a TOML file; raises `UsageError`."""
        if name in shipped():
            return cls.parsed(resources.files("commrt.pricing").joinpath("clusters", f"{name}.toml").read_text(), name)
        path = Path(name)
        if path.suffix != ".toml":
            known = ", ".join(shipped())
            raise UsageError(f"no cluster is called {_short(name)}: there are {known}, or give a .toml file")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{name:.200} cannot be read: {error}") from error
        return cls.parsed(text, path.stem)

    @classmethod
    def parsed(cls, text: str, name: str) -> Self:
        """That of a TOML document."""
        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name} is no TOML document: {error}") from error
        kinds: dict[str, Any] = {"within": Link, "between": Between, "racks": Racks}
        parts = {key: _made(kinds[key], given[key], f"{name}: {key}") for key in kinds.keys() & given.keys()}
        return _made(cls, {"name": name, "about": "", **given, **parts}, name)

    def text(self) -> str:
        """As a TOML document, which `parsed` reads.

        >>> desk = Cluster("desk", "two hosts", 1, Link(5.0, 10.0), Between(50.0, 1.25))
        >>> Cluster.parsed(desk.text(), "desk") == desk
        True
        """
        flat = {key: value for key, value in asdict(self).items() if value is not None and key != "name"}
        tables = {key: flat.pop(key) for key in ("within", "between", "racks", "compute") if flat.get(key)}
        flat.pop("compute", None)
        lines = [_said(*pair) for pair in flat.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(_said(*pair) for pair in table.items())]
        return "\n".join([*lines, ""])

    def ranks(self) -> float:
        """How many there can be."""
        return inf if self.nodes is None else self.nodes * self.gpus_per_node

    def require_room(self, ranks: int) -> None:
        """Raise `UsageError` if there are not so many GPUs."""
        if ranks > self.ranks():
            raise UsageError(
                f"{self.name} has {self.ranks():g} GPUs, {self.gpus_per_node} on each of {self.nodes} nodes, and not "
                f"{ranks}: simulate fewer ranks, or copy its file and change `nodes`"
            )

    def nodes_of(self, ranks: int) -> int:
        """How many nodes so many ranks need."""
        return ceil(ranks / self.gpus_per_node)

    def pack_s(self, nbytes: float) -> float:
        """To pack a bucket, or to unpack it."""
        return 0.0 if self.pack_gbytes_per_s is None else nbytes / (self.pack_gbytes_per_s * 1e9)

    @property
    def node_bytes_per_s(self) -> float:
        """Of all cards of a node."""
        return self.between.nics * self.between.gbytes_per_s * 1e9

    @property
    def rank_bytes_per_s(self) -> float:
        """Of the cards that one rank can use."""
        return self.between.nics_per_rank * self.between.gbytes_per_s * 1e9

    @property
    def rack_bytes_per_s(self) -> float:
        """Of a rack's way out."""
        return inf if self.racks is None else self.racks.nodes * self.node_bytes_per_s / self.racks.oversubscription


def _said(key: str, value: object) -> str:
    """A line of TOML: as in JSON, but for what is no ASCII."""
    word, said = (json.dumps(each, ensure_ascii=False).replace("\x7f", r"\u007f") for each in (key, value))
    return f"{key if re.fullmatch('[A-Za-z0-9_-]+', key) else word} = {said}"


def _made(kind: type[T], given: object, what: str) -> T:
    """A `kind` of the keys `given`; raises `UsageError` for those that it has not, or needs."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a table of its own, not {_short(given)}")
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # all are dataclasses
    if strange := sorted(given.keys() - names):
        raise UsageError(f"{what}: {_short(strange[0])} is not known: there are {', '.join(names)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"{what}: {error}") from error


def shipped() -> list[str]:
    """The clusters that need no file."""
    found = resources.files("commrt.pricing").joinpath("clusters").iterdir()
    return sorted(each.name.removesuffix(".toml") for each in found if each.name.endswith(".toml"))
