"""Compares 8-bit moments and rounded masters with torchao, bitsandbytes and flashoptim.

torchao and bitsandbytes use another code than ours: a dynamic map with one fp32 scale for 256
numbers. Ours stores companded values with one bf16 scale for 32 numbers. So these tests compare
errors, and updates from moments that every codec stores exactly. flashoptim has our codes with fp16
scales. Its kernels need Triton, whose interpreter is used here:
`TRITON_INTERPRET=1 pytest tests/parity/test_public_codecs.py`.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from fp8_definition import error
from public_packages import public

from megatrain.runtime.optimizer import blockwise
from megatrain.runtime.optimizer.adamw import join, split
from megatrain.runtime.optimizer.settings import AdamW

COUNT = 256 * 256
THEIRS = ("torchao", "bitsandbytes")
RATE, DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
SETTINGS = AdamW(weight_decay=DECAY, betas=BETAS)


class Moments(NamedTuple):
    """First and second moments, fp32 tensors of shape [n]."""

    first: torch.Tensor
    second: torch.Tensor

    @property
    def direction(self) -> torch.Tensor:
        """The direction of AdamW's step, without bias correction and epsilon."""
        return self.first / self.second.sqrt()


def drawn(kind: str) -> Moments:
    """Returns moments after 60 random gradients.

    If `kind` is `alike`, gradients are standard normal. If it is `unlike`, their scales vary by a
    log-normal factor with deviation 1.5 between elements, and by six orders of magnitude between
    rows.
    """
    draw = torch.Generator().manual_seed(0)
    sizes = torch.ones(COUNT // 256, 256)
    if kind == "unlike":
        sizes *= (1.5 * torch.randn(sizes.shape, generator=draw)).exp()
        sizes *= 10.0 ** (6 * torch.rand(COUNT // 256, 1, generator=draw) - 5)
    first, second = torch.zeros(2, COUNT)
    for _ in range(60):
        gradient = (sizes * torch.randn(sizes.shape, generator=draw)).view(-1)
        first.mul_(BETAS[0]).add_(gradient * (1 - BETAS[0]))
        second.mul_(BETAS[1]).add_(gradient.square() * (1 - BETAS[1]))
    return Moments(first, second)


def ours(moments: Moments) -> torch.Tensor:
    """Returns `moments` in our code, [2, bytes] uint8."""
    made = torch.empty(2, blockwise.records(len(moments.first)), dtype=torch.uint8)
    blockwise.encode_first(moments.first, made[0])
    blockwise.encode_second(moments.second, made[1], key=5, index=0)
    return made


def decoded(made: torch.Tensor) -> Moments:
    return Moments(blockwise.decoded_first(made[0]), blockwise.decoded_second(made[1]))


def stored_by(package: str, moments: Moments) -> Moments:
    """Returns `moments` after `package` has stored and read them."""
    if package == "torchao":
        (module,) = public("torchao.optim.subclass_8bit")

        def kept(values: torch.Tensor, signed: bool) -> torch.Tensor:
            made = module.OptimState8bit.zeros(values.shape, signed, 256)
            made.copy_(values)
            return made.dequantize()
    else:
        (module,) = public("bitsandbytes.functional")

        def kept(values: torch.Tensor, signed: bool) -> torch.Tensor:
            code = module.create_dynamic_map(signed=signed)
            return module.dequantize_blockwise(
                *module.quantize_blockwise(values, code=code, blocksize=256)
            )

    return Moments(kept(moments.first, True), kept(moments.second, False))


@pytest.mark.parametrize("package", THEIRS)
def test_moments_of_one_size_give_steps_with_half_of_the_error(package: str) -> None:
    """The error of second moments may be a tenth larger, because their rounding is stochastic."""
    moments = drawn("alike")
    found, wanted = decoded(ours(moments)), stored_by(package, moments)
    assert error(found.first, moments.first) < 0.55 * error(wanted.first, moments.first)
    assert error(found.second, moments.second) < 1.1 * error(wanted.second, moments.second)
    step, other = (error(each.direction, moments.direction) for each in (found, wanted))
    assert step < 0.55 * other < 0.01


@pytest.mark.parametrize("package", THEIRS)
def test_no_small_second_moment_becomes_zero(package: str) -> None:
    """A second moment is inexact if it is much smaller than the largest of its block.

    With torchao, some become 0, which makes the steps of their parameters unbounded. With our code
    and bitsandbytes, none does.
    """
    moments = drawn("unlike")
    found, wanted = decoded(ours(moments)), stored_by(package, moments)
    assert error(found.first, moments.first) < 0.75 * error(wanted.first, moments.first)
    assert error(found.second, moments.second) < 1.1 * error(wanted.second, moments.second)
    assert (found.second > 0).all()
    step, other = (error(each.direction, moments.direction) for each in (found, wanted))
    if package == "torchao":
        assert int((wanted.second == 0).sum()) > 0.01 * COUNT
    else:
        assert 0.2 < step < 0.85 * other


# ---- updates


def even(draw: torch.Generator) -> Moments:
    """Returns moments that every codec stores exactly: all moments of a block are equal."""
    size = 2.0 ** torch.randint(-9, 0, (COUNT // 256, 1), generator=draw).expand(-1, 256)
    return Moments(size.reshape(-1), size.square().reshape(-1) * 4)


def updated_by(
    package: str, weights: torch.Tensor, moments: Moments, gradient: torch.Tensor
) -> tuple[torch.Tensor, Moments]:
    """Returns weights and moments after step 2 by `package`, which starts from `moments`."""
    parameter = torch.nn.Parameter(weights.clone())
    (module,) = public("torchao.optim" if package == "torchao" else "bitsandbytes.optim")
    optimizer = module.AdamW8bit([parameter], lr=RATE, betas=BETAS, weight_decay=DECAY)
    parameter.grad = torch.zeros_like(weights)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()  # makes the state, and decays the weights
        with torch.no_grad():
            parameter.copy_(weights)
        parameter.grad = gradient
        state = optimizer.state[parameter]
        if package == "torchao":
            state["exp_avg"].copy_(moments.first)
            state["exp_avg_sq"].copy_(moments.second)
            optimizer.step()
            return parameter.detach(), Moments(
                *(state[name].dequantize() for name in ("exp_avg", "exp_avg_sq"))
            )
    (functional,) = public("bitsandbytes.functional")
    parts = [
        [state[f"{part}{number}"] for part in ("state", "absmax", "qmap")] for number in (1, 2)
    ]
    for values, (codes, scales, qmap) in zip(moments, parts, strict=True):
        made, how = functional.quantize_blockwise(values, code=qmap, blocksize=256)
        codes.copy_(made)
        scales.copy_(how.absmax)
    optimizer.step()
    return parameter.detach(), Moments(
        *(
            functional.dequantize_blockwise(codes, absmax=scales, code=qmap, blocksize=256)
            for codes, scales, qmap in parts
        )
    )


@pytest.mark.parametrize("low", [True, False], ids=["master24", "bf16-sr"])
@pytest.mark.parametrize("package", THEIRS)
def test_an_update_from_equal_moments_equals_that_of_a_public_package(
    package: str, low: bool
) -> None:
    """Our new weight is one of the two storable neighbours of theirs, which is fp32. The new
    moments of both are near the exact ones.
    """
    draw = torch.Generator().manual_seed(0)
    moments = even(draw)
    gradient, weights = torch.randn(2, COUNT, generator=draw)
    gradient, weights = 0.1 * gradient, weights.bfloat16()
    records = ours(moments)
    for found in (decoded(records), stored_by(package, moments)):
        assert all(one.equal(other) for one, other in zip(found, moments, strict=True))
    wanted, kept = updated_by(package, weights.float(), moments, gradient)
    residual = torch.zeros(COUNT, dtype=torch.int8) if low else None
    found_weights = weights.clone()
    blockwise.update(
        found_weights,
        residual,
        records,
        gradient,
        settings=SETTINGS,
        rate=RATE,
        number=2,
        clip=None,
    )
    master = found_weights.float() if residual is None else join(found_weights, residual)
    distance = (master.double() - wanted.double()).abs()
    step = 2.0 ** (wanted.abs().double().log2().floor() - (15 if low else 7))
    # theirs has rounding errors of fp32
    assert (distance < step * (1 + 2**-6) + 1e-8).all()
    assert (distance > 0.1 * step).any()
    exact = Moments(
        moments.first * BETAS[0] + gradient * (1 - BETAS[0]),
        moments.second * BETAS[1] + gradient.square() * (1 - BETAS[1]),
    )
    for new in (decoded(records), kept):
        assert all(error(one, other) < 0.005 for one, other in zip(new, exact, strict=True))


def test_random_rounding_to_bf16_has_the_neighbours_and_the_mean_of_torchao_s() -> None:
    (module,) = public("torchao.optim.quant_utils")
    count = 4096
    value = torch.tensor([1.0 + 0.3 * 2**-7, -3.0 - 0.8 * 2**-6, 2.0**-40 * (1 + 0.5 * 2**-7)])
    torch.manual_seed(0)
    key = blockwise.rounding_keys(0, 1)[0]
    for index, each in enumerate(value):
        same = each.expand(count).contiguous()
        found = blockwise.round_randomly(same, key, index * count).float()
        wanted = module._fp32_to_bf16_sr(same).float()
        assert found.unique().equal(wanted.unique())
        spread = (found.max() - found.min()).double()
        assert (found.double().mean() - wanted.double().mean()).abs() < 0.05 * spread
        assert (found.double().mean() - each.double()).abs() < 0.04 * spread


# ---- flashoptim


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns flashoptim, whose kernels run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    module, language = public("flashoptim.optimizers", "triton.language")
    for kernel in (module._triton_quantize_kernel, module._triton_dequantize_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[:1])  # no GPU to choose by
    monkeypatch.setattr(module, "_get_sm_count", lambda *_: 4)

    def copysign(value: Any, sign: Any) -> Any:  # the interpreter has none
        return language.where(sign < 0, -value, value)

    monkeypatch.setattr(module.libdevice, "copysign", copysign)
    return module


def test_codes_are_flashoptim_s(flash: Any) -> None:
    """Scales are equal if the largest value of a block is both a bf16 and an fp16 number.

    Then first moments have flashoptim's codes, except for values in the middle between two codes.
    The code of a second moment is a neighbour of the exact value, and theirs is the nearest.
    """
    draw = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-6, 3, (512, 1), generator=draw)
    values = 2 * torch.rand(512, 32, generator=draw) - 1
    values[:, 3] = 1
    values = (values * sizes).view(-1)
    records = ours(Moments(values, values.square()))
    codes, scales = flash.quantize(values)
    found, kept = blockwise.unpacked(records[0])
    assert kept.view(-1).equal(scales.float())
    different = found.view(torch.int8) != codes.view(-1, 32)
    assert different.sum() < 5
    read = flash.dequantize(codes, scales).view(-1, 32)
    same = blockwise.decoded_first(records[0]).view(-1, 32)
    assert torch.allclose(same[~different], read[~different], rtol=1e-6)
    codes, scales = flash.quantize(values.square(), signed=False, sqrt=True, softsign=False)
    found, kept = blockwise.unpacked(records[1])
    assert kept.view(-1).equal(scales.float())
    apart = found.int() - codes.view(-1, 32).int()
    assert (apart.abs() <= 1).all()
    assert apart.float().mean().abs() < 0.01


def test_a_master_of_24_bits_is_as_near_as_flashoptim_s(flash: Any) -> None:
    master = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    high, low = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.int8)
    split(master, high, low)
    codes = flash.compute_ecc_bits(master, master.bfloat16(), master_bytewidth=3)
    wanted = flash.reconstruct_fp32_param(master.bfloat16(), codes)
    assert error(join(high, low), master) < 1.01 * error(wanted, master)
    assert error(wanted, master) < 1e-5
