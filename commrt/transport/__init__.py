# SPDX-License-Identifier: Apache-2.0
"""Moving bytes between ranks: one protocol, one module per way of doing it."""
