# SPDX-License-Identifier: Apache-2.0
"""Algorithms and wires as users write them in Python: text for plans to print."""

from __future__ import annotations

from commrt.algorithm import Algorithm
from commrt.algorithms.direct import Direct
from commrt.algorithms.torus import Torus2D
from commrt.importing import homes
from commrt.quantizer import DTYPES, QUANTIZERS

PYTHON_WIRES = {name: f"torch.{dtype}" for name, dtype in DTYPES.items() if name != "fp32"}
PYTHON_WIRES |= {name: f"commrt.{name.title()}()" for name in QUANTIZERS}
"""Dtypes and quantizers by their names on the command line; fp32 needs none."""


def home_of(algorithm: type[Algorithm]) -> str:
    """Return the package or module from which users import the class `algorithm`.

    >>> from commrt.algorithms import Rings
    >>> home_of(Torus2D), home_of(Rings)
    ('commrt', 'commrt.algorithms')
    """
    for package in ("commrt", "commrt.algorithms"):
        if algorithm.__name__ in homes(package):
            return package
    return algorithm.__module__


def python_call(algorithm: Algorithm) -> str:
    """Return the call that makes `algorithm` as users write it.

    >>> from commrt.algorithms.halving_doubling import HalvingDoubling
    >>> python_call(Torus2D()), python_call(Direct(4, between=HalvingDoubling()))
    ('commrt.Torus2D()', 'commrt.Direct(within=4, between=commrt.HalvingDoubling())')
    """
    call = f"{home_of(type(algorithm))}.{short_name(algorithm)}"
    return call.replace("between=", "between=commrt.")


def short_name(algorithm: Algorithm) -> str:
    """Return the shortest call that makes `algorithm`.

    >>> short_name(Torus2D((4, 2), both_ways=True)), short_name(Torus2D()), short_name(Direct())
    ('Torus2D(grid=(4, 2), both_ways=True)', 'Torus2D()', 'Direct()')
    """
    if algorithm == Direct():
        return "Direct()"
    if not isinstance(algorithm, Torus2D):
        return str(algorithm)
    given = [] if algorithm.grid is None else [f"grid={algorithm.grid}"]
    return f"Torus2D({', '.join([*given, *['both_ways=True'] * algorithm.both_ways])})"
