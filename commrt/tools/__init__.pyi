# SPDX-License-Identifier: Apache-2.0
from commrt.tools.measuring.workload_of import workload_of as workload_of
from commrt.tools.pictures.drawing import draw_schedule as draw_schedule
from commrt.tools.planning.workload import Workload as Workload
