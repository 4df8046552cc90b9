# SPDX-License-Identifier: Apache-2.0
"""Ranks that come and go: generations, membership and recovery."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
