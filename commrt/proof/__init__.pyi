# SPDX-License-Identifier: Apache-2.0
from commrt.proof.replay import prove as prove
from commrt.proof.replay import verify as verify
