# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate`` and ``commrt plan`` of exchanges, training steps and local SGD, as a user calls them."""

import re
from itertools import product

import pytest
import torch
from cases import for_each
from commands import invoke, told

import commrt
from commrt.algorithms.registration import Nodes, Shape
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands.arguments import Wire
from commrt.tools.planning.planner import coded_candidates, tried_shapes
from commrt.tools.planning.python_calls import PYTHON_WIRES, python_call
from commrt.tools.planning.wires import ITEMS


def pasted(python):
    """Return what a user gets who pastes it."""
    return eval(python, {"commrt": commrt, "torch": torch})  # noqa: S307


def algorithm_of(plan):
    call = plan["python"].removeprefix("commrt.attach(model, optimizer, ")
    return pasted(call.split(", wire=")[0])


def test_simulate_says_what_an_exchange_takes_and_what_no_schedule_can_beat():
    record = told("simulate exchange torus2d --ranks 4096 --cluster abci --nbytes 51.1e6")
    assert record["seconds"] == pytest.approx(7.9e-3, rel=0.01)
    assert record["steps"] == 252
    assert 1.5 < record["seconds"] / record["lower_bound_seconds"] == record["of_optimal"] < 1.6


def test_a_training_step_is_told_with_the_exchange_after_it_and_under_it():
    record = told("simulate step torus2d --ranks 1088 --grid 32x34 --model resnet50 --wire fp16")
    after, under = record["exchanges"]
    assert record["nbytes"] == 2 * 25_557_032
    assert after["efficiency"] == pytest.approx(0.88, abs=0.005)
    assert 0 <= under["exposed_seconds"] < after["exposed_seconds"]
    assert record["images_per_second"] == pytest.approx(641.25 * 1088 * under["efficiency"])


def test_gossip_is_told_with_its_weights_after_the_step_and_under_the_next():
    step = "--ranks 128 --cluster ethernet-10g --model 25.6e6 --compute-ms 160 --jitter 0.1"
    record = told(f"simulate step gossip {step}")
    after, under, late = record["exchanges"]
    assert after["step_seconds"] == pytest.approx(0.16 + record["seconds"])
    assert under["step_seconds"] == pytest.approx(0.16 * 2 / 3 + max(0.16 / 3, record["seconds"]))
    assert late["efficiency"] == 1.0
    assert record["efficiency_with_jitter"] < after["efficiency"] < record["efficiency_one_step_late"]


def test_jitter_makes_an_all_reduce_wait_and_the_same_seed_gives_the_same():
    step = "simulate step halving_doubling --ranks 32 --model 1e6 --compute-ms 100 --jitter 0.1"
    first, again, other = (told(step, "--seed", seed)["efficiency_with_jitter"] for seed in (1, 1, 2))
    assert first == again != other
    assert 0.75 < first < 0.9


@for_each(
    ("setting", "best"),
    [
        ("--ranks 8", ["Ring()"]),
        ("--ranks 32", ["Ring()"]),
        ("--ranks 64", ["Torus2D(grid=(32, 2))"]),
        ("--ranks 256", ["Torus2D(grid=(32, 8))"]),
        ("--ranks 64 --cluster ethernet-10g --nbytes 1000", ["HalvingDoubling()"]),
        ("--ranks 256 --cluster abci-nvlink", ["Direct(within=4, between=HalvingDoubling())", "HalvingDoubling()"]),
    ],
)
def test_the_best_plans_depend_on_ranks_links_and_bytes(setting, best):
    record = told("plan exchange --nbytes 51.1e6", *setting.split())
    compared = re.compile(r"(Ring|Torus2D|HalvingDoubling|DoubleTree|Direct)\b")  # others may come, and win
    plans = filter(compared.match, (plan["algorithm"] for plan in record["plans"]))
    assert [*plans][: len(best)] == best
    assert record["best"] == record["plans"][0]


def test_a_plan_of_a_step_is_a_line_of_python_that_builds_it():
    record = told("plan step --ranks 64 --model resnet50 --wire bf16")
    best = record["best"]
    assert record["proven"]
    assert {plan["wire"] for plan in record["plans"]} == {"bf16"}
    assert best["python"].endswith(f", wire=torch.bfloat16, bucket_cap_mb={best['bucket_cap_mb']:g})")
    assert algorithm_of(best).schedule(0, 64).ranks == 64
    assert best["step_seconds"] == min(plan["step_seconds"] for plan in record["plans"])


@for_each("algorithm", [shape.algorithm for shape in tried_shapes(Nodes(8, 4))])
def test_what_a_plan_says_in_python_makes_its_algorithm(algorithm):
    assert pasted(python_call(algorithm)) == algorithm


def test_each_wire_of_the_command_line_has_a_price_and_a_name_in_python():
    assert {wire.value for wire in Wire} == set(ITEMS) == {"fp32", *PYTHON_WIRES}


@for_each(("ranks", "per_node"), product([2, 3, 4, 6, 8, 13, 16, 33], [1, 2, 4]))
def test_every_plan_verifies(ranks, per_node):
    for algorithm, steps in (*tried_shapes(Nodes(ranks, per_node)), *map(Shape, coded_candidates(ranks, per_node))):
        schedule = algorithm.schedule(0, ranks)
        assert prove(schedule, all_reduce(ranks, schedule.chunks)).traffic.steps == steps or not steps


STEP = "--ranks 24 --model resnet50 --wire bf16"


def test_a_plan_for_ranks_that_are_slow_at_times_leaves_some_of_them_behind():
    record = told(f"plan backups {STEP} --steps 500 --backups auto --law slow")
    plan = record["best"]
    best = {number: next(plan for plan in record["plans"] if plan["backups"] == number) for number in (0, 1)}
    assert plan["backups"] > 1
    assert plan["updates"] == pytest.approx(24 / (24 - plan["backups"]))
    to_the_goal = [each["step_seconds"] * each["updates"] for each in (plan, best[1], best[0])]
    assert to_the_goal == sorted(to_the_goal)
    assert algorithm_of(plan).backups == plan["backups"]


def test_where_nobody_is_slow_backups_only_cost_what_they_do_not_hide():
    plain = told(f"plan step {STEP}")
    backed = told(f"plan backups {STEP} --steps 500 --backups 3 --law slow --set chance=0")
    assert backed["best"] == plain["best"]
    other = next(plan for plan in backed["plans"] if plan["backups"])
    compute_s = backed["best"]["step_seconds"] * backed["best"]["efficiency"]
    in_two_buckets_s = other["exchange_seconds"] + other["latency_seconds"]  # the first is always small
    assert other["step_seconds"] == pytest.approx(compute_s + in_two_buckets_s)


def test_the_table_shows_the_best_first_and_says_why():
    plan = "plan exchange --ranks 64 --nbytes 51.1e6"
    output, record = invoke(plan).stdout, told(plan)
    first = next(line for line in output.splitlines() if line.startswith("│"))
    best = record["best"]["algorithm"]
    ring = next(each for each in record["plans"] if each["algorithm"] == "Ring()")
    latency_s, exchange_s = (ring[of] - record["best"][of] for of in ("latency_seconds", "exchange_seconds"))
    gains = f"{1e3 * latency_s:.2f} ms less for latencies and {1e3 * (latency_s - exchange_s):.2f} ms more for bytes"
    assert best in first
    assert f"{best} against Ring(), all at once: {gains}" in output
    assert record["best"]["python"] in output


@for_each(
    ("line", "words"),
    [
        ("all_gather --nbytes 1e6", "priced for pieces of 262,144 bytes, as all sizes down to half of that"),
        ("all_gather --nbytes 1e9 --ranks 8", "priced for one of 239 slices, as pieces of 524,288 bytes"),
        ("all_gather --nbytes 1e9 --ranks 8", "force one: COMMRT_SCHEDULES=all_gather=ring"),
        ("all_to_all --nbytes 1e6", "priced for empty pieces, as a rank does not know the sizes of all"),
        ("barrier", "dissemination: the only schedule for so many ranks"),
    ],
)
def test_the_plan_of_a_collective_says_what_was_priced_and_how_to_force_another_schedule(line, words):
    assert words in invoke(f"plan collective {line}").stdout


@for_each("wire", QUANTIZERS)
def test_codes_cost_their_bytes_and_scales(wire):
    record = told("simulate exchange direct --ranks 8 --cluster ethernet-10g --nbytes 8e6 --wire", wire)
    sent = QUANTIZERS[wire].nbytes(2_000_000)
    chunk = -(-sent // QUANTIZERS[wire].tile_nbytes // 8) * QUANTIZERS[wire].tile_nbytes
    assert (record["nbytes"], record["wire"], record["coding_seconds"]) == (sent, wire, 0.0)
    assert record["seconds"] == pytest.approx(2 * (60e-6 + 7 * chunk / 1.15e9))


def test_time_of_coding_is_priced_where_the_cluster_says_its_speed(tmp_path):
    files = [tmp_path / "slow.toml", tmp_path / "fast.toml"]
    for file, speed in zip(files, ["code_gbytes_per_s = 0.5\n", ""], strict=True):
        links = "[within]\nlatency_us = 10\ngbytes_per_s = 10\n[between]\nlatency_us = 50\ngbytes_per_s = 1\n"
        file.write_text(f"gpus_per_node = 2\nreduce_gbytes_per_s = 5\n{speed}{links}")
    nbytes = 8 * 2048 * 4 * 100
    line = f"simulate exchange direct --ranks 8 --nbytes {nbytes} --wire int8 --cluster"
    slow, fast = (told(line, file) for file in files)
    values_s = nbytes / 0.5e9
    assert slow["coding_seconds"] == pytest.approx(2 * values_s)
    added_s = 7 / 8 * values_s * (1 - 0.5 / 5)  # decoded and added, instead of added alone
    assert slow["seconds"] - fast["seconds"] == pytest.approx(2 * values_s + added_s)
    said = [invoke(line, file).stdout for file in files]
    assert "ms of it is for turning values into codes" in said[0]
    assert "quantizing is taken to need no time" in said[1]


def test_a_wire_that_saves_nothing_is_not_recommended():
    hidden = told("plan step --cluster h100 --model gpt2 --ranks 8 --compute-ms 10000")
    assert (hidden["best"]["wire"], hidden["plans"][0]["wire"]) == ("fp32", "fp32")
    assert told("plan step --cluster h100 --model llama2_7b --ranks 64")["best"]["efficiency"] > 0.5


SLOW_NETWORK = "plan step --ranks 64 --cluster ethernet-25g --model resnet50 --compute-ms 50"


@for_each("wire", QUANTIZERS)
def test_a_plan_for_a_wire_of_codes_says_to_compare(wire):
    algorithms = [(plan["wire"], plan["algorithm"]) for plan in told(SLOW_NETWORK, "--wire", wire)["plans"]]
    assert algorithms == [(wire, "Direct(within=4)"), (wire, "Direct()")]  # a node has one card
    output = invoke(SLOW_NETWORK, "--wire", wire).stdout
    assert {plan["wire"] for plan in told(SLOW_NETWORK)["plans"]} == {"fp32", "bf16"}, "no codes unless asked"
    named = f"commrt.{wire.title()}()"
    assert pasted(named) == QUANTIZERS[wire]
    assert f"wire={named}, bucket_cap_mb=" in output
    assert "compare the accuracy with fp32" in output
    assert f"MB of {wire}, all at once: " in output


def test_a_plan_of_a_buffer_takes_codes_too():
    record = told("plan exchange --ranks 8 --cluster ethernet-10g --nbytes 102.2e6 --wire int8")
    call = "commrt.attach(model, optimizer, commrt.Direct(), wire=commrt.Int8())"
    assert [plan["python"] for plan in record["plans"]] == [call]
    assert record["reason"] == "Direct(): no other schedule carries int8 for ethernet-10g"
    assert record["best"]["exchange_seconds"] == pytest.approx(39.3e-3, rel=0.01)


SETTING = "--ranks 8 --cluster ethernet-10g --model resnet50"
LOCAL = f"simulate local {SETTING} --compute-ms"


def step_ms(record):
    return {each["delay"]: 1e3 * each["step_seconds"] for each in record["delays"]}


@for_each(
    ("options", "hiding_delay", "expected_ms"),
    [
        ("100", 2, {0: 100 + 156 / 16, 1: 100 + 56 / 16, 2: 100, 4: 100, 8: 100, 16: 100}),
        ("20 --fragments 4", 2, {0: 20 + 156 / 16, 1: 20 + 76 / 16, 2: 20, 4: 20, 8: 20, 16: 20}),
        ("5 --fragments 4", None, {0: 14.75, 1: 5 + 136 / 16, 2: 12.25, **dict.fromkeys([4, 8, 16], 9.75)}),
    ],
)
def test_a_delay_hides_the_exchange_of_156_ms_once_per_period_or_of_each_fragment(options, hiding_delay, expected_ms):
    record = told(f"{LOCAL} {options}")
    assert step_ms(record) == pytest.approx(expected_ms, abs=0.1)
    assert record["hiding_delay"] == hiding_delay


def test_local_sgd_in_each_step_is_synchronous_training_without_overlap():
    synchronous = told(f"simulate step torus2d {SETTING} --compute-ms 100")
    after, under = synchronous["exchanges"]
    record = told(f"{LOCAL} 100 --period 1")
    assert step_ms(record)[0] == pytest.approx(1e3 * after["step_seconds"])
    assert record["synchronous"]["step_seconds"] == under["step_seconds"]
    assert record["seconds"] == synchronous["seconds"]


def test_the_delay_that_was_asked_for_is_a_row_and_codes_travel_by_direct():
    record = told(f"{LOCAL} 100 --wire int4 --period 10 --delay 3")
    assert list(step_ms(record)) == [0, 1, 2, 3, 4, 8, 10]
    assert record["seconds"] == told(f"simulate step direct {SETTING} --compute-ms 100 --wire int4")["seconds"]


def test_the_table_of_local_sgd_says_which_delay_hides_the_exchange():
    shown = invoke(f"{LOCAL} 100 --delay 2").output
    assert re.search(r"│ 2 +│ +100\.00 │ +0\.00 │ +100\.0% │", shown)
    assert "102.2 MB in 156.045 ms once per period" in shown
    assert "smallest delay that hides the exchange: 2" in shown
    assert "none within the period" in invoke(f"{LOCAL} 5").output


def test_where_much_of_the_best_step_is_exposed_the_plan_names_local_sgd_after_it():
    line = f"plan step {SETTING} --compute-ms 100 --wire fp32"
    record = told(line)
    local = record["local_sgd"]
    assert (local["period"], local["delay"], local["step_seconds"]) == (16, 2, 0.1)
    algorithm = pasted(local["python"])
    assert (algorithm.period, algorithm.delay) == (16, 2)
    assert "LocalSGD" not in str(record["plans"])
    *_, advice, sentence, _ = invoke(line).output.splitlines()
    assert advice == record["best"]["python"]
    assert sentence.startswith(f"{local['python']} would hide the exchange, with steps of 100.00 ms; weights are then ")
    assert sentence.endswith("up to 16 steps apart and averages 2 steps late, so try the accuracy on your own model")


@for_each(("wire", "travels"), [("bf16", torch.bfloat16), ("int8", commrt.Int8())])
def test_the_plan_names_local_sgd_with_its_wire(wire, travels):
    local = told(f"plan step {SETTING} --compute-ms 20 --wire {wire}")["local_sgd"]
    assert pasted(local["python"]).wire == travels


@for_each(
    ("line", "found"),
    [
        (f"plan step {SETTING} --compute-ms 1", (256, 156)),
        (f"plan step {SETTING} --compute-ms 0.1", None),  # no period up to 512 steps hides it
        (f"plan step {SETTING} --compute-ms 1000", None),  # most is hidden
        (f"plan backups {SETTING} --compute-ms 100 --backups 1 --law slow --steps 100", None),
    ],
)
def test_the_plan_names_local_sgd_only_where_it_helps_with_the_period_that_hiding_needs(line, found):
    local = told(line, "--wire", "fp32")["local_sgd"]
    assert found == (None if local is None else (local["period"], local["delay"]))
