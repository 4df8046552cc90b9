# SPDX-License-Identifier: Apache-2.0
"""Train by gossip: after each optimizer step a rank sends its weights to one partner.

What came is mixed in while the next forward pass runs. Schedules: `commrt.algorithms.gossip`.
"""
