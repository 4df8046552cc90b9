# SPDX-License-Identifier: Apache-2.0
"""The gradient sets of the benchmarks have the published sizes."""

import importlib.util
from math import prod
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "gradient_sets", Path(__file__).parent.parent / "bench" / "gradient_sets.py"
)
gradient_sets = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gradient_sets)

PUBLISHED = {
    "ResNet-50": (161, 25_557_032, 2_359_296),
    "GoogLeNet": (173, 6_624_904, 1_024_000),
    "GoogLeNet with aux": (187, 13_004_888, 2_097_152),
    "VGG-16": (32, 138_357_544, 102_760_448),
    "VGG-19": (38, 143_667_240, 102_760_448),
    "BERT-large": (398, 336_226_108, 31_254_528),
    "BERT-large encoder": (391, 335_141_888, 31_254_528),
    "GPT-2 124M": (148, 124_439_808, 38_597_376),
    "GPT-2 1.5B": (580, 1_557_611_200, 80_411_200),
    "Llama-3-8B layer": (9, 218_112_000, 58_720_256),
    "Llama-3-8B": (291, 8_030_261_248, 525_336_576),
    "10,000 tensors of 64": (10_000, 640_000, 64),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gradient_set_has_as_many_tensors_and_elements_as_the_model(name):
    sizes = [prod(shape) for shape in gradient_sets.SETS[name]().values()]
    assert (len(sizes), sum(sizes), max(sizes)) == PUBLISHED[name]


def test_every_gradient_set_is_checked():
    assert set(gradient_sets.SETS) == set(PUBLISHED)
