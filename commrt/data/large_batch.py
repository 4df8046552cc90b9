# SPDX-License-Identifier: Apache-2.0
"""The names for training with large batches: `batch_size` and `learning_rate` have what they do."""

from commrt.data.batch_size import BatchSizeControl, Part
from commrt.data.learning_rate import Rate

__all__ = ["BatchSizeControl", "Part", "Rate"]
