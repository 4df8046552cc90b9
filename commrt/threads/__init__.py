# SPDX-License-Identifier: Apache-2.0
"""Who issues work, in which order, and how one that waits learns what became of it."""
