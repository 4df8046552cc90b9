# SPDX-License-Identifier: Apache-2.0
"""Local SGD as settings, which need no torch: `LocalReplica` trains by them.

Ranks train alone for a period, then average their weights; the average may arrive some steps later.
One mechanism with few settings is DaSGD, CoCoD-SGD, DiLoCo, Streaming DiLoCo and NoLoCo; see the
functions below.

All ranks keep the same *anchor*, the latest agreed weights. When a period ends, each sends the
anchor minus its weights, and goes on training. When the average of these differences arrives,
`delay` steps later, the outer optimizer moves the anchor, and the rank merges it with the weights
that it has by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Final, Literal

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import require_inner, require_whole, schedule_of
from commrt.algorithms.direct import Direct
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.local_sgd.outer import HeavyBall, Nesterov, Outer
from commrt.options import require_compatible
from commrt.quantizer import Int4, require_wire
from commrt.schedule import Schedule

CORRECT: Final = "correct"
OUTER_STEPS = 10
"""So many times 1 / (1 - momentum) outer steps are needed before their momentum helps."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Merge by mixing: keep the share `local` of a rank's own weights, the rest is the anchor's."""

    local: float = 0.5

    def __post_init__(self) -> None:
        if (
            isinstance(self.local, bool)
            or not isinstance(self.local, int | float)
            or not 0 <= self.local < 1
        ):
            raise UsageError(
                f"Mix({self.local!r:.80}): the share of local weights must be from 0 on and below 1"
            )


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Train alone for `period` steps, then average; merge the average `delay` steps later.

    - `delay`: steps of training that hide an exchange, from 0 to `period`. An exchange is hidden if
      it takes no longer than so many steps.
    - `merge`: "correct" adds what a rank has learned since its weights left to the new anchor.
      ``Mix(share)`` keeps a share of the local weights, and loses a part of what was learned
      meanwhile.
    - `outer`: how the anchor follows the average: `Nesterov`, `HeavyBall`, `SlowMomentum`, or a
      rule of your own (`commrt.local_sgd.outer`). None makes the average the anchor.
    - `fragments`: so many parts of the model leave one after the other within a period, each with
      its own period.
    - `warmup`: so many steps at first in which weights are averaged in each step, at once and
      without `outer`.
    - `inner`: the all-reduce that averages, or `Gossip`, which averages with one partner.
    - `wire`: what differences become when they travel, such as ``torch.bfloat16`` or
      ``commrt.Int4()``; None for the `wire` of `attach`.
    - `anchor`: "cpu" keeps anchor and momentum in the host's memory.

    A step is a backward pass outside of `no_sync`. Cost per period: one all-reduce of the weights.
    """

    period: int = 16
    delay: int = 0
    merge: Literal["correct"] | Mix = CORRECT
    outer: Outer | None = None
    fragments: int = 1
    warmup: int = 0
    inner: Algorithm = Torus2D()  # noqa: RUF009  # a frozen value
    wire: Any = None
    anchor: Literal["device", "cpu"] = "device"
    trained_by: ClassVar[str] = "commrt.local_sgd.attach"

    def __post_init__(self) -> None:
        for name, least in {"period": 1, "delay": 0, "fragments": 1, "warmup": 0}.items():
            require_whole(name, getattr(self, name), least)
        if self.merge != CORRECT and not isinstance(self.merge, Mix):
            raise UsageError(
                f'merge={self.merge!r:.80}: use "correct", or Mix(0.5) to keep half of the local'
                " weights"
            )
        if self.outer is not None and (
            isinstance(self.outer, type) or not callable(getattr(self.outer, "step", None))
        ):
            raise UsageError(
                f"outer={self.outer!r:.80} has no step(): use Nesterov(0.7, 0.9), HeavyBall() or"
                " None"
            )
        if self.anchor not in ("device", "cpu"):
            raise UsageError(f'anchor={self.anchor!r:.80}: use "device" or "cpu"')
        self._require_one_in_flight()
        self._require_rest()
        self._require_inner()
        require_wire(self.wire)
        require_compatible(self, self.wire)

    def _require_one_in_flight(self) -> None:
        if self.fragments > self.period:
            raise UsageError(
                f"fragments={self.fragments} in a period of {self.period} steps: at most one may"
                " leave per step"
            )
        if self.delay > self.period:
            raise UsageError(
                f"delay={self.delay} is longer than period={self.period}: later exchanges would"
                " leave before one is merged, and the ranks' weights could swing apart; use a"
                " delay of at most the period"
            )

    def _require_rest(self) -> None:
        if self.delay == self.period and self._is_too_fast:
            raise UsageError(
                f"{self.outer} with delay={self.delay}, a whole period: each average is then one"
                " outer step late, and the anchor swings ever more widely unless the rate is below"
                f" {self._late_bound:.3g}; use a lower rate, less momentum, or a shorter delay"
            )

    @property
    def _late_bound(self) -> float:
        """The outer rate below which the anchor rests if averages are a period late, or inf."""
        return float(getattr(self.outer, "late_bound", inf))

    @property
    def _is_too_fast(self) -> bool:
        return self.merge == CORRECT and getattr(self.outer, "rate", 0.0) >= self._late_bound

    def _require_inner(self) -> None:
        inner = self.inner
        require_inner(inner)
        if getattr(inner, "traits", ()) and not isinstance(inner, Gossip):
            raise UsageError(
                f"inner={inner!r:.200}: take an all-reduce, such as Torus2D(), or Gossip()"
            )
        if isinstance(inner, Gossip) and inner.staleness:
            raise UsageError(
                "inner=Gossip(staleness=1): here `delay` says how late messages are; leave"
                " staleness out"
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Return what `commrt.options` calls this algorithm."""
        return ("local SGD", "local SGD by gossip") if self.is_gossip else ("local SGD",)

    @property
    def is_gossip(self) -> bool:
        """True if ranks average with one partner, so that each has an anchor of its own."""
        return isinstance(self.inner, Gossip)

    def leaves(self, fragment: int, step: int) -> bool:
        """Return True if the weights of `fragment` leave after `step`, which counts from 1.

        >>> algorithm = LocalSGD(period=8, fragments=2)
        >>> [step for step in range(1, 21) if algorithm.leaves(0, step)]
        [8, 16]
        >>> [step for step in range(1, 21) if algorithm.leaves(1, step)]
        [4, 12, 20]
        """
        if step <= self.warmup:
            return True
        return (step - self.warmup - self.period * fragment // self.fragments) % self.period == 0

    @property
    def at_once(self) -> int:
        """How many fragments may be in flight at once.

        Those whose numbers differ by a multiple of it never are.

        >>> delays = (0, 5, 25, 26, 51, 100)
        >>> [LocalSGD(period=100, delay=delay, fragments=4).at_once for delay in delays]
        [1, 1, 1, 2, 4, 4]
        """
        parts = range(1, self.fragments + 1)
        fits = (
            self.fragments % each == 0 and self.period * each // self.fragments >= self.delay
            for each in parts
        )
        return next(each for each, fit in zip(parts, fits, strict=True) if fit)

    def delay_at(self, step: int) -> int:
        """Return how many steps after `step` the weights that leave then are merged."""
        return self.delay if step > self.warmup else 0

    def among(self, ranks: int) -> Algorithm:
        """Return the algorithm that averages over `ranks` ranks, after ranks were lost."""
        return self.inner.among(ranks) if isinstance(self.inner, Gossip) else self.inner

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the schedule of a fragment's exchange number `step`."""
        return schedule_of(self.inner, step, ranks)

    def unwise(self, steps: int | None = None) -> list[str]:
        """Return what speaks against these settings, in sentences; `steps`: of the run, if known.

        >>> LocalSGD(period=16, outer=Nesterov(0.7, 0.9)).unwise(steps=480)[0][:71]
        '30 outer steps are few for a momentum of 0.9, which needs about 100: us'
        """
        found = []
        if isinstance(self.merge, Mix) and self.merge.local == 0 and 2 * self.delay > self.period:
            found.append(
                f"Mix(0) with a delay of {self.delay} throws away what ranks learn in {self.delay}"
                f' of {self.period} steps: use merge="correct", or Mix(0.5)'
            )
        if self._is_too_fast and 2 * self.delay > self.period:
            found.append(
                f"{self.outer} may let the anchor swing ever more widely with a delay of"
                f" {self.delay} of {self.period} steps: take a rate below {self._late_bound:.3g},"
                " or a shorter delay"
            )
        momentum = getattr(self.outer, "momentum", 0.0)
        if (
            steps is not None
            and momentum
            and (taken := steps // self.period) < (need := OUTER_STEPS / (1 - momentum))
        ):
            found.append(
                f"{taken} outer steps are few for a momentum of {momentum:g}, which needs about"
                f" {need:.0f}: use a shorter period, or less momentum"
            )
        return found


def dasgd(
    period: int = 16,
    delay: int = 4,
    local: float = 0.5,
    *,
    inner: Algorithm = Torus2D(),  # noqa: B008
) -> LocalSGD:
    """Return DaSGD: averages that arrive `delay` steps late are mixed with local weights.

    Zhou et al., 2020 (arXiv 2006.00441). The abstract has local steps, late averages, and a rate of
    O(1 / sqrt(K)). The paper's share of local weights could not be confirmed, so `local` is ours.
    """
    return LocalSGD(period, delay, Mix(local), inner=inner)


def cocod(period: int = 16, *, inner: Algorithm = Torus2D()) -> LocalSGD:  # noqa: B008
    """Return CoCoD-SGD: averages are a whole period late, and what was learned meanwhile is added.

    Shen et al., "Faster Distributed Deep Net Training", 2019; the rule is of its published code.
    """
    return LocalSGD(period, period, inner=inner)


def diloco(
    period: int = 500,
    outer: Outer = Nesterov(0.7, 0.9),  # noqa: B008  # a frozen value, as below
    *,
    inner: Algorithm = Torus2D(),  # noqa: B008
    wire: Any = None,
) -> LocalSGD:
    """Return DiLoCo: long periods of AdamW with local state, and Nesterov momentum for the anchor.

    Douillard et al., 2023. The outer rate and momentum are those of its published code. They are
    made for hundreds of inner steps of AdamW; public trainers use outer rates from 0.3 to 0.9,
    lower ones with a higher inner rate.
    """
    return LocalSGD(period, outer=outer, inner=inner, wire=wire)


def streaming_diloco(
    fragments: int = 4,
    period: int = 100,
    delay: int = 5,
    *,
    merge: Literal["correct"] | Mix = Mix(0.5),  # a frozen value, as below
    outer: Outer = Nesterov(0.7, 0.9),  # noqa: B008
    inner: Algorithm = Direct(),  # noqa: B008
    wire: Any = Int4(),  # noqa: B008
) -> LocalSGD:
    """Return Streaming DiLoCo: its fragments leave in turn, are merged late, and travel in 4 bits.

    Douillard et al., 2025 (arXiv 2501.18512). The paper tried shares of 0 and 0.5 of local weights,
    and found delays below 5 harmless. It sends floats of 4 bits; here they are integers with a
    scale per block, and feedback. Fragments are modules, dealt out so that all fragments have about
    equally many bytes. Its outer rate could not be confirmed.
    """
    return LocalSGD(period, delay, merge, outer, fragments, inner=inner, wire=wire)


def noloco(
    period: int = 100,
    rate: float = 0.7,
    momentum: float = 0.3,
    *,
    inner: Gossip = Gossip(),  # noqa: B008
) -> LocalSGD:
    """Return NoLoCo: in a period a rank averages with one partner only, and keeps its own anchor.

    Kolehmainen et al., 2025 (arXiv 2506.10911); rule, rates and period are those of its published
    code, which draws pairs at random. Here partners follow from `inner`, which meets all ranks in
    turn; ``Gossip("hypercube")`` makes pairs. It drops the paper's random routing between pipeline
    stages.
    """
    return LocalSGD(period, outer=HeavyBall(rate, momentum), inner=inner)
