"""Tests of the values that the binder copies from a GPU to the host.

A value that ops on the host read is copied after each op that writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.runtime.execution import binding
from megatrain.runtime.execution.binding import Binder
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator.schedule.plan import Placement, Plan

ALL = {"placement": Placement(host_updated="all")}
PLANS = [
    ("overlapped", ALL, {"device.clips:all": "C"}),
    (
        "overlapped",
        ALL | {"clipping": "layer", "layers": 2},
        {f"device.clips:{layer}": f"C{layer}" for layer in "eh01"},
    ),
    (
        "overlapped",
        ALL | {"clipping": "adagc", "layers": 2},
        {f"device.clips:{layer}": f"C{layer}" for layer in "eh01"},
    ),
    ("k_buffer", {"clipping": "adagc"}, {"device.losses:0": "H.m0"}),
    ("overlapped", ALL | {"clipping": "update"}, {"device.losses:0": "H.m0"}),
    ("overlapped", ALL | {"clipping": "none"}, {"device.clips:all": "C"}),
    ("double_buffer", {"accumulation": 2}, {"device.losses:0": "H.m0", "device.losses:1": "H.m1"}),
    ("resident", {}, {}),
]
"""policy, changes, and for each buffer the op that writes it"""


@pytest.mark.parametrize(("policy", "changes"), [plan[:2] for plan in PLANS])
def test_without_a_gpu_nothing_is_sent_and_no_op_wrapped(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    changes: dict[str, Any],
) -> None:
    with session(executable(policy, **changes)) as running:
        binder = running.executor._binder
        assert binder.state.host_scalars == {}
        for op in running.executor.schedule.ops:
            monkeypatch.setitem(binder._kinds, op.kind, lambda op: op.id)
            assert binder.bind(op) == op.id


@pytest.mark.parametrize(("policy", "changes", "sent"), PLANS)
def test_on_a_gpu_each_writer_sends_and_each_reader_on_the_host_waits(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    changes: dict[str, Any],
    sent: dict[str, str],
) -> None:
    events: list[str] = []
    streams: list[object] = []

    class Recorder:
        def __init__(self, values: torch.Tensor, stream: object) -> None:
            streams.append(stream)
            self.place, self.landed = values.data_ptr(), torch.zeros_like(values)

        def send(self) -> None:
            events.append(f"send {self.place}")

        def wait(self) -> None:
            events.append(f"wait {self.place}")

    monkeypatch.setattr(binding, "HostScalarCopy", Recorder)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    plan = executable(policy, **changes)
    with session(plan) as running:
        executor = running.executor
        own = executor._arenas
        arenas: Any = SimpleNamespace(device=torch.device("cuda"), flat=own.flat, tensor=own.tensor)
        binder = Binder(
            plan,
            executor.schedule,
            arenas,
            executor.functional_layers,
            AdamW(),
            executor._host_workers,
            executor._state,
        )
        place = {buffer: own.flat(buffer, torch.float32, 1).data_ptr() for buffer in sent}
        assert binder.state.host_scalars.keys() == sent.keys()
        assert len(set(streams)) == bool(sent), "the copies must share one stream"
        readers = 0
        for op in executor.schedule.ops:
            if op.lane == "cpu" and (read := [buffer for buffer in op.reads if buffer in sent]):
                readers += 1
                for buffer in read:
                    assert (
                        binder._values(op, buffer, 1).data_ptr()
                        == binder.state.host_scalars[buffer].landed.data_ptr()
                    ), "the op reads the device's value instead of its copy"
            monkeypatch.setitem(
                binder._kinds, op.kind, lambda op: functools.partial(events.append, op.id)
            )
            binder.bind(op)()
            waited = [
                f"wait {place[buffer]}"
                for buffer in op.reads
                if op.lane == "cpu" and buffer in sent
            ]
            assert events == [
                *waited,
                op.id,
                *(f"send {place[buffer]}" for buffer, writer in sent.items() if writer == op.id),
            ]
            events.clear()
        assert (readers > 0) == bool(sent)
