# SPDX-License-Identifier: Apache-2.0
from commrt.training.step_report import Stats as Stats
from commrt.training.step_report import StepReport as StepReport
