# SPDX-License-Identifier: Apache-2.0
"""Gloo under another name, to compare what torch's tests run for Gloo and for a backend that torch does not know."""
