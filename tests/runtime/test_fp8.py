"""Tests of fp8 linear layers on the CPU: the definition, layers that stay in bf16, and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from family_sample import others_nightly
from fp8_definition import error, products
from whole_models import model_of

from megatrain.runtime.calibration import calibrate, microbenchmarks
from megatrain.runtime.calibration.contention import Contention
from megatrain.runtime.calibration.link import LinkRates
from megatrain.runtime.calibration.microbenchmarks import MeasuredRates
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers import fp8_linear
from megatrain.runtime.layers.fp8_linear import Fp8Linear, install
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.cost_table import FixedCosts
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.workload import Scaling, Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

WIDE = {"hidden": 64, "intermediate": 96, "head_dim": 16}


def linear(source: int, target: int, scaling: str, *, bias: bool = False) -> Fp8Linear:
    made = torch.nn.Linear(source, target, bias, dtype=torch.bfloat16)
    install(torch.nn.ModuleDict({"up": made}), ["up.weight"], scaling)  # type: ignore[arg-type]
    assert isinstance(made, Fp8Linear)
    return made


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_products_are_those_of_the_definition(scaling: str) -> None:
    torch.manual_seed(0)
    layer = linear(128, 96, scaling)
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    x *= torch.logspace(-2, 1, 64, dtype=torch.bfloat16)[:, None]
    gradient = 1e-6 * torch.randn(64, 96, dtype=torch.bfloat16)
    output = layer(x.requires_grad_())
    found = [output, *torch.autograd.grad(output, (x, layer.weight), gradient)]
    x, weight = x.detach(), layer.weight.detach()
    exact = [x.float() @ weight.float().t(), gradient.float() @ weight.float()]
    exact.append(gradient.float().t() @ x.float())
    wanted = products(x, weight, gradient, scaling)
    for name, ours, theirs, plain in zip(wanted._fields, found, wanted, exact, strict=True):
        assert error(ours, theirs) < 0.005, name
        assert 0.01 < error(ours, plain) < (0.045 if scaling == "rowwise" else 0.07), name


def test_rowwise_scaling_keeps_small_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    x[1:] *= 1e-7
    for scaling, low, high in (("rowwise", 0, 0.05), ("tensorwise", 0.99, 1.01)):
        layer = linear(64, 48, scaling)
        plain = x[1:].float() @ layer.weight.float().t()
        assert low <= error(layer(x)[1:], plain) < high, scaling


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_nan_or_an_infinity_is_not_lost(scaling: str, wrong: float) -> None:
    layer, x = linear(32, 32, scaling), torch.ones(16, 32, dtype=torch.bfloat16)
    gradient = torch.ones_like(x)
    output = layer(x.requires_grad_())
    gradient[3, 5] = wrong
    dx, dw = torch.autograd.grad(output, (x, layer.weight), gradient)
    assert dx[3].isnan().all()
    assert dw[5].isnan().all()
    x = x.detach().clone()
    x[3, 5] = wrong
    assert layer(x)[3].isnan().all()


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_zeros_stay_zeros(scaling: str) -> None:
    layer, x = linear(32, 32, scaling), torch.zeros(16, 32, dtype=torch.bfloat16)
    output = layer(x.requires_grad_())
    for made in (output, *torch.autograd.grad(output, (x, layer.weight), torch.zeros_like(x))):
        assert not made.any()


def test_a_bias_is_added_and_has_a_gradient() -> None:
    torch.manual_seed(0)
    layer, x = linear(32, 48, "rowwise", bias=True), torch.randn(4, 8, 32, dtype=torch.bfloat16)
    layer.bias = torch.nn.Parameter(torch.randn(48, dtype=torch.bfloat16))
    with_bias = layer(x)
    (found,) = torch.autograd.grad(with_bias.sum(), (layer.bias,))
    assert torch.equal(found, torch.full_like(found, 32))
    bias, layer.bias = layer.bias, None  # type: ignore[assignment]
    assert torch.equal(with_bias, layer(x) + bias)


@pytest.mark.parametrize(
    "x", [torch.ones(15, 32, dtype=torch.bfloat16), torch.ones(16, 32)], ids=["rows", "dtype"]
)
def test_inputs_that_do_not_fit_are_multiplied_without_fp8(x: torch.Tensor) -> None:
    layer = linear(32, 32, "rowwise").to(x.dtype)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


def test_compiled_products_are_the_eager_ones() -> None:
    torch.manual_seed(0)
    layer, x = linear(64, 32, "rowwise"), torch.randn(32, 64, dtype=torch.bfloat16)
    x.requires_grad_()
    compiled = torch.compile(layer, dynamic=False, fullgraph=True, backend="aot_eager")
    eager, found = (
        (output, *torch.autograd.grad(output.square().sum(), (x, layer.weight)))
        for output in (layer(x), compiled(x))
    )
    assert all(map(torch.equal, eager, found))


@pytest.mark.parametrize("fp8", [None, "rowwise"])
def test_compiled_layers_round_between_fused_ops_if_they_cast_to_fp8(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Any], fp8: Any
) -> None:
    compiled = mock.Mock(side_effect=lambda function, **_: function)
    monkeypatch.setattr(torch, "compile", compiled)
    model, work = make_model(**WIDE), Workload(batch=2, sequence=16, compiled=True, fp8=fp8)
    FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    options = [call.kwargs["options"] for call in compiled.mock_calls if "options" in call.kwargs]
    assert len(options) == 3
    assert options == [{"emulate_precision_casts": True} if fp8 else None] * 3


@pytest.mark.parametrize(("scaling", "tied"), [("rowwise", False), ("tensorwise", True)])
def test_every_plan_gives_the_same_bits(
    executable: Callable[..., Plan], session: Callable[..., Any], scaling: str, tied: bool
) -> None:
    common = {**WIDE, "fp8": scaling, "tied": tied, "accumulation": 2, "device_limit_bytes": 2**26}
    every: list[tuple[str, dict[str, Any]]] = [
        ("resident", {}),
        ("sequential", {}),
        ("double_buffer", {"checkpoint_interval": 3}),
        ("overlapped", {"placement": Placement(saved_activations="all")}),
        ("overlapped", {"placement": Placement(weights="1-2,e", offloaded_inputs="0-1")}),
    ]
    if not tied:
        every.append(("overlapped", {"micro_batch_group": 2}))
    found = []
    for policy, knobs in every:
        with session(executable(policy, **{"chunk_bytes": 2**14, **common, **knobs})) as running:
            found.append(running.bits())
    assert all(bits == found[0] for bits in found), [bits.results for bits in found]
    with session(executable("resident", **{**common, "fp8": None})) as running:
        plain = running.bits()
    assert plain != found[0]
    for (ours, _), (theirs, _) in zip(found[0].results, plain.results, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_the_linear_layers_of_every_family_are_found(family: str) -> None:
    model = model_of(family)
    whole = meta_model(config_of(model), torch.bfloat16, torch.device("cpu"))
    stack = DecoderStack.of(whole)
    for layer, module in zip(model.decoders, stack.layers_of(whole), strict=True):
        weights = model.fp8_weights(layer.name)
        install(module, weights, "rowwise")
        found = {
            f"{name}.weight": tuple(part.weight.shape)
            for name, part in module.named_modules()
            if isinstance(part, Fp8Linear)
        }
        assert found == weights
        assert all("router" not in name and ".experts." not in name for name in found)


def test_layers_that_cannot_be_in_fp8_stay_as_they_are(make_model: Callable[..., Any]) -> None:
    work = Workload(batch=2, sequence=16, fp8="rowwise")
    odd = make_model(hidden=64, intermediate=100, head_dim=16)
    assert [name.split(".")[0] for name in odd.fp8_weights("0")] == ["self_attn"] * 4
    layers = FunctionalLayers(odd, work, config_of(odd), torch.device("cpu"))
    kinds = {type(part) for part in layers._kinds[0]._module.modules()}
    assert {Fp8Linear, torch.nn.Linear} <= kinds
    with pytest.raises(ValueError, match="LayerNorm"):
        install(torch.nn.ModuleDict({"up": torch.nn.LayerNorm(16)}), ["up.weight"], "rowwise")
    few = msgspec.structs.replace(work, batch=1, sequence=15)
    assert not odd.fp8_products("0", few)


@pytest.mark.parametrize(
    ("capability", "error", "words"),
    [
        ((8, 6), 0.0, "found A card, which has none"),
        ((9, 0), 0.5, "products differ by 0.500"),
        ((9, 0), RuntimeError("no kernel\nat all"), "PyTorch's fp8 product fails: no kernel;"),
    ],
)
def test_a_gpu_without_fp8_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    executable: Callable[..., Plan],
    capability: tuple[int, int],
    error: float | Exception,
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    outcome = {"side_effect": error} if isinstance(error, Exception) else {"return_value": error}
    monkeypatch.setattr(fp8_linear, "_trial_error", mock.Mock(**outcome))
    fp8_linear._obstacle.cache_clear()
    with pytest.raises(UserError, match=words) as caught:
        preflight(executable(**WIDE, fp8="rowwise"), AdamW(), torch.device("cuda"))
    fp8_linear._obstacle.cache_clear()
    assert "\n" not in str(caught.value)
    preflight(executable(**WIDE), AdamW(), torch.device("cuda"))


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_the_trial_finds_no_difference_here(scaling: Scaling) -> None:
    assert fp8_linear._trial_error(scaling, torch.device("cpu")) < 0.004
    preflight_of = Workload(batch=1, sequence=16, fp8=scaling)
    fp8_linear.refuse_fp8(preflight_of, torch.device("cpu"))


@pytest.mark.usefixtures("fast_calibration")
def test_a_calibration_measures_layers_and_products_in_fp8(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Any]
) -> None:
    monkeypatch.setattr(calibrate, "_STEPS", 2)
    monkeypatch.setitem(microbenchmarks._MATRIX_ROWS, "cpu", 64)
    copies = {kind: [(2**16, 1000), (2**20, 16_000)] for kind in ("load_weights", "save_gradients")}
    fixed = FixedCosts(launch_ns=1, event_ns=0, first_touch_gb_per_s=1.0, registration_gb_per_s=0.0)
    sides, none = (1e10, 1e10, 1e10, 1e8), Contention({}, None, {})
    rates = MeasuredRates(LinkRates(copies, [], [], {}), none, 1e11, *sides, fixed, {}, 1.7e11)
    monkeypatch.setattr(calibrate, "measure_rates", lambda *_: rates)
    model, work = make_model(**WIDE), Workload(batch=2, sequence=16, fp8="rowwise")
    cpu, room = torch.device("cpu"), {"host_bytes": 2**33, "device_bytes": 2**32}
    found = calibrate.calibrate("here", model, work, config_of(model), cpu, **room)
    assert found.peak_tflops == {"bf16": 0.1, "fp8": 0.17}
    assert found.fp8_speed() == pytest.approx(1.7)
    assert found.costs is not None
    assert found.costs.compute["backward"].keys() == {f"{model.shape}/{work.shape}"}
    costs = cost_model(found, model, work)
    forward = next(op for op in lower(executable_plan(model, work)).ops if op.kind == "forward")
    assert not costs.extrapolated(forward)
    assert microbenchmarks._fp8_matmul("rowwise", cpu).value > 0


def executable_plan(model: Any, work: Workload) -> Plan:
    return Plan(
        policy="resident",
        hardware="here",
        source="",
        device_limit_bytes=2**32,
        host_limit_bytes=2**32,
        model=model,
        workload=work,
        knobs=Knobs(),
    )
