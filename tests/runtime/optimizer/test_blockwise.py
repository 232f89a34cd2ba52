"""Tests of updates whose moments are 8-bit codes: the codec, and the kernels against PyTorch.

If Triton is installed, `TRITON_INTERPRET=1 pytest tests/runtime/optimizer/test_blockwise.py` tests
its kernel in the interpreter. `test_cuda_blockwise.py` tests it on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from any_floats import any_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.optimizer import adamw, blockwise
from megatrain.runtime.optimizer.adamw import ALONE, WorkerThreads, join, split
from megatrain.runtime.optimizer.kernels.choice import Kernels
from megatrain.runtime.optimizer.kernels.host import host_kernels
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.state_format import BLOCK

SETTINGS = AdamW(weight_decay=0.1)
ENCODE_SECOND = functools.partial(blockwise.encode_second, key=5, index=BLOCK)


@pytest.fixture(scope="module")
def three_threads() -> Iterator[WorkerThreads]:
    workers = WorkerThreads(3, block=4096)
    yield workers
    workers.close()


@pytest.fixture(scope="module", params=["c", "triton"])
def fused(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "c":
        return host_kernels() or pytest.skip("no C compiler")
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    from megatrain.runtime.optimizer.kernels.device import DeviceKernels

    return DeviceKernels()


@contextmanager
def using(chosen: Kernels | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "kernels", lambda _: chosen)
        yield


def stored(
    encode: Callable[[torch.Tensor, torch.Tensor], None], values: torch.Tensor
) -> torch.Tensor:
    made = torch.empty(blockwise.records(values.numel()), dtype=torch.uint8)
    encode(values, made)
    return made


def spread(seed: int, blocks: int = 200) -> torch.Tensor:
    """Returns values that differ by orders of magnitude between blocks, and within one block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-12, 4, (blocks, 1), generator=generator).float()
    values = torch.randn(blocks, BLOCK, generator=generator)
    return (values**3 * sizes).view(-1)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_stored_moment_is_within_half_a_step(seed: int) -> None:
    """Companded values differ by at most half a code, and roots by less than one code.

    This test has its own definition of the codec. First moments are divided by the scale, passed
    through softsign, and rounded to 127 codes on each side. The roots of second moments have 255
    codes.
    """
    values = spread(seed).double()
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)

    def companded(moments: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        share = moments.view(-1, BLOCK).double() / scale
        return 127 * 2 * share / (1 + share.abs())

    made = stored(blockwise.encode_first, values.float())
    kept = made.view(-1, blockwise.RECORD)[:, BLOCK:].contiguous().view(torch.bfloat16).double()
    assert (kept >= scale * (1 - 1e-7)).all()
    assert (kept <= scale * (1 + 2**-7)).all()
    read = blockwise.decoded_first(made)
    assert ((companded(read, kept) - companded(values, kept)).abs() <= 0.5 + 1e-4).all()

    second = values.float().square()
    made = stored(ENCODE_SECOND, second)
    kept = made.view(-1, blockwise.RECORD)[:, BLOCK:].contiguous().view(torch.bfloat16).double()
    codes = made.view(-1, blockwise.RECORD)[:, :BLOCK].double()
    exact = second.double().sqrt().view(-1, BLOCK) / kept * 255
    exact = torch.where(exact > 0, exact.clamp(min=1), 0)
    assert ((codes - exact).abs() <= 1 + 1e-4).all()
    read = blockwise.decoded_second(made).double().view(-1, BLOCK)
    wanted = (codes / 255 * kept).square()
    assert ((read - wanted).abs() <= 1e-6 * wanted + 2.0**-149).all()


def test_a_second_moment_does_not_become_zero() -> None:
    second = torch.full((BLOCK,), 1e-12)
    second[0], second[1] = 1.0, 0.0
    read = blockwise.decoded_second(stored(ENCODE_SECOND, second))
    assert read[1] == 0
    assert (read[2:] > 0).all()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_second_moment_decays_as_fast_as_in_fp32(beta2: float) -> None:
    """One decay step is much less than half a code, so rounding to nearest would lose it."""
    count, steps = 64 * BLOCK, 300
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(count, generator=generator).add_(0.05).square_()
    before = second.sqrt().mean()
    moments = torch.zeros(2, blockwise.records(count), dtype=torch.uint8)
    ENCODE_SECOND(second, moments[1])
    weights = torch.zeros(count, dtype=torch.bfloat16)
    for number in range(1, steps + 1):
        blockwise.update(
            weights,
            torch.zeros(count, dtype=torch.int8),
            moments,
            torch.zeros(count),
            settings=AdamW(betas=(0.9, beta2)),
            rate=1e-3,
            number=number,
            clip=None,
        )
    after = blockwise.decoded_second(moments[1]).sqrt().mean()
    assert float(after / before) == pytest.approx(beta2 ** (steps / 2), rel=0.02)


def test_zeros_are_stored_as_zeros() -> None:
    zeros = torch.zeros(BLOCK)
    for encode in (blockwise.encode_first, ENCODE_SECOND):
        assert not stored(encode, zeros).any()


def test_a_block_below_the_smallest_normal_bf16_is_stored_as_zeros() -> None:
    smallest = torch.full((BLOCK,), 2.0**-126)
    assert blockwise.decoded_first(stored(blockwise.encode_first, smallest)).equal(smallest)
    below = smallest * (1 - 2**-7)  # the largest bf16 that is not normal
    assert not stored(blockwise.encode_first, below).any()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf"), 2.0**120])
def test_a_block_that_is_not_finite_is_read_as_nan(value: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = value
    read = blockwise.decoded_first(stored(blockwise.encode_first, values))
    assert read[:BLOCK].isnan().all()
    assert read[BLOCK:].equal(torch.ones(BLOCK))
    if value != 2.0**120:
        read = blockwise.decoded_second(stored(ENCODE_SECOND, values))
        assert read[:BLOCK].isnan().all()


def test_a_master_of_24_bits_is_the_nearest() -> None:
    master = spread(3)
    high, low = master.bfloat16(), torch.empty_like(master, dtype=torch.int8)
    split(master, high, low)
    read = join(high, low)
    assert not (read.view(torch.int32) & 0xFF).any()
    assert ((read.view(torch.int32) - master.view(torch.int32)).abs() <= 0x80).all()
    for again in (torch.empty_like(low), low):
        split(read, high, again)
        assert join(high, again).equal(read)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    odd_nan = torch.tensor([0x7FFF_FFFF], dtype=torch.int32).view(torch.float32)
    special = torch.cat([special, odd_nan])
    high, low = special.bfloat16(), torch.empty_like(special, dtype=torch.int8)
    split(special, high, low)
    assert high.float()[:2].equal(special[:2])
    assert high[[2, 5]].isnan().all()
    assert (high[3:5] == 0).all()


def test_random_rounding_goes_to_a_neighbour_and_is_right_on_average() -> None:
    below, above = torch.tensor([1.0, -3.0]), torch.tensor([1.0 + 2**-7, -3.0 - 2**-6])
    share = torch.tensor([0.25, 0.8])
    count = 2**16
    values = (below + (above - below) * share).repeat(count // 2)
    made = blockwise.round_randomly(values, blockwise.rounding_keys(0, 1)[0], 0).float()
    up = made.view(-1, 2) == above
    assert (up | (made.view(-1, 2) == below)).all()
    assert (up.float().mean(0) - share).abs().max() < 0.01
    exact = torch.tensor([1.0, -2.5, 0.0, float("inf")]).repeat(8)
    assert blockwise.round_randomly(exact, 5, 32).float().equal(exact)
    nan = torch.tensor([0x7FFF_FFFF, -1], dtype=torch.int32).view(torch.float32).repeat(16)
    assert blockwise.round_randomly(nan, 5, 32).isnan().all()


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("weight", [1.0, -0.05])
def test_small_updates_are_not_lost(low: bool, weight: float) -> None:
    """Each update is less than half the distance between two masters that can be stored."""
    count, steps, rate = 1024 * BLOCK, 50, abs(weight) * 2**-19
    high = torch.full((count,), weight).bfloat16()
    before, residual = high.double(), torch.zeros(count, dtype=torch.int8)
    moments = torch.zeros(2, blockwise.records(count), dtype=torch.uint8)
    for number in range(1, steps + 1):
        blockwise.update(
            high,
            residual if low else None,
            moments,
            torch.ones(count),
            settings=AdamW(),
            rate=rate,
            number=number,
            clip=None,
        )
    after = (join(high, residual) if low else high).double()
    assert float((before - after).mean()) == pytest.approx(steps * rate, rel=0.15)


def test_random_bits_depend_on_seed_step_and_index_alone() -> None:
    cpu = torch.device("cpu")
    key, another = blockwise.rounding_keys(7, 3)
    whole = blockwise.random_bits(key, 2**40, 4096, cpu)
    assert blockwise.random_bits(key, 2**40 + 1024, 64, cpu).equal(whole[1024:1088])
    assert whole.min() >= 0
    assert whole.max() < 2**16
    for other in (another, *blockwise.rounding_keys(8, 3), *blockwise.rounding_keys(7, 4)):
        assert (blockwise.random_bits(other, 2**40, 4096, cpu) != whole).float().mean() > 0.99
    # the first two numbers of SplitMix64 from the state 0
    first = blockwise.random_bits(0, 0, 8, cpu).tolist()
    numbers = (0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4)
    assert first == [number >> 16 * part & 0xFFFF for number in numbers for part in range(4)]


LENGTHS = st.integers(1, 20) | st.sampled_from([127, 128, 129, 385, 1031])


@given(
    blocks=LENGTHS,
    skipped=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    wild=st.booleans(),
    low=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.booleans(),
    clip=st.none() | st.sampled_from([1.0, 0.37, 1e-30, 0.0, float("nan")]),
    scale=st.none() | st.sampled_from([1.0, 0.61, 1e-30, float("nan")]),
    decay=st.sampled_from([0.0, 0.1]),
    copied=st.booleans(),
    number=st.integers(1, 1000),
    index=st.integers(0, 2**36).map(lambda value: value * BLOCK),
)
@settings(max_examples=100)
def test_the_kernel_s_bits_are_pytorch_s(
    fused: Kernels,
    three_threads: WorkerThreads,
    blocks: int,
    skipped: int,
    seed: int,
    wild: bool,
    low: bool,
    dtype: torch.dtype,
    threads: bool,
    clip: float | None,
    scale: float | None,
    decay: float,
    copied: bool,
    number: int,
    index: int,
) -> None:
    """Updates of any range of blocks give PyTorch's bits.

    Blocks before and after the range are unchanged. All blocks are unchanged if a factor is NaN.
    """
    total = (blocks + skipped + 1) * BLOCK
    part = slice(skipped * BLOCK, (skipped + blocks) * BLOCK)
    generator = torch.Generator().manual_seed(seed)
    master, gradient, first, second = (any_floats(generator, total, wild=wild) for _ in range(4))
    high = adamw.round_to_bf16(master)
    residual = torch.randint(-128, 128, (total,), generator=generator, dtype=torch.int8)
    moments = torch.stack(
        [stored(blockwise.encode_first, first), stored(ENCODE_SECOND, second.abs())]
    )
    results = []
    for chosen in (fused, None):
        planes = [high.clone(), residual.clone(), moments.clone(), torch.zeros_like(high)]
        with using(chosen):
            blockwise.update(
                planes[0][part],
                planes[1][part] if low else None,
                planes[2][:, blockwise.records(part.start) : blockwise.records(part.stop)],
                gradient.to(dtype)[part],
                settings=SETTINGS,
                rate=1e-2,
                number=number,
                clip=None if clip is None else torch.tensor(clip),
                scale=None if scale is None else torch.tensor(scale),
                workers=three_threads if threads and chosen is host_kernels() else ALONE,
                weight_decay=decay,
                copy_to=planes[3][part] if copied else None,
                seed=seed,
                index=index + part.start,
            )
        results.append(planes)
    stopped = any(factor is not None and factor != factor for factor in (clip, scale))
    for name, (by_kernel, by_pytorch), before in zip(
        ("weights", "low", "moments"),
        zip(*results, strict=True),
        (high, residual, moments),
        strict=False,
    ):
        assert bits_of(by_kernel).equal(bits_of(by_pytorch)), name
        if stopped:
            assert bits_of(by_kernel).equal(bits_of(before)), name
    if copied and not stopped:
        assert bits_of(results[0][3][part]).equal(bits_of(results[0][0][part]))
        assert bits_of(results[1][3][part]).equal(bits_of(results[1][0][part]))
    outside = torch.ones(total, dtype=torch.bool)
    outside[part] = False
    assert bits_of(results[0][0])[outside].equal(bits_of(high)[outside])


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


class Broken:
    """GPU kernels whose `method` does not compile, or gives other bits."""

    def __init__(self, method: str, problem: Exception | None) -> None:
        self.method, self.problem, self.calls = method, problem, 0

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            self.calls += 1
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            coded = any(each.dtype == torch.uint8 for each in tensors)
            if method != self.method or not coded:
                getattr(host_kernels(), method)(*arguments, **named)
            elif self.problem:
                raise self.problem

        return call


@pytest.mark.parametrize("method", ["blockwise_adamw", "ratio_sums"])
@pytest.mark.parametrize("problem", [None, RuntimeError("no such instruction\nat line 3")])
def test_a_gpu_s_kernel_with_other_bits_is_not_used(
    caplog: pytest.LogCaptureFixture, method: str, problem: Exception | None
) -> None:
    """PyTorch's result is used, and a one-line warning says so."""
    if host_kernels() is None:
        pytest.skip("no C compiler")
    broken: Any = Broken(method, problem)
    results = []
    for chosen in (broken, None):
        weights, gradient = torch.ones(2, 4 * BLOCK)
        weights = weights.bfloat16()
        moments = torch.zeros(2, blockwise.records(4 * BLOCK), dtype=torch.uint8)
        sums = torch.zeros(2)
        with using(chosen):
            for number in (1, 2):
                blockwise.update(
                    weights,
                    None,
                    moments,
                    gradient,
                    settings=SETTINGS,
                    rate=0.1,
                    number=number,
                    clip=None,
                )
                blockwise.ratio_sums(gradient, moments[1], sums, settings=SETTINGS, number=number)
        results.append([weights.view(torch.int16), moments, sums])
    for found, wanted in zip(*results, strict=True):
        assert found.equal(wanted)
    (line,) = caplog.messages
    expected = "no such instruction" if problem else "other bits than PyTorch's"
    assert f"updates of 8-bit moments on cpu: {expected}; they are done in PyTorch" in line
    assert "\n" not in line


def test_a_gpu_s_kernel_with_pytorch_s_bits_is_checked_once_and_used() -> None:
    if host_kernels() is None:
        pytest.skip("no C compiler")
    sound: Any = Broken("", None)
    for _ in range(3):
        assert blockwise.trusted(sound, torch.device("cpu")) is sound
    assert sound.calls == 3, "two updates and one sum"
    assert blockwise.trusted(None, torch.device("cpu")) is None


def test_cutting_a_layer_changes_no_bit() -> None:
    count = 40 * BLOCK
    generator = torch.Generator().manual_seed(0)
    master, gradient = any_floats(generator, count, wild=False), torch.randn(count)
    results = []
    for low, cuts in ((low, cuts) for low in (False, True) for cuts in ((0, 40), (0, 2, 17, 40))):
        high, residual = master.bfloat16(), torch.zeros(count, dtype=torch.int8)
        moments = torch.zeros(2, blockwise.records(count), dtype=torch.uint8)
        for number in (1, 2):
            for start, end in itertools.pairwise(cuts):
                part = slice(start * BLOCK, end * BLOCK)
                blockwise.update(
                    high[part],
                    residual[part] if low else None,
                    moments[:, blockwise.records(part.start) : blockwise.records(part.stop)],
                    gradient[part],
                    settings=SETTINGS,
                    rate=1e-2,
                    number=number,
                    clip=None,
                    index=64 * BLOCK + part.start,
                )
        results.append((bits_of(high), residual, moments))
    for one, other in ((0, 1), (2, 3)):
        for whole, cut in zip(results[one], results[other], strict=True):
            assert whole.equal(cut)


@pytest.mark.parametrize("strided", range(6))
def test_every_tensor_may_have_gaps_between_its_elements(strided: int) -> None:
    """Kernels read elements one after another, so such tensors are updated in PyTorch."""
    count, generator, results = 4 * BLOCK, torch.Generator().manual_seed(0), []
    master, gradient = (torch.randn(count, generator=generator) for _ in range(2))
    codes = torch.zeros(2, blockwise.records(count), dtype=torch.uint8)
    for gaps in (False, True):
        low, copy = torch.zeros(count, dtype=torch.int8), torch.zeros(count).bfloat16()
        planes = [master.bfloat16(), low, *codes.clone(), gradient.clone(), copy]
        if gaps:
            planes[strided] = torch.stack([planes[strided]] * 2, -1)[:, 0]
        weights, low, *moments, gradient, copy = planes
        given = {"rate": 1e-2, "clip": None, "copy_to": copy}
        for number in (1, 2):
            blockwise.update(
                weights, low, moments, gradient, settings=SETTINGS, number=number, **given
            )
        results.append([plane.contiguous().view(torch.uint8) for plane in planes])
    assert all(map(torch.equal, *results))
    assert results[0][3].any(), "the second moments changed"


@pytest.mark.parametrize("count", [64, 640, 64 * 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ratio_sums_read_the_stored_second_moment(
    fused: Kernels, count: int, dtype: torch.dtype
) -> None:
    gradient, second = torch.randn(count).to(dtype), spread(5, count // BLOCK).square()
    made = stored(ENCODE_SECOND, second)
    wanted, *found = torch.zeros(3, count // 64)
    with using(None):
        adamw.ratio_sums(
            gradient, blockwise.decoded_second(made), wanted, settings=SETTINGS, number=2
        )
    for chosen, sums in zip((fused, None), found, strict=True):
        with using(chosen):
            blockwise.ratio_sums(gradient, made, sums, settings=SETTINGS, number=2)
        assert sums.equal(wanted)


def test_the_random_bits_are_those_of_splitmix64() -> None:
    """The generator's first two numbers from the state 0 are the published ones."""
    gamma = 0x9E37_79B9_7F4A_7C15
    assert blockwise.mixed(0) == 0xE220_A839_7B1D_CDAF
    assert blockwise.mixed(gamma) == 0x6E78_9E6A_A1B9_65F4
