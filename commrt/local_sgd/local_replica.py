# SPDX-License-Identifier: Apache-2.0
"""A replica of local SGD: it trains alone, and decides when fragments leave and are merged.

`fragment` changes weights, `fragment_exchange` sends, and `checkpoint` has what is loaded. The
anchor is the weights that all ranks agreed on last (with gossip a rank's own): what is sent is the
difference to it. On the thread that trains; hooks of gradients run on that of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from commrt.buckets.digest import Digest
from commrt.errors import UsageError
from commrt.local_sgd.checkpoint import agree, require_fit, take
from commrt.local_sgd.fragment import Fragment
from commrt.local_sgd.fragment_exchange import FragmentExchange
from commrt.local_sgd.in_flight import InFlight
from commrt.local_sgd.outer import SlowMomentum
from commrt.local_sgd.policy import Mix
from commrt.training.after_step import AfterStepReplica
from commrt.training.gathering import gather_integers
from commrt.training.own_steps import NO_STEPS, OwnSteps
from commrt.training.request import Request
from commrt.training.residuals import own_residuals
from commrt.training.riding_rules import FEEDBACK, NOT_ADDED_UP, RidingRules
from commrt.training.settings import settings_digest
from commrt.training.stateful import Stateful


class LocalReplica(AfterStepReplica):
    """Trains alone, and merges averages at steps that all ranks know; else it waits for nobody.

    It replaces `AfterStepReplica._on_pass`, called in each backward pass that counts, and
    `_advance`, called where a step ends; else methods that users call. Of its parents' fields it
    writes `_spans`. `GrowingReplica` writes `_seen` where a rank comes. Written here of others:
    what leaves with an `InFlight`.
    """

    def __init__(self, request: Request, exchange: FragmentExchange) -> None:
        rides = not exchange.algorithm.is_gossip
        rules = RidingRules(
            anything="" if rides else NOT_ADDED_UP,
            weights="" if exchange.engine.buckets[0].residual is None else FEEDBACK,
        )
        watched: Digest | None = None
        if request.watch and rides:
            watched = Digest([anchor for part in exchange.fragments for anchor in part.anchors])
        super().__init__(request, exchange.fragments, rules, watched)
        self._rides = rides
        self._local = exchange.algorithm
        self._fragments = exchange.fragments
        self._exchange = exchange
        self._noted: dict[int, tuple[int, dict[int, float]]] = {}
        """By step: settings and rates in its backward pass, before a scheduler changed them."""
        self._seen = [NO_STEPS] * len(self._fragments)
        """`_own_steps` when the weights of each fragment left last."""
        self._live_with(self._hooks())

    def _on_pass(self) -> None:
        step = self._clock.passes
        if any(self._local.leaves(part.index, step) for part in self._fragments):
            self._noted[step] = self._settings(step)

    def _settings(self, step: int) -> tuple[int, dict[int, float]]:
        """Return a digest of optimizer settings, 0 in ``join()``, and all learning rates by id."""
        rates = {
            id(param): float(group.get("lr") or 0.0)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }
        is_joined = self._progress is not None  # ranks that have run out of data drive no scheduler
        return 0 if is_joined else settings_digest(self._optimizers, step), rates

    def _advance(self) -> None:
        """Count a step, merge what is due, then send what is due: in this order (`LocalSGD`)."""
        self._clock.end_step()
        for fragment, in_flight in self._in_flight():
            if self._clock.step - in_flight.step >= self._local.delay_at(in_flight.step):
                self._merge(fragment, in_flight)
        for fragment in self._fragments:
            if self._local.leaves(fragment.index, self._clock.step):
                in_flight = self._leave(fragment)
                if not self._local.delay_at(self._clock.step):
                    self._merge(fragment, in_flight, at_once=True)
        self._noted.pop(self._clock.step, None)
        self._close_report(self._clock.step - 1, self._world.membership.ranks)

    def _in_flight(self) -> list[tuple[Fragment, InFlight]]:
        return [(part, part.in_flight) for part in self._fragments if part.in_flight is not None]

    def _leave(self, fragment: Fragment) -> InFlight:
        """Let the weights of `fragment` leave as they are now."""
        if not self._steps.running:
            fragment.require_unwritten()
        settings, rates = self._noted.get(self._clock.step) or self._settings(self._clock.step)
        in_flight = InFlight(self._clock.step, settings, [*map(rates.get, fragment.ids)])
        if self._rides:
            in_flight.weight, in_flight.leaving = self._riding.leave_with_period(
                self._own_steps.since(self._seen[fragment.index]),
                with_numbers=fragment.index == 0,
            )
            self._seen[fragment.index] = self._own_steps
        fragment.leave(in_flight)
        self._exchange.send(fragment, in_flight)
        return in_flight

    def _merge(self, fragment: Fragment, in_flight: InFlight, *, at_once: bool = False) -> None:
        """Wait for the average, and let weights and anchor follow it.

        `at_once` where nothing was learned since the weights left.
        """
        with self._waiting_for(fragment):
            arrived = self._exchange.receive(fragment, in_flight)
            self._spans += arrived.answer.result()
            is_kept = not at_once and not isinstance(self._local.merge, Mix)
            learned = fragment.learned() if is_kept else None
            for bucket in arrived.buckets:
                bucket.unpack()
                bucket.release()
            if self._rides and fragment.index == 0:
                self._riding.arrive(arrived.buckets[0].riders)
                self._riding.keep()  # before another fragment leaves in this memory
            fragment.merge(
                in_flight,
                learned,
                self._local.outer if in_flight.step > self._local.warmup else None,
            )

    def ride(self, **numbers: float) -> None:
        """See `Replica.ride`: once per step, of which the period's latest rides."""
        self._riding.begin_step(self._clock.passes)
        super().ride(**numbers)

    def drain(self) -> None:
        """Merge all averages that are in flight, before they are due; collective."""
        self._end_all_steps()  # an optimizer has not stepped
        for fragment, in_flight in self._in_flight():
            self._merge(fragment, in_flight)
        self._account()

    def _account(self) -> None:
        """Add what exchanges between steps have cost to the totals."""
        self._close_report(self._clock.step, self._world.membership.ranks, steps=0)

    def consolidate(self) -> None:
        """End the period: set the weights to the anchor, bitwise equal on all ranks; collective.

        What ranks have learned since their weights last left is averaged first. Where ranks gossip,
        weights and anchor become the mean of all ranks' weights. Buffers that are not averaged
        become those of rank 0.
        """
        self._world.require_all_ranks("consolidate()")  # before anything changes
        self._end_all_steps()  # others may wait for what leaves after these
        with self._world.collective("consolidate()"):
            self.drain()
            for fragment in self._fragments:
                # all ranks ask or none does, as all are at the same step
                is_behind = fragment.left != self._clock.step
                if is_behind or self._ask_all_if_learned(fragment):
                    self._merge(fragment, self._leave(fragment), at_once=True)
            self._account()
            if self._local.is_gossip:
                super().consolidate()
                for fragment in self._fragments:
                    fragment.settle()
            else:
                for fragment in self._fragments:
                    fragment.land()
                self._copies.settle()
                self._take_from_first(buffers_only=True)
                self._compare_replicas()

    def _ask_all_if_learned(self, fragment: Fragment) -> bool:
        """Return True if a rank made a step since its weights left, also in `no_sync` or a second
        one with the same gradients; collective.

        Always False with gossip, where all weights are averaged anyway.
        """
        own = int(self._own_steps != self._seen[fragment.index])
        learned = self._world.membership.together(
            lambda: gather_integers(self._world, own, self.step)
        )
        return self._rides and any(learned.values())

    @contextmanager
    def join(self, *also: Stateful) -> Iterator[None]:
        """Let ranks run out of data at different times; see `AfterStepReplica.join`."""
        if isinstance(self._local.outer, SlowMomentum):
            raise UsageError(
                "join() with SlowMomentum: it divides by the learning rate, which ranks without"
                " data do not follow; use Nesterov or HeavyBall"
            )
        self._noted = {}
        with super().join(*also):
            yield

    def overwrite_with_first(self) -> None:
        """Send rank 0's weights and buffers to all, begin anew; collective, not inside `join`."""
        super().overwrite_with_first()
        for fragment in self._fragments:
            fragment.restart()
        self._seen = [self._own_steps] * len(self._fragments)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer; each rank saves its own.

        Not collective. What is in flight is part of it, and is sent again after it was loaded, so
        nothing waits and nothing is lost. A step whose optimizers were all left out, as by a
        `GradScaler`, ends first.
        """
        self._end_steps(self._clock.on_save())
        due, stepped = self._clock.pending()
        return super().state_dict() | {
            "period": self._local.period,
            "delay": self._local.delay,
            "due": due,
            "stepped": stepped,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "seen": [tuple(self._own_steps.since(before)) for before in self._seen],
            "residuals": {name: part.clone() for name, part in self._exchange.residuals().items()},
            "rank": self._world.rank,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of `state`; load the model first. Collective.

        A state that another algorithm saved has no anchor. Training then begins anew from the
        model's weights, which must be equal on all ranks. Raises `UsageError` if `state` does not
        fit, `DisagreementError` if ranks load different steps or anchors: nothing is loaded then.
        """
        if self._retakes_state():
            return
        self._world.require_all_ranks("load_state_dict()")  # before anything changes
        step = self._step_in(state)
        due = state.get("due", 0)
        fragments = self._fragments
        residuals = own_residuals(state, self._world.rank, self._exchange.engine.residuals())
        saved = state.get("fragments")
        if saved is not None:
            require_fit(saved, state["period"], state["delay"], fragments, self._local)
        agree(self._world, step + due, saved, fragments, self._local)
        take(saved, fragments, self._riding)
        before = state.get("seen") or [NO_STEPS] * len(fragments)
        self._seen = [self._own_steps.since(OwnSteps(*each)) for each in before]
        self._clock.restart(step, due, state.get("stepped", ()))
        self._noted = {}
        self._exchange.engine.restore_residuals(residuals)
        for fragment, each in self._in_flight():
            self._exchange.send(fragment, each)

    def detach(self) -> None:
        """Remove all hooks, and drop averages in flight once they are there; not collective."""
        for _, in_flight in self._in_flight():
            if in_flight.submitted is not None:
                in_flight.submitted.answer.exception()  # waits
        super().detach()
        for fragment in self._fragments:
            fragment.drop_in_flight()
        self._exchange.engine.release()
