# SPDX-License-Identifier: Apache-2.0
"""Proofs of schedules by symbolic replay: what a schedule must do, whether it does, how well gossip mixes."""
