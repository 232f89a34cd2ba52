"""Tests of the operators of FlashAttention-4, with its package replaced by plain PyTorch.

`tests/runtime/gpu` runs the kernels themselves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import reference_lengths
import torch

from megatrain.runtime.layers import attention, flash4, lengths
from megatrain.runtime.layers.attention import Attention, attend, kernel_of
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.layers.lengths import Call, LengthBounds
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_kernel import obstacle
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

Tensor = torch.Tensor
ROWS, LENGTH, HEADS, PAIRS, SIZE = 2, 48, 4, 2, 16
SCALE = SIZE**-0.5
MODULE = torch.nn.Module()


class Package:
    """The package's two functions, with the parameters that are used."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        self.calls.append(options)
        how, flat = self._how(q, **options), [self._flat(each) for each in (q, k, v)]
        output, log_sum_exp = reference_lengths._computed(*how[1:], *flat)
        if q.dim() == 4:
            log_sum_exp = log_sum_exp.unflatten(1, q.shape[:2]).transpose(0, 1)
        return output.contiguous().view(q.shape), log_sum_exp

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        deterministic: bool,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        self.calls.append(options | {"deterministic": deterministic})
        assert dout.is_contiguous()
        assert lse.is_contiguous()
        sums = lse.transpose(0, 1).flatten(1) if q.dim() == 4 else lse
        flat = [self._flat(each) for each in (dout, q, k, v, out)]
        found = reference_lengths.backward(self._how(q, **options), *flat, sums)
        return tuple(
            torch.empty_like(like).copy_(each.reshape(like.shape))
            for each, like in zip(found, (q, k, v), strict=True)
        )

    def _how(
        self,
        q: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Call:
        assert causal
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k
        assert (window_size_left is None) == (window_size_right is None)
        assert not window_size_right
        if cu_seqlens_q is None:
            cu_seqlens_q = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1]).int()
            max_seqlen_q = q.shape[1]
        left = -1 if window_size_left is None else window_size_left
        return Call("flash4", cu_seqlens_q, max_seqlen_q, left, softmax_scale)

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1) if tensor.dim() == 4 else tensor


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setattr(flash4, "_package", lambda: made)
    return made


def drawn() -> list[Tensor]:
    """Returns queries, keys and values, [batch, heads, sequence, size], as a layer makes them."""
    torch.manual_seed(0)
    return [
        torch.randn(ROWS, LENGTH, count, SIZE).transpose(1, 2).requires_grad_()
        for count in (HEADS, PAIRS, PAIRS)
    ]


def both_ways(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def masked(inputs: list[Tensor], seen: Tensor) -> Tensor:
    query, key, value = inputs
    shared = HEADS // PAIRS
    return torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), seen
    ).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_and_its_gradients_are_those_of_pytorch(
    package: Package, window: int | None, groups: int
) -> None:
    """For rows of one text (window None) and for documents, computed, saved, and from what was
    saved.
    """
    index = torch.arange(LENGTH)
    behind = index[:, None] - index
    seen, bounds = behind >= 0, None
    if window is not None:
        starts = torch.tensor([0, 20, 21, LENGTH, 2 * LENGTH, 2 * LENGTH], dtype=torch.int32)
        bounds = LengthBounds(starts, torch.empty(LENGTH, 0), window)
        document = torch.bucketize(index, torch.tensor([20, 21]), right=True)
        first = seen & (document[:, None] == document)
        seen = torch.stack([first, seen])[:, None] & (behind < (window or LENGTH))
    inputs = drawn()
    right = both_ways(masked(inputs, seen), inputs)
    results: list[Tensor] = []
    output, _ = attend(MODULE, *inputs, bounds, kernel="flash4", results=results, groups=groups)
    found = both_ways(output, inputs)
    kept = Attention(*(each.detach() for each in results))
    assert kept.log_sum_exp.shape == (ROWS, HEADS, LENGTH)
    calls = len(package.calls)
    again, _ = attend(MODULE, *inputs, bounds, kernel="flash4", kept=kept, groups=groups)
    assert len(package.calls) == calls, "a saved output is not computed again"
    for name, exact, *ours in zip(
        ("output", "query", "key", "value"), right, found, both_ways(again, inputs), strict=True
    ):
        for tensor in ours:
            torch.testing.assert_close(tensor, exact, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("starts", [None, [0, 20, 40, 96]])
def test_the_operators_are_described_to_the_compiler(
    package: Package, starts: list[int] | None
) -> None:
    """Shapes, dtypes and strides without data, autograd, and no writing to arguments."""
    inputs = [each.detach().transpose(1, 2).requires_grad_() for each in drawn()]
    if starts:
        inputs = [each.detach().flatten(0, 1).requires_grad_() for each in inputs]
    bounds = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    rest = (bounds, LENGTH, -1, SCALE)
    torch.library.opcheck(flash4.forward, (*inputs, *rest))
    output, sums = (each.detach() for each in flash4.forward(*inputs, *rest))
    inputs = [each.detach() for each in inputs]
    torch.library.opcheck(flash4.backward, (output, *inputs, output, sums, *rest))
    assert package.calls


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_have_a_fixed_order_in_deterministic_mode(
    package: Package, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    inputs = drawn()
    both_ways(attend(MODULE, *inputs, None, kernel="flash4")[0], inputs)
    assert package.calls[-1]["deterministic"] is deterministic


@pytest.mark.parametrize("broken", [ImportError("undefined symbol"), OSError("no library")])
def test_a_package_that_cannot_be_imported_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, broken: Exception
) -> None:
    """Such as an older flash_attn in the same place, built for another PyTorch."""

    def fails(_: str) -> None:
        raise broken

    flash4._installed.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", fails)
    assert not flash4._installed()
    flash4._installed.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "package"), [("13.0", "flash-attn-4[cu13]"), ("12.8", "flash-attn-4")]
)
def test_the_package_of_the_fix_is_that_of_pytorch_s_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str, package: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f'"{package}"' in flash4.fix(torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "capability", "installed", "found", "fix"),
    [
        ("cpu", (9, 0), True, "flash4 on cpu", "make the plan with --attention flash"),
        (
            "cuda",
            (8, 9),
            True,
            "flash4 on RTX, which has compute capability 8.9",
            "make the plan with --attention flash",
        ),
        (
            "cuda",
            (9, 0),
            False,
            "flash4 without the package flash-attn-4",
            'pip install --pre "flash-attn-4[cu13]", or make the plan with --attention flash',
        ),
        ("cuda", (9, 0), True, None, ""),
        ("cuda", (10, 0), True, None, ""),
    ],
)
def test_a_device_without_the_kernels_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    installed: bool,
    found: str | None,
    fix: str,
) -> None:
    cuda = SimpleNamespace(
        get_device_capability=lambda _: capability, get_device_name=lambda _: "RTX"
    )
    monkeypatch.setattr(flash4.torch, "cuda", cuda)
    monkeypatch.setattr(flash4.torch.version, "cuda", "13.0")
    monkeypatch.setattr(flash4, "_installed", lambda: installed)
    assert flash4.missing(torch.device(device)) == found
    if found is None:
        return
    work = Workload(batch=1, sequence=64, attention="flash4")
    with pytest.raises(UserError) as refused:
        kernel_of(ModelSpec.load("qwen2.5-7b"), work, torch.device(device))
    assert str(refused.value) == (
        f"workload: attention: found {found}; allowed: a GPU of the generation Hopper (H100, H200,"
        " GH200) or Blackwell (B200, GB200), with the package flash-attn-4;"
        f" fix: {fix}"
    )


def heads_of_64(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**ModelSpec.load("qwen2.5-0.5b").config, **changes}, "", "")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("wrong", [None, "out", "dq", "dk", "dv", "nan"])
def test_a_package_with_a_wrong_result_is_refused_before_a_run(
    package: Package, monkeypatch: pytest.MonkeyPatch, documents: bool, wrong: str | None
) -> None:
    """Versions of the package exist whose gradients are wrong for some head sizes."""
    flash4._errors.cache_clear()
    forward, backward = package._flash_attn_fwd, package._flash_attn_bwd

    def changed(tensor: Tensor, name: str) -> Tensor:
        if documents and tensor.dim() == 4:
            return tensor
        return tensor * torch.nan if wrong == "nan" else 1.2 * tensor if wrong == name else tensor

    def forward_changed(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        output, sums = forward(*tensors, **options)
        return changed(output, "out"), sums

    def backward_changed(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        found = backward(*tensors, **options)
        return tuple(changed(*each) for each in zip(found, ("dq", "dk", "dv"), strict=True))

    monkeypatch.setattr(package, "_flash_attn_fwd", forward_changed)
    monkeypatch.setattr(package, "_flash_attn_bwd", backward_changed)
    model, cpu = heads_of_64(), torch.device("cpu")
    if wrong is None:
        flash4.verify(model, cpu, lengths=documents)
        return
    with pytest.raises(UserError, match=r"flash4 whose .* is off by .* for heads of 64; allowed"):
        flash4.verify(model, cpu, lengths=documents)


@pytest.mark.parametrize(
    ("changes", "lengths", "expected"),
    [
        ({}, False, [(None, None)]),
        ({}, True, [(None, None), (3, None)]),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 12},
            True,
            [(None, None), (3, None), (3, 29)],
        ),
    ],
    ids=["rows", "documents", "windows"],
)
def test_each_kernel_of_a_run_is_verified_once(
    package: Package, changes: dict[str, Any], lengths: bool, expected: list[tuple[Any, Any]]
) -> None:
    """A window is tried however long the model's own is. Another order of sums is verified, too."""
    flash4._errors.cache_clear()
    model, cpu = heads_of_64(**changes), torch.device("cpu")
    for _ in range(2):
        flash4.verify(model, cpu, lengths=lengths)
    called = [
        (None if starts is None else len(starts), call.get("window_size_left"))
        for call in package.calls
        if "deterministic" not in call
        for starts in [call.get("cu_seqlens_q")]
    ]
    assert called == expected
    torch.use_deterministic_algorithms(True)
    try:
        flash4.verify(model, cpu, lengths=lengths)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(package.calls) == 4 * len(expected)
    assert package.calls[-1]["deterministic"]


def test_kernels_that_cannot_be_compiled_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("no compiler\nfor this GPU")

    flash4._errors.cache_clear()
    monkeypatch.setattr(flash4, "_package", lambda: SimpleNamespace(_flash_attn_fwd=fails))
    with pytest.raises(UserError) as refused:
        flash4.verify(heads_of_64(), torch.device("cpu"), lengths=False)
    assert str(refused.value) == (
        "workload: attention: found flash4 that ends with AssertionError: no compiler; allowed: a"
        " version of flash-attn-4 that runs with this GPU, PyTorch and CUDA; fix: install another"
        " version of flash-attn-4, or plan with --attention flash"
    )


@pytest.mark.parametrize("documents", [False, True])
def test_the_kernels_of_a_run_are_verified(
    monkeypatch: pytest.MonkeyPatch, make_plan: Callable[..., Plan], documents: bool
) -> None:
    verified: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "kernel_of", lambda *_: "flash4")
    monkeypatch.setattr(lengths, "takes_lengths", lambda *_: True)
    monkeypatch.setattr(
        flash4, "verify", lambda *given, lengths: verified.append((*given, lengths))
    )
    plan, cpu = make_plan(attention="flash4", documents=documents), torch.device("cpu")
    FunctionalLayers(plan.model, plan.workload, config_of(plan.model), cpu)
    assert verified == [(plan.model, cpu, documents)]


def test_head_sizes_with_wrong_gradients_are_refused() -> None:
    work = Workload(batch=1, sequence=64)
    for size in (16, 24, 32, 48, 64, 80, 96, 112, 128, 256):
        config = {"head_dim": size, "num_hidden_layers": 1, "model_type": "qwen3"}
        model = ModelSpec.from_config({**ModelSpec.load("qwen3-0.6b").config, **config}, "", "")
        found = obstacle(model, work, "flash4")
        assert (found is None) == (size in (32, 64, 96, 128)), size
        assert found is None or found.found == f"flash4 for heads of {size}"
