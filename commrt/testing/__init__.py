# SPDX-License-Identifier: Apache-2.0
"""For tests of commrt and of what is built on it: threads as ranks, faults, and a conformance suite."""
