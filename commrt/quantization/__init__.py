# SPDX-License-Identifier: Apache-2.0
"""Wires of few bits: quantizers, rules that choose the bits, and programs that carry codes."""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
