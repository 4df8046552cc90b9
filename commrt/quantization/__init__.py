# SPDX-License-Identifier: Apache-2.0
"""Wires of few bits: quantizers, rules that choose the bits, and how a program quantizes what it
sends.
"""

from commrt.importing import names_of

__getattr__, __dir__ = names_of(__name__)
