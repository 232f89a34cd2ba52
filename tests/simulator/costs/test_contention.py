"""Tests of lanes that slow each other.

Simulated rates are compared with those measured on H200 machines. Properties are tested on any
machine.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_table import table

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.costs.contention import PARTS, ContentionModel, Demand, link_gb_per_s
from megatrain.simulator.costs.protocol import ContendedCosts, CostModel
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.cost_table import CostTable, HostMemorySpec, KernelInterleaving
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op, Schedule

COPY, PARAMETERS = 2**28, 10**8


def machine_b() -> CostModel:
    """Returns costs of an H200 with 64 cores and a CPUAdam of 10.0e9 parameters/s.

    Its host DRAM is fitted to the rates in h200.md.
    """
    hardware = msgspec.structs.replace(
        HardwareSpec.load("h200"), cpu_update_per_s=10e9, host_memory=HostMemorySpec(gb_per_s=220.0)
    )
    return cost_model(hardware, ModelSpec.load("qwen2.5-7b"), Workload(batch=1, sequence=1024))


def reached(*lanes: str) -> dict[str, float]:
    """Returns the simulated rate of each of `lanes` while all of them are busy.

    The unit is 10^9 bytes (copies) or parameters (cpu) a second.
    """
    ops = []
    for lane, kind in (("h2d", "W"), ("d2h", "G"), ("cpu", "UC")):
        if lane in lanes:
            size = {"parameters": PARAMETERS} if lane == "cpu" else {"bytes": COPY}
            ops += [Op(id=f"{kind}{index}", lane=lane, **size) for index in range(40)]
    schedule = Schedule(policy="test", buffers=(), ops=tuple(ops))
    timeline = simulate(schedule, machine_b())
    end = min(max(span.end_ns for span in timeline.spans if span.lane == lane) for lane in lanes)
    done = {}
    for lane in lanes:
        size = PARAMETERS if lane == "cpu" else COPY
        spans = [span for span in timeline.spans if span.lane == lane]
        done[lane] = (
            sum(
                size * max(min(span.end_ns, end) - span.start_ns, 0) / span.duration_ns
                for span in spans
            )
            / end
        )
    return done


@pytest.mark.parametrize(
    ("lanes", "measured"),
    [
        (("cpu",), {"cpu": 10.0}),
        (("h2d",), {"h2d": 55.4}),
        (("d2h",), {"d2h": 55.3}),
        (("h2d", "d2h"), {"h2d": 50.3, "d2h": 50.3}),
        (("h2d", "cpu"), {"h2d": 25.0, "cpu": 7.7}),
        (("d2h", "cpu"), {"d2h": 23.0, "cpu": 7.5}),
        (("h2d", "d2h", "cpu"), {"h2d": 20.0, "d2h": 20.0, "cpu": 6.4}),
    ],
    ids=str,
)
def test_the_engine_gives_the_rates_measured_on_machine_b(
    lanes: tuple[str, ...], measured: dict[str, float]
) -> None:
    """The simulated rates are those measured in h200.md, 2026-11-21.

    With all three lanes busy, 18 to 22 GB/s were measured in each direction. The test uses the
    middle.
    """
    assert reached(*lanes) == {
        lane: pytest.approx(rate, rel=0.1) for lane, rate in measured.items()
    }


def test_several_gpus_share_the_host() -> None:
    """GPUs share the 175 GB/s of a host.

    Measured in h200.md: 4 GPUs get 43 GB/s each in one direction and 21.7 in both, 2 GPUs get 55
    and 38.9.
    """
    assert link_gb_per_s(1, 55.4, 50.3, 175.0) == (55.4, 50.3)
    assert link_gb_per_s(4, 55.4, 50.3, 175.0) == (
        pytest.approx(43, rel=0.05),
        pytest.approx(21.7, rel=0.05),
    )
    assert link_gb_per_s(2, 55.4, 50.3, 175.0) == (
        pytest.approx(55, rel=0.05),
        pytest.approx(38.9, rel=0.15),
    )


# ---- compute and update


@pytest.mark.parametrize(
    ("alone_ms", "next_to_ms", "kept"),
    [(0.11, 1.673, 0.980), (0.235, 1.996, 0.879), (0.922, 2.644, 0.683), (1.483, 3.211, 0.568)],
)
def test_compute_and_update_take_turns(alone_ms: float, next_to_ms: float, kept: float) -> None:
    """An update during a forward pass slows both as measured on an H200, 2026-11-21.

    The update is AdamW, and the forward pass is a layer of a 7B model.
    """
    sharing = ContentionModel(
        {"update": {"compute": 0.1}, "compute": {"update": 0.9}},
        None,
        (),
        KernelInterleaving(wait_ns=1_700_000, backward_loss=0.5),
    )
    forward, update = (
        sharing.demand("compute", 0, 1000, "forward"),
        sharing.demand("update", 0, round(alone_ms * 1e6), "update"),
    )
    backward = sharing.demand("compute", 0, 1000, "backward")
    assert forward is not None
    assert update is not None
    assert backward is not None
    next_to_update, updating = sharing.rates((forward, update))
    assert alone_ms * PARTS / updating == pytest.approx(next_to_ms, rel=0.12)
    assert next_to_update / PARTS == pytest.approx(kept, abs=0.05)
    assert sharing.rates((backward, update))[0] == pytest.approx(
        PARTS - (PARTS - next_to_update) / 2, abs=1
    )
    assert sharing.rates((forward,)) == sharing.rates((update,)) == (PARTS,)


# ---- kernels of other lanes and the matrix products beside them

TURNS = KernelInterleaving(wait_ns=1_700_000, backward_loss=0.4)


@pytest.mark.parametrize(
    ("lane", "kind", "alone_ms", "kernels", "product_ms", "beside_ms"),
    [
        ("update", "norm", 2.0, 1, 31.0, 33.0),
        ("update", "clip", 0.1, 1, 31.0, 31.1),
        ("update", "update", 2.0, 1, 31.0, 14.4),
        ("exchange", "exchange_gradients", 1.3, 5, 6.3, 17.05),
        ("exchange", "exchange_gradients", 1.9, 24, 6.6, 81.1),
        ("update", "norm", 2.0, 1, 1.0, 3.0),
        ("update", "update", 0.12, 1, 2.66, 1.184),
        ("update", "update", 2.0, 1, 0.0, 3.7),
        ("exchange", "exchange_gradients", 1.3, 5, 0.1, 9.8),
    ],
)
def test_a_kernel_waits_for_the_matrix_product_under_way(
    lane: str, kind: str, alone_ms: float, kernels: int, product_ms: float, beside_ms: float
) -> None:
    """On H100s, norms and clipping factors took 32 and 31 ms beside products of 31 ms
    (experiments/results/h100-x4-large-models). On four H200, exchanges of 5 kernels took 17.6 ms
    beside products of 6.3 ms, and those of 24 kernels 76 ms beside products of 6.6 ms
    (experiments/results/h200-x4). On one H200, updates of a chunk took 0.86 ms in the mean beside
    products of 2.66 ms (experiments/results/h200-16-cores-link). If the time of products is
    unknown, a kernel waits as long as the machine says. A collective waits at least as long.
    """
    sharing = ContentionModel({}, None, (), TURNS, product_ns=product_ms * 1e6)
    compute = sharing.demand("compute", 0, 1000, "backward")
    kernel = sharing.demand(lane, 0, round(alone_ms * 1e6), kind, kernels=kernels)
    assert compute is not None
    assert kernel is not None
    computing, waiting = sharing.rates((compute, kernel))
    assert alone_ms * PARTS / waiting == pytest.approx(beside_ms, rel=1e-3)
    lost = 0.08 * PARTS if lane == "exchange" else 0.4 * waiting
    assert computing == pytest.approx(PARTS - lost, abs=1)
    assert sharing.rates((kernel,)) == (PARTS,)


@pytest.mark.parametrize("kind", ["gather_weights", "exchange_gradients"])
@pytest.mark.parametrize("compute", ["forward", "recompute", "backward"])
def test_a_collective_takes_a_fixed_share_of_compute(kind: str, compute: str) -> None:
    """On four H100s, backward passes of 32B were 6.5 % slower while gradients were exchanged,
    recomputes 11 %, and forward passes of 7B 5 % while weights were gathered. The share does not
    depend on how long the collective waits.
    """
    sharing = ContentionModel({}, None, (), TURNS, product_ns=6e6)
    layer = sharing.demand("compute", 0, 1000, compute)
    assert layer is not None
    for kernels in (1, 28):
        collective = sharing.demand("exchange", 0, 2_400_000, kind, kernels=kernels)
        assert collective is not None
        assert sharing.rates((layer, collective))[0] == pytest.approx(0.92 * PARTS, abs=1)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(
    ("lane", "other", "speed"),
    [("update", "update", 1.0), ("exchange", "exchange_gradients", 0.92)],
)
def test_kernels_wait_for_compute_that_loses_nothing(
    lane: str, other: str, speed: float, kind: str
) -> None:
    """A calibration may measure a loss of 0, because updates beside a backward pass vary."""
    turns = KernelInterleaving(wait_ns=2_000_000, forward_loss=0.0, backward_loss=0.0)
    sharing = ContentionModel({}, None, (), turns)
    compute, kernel = (
        sharing.demand("compute", 0, 1000, kind),
        sharing.demand(lane, 0, 2_000_000, other),
    )
    assert compute is not None
    assert kernel is not None
    assert sharing.rates((compute, kernel)) == (pytest.approx(speed * PARTS, abs=1), PARTS // 2)


def test_updates_and_exchanges_do_not_wait_for_each_other() -> None:
    sharing = ContentionModel({}, None, (), TURNS, product_ns=6e6)
    update = sharing.demand("update", 0, 2_000_000, "update")
    exchange = sharing.demand("exchange", 0, 8_000_000, "exchange_gradients", kernels=28)
    assert update is not None
    assert exchange is not None
    assert sharing.rates((update, exchange)) == (PARTS, PARTS)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    ("changes", "milliseconds"),
    [
        ({}, 6.34),
        ({"token_piece": 16384}, 3.17),
        ({"token_piece": 2**20}, 6.34),  # the whole micro-batch is one piece
        ({"fp8": "rowwise"}, 3.3),
        ({"batch": 1}, 0.198),
    ],
)
def test_kernels_wait_for_the_longest_product_of_the_workload(
    calibrated: bool, changes: dict[str, Any], milliseconds: float
) -> None:
    """A product of the MLP of Qwen2.5-7B with 32 x 1,024 tokens takes 6.34 ms on an H200."""
    work = Workload(**{"batch": 32, "sequence": 1024, **changes})
    hardware = msgspec.structs.replace(
        HardwareSpec.load("h200"), turns=TURNS, costs=table(turns=TURNS) if calibrated else None
    )
    costs = cost_model(hardware, ModelSpec.load("qwen2.5-7b"), work)
    assert isinstance(costs, ContendedCosts)
    norm = costs.sharing.demand("update", 0, 1_000_000, "norm")
    assert norm is not None
    assert PARTS / norm.turn - 1 == pytest.approx(milliseconds, rel=0.05)


# ---- the two directions of the link

DUPLEX = ((2**18, 5.1), (2**20, 16.9), (2**22, 34.5), (2**24, 44.9), (2**26, 49.0), (2**28, 50.3))
ALONE = {2**18: 17.0, 2**20: 38.4, 2**22: 49.8, 2**24: 53.5, 2**26: 55.0, 2**28: 55.4}


@pytest.mark.parametrize(("size", "both"), DUPLEX)
def test_small_copies_disturb_each_other_more(size: int, both: float) -> None:
    sharing = ContentionModel({}, None, DUPLEX)
    alone_ns = round(size / ALONE[size])
    up, down = sharing.demand("h2d", size, alone_ns), sharing.demand("d2h", size, alone_ns)
    assert up is not None
    assert down is not None
    assert [ALONE[size] * rate / PARTS for rate in sharing.rates((up, down))] == pytest.approx(
        [both, both], rel=0.001
    )
    assert sharing.rates((up,)) == (PARTS,)
    assert sharing.rates((up, Demand("compute"))) == (PARTS, PARTS)


def test_the_curve_lies_between_its_points_and_is_proportional_beyond() -> None:
    sharing = ContentionModel({}, None, DUPLEX)
    times = [sharing._duplex_ns(size) for size in range(2**10, 2**29, 2**20)]
    assert times == sorted(times)
    assert sharing._duplex_ns(2**29) == pytest.approx(2 * sharing._duplex_ns(2**28))
    assert sharing._duplex_ns(3 * 2**20) == pytest.approx(
        2**20 / 16.9 + (2**22 / 34.5 - 2**20 / 16.9) * 2 / 3
    )


def test_only_lanes_that_contention_names_share_memory() -> None:
    """An op only has a demand if contention concerns its lane and it takes time."""
    assert ContentionModel({}).demand("h2d", 2**20, 1000) is None
    assert ContentionModel({"h2d": {"d2h": 0.5}}).demand("cpu", 0, 1000) is None
    assert ContentionModel({"h2d": {"d2h": 0.5}}).demand("d2h", 0, 1000) is not None, "it slows h2d"
    assert ContentionModel({"h2d": {"d2h": 0.5}}).demand("d2h", 2**20, 0) is None, (
        "a copy without duration demands nothing"
    )


def test_without_a_rate_of_host_memory_measured_pairs_are_used() -> None:
    """Without a rate of host DRAM, lanes slow each other by the measured factors."""
    pairs = {"h2d": {"cpu": 0.5, "compute": 0.9}, "cpu": {"compute": 0.8, "d2h": 0.5}}
    table = CostTable(
        measured_on="here",
        date="",
        curves={"load_weights": ((100, 10),), "cpu_update": ((100, 10),)},
        compute={},
        contention=pairs,
    )
    costs = Calibrated(table)
    demands = [
        costs.demand(Op(id="W0", lane="h2d", bytes=100)),
        costs.demand(Op(id="UC0", lane="cpu", parameters=100)),
    ]
    assert costs.rates(tuple(demand for demand in demands if demand)) == (500_000, PARTS)
    busy = (Demand("h2d", 10**9), Demand("cpu", 10**9), Demand("compute"))
    assert ContentionModel(pairs).rates(busy) == (450_000, 800_000, PARTS)
    assert ContentionModel(pairs, HostMemorySpec(gb_per_s=100.0)).rates(busy) == (
        900_000,
        800_000,
        PARTS,
    ), "shared DRAM replaces the factors between lanes that use it"


def test_a_rate_measured_with_three_lanes_replaces_the_product_of_pairs() -> None:
    """A rate that was measured with three busy lanes replaces the product of the pairs.

    A small copy is also slowed by the other direction according to the curve, and by the cores like
    a large copy.
    """
    pairs = {
        "cpu": {"h2d": 0.8, "d2h": 0.6, "h2d+d2h": 0.65},
        "h2d": {"d2h": 0.9, "cpu": 0.85, "d2h+cpu": 0.72},
        "compute": {"h2d": 0.9},
    }
    sharing = ContentionModel(pairs, duplex_curve=((2**20, 15.0), (2**28, 45.0)))

    def rates(small: bool, *lanes: str) -> dict[str, int]:
        size, alone = (2**20, 30.0) if small else (2**28, 50.0)  # 1 GB/s is 1 byte per ns
        demands = [
            sharing.demand(lane, size, round(size / alone)) or Demand(lane) for lane in lanes
        ]
        return dict(zip(lanes, sharing.rates(tuple(demands)), strict=True))

    assert rates(False, "h2d", "cpu") == {"h2d": 850_000, "cpu": 800_000}
    all_three = rates(False, "h2d", "d2h", "cpu", "compute")
    assert all_three["cpu"] == 650_000
    assert all_three["compute"] == 900_000
    assert (
        rates(True, "h2d", "d2h", "cpu")["h2d"]
        < all_three["h2d"]
        == pytest.approx(720_000, rel=1e-3)
    )
    alone = ContentionModel({"cpu": {"h2d": 1.0, "d2h": 1.0, "h2d+d2h": 0.65}})
    assert all(alone.demand(lane, 2**20, 1000) for lane in ("h2d", "d2h", "cpu")), (
        "a lane that is only named in a group of three counts too"
    )
    assert alone.rates((Demand("h2d"), Demand("d2h"), Demand("cpu"))) == (PARTS, PARTS, 650_000)
    without = ContentionModel(
        {
            lane: {other: rate for other, rate in others.items() if "+" not in other}
            for lane, others in pairs.items()
        }
    )
    assert without.rates((Demand("h2d"), Demand("d2h"), Demand("cpu")))[2] == 480_000


def test_on_a_calibrated_machine_ops_demand_the_bytes_that_they_touch() -> None:
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), duplex_curve=())
    curves = {
        "load_weights": ((10**9, 20 * 10**6),),
        "cpu_update": ((10**9, 26 * 10**7),),
        "norm": ((10**9, 10**9),),
    }
    table = CostTable(
        measured_on="here",
        date="",
        curves=curves,
        compute={},
        host_memory=HostMemorySpec(gb_per_s=100.0, h2d_cost=2.0, cpu_weight=1.0),
    )
    costs = cost_model(
        msgspec.structs.replace(hardware, costs=table),
        ModelSpec.load("qwen2.5-7b"),
        Workload(batch=1, sequence=1024),
    )
    assert costs.demand(Op(id="W0", lane="h2d", bytes=10**9)) == Demand("h2d", 100 * 10**9)
    assert costs.demand(Op(id="UC0", lane="cpu", parameters=10**9)) == Demand("cpu", 100 * 10**9)
    assert costs.demand(Op(id="N0", lane="cpu", parameters=10**9)) == Demand("cpu", 2 * 10**9)
    assert costs.rates((Demand("h2d", 100 * 10**9), Demand("cpu", 100 * 10**9))) == (
        500_000,
        500_000,
    )


def test_a_host_memory_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="host_memory: cpu_weight"):
        HostMemorySpec(gb_per_s=100.0, cpu_weight=0.0)


# ---- properties of any machine

memories = st.builds(
    HostMemorySpec,
    gb_per_s=st.floats(5, 500),
    h2d_cost=st.floats(0.5, 4),
    d2h_cost=st.floats(0.5, 4),
    cpu_weight=st.floats(0.1, 10),
)
factors = st.dictionaries(
    st.sampled_from(["h2d", "d2h", "compute"]),
    st.dictionaries(st.sampled_from(["cpu", "update"]), st.floats(0.05, 1)),
)
speeds = st.dictionaries(
    st.sampled_from(["compute", "h2d", "d2h", "cpu"]), st.integers(1, 300), min_size=1
)  # GB/s alone


def busy_of(sharing: ContentionModel, alone: dict[str, int]) -> tuple[Demand, ...]:
    return tuple(
        sharing.demand(lane, rate * 10**6, 10**6) or Demand(lane) for lane, rate in alone.items()
    )


@given(factors, memories, speeds)
def test_sharing_uses_the_memory_fully_and_no_more(
    pairs: dict[str, dict[str, float]], memory: HostMemorySpec, alone: dict[str, int]
) -> None:
    """Lanes together use at most the memory's rate, and are only slowed if all of it is used."""
    sharing, capacity = ContentionModel(pairs, memory), round(memory.gb_per_s * 1e9)
    busy = busy_of(sharing, alone)
    rates, without_memory = (
        sharing.rates(busy),
        ContentionModel(pairs, msgspec.structs.replace(memory, gb_per_s=1e6)).rates(busy),
    )
    used = sum(demand.traffic * rate for demand, rate in zip(busy, rates, strict=True))
    assert all(1 <= rate <= cap <= PARTS for rate, cap in zip(rates, without_memory, strict=True))
    assert used <= capacity * PARTS, "the demands exceed the memory's rate"
    if rates != without_memory:
        assert used > capacity * PARTS - sum(demand.traffic for demand in busy), (
            "a lane is slowed although the memory is not full"
        )
    assert sharing.rates(busy[::-1]) == rates[::-1], "the order of the demands must not matter"


@given(factors, memories, speeds, st.floats(1, 3))
def test_more_memory_slows_no_lane(
    pairs: dict[str, dict[str, float]], memory: HostMemorySpec, alone: dict[str, int], factor: float
) -> None:
    small = ContentionModel(pairs, memory)
    busy = busy_of(small, alone)
    large = ContentionModel(
        pairs, msgspec.structs.replace(memory, gb_per_s=memory.gb_per_s * factor)
    )
    assert all(
        before <= after for before, after in zip(small.rates(busy), large.rates(busy), strict=True)
    )


@given(memories, speeds)
def test_an_op_alone_runs_at_full_speed(memory: HostMemorySpec, alone: dict[str, int]) -> None:
    sharing = ContentionModel({}, memory)
    for demand in busy_of(sharing, alone):
        assert sharing.rates((demand,)) == (PARTS,)
