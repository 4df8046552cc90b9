# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate`` and ``commrt plan`` of exchanges, as a user calls them."""

from __future__ import annotations

import re
import time
from functools import cache
from itertools import product

import pytest
import torch
from cases import for_each
from commands import invoke, refused, told

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.pricing.cluster import builtin_clusters
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.tools.commands.options import Wire
from commrt.tools.planning.planner import PYTHON_WIRES, all_reduce_candidates, coded_candidates, python_call, short_name
from commrt.tools.planning.wires import ITEMS, QUANTIZERS

BUFFER = ("--nbytes", "51.1e6")


def test_simulate_says_what_an_exchange_takes_and_what_no_schedule_can_beat():
    begin_s = time.perf_counter()
    record = told("simulate", "exchange", "torus2d", "--ranks", 4096, "--cluster", "abci", *BUFFER)
    assert time.perf_counter() - begin_s < 10.0  # 0.2 s where nothing else runs
    assert record["seconds"] == pytest.approx(7.9e-3, rel=0.01)
    assert record["steps"] == 252
    assert 1.5 < record["seconds"] / record["lower_bound_seconds"] == record["of_optimal"] < 1.6


@for_each(("algorithm", "cluster"), product([*ALGORITHMS, "gossip"], builtin_clusters()))
def test_every_algorithm_has_a_price_on_every_shipped_cluster(algorithm, cluster):
    record = told("simulate", "exchange", algorithm, "--ranks", 32, "--cluster", cluster, *BUFFER)
    assert record["seconds"] >= record["lower_bound_seconds"] > 0


def test_a_training_step_is_told_with_the_exchange_after_it_and_under_it():
    record = told(
        "simulate", "step", "torus2d", "--ranks", 1088, "--grid", "32x34", "--model", "resnet50", "--wire", "fp16"
    )
    after, under = record["exchanges"]
    assert record["nbytes"] == 2 * 25_557_032
    assert after["efficiency"] == pytest.approx(0.88, abs=0.005)
    assert 0 <= under["exposed_seconds"] < after["exposed_seconds"]
    assert record["images_per_second"] == pytest.approx(641.25 * 1088 * under["efficiency"])


def test_gossip_is_told_with_its_weights_after_the_step_and_under_the_next():
    record = told("simulate", "step", "gossip", "--ranks", 128, "--cluster", "ethernet-10g", "--model", "25.6e6",
                  "--compute-ms", 160, "--jitter", 0.1)  # fmt: skip
    after, under, late = record["exchanges"]
    assert after["step_seconds"] == pytest.approx(0.16 + record["seconds"])
    assert under["step_seconds"] == pytest.approx(0.16 * 2 / 3 + max(0.16 / 3, record["seconds"]))
    assert late["efficiency"] == 1.0
    assert record["efficiency_with_jitter"] < after["efficiency"] < record["efficiency_one_step_late"]


def test_jitter_makes_an_all_reduce_wait_and_the_same_seed_gives_the_same():
    common = (
        "simulate",
        "step",
        "halving_doubling",
        "--ranks",
        32,
        "--model",
        "1e6",
        "--compute-ms",
        100,
        "--jitter",
        0.1,
    )
    first, again, other = (told(*common, "--seed", seed)["efficiency_with_jitter"] for seed in (1, 1, 2))
    assert first == again != other
    assert 0.75 < first < 0.9


@for_each(
    ("args", "says"),
    [
        (["step", "ring", "--model", "1e6"], "how long a step of 1,000,000 parameters computes on abci is not known"),
        (["step", "ring", "--model", "resnet50", "--batch", 4, "--compute-ms", 5], "both say how long a step computes"),
        (
            ["step", "ring", "--model", "vgg"],
            "--model vgg: give resnet50, vgg_a, overfeat_fast, cd_dnn, transformer:",
        ),
        (["exchange", "ring", "--ranks", 9000, *BUFFER], "abci has 4352 GPUs"),
        (["exchange", "ring", "--cluster", "mars", *BUFFER], "no cluster is called 'mars'"),
        (["exchange", "torus2d", "--ranks", 12, "--grid", "5x2", *BUFFER], "a grid of 5 x 2 does not fit 12 ranks"),
        (["exchange", "ring", "--grid", "3x4", *BUFFER], "--grid and --both-ways are for torus2d"),
        (["exchange", "star", *BUFFER], "no algorithm is called 'star'"),
        (["exchange", "local", *BUFFER], "steps of local are simulated by another command: commrt simulate local"),
        (["step", "backup", "--model", "resnet50"], "by another command: commrt simulate backups"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(args, says):
    assert says in refused("simulate", *args)


def test_on_abci_the_plan_is_a_ring_for_few_gpus_and_a_torus_for_many():
    best = {
        ranks: told("plan", "exchange", "--ranks", ranks, *BUFFER)["best"]["algorithm"] for ranks in (8, 32, 64, 256)
    }
    assert best == {8: "Ring()", 32: "Ring()", 64: "Torus2D(grid=(32, 2))", 256: "Torus2D(grid=(32, 8))"}


def test_of_square_grids_the_torus_overtakes_the_ring_between_64_and_256_gpus():
    for ranks, square, is_better in ((64, "Torus2D(grid=(8, 8))", False), (256, "Torus2D(grid=(16, 16))", True)):
        seconds = {
            plan["algorithm"]: plan["exchange_seconds"]
            for plan in told("plan", "exchange", "--ranks", ranks, *BUFFER)["plans"]
        }
        assert (seconds[square] < seconds["Ring()"]) == is_better


@cache
def with_nvlink(ranks):
    return [
        plan["algorithm"]
        for plan in told("plan", "exchange", "--ranks", ranks, "--cluster", "abci-nvlink", *BUFFER)["plans"]
    ]


def test_with_nvlink_rows_inside_a_node_are_the_best_of_a_torus_for_few_nodes_only():
    best = {ranks: next(plan for plan in with_nvlink(ranks) if "Torus2D" in plan) for ranks in (16, 1024)}
    assert best == {16: "Torus2D(grid=(4, 4))", 1024: "Torus2D(grid=(32, 32))"}


def test_with_nvlink_halves_for_the_neighbour_first_are_ahead_of_every_torus():
    plans = [plan for plan in with_nvlink(1024) if plan.startswith(("HalvingDoubling", "Torus2D"))]
    assert plans[0] == "HalvingDoubling()"
    assert len(plans) > 1


def test_with_nvlink_a_node_that_sums_directly_and_halves_between_nodes_are_the_best_of_all():
    assert with_nvlink(1024)[0] == "Direct(within=4, between=HalvingDoubling())"


def test_where_latency_is_all_halving_and_doubling_is_the_plan():
    assert told("plan", "exchange", "--ranks", 64, "--cluster", "ethernet-10g", "--nbytes", 1000)["best"][
        "algorithm"
    ] == ("HalvingDoubling()")


def test_a_plan_of_a_step_is_a_line_of_python_that_builds_it():
    record = told("plan", "step", "--ranks", 64, "--model", "resnet50", "--wire", "bf16")
    assert record["proven"]
    assert {plan["wire"] for plan in record["plans"]} == {"bf16"}
    call = record["best"]["python"].removeprefix("commrt.attach(model, optimizer, ")
    assert call.endswith(f", wire=torch.bfloat16, bucket_cap_mb={record['best']['bucket_cap_mb']:g})")
    algorithm = eval(call.split(", wire=")[0], {"commrt": commrt})  # noqa: S307  # what a user would paste
    algorithm.schedule(0, 64)
    assert record["best"]["step_seconds"] == min(plan["step_seconds"] for plan in record["plans"])


STEP = ("--ranks", 24, "--model", "resnet50", "--wire", "bf16")


def test_a_plan_for_ranks_that_are_slow_at_times_leaves_some_of_them_behind():
    record = told("plan", "backups", *STEP, "--steps", 500, "--backups", "auto", "--law", "slow")
    best = {number: next(plan for plan in record["plans"] if plan["backups"] == number) for number in (0, 1)}
    assert record["best"]["backups"] > 1
    assert record["best"]["updates"] == pytest.approx(24 / (24 - record["best"]["backups"]))
    to_the_goal = [plan["step_seconds"] * plan["updates"] for plan in (record["best"], best[1], best[0])]
    assert to_the_goal == sorted(to_the_goal)
    call = record["best"]["python"].removeprefix("commrt.attach(model, optimizer, ")
    algorithm = eval(call.split(", wire=")[0], {"commrt": commrt})  # noqa: S307  # what a user would paste
    algorithm.schedule(0, 24)


def test_where_nobody_is_slow_backups_only_cost_what_they_do_not_hide():
    plain = told("plan", "step", *STEP)
    backed = told("plan", "backups", *STEP, "--steps", 500, "--backups", "3", "--law", "slow", "--set", "chance=0")
    assert backed["best"] == plain["best"]
    other = next(plan for plan in backed["plans"] if plan["backups"])
    compute_s = backed["best"]["step_seconds"] * backed["best"]["efficiency"]
    in_two_buckets_s = other["exchange_seconds"] + other["latency_seconds"]  # the first is always small
    assert other["step_seconds"] == pytest.approx(compute_s + in_two_buckets_s)


@for_each("ranks", [*range(2, 10), 12, 13, 16, 17, 36])
def test_every_plan_verifies(ranks):
    for algorithm in all_reduce_candidates(ranks):
        schedule = algorithm.schedule(0, ranks)
        prove(schedule, all_reduce(ranks, schedule.chunks))


def test_the_table_shows_the_best_first_and_says_why():
    output = invoke("plan", "exchange", "--ranks", 256, *BUFFER).stdout
    lines = [line for line in output.splitlines() if line.startswith("│")]
    assert "Torus2D(grid=(32, 8))" in lines[0]
    assert "Torus2D(grid=(32, 8)) against Ring(), all at once: 4.34 ms less for latencies and" in output
    assert "commrt.attach(model, optimizer, commrt.Torus2D(grid=(32, 8)))" in output


@for_each(
    ("args", "says"),
    [
        (["simulate", "torus2d", *BUFFER], "No such command 'torus2d'"),
        (["simulate", "exchange", "ring"], "Missing option '--nbytes'"),
        (["simulate", "exchange", "ring", *BUFFER, "--model", "resnet50"], "No such option: --model"),
        (["simulate", "exchange", "ring", *BUFFER, "--batch", 4], "No such option: --batch"),
        (["simulate", "exchange", "ring", *BUFFER, "--times", "run.json"], "No such option: --times"),
        (["simulate", "step", "ring"], "Missing option '--model'"),
        (["simulate", "step", "ring", "--model", "resnet50", "--delay", 1], "No such option: --delay"),
        (["simulate", "backups", "--cluster", "abci"], "No such option: --cluster"),
        (["simulate", "backups", "--fragments", 2], "No such option: --fragments"),
        (["plan", *BUFFER], "No such option: --nbytes"),
        (["plan", "backups", "--backups", "auto"], "Missing option '--model'"),
        (["plan", "exchange", *BUFFER, "--law", "slow"], "No such option: --law"),
        (["plan", "step", "--model", "resnet50", "--backups", "auto"], "No such option: --backups"),
        (["plan", "collective", "all_reduce", "--model", "resnet50"], "No such option: --model"),
    ],
)
def test_a_command_takes_only_the_options_that_it_uses(args, says):
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


SLOW_CODER = """
gpus_per_node = 2
reduce_gbytes_per_s = 5
code_gbytes_per_s = 0.5
[within]
latency_us = 10
gbytes_per_s = 10
[between]
latency_us = 50
gbytes_per_s = 1
"""


@for_each("wire", QUANTIZERS)
def test_codes_cost_their_bytes_and_scales(wire):
    record = told(
        "simulate", "exchange", "direct", "--ranks", 8, "--cluster", "ethernet-10g", "--nbytes", 8e6, "--wire", wire
    )
    sent = QUANTIZERS[wire].nbytes(2_000_000)
    chunk = -(-sent // QUANTIZERS[wire].tile_nbytes // 8) * QUANTIZERS[wire].tile_nbytes
    assert (record["nbytes"], record["wire"], record["coding_seconds"]) == (sent, wire, 0.0)
    assert record["seconds"] == pytest.approx(2 * (60e-6 + 7 * chunk / 1.15e9))


def test_time_of_coding_is_priced_where_the_cluster_says_its_speed(tmp_path):
    (tmp_path / "slow.toml").write_text(SLOW_CODER)
    (tmp_path / "fast.toml").write_text(SLOW_CODER.replace("code_gbytes_per_s = 0.5\n", ""))
    common = ("simulate", "exchange", "direct", "--ranks", 8, "--nbytes", 8 * 2048 * 4 * 100, "--wire", "int8")
    slow, fast = (told(*common, "--cluster", str(tmp_path / name)) for name in ("slow.toml", "fast.toml"))
    values_s = 8 * 2048 * 4 * 100 / 0.5e9
    assert slow["coding_seconds"] == pytest.approx(2 * values_s)
    added_s = 7 / 8 * values_s * (1 - 0.5 / 5)  # decoded and added, instead of added alone
    assert slow["seconds"] - fast["seconds"] == pytest.approx(2 * values_s + added_s)
    assert "quantizing is taken to need no time" in invoke(*common, "--cluster", str(tmp_path / "fast.toml")).stdout
    assert (
        "ms of it is for turning values into codes" in invoke(*common, "--cluster", str(tmp_path / "slow.toml")).stdout
    )


def test_a_step_on_a_wire_of_codes_is_coded_packed_and_exchanged(tmp_path):
    (tmp_path / "slow.toml").write_text(SLOW_CODER)
    record = told("simulate", "step", "direct", "--ranks", 8, "--within", 2, "--cluster", str(tmp_path / "slow.toml"),
                  "--model", "1e6", "--compute-ms", 100, "--wire", "int4")  # fmt: skip
    assert record["steps"] == 4
    after, under = record["exchanges"]
    assert after["step_seconds"] == pytest.approx(0.1 + record["seconds"])
    assert 0.1 < under["step_seconds"] < after["step_seconds"]


def test_small_buckets_of_codes_travel_in_whole_tiles():
    common = ("simulate", "exchange", "direct", "--ranks", 64, "--cluster", "ethernet-10g", "--wire", "int4")
    assert told(*common, "--nbytes", 4)["seconds"] == told(*common, "--nbytes", 64 * 2048 * 4)["seconds"]


SLOW_NETWORK = ("plan", "step", "--ranks", 64, "--cluster", "ethernet-25g", "--model", "resnet50", "--compute-ms", 50)


def test_a_plan_proposes_no_codes_unless_asked():
    assert {plan["wire"] for plan in told(*SLOW_NETWORK)["plans"]} == {"fp32", "bf16"}


@for_each("wire", QUANTIZERS)
def test_a_plan_for_a_wire_of_codes_says_to_compare(wire):
    asked = told(*SLOW_NETWORK, "--wire", wire)
    assert {(plan["wire"], plan["algorithm"]) for plan in asked["plans"]} == {
        (wire, "Direct()"),
        (wire, "Direct(within=4)"),
    }
    assert asked["best"]["algorithm"] == "Direct(within=4)"  # a node has one card
    output = invoke(*SLOW_NETWORK, "--wire", wire).stdout
    assert f"wire=commrt.quantization.{wire.title()}(), bucket_cap_mb=" in output
    assert "compare the accuracy with fp32" in output
    assert f"MB of {wire}, all at once: " in output
    assert eval(f"commrt.quantization.{wire.title()}()", {"commrt": commrt}) == QUANTIZERS[wire]  # noqa: S307  # what a user would paste


def test_a_plan_of_a_buffer_takes_codes_too():
    record = told(
        "plan", "exchange", "--ranks", 8, "--cluster", "ethernet-10g", "--nbytes", "102.2e6", "--wire", "int8"
    )
    assert [plan["algorithm"] for plan in record["plans"]] == ["Direct()"]
    assert (
        record["best"]["python"] == "commrt.attach(model, optimizer, commrt.Direct(), wire=commrt.quantization.Int8())"
    )
    assert record["best"]["exchange_seconds"] == pytest.approx(39.3e-3, rel=0.01)


def test_backup_workers_are_planned_with_codes_that_owe_nothing():
    step = ("plan", "backups", "--ranks", 8, "--cluster", "ethernet-10g", "--model", "resnet50", "--compute-ms", 50)
    backed = (*step, "--backups", 1, "--law", "slow", "--steps", 200)
    assert (
        "commrt.BackupWorkers(1, commrt.Direct()), wire=commrt.quantization.Int8()"
        in invoke(*backed, "--wire", "int8").stdout
    )
    assert "such as int8" in refused(*backed, "--wire", "int4")


@for_each(
    ("args", "says"),
    [
        (
            ["simulate", "exchange", "ring", "--ranks", 8],
            "cannot carry ring: codes do not add.*direct on the command line",
        ),
        (["simulate", "exchange", "ring", "--ranks", 60_000, "--cluster", "ethernet-10g"], "cannot carry ring"),
        (["simulate", "exchange", "torus2d", "--ranks", 16], "cannot carry torus 4x4"),
        (["simulate", "exchange", "halving_doubling", "--ranks", 16], "codes do not add"),
        (["simulate", "exchange", "gossip", "--ranks", 8], "with gossip: .* or Direct"),
        (
            ["plan", "exchange", "--ranks", 4097, "--cluster", "ethernet-10g"],
            "no schedule carries codes between 4,097 ranks",
        ),
    ],
)
def test_schedules_that_cannot_carry_codes_are_refused_by_name(args, says):
    assert re.search(says, refused(*args, *BUFFER, "--wire", "int4"))


def test_every_plan_for_codes_verifies():
    for ranks in (*range(2, 10), 12, 13, 16, 17, 31, 32, 33, 64):
        for per_node in (1, 2, 4, 8):
            for algorithm in coded_candidates(ranks, per_node):
                schedule = algorithm.schedule(0, ranks)
                prove(schedule, all_reduce(ranks, schedule.chunks))


LOCAL = ("simulate", "local", "--ranks", 8, "--cluster", "ethernet-10g", "--model", "resnet50", "--compute-ms", 100)


def step_ms(record):
    return {each["delay"]: 1e3 * each["step_seconds"] for each in record["delays"]}


def test_local_sgd_pays_for_one_exchange_per_period_and_a_delay_hides_it():
    record = told(*LOCAL)
    assert record["seconds"] == pytest.approx(0.156, abs=0.0005)
    assert list(step_ms(record)) == [0, 1, 2, 4, 8, 16]
    assert step_ms(record)[0] == pytest.approx(100 + 156 / 16, abs=0.05)
    assert step_ms(record)[1] == pytest.approx(100 + 56 / 16, abs=0.05)
    assert step_ms(record)[2] == 100
    assert record["hiding_delay"] == 2
    assert record["synchronous"]["exposed_seconds"] > 0.09


def test_local_sgd_in_each_step_is_synchronous_training_without_overlap():
    synchronous = told("simulate", "step", "torus2d", *LOCAL[2:])
    after, under = synchronous["exchanges"]
    record = told(*LOCAL, "--period", 1)
    assert step_ms(record)[0] == pytest.approx(1e3 * after["step_seconds"])
    assert record["synchronous"]["step_seconds"] == under["step_seconds"]
    assert record["seconds"] == synchronous["seconds"]


def test_each_fragment_is_hidden_by_the_delay_and_all_of_them_by_the_period():
    whole, parts = told(*LOCAL, "--compute-ms", 20), told(*LOCAL, "--compute-ms", 20, "--fragments", 4)
    assert (whole["hiding_delay"], parts["hiding_delay"]) == (8, 2)
    assert step_ms(parts)[0] == pytest.approx(step_ms(whole)[0], rel=0.01)
    assert step_ms(parts)[1] == pytest.approx(20 + (156 - 4 * 20) / 16, rel=0.01)
    slow = told(*LOCAL, "--compute-ms", 5, "--fragments", 4)
    assert slow["hiding_delay"] is None
    assert step_ms(slow)[4] == step_ms(slow)[16] == pytest.approx(5 + (156 - 16 * 5) / 16, rel=0.01)


def test_the_delay_that_was_asked_for_is_a_row_and_codes_travel_by_direct():
    record = told(*LOCAL, "--wire", "int4", "--period", 10, "--delay", 3)
    assert list(step_ms(record)) == [0, 1, 2, 3, 4, 8, 10]
    assert record["seconds"] == told("simulate", "step", "direct", *LOCAL[2:], "--wire", "int4")["seconds"]


def test_the_table_of_local_sgd_says_which_delay_hides_the_exchange():
    shown = invoke(*LOCAL, "--delay", 2).output
    assert re.search(r"│ 2 +│ +100\.00 │ +0\.00 │ +100\.0% │", shown)
    assert "102.2 MB in 156.045 ms once per period" in shown
    assert "smallest delay that hides the exchange: 2" in shown
    assert "none within the period" in invoke(*LOCAL, "--compute-ms", 5).output


@for_each(
    ("args", "says"),
    [
        (["simulate", "local", *BUFFER], "No such option: --nbytes"),
        ([*LOCAL, "--jitter", 0.1], "No such option: --jitter"),
        ([*LOCAL, "--steps", 9], "No such option: --steps"),
        ([*LOCAL, "--grid", "4x2"], "No such option: --grid"),
    ],
)
def test_what_is_not_of_local_sgd_is_no_option_of_it(args, says):
    assert says in invoke(*args).stderr


def test_a_delay_that_is_longer_than_the_period_is_refused_in_words():
    assert "delay=5 is longer than period=4" in refused(*LOCAL, "--period", 4, "--delay", 5)


SLOW = ("plan", "step", *LOCAL[2:], "--wire", "fp32")


def test_where_much_of_the_best_step_is_exposed_the_plan_names_local_sgd_after_it():
    record = told(*SLOW)
    local = record["local_sgd"]
    assert (local["period"], local["delay"], local["step_seconds"]) == (16, 2, 0.1)
    algorithm = eval(local["python"], {"commrt": commrt})  # noqa: S307  # what a user would paste
    assert (algorithm.period, algorithm.delay) == (16, 2)
    assert "LocalSGD" not in str(record["plans"])
    *_, advice, sentence, _ = invoke(*SLOW).output.splitlines()
    assert advice == record["best"]["python"]
    assert sentence.startswith(f"{local['python']} would hide the exchange, with steps of 100.00 ms; weights are then ")
    assert sentence.endswith("up to 16 steps apart and averages 2 steps late, so try the accuracy on your own model")


@pytest.mark.parametrize(("wire", "travels"), [("bf16", torch.bfloat16), ("int8", commrt.quantization.Int8())])
def test_the_plan_names_local_sgd_with_its_wire(wire, travels):
    python = told(*SLOW[:-1], wire, "--compute-ms", 20)["local_sgd"]["python"]
    assert eval(python, {"commrt": commrt, "torch": torch}).wire == travels  # noqa: S307  # what a user would paste


def test_the_period_that_the_plan_names_is_as_long_as_hiding_needs():
    found = {ms: told(*SLOW, "--compute-ms", ms)["local_sgd"] for ms in (1, 0.1)}
    assert (found[1]["period"], found[1]["delay"]) == (256, 156)
    assert found[0.1] is None  # no period up to 512 steps does


def test_a_plan_that_hides_most_or_has_backups_does_not_name_local_sgd():
    assert told(*SLOW, "--compute-ms", 1000)["local_sgd"] is None
    with_backups = told("plan", "backups", *SLOW[2:], "--backups", "1", "--law", "slow", "--steps", 100)
    assert with_backups["local_sgd"] is None


def test_what_a_plan_says_in_python_makes_its_algorithm():
    for algorithm in all_reduce_candidates(8, 4):
        assert eval(python_call(short_name(algorithm)), {"commrt": commrt}) == algorithm  # noqa: S307  # a user pastes it


def test_each_wire_of_the_command_line_has_a_price_and_a_name_in_python():
    assert {wire.value for wire in Wire} == set(ITEMS) == {"fp32", *PYTHON_WIRES}
