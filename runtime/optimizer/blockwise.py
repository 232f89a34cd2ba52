"""AdamW on masters of 24 or 16 bits, with moments in 8 bits.

Moments are stored as records, one for each block of 32 parameters. A record consists of 32 codes of
one byte and their scale s in bf16, which is the largest absolute value of the block, rounded up. An
update reads a block, computes in fp32 with the arithmetic of `adamw.py`, and writes the block.
Values are rounded only when they are stored. Blocks do not depend on each other, so the result does
not depend on how a layer is cut into chunks.

* A first moment m is stored as a signed code q, the nearest integer to 254 m / (s + |m|). It is
  decoded as s q / (254 - |q|). Codes of small moments are closer together.
* Of a second moment, the root r is stored as an unsigned code: 255 r / s with stochastic rounding.
  With rounding to nearest, a decay by less than half a code would be lost in every step: with beta2
  = 0.999, no second moment would ever become smaller. A root that is not 0 has at least the code 1.
  If it became 0, the first moment would be divided by almost nothing.
* With a low part, a master is fp32 rounded to 24 bits. The low part has the upper 8 bits of the low
  half in `adamw.py`. Without a low part, a master is bf16.
* A new master is stored with stochastic rounding. With rounding to nearest, a 24-bit weight near 1
  would never change at a learning rate of 1e-6.

Stochastic rounding returns one of the two neighbours of a value, the upper neighbour with a
probability equal to the distance from the lower neighbour. The random bits depend only on the seed,
the step and the index of the parameter in the model. Weights and second moments use different bits.

If a moment of a block is not finite or is at least 2^119, the block is stored as NaN. The weights
and the loss of the next step are then NaN, and the run stops.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatrain.runtime.optimizer import adamw
from megatrain.runtime.optimizer.adamw import ALONE, Share, Workers, join, on_device
from megatrain.runtime.optimizer.kernels.choice import Kernels
from megatrain.runtime.optimizer.kernels.host import HostKernels
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.state_format import BLOCK, GPU_BLOCK
from megatrain.simulator.schedule.arithmetic import RATIO_ROW

RECORD = BLOCK + 2
"""Bytes of a record."""
_CPU_BLOCK = 2**15
"""Elements that are updated at a time on the CPU."""
_LARGEST = 0x7B00
"""2^119 as the bits of a bf16. For moments m up to this value, 254 m is finite."""
_NAN = 0x7FC0
"""NaN as the bits of a bf16."""
_SMALLEST = 0x0080
"""The smallest normal bf16 number, as bits. Blocks with only smaller values are stored as zeros."""
_GAMMA = 0x9E37_79B9_7F4A_7C15
"""The increment of SplitMix64 (Steele, Lea, Flood 2014)."""
_MIX = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
"""The shifts and factors of SplitMix64."""
_MASK = 2**64 - 1
_log = logging.getLogger(__name__)


def records(parameters: int) -> int:
    """Returns the bytes of the records of one moment for `parameters`, a multiple of 32."""
    assert parameters % BLOCK == 0
    return parameters // BLOCK * RECORD


def decoded_first(stored: torch.Tensor) -> torch.Tensor:
    """Decodes `stored`, uint8 records, and returns the first moments, [n] fp32."""
    codes, scales = unpacked(stored)
    q = codes.view(torch.int8).float()
    return (q * scales).div_(254 - q.abs()).view(-1)


def decoded_second(stored: torch.Tensor) -> torch.Tensor:
    """Decodes `stored`, uint8 records, and returns the second moments, [n] fp32."""
    codes, scales = unpacked(stored)
    root = codes.float().mul_(scales * (1 / 255))
    return root.mul_(root).view(-1)


def encode_first(first: torch.Tensor, stored: torch.Tensor) -> None:
    """Encodes the first moments `first` [n] fp32 and writes them to `stored`, uint8 records."""
    values = first.view(-1, BLOCK)
    bits = scale_bits(values)
    codes = (values * 254).div_(scale_of(bits) + values.abs()).round_()
    pack(codes, bits, stored, torch.int8)


def encode_second(second: torch.Tensor, stored: torch.Tensor, key: int, index: int) -> None:
    """Encodes the second moments `second` [n] fp32 and writes them to `stored`, uint8 records.
    `index` is the index in the model of the first parameter, and `key` the key of the random bits.
    """
    root = adamw.rounded_sqrt(second).view(-1, BLOCK)
    bits = scale_bits(root)
    inverse = torch.full_like(root[:, :1], 255).div_(scale_of(bits))
    codes = random_bits(key, index, second.numel(), second.device).view(-1, BLOCK) * 2.0**-16
    codes.add_(root * inverse).floor_().clamp_(1, 255).mul_(root > 0)
    pack(codes, bits, stored, torch.uint8)


def unpacked(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes [blocks, 32] uint8 and scales [blocks, 1] fp32 of the records `stored`."""
    rows = stored.view(-1, RECORD)
    scales = rows[:, BLOCK:].contiguous().view(torch.bfloat16)
    return rows[:, :BLOCK].contiguous(), scales.float()


def scale_bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each row of `values` [blocks, 32] fp32, as the bits of a bf16: [blocks,
    1] int32.
    """
    most = (values.contiguous().view(torch.int32) & 0x7FFF_FFFF).amax(1, keepdim=True)
    # Without the clamp, the addition could overflow for a NaN.
    bits = (most.clamp_(max=0x7F80_0000) + 0xFFFF) >> 16
    bits = torch.where(bits > _LARGEST, _NAN, bits)
    return torch.where(bits < _SMALLEST, 0, bits)


def scale_of(bits: torch.Tensor) -> torch.Tensor:
    """Returns scales as fp32. `bits` int32 are their bits as bf16."""
    return (bits << 16).view(torch.float32)


def pack(codes: torch.Tensor, bits: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype) -> None:
    """Writes `codes` [blocks, 32] fp32, converted to `dtype` int8 or uint8, and the scales `bits`
    as records to `stored`. All codes of a block are 0 if its scale is 0 or NaN.
    """
    rows = stored.view(-1, RECORD)
    coded = (bits != 0) & (bits != _NAN)
    rows[:, :BLOCK] = torch.where(coded, codes, 0).to(dtype).view(torch.uint8)
    rows[:, BLOCK:] = bits.to(torch.int16).view(torch.uint8)


@functools.lru_cache(maxsize=4)
def rounding_keys(seed: int, number: int) -> tuple[int, int]:
    """Returns the keys of the random bits of step `number`, for weights and for second moments.
    Keys are unsigned 64-bit integers.
    """
    key = mixed(mixed(seed & _MASK) + number & _MASK)
    return key, mixed(key)


def mixed(value: int) -> int:
    """Returns the next output of SplitMix64 from the state `value`, an unsigned 64-bit integer."""
    value = value + _GAMMA & _MASK
    for shift, factor in _MIX:
        value = (value ^ value >> shift) * factor & _MASK
    return value ^ value >> 31


def random_bits(key: int, index: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns 16 random bits for each of `count` parameters from index `index` on, [count] int32.
    `index` and `count` must be multiples of 4.

    The bits of parameter i are the 16 bits from bit i % 4 * 16 on in number i // 4 of the
    SplitMix64 generator with the seed `key`.
    """
    words = torch.arange(1, count // 4 + 1, dtype=torch.int64, device=device)
    words = words.mul_(_signed(_GAMMA)).add_(_state(key, index))
    for shift, factor in _MIX:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, 31))
    return words.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)  # little endian


def _state(key: int, index: int) -> int:
    """Returns the state of the generator with the seed `key` before its number `index` // 4, as a
    signed 64-bit integer.
    """
    return _signed(key + index // 4 * _GAMMA & _MASK)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns `words` shifted to the right as unsigned integers."""
    return (words >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def round_randomly(master: torch.Tensor, key: int, index: int) -> torch.Tensor:
    """Returns `master` [n] fp32 as bf16, with stochastic rounding. A NaN stays a NaN."""
    return _upper_bits(master, key, index, 16).to(torch.int16).view(torch.bfloat16)


def split_randomly(
    master: torch.Tensor, high: torch.Tensor, low: torch.Tensor, key: int, index: int
) -> None:
    """Rounds `master` [n] fp32 stochastically to 24 bits, and splits it into `high` [n] bf16 and
    `low` [n] int8. A NaN stays a NaN.
    """
    rounded = _upper_bits(master, key, index, 8)
    low.copy_(rounded)
    high.view(torch.int16).copy_(rounded.add_(0x80).bitwise_right_shift_(8))


def _upper_bits(master: torch.Tensor, key: int, index: int, dropped: int) -> torch.Tensor:
    """Returns the bits of `master` without the last `dropped` bits, rounded stochastically: [n]
    int32.
    """
    random = random_bits(key, index, master.numel(), master.device).bitwise_and_((1 << dropped) - 1)
    # an addition could turn a NaN into another number
    bits = torch.where(master.isnan(), _NAN << 16, random.add_(master.view(torch.int32)))
    return bits.bitwise_right_shift_(dropped)


def update(
    weights: torch.Tensor,
    low: torch.Tensor | None,
    moments: torch.Tensor | Sequence[torch.Tensor],
    gradient: torch.Tensor,
    *,
    settings: AdamW,
    rate: float,
    number: int,
    clip: torch.Tensor | None,
    workers: Workers = ALONE,
    weight_decay: float | None = None,
    copy_to: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    seed: int = 0,
    index: int = 0,
) -> None:
    """Does one AdamW update in place. The tensors may be any range of whole blocks of a layer.

    The arguments are those of `adamw.update`, except:

    Args:
        weights: The high halves of the masters, [n] bf16, or whole masters if `low` is None.
        low: The low parts of the masters, [n] int8, or None.
        moments: The first and second moments, [2, bytes] uint8 records or two tensors of records.
        seed: The run's seed, for stochastic rounding.
        index: The index of the first element in the model, a multiple of 32.
    """
    count, device = weights.numel(), weights.device
    scalars = adamw.Scalars.of(settings, rate, number, weight_decay)
    assert weights.shape == gradient.shape == (count,)
    assert index % BLOCK == 0
    assert [plane.shape for plane in moments] == [(records(count),)] * 2
    for plane in (low, copy_to):
        assert plane is None or plane.shape == (count,)
    fused = trusted(
        adamw.kernels_for(
            workers,
            (weights, torch.bfloat16),
            (low, torch.int8),
            (moments[0], torch.uint8),
            (moments[1], torch.uint8),
            (gradient, None),
            (copy_to, torch.bfloat16),
            (clip, torch.float32),
            (scale, torch.float32),
        ),
        device,
    )
    keys = rounding_keys(seed, number)
    tensors = (weights, low, moments[0], moments[1], gradient, clip, scale, copy_to)
    if fused is None:
        _update_in_pytorch(*tensors, scalars, keys, index, workers)
    else:
        fused.blockwise_adamw(*tensors, scalars, (_state(keys[0], index), _state(keys[1], index)))


def _update_in_pytorch(
    weights: torch.Tensor,
    low: torch.Tensor | None,
    first_codes: torch.Tensor,
    second_codes: torch.Tensor,
    gradient: torch.Tensor,
    clip: torch.Tensor | None,
    scale: torch.Tensor | None,
    copy_to: torch.Tensor | None,
    scalars: adamw.Scalars,
    keys: tuple[int, int],
    index: int,
    workers: Workers = ALONE,
) -> None:
    """Does the work of `update` in PyTorch. This defines the arithmetic."""
    count, device = weights.numel(), weights.device
    stops = [factor.isnan() for factor in (clip, scale) if factor is not None]
    # `stop` stays a tensor, because reading its value would wait for the GPU.
    stop = stops[0] | stops[-1] if stops else None
    block = min(_CPU_BLOCK if device.type == "cpu" else GPU_BLOCK, count)

    def in_blocks(share: Share) -> None:
        scratch = torch.empty(3, block, dtype=torch.float32, device=device)
        wide = torch.empty(block, dtype=torch.float64, device=device)
        for start in range(*share, block):
            part = slice(start, min(start + block, share[1]))
            state = [plane[part] for plane in (weights, low) if plane is not None]
            state += [
                plane[records(part.start) : records(part.stop)]
                for plane in (first_codes, second_codes)
            ]
            before = [] if stop is None else [plane.clone() for plane in state]
            length = part.stop - part.start
            master = state[0].float() if low is None else join(state[0], state[1])
            first, second = decoded_first(state[-2]), decoded_second(state[-1])
            adamw.update_block(
                master,
                None,
                first,
                second,
                gradient[part],
                scratch[:, :length],
                wide[:length],
                scalars,
                clip,
                scale,
            )
            encode_first(first, state[-2])
            encode_second(second, state[-1], keys[1], index + start)
            if low is None:
                state[0].copy_(round_randomly(master, keys[0], index + start))
            else:
                split_randomly(master, state[0], state[1], keys[0], index + start)
            for plane, old in zip(state, before, strict=False):
                assert stop is not None
                plane.copy_(torch.where(stop, old, plane))
            if copy_to is not None:
                copy_to[part] = state[0]

    on_device(device, workers)(in_blocks, count, block)


def ratio_sums(
    gradient: torch.Tensor,
    second: torch.Tensor,
    sums: torch.Tensor,
    *,
    settings: AdamW,
    number: int,
    workers: Workers = ALONE,
) -> None:
    """Does the work of `adamw.ratio_sums` for a second moment in uint8 records."""
    count = gradient.numel()
    assert count % RATIO_ROW == 0
    assert (second.numel(), sums.numel()) == (records(count), count // RATIO_ROW)
    fused = trusted(
        adamw.kernels_for(workers, (gradient, None), (second, torch.uint8), (sums, torch.float32)),
        gradient.device,
    )
    if fused is not None:
        fused.ratio_sums(gradient, second, sums, adamw.Scalars.of(settings, 0.0, number))
        return
    _ratio_sums_in_pytorch(gradient, second, sums, settings, number, workers)


def _ratio_sums_in_pytorch(
    gradient: torch.Tensor,
    second: torch.Tensor,
    sums: torch.Tensor,
    settings: AdamW,
    number: int,
    workers: Workers = ALONE,
) -> None:
    count = gradient.numel()
    for start in range(0, count, GPU_BLOCK):
        end = min(start + GPU_BLOCK, count)
        adamw.ratio_sums(
            gradient[start:end],
            decoded_second(second[records(start) : records(end)]),
            sums[start // RATIO_ROW : end // RATIO_ROW],
            settings=settings,
            number=number,
            workers=workers,
        )


def trusted(kernels: Any, device: torch.device) -> Kernels | None:
    """Returns `kernels`, or None if they are GPU kernels that do not have PyTorch's bits."""
    usable = kernels is None or isinstance(kernels, HostKernels) or _match_pytorch(kernels, device)
    return kernels if usable else None


@functools.lru_cache(maxsize=8)
def _match_pytorch(kernels: Any, device: torch.device) -> bool:
    """Returns whether the bits of GPU kernels, which depend on the GPU's compiler, match PyTorch on
    67 records. Checks this once in a process. Logs a warning if the bits differ or the kernels
    cannot be compiled.
    """
    # The check has its own stream, so that reading the result does not wait for other work.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    try:
        with torch.cuda.stream(stream):
            if _same_bits(kernels, device):
                return True
            problem: object = "other bits than PyTorch's"
    except Exception as error:  # a compiler may raise any exception
        problem = next(iter(str(error).splitlines()), "") or type(error).__name__
    _log.warning(
        "kernels: updates of 8-bit moments on %s: %s; they are done in PyTorch, which is slower",
        device,
        problem,
    )
    return False


def _same_bits(kernels: Kernels, device: torch.device) -> bool:
    """Returns whether updates and sums of ratios by `kernels` have the bits of PyTorch."""
    count, index, settings = 67 * BLOCK, 2**33 + 7 * BLOCK, AdamW(weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    # blocks of different sizes, with zeros and a value that is not finite
    values = torch.randn(3, count // BLOCK, BLOCK, generator=generator)
    values *= 10.0 ** torch.randint(-9, 2, (3, count // BLOCK, 1), generator=generator)
    values[:, 2], values[:, 3, 5] = 0, float("inf")
    master, first, second = values.view(3, count).to(device)
    gradient, factor = (master * 0.5).bfloat16(), torch.tensor(0.37, device=device)
    keys, scalars = rounding_keys(1, 3), adamw.Scalars.of(settings, 1e-2, 3)
    moments = torch.empty(2, records(count), dtype=torch.uint8, device=device)
    encode_first(first, moments[0])
    encode_second(second.abs(), moments[1], keys[1], index)
    for has_low in (True, False):
        results = []
        for use_kernels in (True, False):
            weights, low, codes = master.bfloat16(), None, moments.clone()
            if has_low:
                low = torch.arange(count, device=device).to(torch.int8)
            tensors = (weights, low, codes[0], codes[1], gradient, factor, None, None)
            if use_kernels:
                states = (_state(keys[0], index), _state(keys[1], index))
                kernels.blockwise_adamw(*tensors, scalars, states)
            else:
                _update_in_pytorch(*tensors, scalars, keys, index)
            results.append((weights.view(torch.int16), codes, low))
        for ours, theirs in zip(*results, strict=True):
            if ours is not None and theirs is not None and not ours.equal(theirs):
                return False
    length = count // RATIO_ROW * RATIO_ROW
    sums, expected = torch.zeros(2, length // RATIO_ROW, device=device)
    stored = moments[1][: records(length)]
    finite = gradient[:length].nan_to_num(posinf=1.0)
    kernels.ratio_sums(finite, stored, sums, adamw.Scalars.of(settings, 0.0, 3))
    _ratio_sums_in_pytorch(finite, stored, expected, settings, 3)
    return sums.view(torch.int32).equal(expected.view(torch.int32))
