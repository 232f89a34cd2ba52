"""Tests of the executor: refusals, memory, failed and interrupted steps, and results."""

from __future__ import annotations

import _thread
import functools
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
import torch
from covering import covering
from whole_models import drawn, model_of

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import Lane, OpFailed
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.optimizer.adamw import AdamW, WorkerThreads
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.memory.account import WITHOUT_ACTIVATIONS, account
from megatrain.simulator.model.workload import BY_LAYER, Clipping
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")
EXECUTABLE = tuple(policies.names())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(("lane-", "optimizer"))
    ]
    assert not left


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Arenas, pool: str, __: list[int]) -> torch.UntypedStorage:
        raise AssertionError(f"{pool} was allocated")

    monkeypatch.setattr(Arenas, "_allocate", refuse)


# ---- refusals ----


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize("digest", ["", "0123456789abcdef"])
def test_another_digest_is_refused(executable: Callable[..., Plan], digest: str) -> None:
    plan = msgspec.structs.replace(executable(), digest=digest)
    with pytest.raises(
        UserError,
        match=(
            f"plan: digest: found '{digest}'; allowed: {policies.lower(plan).digest}, .*; fix:"
            " if the plan or its policy was edited, write it again with"
        ),
    ):
        Executor(plan, config_of(plan.model), AdamW(), CPU)


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize("policy", policies.peers())
def test_another_system_is_refused_by_name(make_plan: Callable[..., Plan], policy: str) -> None:
    plan = make_plan(policy)
    plan = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    with pytest.raises(
        UserError,
        match=(
            f"plan: policy: found {policy}, the policy of another system, which is only for"
            " prediction;"
            " allowed: double_buffer, "
        ),
    ):
        Executor(plan, config_of(plan.model), AdamW(), CPU)


@pytest.mark.usefixtures("nothing_allocated")
def test_a_kernel_that_the_machine_lacks_is_refused(executable: Callable[..., Plan]) -> None:
    plan = executable(attention="cudnn")
    with pytest.raises(UserError, match=r"workload: attention: found cudnn on cpu"):
        Executor(plan, config_of(plan.model), AdamW(), CPU)


@pytest.mark.usefixtures("nothing_allocated")
def test_a_digest_of_other_knobs_is_refused(executable: Callable[..., Plan]) -> None:
    plan = executable()
    changed = msgspec.structs.replace(
        plan, knobs=msgspec.structs.replace(plan.knobs, gradient_slots=1)
    )
    with pytest.raises(UserError, match="digest"):
        Executor(changed, config_of(plan.model), AdamW(), CPU)


@pytest.mark.parametrize("place", ["device", "host"])
def test_pools_fit_to_the_byte_or_are_refused(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    plan = executable(gradient_slots=1)
    need = account(policies.lower(plan), 1, 1, WITHOUT_ACTIVATIONS, 0)
    peak = getattr(need, f"{place}_peak_bytes")
    largest = next(pool for pool in need.pools if pool.startswith(place))
    with session(msgspec.structs.replace(plan, **{f"{place}_limit_bytes": peak})) as fits:
        assert fits.executor.allocated(place) == peak
    monkeypatch.setattr(
        Arenas, "_allocate", lambda _, pool, __: pytest.fail(f"{pool} was allocated")
    )
    with pytest.raises(
        UserError,
        match=(
            f"^{place} memory: found pools of .*, the largest {largest} .*; fix: raise the limit by"
            " 1 B, or "
        ),
    ) as refusal:
        session(msgspec.structs.replace(plan, **{f"{place}_limit_bytes": peak - 1}))
    assert "\n" not in str(refusal.value)


def test_memory_that_the_machine_lacks_gives_a_one_line_error(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> torch.UntypedStorage:
        raise RuntimeError("out of memory\nand a long story")

    monkeypatch.setattr(Arenas, "_allocate", refuse)
    with pytest.raises(
        UserError,
        match=r"^pool \S+: found no room for .* \(out of memory\); allowed: free memory; fix: ",
    ) as refusal:
        session(executable())
    assert "long story" not in str(refusal.value)


def test_a_refused_executor_leaves_no_thread(executable: Callable[..., Plan]) -> None:
    """The kernels of the lane `cpu` have threads that Python does not know."""
    plan = msgspec.structs.replace(executable("overlapped"), device_limit_bytes=1)
    before = set(os.listdir("/proc/self/task"))
    with pytest.raises(UserError, match=r"^device memory: "):
        Executor(plan, config_of(plan.model), AdamW(), CPU, threads={"cpu": 4})
    assert set(os.listdir("/proc/self/task")) <= before


# ---- memory ----


@pytest.mark.parametrize("policy", EXECUTABLE)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "checkpoint_interval": 3, "gradient_staging": 3, "dtype": "fp32"},
        {"tied": True, "clipping": "none"},
    ],
)
def test_pools_are_allocated_as_the_simulator_accounts_for_them(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    policy: str,
    changes: dict[str, Any],
) -> None:
    plan = executable(policy, **changes)
    with session(plan) as running:
        arenas, schedule = running.executor._arenas, running.executor.schedule
        predicted = account(schedule, plan.device_limit_bytes, plan.host_limit_bytes, None, 0)
        pools = {
            pool: size
            for pool, size in predicted.pools.items()
            if pool not in ("device.activations", "device.workspace")
        }
        assert arenas.pool_bytes == pools
        real = {
            buffer.pool: arenas.flat(buffer.id, torch.uint8, 1).untyped_storage().nbytes()
            for buffer in schedule.buffers
            if not buffer.dynamic
        }
        assert real == pools
        assert (
            arenas.total("device")
            == account(schedule, 1, 1, WITHOUT_ACTIVATIONS, 0).device_peak_bytes
        )
        assert arenas.total("host") == predicted.host_peak_bytes


def test_buffers_of_a_pool_do_not_overlap(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable(accumulation=2)) as running:
        places = []
        for buffer in running.executor.schedule.buffers:
            if not buffer.dynamic:
                pool, start = running.executor._arenas.start_of(buffer.id)
                places.append((pool + start, pool + start + buffer.bytes))
                assert (pool + start) % 64 == 0, f"{buffer.id} is not aligned"
        for (_, end), (start, _) in itertools.pairwise(sorted(places)):
            assert end <= start


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        pytest.param(policy, changes, marks=[pytest.mark.nightly] if nightly else [])
        for policy in EXECUTABLE
        for changes in ({}, {"accumulation": 2}, {"clipping": "update"}, {"tied": True})
        for nightly in (bool(changes) and policy not in ("k_buffer", "overlapped"),)
    ],
    ids=str,
)
def test_old_contents_of_a_slot_change_no_bit(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    policy: str,
    changes: dict[str, Any],
) -> None:
    """Old contents of a slot change no result.

    This includes the padding between tensors, which a norm sums and an update reads.
    """
    plan = executable(policy, **changes)
    with session(plan) as undisturbed:
        want = undisturbed.bits()
    with session(plan) as running:
        for buffer in running.executor.schedule.buffers:
            if not (buffer.persistent or buffer.dynamic):
                running.executor._arenas.flat(buffer.id, torch.uint8, buffer.bytes).fill_(
                    0xFF
                )  # NaN in bf16 and fp32
        assert running.bits() == want


# ---- failures ----


@pytest.mark.parametrize(
    ("op", "lane"),
    [
        ("F1.m0", "compute"),
        ("W2f.m0.c0", "h2d"),
        ("G1b.m0.c0", "d2h"),
        ("N0", "cpu"),
        ("UC2", "cpu"),
    ],
)
def test_a_failing_op_is_named_and_ends_the_step(
    executable: Callable[..., Plan], session: Callable[..., Any], op: str, lane: str
) -> None:
    with session(executable(chunk_bytes=2**20)) as running:
        task = running.tasks[op]
        works, ended = task.run, []

        def fail() -> None:
            raise ZeroDivisionError("planted")

        task.run = fail
        last = list(running.tasks.values())[-1]
        last.run = lambda: ended.append(True)
        with pytest.raises(
            OpFailed, match=f"^{op} on lane {lane}: ZeroDivisionError: planted$"
        ) as failure:
            running.step()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
        assert not ended, "an op after the failure was run"
        lanes = [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")]
        assert sorted(lanes) == sorted(
            f"lane-{name}" for name in running.executor.schedule.lanes if name != "update"
        ), "a lane ended, but must wait for the next step"
        task.run = works
        running.executor._undefined = False  # the lanes are tested here, not the weights
        running.step()
        assert ended, "the step after the failure did not run all ops"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt.

    A background job of a shell, such as a nightly run, starts with Ctrl-C ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_step_ends_it_promptly(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    ran: list[str] = []
    order = itertools.count()

    def slowly(op: str) -> None:
        if next(order) == 0:
            _thread.interrupt_main()
        time.sleep(0.1)
        ran.append(op)

    with session(executable(chunk_bytes=2**20)) as running:
        for task in running.tasks.values():
            task.run = functools.partial(slowly, task.op)
        with pytest.raises(KeyboardInterrupt):
            running.step()
        count = len(ran)
        assert count < len(running.tasks)
        time.sleep(0.25)
        assert len(ran) == count, "a lane went on after the interruption"


def test_ctrl_c_while_the_lanes_start_does_not_hang(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the starts of two lanes does not cause a hang.

    The first lane waits for ops of a lane that never starts.
    """
    play = Lane.play

    def interrupted(lane: Lane) -> None:
        if lane.name == "h2d":
            raise KeyboardInterrupt
        play(lane)

    running = session(executable())
    closing = threading.Thread(target=running.executor.close, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "play", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step()
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("policy", "clipping"), covering(EXECUTABLE, get_args(Clipping), whole="overlapped")
)
def test_a_nan_loss_is_an_error(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, clipping: str
) -> None:
    def broken(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        return random_weights(0)(layer, tensor, shape) * (
            float("nan") if (layer, tensor) == ("2", "input_layernorm.weight") else 1
        )

    with (
        session(executable(policy, clipping=clipping), weights=broken) as running,
        pytest.raises(FloatingPointError, match=r"^step 3: loss nan"),
    ):
        running.step(3)


# ---- results ----


@pytest.mark.parametrize(
    ("policy", "clipping"), covering(policies.names(), BY_LAYER, whole="overlapped")
)
def test_a_layer_whose_gradient_is_not_finite_is_not_updated(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, clipping: str
) -> None:
    """A step with a finite loss and a gradient that is not finite raises an error.

    With every policy, the layer of this gradient is unchanged and the other layers are updated.
    """
    plan = executable(policy, clipping=clipping, weights_ahead=1)
    with session(plan) as running:
        running.step(1)
        before = {layer.name: running.state.masters(layer) for layer in plan.model.stack.values()}
        backward = running.tasks["B1.m0"]
        gradient = running.executor._arenas.flat(
            running.executor.schedule.by_id["B1.m0"].writes[0], torch.bfloat16, 100
        )
        work = backward.run
        backward.run = lambda: (work(), gradient[7].fill_(float("inf")))
        with pytest.raises(
            FloatingPointError, match=r"^step 2: loss \d.*, layers not updated: 1: not finite"
        ):
            running.step(2)
        changed = [
            layer.name
            for layer in plan.model.stack.values()
            if not same(running.state.masters(layer), before[layer.name])
        ]
        assert changed == [layer for layer in plan.model.stack if layer != "1"]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("policy", "clipping"), covering(policies.names(), get_args(Clipping), whole="overlapped")
)
def test_a_step_that_is_not_finite_changes_no_state(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, clipping: str
) -> None:
    """If activations become NaN in a step, none of its updates is applied.

    The error names the step and its loss.
    """
    plan = executable(policy, clipping=clipping)
    with session(plan) as good:
        wanted = good.bits(steps=2).masters
    with session(plan) as running:
        for number in (1, 2):
            running.step(number)
        forward = running.tasks["F1.m0"]
        output = running.executor._arenas.flat(
            next(op for op in running.executor.schedule.ops if op.id == "F1.m0").writes[0],
            torch.bfloat16,
            1,
        )
        work = forward.run
        forward.run = lambda: (work(), output.fill_(float("nan")))
        with pytest.raises(FloatingPointError, match=r"^step 3: loss nan"):
            running.step(3)
        running.executor.flush_update()
        assert running.masters() == wanted


@pytest.mark.parametrize("policy", EXECUTABLE)
def test_the_measured_timeline_is_one_of_the_schedule(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    plan = executable(policy, accumulation=2, checkpoint_interval=2)
    with session(plan) as running:
        for number in (1, 2):
            begin = time.perf_counter()
            result = running.step(number)
            seconds = time.perf_counter() - begin
            schedule, timeline = running.executor.schedule, result.timeline
            assert (timeline.name, timeline.digest) == ("measured", plan.digest)
            assert [(span.op, span.lane) for span in timeline.spans] == [
                (op.id, op.lane) for op in schedule.ops
            ]
            assert all(0 <= span.start_ns <= span.end_ns for span in timeline.spans)
            for queue in schedule.lanes.values():
                for before, after in itertools.pairwise(timeline.by_op[op.id] for op in queue):
                    assert before.end_ns <= after.start_ns, (
                        f"{after.op} overlaps or overtakes {before.op}"
                    )
            for op in schedule.ops:
                for other in op.after:
                    assert timeline.by_op[other].end_ns <= timeline.by_op[op.id].start_ns, (
                        f"{op.id} did not wait for {other}"
                    )
            assert timeline.makespan_ns / 1e9 <= result.seconds <= seconds
            assert all(
                span.duration_ns > 0
                for span in timeline.spans
                if span.kind in ("forward", "backward", "update", "cpu_update")
            )


def test_the_loss_is_the_mean_over_labelled_tokens(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """The loss is the mean over the labelled tokens of all micro-batches.

    With zero weights every token is equally likely, so the loss is ln(vocabulary).
    """
    with session(
        executable(accumulation=2, clipping="none", dtype="fp32"),
        weights=lambda *named: torch.zeros(named[2]),
    ) as running:
        batches = running.batches(1)
        batches[0][1][:, 3:] = IGNORED
        result = running.executor.step(batches, rate=0.0, number=1)
        assert result.loss == pytest.approx(float(torch.tensor(256.0).log()), rel=1e-6)
        assert result.gradient_norm is None
        for _, labels, _ in batches:
            labels.fill_(IGNORED)
        assert running.executor.step(batches, rate=0.0, number=2).loss == 0.0


def test_optimizer_threads_change_no_bit(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerThreads, "cpu_block", 1024)
    plan = executable()
    with session(plan) as alone:
        want = alone.bits()
    with session(
        plan, threads={"compute": 1, "update": 1, "h2d": 1, "d2h": 1, "cpu": 3}
    ) as together:
        assert together.bits() == want


@pytest.mark.usefixtures("without_kernels")
def test_garbage_of_the_compiler_is_freed_before_the_backward_pass(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's compiler leaves reference cycles that keep the tensors of the head's frame alive.

    Python's garbage collector may run much later, so it is switched off here.
    """
    head, backward = FunctionalLayers.head, FunctionalLayers.backward
    left: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def leaving_garbage(self: FunctionalLayers, *args: Any) -> Any:
        cycle: list[Any] = [torch.empty(1)]
        cycle.append(cycle)
        left.append(weakref.ref(cycle[0]))
        return head(self, *args)

    def looking(self: FunctionalLayers, *args: Any) -> Any:
        alive.append(any(tensor() is not None for tensor in left))
        return backward(self, *args)

    monkeypatch.setattr(FunctionalLayers, "head", leaving_garbage)
    monkeypatch.setattr(FunctionalLayers, "backward", looking)
    with run(model_of("llama"), dtype="bf16", compiled=True) as running:
        batches = drawn(running.plan)
        gc.disable()
        try:
            running.executor.step(batches, rate=0.0, number=1)
        finally:
            gc.enable()
    assert alive
    assert not any(alive)
