"""Tests of the parts of a verdict, on plans for models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.exposed import WAITING
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import PROCESS, TUNING, Account
from megatrain.simulator.model.op_work import attention_shape
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, RunnerUp, assess, memory_taken
from megatrain.simulator.planner.search import _with_runner_up, rank, search
from megatrain.simulator.schedule.plan import Knobs, Plan
from megatrain.simulator.verdict import alternatives as library
from megatrain.simulator.verdict import notes
from megatrain.simulator.verdict.advice import _formats_last, _note
from megatrain.simulator.verdict.multi_gpu import MultiGpu, check_gpus, estimate
from megatrain.simulator.verdict.suggestion import Suggestion, as_options
from megatrain.simulator.verdict.verdict import (
    Verdict,
    _attention_ns,
    _shares,
    summarize,
    train_for,
)

pytestmark = pytest.mark.usefixtures("without_libraries")

H200 = HardwareSpec.load("h200")
MakePlan = Callable[..., Plan]


def chosen(plan: Plan, hardware: HardwareSpec = H200) -> Choice:
    return assess(plan, cost_model(hardware, plan.model, plan.workload))


def with_seconds(choice: Choice, seconds: float, policy: str = "") -> Choice:
    plan = msgspec.structs.replace(choice.plan, policy=policy or choice.plan.policy)
    return msgspec.structs.replace(choice, plan=plan, step_seconds=seconds)


def with_memory(choice: Choice, device: int, host: int) -> Choice:
    """Returns the choice with peaks of these bytes above its limits."""
    account = Account(
        pools={"device.weights": 1000 + device, "host.weights": 1000 + host},
        device_limit_bytes=1000,
        host_limit_bytes=1000,
    )
    return msgspec.structs.replace(choice, account=account)


# ---- the order of choices


def test_the_order_of_choices(make_plan: MakePlan) -> None:
    """Plans that fit come first, ordered by time.

    The other plans are ordered by the bytes that the device lacks, then by the bytes that both
    memories lack, then by time.
    """
    some = chosen(make_plan("k_buffer"))
    ordered = [
        with_seconds(with_memory(some, 0, 0), 1.0),
        with_seconds(with_memory(some, 0, 0), 1.0, "overlapped"),
        with_seconds(with_memory(some, 0, -900), 2.0),
        with_seconds(with_memory(some, -900, 0), 3.0),
        with_seconds(with_memory(some, -900, 500), 9.0),
        with_seconds(with_memory(some, 0, 501), 1.0),
        with_seconds(with_memory(some, 1, 400), 4.0),
        with_seconds(with_memory(some, 1, 400), 5.0),
        with_seconds(with_memory(some, 2, 0), 1.0),
    ]
    backwards = ordered[::-1]
    assert sorted(backwards, key=rank) == ordered


def test_the_plan_with_the_fewest_bytes_of_both_memories_comes_first(make_plan: MakePlan) -> None:
    some = chosen(make_plan("k_buffer"))
    more = msgspec.structs.replace(
        some, plan=msgspec.structs.replace(some.plan, knobs=Knobs(weight_slots=9))
    )
    ordered = [
        with_memory(some, 0, 0),
        with_memory(more, 0, 0),
        with_memory(some, 5, 1),
        with_memory(some, 0, 7),
    ]
    backwards = ordered[::-1]
    assert sorted(backwards, key=memory_taken) == ordered


def test_the_runner_up_is_the_fastest_of_all_others(make_plan: MakePlan) -> None:
    """The runner-up may be of another policy, of the same policy, or a bound of a skipped policy.

    A plan that does not fit or cannot be executed is no runner-up.
    """
    some = chosen(make_plan("k_buffer"))
    best, slow = with_seconds(some, 1.0), with_seconds(some, 3.0, "overlapped")
    own = RunnerUp(policy="k_buffer", knobs=Knobs(), step_seconds=2.5)
    bound = RunnerUp(policy="resident", step_seconds=2.0, at_least=True)
    found = _with_runner_up([best, slow], []).runner_up
    assert found == RunnerUp(policy="overlapped", knobs=slow.plan.knobs, step_seconds=3.0)
    both = msgspec.structs.replace(best, runner_up=own)
    assert _with_runner_up([both, slow], []).runner_up == own
    assert _with_runner_up([both, slow], [bound]).runner_up == bound
    assert _with_runner_up([best], []).runner_up is None
    peer = with_seconds(some, 1.5, policies.peers()[0])
    for other in (with_memory(slow, 1, 0), peer):
        assert _with_runner_up([best, other], []).runner_up is None
        assert _with_runner_up([other, best], []).runner_up is None


# ---- the verdict


@pytest.mark.parametrize("policy", [*policies.names(), *policies.peers()])
def test_a_verdict_has_the_numbers_of_its_choice(make_plan: MakePlan, policy: str) -> None:
    choice = chosen(make_plan(policy, device_limit_bytes=2**40))
    plan, verdict = choice.plan, summarize(choice, H200)
    executable = policy in policies.names()
    assert verdict.prediction_only is not executable
    read = {name for name in verdict.knobs if name != "placement"}
    without_effect = {"rebuild_outputs", "exchange_bytes"}  # eager layers, one GPU
    known = set(policies.find(policy).knobs) - without_effect
    assert read == (known if executable else set())
    assert ("placement" in verdict.knobs) == (executable and bool(policies.find(policy).placements))
    for name, value in verdict.knobs.items():
        assert value == getattr(plan.knobs, name)
    lanes = {op.lane for op in policies.lower(plan).ops}
    assert verdict.streams == bool(lanes & {"h2d", "d2h"})
    assert set(verdict.lane_seconds) == lanes
    assert verdict.step_seconds == choice.step_seconds
    assert (verdict.machine, verdict.batch_chosen) == (H200.title, False)
    assert verdict.lower_bound_seconds == choice.bounds.lower_bound_ns / 1e9
    assert verdict.tflops_6n_active == pytest.approx(
        6 * plan.model.active_parameters * verdict.tokens_per_second / 1e12
    )
    assert verdict.binding == choice.bounds.binding
    assert not verdict.reason
    short = chosen(msgspec.structs.replace(plan, device_limit_bytes=4096))
    refused = summarize(short, H200, tokens=10**6)
    assert (refused.feasible, refused.training) == (False, None)
    assert (refused.binding, refused.reason) == (short.account.binding, short.account.advice)


def test_the_host_s_memory_is_assumed_if_it_is_not_given(make_plan: MakePlan) -> None:
    """It is given by a limit, or by a file of the machine. The library's are examples."""
    for limit, hardware, assumed in (
        (H200.host_bytes, "h200", True),
        (H200.host_bytes - 1, "h200", False),
        (H200.host_bytes, "machines/mine.toml", False),
    ):
        plan = make_plan("k_buffer", host_limit_bytes=limit, hardware=hardware)
        assert summarize(chosen(plan), H200).host_memory_assumed is assumed


def test_the_missing_bytes_are_given_for_each_memory(make_plan: MakePlan) -> None:
    account = chosen(make_plan("k_buffer")).account

    def lacking(device: int, host: int) -> str:
        return notes.lacking(
            msgspec.structs.replace(
                account,
                device_limit_bytes=account.device_peak_bytes - device,
                host_limit_bytes=account.host_peak_bytes - host,
            )
        )

    assert lacking(2**20, 0) == "the nearest plan lacks 1.00 MiB of device memory"
    assert lacking(0, 2**20) == "the nearest plan lacks 1.00 MiB of host memory"
    assert (
        lacking(2**20, 2**21)
        == "the nearest plan lacks 1.00 MiB of device memory and 2.00 MiB of host memory"
    )


def test_shares_of_a_step() -> None:
    """Exposed time counts for the lane that compute waits for.

    The host's time between steps counts as `nothing_else`.
    """
    exposed = {"cpu": 10, "update": 5, "h2d": 20, "d2h": 15, WAITING: 10}
    assert _shares(exposed, 180, 200e-9) == pytest.approx(
        {
            "compute": 0.6,
            "host_optimizer": 0.05,
            "device_optimizer": 0.025,
            "copies": 0.175,
            "nothing_else": 0.15,
        }
    )
    assert _shares({}, 150, 200e-9) == pytest.approx({"compute": 0.75, "nothing_else": 0.25})


@pytest.mark.parametrize(
    ("rows", "row_ns", "known"), [(1, 1, True), (1, 10**9, False), (2, 1, False)]
)
def test_attention_is_not_known_in_short_rows_or_if_it_exceeds_its_layers(
    make_plan: MakePlan, rows: int, row_ns: int, known: bool
) -> None:
    """The shortest row that was measured is `rows` times as long as the plan's."""
    plan = make_plan("k_buffer")
    shortest = rows * plan.workload.sequence
    points = tuple((length, row_ns, row_ns) for length in (shortest, 4 * shortest))
    table = CostTable(
        measured_on="",
        date="",
        curves={},
        compute={},
        attention={attention_shape(plan.model, plan.workload): points},
    )
    measured = msgspec.structs.replace(H200, costs=table)
    costs = cost_model(H200, plan.model, plan.workload)
    sizes = costs.sizes(policies.lower(plan))
    assert (_attention_ns(measured, plan, sizes, costs) > 0) is known


def test_a_mask_between_documents_is_named_where_it_costs(
    make_model: Callable[..., ModelSpec],
) -> None:
    """A mask costs nothing without documents, and nothing where scores are written out anyway."""
    packed, plain = (Workload(batch=1, sequence=8, documents=each) for each in (True, False))
    masked = msgspec.structs.replace(packed, dtype="fp32")
    model = make_model(family="llama")
    assert notes.documents(model, masked).startswith("in fp32 a mask ")
    assert not notes.documents(model, packed)
    assert not notes.documents(model, msgspec.structs.replace(plain, dtype="fp32"))
    assert not notes.documents(make_model(family="gemma2"), masked)


def test_several_gpus_take_less_time_and_the_energy_of_all(make_plan: MakePlan) -> None:
    verdict = summarize(chosen(make_plan("k_buffer")), H200)
    several = MultiGpu(
        gpus=4,
        step_seconds=1.0,
        tokens_per_second=3 * verdict.tokens_per_second,
        speedup=3.0,
        host_peak_bytes=1,
        host_limit_bytes=1,
        feasible=True,
        gb_per_s=1.0,
        gb_per_s_both=1.0,
    )

    def training(**changes: Any) -> tuple[float, float] | None:
        found = train_for(msgspec.structs.replace(verdict, **changes), H200, 10**9)
        if found is None:
            return None
        assert found.energy_kwh is not None
        return found.hours, found.energy_kwh

    alone, together = training(), training(multi_gpu=several)
    assert alone is not None
    assert together is not None
    assert together == pytest.approx((alone[0] / 3, alone[1] * 4 / 3))
    assert training(multi_gpu=msgspec.structs.replace(several, feasible=False)) is None
    assert training(multi_gpu=msgspec.structs.replace(several, refused="a reason")) == alone
    assert training(feasible=False) is None


# ---- several GPUs


def test_the_most_gpus_of_a_host(make_plan: MakePlan) -> None:
    for count in (1, 16):
        check_gpus(count, H200)
    check_gpus(1, HardwareSpec.load("dgx-spark"))
    for count in (0, 17):
        with pytest.raises(UserError, match=f"found {count}"):
            check_gpus(count, H200)
        with pytest.raises(UserError, match=f"found {count}"):
            estimated(make_plan("k_buffer"), H200, count)


def estimated(plan: Plan, hardware: HardwareSpec, gpus: int, **extra: int) -> MultiGpu:
    """Returns the estimate for a plan. `extra` has additional bytes of its pools."""
    costs = cost_model(hardware, plan.model, plan.workload)
    choice = chosen(plan, hardware)
    pools = {**choice.account.pools, **{name.replace("_", "."): n for name, n in extra.items()}}
    account = msgspec.structs.replace(choice.account, pools=pools)
    return estimate(plan, policies.lower(plan), account, hardware, costs, choice.step_seconds, gpus)


@pytest.mark.parametrize("machine", ["h200", "gh200-96"])
def test_one_gpu_of_several_is_as_fast_as_one(make_plan: MakePlan, machine: str) -> None:
    hardware = HardwareSpec.load(machine)
    one = estimated(make_plan("k_buffer"), hardware, 1)
    assert one.speedup == pytest.approx(1)
    link = min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s)
    assert (one.gb_per_s, one.gb_per_s_both) == (link, link * hardware.duplex_fraction)


def test_a_gpu_with_a_host_memory_of_its_own_shares_no_link(make_plan: MakePlan) -> None:
    """With NVLink-C2C, the limit of host memory holds for each GPU."""
    plan = make_plan("k_buffer")  # its device memory has no room for collectives
    hardware = msgspec.structs.replace(
        HardwareSpec.load("gh200-96"), collective_bytes=0, collective_peer_bytes=0
    )
    assert "C2C" in hardware.link
    one, four = (estimated(plan, hardware, gpus) for gpus in (1, 4))
    assert (four.gb_per_s, four.gb_per_s_both) == (one.gb_per_s, one.gb_per_s_both)
    tight = msgspec.structs.replace(plan, host_limit_bytes=one.host_peak_bytes)
    process = 3 * one.host_peak_bytes // 4
    assert estimated(tight, hardware, 4).feasible
    shared = msgspec.structs.replace(hardware, link="PCIe 5.0 x16")
    assert not estimated(tight, shared, 4, host_process=process).feasible
    assert estimated(tight, shared, 1).feasible
    small = msgspec.structs.replace(plan, device_limit_bytes=4096)
    assert not estimated(small, hardware, 4).feasible


@pytest.mark.parametrize(("machine", "share"), [("h200", 1), ("gh200-96", 4)])
def test_the_cores_of_a_host_are_shared_by_its_gpus(
    make_plan: MakePlan, machine: str, share: int
) -> None:
    """If updates on the host limit the step, several GPUs take as long as one.

    They take a part of that if each GPU has its own host.
    """
    slow = msgspec.structs.replace(HardwareSpec.load(machine), cpu_update_per_s=1e5)
    one, four = (estimated(make_plan("k_buffer"), slow, gpus) for gpus in (1, 4))
    assert four.step_seconds * share == pytest.approx(one.step_seconds, rel=0.02)


@pytest.mark.parametrize("pool", [PROCESS, TUNING])
def test_each_gpu_has_a_process_of_its_own(make_plan: MakePlan, pool: str) -> None:
    """Each process compiles the layers, too."""
    plan, name = make_plan("k_buffer"), pool.replace(".", "_")
    assert pool not in chosen(plan).account.pools
    none, few, more = (
        estimated(plan, H200, 4, **extra).host_peak_bytes
        for extra in ({}, {name: 1000}, {name: 3000})
    )
    assert (few - none, more - few) == (4 * 1000, 4 * 2000)


def test_each_gpu_of_an_estimate_needs_memory_for_collectives(make_plan: MakePlan) -> None:
    plan = make_plan("k_buffer")
    peak = chosen(plan, H200).account.device_peak_bytes
    size = H200.collective_bytes
    assert size
    for spare, gpus, needed in ((size, 2, None), (size - 1, 2, peak + size), (0, 1, None)):
        found = estimated(
            msgspec.structs.replace(plan, device_limit_bytes=peak + spare), H200, gpus
        )
        assert (found.feasible, found.device_peak_bytes) == (needed is None, needed)


# ---- advice


def test_changes_are_named_as_options_with_what_they_cost() -> None:
    work = Workload(batch=2, sequence=1024, accumulation=3)
    assert as_options({"batch": "2", "seq": "8"}) == "--batch 2 --seq 8"
    assert as_options({"plain-packing": "", "batch": "2"}) == "--plain-packing --batch 2"
    assert _note({"clipping": "none", "batch": "2"}, work) == "gives up clipping"
    assert _note({"clipping": "adagc"}, work).startswith("clips each tensor by its own moving norm")
    for name in ("batch", "accumulation", "seq"):
        assert _note({name: "2"}, work) == "a step has 6,144 tokens"
    assert not _note({"device-memory": "8GiB"}, work)


def test_state_formats_are_named_last() -> None:
    """State formats do not count towards the limit of suggestions."""
    named = [(str(number), number in (1, 4)) for number in range(6)]
    made = [Suggestion(change=name, compressed=coded, fits=True) for name, coded in named]
    assert [entry.change for entry in _formats_last(made, 3)] == ["0", "2", "3", "1", "4"]
    assert len(_formats_last(made[:1] * 7)) == 5
    coded = Workload(batch=1, sequence=8, state="master24")
    assert _note({"state": "master24"}, coded).startswith("not exact AdamW: 24-bit masters")
    coded = msgspec.structs.replace(coded, optimizer="muon")
    assert _note({"state": "master24"}, coded).startswith("not exact muon: 24-bit masters")


def test_another_machine_has_the_least_memory_that_suffices(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested machine is a larger one of the library with a GPU, with its own limits."""
    small = HardwareSpec.load("rtx3080-10gb")
    device, host = small.memory_limits()
    plan = msgspec.structs.replace(
        make_plan("overlapped"), device_limit_bytes=device, host_limit_bytes=host
    )
    tried: list[HardwareSpec] = []

    def fits(moved: Plan, machine: HardwareSpec) -> bool:
        limits = (moved.device_limit_bytes, moved.host_limit_bytes)
        assert limits == machine.memory_limits()
        tried.append(machine)
        return len(tried) == 3

    monkeypatch.setattr(library, "_fits", fits)
    monkeypatch.setattr(
        library, "best_estimate", lambda _, machine, *__, **___: chosen(plan, machine)
    )
    (found,) = library._another_machine(plan, small)
    sizes = [(machine.device_bytes, machine.host_bytes) for machine in tried]
    assert sizes == sorted(sizes)
    assert all(size > small.device_bytes for size, _ in sizes)
    assert found.options == {"hardware": tried[-1].name}
    assert found.change == f"--hardware {tried[-1].name}"
    assert f"{tried[-1].host_bytes / 2**30:.0f} GiB of RAM for plans" in found.note
    tried.clear()
    monkeypatch.setattr(library, "_fits", lambda *_: False)
    assert not list(library._another_machine(plan, small))


def test_a_machine_without_costs_for_the_workload_is_not_suggested(make_plan: MakePlan) -> None:
    plan = make_plan("overlapped")
    assert library._fits(plan, H200)
    assert not library._fits(plan, msgspec.structs.replace(H200, peak_tflops={"fp32": 60.0}))


def test_the_suggested_smaller_model_is_the_largest_of_its_series_or_of_all(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSpec.load("qwen3-4b")
    plan = msgspec.structs.replace(make_plan("overlapped"), model=model)
    choice = chosen(make_plan("overlapped"))
    monkeypatch.setattr(library, "best_estimate", lambda *_, **__: choice)
    models = library.library_models()
    assert [each.parameters for each in models] == sorted(
        (each.parameters for each in models), reverse=True
    )
    monkeypatch.setattr(library, "library_models", lambda: models)
    smaller = [each.name for each in models if each.parameters < model.parameters]
    series = [name for name in smaller if name.startswith("qwen3")]
    for able in (smaller, [name for name in smaller if name not in series], series[1:]):
        monkeypatch.setattr(library, "_fits", lambda other, _, able=able: other.model.name in able)
        (found,) = library._smaller_model(plan, H200)
        assert found.model == next(name for name in (*series, *smaller) if name in able)
        assert found.fits
    monkeypatch.setattr(library, "_fits", lambda other, _: other.model == model)
    assert not list(library._smaller_model(plan, H200)), "the model is not smaller than itself"


def test_the_next_smaller_model_is_suggested_if_the_search_finds_nothing_for_the_first(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = msgspec.structs.replace(make_plan("overlapped"), model=ModelSpec.load("qwen3-4b"))
    found = iter([None, chosen(make_plan("overlapped"))])
    monkeypatch.setattr(library, "best_estimate", lambda *_, **__: next(found))
    monkeypatch.setattr(library, "_fits", lambda other, _: other.model.name.startswith("qwen3"))
    (suggestion,) = library._smaller_model(plan, H200)
    assert suggestion.model == "qwen3-0.6b"


@pytest.mark.parametrize(
    ("machine", "expected"), [("h200", "cudnn"), ("a100-80-sxm", None), ("gh200-96", "cudnn")]
)
@pytest.mark.parametrize("named", [None, "cudnn"])
def test_a_kernel_that_was_chosen_is_chosen_again_for_another_machine(
    make_plan: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    expected: str | None,
    named: Any,
) -> None:
    """A kernel that the user named is kept."""
    work = Workload(batch=1, sequence=32_768, attention=named)
    model = ModelSpec.load("qwen3-4b").with_layers(2)
    plan = msgspec.structs.replace(make_plan("overlapped"), model=model, workload=work)
    tried: list[Workload] = []

    def estimate(_: ModelSpec, __: HardwareSpec, work: Workload, **___: Any) -> Choice:
        tried.append(work)
        return chosen(make_plan("overlapped"))

    monkeypatch.setattr(library, "library", lambda: [machine])
    monkeypatch.setattr(library, "_fits", lambda *_: True)
    monkeypatch.setattr(library, "best_estimate", estimate)
    small = HardwareSpec.load("rtx3080-10gb")
    for again, attention in ((True, expected), (False, named)):
        assert list(library._another_machine(plan, small, again))
        assert tried.pop().attention == attention


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None), (None, None)),
        ((2**30, None), (2**30, None)),
        ((None, 2**40), (None, 2**40)),
        ((None, 2**33), (None, 2**33)),
        ((2**33, 2**33), (2**33, 2**33)),
    ],
)
@pytest.mark.parametrize("machine", ["rtx4090", "dgx-spark"])
def test_the_limits_of_the_user_are_those_of_another_machine(
    make_plan: MakePlan,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    given: tuple[int | None, int | None],
    expected: tuple[int | None, int | None],
) -> None:
    """The suggestion is what `--hardware` does beside the options that limit memory."""
    tried, small = list[tuple[int | None, int | None]](), HardwareSpec.load("rtx3080-10gb")

    def estimate(*_: Any, device_limit: int, host_limit: int, **__: Any) -> Choice:
        tried.append((device_limit, host_limit))
        return chosen(make_plan("overlapped"))

    def fits(plan: Plan, _: HardwareSpec) -> bool:
        tried.append((plan.device_limit_bytes, plan.host_limit_bytes))
        return True

    monkeypatch.setattr(library, "library", lambda: [machine])
    monkeypatch.setattr(library, "_fits", fits)
    monkeypatch.setattr(library, "best_estimate", estimate)
    device, host = small.memory_limits(*given)
    plan = msgspec.structs.replace(
        make_plan("overlapped"), device_limit_bytes=device, host_limit_bytes=host
    )
    assert list(library._another_machine(plan, small))
    assert tried == [HardwareSpec.load(machine).memory_limits(*expected)] * 2


def test_another_machine_is_no_help_if_the_user_limits_device_memory() -> None:
    small = HardwareSpec.load("rtx3080-10gb")
    model = ModelSpec.load("qwen2.5-0.5b").with_layers(2)
    work = Workload(batch=4, sequence=16_384, dtype="fp32", documents=False)
    found = {}
    for limit in (None, 2**30):
        plan = search(
            model, small, work, source="model", hardware_name=small.name, device_limit=limit
        )[0].plan
        found[limit] = [entry.change for entry in library._another_machine(plan, small)]
    assert found == {None: ["--hardware rtx4090"], 2**30: []}


def test_a_kernel_that_was_chosen_is_not_predicted_for_a_model_that_cannot_use_it(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Workload] = []

    def estimate(_: ModelSpec, __: HardwareSpec, work: Workload, **___: Any) -> Choice:
        tried.append(work)
        return chosen(make_plan("overlapped"))

    gemma = ModelSpec.load("gemma-2-2b")
    work = Workload(batch=1, sequence=32_768, attention="cudnn")
    plan = msgspec.structs.replace(
        make_plan("overlapped"), model=ModelSpec.load("qwen3-4b"), workload=work
    )
    monkeypatch.setattr(library, "library_models", lambda: [gemma])
    monkeypatch.setattr(library, "_fits", lambda *_: True)
    monkeypatch.setattr(library, "best_estimate", estimate)
    assert library.alternatives(plan, H200, machines=False, choose_kernel=True)
    assert [work.attention for work in tried] == [None]


def test_machines_are_named_only_if_they_are_wanted(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, model = Suggestion(change="machine", fits=True), Suggestion(change="model", fits=True)
    monkeypatch.setattr(library, "_another_machine", lambda *_: iter([machine]))
    monkeypatch.setattr(library, "_smaller_model", lambda *_: iter([model]))
    plan = make_plan("overlapped")
    assert library.alternatives(plan, H200, machines=True) == [machine, model]
    assert library.alternatives(plan, H200, machines=False) == [model]


def test_the_policies_of_a_verdict_s_type(make_plan: MakePlan) -> None:
    assert library.usual_policies(H200) == ["overlapped"]
    assert library.usual_policies(HardwareSpec.load("dgx-spark")) == ["resident"]
    assert isinstance(summarize(chosen(make_plan("resident")), H200), Verdict)
