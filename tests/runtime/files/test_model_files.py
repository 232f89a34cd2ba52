"""Tests of loading weights from a transformers folder and exporting masters to such a folder.

Failures leave nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.runtime.files import model_files
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.model_files import (
    ModelState,
    RandomWeights,
    export,
    folder_weights,
    random_weights,
)
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import round_to_bf16
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import LayerSpec
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

NAME = "mlp.up_proj.weight"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def save_model(plan: Plan, folder: Path, shard: str = "5GB") -> Any:
    """Saves transformers' model of `plan` in fp32, with random weights, to `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(plan.model), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1).add_(1 if parameter.dim() == 1 else 0)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def test_rank_0_keeps_no_layer_after_the_last_read(executable: Callable[..., Plan]) -> None:
    plan, sent, read = executable("overlapped", gpus=2, accumulation=2), list[Any](), list[Any]()
    ranks: Any = SimpleNamespace(
        rank=0, leads=True, board=SimpleNamespace(collectives=0), send=sent.append
    )
    state = ModelState(plan, lower(plan), lambda: Any, ranks=ranks)

    def gathered(layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        halves = [
            torch.ones(layer.elements, dtype=dtype) for dtype in (torch.bfloat16, torch.int16)
        ]
        read.extend(map(weakref.ref, halves))
        return halves[0], halves[1]

    state._gathered = gathered  # type: ignore[method-assign]
    one = plan.model.stack["1"]
    for _ in range(2):
        state.masters(one)
    assert len(read) == 2, "a layer is received once for all its tensors"
    state.end_reads("over")
    assert [half() for half in read] == [None, None]
    assert sent[1:] == ["over"]


@pytest.fixture
def saved(executable: Callable[..., Plan], tmp_path: Path) -> tuple[Plan, Path]:
    """Returns a plan, and a folder with its weights."""
    plan = executable(dtype="fp32")
    save_model(plan, tmp_path / "model")
    return plan, tmp_path / "model"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "policy"),
    list(zip(FAMILIES, ("sequential", "double_buffer", "k_buffer", "resident"), strict=True)),
)
def test_an_export_has_the_logits_of_what_was_loaded(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    family: str,
    policy: str,
    tied: bool,
    dtype: str,
) -> None:
    """The logits of an export exactly equal those of the loaded model.

    In bf16, the expected model is rounded with ties away from zero, unlike in torch's conversion.
    """
    plan = executable(policy, family=family, tied=tied, dtype=dtype)
    model = save_model(plan, tmp_path / "in")
    with folder_weights(tmp_path / "in") as weights, session(plan, weights=weights) as running:
        for layer in plan.model.stack.values():
            for name, master in running.state.masters(layer).items():
                assert torch.equal(master, model.get_parameter(hub_name(layer.name, name))), (
                    f"{layer.name} {name}: not the fp32 master"
                )
        export(running.state, plan, config_of(plan.model), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.architectures == [type(exported).__name__]
    assert exported.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert (
        exported.get_input_embeddings().weight is exported.get_output_embeddings().weight
    ) is tied
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=exported.dtype).eval()
    if dtype == "bf16":
        with torch.no_grad():
            for name, parameter in expected.named_parameters():
                parameter.copy_(round_to_bf16(model.get_parameter(name)))
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, expected(ids).logits)


def test_trained_weights_are_exported(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path
) -> None:
    plan = executable(dtype="fp32")
    with session(plan) as running:
        running.step()
        export(running.state, plan, config_of(plan.model), tmp_path / "out")
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        masters = {
            hub_name(layer.name, name): master
            for layer in plan.model.stack.values()
            for name, master in running.state.masters(layer).items()
        }
    assert tensors.keys() == masters.keys()
    assert all(torch.equal(tensors[name], master) for name, master in masters.items())
    start = random_weights(0)("0", "mlp.up_proj.weight", (96, 32))
    assert not torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], start)


def test_tensors_that_are_not_finite_are_named(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable()) as running:
        assert running.state.not_finite() == []
        tensors, stack = running.state.tensors(), running.executor.plan.model.stack
        tensors["0.weights"][stack["0"].offsets[-1]] = torch.inf
        tensors["2.weights"][0] = torch.nan
        assert running.state.not_finite() == [
            f"model.layers.0.{stack['0'].tensors[-1].name}",
            f"model.layers.2.{stack['2'].tensors[0].name}",
        ]


def test_a_rank_s_state_ends_where_the_layer_ends(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is a whole number of rows of sums, so the last part may reach beyond the layer."""
    with session(executable()) as running:
        layers = running.executor.plan.model.stack
        whole = running.state.tensors()
        for rank, owned in ((0, 1), (1, 0)):
            monkeypatch.setattr(running.state, "_ranks", SimpleNamespace(rank=rank))
            tensors = running.state.tensors()
            assert tensors.keys() == whole.keys()
            for name, layer in layers.items():
                for kind in ("weights", "master_low", "moments"):
                    assert tensors[f"{name}.{kind}"].shape[-1] == owned * layer.elements
        monkeypatch.setattr(running.state, "_ranks", None)


def test_a_sharded_folder_loads_and_a_large_model_is_exported_in_shards(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = executable(dtype="fp32")
    model = save_model(plan, tmp_path / "in", shard="60KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    monkeypatch.setattr(model_files, "_SHARD_BYTES", 60_000)
    with folder_weights(tmp_path / "in") as weights, session(plan, weights=weights) as running:
        export(running.state, plan, config_of(plan.model), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter)


def test_random_weights_depend_on_seed_and_name_alone(make_plan: Callable[..., Plan]) -> None:
    shape, stack = (8, 8), make_plan().model.stack
    names = [
        (layer.name, tensor.name)
        for layer in stack.values()
        for tensor in layer.tensors
        if len(tensor.shape) == 2
    ]
    drawn = [random_weights(seed)(*name, shape) for seed in (0, 1) for name in names]
    assert len({tensor.numpy().tobytes() for tensor in drawn}) == len(drawn)
    assert torch.equal(random_weights(1)(*names[3], shape), random_weights(1)(*names[3], shape))
    assert torch.equal(random_weights(0)("0", "input_layernorm.weight", (4,)), torch.ones(4))
    assert torch.equal(random_weights(0)("0", "self_attn.q_proj.bias", (4,)), torch.zeros(4))


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.data())
def test_a_large_tensor_is_drawn_in_parts(shape: tuple[int, int], data: st.DataObject) -> None:
    """A plan may leave little device memory, and the largest embeddings have 3 GB in fp32."""
    sizes = []

    class Watched(RandomWeights):
        def _draw(self, layer: str, tensor: str, number: int, out: torch.Tensor) -> None:
            sizes.append(out.numel())
            super()._draw(layer, tensor, number, out)

    count = shape[0] * shape[1]
    first = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(first + 1, count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "_DRAWN", 7)
        weights = Watched(0, torch.device("cpu"))
        drawn = [
            (run.data_ptr(), run.clone()) for run in weights.runs("0", NAME, shape, first, end)
        ]
        runs = [run for _, run in drawn]
        parts = len(sizes)
        whole = weights("0", NAME, shape).view(-1)
    assert torch.equal(torch.cat(runs), whole[first:end])
    assert max(sizes) <= 7
    assert len({address for address, _ in drawn[1:]}) <= 1, "all parts have the same memory"
    assert parts == (end - 1) // 7 - first // 7 + 1
    assert whole.unique().numel() == count  # the parts are drawn independently


def test_weights_drawn_in_parts_are_loaded_at_their_places(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_DRAWN", 50)
    monkeypatch.setattr(model_files, "_PIECE", 20)
    plan, weights = executable(dtype="fp32"), random_weights(0)
    with session(plan) as running:
        running.state.load(weights)
        for layer in plan.model.stack.values():
            for name, values in running.state.masters(layer).items():
                assert torch.equal(values, weights(layer.name, name, tuple(values.shape)))


# ---- failures ----


def test_an_export_into_a_folder_with_content_is_refused(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    plan = executable()
    with (
        session(plan) as running,
        pytest.raises(
            UserError,
            match=r"out: found something there already; allowed: .*; fix: name another one",
        ),
    ):
        export(running.state, plan, config_of(plan.model), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing_behind(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
) -> None:
    calls, write = [], model_files.write_tensors

    def full(path: Path, tensors: Any) -> object:
        calls.append(path)
        if len(calls) == 2:
            raise failure
        return write(path, tensors)

    monkeypatch.setattr(model_files, "_SHARD_BYTES", 20_000)
    monkeypatch.setattr(model_files, "write_tensors", full)
    plan = executable()
    with (
        session(plan) as running,
        pytest.raises(UserError if isinstance(failure, OSError) else KeyboardInterrupt) as error,
    ):
        export(running.state, plan, config_of(plan.model), tmp_path / "runs" / "out")
    assert len(calls) == 2
    assert not list((tmp_path / "runs").iterdir())
    if isinstance(failure, OSError):
        assert "no space left on device" in str(error.value)
        assert "\n" not in str(error.value)


def test_an_export_below_a_file_gives_a_one_line_error(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    plan = executable()
    with (
        session(plan) as running,
        pytest.raises(
            UserError,
            match=r"found (file exists|not a directory); allowed: a folder that can be made",
        ),
    ):
        export(running.state, plan, config_of(plan.model), tmp_path / "file" / "out")


def load(plan: Plan, folder: Path, session: Callable[..., Any]) -> None:
    with folder_weights(folder) as weights, session(plan, weights=weights):
        pass


def test_a_folder_without_weights_gives_a_one_line_error(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        UserError,
        match=(
            r"model: found no \*\.safetensors file; allowed: .*; fix: check the path, or pass"
            r" --init random"
        ),
    ):
        load(plan, folder, session)


@pytest.mark.parametrize("keep", [0, 5, 100, 20_000])
def test_a_truncated_file_gives_a_one_line_error(
    saved: tuple[Plan, Path], session: Callable[..., Any], keep: int
) -> None:
    plan, folder = saved
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        UserError,
        match=(
            r"model\.safetensors: found a file that cannot be read .*; allowed: a whole safetensors"
            r" file; fix: "
        ),
    ) as error:
        load(plan, folder, session)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
            r"found no tensor model\.layers\.2\.mlp\.up_proj\.weight; allowed: .*\(96, 32\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"model\.norm\.weight: found shape \(31,\); allowed: \(32,\)",
        ),
    ],
)
def test_a_tensor_missing_or_of_another_shape_gives_a_one_line_error(
    saved: tuple[Plan, Path],
    session: Callable[..., Any],
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    plan, folder = saved
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message) as error:
        load(plan, folder, session)
    assert "\n" not in str(error.value)
