"""Tests of plans for several hosts: the contract, the bytes and the time of the network, and the
memory of a host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model, costs_of
from megatrain.simulator.costs.several_gpus import link_share
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.search import assess
from megatrain.simulator.planner.shared_step import alone, of_all
from megatrain.simulator.schedule.arithmetic import part_elements, ways_of
from megatrain.simulator.schedule.plan import MOST_NETWORK_GB_PER_S, Placement, Plan
from megatrain.simulator.verdict.multi_gpu import check_gpus, network_cost
from megatrain.simulator.verdict.verdict import judge, summarize

H200 = HardwareSpec.load("h200")
NETWORK = H200.with_network(50.0)
Make = Callable[..., Plan]


def test_a_file_names_hosts_and_network_only_if_they_are_given(
    make_plan: Make, tmp_path: Path
) -> None:
    for hosts, rate in ((1, None), (2, None), (2, 12.5)):
        plan = make_plan("overlapped", gpus=4, hosts=hosts, accumulation=4, network_gb_per_s=rate)
        plan.save(tmp_path / "plan.toml")
        text = (tmp_path / "plan.toml").read_text()
        assert ("hosts" in text, "network" in text) == (hosts > 1, rate is not None)
        assert Plan.load(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 3}, "plan: hosts: found 3; allowed: 1 to 4, and a divisor of the 4 GPUs"),
        ({"hosts": 0}, "plan: hosts: found 0; allowed: 1 to 4"),
        ({"hosts": 5, "gpus": 5, "accumulation": 5}, "plan: hosts: found 5; allowed: 1 to 4"),
        ({"gpus": 32, "hosts": 1, "accumulation": 32}, "plan: gpus: found 32; allowed: 1 to 16"),
        ({"gpus": 64, "hosts": 2, "accumulation": 64}, "plan: gpus: found 64; allowed: 1 to 32"),
        ({"network_gb_per_s": 0.0}, "plan: network_gb_per_s: found 0.0; allowed: 0.001 to"),
        ({"network_gb_per_s": float("nan")}, "plan: network_gb_per_s: found nan"),
    ],
)
def test_hosts_and_network_out_of_range_are_refused(
    make_plan: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        make_plan("overlapped", **{"gpus": 4, "hosts": 2, "accumulation": 4, **changes})
    assert str(refused.value).startswith(message)


def test_the_number_of_hosts_changes_no_schedule(make_plan: Make) -> None:
    one, two, four = (
        policies.lower(make_plan("overlapped", gpus=4, hosts=hosts, accumulation=4))
        for hosts in (1, 2, 4)
    )
    assert one.digest == two.digest == four.digest


@pytest.mark.parametrize(("gpus", "hosts"), [(2, 2), (4, 2), (8, 2), (12, 4)])
def test_what_enters_a_host(make_plan: Make, gpus: int, hosts: int) -> None:
    """A gather is a ring, so all parts that a rank receives pass the network once. Gradients enter
    a host once for each GPU of the host.
    """
    plan = make_plan("overlapped", gpus=gpus, hosts=hosts, accumulation=gpus)
    own, schedule = gpus // hosts, policies.lower(plan)
    gather, exchange = schedule.by_id["GW1f.m0"], schedule.by_id["GX1b.m0"]
    part = 2 * part_elements(plan, "1")
    ways = {op.kind: ways_of(op.kind, op.bytes, gpus, hosts) for op in (gather, exchange)}
    assert ways["gather_weights"] == ((gpus - 1) * part, (gpus - 1) * part)
    assert ways["exchange_gradients"] == ((own - 1) * part, own * (gpus - own) * part)
    assert ways_of(gather.kind, gather.bytes, gpus, 1) == (gather.bytes, 0)
    cost = network_cost(assess(plan, costs_of(plan, NETWORK)), NETWORK)
    assert cost is not None
    expected = 0
    for op in schedule.ops:
        if op.lane == "exchange":
            parts = own * (gpus - own) if op.kind == "exchange_gradients" else gpus - 1
            expected += parts * (op.bytes // (gpus - 1))
    assert cost.received_bytes == expected
    assert cost.gb_per_s == 50


def test_links_and_network_are_busy_at_the_same_time(make_plan: Make) -> None:
    plan = make_plan("overlapped", gpus=8, hosts=2, accumulation=8, chunk_bytes=2**16)
    schedule = policies.lower(plan)
    gather, exchange = schedule.by_id["GW1f.m0"], schedule.by_id["GX1b.m0"]
    part, one_host = 2 * part_elements(plan, "1"), cost_model(H200, plan.model, plan.workload, 8)
    assert (H200.peer_gb_per_s, H200.link_latency_ns, H200.network_latency_ns) == (310, 9000, 20000)
    costs = cost_model(NETWORK, plan.model, plan.workload, 8, 2)
    expected = 9000 + 20000 + 7 * part / 50
    assert costs.duration_ns(gather) == pytest.approx(expected, abs=1)
    sums = one_host.duration_ns(exchange) - 9000 - 7 * part / 310
    # four GPUs of a host share 50 GB/s, and each receives four parts over the network
    expected = 9000 + 20000 + 4 * 4 * part / 50 + sums
    assert costs.duration_ns(exchange) == pytest.approx(expected, abs=2)
    fast = msgspec.structs.replace(
        H200, network_gb_per_s=MOST_NETWORK_GB_PER_S, network_latency_ns=0
    )
    costs = cost_model(fast, plan.model, plan.workload, 8, 2)
    assert costs.duration_ns(gather) == one_host.duration_ns(gather)
    assert costs.duration_ns(exchange) == pytest.approx(9000 + 3 * part / 310 + sums, abs=2)
    pieces = msgspec.structs.replace(exchange, elements=part_elements(plan, "1") // 2)
    slow = cost_model(NETWORK, plan.model, plan.workload, 8, 2)
    longer = slow.duration_ns(pieces) - slow.duration_ns(exchange)
    assert longer == pytest.approx(
        one_host.duration_ns(pieces) - one_host.duration_ns(exchange) + 20000, abs=2
    ), "each piece has the latency of the network"


def test_only_gpus_of_one_host_share_its_links(make_plan: Make) -> None:
    plan = make_plan("overlapped", gpus=8, accumulation=8)
    load = next(op for op in policies.lower(plan).ops if op.kind == "load_state")
    alone_ns = cost_model(H200, plan.model, plan.workload).duration_ns(load)
    for hosts, sharing in ((1, 8), (2, 4), (4, 2)):
        costs = cost_model(NETWORK, plan.model, plan.workload, 8, hosts)
        assert costs.duration_ns(load) == round(link_share(H200, sharing).slower["h2d"] * alone_ns)
    one_each = cost_model(NETWORK, plan.model, plan.workload, 4, 4)
    assert one_each.duration_ns(load) == alone_ns


def test_the_memory_of_a_host_is_that_of_its_gpus(make_plan: Make) -> None:
    plan = make_plan("overlapped", accumulation=2, host_limit_bytes=2**30)
    for hosts in (1, 2, 4):
        shared = of_all(plan, NETWORK, 4, hosts)
        assert shared.host_limit_bytes == hosts * 2**28
        assert shared.network_gb_per_s == (50 if hosts > 1 else None)
        again = alone(shared, NETWORK)
        assert (again.host_limit_bytes, again.gpus, again.hosts) == (2**30, 1, 1)
        assert again.network_gb_per_s is None
    own = msgspec.structs.replace(NETWORK, link="NVLink-C2C")
    assert of_all(plan, own, 4, 2).host_limit_bytes == 2**30


def test_the_network_of_a_plan_comes_before_that_of_the_machine(make_plan: Make) -> None:
    plan = make_plan("overlapped", gpus=4, hosts=2, accumulation=4)
    op = policies.lower(plan).by_id["GW1f.m0"]
    slower = msgspec.structs.replace(plan, network_gb_per_s=5.0)
    usual, slow = (costs_of(each, NETWORK).duration_ns(op) for each in (plan, slower))
    part = 2 * part_elements(plan, "1")
    assert slow - usual == pytest.approx(3 * part / 5 - 3 * part / 50, abs=1)


def test_hosts_without_a_network_are_refused(make_plan: Make) -> None:
    plan = make_plan("overlapped", gpus=4, hosts=2, accumulation=4)
    with pytest.raises(
        UserError, match=r"network_gb_per_s: found no rate, and 2 hosts; .*--network"
    ):
        costs_of(plan, H200)
    outside = msgspec.structs.replace(NETWORK, cost_model="mine.py")
    with pytest.raises(UserError, match=r"cost_model mine\.py: found a cost model from outside"):
        costs_of(plan, outside)
    with pytest.raises(UserError, match="network_gb_per_s: found 0"):
        H200.with_network(0.0)
    assert H200.with_network(None) is H200


@pytest.mark.parametrize(
    ("gpus", "hosts", "machine", "message"),
    [
        (1, 2, NETWORK, "--hosts: found 2 with --gpus 1"),
        (8, 3, NETWORK, "--hosts: found 3 with --gpus 8"),
        (10, 5, NETWORK, "--hosts: found 5 with --gpus 10; allowed: 1 to 4,"),
        (34, 2, NETWORK, "--gpus: found 34; allowed: 2 to 32, on 2 hosts"),
        (17, 1, NETWORK, "--gpus: found 17; allowed: 1 to 16, on one host"),
        (8, 2, H200, "--network: found none, with --hosts 2; allowed: the GB/s"),
    ],
)
def test_impossible_numbers_of_hosts_are_refused(
    gpus: int, hosts: int, machine: HardwareSpec, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_gpus(gpus, machine, hosts)
    assert str(refused.value).startswith(message)
    check_gpus(8, NETWORK, 2)


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 2), (4, 2), (8, 4)]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2**16]),
    st.sampled_from([0.1, 10.0, 1000.0]),
    st.sampled_from(["", "all"]),
)
def test_a_faster_network_is_never_slower_and_no_step_is_below_its_bound(
    make_plan: Make, layout: tuple[int, int], group: int, exchanged: int, rate: float, placed: str
) -> None:
    gpus, hosts = layout
    plan = make_plan(
        "overlapped",
        gpus=gpus,
        hosts=hosts,
        sum_group=group,
        micro_batch_group=group,
        accumulation=2 * gpus * group,
        exchange_bytes=exchanged,
        placement=Placement(weights=placed, gradients=placed),
        network_gb_per_s=rate,
    )
    schedule, costs = policies.lower(plan), costs_of(plan, H200)
    time = makespan_ns(schedule, costs)
    assert LowerBound(plan, costs).step_ns(plan) <= time
    faster = costs_of(msgspec.structs.replace(plan, network_gb_per_s=10 * rate), H200)
    for op in schedule.ops:
        assert faster.duration_ns(op) <= costs.duration_ns(op)


def test_a_verdict_says_what_the_network_costs(make_plan: Make) -> None:
    plan = make_plan("overlapped", gpus=4, hosts=2, accumulation=4, network_gb_per_s=0.01)
    choice = assess(plan, costs_of(plan, H200))
    verdict = summarize(choice, H200)
    assert (verdict.gpus, verdict.hosts) == (4, 2)
    assert verdict.network is not None
    unlimited = msgspec.structs.replace(plan, network_gb_per_s=MOST_NETWORK_GB_PER_S)
    without = assess(unlimited, costs_of(unlimited, H200)).step_seconds
    assert verdict.network.seconds == pytest.approx(choice.step_seconds - without)
    assert verdict.network.seconds > 0.9 * verdict.network.received_bytes / 0.01e9
    one_host = msgspec.structs.replace(plan, hosts=1)
    assert summarize(assess(one_host, costs_of(one_host, H200)), H200).network is None


def test_a_step_that_hosts_cannot_share_is_refused() -> None:
    work = Workload(batch=1, sequence=512, clipping="layer")
    with pytest.raises(UserError, match="--hosts: found 2, and a step that GPUs cannot share"):
        judge(ModelSpec.load("qwen2.5-0.5b"), NETWORK, work, gpus=4, hosts=2, advise=False)
