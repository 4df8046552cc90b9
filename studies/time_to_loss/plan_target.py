# SPDX-License-Identifier: Apache-2.0
"""Which method on how many ranks reaches a loss first: ``python studies/time_to_loss/plan_target.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Annotated, Any

import typer
from convergence import Convergence, Steps, convergence_of
from curve import GOSSIP, LOCAL, SYNCHRONOUS, Curve
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from time_to_target import TimeToTarget, Verdict

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import CLUSTER, LocalOptions, Wire
from commrt.tools.commands.choosing import compute_of, workload_called
from commrt.tools.commands.estimates import ExchangeEstimate, StepEstimate
from commrt.tools.commands.output import json_of
from commrt.tools.pictures.files import require_picture, save_picture
from commrt.tools.planning.local_steps import LocalSteps
from commrt.tools.planning.planner import exchange_plans, step_plans
from commrt.tools.planning.wires import ITEMS, WirePricing, wire_nbytes
from commrt.tools.planning.workload import Workload

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

MIN_WIDTH = 124
"""Of the table: names that are cut off cannot be told apart."""
BETWEEN = "likely"
"""Heading of intervals."""
ALONE = "-"
"""The algorithm of one rank."""


@app.command()
def plan_target(
    files: Annotated[
        list[str],
        typer.Argument(help="Curves that curve_recorder.py wrote, of several rank counts."),
    ],
    target_loss: Annotated[float, typer.Option(metavar="LOSS", help="Plan the least time to this training loss.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=65536, show_default="twice the recorded ones", help="Up to so many ranks."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", show_default=CLUSTER, help="A cluster, or a TOML file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As for commrt simulate step, such as resnet50.")] = None,
    wire: Annotated[Wire | None, typer.Option(show_default="as recorded", help="What travels.")] = None,
    compute_ms: opt.ComputeMs = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Draw times over ranks: .svg, .png or .pdf.")] = None,
    as_json: opt.Json = False,
) -> None:
    """Predict times to a loss for up to --ranks ranks from recorded curves. Without --model, print only steps."""
    target, most = target_loss, ranks
    if out is not None:
        require_picture(out)
    curves = _curves(files, target)
    known = convergence_of(curves, target)
    prices = _prices(curves, cluster, model, wire and wire.value, compute_ms)
    counts = _rank_counts(known, most, inf if prices is None else prices.cluster.ranks())
    steps = {(each.method, ranks): each.steps(ranks) for each in known for ranks in counts if each.knows(ranks)}
    times = [] if prices is None else [prices.time(*at, found) for at, found in steps.items()]
    if out is not None:
        _draw(times, f"{prices.title}: " if prices else "", target, out)
    if as_json:
        print(json_of(_record(known, steps, times, target, prices)))
        return
    _show(known, steps, times, target)
    for line in (*_fits(known), *_answer(times, prices)):
        print(line)


def _curves(files: Sequence[str], target: float) -> dict[str, Curve]:
    if not 0 < target < float("inf"):
        raise UsageError(f"--target-loss {target:g}: give a loss above 0, such as 0.2")
    curves = {file: Curve.read(file) for file in files}
    known = dict[tuple[str, int, int], str]()
    for file, curve in curves.items():
        run = curve.method, curve.ranks, curve.seed
        if (other := known.setdefault(run, file)) != file:
            raise UsageError(
                f"{other} and {file} both record seed {curve.seed} of {curve.method} on {curve.ranks} ranks: leave one "
                "out, and record another with --seed"
            )
    _require_equal_recipes(curves)
    return curves


def _require_equal_recipes(curves: Mapping[str, Curve]) -> None:
    """Raise `UsageError` for other epochs, or another learning rate of one method on as many ranks, where known."""
    known = dict[tuple[str, object], tuple[str, object]]()
    for file, curve in curves.items():
        for name, group in (("epochs", None), ("lr", (curve.method, curve.ranks))):
            if (value := curve.recipe.get(name)) is None:
                continue
            other, found = known.setdefault((name, group), (file, value))
            if found != value:
                raise UsageError(
                    f"{other} was recorded with {name} {found}, and {file} with {value}: such runs do not compare; "
                    "record them alike"
                )


def _rank_counts(known: Sequence[Convergence], most: int | None, room: float) -> list[int]:
    """Return the recorded counts and powers of two, up to `most`; by default twice the largest one, if there is `room`.

    Raise `UsageError` if `most`, which was asked for, is beyond what a method can predict.
    """
    recorded = sorted({count for each in known for count in each.recorded})
    if most is None:
        most = int(min(2 * recorded[-1], max(room, recorded[-1])))
    elif most < recorded[0]:
        raise UsageError(f"--ranks {most}: the curves begin at {recorded[0]} ranks; give as many or more")
    else:
        for each in known:
            if most > each.recorded[-1]:
                each.require(most)
    powers = [2**power for power in range(most.bit_length()) if 2**power >= recorded[0]]
    return sorted({*powers, *(count for count in recorded if count <= most), most})


def _prices(
    curves: Mapping[str, Curve], cluster: str | None, model: str | None, wire: str | None, compute_ms: float | None
) -> Prices | None:
    """Return what prices steps; None without a model."""
    if model is None:
        if compute_ms is not None or cluster is not None or wire is not None:
            raise UsageError("--cluster, --compute-ms and --wire are for the time of a step: give --model too")
        return None
    first = next(iter(curves.values()))
    described, workload = Cluster.named(cluster or CLUSTER), workload_called(model)
    batch = first.batch // first.ranks if compute_ms is None else None
    compute_s, _ = compute_of(workload, described, batch, compute_ms)
    return Prices({each.method: each for each in curves.values()}, wire, described, workload, compute_s)


@dataclass(frozen=True)
class Prices:
    """Times of training steps on a cluster."""

    curves: Mapping[str, Curve]
    """One of each method, which says how it trains."""
    wire: str | None
    """As it was asked for."""
    cluster: Cluster
    workload: Workload
    compute_s: float

    def time(self, method: str, ranks: int, steps: Steps) -> TimeToTarget:
        """Return the time to the target of `method` on `ranks` ranks."""
        algorithm, step_s = self._step(self.curves[method], ranks)
        return TimeToTarget(method, algorithm, ranks, steps, step_s)

    def _step(self, curve: Curve, ranks: int) -> tuple[str, float]:
        """Return what exchanges, and the time of a step."""
        self.cluster.require_capacity(ranks)
        if ranks == 1:
            return ALONE, self.compute_s
        wire = self._wire(curve)
        if curve.training == SYNCHRONOUS:
            plan = step_plans(self.cluster, ranks, self.workload, self.compute_s, [wire])[0]
            return plan.name, plan.seconds
        if curve.training == LOCAL:
            return self._local_step(curve, ranks, wire)
        if curve.training == GOSSIP:
            return self._gossip_step(ranks, wire)
        raise UsageError(f"no step of {curve.training!r} has a price: take curves of {SYNCHRONOUS}, {LOCAL}, {GOSSIP}")

    def _wire(self, curve: Curve) -> str:
        recorded = curve.settings.get("wire")
        if recorded is not None and recorded not in ITEMS:
            raise UsageError(f"curves of {curve.method}: no wire is called {recorded!r:.80}: record them again")
        if recorded is not None and (self.wire not in {None, recorded}):
            raise UsageError(f"curves of {curve.method} were recorded with wire {recorded}: leave --wire out for them")
        return str(recorded or self.wire or "fp32")

    def _local_step(self, curve: Curve, ranks: int, wire: str) -> tuple[str, float]:
        """Return the all-reduce that averages weights soonest, and the mean step of local SGD with it."""
        given = LocalOptions(_whole(curve, "period"), _whole(curve, "delay"), _whole(curve, "fragments"))
        if given.period is None:
            raise UsageError(f"curves of {curve.method} do not say a period: record them again, with a period")
        local, nbytes = given.algorithm(wire), wire_nbytes(self.workload.numel, ITEMS[wire])
        quantized = wire if wire in QUANTIZERS else None
        best = exchange_plans(self.cluster, ranks, nbytes / local.fragments, quantized)[0]
        pricing = WirePricing(best.algorithm.schedule(0, ranks), self.cluster, QUANTIZERS.get(wire))
        steps = LocalSteps.priced(pricing, nbytes, self.compute_s, local.period, local.fragments)
        return best.name, steps.step_s(local.delay)

    def _gossip_step(self, ranks: int, wire: str) -> tuple[str, float]:
        """Return gossip, and a step whose exchange runs under the next forward pass."""
        nbytes = wire_nbytes(self.workload.numel, ITEMS[wire])
        exchange = ExchangeEstimate(Gossip(), ranks, self.cluster, nbytes, wire)
        return "Gossip()", StepEstimate(exchange, self.workload, self.compute_s).times_s()[
            "under the next forward pass"
        ]

    @property
    def title(self) -> str:
        """Return what is trained, and where."""
        return f"{self.workload.name} on {self.cluster.name}"


def _whole(curve: Curve, name: str) -> int | None:
    value = curve.settings.get(name)
    if value is not None and not isinstance(value, int):
        raise UsageError(f"curves of {curve.method}: {name} is {value!r}, not a whole number; record them again")
    return value


Found = Mapping[tuple[str, int], Steps]
"""By method and ranks."""


def _record(
    known: Sequence[Convergence], steps: Found, times: Sequence[TimeToTarget], target: float, prices: Prices | None
) -> dict[str, Any]:
    """Return all of it for JSON."""
    verdict = Verdict(times) if times else None
    rows = {(each.method, each.ranks): _time_record(each) for each in times}
    return {
        "target_loss": target,
        "cluster": None if prices is None else prices.cluster.name,
        "model": None if prices is None else prices.workload.name,
        "compute_seconds": None if prices is None else prices.compute_s,
        "methods": [
            {"method": each.method, "recorded_ranks": each.recorded, "family": each.family,
             "errors_per_doubling": each.errors} for each in known
        ],
        "plans": [_steps_record(*at, found) | rows.get(at, {}) for at, found in steps.items()],
        "best_method": None if verdict is None else verdict.method,
        "best": None if verdict is None or verdict.winner is None else _place(verdict.winner),
        "uncompared_methods": [] if verdict is None else verdict.uncompared,
        "undecided": [] if verdict is None or verdict.winner is not None else [_place(each) for each in verdict.close],
        "deciding_ranks": None if verdict is None else verdict.deciding_ranks,
    }  # fmt: skip


def _place(time: TimeToTarget) -> dict[str, Any]:
    return {"method": time.method, "ranks": time.ranks} | _time_record(time)


def _steps_record(method: str, ranks: int, steps: Steps) -> dict[str, Any]:
    interval = {"steps": steps.steps, "steps_low": steps.low, "steps_high": steps.high}
    return {"method": method, "ranks": ranks, "recorded": steps.is_recorded, **interval}


def _time_record(time: TimeToTarget) -> dict[str, Any]:
    interval = {"seconds": time.seconds, "seconds_low": time.low_s, "seconds_high": time.high_s}
    return {"algorithm": time.algorithm, "step_seconds": time.step_s, **interval}


def _show(known: Sequence[Convergence], steps: Found, times: Sequence[TimeToTarget], target: float) -> None:
    """Print a row for each method and number of ranks, the least time in bold if it is certain."""
    columns = ["ranks", "steps", BETWEEN, *(["step, ms", "time, s", BETWEEN] if times else [])]
    table = Table("method", *(["algorithm"] if times else []), title=f"to a loss of {target:g}")
    for column in columns:
        table.add_column(column, justify="left" if column == BETWEEN else "right", no_wrap=True)
    winner = Verdict(times).winner if times else None
    of_times = {(each.method, each.ranks): each for each in times}
    for method in [each.method for each in known]:
        for (own, ranks), found in steps.items():
            if own == method:
                time = of_times.get((method, ranks))
                style = "bold" if time is winner is not None else None
                table.add_row(*map(escape, _cells(method, ranks, found, time)), style=style)
        table.add_section()
    Console(width=max(Console().width, MIN_WIDTH)).print(table)


def _cells(method: str, ranks: int, steps: Steps, time: TimeToTarget | None) -> list[str]:
    how = "" if steps.is_recorded else ", predicted"
    counted = [f"{ranks:,}", f"{steps.steps:,.0f}", f"{_between(steps.low, steps.high, ',.0f')}{how}"]
    if time is None:
        return [method, *counted]
    priced = [f"{1e3 * time.step_s:,.2f}", f"{time.seconds:,.4g}", _between(time.low_s, time.high_s)]
    return [method, time.algorithm, *counted, *priced]


def _between(low: float, high: float, digits: str = ",.4g") -> str:
    return f"[{low:{digits}} .. {high:{digits}}]" if isfinite(high) else "(needs more seeds)"


def _fits(known: Sequence[Convergence]) -> Iterator[str]:
    """Yield how steps of each method were predicted."""
    for each in known:
        if each.family is not None:
            errors = ", ".join(f"{name} {error:.0%}" for name, error in each.errors.items() if isfinite(error))
            held_out = f"errors per doubling for counts that were held out: {errors}"
            yield f"{each.method}: predicted by {each.family}; {held_out}"


def _answer(times: Sequence[TimeToTarget], prices: Prices | None) -> Iterator[str]:
    """Yield which method and how many ranks to take, or which cannot be told apart."""
    if prices is None:
        yield "these are steps: give --model, --cluster and --compute-ms for their times"
        return
    verdict = Verdict(times)
    more, close = verdict.deciding_ranks, "; ".join(map(_named, verdict.close))
    advice = f"a curve on {more:,} ranks would decide" if more else "curves with more seeds would decide"
    if verdict.winner is not None:
        yield f"least time: {close}"
    elif verdict.least.high_s == inf:
        yield f"no winner, as nothing is known of the spread between seeds: {close}"
        yield "curves with more seeds would decide"
    elif verdict.uncompared:
        ranks = _counted(verdict.least.ranks)
        others = ", ".join(verdict.uncompared)
        yield f"no winner: the least time is {_named(verdict.least)}, where {others} was not compared"
        yield f"record three rank counts of each method, or {ranks}; --ranks says up to how many to compare"
    elif verdict.method is None:
        yield f"no winner, as the intervals of time overlap: {close}"
        yield advice
    else:
        yield f"least time: {verdict.method}; its rank counts cannot be told apart, as their intervals overlap: {close}"
        yield f"take the fewest, {_counted(verdict.fewest_ranks.ranks)}; {advice}"
    yield f"{prices.title}, {1e3 * prices.compute_s:.2f} ms to compute. {' '.join(prices.cluster.about.split())}"


def _named(time: TimeToTarget) -> str:
    how = "" if time.algorithm == ALONE else f" with {time.algorithm}"
    times = f"{time.seconds:,.4g} s {_between(time.low_s, time.high_s)}"
    return f"{time.method}{how} on {_counted(time.ranks)}, {times}"


def _counted(ranks: int) -> str:
    return f"{ranks:,} rank{'s' * (ranks > 1)}"


def _draw(times: Sequence[TimeToTarget], place: str, target: float, out: str) -> None:
    if not times:
        raise UsageError("--out draws times: give --model too")
    from drawing_times import draw_times_to_target  # noqa: PLC0415  # needs matplotlib

    save_picture(draw_times_to_target(f"{place}time to a loss of {target:g}", times), out)


if __name__ == "__main__":
    main(app)
