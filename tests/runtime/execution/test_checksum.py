"""Tests of the checksum: it depends on every bit of the weights, and not on their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.runtime.execution import checksum as checksums
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

SLOTS = {"sequential": 1}
PLANS: list[tuple[str, dict[str, Any]]] = [
    *((policy, {}) for policy in policies.names()),
    (
        "overlapped",
        {"placement": Placement(weights="all", master_low="all", moments="all", gradients="all")},
    ),
    (
        "overlapped",
        {
            "placement": Placement(weights="1-2,e", master_low="0", saved_activations="0"),
            "state_slots": 2,
        },
    ),
]


class Largest(TorchDispatchMode):
    """Counts the bytes of the largest tensor that an op returns."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.bytes = max(self.bytes, found.nbytes)
        return found


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"clipping": "none"}, marks=pytest.mark.nightly),
        {"dtype": "fp32"},
        {"tied": True, "gradient_staging": 1},
    ],
)
def test_every_plan_reports_the_same_checksum_in_each_step(
    executable: Callable[..., Plan], session: Callable[..., Any], changes: dict[str, Any]
) -> None:
    """All plans report the same checksums, whether they update at once or defer the update.

    This also holds after a flush in the middle and at the end.
    """
    results = []
    for policy, knobs in PLANS:
        with session(executable(policy, layers=3, **{**changes, **knobs})) as running:
            first = running.executor.checksum()
            numbers = [running.step(number).checksum for number in (1, 2, 3)]
            running.executor.flush_update()
            numbers += [running.executor.checksum(), running.step(4).checksum]
            running.executor.flush_update()
            numbers.append(running.executor.checksum())
            assert first == numbers[0], "the first step did not use the loaded weights"
            assert numbers[3] == numbers[4], "the fourth step did not use the weights of the third"
            assert len({*numbers}) == 5, "a step did not change the weights"
            results.append(numbers)
    assert results == [results[0]] * len(PLANS)


def test_there_is_no_checksum_without_deterministic_mode(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable()) as running:
        assert running.step().checksum is None


@pytest.mark.parametrize(
    ("policy", "dtype"), [("k_buffer", "bf16"), ("resident", "bf16"), ("overlapped", "fp32")]
)
def test_one_changed_bit_or_two_exchanged_values_change_it(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, dtype: str
) -> None:
    with session(executable(policy, dtype=dtype)) as running:
        executor, state = running.executor, running.state
        whole, seen = executor.checksum(), set()
        homes = [
            state.home(name, layer)
            for layer in ("e", "0", "3")
            for name in ("weights", "master_low")
            if dtype == "bf16" or name == "weights"
        ]
        for buffer in homes:
            bits = executor.memory().flat(buffer, torch.int16, 512)
            for place in (0, 5, 511):
                for bit in (0, 7, 14):
                    bits[place] ^= 1 << bit
                    seen.add(executor.checksum())
                    bits[place] ^= 1 << bit
            for one, other in ((0, 1), (0, 4), (3, 511), (16, 272)):
                values = bits[one].clone(), bits[other].clone()
                if values[0] != values[1]:
                    bits[one], bits[other] = values[1], values[0]
                    seen.add(executor.checksum())
                    bits[one], bits[other] = values
        assert whole not in seen
        assert len(seen) >= 9 * len(homes)
        assert executor.checksum() == whole


def test_the_checksum_is_that_of_its_definition_with_any_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))
    words[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    mask, wanted = 2**64 - 1, 0
    for position, word in enumerate(words.tolist()):
        mixed = (word + position * checksums._ODD[0]) & mask
        for shift, factor in ((32, checksums._ODD[1]), (29, checksums._ODD[2])):
            signed = mixed - 2**64 if mixed >> 63 else mixed
            mixed = ((mixed ^ (signed >> shift)) * factor) & mask
        wanted += mixed
    for chunk in (1, 64, 999, 1000, 2**17):
        monkeypatch.setattr(checksums, "_CPU_WORDS", chunk)
        assert int(checksums._mixed_sum(words)) & mask == wanted & mask


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_checksum_takes_little_memory_for_a_layer_of_any_size(device: str) -> None:
    """It is in no pool of the plan. Every device except a CPU is read in the chunks of a GPU."""
    words = torch.zeros(2**24, dtype=torch.int64, device=device)
    with Largest() as largest:
        checksums._mixed_sum(words)
    assert 0 < largest.bytes <= words.nbytes / 4
