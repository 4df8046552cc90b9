# SPDX-License-Identifier: Apache-2.0
"""The command line: one module per group of commands, imported when it is called."""
