"""Properties of `check` on random models, machines and workloads.

More memory or speed never makes a step slower, advice is correct, and the chosen plan is the best
that the verdict lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from megatrain.simulator import HardwareSpec, ModelSpec, Workload, judge, policies
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.planner.assessment import Choice
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import candidates, plans_of
from megatrain.simulator.planner.shared_step import shared_step
from megatrain.simulator.schedule.arithmetic import contributions, layer_state
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import Verdict, summarize

GIB = 2**30
SMALL = ("qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-1b", "llama-3.2-1b")
LARGER = (
    "qwen2.5-1.5b",
    "gemma-2-2b",
    "llama-3.2-3b",
    "phi-2",
    "qwen3-4b",
    "olmoe-1b-7b",
    "qwen2.5-7b",
    "gpt-oss-20b",
)
STREAMING = (
    "a100-40",
    "a100-80-sxm",
    "a6000",
    "b200",
    "gb200",
    "gh200-96",
    "h100-pcie",
    "h200",
    "l40s",
    "mi300x",
    "rtx-pro-6000",
    "rtx3080-10gb",
    "rtx3090",
    "rtx4090",
)
UNIFIED = ("dgx-spark", "apple-m4-max", "ryzen-ai-max-395-128gb")
SLOWER = 1.005
"""Factor by which a step may become longer with more memory or speed.

The search tries only some plans, so it may miss the best one by a little.
"""
SELDOM = 0.02
"""Share of the drawn examples in which a step may become longer by more than `SLOWER`."""


class Case(msgspec.Struct, frozen=True):
    model: str
    machine: str
    work: Workload
    device: float
    """Share of the machine's device memory that may be used."""
    host: float
    """Share of the machine's host memory that may be used."""
    layers: int | None = None
    """Number of decoder layers. None means all layers of the model."""

    @property
    def spec(self) -> ModelSpec:
        spec = ModelSpec.load(self.model)
        return spec if self.layers is None else spec.with_layers(self.layers)

    @property
    def limits(self) -> dict[str, int]:
        hardware = HardwareSpec.load(self.machine)
        return {
            "device_limit": int(self.device * hardware.device_bytes),
            "host_limit": int(self.host * hardware.host_bytes),
        }

    def judged(self, hardware: HardwareSpec | None = None, **changes: Any) -> Verdict:
        options = {"workload": self.work, "advise": False, **self.limits, **changes}
        return judge(self.spec, hardware or HardwareSpec.load(self.machine), **options)

    def searched(self, hardware: HardwareSpec | None = None, **changes: Any) -> Choice:
        """Returns the choice of which `judged` would explain the step.

        The explanation takes as long as the search.
        """
        options = {**self.limits, **changes}
        work = options.pop("workload", self.work)
        machine = hardware or HardwareSpec.load(self.machine)
        return candidates(self.spec, machine, work, **options)[0]


workloads = st.builds(
    lambda numbers, **fields: Workload(**numbers, **fields),
    numbers=st.sampled_from(
        [
            {"dtype": "bf16"},
            {"dtype": "bf16"},
            {"dtype": "fp32"},
            {"dtype": "bf16", "state": "master24"},
            {"dtype": "bf16", "state": "bf16-sr"},
        ]
    ),
    batch=st.sampled_from([1, 2, 4, 8, 16]),
    sequence=st.sampled_from([256, 512, 1024, 2048, 4096, 8192]),
    accumulation=st.sampled_from([1, 2, 3, 4]),
    clipping=st.sampled_from(["global", "layer", "update", "none"]),
    loss_chunk=st.sampled_from([256, 1024, 4096]),
    documents=st.booleans(),
)


def cases(
    models: tuple[str, ...],
    machines: tuple[str, ...] = STREAMING + UNIFIED,
    layers: int | None = None,
) -> st.SearchStrategy[Case]:
    shares = st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0])
    return st.builds(
        Case,
        model=st.sampled_from(models),
        machine=st.sampled_from(machines),
        work=workloads,
        device=shares,
        host=shares,
        layers=st.just(layers),
    )


Relation = Callable[[st.DataObject, Case], None]


def related(
    few: int = 3, many: int = 200, **machines: Any
) -> Callable[[Relation], Callable[..., None]]:
    """Returns a decorator that makes two tests of a relation.

    One test draws `few` examples of small models with a few layers, so the search is fast. The
    other, for the nightly run, draws `many` examples of any model. There is none if `many` is 0.
    """

    def decorate(relation: Relation) -> Callable[..., None]:
        def test(count: int) -> None:
            drawn_examples(relation, count, derandomize=count == few, **machines)

        marks = [pytest.param(few, id="few")]
        if many:
            nightly = [pytest.mark.nightly, pytest.mark.timeout(7200)]
            marks.append(pytest.param(many, id="many", marks=nightly))
        test.__doc__ = relation.__doc__
        return pytest.mark.parametrize("count", marks)(test)

    return decorate


def drawn_examples(relation: Relation, count: int, *, derandomize: bool, **machines: Any) -> None:
    """Calls `relation` with `count` drawn examples.

    With `derandomize`, they are the same in every run, and have small models with a few layers.
    """

    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=derandomize,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )  # no shrinking: each smaller example would take seconds
    @given(
        st.data(),
        cases(SMALL, layers=8, **machines) if derandomize else cases(SMALL + LARGER, **machines),
    )
    def drawn(data: st.DataObject, case: Case) -> None:
        relation(data, case)

    drawn()


def _faster_link(hardware: HardwareSpec) -> HardwareSpec:
    rates = {name: 1.25 * getattr(hardware, name) for name in ("h2d_gb_per_s", "d2h_gb_per_s")}
    curves = {
        name: tuple((size, 1.25 * rate) for size, rate in getattr(hardware, name))
        for name in ("h2d_curve", "d2h_curve", "duplex_curve")
    }
    return msgspec.structs.replace(hardware, **rates, **curves)


def _faster_compute(hardware: HardwareSpec) -> HardwareSpec:
    return msgspec.structs.replace(
        hardware, peak_tflops={dtype: 1.25 * peak for dtype, peak in hardware.peak_tflops.items()}
    )


def _more_cores(hardware: HardwareSpec) -> HardwareSpec:
    rates = {name: 1.5 * getattr(hardware, name) for name in ("cpu_update_per_s", "cpu_adam_per_s")}
    return msgspec.structs.replace(hardware, cores=round(1.5 * hardware.cores), **rates)


def _faster_dram(hardware: HardwareSpec) -> HardwareSpec:
    memory = hardware.host_memory
    if memory is not None:
        memory = msgspec.structs.replace(memory, gb_per_s=2.5 * memory.gb_per_s)
    return msgspec.structs.replace(hardware, host_memory=memory)


FASTER = {
    "link": _faster_link,
    "compute": _faster_compute,
    "cores": _more_cores,
    "dram": _faster_dram,
}


def _with_more(case: Case, what: str, more: int = GIB) -> tuple[HardwareSpec, dict[str, int]]:
    """Returns the machine and the limits of `case` with more of `what`: `more` bytes of a limit, or
    an entry of `FASTER`.
    """
    hardware, limits = HardwareSpec.load(case.machine), case.limits
    if what in FASTER:
        return FASTER[what](hardware), limits
    return hardware, {**limits, what: limits[what] + more}


def _draw_more(data: st.DataObject, case: Case) -> tuple[HardwareSpec, dict[str, int]]:
    what = data.draw(st.sampled_from(["device_limit", "host_limit", *FASTER]))
    if what in FASTER:
        return _with_more(case, what)
    more = data.draw(st.sampled_from([GIB // 2, GIB, 2 * GIB, case.limits[what] // 4]))
    return _with_more(case, what, more)


Search = Callable[[Case, HardwareSpec, dict[str, int]], Choice]


def _on_one_gpu(case: Case, hardware: HardwareSpec, limits: dict[str, int]) -> Choice:
    """Returns the best plan of `case` for one GPU of `hardware`."""
    return case.searched(hardware, **limits)


def _on_two_gpus(case: Case, hardware: HardwareSpec, limits: dict[str, int]) -> Choice:
    """Returns the best plan of `case` for two GPUs of `hardware`."""
    work = msgspec.structs.replace(case.work, clipping="global", state="exact")
    (plan,) = plans_of(case.spec, hardware, work, policies=["overlapped"], **limits)
    return shared_step(plan, hardware, 2)


def _times_as_long(data: st.DataObject, case: Case, search: Search) -> float:
    """Returns the step time with more of something divided by the step time of `case`, or 0 if
    nothing fits `case`. Asserts that what fits `case` fits with more.
    """
    before = search(case, HardwareSpec.load(case.machine), case.limits)
    after = search(case, *_draw_more(data, case))
    assert after.feasible >= before.feasible
    return after.step_seconds / before.step_seconds if before.feasible else 0.0


@related(many=0)
def test_more_of_anything_is_no_slower(data: st.DataObject, case: Case) -> None:
    assert _times_as_long(data, case, _on_one_gpu) <= SLOWER


@related(few=2, many=0, machines=STREAMING)
def test_more_of_anything_is_no_slower_with_two_gpus(data: st.DataObject, case: Case) -> None:
    assert _times_as_long(data, case, _on_two_gpus) <= SLOWER


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("search", "machines"),
    [
        pytest.param(_on_one_gpu, STREAMING + UNIFIED, id="one-gpu"),
        pytest.param(_on_two_gpus, STREAMING, id="two-gpus"),
    ],
)
def test_more_of_anything_is_seldom_slower(
    search: Search, machines: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    """The examples of any model are drawn anew in each run. No search guarantees this for all.

    A report of `--junitxml` has the counts.
    """
    ratios = list[float]()

    def compare(data: st.DataObject, case: Case) -> None:
        ratios.append(_times_as_long(data, case, search))

    drawn_examples(compare, 200, derandomize=False, machines=machines)
    fitting = [ratio for ratio in ratios if ratio]
    slower = sorted(ratio for ratio in fitting if ratio > SLOWER)
    record_property("pairs that fit", len(fitting))
    record_property("times as long, if above 1.005", slower)
    assert len(fitting) > 100
    assert len(slower) <= SELDOM * len(fitting)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        # A plan with whole layers on the device had neighbours with fewer layers there, but not
        # with fewer layers and more saved activations: 1.1 % slower.
        pytest.param(
            Case(
                "phi-2",
                "mi300x",
                Workload(batch=8, sequence=512, clipping="update", loss_chunk=256),
                0.25,
                1.0,
            ),
            "device_limit",
            id="fewer-layers-save-more",
        ),
        # The second-best candidate was 0.8 % slower than the best. It had much faster neighbours,
        # but no climb began there: 2.2 % slower.
        pytest.param(
            Case(
                "qwen3-4b",
                "rtx-pro-6000",
                Workload(batch=4, sequence=1024, state="bf16-sr", loss_chunk=4096, documents=True),
                0.5,
                1.0,
            ),
            "link",
            id="second-best-candidate",
        ),
        # Fewer slots were tried with whole layers on the device only for plans that already had
        # these: 7.0 % slower.
        pytest.param(
            Case(
                "olmoe-1b-7b",
                "h200",
                Workload(batch=1, sequence=2048, accumulation=2, loss_chunk=256, documents=True),
                0.75,
                0.75,
            ),
            "link",
            id="whole-layers-in-fewer-slots",
        ),
        # Evenly spaced numbers of whole layers began at none, which does not fit the host: 2.1 %
        # slower.
        pytest.param(
            Case(
                "qwen3-4b",
                "a6000",
                Workload(batch=1, sequence=4096, clipping="update", loss_chunk=1024),
                1.0,
                0.1,
            ),
            "link",
            id="least-whole-layers",
            marks=pytest.mark.nightly,
        ),
        # A second search was skipped because it began with a plan that was slower than the end of
        # the first one: 4.2 % slower.
        pytest.param(
            Case(
                "llama-3.2-1b",
                "rtx3080-10gb",
                Workload(batch=1, sequence=512, state="master24", loss_chunk=4096, documents=True),
                0.5,
                0.5,
            ),
            "cores",
            id="second-search",
        ),
        # If everything fitted, no plan updated the last layers on the host: 2.6 % slower.
        pytest.param(
            Case(
                "qwen2.5-0.5b",
                "a100-80-sxm",
                Workload(batch=1, sequence=256, loss_chunk=256),
                0.1,
                0.1,
            ),
            "device_limit",
            id="all-layers-but-one",
        ),
        # The head was never among the layers whose whole state is on the device: 33 % slower.
        pytest.param(
            Case(
                "qwen2.5-7b",
                "h200",
                Workload(batch=4, sequence=512, accumulation=3, loss_chunk=4096, documents=True),
                0.25,
                0.75,
            ),
            "host_limit",
            id="whole-head",
        ),
    ],
)
def test_more_is_no_slower_in_a_drawn_example(case: Case, what: str) -> None:
    """Regression test: these examples were drawn, and the step was slower with more."""
    hardware, limits = _with_more(case, what, GIB // 2)
    after = case.searched(hardware, **limits)
    assert after.step_seconds <= SLOWER * case.searched().step_seconds


def test_faster_host_memory_is_no_slower() -> None:
    """Regression test: with 160 GB/s, the step was 17 % slower than with 120 GB/s.

    The fastest candidate updated every second layer on the host, and no climb began from those that
    update all.
    """
    work = Workload(batch=1, sequence=1024, documents=True)
    case = Case("qwen2.5-7b", "rtx4090", work, 1.0, 1.5)
    machine = HardwareSpec.load(case.machine)
    assert machine.host_memory is not None
    slower, faster = (
        case.searched(
            msgspec.structs.replace(
                machine, host_memory=msgspec.structs.replace(machine.host_memory, gb_per_s=rate)
            )
        ).step_seconds
        for rate in (120.0, 160.0)
    )
    assert faster <= SLOWER * slower


def test_a_plan_that_needs_less_host_memory_is_found_with_less() -> None:
    """Regression test: the plan for 97 GiB needs 94.8 GiB, but with 96 GiB, a slower one was found.

    No candidate with the usual slots fits in 96 GiB. With a little more, one does, and a climb from
    it ends at a plan with more state on the device.
    """
    work = Workload(batch=1, sequence=1024, documents=True)
    case = Case("qwen2.5-7b", "rtx3080-10gb", work, 1.0, 1.0)
    less, more = (case.searched(host_limit=limit * GIB) for limit in (96, 97))
    assert more.account.host_peak_bytes < 96 * GIB
    assert less.step_seconds <= SLOWER * more.step_seconds


def test_a_plan_from_beyond_the_host_memory_replaces_no_faster_one() -> None:
    """Regression test: with 96 GiB, the plan of two GPUs was 0.6 % slower than with 95 GiB.

    The plan from beyond had been polished, and the plan that it replaced had not.
    """
    work = Workload(batch=4, sequence=1024, loss_chunk=1024, short_recompute=True, documents=True)
    case = Case("qwen2.5-7b", "rtx4090", work, 1.0, 1.0)
    less, more = (
        _on_two_gpus(
            case, HardwareSpec.load(case.machine), {**case.limits, "host_limit": limit * GIB}
        ).step_seconds
        for limit in (95, 96)
    )
    assert more <= SLOWER * less


def test_a_plan_from_beyond_that_does_not_fit_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Workload(
        batch=4,
        sequence=1024,
        accumulation=4,
        loss_chunk=1024,
        short_recompute=True,
        documents=True,
    )
    case = Case("qwen2.5-1.5b", "rtx4090", work, 1.0, 1.0)
    limits = {"device_limit": 8 * GIB, "host_limit": 19 * GIB}
    found = case.searched(**limits)
    monkeypatch.setattr(PlacementSearch, "_from_beyond", lambda *_: None)
    assert found.step_seconds <= case.searched(**limits).step_seconds


def test_a_faster_link_is_no_slower_with_two_gpus() -> None:
    """Regression test: this drawn example was 6.7 % slower with a faster link.

    Weight slots took the memory of low halves and moments, but not that of gradients.
    """
    work = Workload(batch=4, sequence=1024, accumulation=3, loss_chunk=256, documents=True)
    case = Case("olmoe-1b-7b", "gh200-96", work, 0.5, 0.1)
    limits = {**case.limits, "device_limit": case.limits["device_limit"] + 2**25}
    before, after = (
        _on_two_gpus(case, hardware, limits)
        for hardware in (HardwareSpec.load(case.machine), _with_more(case, "link")[0])
    )
    assert after.step_seconds <= SLOWER * before.step_seconds


def test_more_device_memory_is_no_slower_where_the_host_updates_fast() -> None:
    """Regression test: a search with memory for all weights gave a plan that was 8 % slower.

    The best plan keeps the whole state of some layers on the device, and no other weights.
    """
    work = Workload(batch=4, sequence=2048, clipping="none")
    case = Case("olmoe-1b-7b", "gh200-96", work, 1.0, 1.0, layers=8)
    less, more = (case.searched(device_limit=limit * GIB).step_seconds for limit in (44, 56))
    assert more <= SLOWER * less


@pytest.mark.parametrize(
    ("case", "less", "more"),
    [
        # The larger limit held two more layers, and weight slots that gain more would have needed
        # the memory of whole layers: 3.9 % slower.
        pytest.param(
            Case(
                "phi-2",
                "b200",
                Workload(batch=2, sequence=4096, clipping="layer", loss_chunk=1024),
                1.0,
                0.25,
            ),
            17.58,
            18.08,
            id="slots-for-whole-layers",
        ),
        # Only without the state of the tied embedding do more layers save their activations: 0.7 %
        # slower.
        pytest.param(
            Case(
                "llama-3.2-3b",
                "rtx-pro-6000",
                Workload(
                    batch=8,
                    sequence=2048,
                    accumulation=4,
                    clipping="layer",
                    loss_chunk=2048,
                    compiled=True,
                ),
                1.0,
                0.5,
            ),
            15.59,
            16.59,
            id="saved-activations-for-all-state",
            marks=pytest.mark.nightly,
        ),
        # Offloading the layer inputs gained nothing alone, only with the layer that then could save
        # its activations: 0.7 % slower.
        pytest.param(
            Case(
                "phi-2",
                "a100-40",
                Workload(batch=16, sequence=2048, clipping="none", loss_chunk=1024),
                1.0,
                1.0,
            ),
            23.88,
            24.38,
            id="saved-activations-for-inputs",
        ),
        # One more saved layer instead of nine layers on the device gained less than the 0.4 % that
        # the search required: 0.5 % slower.
        pytest.param(
            Case(
                "qwen2.5-1.5b",
                "h200",
                Workload(
                    batch=4,
                    sequence=4096,
                    clipping="update",
                    state="bf16-sr",
                    loss_chunk=1024,
                    documents=True,
                ),
                1.0,
                1.0,
            ),
            13.87,
            14.37,
            id="saved-activations-for-whole-layers",
            marks=pytest.mark.nightly,
        ),
        # Plans without host updates seemed to take longer, because the contention of the first and
        # the last micro-batch was added for the second, too: 2.1 % slower.
        pytest.param(
            Case(
                "llama-3.2-3b",
                "h100-pcie",
                Workload(
                    batch=16,
                    sequence=512,
                    accumulation=3,
                    clipping="update",
                    state="bf16-sr",
                    loss_chunk=1024,
                ),
                1.0,
                1.0,
            ),
            38.75,
            39.25,
            id="third-micro-batch",
            marks=pytest.mark.nightly,
        ),
        # Larger copies were tried too late, after twelve plans with lower bounds that wait longer:
        # 1.8 % slower.
        pytest.param(
            Case(
                "llama-3.2-3b",
                "h100-pcie",
                Workload(
                    batch=4,
                    sequence=1024,
                    accumulation=2,
                    clipping="update",
                    state="bf16-sr",
                    loss_chunk=256,
                ),
                1.0,
                1.0,
            ),
            18.875,
            19.375,
            id="larger-copies-wait-less",
            marks=pytest.mark.nightly,
        ),
        # Host updates of every second layer were tried only where the device held all weights, so
        # that none was streamed: 0.7 % slower.
        pytest.param(
            Case(
                "pythia-6.9b",
                "a100-80-sxm",
                Workload(batch=2, sequence=1024, state="master24", loss_chunk=1024, documents=True),
                1.0,
                0.5408835,
                layers=8,
            ),
            9.812,
            10.062,
            id="half-of-the-host-updates",
        ),
        # The memory of a layer was not given to the low half of the embedding: 0.55 % slower.
        pytest.param(
            Case(
                "llama-3.1-8b",
                "h200",
                Workload(
                    batch=2,
                    sequence=2048,
                    accumulation=2,
                    loss_chunk=256,
                    documents=True,
                    short_recompute=True,
                ),
                1.0,
                1.0,
            ),
            13.87,
            14.37,
            id="state-of-the-embedding",
        ),
        # Larger copies were tried only if they fit in the memory that was left: 3.7 % slower.
        pytest.param(
            Case(
                "llama-3.2-3b",
                "h100-sxm",
                Workload(
                    batch=8,
                    sequence=4096,
                    state="bf16-sr",
                    loss_chunk=1024,
                    documents=True,
                    compiled=True,
                ),
                1.0,
                1.0,
                layers=16,
            ),
            8.58416,
            9.08416,
            id="larger-copies-instead-of-state",
        ),
        # The same with several micro-batches: 2.9 % slower.
        pytest.param(
            Case(
                "gemma-2-2b",
                "rtx5090",
                Workload(
                    batch=1,
                    sequence=2048,
                    accumulation=4,
                    clipping="none",
                    state="bf16-sr",
                    loss_chunk=256,
                    short_recompute=True,
                ),
                1.0,
                1.0,
            ),
            13.52416,
            14.52416,
            id="larger-copies-of-four-micro-batches",
            marks=pytest.mark.nightly,
        ),
        # Of plans with whole layers on the device, the one with the most layers was left out: 2.1 %
        # slower, and 8.5 % slower than the plan that is found now.
        pytest.param(
            Case(
                "olmoe-1b-7b",
                "h200",
                Workload(batch=8, sequence=256, accumulation=4, clipping="none", loss_chunk=4096),
                1.0,
                0.25,
            ),
            66.84863,
            70.84863,
            id="most-whole-layers",
        ),
    ],
)
def test_a_little_more_device_memory_is_no_slower(case: Case, less: float, more: float) -> None:
    """Regression test: these examples were drawn, and the step was slower with more memory."""
    before, after = (
        case.searched(device_limit=int(limit * GIB)).step_seconds for limit in (less, more)
    )
    assert after <= SLOWER * before


@pytest.mark.parametrize("clipping", ["layer", "none"])
def test_more_device_memory_is_no_slower_where_it_holds_no_larger_copies(clipping: str) -> None:
    """Regression test: a step with 38.5 GiB was 5 % slower than with 38 GiB.

    Saved activations of one layer took the memory that larger copies would have needed.
    """
    work = Workload(
        batch=1,
        sequence=1024,
        accumulation=2,
        clipping=clipping,
        state="bf16-sr",
        loss_chunk=1024,
        documents=True,
    )
    case = Case("qwen2.5-32b", "h200", work, 1.0, 1.0, layers=16)
    less, more = (case.searched(device_limit=int(limit * GIB)).step_seconds for limit in (38, 38.5))
    assert more <= SLOWER * less


@pytest.mark.parametrize("gib", [5.0, 5.3, 5.5])
def test_more_device_memory_is_no_slower_with_a_tied_embedding(gib: float) -> None:
    """Regression test: a search with 5.6 GiB gave a plan that was 41 % slower than with 5.5 GiB.

    The best plans keep the gradient of the embedding on the device, before any weights.
    """
    work = Workload(batch=2, sequence=256, clipping="layer", state="bf16-sr")
    case = Case("qwen3-4b", "h200", work, 1.0, 1.0, layers=8)
    less, more = (
        case.searched(device_limit=int(limit * GIB) + 2**25).step_seconds
        for limit in (gib, gib + 0.1)
    )
    assert more <= SLOWER * less
    assert less < 0.080


@pytest.mark.parametrize("gib", [9.8, 10.5, 11.0])
def test_the_host_may_update_all_layers_but_a_tied_embedding(gib: float) -> None:
    """Regression test: a step took 1.21 to 1.23 s with these limits, and 1.04 s with 10.3 GiB.

    The best plans keep hardly anything but the embedding on the device.
    """
    case = Case("gemma-2-2b", "a6000", Workload(batch=2, sequence=512), 1.0, 1.0)
    assert case.searched(device_limit=int(gib * GIB)).step_seconds < 1.06


@related(few=2)
def test_advice_is_correct(data: st.DataObject, case: Case) -> None:
    """A plan that should fit by the advice does fit, and its gain is within one percentage point.

    The gain of another state format is computed for the same plan, so a search may gain more.
    """
    before = case.judged(advise=True)
    entries = [entry for entry in before.advice if entry.fits and (entry.options or entry.model)]
    assume(entries)
    entry = data.draw(st.sampled_from(entries))
    if entry.model or "hardware" in entry.options:
        spec = ModelSpec.load(entry.model) if entry.model else case.spec
        limits = case.limits if entry.model else {}
        hardware = HardwareSpec.load(entry.options.get("hardware", case.machine))
        assert judge(spec, hardware, case.work, advise=False, **limits).feasible
        return
    fields = {
        "batch": "batch",
        "seq": "sequence",
        "loss-chunk": "loss_chunk",
        "accumulation": "accumulation",
        "clipping": "clipping",
        "gradients": "gradients",
        "state": "state",
    }
    changes = {
        field: value if field in ("clipping", "gradients", "state") else int(value)
        for name, field in fields.items()
        if (value := entry.options.get(name))
    }
    if "compile" in entry.options:
        changes["compiled"] = True
    limits = {
        f"{place}_limit": parse_bytes(entry.options[f"{place}-memory"])
        for place in ("device", "host")
        if f"{place}-memory" in entry.options
    }
    after = case.judged(workload=msgspec.structs.replace(case.work, **changes), **limits)
    assert after.feasible
    if entry.gain is not None:
        gain = after.tokens_per_second / before.tokens_per_second - 1
        assert gain >= entry.gain - 0.01
        assert entry.compressed or gain <= entry.gain + 0.01


def test_the_longest_context_counts_whole_pages_of_each_buffer() -> None:
    """Regression test: the sum of the buffers was rounded to pages instead of each buffer.

    The inputs of 36 layers are in host memory. A sequence that needed 16 KiB more was reported to
    fit.
    """
    work = Workload(batch=1, sequence=256, clipping="none", loss_chunk=4096)
    case = Case("qwen3-4b", "h200", work, 0.5, 0.75)
    most = case.judged().longest_context
    for sequence, fits in ((most, True), (most + 2, False)):
        after = case.searched(workload=msgspec.structs.replace(work, sequence=sequence))
        assert after.feasible == fits


@related()
def test_the_most_that_fits_fits_and_one_more_does_not(data: st.DataObject, case: Case) -> None:
    """The largest batch and the longest sequence fit, and one more does not."""
    before, what = case.judged(), data.draw(st.sampled_from(["batch", "sequence"]))
    most = before.largest_batch if what == "batch" else before.longest_context
    if not most:
        assert not before.feasible
        return
    held = {} if what == "batch" else {"batch": 1}
    fitting = msgspec.structs.replace(case.work, **held, **{what: most})
    assert case.searched(workload=fitting).feasible
    more = most + (1 if what == "batch" else 2)  # sizes are rounded, so one more may fit
    if more <= (2**20 if what == "batch" else 2**24):
        assert not case.searched(
            workload=msgspec.structs.replace(case.work, **held, **{what: more})
        ).feasible


def test_the_largest_batch_counts_that_one_group_needs_no_sum_in_fp32() -> None:
    """Regression test: the largest batch was that of ungrouped micro-batches, 15 instead of 32.

    Three micro-batches in one group need less host memory than one at a time.
    """
    work = Workload(batch=4, sequence=2048, accumulation=3, clipping="update", loss_chunk=4096)
    case = Case("olmoe-1b-7b", "a6000", work, 0.5, 0.125, layers=8)
    most = case.judged().largest_batch
    for batch, fits in ((most, True), (most + 1, False)):
        after = case.searched(workload=msgspec.structs.replace(work, batch=batch))
        assert after.feasible == fits


@related()
def test_the_choice_is_the_best_of_the_listed_plans(data: st.DataObject, case: Case) -> None:
    before, choice = case.judged(), case.searched()
    assert (before.feasible, before.step_seconds) == (choice.feasible, choice.step_seconds)
    assume(before.feasible)
    if before.runner_up:
        assert before.runner_up.step_seconds >= before.step_seconds
    for margin in before.one_more_gib:
        assert margin.step_seconds <= before.step_seconds
    if not before.unified:
        exact = case.work.state == "exact"  # other systems have no other format
        names = policies.names() if exact else policies.contenders()
        other = case.searched(policies=[data.draw(st.sampled_from(names))])
        assert not other.feasible or SLOWER * other.step_seconds >= before.step_seconds


@related(machines=STREAMING)
def test_other_systems_do_not_change_the_choice(data: st.DataObject, case: Case) -> None:
    """With `--policy all`, other systems are listed as predictions only.

    The choice is still the fastest policy that the runtime can execute.
    """
    work = msgspec.structs.replace(case.work, state="exact")  # other systems have no other format
    hardware, model = HardwareSpec.load(case.machine), case.spec
    own, peer = (
        data.draw(st.sampled_from(policies.contenders())),
        data.draw(st.sampled_from(policies.peers())),
    )
    alone = candidates(model, hardware, work, policies=[own], **case.limits)[0]
    found = candidates(model, hardware, work, policies=[own, peer], **case.limits)
    assert sorted(choice.plan.policy for choice in found) == sorted([own, peer])
    ours, other = sorted(found, key=lambda choice: choice.plan.policy != own)
    assert (ours.plan, ours.step_seconds) == (alone.plan, alone.step_seconds)
    assert found[0].feasible == (ours.feasible or other.feasible)
    if ours.feasible and other.feasible:
        assert found[0].step_seconds == min(ours.step_seconds, other.step_seconds)
    verdict = summarize(other, hardware)
    assert verdict.prediction_only
    assert not verdict.knobs
    assert verdict.runner_up is None


@related(machines=STREAMING)
def test_bytes_over_the_link_have_a_closed_form(data: st.DataObject, case: Case) -> None:
    """The bytes of each kind of copy follow from the plan.

    State is loaded and saved once per step. A gradient is saved once for each group of
    micro-batches, or with tied embeddings for each contribution. It is loaded for each but the
    first.
    """
    work = msgspec.structs.replace(
        case.work,
        clipping="global",
        state="exact",
        accumulation=data.draw(st.sampled_from([1, 2, 5])),
    )
    case = msgspec.structs.replace(case, work=work)
    knobs = case.searched(policies=["overlapped"]).plan.knobs
    plan = Plan(
        policy="overlapped",
        hardware=case.machine,
        source=case.model,
        model=case.spec,
        workload=case.work,
        knobs=knobs,
        device_limit_bytes=2**50,
        host_limit_bytes=2**50,
    )
    width, updated = DTYPE_BYTES[case.work.dtype], plan.placed("host_updated")
    expected = dict.fromkeys(("load_state", "save_state", "save_gradients", "load_gradients"), 0)
    for layer, spec in plan.model.stack.items():
        sizes = {
            "weights": width,
            "master_low": 4 - width,
            "moments": 8,
            "gradients": layer_state(plan, layer)["gradients"].bytes,
        }
        streams = {
            name: size * spec.elements
            for name, size in sizes.items()
            if layer in updated or layer not in plan.placed(name)
        }
        if layer not in updated:
            expected["load_state"] += sum(streams.values())
            expected["save_state"] += sum(
                size for name, size in streams.items() if name != "gradients"
            )
        count = contributions(plan, layer) // plan.knobs.micro_batch_group
        expected["save_gradients"] += count * streams.get("gradients", 0)
        expected["load_gradients"] += (count - 1) * streams.get("gradients", 0)
    found = dict.fromkeys(expected, 0)
    for op in policies.lower(plan).ops:
        if op.kind in found:
            found[op.kind] += op.bytes
    assert found == expected


def test_a_plan_that_updates_on_the_host_fits_the_host() -> None:
    """Regression test: the search chose a plan that did not fit in host memory.

    Layers that the host updates keep their state there, which may not fit together with offloaded
    inputs.
    """
    work = Workload(batch=1, sequence=2**19, token_piece=2**16, documents=True)
    case = Case("qwen2.5-7b", "h200", work, 1.0, 1.0)
    choice = case.searched(host_limit=128 * GIB, policies=["overlapped"])
    assert choice.feasible
    assert choice.plan.knobs.placement.offloaded_inputs == "all"


@pytest.mark.parametrize(
    ("model", "hardware", "work", "gib", "most"),
    [
        # Fits only with updates on the host, which need no slots for state on the device.
        (
            "qwen3-0.6b",
            "gh200-96",
            Workload(batch=2, sequence=8192, accumulation=4, clipping="update", loss_chunk=4096),
            9.15,
            2.19,
        ),
        # Plans with fewer slots fit, and are faster than updates on the host with all slots.
        ("qwen3-0.6b", "h200", Workload(batch=4, sequence=1024, loss_chunk=1024), 4.0, 0.195),
    ],
    ids=["alone", "fewer slots"],
)
def test_updates_on_the_host_are_tried_where_hardly_anything_fits(
    model: str, hardware: str, work: Workload, gib: float, most: float
) -> None:
    choice = Case(model, hardware, work, 1.0, 1.0).searched(
        device_limit=int(gib * GIB), policies=["overlapped"]
    )
    assert choice.feasible
    assert choice.step_seconds <= most


@pytest.mark.parametrize("device", [1.8, 2.0])
def test_more_host_memory_fits_where_hardly_anything_does(device: float) -> None:
    """Regression test: with 3 GiB of host memory nothing fitted, although a plan with 2.75 did.

    The search finds no plan here. Of the plans that need the least memory, one fits.
    """
    work = Workload(batch=1, sequence=512, clipping="none", loss_chunk=512)
    case = Case("qwen2.5-0.5b", "rtx4090", work, 1.0, 1.0, layers=8)
    limits = {"device_limit": int(device * GIB) + 2**26, "policies": ["overlapped"]}
    less, more = (case.searched(host_limit=int(size * GIB), **limits) for size in (2.75, 3))
    assert less.feasible
    assert more.feasible
    assert more.step_seconds <= SLOWER * less.step_seconds
