# SPDX-License-Identifier: Apache-2.0
"""The command line: commands, and what they share: options, choices, estimates and output."""
