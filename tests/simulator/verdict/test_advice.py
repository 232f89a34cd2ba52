"""Tests of advice and of the gain of more memory, on a model of half a million parameters.

Each suggestion is compared with a search that follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from small_table import table

from megatrain.simulator import policies
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess, with_knobs
from megatrain.simulator.planner.capacity import usable
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.schedule.plan import Placement
from megatrain.simulator.verdict import advice
from megatrain.simulator.verdict.advice import _LEAST_GAIN, Adviser
from megatrain.simulator.verdict.marginal_memory import one_more_gib
from megatrain.simulator.verdict.suggestion import Suggestion
from megatrain.simulator.verdict.verdict import Verdict, judge

pytestmark = pytest.mark.usefixtures("without_libraries")

H200, MIB = HardwareSpec.load("h200"), 2**20
WORK = Workload(batch=8, sequence=64, loss_chunk=512)
FIELDS = {
    "batch": "batch",
    "seq": "sequence",
    "loss-chunk": "loss_chunk",
    "accumulation": "accumulation",
    "clipping": "clipping",
    "state": "state",
}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., ModelSpec]) -> ModelSpec:
    return make_model(layers=4, hidden=128, intermediate=256, head_dim=32, vocabulary=1024)


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes advice try no other machines and models, which would take seconds."""
    monkeypatch.setattr(advice, "alternatives", lambda *_, **__: [])


def judged(
    model: ModelSpec, work: Workload = WORK, *, advise: bool = False, **limits: int
) -> Verdict:
    return judge(model, H200, work, policies=["overlapped"], advise=advise, **limits)


def followed(model: ModelSpec, entry: Suggestion, limits: dict[str, int], less: int = 0) -> Verdict:
    """Returns the verdict with the options of the suggestion and `less` bytes less memory."""
    sizes = {
        f"{place}_limit": parse_bytes(entry.options[f"{place}-memory"]) - less
        for place in ("device", "host")
        if f"{place}-memory" in entry.options
    }
    changes: dict[str, Any] = {
        field: entry.options[name] if name in ("clipping", "state") else int(entry.options[name])
        for name, field in FIELDS.items()
        if name in entry.options
    }
    if "compile" in entry.options:
        changes["compiled"] = True
    return judged(model, msgspec.structs.replace(WORK, **changes), **{**limits, **sizes})


@pytest.mark.parametrize("limits", [(8, 64), (12, 6)], ids=str)
def test_suggestions_that_should_fit_do_fit(model: ModelSpec, limits: tuple[int, int]) -> None:
    """A search with the options of a suggestion that should fit finds a plan that fits.

    Suggested host memory is the least that suffices, in whole MiB.
    """
    held = {"device_limit": limits[0] * MIB, "host_limit": limits[1] * MIB}
    verdict = judged(model, advise=True, **held)
    assert not verdict.feasible
    assert verdict.advice
    fits = [entry.fits for entry in verdict.advice]
    assert fits == sorted(fits, reverse=True)
    order = [(not entry.fits, entry.compressed, entry.bytes_missing) for entry in verdict.advice]
    assert order == sorted(order)
    assert fits == [not entry.bytes_missing for entry in verdict.advice]
    for entry in verdict.advice:
        assert entry.compressed == ("state" in entry.options) == ("not exact" in entry.note)
        found = followed(model, entry, held)
        assert found.feasible is entry.fits
        if not entry.fits:
            assert entry.bytes_saved > 0
            continue
        assert entry.tokens_per_second is not None
        assert found.tokens_per_second >= 0.98 * entry.tokens_per_second
        if list(entry.options) == ["host-memory"] and "gains nothing" not in entry.note:
            assert re.fullmatch(r"\d+MiB", entry.options["host-memory"])
            assert not followed(model, entry, held, less=MIB).feasible


@pytest.mark.parametrize("host", [11, 12])
def test_more_host_memory_for_a_smaller_batch_is_suggested_only_if_it_needs_more(
    model: ModelSpec, host: int
) -> None:
    """The largest batch with 8 MiB of device memory needs 12 MiB of host memory."""
    verdict = judged(model, advise=True, device_limit=8 * MIB, host_limit=host * MIB)
    assert not verdict.feasible
    found = [entry.options for entry in verdict.advice if "host-memory" in entry.options]
    assert found == ([{"batch": "7", "host-memory": "12MiB"}] if host == 11 else [])


def test_where_stored_gradients_do_not_fit_another_clipping_is_named(model: ModelSpec) -> None:
    """The gain is that of the search, and the disadvantage is named."""
    held = {"device_limit": 12 * MIB, "host_limit": 8 * MIB}
    verdict = judged(model, advise=True, **held)
    assert not verdict.feasible
    (entry,) = [entry for entry in verdict.advice if "clipping" in entry.options]
    assert entry.options == {"clipping": "adagc"}
    assert entry.fits
    assert entry.note.startswith("clips each tensor by its own moving norm")
    for kind in ("adagc", "layer"):
        work = msgspec.structs.replace(WORK, clipping=kind)
        assert entry.tokens_per_second == judged(model, work, **held).tokens_per_second


def test_more_of_both_memories_is_suggested_where_neither_alone_suffices(model: ModelSpec) -> None:
    for device, host in ((1, 1), (1, 64), (64, 1)):
        held = {"device_limit": device * MIB, "host_limit": host * MIB}
        verdict = judge(model, H200, WORK, policies=["k_buffer"], **held)
        short = {
            f"{place}-memory" for place, size in (("device", device), ("host", host)) if size == 1
        }
        found = [set(entry.options) for entry in verdict.advice]
        assert [options for options in found if "memory" in str(options)] == [short]


def test_suggestions_that_gain_are_listed_with_their_gain(model: ModelSpec) -> None:
    """The best suggestion is the first. Each gains at least 1 %."""
    held = {"device_limit": 12 * MIB, "host_limit": 64 * MIB}
    verdict = judged(model, advise=True, **held)
    assert verdict.feasible
    assert verdict.streams
    gains = [(entry.compressed, -(entry.gain or 0)) for entry in verdict.advice]
    assert gains == sorted(gains)
    assert "batch" in {name for entry in verdict.advice for name in entry.options}
    for entry in verdict.advice:
        assert entry.fits
        assert entry.gain is not None
        assert entry.gain >= 0.01
        assert entry.tokens_per_second == pytest.approx(
            (1 + entry.gain) * verdict.tokens_per_second
        )
        if not entry.compressed:
            found = followed(model, entry, held)
            assert found.tokens_per_second == pytest.approx(entry.tokens_per_second)
            assert entry.bytes_saved == (
                verdict.device_peak_bytes
                + verdict.host_peak_bytes
                - found.device_peak_bytes
                - found.host_peak_bytes
            )


@pytest.mark.parametrize(("device", "host"), [(12, 64), (13, 8)])
def test_one_more_gib_is_used_by_plans_that_need_it(
    model: ModelSpec, device: int, host: int
) -> None:
    """The plan with more memory fits only with this memory, and has the stated gain."""
    limits = {"device_limit": device * MIB, "host_limit": host * MIB}
    choice = candidates(model, H200, WORK, policies=["overlapped"], **limits)[0]
    costs = cost_model(H200, model, WORK)
    assert choice.feasible
    found = {margin.place: margin for margin in one_more_gib(choice, H200, costs)}
    assert list(found) == ["device", "host"]
    for place, margin in found.items():
        assert margin.gain == pytest.approx(choice.step_seconds / margin.step_seconds - 1)
        assert margin.tokens_per_second == pytest.approx(WORK.step_tokens / margin.step_seconds)
        if margin.knobs is None:
            assert margin.gain == 0
            continue
        now = msgspec.structs.replace(choice.plan, knobs=margin.knobs)
        field = f"{place}_limit_bytes"
        more = msgspec.structs.replace(now, **{field: getattr(now, field) + 2**30})
        assert assess(more, costs).feasible
        assert not assess(now, costs).feasible
        assert assess(more, costs).step_seconds == pytest.approx(margin.step_seconds, rel=0.01)
    assert found["device"].gain > 0
    assert (found["host"].knobs is None) == (host == 64)


def test_more_memory_gains_nothing_where_none_is_short(model: ModelSpec) -> None:
    costs = cost_model(H200, model, WORK)
    for policy in ("overlapped", "k_buffer"):
        choice = candidates(model, H200, WORK, policies=[policy])[0]
        assert [margin.gain for margin in one_more_gib(choice, H200, costs)] == [0, 0]
        short = msgspec.structs.replace(
            choice, account=msgspec.structs.replace(choice.account, device_limit_bytes=1)
        )
        assert one_more_gib(short, H200, costs) == ()
        assert one_more_gib(choice, HardwareSpec.load("dgx-spark"), costs) == ()
    peer = candidates(model, H200, WORK, policies=[policies.peers()[0]])[0]
    assert one_more_gib(peer, H200, costs) == ()


def test_another_state_format_is_tried_with_the_chosen_plan() -> None:
    model, work, machine = (
        ModelSpec.load("qwen2.5-0.5b"),
        Workload(batch=1, sequence=1024),
        HardwareSpec.load("rtx3080-10gb"),
    )
    choice = candidates(
        model, machine, work, policies=["overlapped"], device_limit=2**32, host_limit=2**35
    )[0]
    search: Any = None  # not needed for this

    def adviser(**changes: str) -> Adviser:
        changed = msgspec.structs.replace(work, **changes)
        plan = msgspec.structs.replace(choice.plan, workload=changed)
        costs = cost_model(machine, model, changed)
        return Adviser(msgspec.structs.replace(choice, plan=plan), machine, costs, [], search, [])

    for state in ("master24", "bf16-sr"):
        entry = adviser()._in_format(state)
        assert entry is not None
        assert entry.gain is not None
        coded = msgspec.structs.replace(work, state=state)
        plan = msgspec.structs.replace(choice.plan, workload=coded)
        found = assess(plan, cost_model(machine, model, coded))
        assert entry.gain == pytest.approx(choice.step_seconds / found.step_seconds - 1)
        assert entry.gain > 0
        assert entry.bytes_saved > 0
        assert (entry.compressed, entry.note) == (True, FORMATS[state].costs)
    assert adviser()._formats == ("master24", "bf16-sr")
    assert adviser(state="master24")._formats == ("bf16-sr",)
    assert adviser(dtype="fp32")._formats == ()


@pytest.mark.parametrize(("host", "wanted"), [(21, "master24"), (10, "bf16-sr"), (7, "")])
def test_advice_names_the_state_format_in_which_a_model_fits(host: int, wanted: str) -> None:
    """Advice names the largest format that fits, after all exact changes.

    If no format fits, the missing bytes of the smallest are named.
    """
    model, hardware = ModelSpec.load("qwen2.5-7b").with_layers(6), HardwareSpec.load("rtx4090")
    limits = {"device_limit": 8 * 2**30, "host_limit": host * 2**30}
    work = Workload(batch=1, sequence=1024)
    verdict = judge(model, hardware, work, policies=["overlapped"], **limits)
    assert not verdict.feasible
    (entry,) = [entry for entry in verdict.advice if "state" in entry.options]
    assert entry.options == {"state": wanted or "bf16-sr"}
    assert entry.fits is bool(wanted)
    assert (entry.bytes_missing > 2**30) is not entry.fits
    assert entry.bytes_saved > 2**30
    assert entry.compressed
    assert [other.compressed for other in verdict.advice if other.fits] == sorted(
        other.compressed for other in verdict.advice if other.fits
    )
    if wanted:
        work = msgspec.structs.replace(work, state=wanted)
        again = judge(model, hardware, work, policies=["overlapped"], advise=False, **limits)
        assert again.tokens_per_second == pytest.approx(entry.tokens_per_second)


def test_a_change_of_a_plan_with_host_updates_is_searched() -> None:
    """Without clipping, a search begins with plans that the device updates. Their bound is 39 s,
    but the search finds a plan with host updates that takes 22 s. So the bound must be of plans
    with the host updates of the chosen plan.
    """
    verdict = judge(
        ModelSpec.load("qwen2.5-72b"),
        HardwareSpec.load("a100-80-sxm"),
        Workload(batch=1, sequence=1024, loss_chunk=1024),
        policies=["overlapped"],
        device_limit=12 * 2**30,
        host_limit=2 * 2**40,
    )
    assert verdict.feasible
    (entry,) = [entry for entry in verdict.advice if entry.options == {"clipping": "none"}]
    assert entry.gain > 0.04


def test_compiled_layers_are_suggested_where_their_speed_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gain is what the same command with `--compile` shows. A calibration knows either eager or
    compiled layers, and nobody measured compiled layers on machines with one memory.
    """
    model = ModelSpec.load("qwen2.5-0.5b").with_layers(6)
    work = Workload(batch=8, sequence=1024, loss_chunk=1024)
    compiled = msgspec.structs.replace(work, compiled=True)
    before, after = (
        judge(model, H200, each, policies=["overlapped"], device_limit=4 * 2**30)
        for each in (work, compiled)
    )
    (entry,) = [entry for entry in before.advice if "compile" in entry.options]
    assert entry.change == "--compile"
    assert entry.note
    assert after.tokens_per_second / before.tokens_per_second - 1 == pytest.approx(
        entry.gain, abs=0.01
    )
    assert not [entry for entry in after.advice if "compile" in entry.options]
    calibrated = msgspec.structs.replace(H200, costs=table())
    choice = candidates(model, H200, work, policies=["overlapped"])[0]
    for machine in (calibrated, HardwareSpec.load("dgx-spark")):
        some = Adviser(choice, machine, cost_model(H200, model, work), ["overlapped"], _none, [])
        monkeypatch.setattr(some, "_searched", _none)
        assert some._compiled() is None


@pytest.mark.parametrize(
    ("machine", "given", "options"),
    [
        ("rtx4090", {"gradients": "8bit"}, {"gradients": "exact"}),
        ("dgx-spark", {"fp8": "rowwise"}, {"dtype": "bf16"}),
    ],
)
def test_it_is_advised_to_leave_out_an_option_that_only_costs_speed(
    machine: str, given: dict[str, Any], options: dict[str, str]
) -> None:
    """The gain is that of the same command without the option."""
    model, hardware = ModelSpec.load("qwen2.5-7b").with_layers(4), HardwareSpec.load(machine)
    work = Workload(batch=8, sequence=1024, loss_chunk=1024)
    policy = "resident" if hardware.unified else "overlapped"
    before, after = (
        judge(model, hardware, each, policies=[policy], host_limit=192 * 2**30)
        for each in (msgspec.structs.replace(work, **given), work)
    )
    (entry,) = [entry for entry in before.advice if entry.options == options]
    assert entry.gain > 0.02
    assert after.tokens_per_second / before.tokens_per_second - 1 == pytest.approx(
        entry.gain, abs=0.01
    )
    assert not [entry for entry in after.advice if entry.options == options]


def _none(*_: object, **__: object) -> None:
    """A search that must not be called."""
    raise AssertionError


def test_bounds_for_another_workload_hold_for_groups_of_any_size(model: ModelSpec) -> None:
    """Smaller groups than the choice's leave more memory for saved activations."""
    work = msgspec.structs.replace(WORK, accumulation=4)
    costs = cost_model(H200, model, work)
    plan = candidates(model, H200, work, policies=["overlapped"])[0].plan
    assert plan.prediction is not None
    limit = plan.prediction.device_peak_bytes // 2
    bounds = []
    for group in (1, 4):
        choice = assess(with_knobs(plan, micro_batch_group=group, placement=Placement()), costs)
        adviser = Adviser(choice, H200, costs, ["overlapped"], lambda *_, found=choice: found, [])
        bounds.append(list(adviser._bounds(work, limit, plan.host_limit_bytes)))
    assert bounds[0] == bounds[1]
    assert 0 < bounds[0][0] < bounds[0][1]


def test_no_bound_is_known_for_a_policy_without_placements(model: ModelSpec) -> None:
    """So no change of its plan is left out as too slow."""
    choice = candidates(model, H200, WORK, policies=["k_buffer"])[0]
    costs = cost_model(H200, model, WORK)
    some = Adviser(choice, H200, costs, ["k_buffer"], lambda *_, **__: None, [])
    assert not list(some._bounds(WORK, choice.plan.device_limit_bytes, 2**40))


def adviser(make_model: Callable[..., ModelSpec], machine: str) -> Adviser:
    """Returns an adviser whose search finds nothing."""
    hardware, small = HardwareSpec.load(machine), make_model(hidden=128)
    choice = candidates(small, hardware, WORK)[0]
    costs, names = cost_model(hardware, small, WORK), [choice.plan.policy]
    least = list(usable(choice.plan, hardware, costs, names))
    return Adviser(choice, hardware, costs, names, lambda *_, **__: None, least)


def test_a_change_that_fits_has_a_speed_even_if_the_search_finds_nothing(
    make_model: Callable[..., ModelSpec],
) -> None:
    """The speed is that of a plan with little memory. If none fits, there is no speed."""
    some = adviser(make_model, "h200")
    small = msgspec.structs.replace(WORK, batch=1)
    speed = some._speed(small, some._least(small))
    assert speed is not None
    assert 0 < speed < WORK.step_tokens / some.choice.step_seconds
    assert some._speed(small, some._least(small, device_limit_bytes=1)) is None


def test_if_no_whole_row_fits_a_shorter_one_is_suggested(
    make_model: Callable[..., ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = adviser(make_model, "h200")
    monkeypatch.setattr(advice, "largest_batch", lambda *_: 0)
    monkeypatch.setattr(advice, "longest_context", lambda *_: 40)
    monkeypatch.setattr(some, "_more_memory", list)
    assert {"seq": "40", "batch": "1"} in [entry.options for entry in some._fitting()]


def test_of_what_does_not_suffice_what_lacks_least_is_named_first(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many such changes the five that lack least are named, and one that fits before them."""
    lacking = [
        Suggestion(
            change=f"{size}",
            options={"batch": f"{size}"},
            fits=not size,
            bytes_missing=size,
            bytes_saved=1,
        )
        for size in (6, 2, 5, 0, 1, 4, 3)
    ]
    monkeypatch.setattr(Adviser, "_fitting", lambda _: lacking)
    monkeypatch.setattr(Adviser, "_fitting_format", lambda _: [])
    verdict = judged(model, advise=True, device_limit=8 * MIB, host_limit=64 * MIB)
    assert not verdict.feasible
    found = [entry.change for entry in verdict.advice if "batch" in entry.options]
    assert found == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(("machine", "options"), [("h200", 1), ("dgx-spark", 2)])
def test_the_memory_to_add_is_that_missing_in_both_limits(
    make_model: Callable[..., ModelSpec], machine: str, options: int
) -> None:
    """A unified memory must have room for both places together, and counts once."""
    some = adviser(make_model, machine)
    some.plan = msgspec.structs.replace(some.plan, device_limit_bytes=2**30, host_limit_bytes=2**30)
    (entry,) = some._memory({"host": 2**31}, choice=some.choice)
    assert len(entry.options) == options
    assert entry.change.endswith(", 1.00 GiB more")
    assert not some._memory({"device": some.hardware.device_bytes + 1})
    if not some.hardware.unified:
        (entry,) = some._memory({"host": 2**31, "device": 2**20}, choice=some.choice)
        assert entry.change.endswith(", 1.00 GiB more")


@pytest.mark.parametrize(
    ("fields", "tried"),
    [
        ({}, {"batch": 16, "accumulation": 2, "clipping": "none"}),
        ({"compiled": True, "clipping": "none"}, {"batch": 16, "accumulation": 2}),
        ({"accumulation": 512}, {"batch": 16, "accumulation": 1024, "clipping": "none"}),
        ({"accumulation": 513}, {"batch": 16, "clipping": "none"}),  # 1,026 is more than allowed
        ({"gradients": "8bit"}, {"batch": 16, "gradients": "exact"}),
        ({"batch": 2**20}, {"accumulation": 2, "clipping": "none"}),
    ],
    ids=str,
)
def test_only_workloads_that_a_plan_may_have_are_tried(
    make_model: Callable[..., ModelSpec],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    tried: dict[str, object],
) -> None:
    some, found = adviser(make_model, "h200"), dict[str, object]()
    some.work = msgspec.structs.replace(WORK, **fields)

    def searched(options: dict[str, str], work: Workload, **_: float) -> None:
        ((name, value),) = options.items()
        if name == "attention":
            assert value == work.attention == "flash4"
            return
        if name == "compile":
            assert (work.compiled, some.work.compiled) == (True, False)
            return
        assert str(getattr(work, name)) == value
        found[name] = getattr(work, name)

    monkeypatch.setattr(some, "_searched", searched)
    monkeypatch.setattr(some, "_resident", lambda: None)
    assert some._faster() == []
    assert found == tried


@pytest.mark.parametrize(
    ("gains", "shown"),
    [
        ({"batch": 0.2, "accumulation": 0.1}, "batch"),
        ({"batch": 0.1, "accumulation": 0.2}, "accumulation"),
        ({"batch": 0.1, "accumulation": None}, "batch"),
        ({"batch": None, "accumulation": 0.1}, "accumulation"),
        ({"batch": None, "accumulation": None}, None),
    ],
    ids=str,
)
def test_of_two_ways_to_double_the_tokens_of_a_step_the_faster_one_is_suggested(
    make_model: Callable[..., ModelSpec],
    monkeypatch: pytest.MonkeyPatch,
    gains: dict[str, float | None],
    shown: str | None,
) -> None:
    some, least = adviser(make_model, "h200"), dict[str, float]()

    def searched(
        options: dict[str, str], work: Workload, *, least_gain: float = _LEAST_GAIN
    ) -> Suggestion | None:
        ((name, _),) = options.items()
        assert work.step_tokens == 2 * some.work.step_tokens
        least[name], gain = least_gain, gains[name]
        if gain is None:
            return None
        return Suggestion(change=name, options=options, fits=True, gain=gain)

    monkeypatch.setattr(some, "_searched", searched)
    found = some._more_tokens()
    assert (found.change if found else None) == shown
    # Only an accumulation that is faster than the batch is searched.
    assert least == {"batch": _LEAST_GAIN, "accumulation": gains["batch"] or _LEAST_GAIN}


def test_a_machine_with_one_memory_gets_no_advice_to_store_gradients_in_8_bits(
    make_model: Callable[..., ModelSpec],
) -> None:
    """Its one policy stores no gradients."""
    untied = make_model(layers=4, hidden=128, intermediate=256, head_dim=32, tied=False)
    verdict = judge(untied, HardwareSpec.load("dgx-spark"), WORK, device_limit=4 * MIB)
    assert not verdict.feasible
    assert not any("gradients" in entry.options for entry in verdict.advice)


LONG_ROWS = Workload(batch=1, sequence=65_536, loss_chunk=1024, compiled=True, documents=True)


def kernel_advice(model: ModelSpec, hardware: HardwareSpec, work: Workload) -> list[Suggestion]:
    """Returns the suggestions to use another attention kernel."""
    verdict = judge(model, hardware, work, policies=["overlapped"])
    return [entry for entry in verdict.advice if "attention" in entry.options]


def changed(work: Workload, **changes: Any) -> Workload:
    return msgspec.structs.replace(work, **changes)


@pytest.mark.parametrize(
    ("changes", "least"), [({}, 0.3), ({"documents": False, "attention": "cudnn"}, 0.05)]
)
def test_long_rows_are_advised_to_use_an_optional_kernel_with_the_gain_of_doing_so(
    changes: dict[str, Any], least: float
) -> None:
    """Its gain is larger for rows of documents, which cuDNN's kernel cannot compute."""
    model, long = ModelSpec.load("qwen2.5-7b").with_layers(8), changed(LONG_ROWS, **changes)
    (entry,) = kernel_advice(model, H200, long)
    assert entry.change == "--attention flash4"
    assert entry.options == {"attention": "flash4"}
    assert entry.note == "needs the package flash-attn-4, rounds differently"
    before, after = (
        judge(model, H200, work, policies=["overlapped"]).tokens_per_second
        for work in (long, changed(long, attention="flash4"))
    )
    assert entry.gain == pytest.approx(after / before - 1, abs=0.01)
    assert entry.gain > least


@pytest.mark.parametrize(
    ("model", "hardware", "changes"),
    [
        ("qwen2.5-7b", "a100-80-sxm", {}),  # no such kernel
        ("gemma-2-9b", "h200", {}),  # windows and heads of 256
        ("qwen2.5-7b", "h200", {"attention": "flash4"}),
        ("qwen2.5-7b", "h200", {"sequence": 2_048, "batch": 32}),  # gains 3 %
    ],
)
def test_an_optional_kernel_is_not_advised_where_it_cannot_be_used_or_gains_little(
    model: str, hardware: str, changes: dict[str, Any]
) -> None:
    small, machine = ModelSpec.load(model).with_layers(4), HardwareSpec.load(hardware)
    if machine.costs:  # with a rate of the kernel, but without layers that were measured with it
        machine = msgspec.structs.replace(machine, attention=H200.attention)
    assert kernel_advice(small, machine, msgspec.structs.replace(LONG_ROWS, **changes)) == []


def test_the_most_useful_host_memory_has_the_promised_speed() -> None:
    """Regression test: the memory that the fastest plan needs was suggested with its speed. A
    search with just this memory found a plan that is 9 % slower.
    """
    model, machine = ModelSpec.load("mixtral-8x7b"), HardwareSpec.load("b200")
    work = Workload(batch=1, sequence=8192, accumulation=2, loss_chunk=4096, short_recompute=True)
    (entry,) = [
        each
        for each in judge(
            model, machine, work, policies=["overlapped"], host_limit=32 * 2**30
        ).advice
        if each.note == "more host memory gains nothing at this micro-batch"
    ]
    limit = parse_bytes(entry.options["host-memory"])
    following = judge(model, machine, work, policies=["overlapped"], advise=False, host_limit=limit)
    assert following.tokens_per_second == pytest.approx(entry.tokens_per_second, rel=0.005)
