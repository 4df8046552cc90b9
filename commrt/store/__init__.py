# SPDX-License-Identifier: Apache-2.0
"""How processes find each other: launchers' variables, the key-value store, and what ranks compare
on it.
"""
