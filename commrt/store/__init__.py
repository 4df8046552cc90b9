# SPDX-License-Identifier: Apache-2.0
"""How processes find each other: launchers' variables, torch's store, what ranks compare on it."""
