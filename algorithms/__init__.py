# SPDX-License-Identifier: Apache-2.0
"""Collectives as pure functions from a rank count to a schedule, and algorithms for training."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
