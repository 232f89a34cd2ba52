"""Tests that the examples of docs/adding.md work, and that the targets in CONTRIBUTING.md exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pages import read, saved_examples

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule.plan import Placement, Plan

GUIDE = "docs/adding.md"
GIB = 2**30


def saved(name: str, folder: Path) -> str:
    code = saved_examples(GUIDE)[name]
    assert code.count("\n") < 80
    (folder / name).write_text(code, encoding="utf-8")
    return str(folder / name)


@pytest.fixture
def example(tmp_path: Path) -> str:
    """Path of the guide's policy, saved outside the package."""
    return saved("pinned.py", tmp_path)


@pytest.fixture
def split(tmp_path: Path) -> str:
    """Path of the guide's policy with a store of its own, saved outside the package."""
    return saved("split.py", tmp_path)


@pytest.fixture
def lion(tmp_path: Path) -> str:
    """Path of the guide's optimizer, saved outside the package."""
    return saved("lion.py", tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_example_lowers_to_a_sound_schedule(
    make_plan: Callable[..., Plan], example: str, accumulation: int, interval: int, tied: bool
) -> None:
    changes = {
        "layers": 7,
        "accumulation": accumulation,
        "checkpoint_interval": interval,
        "tied": tied,
    }
    assert policies.find(example).name == "pinned"
    schedule = policies.lower(make_plan(example, **changes))
    schedule.check()
    assert schedule.policy == example
    loads = [op.layer for op in schedule.ops if op.kind == "load_weights" and op.offset == 0]
    assert loads.count("0") == loads.count("1") == 1
    plain = [
        op.layer
        for op in policies.lower(make_plan("k_buffer", **changes)).ops
        if op.kind == "load_weights" and op.offset == 0
    ]
    assert len(loads) < len(plain)
    assert sorted(op.id for op in schedule.ops if op.lane == "compute") == sorted(
        op.id for op in policies.lower(make_plan("k_buffer", **changes)).ops if op.lane == "compute"
    )


@pytest.mark.parametrize("name", ["pinned.py", "split.py"])
def test_the_examples_are_searched(tmp_path: Path, name: str) -> None:
    """A search asks only for the bytes of each pool, and times a step without making its ops."""
    model = ModelSpec.load("qwen2.5-7b")
    path, work = saved(name, tmp_path), Workload(batch=4, sequence=1024)
    best = search(model, HardwareSpec.load("h200"), work, policies=[path], device_limit=60 * GIB)[0]
    assert best.feasible
    assert best.plan.policy == path
    policies.verified(best.plan)
    if name == "split.py":
        assert best.plan.placed("weights"), "the search must use the memory of the device"


def steps_of(plan: Plan) -> list[tuple[float, float | None]]:
    """Returns the loss and the norm of three steps of `plan` on the CPU."""
    import torch

    from megatrain.runtime.batch import Batch
    from megatrain.runtime.execution.executor import Executor
    from megatrain.runtime.files.model_files import random_weights
    from megatrain.runtime.layers.functional_layers import config_of
    from megatrain.runtime.optimizer.adamw import AdamW

    threads = dict.fromkeys(("compute", "update", "h2d", "d2h", "cpu"), 1)
    with Executor(
        plan,
        config_of(plan.model),
        AdamW(),
        torch.device("cpu"),
        schedule=policies.lower(plan),
        threads=threads,
    ) as executor:
        executor.state.load(random_weights(0))
        batch = torch.arange(64).view(2, 2, 16)
        batches = [Batch(batch[0], batch[1])] * plan.workload.accumulation
        steps = [executor.step(batches, rate=1e-2, number=number) for number in (1, 2, 3)]
        return [(step.loss, step.gradient_norm) for step in steps]


@pytest.mark.parametrize("clipping", ["global", "layer", "adagc", "none"])
def test_the_example_with_a_store_of_its_own_has_the_bits_of_another_policy(
    make_plan: Callable[..., Plan], split: str, clipping: str
) -> None:
    work = {"layers": 4, "dtype": "fp32", "clipping": clipping}
    expected = steps_of(make_plan("k_buffer", **work))
    assert expected[-1][0] < expected[0][0], "the loss does not fall"
    for kept in ("", "0-1", "all"):
        plan = make_plan(split, placement=Placement(weights=kept), **work)
        policies.verified(msgspec.structs.replace(plan, digest=policies.lower(plan).digest))
        assert steps_of(plan) == expected


def test_the_example_with_a_store_of_its_own_says_what_it_cannot_do(
    make_plan: Callable[..., Plan], split: str
) -> None:
    with pytest.raises(UserError, match="policy split: found sums of streamed gradients; allowed"):
        policies.lower(make_plan(split, accumulation=2))
    with pytest.raises(UserError, match="policy split: clipping: found update; allowed: global"):
        policies.lower(make_plan(split, clipping="update"))
    everything = Placement(weights="all")
    policies.lower(make_plan(split, accumulation=2, placement=everything)).check()


def test_the_example_executes_with_the_bits_of_another_policy(
    make_plan: Callable[..., Plan], example: str
) -> None:
    results = [
        steps_of(make_plan(policy, layers=4, accumulation=2, dtype="fp32"))
        for policy in (example, "k_buffer")
    ]
    assert results[0] == results[1]
    assert results[0][-1][0] < results[0][0][0], "the loss does not fall"


def test_the_example_says_what_it_cannot_do(make_plan: Callable[..., Plan], example: str) -> None:
    with pytest.raises(
        UserError, match="policy pinned: layers: found 2; allowed: >= 3; fix: use policy k_buffer"
    ):
        policies.lower(make_plan(example, layers=2))


def test_the_optimizer_of_the_guide_learns_with_the_bits_of_any_plan(
    make_plan: Callable[..., Plan], lion: str
) -> None:
    import torch

    from megatrain.runtime.batch import Batch
    from megatrain.runtime.execution.executor import Executor
    from megatrain.runtime.files.model_files import random_weights
    from megatrain.runtime.layers.functional_layers import config_of
    from megatrain.runtime.optimizer.settings import AdamW

    results = []
    for policy in ("overlapped", "resident"):
        plan = make_plan(policy, optimizer=lion)
        plan = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
        threads = dict.fromkeys(("compute", "update", "h2d", "d2h", "cpu"), 1)
        settings = AdamW(betas=(0.9, 0.99), weight_decay=0.1)
        with Executor(
            plan, config_of(plan.model), settings, torch.device("cpu"), threads=threads
        ) as executor:
            executor.state.load(random_weights(0))
            ids = torch.arange(32).view(2, 16)
            results.append(
                [
                    executor.step([Batch(ids, ids)], rate=1e-3, number=number).loss
                    for number in range(1, 6)
                ]
            )
    assert results[0] == results[1]
    assert results[0][-1] < results[0][0] - 0.1


def test_the_commands_of_the_guide_exist() -> None:
    targets = re.findall(r"^make (\w+)", read("README.md") + read("CONTRIBUTING.md"), re.MULTILINE)
    assert {"test", "lint", "docs"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target
