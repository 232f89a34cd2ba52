"""Fixtures of the runtime's tests: executable plans, and sessions that execute them on the CPU.

A lane has one thread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from small_runs import run_of
from whole_models import SEQUENCE, weights

from megatrain.runtime.batch import Batch
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import Task
from megatrain.runtime.files.model_files import Weights, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan

ONE_THREAD = dict.fromkeys(("compute", "update", "h2d", "d2h", "cpu"), 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Makes PyTorch use one thread in the main thread. Lanes set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Makes PyTorch use deterministic algorithms, so a GPU always gives the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes inductor change and divide the graphs of compiled layers, but write no kernels.

    A C++ compiler needs half a minute for the kernels of a model.
    """
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def boxed(graph: torch.fx.GraphModule, _inputs: object, **_: Any) -> Any:
        return make_boxed_func(graph.forward)

    compiled: Any = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compiled(
            function,
            **options | {"options": None},
            backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=boxed),
        ),
    )
    torch._dynamo.reset()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a file system of 4 MiB in memory, which tests can fill.

    A checkpoint of the small model takes 0.8 MiB.
    """
    (tmp_path / "disk").mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "disk")],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("a tmpfs needs root")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


class Session:
    """An executor with loaded weights that trains steps on random tokens."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule | None,
        weights: Weights,
        threads: dict[str, int],
        settings: AdamW,
        seed: int,
    ) -> None:
        self.plan = plan
        self.executor = Executor(
            plan,
            config_of(plan.model),
            settings,
            torch.device("cpu"),
            schedule=schedule,
            threads=threads,
            seed=seed,
        )
        self.state = self.executor.state
        try:
            self.state.load(weights)
        except BaseException:
            self.executor.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks of all lanes by op id. Tests replace tasks to delay or break an op."""
        return {task.op: task for tasks in self.executor._step.queues.values() for task in tasks}

    def batches(self, number: int) -> list[Batch]:
        work, generator = self.plan.workload, torch.Generator().manual_seed(number)
        pairs = [
            torch.randint(
                self.plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
            )
            for _ in range(work.accumulation)
        ]
        return [Batch(ids, labels) for ids, labels in pairs]

    def step(self, number: int = 1) -> Any:
        return self.executor.step(self.batches(number), rate=1e-2, number=number)

    def bits(self, steps: int = 2) -> Bits:
        """Returns the bits of the losses, norms and masters after `steps` steps."""
        results = [self.step(number) for number in range(1, steps + 1)]
        self.executor.flush_update()
        return Bits([(result.loss, result.gradient_norm) for result in results], self.masters())

    def masters(self) -> bytes:
        """Returns the bytes of all master weights."""
        tensors = [
            tensor
            for layer in self.plan.model.stack.values()
            for tensor in self.state.masters(layer).values()
        ]
        return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)


class Bits(NamedTuple):
    results: list[tuple[float, float | None]]
    masters: bytes


@pytest.fixture(scope="session")
def executable(make_plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """Returns a function like `make_plan` whose plans have the digest that the runtime verifies.

    The tiny model has 4 heads of 8 elements, so its hidden size is 32.
    """

    def make(policy: str = "double_buffer", **changes: Any) -> Plan:
        plan = make_plan(policy, **changes)
        return msgspec.structs.replace(plan, digest=lower(plan).digest)

    return make


@pytest.fixture(scope="session")
def session() -> Callable[..., Session]:
    def make(
        plan: Plan,
        *,
        schedule: Schedule | None = None,
        weights: Weights | None = None,
        threads: dict[str, int] = ONE_THREAD,
        settings: AdamW = AdamW(max_norm=0.05, weight_decay=0.1),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> Session:
        return Session(plan, schedule, weights or random_weights(0), threads, settings, seed)

    return make


@pytest.fixture
def run(make_plan: Callable[..., Plan], session: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run(model, ...)`, which opens a session with the weights of `whole_models`.

    The model is resident.
    """

    def make(model: ModelSpec, **changes: Any) -> Any:
        plan = make_plan(
            changes.pop("policy", "resident"),
            **{
                "model": model,
                "sequence": SEQUENCE,
                "dtype": "fp32",
                "loss_chunk": 13,
                "checkpoint_interval": 3,
                "chunk_bytes": 2**20,
                "short_recompute": True,  # as commands do
                **changes,
            },
        )
        return session(msgspec.structs.replace(plan, digest=lower(plan).digest), weights=weights)

    return make


@pytest.fixture(scope="session")
def saved_once(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Plan, Path]:
    """Returns a plan, and the folder that `saved` copies. Tests must not change it."""
    plan, folder = executable("overlapped"), tmp_path_factory.mktemp("saved") / "checkpoints"
    with session(plan) as running:
        checkpoints = Checkpoints(folder, keep_last=9)
        for step in (1, 2):
            running.step(step)
            checkpoints.save(running.executor, run_of(step))
    return plan, folder


@pytest.fixture
def saved(saved_once: tuple[Plan, Path], tmp_path: Path) -> tuple[Plan, Path]:
    """Returns a plan, and the folder of its checkpoints of steps 1 and 2."""
    plan, folder = saved_once
    shutil.copytree(folder, tmp_path / "checkpoints")
    return plan, tmp_path / "checkpoints"
