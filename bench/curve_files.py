# SPDX-License-Identifier: Apache-2.0
"""What records curves (``examples/mnist``), and what reads them (``studies/time_to_loss``)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "studies" / "time_to_loss"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "mnist"))
from convergence import steps_to  # of these folders
from curve import GOSSIP, LOCAL, SYNCHRONOUS, Curve
from curve_recorder import CurveRecorder

__all__ = ["GOSSIP", "LOCAL", "STUDY", "SYNCHRONOUS", "Curve", "CurveRecorder", "steps_to"]

STUDY = Path(__file__).parent.parent / "studies" / "time_to_loss"
