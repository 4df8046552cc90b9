# SPDX-License-Identifier: Apache-2.0
"""How processes find each other: environment variables, torch's store, what ranks compare on it."""
