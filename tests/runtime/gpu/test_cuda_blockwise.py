"""Tests on a GPU of updates whose moments are 8-bit codes.

The Triton kernel gives the bits of PyTorch on the GPU and of the C kernel on the CPU.
`test_cuda.py` tests whole steps.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from any_floats import any_floats

from megatrain.runtime.optimizer import adamw, blockwise
from megatrain.runtime.optimizer.kernels.choice import Kernels, kernels
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.state_format import BLOCK

pytestmark = pytest.mark.cuda
SETTINGS = AdamW(weight_decay=0.1)
GPU, CPU = torch.device("cuda"), torch.device("cpu")
CASES = [
    # clip, scale, weight decay, copy, step, index of the first parameter
    (None, None, 0.0, False, 1, 0),
    (0.37, None, 0.1, True, 3, 32 * 1001),
    (None, 0.61, 0.1, True, 1000, 2**36 + 32),
    (1e-30, 1.0, 0.0, False, 7, 2**31 - 32),
    (0.0, 1e-30, 0.1, False, 2, 64),
    (float("nan"), None, 0.1, True, 2, 64),
    (1.0, float("nan"), 0.1, False, 2, 64),
]


@pytest.fixture
def triton_kernels() -> Kernels:
    return kernels(GPU) or pytest.skip("needs Triton")


def codes_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the moments [2, bytes] uint8 of these values."""
    made = torch.empty(2, blockwise.records(first.numel()), dtype=torch.uint8, device=first.device)
    blockwise.encode_first(first, made[0])
    blockwise.encode_second(second, made[1], 5, BLOCK)
    return made


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 31_253])
@pytest.mark.parametrize("skipped", [0, 1, 64])
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wild", [True, False])
def test_the_fused_update_gives_pytorch_s_bits(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    skipped: int,
    low: bool,
    dtype: torch.dtype,
    wild: bool,
) -> None:
    generator = torch.Generator().manual_seed(blocks + skipped)
    total = (blocks + skipped + 1) * BLOCK
    part = slice(skipped * BLOCK, (skipped + blocks) * BLOCK)
    in_records = slice(*(blockwise.records(edge) for edge in (part.start, part.stop)))
    master, gradient, first, second = (any_floats(generator, total, wild=wild) for _ in range(4))
    high, gradient = adamw.round_to_bf16(master), gradient.to(dtype)
    residual = torch.randint(-128, 128, (total,), generator=generator, dtype=torch.int8)
    moments = codes_of(first, second.abs())
    for clip, scale, decay, copied, number, index in CASES:
        results = []
        for device, chosen in ((GPU, triton_kernels), (GPU, None), (CPU, kernels(CPU))):
            monkeypatch.setattr(adamw, "kernels", lambda _, chosen=chosen: chosen)
            planes = [
                tensor.to(device, copy=True)
                for tensor in (high, residual, moments, torch.zeros_like(high))
            ]
            blockwise.update(
                planes[0][part],
                planes[1][part] if low else None,
                planes[2][:, in_records],
                gradient.to(device)[part],
                settings=SETTINGS,
                rate=1e-2,
                number=number,
                clip=None if clip is None else torch.tensor(clip, device=device),
                scale=None if scale is None else torch.tensor(scale, device=device),
                weight_decay=decay,
                copy_to=planes[3][part] if copied else None,
                seed=3,
                index=index,
            )
            results.append([plane.cpu().view(torch.uint8) for plane in planes])
        for ours, pytorch_s, host_s, name in zip(
            *results, ("weights", "low", "moments", "copy"), strict=True
        ):
            if name == "copy" and (clip != clip or scale != scale):
                continue  # a step that stops has no copy
            assert ours.equal(pytorch_s), (name, clip, scale, number)
            assert ours.equal(host_s), (name, clip, scale, number)


@pytest.mark.usefixtures("triton_kernels")
def test_cutting_a_layer_changes_no_bit() -> None:
    blocks = 5000
    generator = torch.Generator().manual_seed(0)
    master = any_floats(generator, blocks * BLOCK, wild=False).to(GPU)
    gradient = torch.randn(blocks * BLOCK, generator=generator).to(GPU)
    results = []
    for cuts in ((0, blocks), (0, 1, 34, 67, 2048, 4999, blocks)):
        high, low = master.bfloat16(), torch.zeros_like(master, dtype=torch.int8)
        moments = torch.zeros(2, blockwise.records(len(master)), dtype=torch.uint8, device=GPU)
        for number, (start, end) in itertools.product((1, 2, 3), itertools.pairwise(cuts)):
            part = slice(start * BLOCK, end * BLOCK)
            blockwise.update(
                high[part],
                low[part],
                moments[:, blockwise.records(part.start) : blockwise.records(part.stop)],
                gradient[part],
                settings=SETTINGS,
                rate=1e-2,
                number=number,
                clip=None,
                index=64 * BLOCK + part.start,
            )
        results.append((high.view(torch.int16), low, moments))
    for whole, cut in zip(*results, strict=True):
        assert whole.equal(cut)


@pytest.mark.parametrize("rows", [1, 16, 17, 100_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_ratio_sums_have_pytorch_s_bits(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    gradient = torch.randn(64 * rows, generator=generator).to(GPU, dtype)
    second = torch.randn(64 * rows, generator=generator).square().to(GPU)
    stored, results = codes_of(second, second)[1], []
    for chosen in (triton_kernels, None):
        monkeypatch.setattr(adamw, "kernels", lambda _, chosen=chosen: chosen)
        sums = torch.zeros(rows, device=GPU)
        blockwise.ratio_sums(gradient, stored, sums, settings=SETTINGS, number=2)
        results.append(sums)
    assert results[0].equal(results[1])


@pytest.mark.usefixtures("triton_kernels")
def test_steps_compile_the_fused_update_once() -> None:
    """Another step, length or place in the model does not compile another kernel."""
    from megatrain.runtime.optimizer.kernels import device

    def step(blocks: int, number: int, index: int) -> None:
        count = blocks * BLOCK
        assert blockwise.records(count) % 16 == 0, "kernels depend on the alignment"
        blockwise.update(
            torch.ones(count, device=GPU, dtype=torch.bfloat16),
            None,
            torch.zeros(2, blockwise.records(count), dtype=torch.uint8, device=GPU),
            torch.ones(count, device=GPU),
            settings=SETTINGS,
            rate=1.0 / number,
            number=number,
            clip=None,
            index=index,
        )

    def compiled() -> int:
        return len(device._blockwise.device_caches[torch.cuda.current_device()][0])

    step(32, 1, 0)
    before = compiled()
    for number, blocks in enumerate((8, 64, 128, 2**15 + 64), 2):
        step(blocks, number, number * 2**33)
    assert compiled() == before
