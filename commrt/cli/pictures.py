# SPDX-License-Identifier: Apache-2.0
"""The pictures of ``commrt draw`` inside of a page: a run's schedule, and a typical step of its timeline."""

from __future__ import annotations

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.catalogue import BACKUP, GOSSIP, by_name
from commrt.cli.draw import draw_schedule
from commrt.cli.draw_run import draw_typical
from commrt.cli.figures import inline
from commrt.cli.history import Record
from commrt.cli.job import DDP, Job
from commrt.cli.markup import Markup, tag
from commrt.cli.timelines import spans_of
from commrt.errors import UsageError
from commrt.schedule import Schedule

__all__ = ["schedule_figure", "timeline_figure"]

LARGER = 1.35
"""Pixels of a page for a point of a picture, at most."""
LEAST_PX = 540
"""On a narrow page a wide picture is scrolled, not made smaller than this."""
COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--page)",
    "#f2f2f2": "var(--band)",
    "#d9d9d9": "var(--rule)",
}
"""What a page has in place of a picture's ground and ink."""


def schedule_figure(job: Job, workers: int, prefix: str) -> Markup:
    """What is sent to whom, or a sentence that says why it cannot be shown."""
    if job.algorithm == DDP:
        return tag("p", "torch's DDP chooses among Gloo's own algorithms: there is no schedule to show.")
    try:
        figure = draw_schedule(_schedule(job, workers))
    except UsageError as error:
        return tag("p", f"{error}.")
    return _framed(inline(figure, f"{prefix}-schedule", COLOURS), _about(job, workers))


def _schedule(job: Job, workers: int) -> Schedule:
    if job.algorithm == BACKUP:
        algorithm = BackupWorkers(job.backups)
        return algorithm.inner.schedule(0, algorithm.needed(workers))
    return by_name(job.algorithm).schedule(0, workers)


def _about(job: Job, workers: int) -> str:
    if job.algorithm == BACKUP:
        needed = BackupWorkers(job.backups).needed(workers)
        return f"The schedule of {needed} of the ranks, by their places among those that count in a step"
    return "The schedule of the first step" if job.algorithm == GOSSIP else "The schedule of each step"


def timeline_figure(record: Record, name: str, prefix: str) -> Markup:
    """A step among the first that took as long as most, of all ranks that were left."""
    try:
        figure = draw_typical(spans_of(record.events), name)
    except UsageError as error:
        return tag("p", f"{error}.")
    if figure is None:
        return tag("p", "No step was recorded.")
    return _framed(
        inline(figure, f"{prefix}-timeline", COLOURS), "Who did what when in a step that took as long as most"
    )


def _framed(svg: str, caption: str) -> Markup:
    width = float(svg[svg.index("<svg") :].split('width="', 1)[1].split("pt", 1)[0])
    sizes = f"min-width: {min(width, LEAST_PX):.0f}px; max-width: {LARGER * width:.0f}px"
    picture = Markup(svg.replace("<svg ", f'<svg class="picture" style="{sizes}" ', 1))
    return tag("figure", tag("figcaption", caption), tag("div", picture, class_="wide"))
