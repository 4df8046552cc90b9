# SPDX-License-Identifier: Apache-2.0
from commrt.quantization.adaptive_bits import Adaptive as Adaptive
from commrt.quantization.adaptive_bits import Progress as Progress
from commrt.quantization.adaptive_bits import adaquant as adaquant
from commrt.quantization.adaptive_bits import dq as dq
from commrt.quantizer import Float8 as Float8
from commrt.quantizer import Int2 as Int2
from commrt.quantizer import Int4 as Int4
from commrt.quantizer import Int8 as Int8
from commrt.quantizer import Quantizer as Quantizer
