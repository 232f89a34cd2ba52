"""Tests of which rows attention is timed on, and of the rate that follows from their times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import reference_lengths
import torch
from torch.nn.attention import SDPBackend
from whole_models import model_of

from megatrain.runtime.calibration import attention_kernel
from megatrain.runtime.calibration.attention_kernel import (
    attention_curve,
    attention_curves,
    attention_rate,
)
from megatrain.runtime.layers import lengths
from megatrain.simulator.hardware.machine import AttentionRate
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

LENGTHS = (512, 2048, 8192, 32768, 131072)
Points = tuple[tuple[int, int, int], ...]


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], Points]:
    """Returns the points for rows whose forward and backward take the given seconds."""
    model, work = model_of("qwen2"), Workload(batch=2, sequence=16, dtype="fp32")

    def curve(seconds: Callable[[int], Any]) -> Points:
        monkeypatch.setattr(attention_kernel, "_row", lambda *given: seconds(given[-1]))
        return attention_curve(model, work, torch.device("cpu"))

    return curve


def test_rows_get_longer_until_the_next_would_take_too_long(curve: Any) -> None:
    """A row that is four times as long takes about 16 times as long. On a CPU, a row may take 50
    ms. Two rows are always timed, because a rate needs two.
    """
    assert [length for length, *_ in curve(lambda _: (0.001, 0.002))] == list(LENGTHS)
    assert [length for length, *_ in curve(lambda _: (0.0015, 0.002))] == list(LENGTHS[:2])
    assert curve(lambda length: (1e-6 * length, 2e-6 * length))[:2] == (
        (512, 512_000, 1_024_000),
        (2048, 2_048_000, 4_096_000),
    )


def test_a_row_takes_at_least_a_nanosecond(curve: Any) -> None:
    """A cost table with a duration of 0 could not be divided by."""
    assert curve(lambda _: (0.0, 0.0)) == tuple((length, 1, 1) for length in LENGTHS)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_rows_that_do_not_fit_are_left_out(curve: Any, error: type[Exception]) -> None:
    def seconds(length: int) -> tuple[float, float]:
        if length > LENGTHS[1]:
            raise error("no memory")
        return 1e-6, 1e-6

    assert [length for length, *_ in curve(seconds)] == list(LENGTHS[:2])


def test_attention_is_timed_as_layers_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is causal, and its key-value heads are shared by several heads."""
    seen: list[dict[str, Any]] = []
    attend = attention_kernel.scaled_dot_product_attention

    def recorded(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append({**options, "heads": [tensor.shape[1] for tensor in tensors]})
        return attend(*tensors, **options)

    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(attention_kernel, "_LONGEST", 512)
    model, work = model_of("qwen2"), Workload(batch=2, sequence=16, dtype="fp32")
    heads, pairs, _ = model.heads
    assert heads > pairs
    assert len(attention_curve(model, work, torch.device("cpu"))) == 1
    assert seen[0] == {"is_causal": True, "enable_gqa": True, "heads": [heads, pairs, pairs]}


def test_rows_with_documents_are_timed_with_the_kernel_that_receives_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference_lengths.install(monkeypatch)
    seen: list[tuple[list[int], int]] = []
    attend = lengths.attend_within

    def recorded(documents: lengths.LengthBounds, *given: Any, **options: Any) -> torch.Tensor:
        seen.append((documents.starts.tolist(), len(documents.extent)))
        return attend(documents, *given, **options)

    monkeypatch.setattr(lengths, "attend_within", recorded)
    monkeypatch.setitem(attention_kernel._TOKENS, "cpu", 48)
    model, cpu = model_of("qwen2"), torch.device("cpu")
    work = Workload(batch=1, sequence=64, documents=True)
    forward, backward = attention_kernel._row(model, work, cpu, 16)
    assert forward > 0
    assert backward > 0
    assert seen[0] == ([0, 16, 32, 48], 16)
    count = len(seen)
    attention_kernel._row(model, msgspec.structs.replace(work, documents=False), cpu, 16)
    assert len(seen) == count


def test_two_rows_are_enough_for_a_rate() -> None:
    """With 0 half tokens, the time grows with the square of the length."""
    model = model_of("qwen2")
    heads, _, size = model.heads
    flops = 7 * heads * size * 2048**2
    points = ((512, 10, 20), (2048, 160, 320))
    found = attention_rate(model, points, 1e18)
    assert found
    assert found.efficiency == pytest.approx(flops / 480e-9 / 1e18, rel=1e-4)
    assert found.half_tokens == 0
    most = attention_rate(model, points, 1e6)
    assert most == AttentionRate(efficiency=1.0, half_tokens=0), "no faster than a large product"


def test_times_that_grow_faster_than_the_square_have_no_half_tokens() -> None:
    found = attention_rate(model_of("qwen2"), ((512, 1, 1), (2048, 160, 320)), 1e15)
    assert found
    assert found.half_tokens == 0


@pytest.mark.parametrize("longer", [40, 39])
def test_without_growth_per_token_there_is_no_rate(longer: int) -> None:
    """This happens on a machine that is busy while the shorter row is timed."""
    assert attention_rate(model_of("qwen2"), ((512, 5, 5), (2048, longer, 0)), 1e12) is None


@pytest.mark.parametrize(("longer", "has_rate"), [(40_010, False), (40_100, True)])
def test_growth_per_token_that_is_lost_in_the_noise_gives_no_rate(
    longer: int, has_rate: bool
) -> None:
    """The heads of a very small model are so small that the square hardly counts at 2,048 tokens. A
    machine with the half_tokens that follow would be refused after it was measured.
    """
    points = ((512, 5_000, 5_000), (2048, longer, 0))
    assert (attention_rate(model_of("qwen2"), points, 1e12) is not None) == has_rate


def test_the_optional_kernel_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, ...]] = []

    def forward(query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, None]:
        called.append(tuple(query.shape))
        return query + key.sum() + value.sum(), None

    monkeypatch.setattr(attention_kernel.flash4, "forward", forward)
    monkeypatch.setattr(attention_kernel.flash4, "missing", lambda _: None)
    model, cpu = ModelSpec.load("qwen2.5-0.5b"), torch.device("cpu")
    work = Workload(batch=1, sequence=64, attention="flash4")
    attention_kernel._row(model, work, cpu, 64)
    assert called
    assert set(called) == {(1, 64, 14, 64)}

    def fails(*_: Any) -> None:
        raise AssertionError("inputs must be float16 or bfloat16")

    monkeypatch.setattr(attention_kernel, "_row", fails)
    cuda = torch.device("cuda")
    assert attention_curve(model, work, cuda) == ()
    with pytest.raises(AssertionError):
        attention_curve(model, msgspec.structs.replace(work, attention=None), cuda)


def test_the_optional_kernel_is_not_timed_where_plans_cannot_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_kernel.flash4, "missing", lambda _: None)
    monkeypatch.setattr(attention_kernel, "_row", lambda *_: (1e-6, 1e-6))
    work, cuda = Workload(batch=1, sequence=64, attention="flash4"), torch.device("cuda")
    assert attention_curve(ModelSpec.load("qwen2.5-0.5b"), work, cuda)
    for model in ("gemma-2-9b", "phi-2"):
        assert attention_curve(ModelSpec.load(model), work, cuda) == ()
    wide = msgspec.structs.replace(work, dtype="fp32")
    assert attention_curve(ModelSpec.load("qwen2.5-0.5b"), wide, cuda) == ()


def test_the_kernel_of_the_workload_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, rows with documents use flash attention, whatever PyTorch would choose."""
    backends: list[SDPBackend | None] = []

    class Backend:
        def __init__(self, backend: SDPBackend | None) -> None:
            self.backend = backend

        def __enter__(self) -> None:
            backends.append(self.backend)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(attention_kernel, "sdpa_kernel", Backend)
    monkeypatch.setattr(attention_kernel.contextlib, "nullcontext", lambda: Backend(None))
    monkeypatch.setattr(attention_kernel, "_row", lambda *_: (1e-6, 1e-6))
    monkeypatch.setattr(attention_kernel.flash4, "missing", lambda _: None)
    model, plain = ModelSpec.load("qwen2.5-0.5b"), Workload(batch=2, sequence=16)
    for work in (
        plain,
        msgspec.structs.replace(plain, attention="cudnn"),
        msgspec.structs.replace(plain, documents=True),
    ):
        assert attention_curve(model, work, torch.device("cuda"))
    assert backends == [None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    backends.clear()
    packed = msgspec.structs.replace(plain, documents=True)
    curves = attention_curves(model, packed, torch.device("cuda"))
    assert list(curves) == [None, "flash", "cudnn", "flash4"]
    assert all(curves.values())
    assert backends == [None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, None]
    monkeypatch.setattr(attention_kernel.flash4, "missing", lambda _: "no package")
    assert attention_curves(model, packed, torch.device("cuda"))["flash4"] == ()
    assert list(attention_curves(model, packed, torch.device("cpu"))) == [None]
