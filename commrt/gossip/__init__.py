# SPDX-License-Identifier: Apache-2.0
"""Train by gossip of weights: after each optimizer step they go to one partner, and what it sent is
mixed in while the next forward pass runs. Its schedules are in `commrt.algorithms.gossip`.
"""
