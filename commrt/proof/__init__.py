# SPDX-License-Identifier: Apache-2.0
"""Proofs of schedules by symbolic replay. Needs only numpy."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
