# SPDX-License-Identifier: Apache-2.0
"""A cluster as a cost model sees it: latencies and bandwidths, and which ranks share a port.

A cluster is described in a TOML file. The built-in ones lie in ``clusters`` beside this module.
Ranks fill one node after the other. Bandwidths are those of one direction, in GB (10^9 bytes) per
second. A cluster never changes; `Cluster.named` reads files, and nothing here writes one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

from commrt.errors import UsageError
from commrt.files import read_text

T = TypeVar("T")
FOLDER = resources.files("commrt.pricing").joinpath("clusters")
LARGEST = 1e9
SMALLEST_SPEED = 1e-9
"""Limits of all numbers of a cluster: products of a few of them are still finite."""


@dataclass(frozen=True, slots=True)
class Link:
    """Links inside a node: each rank has one port to send and one to receive."""

    latency_us: float
    """From the call until the first byte arrives, between two ranks that are both ready."""
    gbytes_per_s: float
    bus_gbytes_per_s: float | None = None
    """What all ranks of a node send each other, as through shared memory; None for no limit."""

    def __post_init__(self) -> None:
        _require_numbers("within", latency_us=self.latency_us)
        rates = _given(bus_gbytes_per_s=self.bus_gbytes_per_s)
        _require_numbers(
            "within", SMALLEST_SPEED, whole=False, gbytes_per_s=self.gbytes_per_s, **rates
        )


@dataclass(frozen=True, slots=True)
class Between:
    """Links from node to node, through network cards that the ranks of a node share."""

    latency_us: float
    gbytes_per_s: float
    """Bandwidth of one network card."""
    nics: int = 1
    """Network cards of a node."""
    nics_per_rank: int = 1
    """Network cards that one rank can use at the same time."""

    def __post_init__(self) -> None:
        _require_numbers("between", latency_us=self.latency_us)
        _require_numbers("between", SMALLEST_SPEED, gbytes_per_s=self.gbytes_per_s)
        _require_numbers("between", 1, whole=True, nics=self.nics, nics_per_rank=self.nics_per_rank)
        if self.nics_per_rank > self.nics:
            raise UsageError(
                f"between: a rank cannot use {self.nics_per_rank} cards of a node that has"
                f" {self.nics}"
            )


@dataclass(frozen=True, slots=True)
class Racks:
    """Groups of nodes whose links to other racks are oversubscribed."""

    nodes: int
    """Nodes of a rack."""
    oversubscription: float = 1.0
    """Bandwidth of all nodes of a rack, divided by the bandwidth from this rack to the others."""

    def __post_init__(self) -> None:
        _require_numbers("racks", 1, whole=True, nodes=self.nodes)
        _require_numbers("racks", 1, oversubscription=self.oversubscription)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one kind, and their links. Raises `UsageError` for values that cannot be.

    >>> abci = Cluster.named("abci")
    >>> abci.gpus_per_node, abci.between.nics
    (4, 2)
    """

    name: str
    about: str
    """Source of the numbers."""
    gpus_per_node: int
    within: Link
    between: Between
    nodes: int | None = None
    """Number of nodes; None for any number."""
    racks: Racks | None = None
    reduce_gbytes_per_s: float | None = None
    """Speed at which a rank adds what it receives, in bytes received; None for no time."""
    pack_gbytes_per_s: float | None = None
    """Speed at which a rank packs or unpacks a bucket, in bytes on the wire; None for no time."""
    compute: Mapping[str, float] = field(default_factory=dict)
    """Samples (images, say) per second and GPU at full speed, by model."""
    message_us: float = 0.0
    """Time of each further message of a rank in a step, after one sent and one received."""
    group_us: float = 0.0
    """Time of each further NCCL group, if a step is sent in several (`commrt.nccl_groups`)."""
    code_gbytes_per_s: float | None = None
    """Speed at which a rank quantizes values, or back, in bytes of fp32; None for no time."""
    kernel_efficiency: Mapping[int, float] = field(default_factory=dict)
    """Share of full speed that kernels reach, by samples per rank in a step; empty: always 1."""

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {
            "name": str,
            "about": str,
            "within": Link,
            "between": Between,
            "compute": Mapping,
        }
        kinds |= {"kernel_efficiency": Mapping} | ({} if self.racks is None else {"racks": Racks})
        for what, kind in kinds.items():
            if not isinstance(value := getattr(self, what), kind):
                raise UsageError(
                    f"{_short(self.name)}: {what} is {_short(value)}: it must be a {kind.__name__}"
                )
        _require_numbers(
            self.name, 1, whole=True, gpus_per_node=self.gpus_per_node, **_given(nodes=self.nodes)
        )
        speeds = {f"compute of {model}": speed for model, speed in self.compute.items()}
        names = ("reduce_gbytes_per_s", "pack_gbytes_per_s", "code_gbytes_per_s")
        rates = _given(**{name: getattr(self, name) for name in names})
        _require_numbers(self.name, SMALLEST_SPEED, whole=False, **speeds, **rates)
        _require_numbers(self.name, message_us=self.message_us, group_us=self.group_us)
        object.__setattr__(
            self, "kernel_efficiency", _shares_by_samples(self.name, self.kernel_efficiency)
        )

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the built-in cluster or the one of the TOML file `name`; raises `UsageError`."""
        if name in builtin_clusters():
            return cls.parsed(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"), name)
        path = Path(name)
        if path.suffix != ".toml":
            known = ", ".join(builtin_clusters())
            raise UsageError(
                f"no cluster is called {_short(name)}: there are {known}, or give a .toml file"
            )
        return cls.parsed(read_text(path), path.stem)

    @classmethod
    def parsed(cls, text: str, name: str) -> Self:
        """Return the cluster that a TOML document describes; raises `UsageError`."""
        try:
            given = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name} is no TOML document: {error}") from error
        kinds: dict[str, Any] = {"within": Link, "between": Between, "racks": Racks}
        parts = {
            key: _build(kinds[key], given[key], f"{name}: {key}")
            for key in kinds.keys() & given.keys()
        }
        return _build(cls, {"name": name, "about": "", **given, **parts}, name)

    def text(self) -> str:
        """Return the cluster as a TOML document, which `parsed` reads.

        >>> desk = Cluster("desk", "two hosts", 1, Link(5.0, 10.0), Between(50.0, 1.25))
        >>> Cluster.parsed(desk.text(), "desk") == desk
        True
        """
        flat = {
            key: value
            for key, value in asdict(self).items()
            if value not in (None, {}) and key != "name"
        }
        tables = {key: flat.pop(key) for key in [*flat] if isinstance(flat[key], dict)}
        lines = [_toml_line(*pair) for pair in flat.items()]
        for name, table in tables.items():
            given = {str(key): value for key, value in table.items() if value is not None}
            lines += ["", f"[{name}]", *(_toml_line(*pair) for pair in given.items())]
        return "\n".join([*lines, ""])

    def ranks(self) -> float:
        """Return the number of GPUs; infinity if the number of nodes is not limited."""
        return inf if self.nodes is None else self.nodes * self.gpus_per_node

    def require_capacity(self, ranks: int) -> None:
        """Raise `UsageError` if the cluster has fewer than `ranks` GPUs."""
        if ranks > self.ranks():
            raise UsageError(
                f"{self.name} has {self.ranks():g} GPUs, {self.gpus_per_node} on each of"
                f" {self.nodes} nodes, and not {ranks}: simulate fewer ranks, or copy its file and"
                " change `nodes`"
            )

    def add_s(self, nbytes: float) -> float:
        """Return the seconds that adding `nbytes` that were received takes."""
        return seconds(nbytes, self.reduce_gbytes_per_s)

    @property
    def bus_bytes_per_s(self) -> float:
        """Bandwidth of all links inside a node together."""
        return inf if self.within.bus_gbytes_per_s is None else self.within.bus_gbytes_per_s * 1e9

    @property
    def node_bytes_per_s(self) -> float:
        """Bandwidth of all network cards of a node."""
        return self.between.nics * self.between.gbytes_per_s * 1e9

    @property
    def rank_bytes_per_s(self) -> float:
        """Bandwidth of the network cards that one rank can use."""
        return self.between.nics_per_rank * self.between.gbytes_per_s * 1e9

    @property
    def ring_count(self) -> int:
        """How many rings, each of which leaves a node by another rank, use all network cards."""
        return self.between.nics // self.between.nics_per_rank

    @property
    def rack_bytes_per_s(self) -> float:
        """Bandwidth from a rack to the others."""
        return (
            inf
            if self.racks is None
            else self.racks.nodes * self.node_bytes_per_s / self.racks.oversubscription
        )


def builtin_clusters() -> list[str]:
    """Return the names of the clusters that need no file."""
    return sorted(
        each.name.removesuffix(".toml") for each in FOLDER.iterdir() if each.name.endswith(".toml")
    )


def seconds(nbytes: float, gbytes_per_s: float | None) -> float:
    """Return the seconds that `nbytes` take; 0 at a speed of None."""
    return 0.0 if gbytes_per_s is None else nbytes / (gbytes_per_s * 1e9)


def _given(**values: float | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _require_numbers(
    what: str, least: float = 0.0, *, whole: bool = False, **values: float
) -> None:
    """Raise `UsageError` for a value out of range."""
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= LARGEST
        ):
            must = f"it must be a number of at least {least:g}, and finite: up to {LARGEST:g}"
            raise UsageError(f"{what}: {name} is {_short(value)}: {must}")
        if whole and not isinstance(value, int):
            raise UsageError(f"{what}: {name} is {value}: it must be a whole number")


def _shares_by_samples(what: str, given: Mapping[Any, Any]) -> dict[int, float]:
    """Return `kernel_efficiency` by samples, which TOML gives as text; raise `UsageError`."""
    found = dict[int, float]()
    for samples, share in given.items():
        text = samples if isinstance(samples, str) else _short(samples)
        if not re.fullmatch("[1-9][0-9]{0,8}", text):
            must = "give whole numbers of samples per rank, from 1 on"
            raise UsageError(f"{what}: kernel_efficiency has the key {_short(samples)}: {must}")
        if (
            isinstance(share, bool)
            or not isinstance(share, int | float)
            or not SMALLEST_SPEED <= share <= 1
        ):
            must = "it must be a number above 0 and up to 1"
            raise UsageError(
                f"{what}: kernel_efficiency of {text} samples is {_short(share)}: {must}"
            )
        if int(text) in found:
            raise UsageError(
                f"{what}: kernel_efficiency of {text} samples is given twice: leave one out"
            )
        found[int(text)] = share
    return dict(sorted(found.items()))


def _short(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python's error for whole numbers of more than 4,300 digits
        return "a number of thousands of digits"


def _toml_line(key: str, value: object) -> str:
    """Return a line of TOML, which differs from JSON only in control characters."""
    word, text = (
        json.dumps(each, ensure_ascii=False).replace("\x7f", r"\u007f") for each in (key, value)
    )
    return f"{key if re.fullmatch('[A-Za-z0-9_-]+', key) else word} = {text}"


def _build(kind: type[T], given: object, what: str) -> T:
    """Return a `kind` of the keys `given`; raise `UsageError` for unknown and for missing keys."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a table of its own, not {_short(given)}")
    every = fields(kind)  # type: ignore[arg-type]  # all are dataclasses
    names = [each.name for each in every]
    if unknown := sorted(given.keys() - names):
        raise UsageError(f"{what}: {_short(unknown[0])} is not known: there are {', '.join(names)}")
    without_default = [
        each.name for each in every if each.default is MISSING and each.default_factory is MISSING
    ]
    if missing := [name for name in without_default if name not in given]:
        raise UsageError(f"{what} has no {', no '.join(missing)}: add it")
    return kind(**given)
