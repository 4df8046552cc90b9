# SPDX-License-Identifier: Apache-2.0
"""Helpers for your tests: threads or processes as ranks, injected faults, transport checks."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
