# SPDX-License-Identifier: Apache-2.0
"""When the communication thread worked for a bucket, and what it sent, for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The communication thread's work for one bucket, in seconds of ``time.perf_counter``."""

    bucket: int | str
    begin_s: float
    end_s: float
    nbytes_sent: int
