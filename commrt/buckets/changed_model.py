# SPDX-License-Identifier: Apache-2.0
"""What users are told of a model that is not any more what they attached: texts of errors."""

from __future__ import annotations

MODEL_CHANGED = "the model has changed since attach(), {change}: detach() and attach() again"
REPLACED = MODEL_CHANGED.format(change="{name} was replaced or removed")
