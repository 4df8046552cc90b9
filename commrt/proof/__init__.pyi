# SPDX-License-Identifier: Apache-2.0
from commrt.proof.additions import order_of_additions as order_of_additions
from commrt.proof.additions import require_one_order as require_one_order
from commrt.proof.replay import prove as prove
from commrt.proof.replay import verify as verify
