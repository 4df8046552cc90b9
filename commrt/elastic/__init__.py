# SPDX-License-Identifier: Apache-2.0
"""Ranks that come and go: generations, membership and recovery."""
