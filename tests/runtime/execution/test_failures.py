"""Tests of steps that fail: Ctrl-C, no memory, or a norm that is not finite.

The error names the cause, nothing is left behind, and the process can train again.
"""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from started_ranks import Driver

from megatrain.runtime.checkpoint.checkpoint import save
from megatrain.runtime.checkpoint.manifest import RunState
from megatrain.runtime.execution import executor
from megatrain.runtime.execution.executor import StateUndefined
from megatrain.runtime.execution.lanes import LaneGroup, OpFailed
from megatrain.runtime.files.model_files import export
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Placement, Plan

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB\nand"
    " a long story"
)
ON_LANES = [
    ("overlapped", "F1.m0", "compute"),
    ("overlapped", "N1", "update"),
    ("overlapped", "L1.c0", "h2d"),
    ("k_buffer", "G1b.m0.c0", "d2h"),
    ("k_buffer", "UC2", "cpu"),
]


@pytest.mark.parametrize(("policy", "op", "lane"), ON_LANES)
def test_the_error_of_a_full_device_names_op_lane_pools_and_remedy(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, op: str, lane: str
) -> None:
    with session(executable(policy, chunk_bytes=2**20)) as running:
        running.step(1)
        task = running.tasks[op]
        works, held = task.run, torch.ones(3)

        def fail() -> None:
            activations = held
            raise torch.OutOfMemoryError(CUDA if activations.numel() else "")

        task.run = fail
        with pytest.raises(UserError) as refusal:
            running.step(2)
        message = str(refusal.value)
        total, largest = (
            running.executor.allocated("device"),
            max(
                (pool for pool in running.executor.pool_bytes if pool.startswith("device.")),
                key=running.executor.pool_bytes.__getitem__,
            ),
        )
        assert message.startswith(
            f"device memory, {op} on lane {lane}: found no memory left besides pools of "
        )
        assert largest in message
        assert total > 0
        assert "Tried to allocate 20.00 MiB" in message
        assert "long story" not in message
        assert "; fix: close other programs that use the device; or plan again with " in message
        assert refusal.value.__context__ is None, (
            "the context would keep the step's activations alive"
        )
        assert refusal.value.__cause__ is None
        task.run = works
    with session(executable(policy)) as another:
        another.step(1)


def test_a_full_host_is_refused_like_a_full_device(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """A failed allocation on the host gives the same kind of error as on the device.

    The test really requests 2^55 bytes from the allocator.
    """
    with session(executable()) as running:
        running.tasks["UC2"].run = lambda: torch.empty(2**55, dtype=torch.uint8)
        with pytest.raises(
            UserError,
            match=(
                r"^host memory, UC2 on lane cpu: found no memory left besides pools of .*,"
                r" the largest host.moments .*--host-memory$"
            ),
        ):
            running.step(1)


def test_another_error_is_passed_on_unchanged(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable("overlapped")) as running:
        running.tasks["H.m0"].run = lambda: torch.ones(2) @ torch.ones(3)
        with pytest.raises(OpFailed, match=r"^H.m0 on lane compute: RuntimeError: ") as failure:
            running.step(1)
        assert isinstance(failure.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError, KeyboardInterrupt])
def test_a_failed_step_frees_its_saved_activations(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """The lane of the failed op runs on the calling thread, which gets the interruption."""
    monkeypatch.setattr(executor, "LaneGroup", lambda lanes, **_: LaneGroup(lanes, "compute"))
    outputs: list[weakref.ref[torch.Tensor]] = []
    plan = executable("overlapped", placement=Placement(saved_activations="all"))
    with session(plan) as running:

        def fail() -> None:
            saved = running.executor._state.saved
            outputs.extend([weakref.ref(graph.output) for graph in saved.values()])
            raise error

        running.tasks["H.m0"].run = fail
        with pytest.raises((UserError, OpFailed, KeyboardInterrupt)):
            running.step(1)
        assert len(outputs) == plan.model.layers
        gc.collect()
        assert not any(output() is not None for output in outputs)


def test_a_deferred_update_on_a_full_device_is_refused_in_one_line(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.runtime.optimizer import adamw as optimizer

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(CUDA)

    with session(executable("overlapped")) as running:
        running.step(1)
        monkeypatch.setattr(optimizer, "update", fail)
        with pytest.raises(UserError, match=r"^device memory, U\S+ on lane update: "):
            running.executor.flush_update()
        assert {
            thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")
        } == {f"lane-{name}" for name in running.executor.schedule.lanes if name != "update"}


def broken() -> None:
    raise ValueError("broken")


USES: dict[str, Callable[[Any, Path], object]] = {
    "step": lambda running, _: running.step(9),
    "evaluate": lambda running, _: running.executor.evaluate(running.batches(9)),
    "checksum": lambda running, _: running.executor.checksum(),
    "state": lambda running, _: running.masters(),
    "checkpoint": lambda running, place: save(
        running.executor, RunState(step=1, loss=None), place / "checkpoint"
    ),
    "export": lambda running, place: export(
        running.state, running.plan, config_of(running.plan.model), place / "model"
    ),
}


@pytest.mark.parametrize(
    ("policy", "op"), [("overlapped", "F1.m0"), ("overlapped", "flush"), ("k_buffer", "UC2")]
)
def test_after_an_update_that_failed_nothing_uses_the_state(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    policy: str,
    op: str,
) -> None:
    """Some layers may be updated and others not. A step begins with the deferred update."""
    with session(executable(policy, layers=3, clipping="global", chunk_bytes=2**20)) as running:
        running.step(1)
        if op == "flush":
            running.executor.flush_update()
            running.step(2)
            tasks = running.executor._programs["flush_update"].tasks
            next(task for name, task in tasks.items() if name.startswith("U2")).run = broken
            with pytest.raises(OpFailed, match=r"^U2\S* on lane update: ValueError: broken$"):
                running.executor.flush_update()
        else:
            failed = threading.Event()

            def fail() -> None:
                failed.set()
                broken()

            running.tasks[op].run = fail
            if policy == "overlapped":
                # The updates of later layers must not end before the forward pass fails.
                task = next(task for name, task in running.tasks.items() if name.startswith("U2"))
                update = task.run

                def update_later() -> None:
                    assert failed.wait(60)
                    update()

                task.run = update_later
            with pytest.raises(OpFailed, match="broken"):
                running.step(2)
        assert not running.executor.intact
        for use in USES.values():
            with pytest.raises(StateUndefined, match=r"not; resume from the last checkpoint$"):
                use(running, tmp_path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer"])
def test_a_failed_evaluation_leaves_the_state(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path, policy: str
) -> None:
    """It writes no state, also where it begins with a deferred update."""
    with session(executable(policy, layers=3, clipping="global")) as good:
        wanted = good.bits(steps=2).masters
    with session(executable(policy, layers=3, clipping="global")) as running:
        running.step(1)
        running.executor.evaluate(running.batches(9))
        running.step(2)
        task = running.executor._programs["evaluation"].tasks["F1.m0"]
        works, task.run = task.run, broken
        with pytest.raises(OpFailed, match="broken"):
            running.executor.evaluate(running.batches(9))
        assert running.masters() == wanted
        task.run = works
        for use in USES.values():
            use(running, tmp_path)


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer"])
def test_a_step_that_fails_before_its_updates_leaves_the_state(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    """This holds also for the update that the step before deferred."""
    plan = executable(policy, layers=3, clipping="global", chunk_bytes=2**20)
    with session(plan) as good:
        wanted = good.bits(steps=2).masters
    with session(plan) as running:
        running.step(1)
        op = "B1.m0"
        if policy == "overlapped":
            lanes = running.executor.schedule.lanes
            op = next(op.id for op in lanes["update"] if op.kind == "update")
        task = running.tasks[op]
        works, task.run = task.run, broken
        with pytest.raises(OpFailed, match="broken"):
            running.step(2)
        task.run = works
        running.step(2)
        assert running.masters() == wanted


def test_a_step_that_fails_after_a_deferred_update_leaves_the_state(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """All of the update of the step before has been applied, and is not applied again."""

    def fail() -> None:
        end = time.monotonic() + 20
        while running.executor._unwritten:  # ops of other lanes
            assert time.monotonic() < end
            time.sleep(0.001)
        broken()

    plan = executable("overlapped", layers=3, clipping="global", chunk_bytes=2**20)
    with session(plan) as good:
        one = good.bits(steps=1).masters
    with session(plan) as good:
        two = good.bits(steps=2).masters
    with session(plan) as running:
        running.step(1)
        task = running.tasks["B0.m0"]
        works, task.run = task.run, fail
        with pytest.raises(OpFailed, match="broken"):
            running.step(2)
        assert running.executor.intact
        assert running.masters() == one
        task.run = works
        running.step(2)
        assert running.masters() == two


def test_a_deferred_update_that_leaves_out_layers_is_undefined(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a policy from a file that defers updates with clipping by layer."""
    with session(executable("overlapped", layers=3, clipping="global")) as running:
        running.step(1)
        monkeypatch.setattr(running.executor, "_layers_not_updated", lambda: ["1"])
        with pytest.raises(StateUndefined):
            running.executor.flush_update()
        assert not running.executor.intact


def test_a_step_that_leaves_out_layers_may_have_changed_the_state(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the plan defers updates, as a policy from a file may with clipping by layer."""
    with session(executable("overlapped", layers=3, clipping="global")) as running:
        running.step(1)
        monkeypatch.setattr(running.executor, "_layers_not_updated", lambda: ["1"])
        with pytest.raises(FloatingPointError, match="layers not updated: 1"):
            running.step(2)
        assert not running.executor.intact


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer"])
def test_a_device_that_has_failed_leaves_the_state_undefined(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    with session(executable(policy, layers=3, clipping="global")) as running:
        running.step(1)
        op = next(iter(running.tasks))

        def fail() -> None:
            monkeypatch.setattr(running.executor, "_synchronize", fail_too)
            raise RuntimeError("CUDA error: an illegal memory access")

        def fail_too() -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        running.tasks[op].run = fail
        with pytest.raises(OpFailed, match="illegal memory access"):
            running.step(2)
        assert not running.executor.intact
        monkeypatch.undo()


def test_a_deferred_update_whose_ops_cannot_be_bound_is_not_lost(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = executable("overlapped", layers=3, clipping="global")
    with session(plan) as good:
        wanted = good.bits(steps=1).masters
    with session(plan) as running:
        running.step(1)
        with monkeypatch.context() as patch:
            patch.setattr(running.executor, "_bind", lambda _: broken())
            with pytest.raises(ValueError, match="broken"):
                running.executor.flush_update()
        assert running.masters() == wanted


@pytest.mark.parametrize("kernels", ["fused", "eager"])
@pytest.mark.parametrize("policy", policies.names())
def test_an_infinite_norm_stops_the_step_before_any_update(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    kernels: str,
) -> None:
    """If a layer's sum of squares is infinite, the step changes no weight and no moment.

    The loss is finite. Training continues as if the step had not been tried.
    """
    monkeypatch.setenv("MEGATRAIN_KERNELS", kernels)
    plan = executable(policy, chunk_bytes=2**14)

    def state(running: Any) -> bytes:
        running.executor.flush_update()
        moments = [
            running.executor.memory().flat(
                running.state.home("moments", layer.name), torch.int32, 2 * layer.elements
            )
            for layer in plan.model.stack.values()
        ]
        return bytes(running.masters()) + b"".join(tensor.numpy().tobytes() for tensor in moments)

    def trained(*, broken: bool) -> bytes:
        with session(plan) as running:
            running.step(1)
            if broken:
                before, task = state(running), running.tasks["N2"]
                scalar = running.executor._arenas.flat(
                    next(op for op in running.executor.schedule.ops if op.id == "N2").writes[0],
                    torch.float32,
                    1,
                )
                works = task.run
                task.run = lambda: (works(), scalar.fill_(float("inf")))
                with pytest.raises(
                    FloatingPointError,
                    match=(
                        r"^step 2: loss \d+\.\d+, gradient norm inf: not finite; lower the learning"
                        r" rate"
                    ),
                ):
                    running.step(2)
                task.run = works
                assert state(running) == before
            running.step(2)
            return state(running)

    assert trained(broken=True) == trained(broken=False)


PROGRAM = """
import itertools, json, os, signal, sys, threading, time
from pathlib import Path
import torch
# a background process of a shell starts with SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
from megatrain.runtime.memory import arenas
from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.policies import lower

registered = set()
class Registrar:
    def cudaHostRegister(self, address, size, flags):
        registered.add(address)
        return 0
    def cudaHostUnregister(self, address):
        registered.remove(address)
        return 0
torch.cuda.cudart = Registrar
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
arenas.HostMemory = lambda **_: HostMemory(registered=True)
plan = Plan.load(Path(sys.argv[1]))
facts, ran, order = {}, [], itertools.count()
try:
    cpu, config = torch.device("cpu"), config_of(plan.model)
    with Executor(plan, config, AdamW(), cpu, schedule=lower(plan)) as executor:
        def slowly():
            time.sleep(0.2)
            ran.append(1)
            if next(order) == 0:
                os.kill(os.getpid(), signal.SIGINT)
        for task in executor.tasks.values():
            task.run = slowly
        facts["registered before"] = len(registered)
        facts["tasks"] = len(executor.tasks)
        executor.step([Batch(*torch.zeros(2, 2, 16, dtype=torch.int64))], rate=0.0, number=1)
except KeyboardInterrupt:
    facts |= {"ran": len(ran), "registered": len(registered)}
    names = [thread.name for thread in threading.enumerate()]
    facts["lanes"] = [name for name in names if name.startswith("lane-")]
    print(json.dumps(facts))
    sys.exit(130)
"""


def test_ctrl_c_from_the_system_ends_the_lanes_and_unregisters_memory(
    executable: Callable[..., Plan], driver: Driver, tmp_path: Path
) -> None:
    """SIGINT in a step ends the process with the status of its program, without a hang.

    All memory is unregistered, and all lanes have ended.
    """
    executable("overlapped").save(tmp_path / "plan.toml")
    (tmp_path / "program.py").write_text(PROGRAM)
    driver.start([[[str(tmp_path / "program.py"), str(tmp_path / "plan.toml")]]], exits=True)
    assert driver.wait() == [130], driver.printed(0)
    facts = json.loads(driver.printed(0))
    assert facts["registered before"] > 0
    assert facts["registered"] == 0
    assert facts["lanes"] == []
    assert 0 < facts["ran"] < facts["tasks"]
