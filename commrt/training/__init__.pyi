# SPDX-License-Identifier: Apache-2.0
from commrt.training.replica import Stats as Stats
from commrt.training.replica import StepReport as StepReport
