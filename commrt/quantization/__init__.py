# SPDX-License-Identifier: Apache-2.0
"""Wires of few bits: how a program quantizes what it sends, error feedback, and rules that choose the bits."""
