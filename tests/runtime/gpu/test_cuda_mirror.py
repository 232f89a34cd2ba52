"""Tests on a GPU of copying scalars to the host without waiting for other copies.

They are skipped on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.step_state import HostScalarCopy
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
PIECE, PIECES = (2**26, 32)  # 2 GiB, 38 ms at 55 GB/s, in pieces of 1.2 ms; one may be in progress


def test_waiting_for_values_does_not_wait_for_copies_enqueued_after_them() -> None:
    device, other = torch.device("cuda", 0), torch.cuda.Stream()
    source, landing = (
        torch.ones(PIECE, dtype=torch.uint8, device=device),
        torch.empty(PIECE, dtype=torch.uint8, pin_memory=True),
    )
    values = torch.zeros(4, device=device)
    mirror, done = HostScalarCopy(values, torch.cuda.Stream()), torch.cuda.Event()
    still_copying = False  # in one turn is enough: a busy host can wake this thread late
    for number in range(1, 7):  # the first turn loads kernels
        values.add_(1)
        mirror.send()
        with torch.cuda.stream(other):
            for _ in range(PIECES):
                landing.copy_(source, non_blocking=True)
            done.record()
        mirror.wait()
        still_copying |= not done.query()
        assert mirror.landed.tolist() == [number] * 4
        torch.cuda.synchronize()
    assert still_copying, "the mirror waited for the copies that were enqueued after it"


def test_a_copy_contains_the_work_that_was_enqueued_before_it() -> None:
    """The copied values include the work that was enqueued earlier on the current stream.

    Sending does not wait for this work, which takes 10**8 cycles or some 50 ms here.
    """
    values = torch.zeros(4, device="cuda")
    mirror = HostScalarCopy(values, torch.cuda.Stream())
    values.fill_(0)  # loads its kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)
    values.fill_(5)
    mirror.send()
    assert not torch.cuda.current_stream().query()
    mirror.wait()
    assert mirror.landed.tolist() == [5] * 4


@pytest.mark.parametrize("clipping", ["global", "layer", "none", "update", "adagc"])
def test_after_a_step_the_host_has_the_device_s_values(
    make_plan: Callable[..., Plan], clipping: str
) -> None:
    sizes = {
        "hidden": 256,
        "intermediate": 512,
        "head_dim": 64,
        "vocabulary": 1000,
        "batch": 4,
        "sequence": 128,
        "chunk_bytes": 2**18,
        "clipping": clipping,
    }
    plan = make_plan(
        "overlapped",
        placement=Placement(host_updated="all"),
        device_limit_bytes=2**32,
        host_limit_bytes=2**32,
        **sizes,
    )
    with Executor(
        plan,
        config_of(plan.model),
        AdamW(max_norm=0.5),
        torch.device("cuda", 0),
        schedule=policies.lower(plan),
    ) as executor:
        executor.state.load(random_weights(0))
        mirrors = executor._binder.state.host_scalars
        assert mirrors
        for number in (1, 2):
            executor.step([Batch(*torch.randint(1000, (2, 4, 128)))], rate=1e-3, number=number)
            torch.cuda.synchronize()
            for buffer, mirror in mirrors.items():
                landed = mirror.landed.clone()
                assert torch.equal(landed, executor._binder._floats(buffer).cpu()), buffer
                assert landed[0] != 0, "the loss or factor is zero"
