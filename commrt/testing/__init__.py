# SPDX-License-Identifier: Apache-2.0
"""Helpers for your tests: threads or processes as ranks, injected faults, transport checks."""
