"""Tests of the optimizer: the arithmetic is that of PyTorch's AdamW and clip_grad_norm_.

The two planes of a master are exact, and blocks and threads change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.adamw import (
    ALONE,
    AdamW,
    Workers,
    WorkerThreads,
    clip_coefficient,
    join,
    round_to_bf16,
    split,
    sum_of_squares,
    update,
)

LARGEST_SPLIT = 0x7F7F_7FFF  # 3.39e38; larger values round to infinity in bf16
BITS = (
    st.integers(0, LARGEST_SPLIT)
    | st.integers(0, LARGEST_SPLIT).map(lambda bits: (bits & 0x7FFF_0000) | 0x8000)
    | st.integers(0, 0x00FF_FFFF)
)
"""bits of a non-negative fp32 value: any value, a tie between two bf16 values, or a value that is
denormal or nearly so"""


@pytest.fixture
def three_threads() -> Iterator[WorkerThreads]:
    workers = WorkerThreads(3, block=4096)
    yield workers
    workers.close()


@pytest.fixture(params=["kernels", "eager"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the kernels of this machine, if there are any, and with PyTorch alone."""
    monkeypatch.setenv("MEGATRAIN_KERNELS", request.param)


def fp32(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def planes(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty_like(master, dtype=torch.int16),
    )
    split(master, high, low)
    return high, low


# ---- planes ----


@given(
    st.lists(st.tuples(BITS, st.sampled_from([0, 0x8000_0000])).map(sum), min_size=1, max_size=64)
)
@example(
    [
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x8000,
        0x7FFF,
        0x007F_FFFF,
        0x0080_0000,
        LARGEST_SPLIT,
        0x3F80_8000,
        0xBF80_8000,
        0x3F81_8000,
    ]
)
def test_split_and_join_are_exact_and_the_high_plane_is_nearest(bits: list[int]) -> None:
    master = fp32([value - 2**32 if value >= 2**31 else value for value in bits])
    high, low = planes(master)
    assert torch.equal(join(high, low).view(torch.int32), master.view(torch.int32))
    assert torch.equal(round_to_bf16(master).view(torch.int16), high.view(torch.int16))
    nearest = (master.double() - master.bfloat16().double()).abs()
    assert torch.equal(
        (master.double() - high.double()).abs(), nearest
    )  # as near as with rounding to even: at most half a unit away
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((high.double().abs() > master.double().abs())[tie].all()), (
        "ties must round away from zero"
    )
    assert torch.equal(high[~tie].view(torch.int16), master.bfloat16()[~tie].view(torch.int16))


def test_a_high_plane_keeps_its_shape() -> None:
    master = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to_bf16(master), master.bfloat16())


# ---- AdamW ----


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("in_planes", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_twenty_steps_are_torch_s_adamw(
    in_planes: bool, weight_decay: float, max_norm: float | None
) -> None:
    """Twenty steps match torch's AdamW.

    The tolerance is 1e-6 of a weight of about 1, because fp32 operations have another order. Two
    planes need no larger tolerance.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    torch_optimizer = torch.optim.AdamW(
        [theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, foreach=False
    )
    settings = AdamW(weight_decay=weight_decay, max_norm=max_norm or math.inf)
    weights, low = planes(start) if in_planes else (start.clone(), None)
    moments = torch.zeros(2, 1000)
    for number in range(1, 21):
        gradient = torch.randn(1000, generator=generator) * 10.0 ** float(
            torch.randint(-4, 1, (), generator=generator)
        )
        theirs.grad = gradient.clone()
        clip = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_([theirs], max_norm)
            clip, ours = clip_coefficient([sum_of_squares(gradient)], max_norm)
            assert float(ours) == pytest.approx(float(norm), rel=1e-6)
        torch_optimizer.step()
        update(
            weights, low, moments, gradient, settings=settings, rate=1e-2, number=number, clip=clip
        )
    master = weights if low is None else join(weights, low)
    assert float((theirs.detach() - start).abs().max()) > 0.1, "the weights have not moved"
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-6, atol=1e-6)
    state = torch_optimizer.state[theirs]
    torch.testing.assert_close(
        moments[0], state["exp_avg"], rtol=1e-5, atol=1e-7
    )  # terms of both signs cancel and leave rounding errors
    torch.testing.assert_close(moments[1], state["exp_avg_sq"], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("both_ways")
def test_a_bf16_gradient_counts_as_its_fp32_value() -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for given_gradient in (gradient, gradient.float()):
        weights, moments = torch.ones(100), torch.zeros(2, 100)
        update(
            weights,
            None,
            moments,
            given_gradient,
            settings=AdamW(),
            rate=1e-2,
            number=1,
            clip=torch.tensor(0.3),
        )
        results.append(torch.cat([weights, moments.flatten()]))
    assert torch.equal(*results)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("in_planes", [False, True])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000, 5000])
def test_threads_and_blocks_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, three_threads: WorkerThreads, count: int, in_planes: bool
) -> None:
    def three_updates(workers: Workers) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        weights, low = torch.randn(count, generator=generator), None
        if in_planes:
            weights, low = planes(weights)
        moments = torch.zeros(2, count)
        for number in (1, 2, 3):
            gradient = torch.randn(count, generator=generator)
            update(
                weights,
                low,
                moments,
                gradient,
                settings=AdamW(weight_decay=0.1),
                rate=1e-2,
                number=number,
                clip=torch.tensor(0.7),
                workers=workers,
            )
        return torch.cat([weights if low is None else join(weights, low), moments.flatten()]).view(
            torch.int32
        )

    whole = three_updates(ALONE)
    for block in (128, 96):
        monkeypatch.setattr(Workers, "cpu_block", block)
        monkeypatch.setattr(WorkerThreads, "cpu_block", block)
        assert torch.equal(three_updates(ALONE), whole)
        assert torch.equal(three_updates(three_threads), whole)


@pytest.mark.parametrize("block", [1, 7, 1000, 10_000])
@pytest.mark.parametrize("count", [1, 6, 7, 8, 2999, 3000, 3001])
def test_shares_cover_every_element_once_in_whole_blocks(
    three_threads: WorkerThreads, count: int, block: int
) -> None:
    for workers in (ALONE, three_threads):
        shares: list[tuple[int, int]] = []
        workers(shares.append, count, block)
        assert [element for start, end in sorted(shares) for element in range(start, end)] == list(
            range(count)
        )
        assert all(start % block == 0 for start, _ in shares)
        assert len(shares) <= 3


def test_an_error_in_a_share_is_raised(three_threads: WorkerThreads) -> None:
    def fail(share: tuple[int, int]) -> None:
        if share[0]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        three_threads(fail, 3000, 1000)


@pytest.mark.usefixtures("both_ways")
def test_updates_below_bf16_s_resolution_are_not_lost() -> None:
    """Updates that are smaller than the resolution of bf16 add up.

    At rate 1e-5 a step of AdamW moves a weight of 1 by 1e-5, and bf16 values around 1 are 4e-3 to
    8e-3 apart.
    """
    settings, gradient, start = (
        AdamW(betas=(0.0, 0.0)),
        torch.ones(64),
        torch.linspace(0.5, 2.0, 64).bfloat16().float(),
    )
    (high, low), moments = planes(start), torch.zeros(2, 64)
    pure, pure_moments = start.bfloat16(), torch.zeros(2, 64)
    for number in range(1, 101):
        update(high, low, moments, gradient, settings=settings, rate=1e-5, number=number, clip=None)
        wide = pure.float()
        update(
            wide,
            None,
            pure_moments,
            gradient,
            settings=settings,
            rate=1e-5,
            number=number,
            clip=None,
        )
        pure.copy_(wide)
    torch.testing.assert_close(start - join(high, low), torch.full((64,), 1e-3), rtol=0.02, atol=0)
    assert torch.equal(pure.float(), start), "pure bf16 must not move at all"


# ---- accumulation, norm, clip ----


@pytest.mark.usefixtures("both_ways")
def test_gradients_are_written_first_and_added_then() -> None:
    total = torch.full((8,), float("nan"))
    optimizer.accumulate(total, torch.full((8,), 1.0).bfloat16(), first=True)
    optimizer.accumulate(total, torch.full((8,), 2.0**-10).bfloat16(), first=False)
    assert torch.equal(total, torch.full((8,), 1 + 2.0**-10))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 12_288, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_is_right_and_does_not_depend_on_blocks(
    monkeypatch: pytest.MonkeyPatch, three_threads: WorkerThreads, count: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(count)
    gradient = (torch.randn(count, generator=generator) * torch.logspace(-3, 1, count)).to(dtype)
    before, whole = gradient.clone(), sum_of_squares(gradient)
    assert (whole.dtype, whole.shape) == (torch.float32, ())
    assert float(whole) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert torch.equal(gradient, before)
    for block in (
        1024,
        2048,
    ):  # rows are folded whole, and four times each block is a multiple of 4096
        monkeypatch.setattr(Workers, "cpu_block", block)
        monkeypatch.setattr(WorkerThreads, "cpu_block", block)
        assert torch.equal(sum_of_squares(gradient), whole)
        assert torch.equal(sum_of_squares(gradient, three_threads), whole)


def stable_adamw(
    weights: torch.Tensor, gradients: list[torch.Tensor], rate: float, decay: float, settings: AdamW
) -> tuple[torch.Tensor, list[float]]:
    """Returns the final weights and each step's RMS in fp64 (arXiv 2304.13013, Algorithm 2)."""
    theta, v, u = weights.double(), torch.zeros(1).double(), torch.zeros(1).double()
    beta1, beta2 = settings.betas
    found = []
    for number, gradient in enumerate(gradients, 1):
        g = gradient.double()
        debiased1, debiased2 = (
            beta * (1 - beta ** (number - 1)) / (1 - beta**number) for beta in (beta1, beta2)
        )
        v, u = debiased1 * v + (1 - debiased1) * g, debiased2 * u + (1 - debiased2) * g**2
        rms = (g**2 / u.clamp(min=settings.epsilon**2)).mean().sqrt()
        eta = rate / max(1.0, float(rms))
        theta = theta - eta * decay * theta - eta * v / (u.sqrt() + settings.epsilon)
        found.append(float(rms))
    return theta, found


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_clipping_by_the_update_is_stable_adamw(decay: float) -> None:
    """Clipping by `update` computes StableAdamW.

    The layer has two tensors, each with its own RMS. The padding of the first tensor is not part of
    its mean.
    """
    generator, settings, sizes = (
        torch.Generator().manual_seed(5),
        AdamW(weight_decay=decay, epsilon=1e-6),
        (100, 5000),
    )
    padded = [-(-size // 64) * 64 for size in sizes]
    starts = [torch.randn(size, generator=generator) for size in sizes]
    gradients = [
        [torch.randn(size, generator=generator) * 5.0 ** (number % 3) for number in range(6)]
        for size in sizes
    ]
    weights, moments, sums = (
        torch.zeros(sum(padded)),
        torch.zeros(2, sum(padded)),
        torch.empty(sum(padded) // 64),
    )
    where = [slice(0, sizes[0]), slice(padded[0], padded[0] + sizes[1])]
    for part, start in zip(where, starts, strict=True):
        weights[part] = start
    scales = []
    for number in range(1, 7):
        flat = torch.zeros(sum(padded))
        for part, steps in zip(where, gradients, strict=True):
            flat[part] = steps[number - 1]
        optimizer.ratio_sums(flat, moments[1], sums, settings=settings, number=number)
        scales.append(
            optimizer.update_scales(
                sums.split([count // 64 for count in padded]),
                torch.tensor(sizes, dtype=torch.float32),
            )
        )
        for part, scale in zip(where, scales[-1], strict=True):
            update(
                weights[part],
                None,
                moments[:, part],
                flat[part],
                settings=settings,
                rate=1e-2,
                number=number,
                clip=None,
                scale=scale,
            )
    for index, (part, start) in enumerate(zip(where, starts, strict=True)):
        theirs, found = stable_adamw(start, gradients[index], 1e-2, decay, settings)
        assert max(found) > 1.5, "clipping is not active"
        assert [float(scale[index]) for scale in scales] == pytest.approx(
            [1 / max(1.0, rms) for rms in found], rel=1e-5
        )
        torch.testing.assert_close(weights[part].double(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_one_tensor_s_ratio_that_is_not_finite_stops_the_whole_layer(bad: float) -> None:
    """A ratio that is not finite in one tensor stops the update of its whole layer.

    The square of 3e38 is not finite.
    """
    gradient, sums = torch.ones(192), torch.empty(3)
    gradient[70] = bad
    optimizer.ratio_sums(gradient, torch.ones(192), sums, settings=AdamW(), number=1)
    assert bool(
        optimizer.update_scales(sums.split([1, 1, 1]), torch.full((3,), 64.0)).isnan().all()
    )


@pytest.mark.usefixtures("both_ways")
def test_a_nan_second_moment_gives_nan() -> None:
    """A second moment of NaN gives NaN. It must not count as smaller than epsilon^2."""
    second, sums = torch.ones(64), torch.empty(1)
    second[5] = math.nan
    optimizer.ratio_sums(torch.ones(64), second, sums, settings=AdamW(), number=1)
    assert bool(sums.isnan())


@pytest.mark.usefixtures("both_ways")
def test_a_gradient_of_zeros_is_not_scaled() -> None:
    """A gradient of zeros has the scale 1, even if epsilon's square is too small for fp32."""
    sums = torch.empty(1)
    optimizer.ratio_sums(
        torch.zeros(64), torch.zeros(64), sums, settings=AdamW(epsilon=1e-30), number=1
    )
    assert optimizer.update_scales([sums], torch.ones(1) * 64).tolist() == [1.0]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_ratios_do_not_depend_on_blocks(
    monkeypatch: pytest.MonkeyPatch, three_threads: WorkerThreads, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, second = (
        torch.randn(64 * 333, generator=generator).to(dtype),
        torch.rand(64 * 333, generator=generator),
    )

    def found(workers: Workers, pieces: int) -> torch.Tensor:
        sums, step = torch.empty(333), -(-333 // pieces)
        for row in range(0, 333, step):
            part = slice(64 * row, min(64 * (row + step), 64 * 333))
            optimizer.ratio_sums(
                gradient[part],
                second[part],
                sums[row : row + step],
                settings=AdamW(),
                number=3,
                workers=workers,
            )
        return sums

    whole = found(ALONE, 1)
    for block in (64, 1024):
        monkeypatch.setattr(Workers, "cpu_block", block)
        monkeypatch.setattr(WorkerThreads, "cpu_block", block)
        for pieces in (1, 2, 7):
            assert torch.equal(found(ALONE, pieces), whole)
            assert torch.equal(found(three_threads, pieces), whole)


@pytest.mark.parametrize(
    ("scale", "max_norm"),
    [(0.0, 1.0), (1e-4, 1.0), (0.1, 1.0), (1.0, 1.0), (100.0, 1.0), (1e-7, 1e-6)],
)
def test_the_clip_coefficient_is_torch_s(scale: float, max_norm: float) -> None:
    """The clip coefficient is torch's, also for small norms, where torch's 1e-6 matters."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=generator) * scale for size in (3, 5000, 64)]
    factor, norm = clip_coefficient([sum_of_squares(gradient) for gradient in gradients], max_norm)
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    theirs = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
    assert float(factor) == 1.0 if norm < max_norm else float(factor) < 1.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient * factor, parameter.grad, rtol=1e-6, atol=0)


def test_a_norm_as_small_as_the_epsilon_is_clipped_as_torch_clips_it() -> None:
    """For a norm of 1e-6 the coefficient is one half, because torch adds 1e-6 to the norm."""
    gradient = torch.full((4,), 5e-7)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = gradient.clone()
    theirs = torch.nn.utils.clip_grad_norm_([parameter], 1e-6)
    factor, norm = clip_coefficient([sum_of_squares(gradient)], 1e-6)
    torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient * factor, parameter.grad, rtol=1e-6, atol=0)
    assert float(factor) == pytest.approx(0.5, rel=1e-6)


def test_square_roots_are_rounded_correctly() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 100
    assert torch.equal(optimizer.rounded_sqrt(values), values.double().sqrt().float())
