"""Tests of the files of a model's folder that are read and exported.

Only safetensors files inside the folder are read, one shard at a time, and no pickle and no code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from started_ranks import Driver
from tiny_families import config_of as tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from megatrain.runtime.files.checkpoint_names import CheckpointNames, hub_name
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.files.model_folder import model_folder, weight_files
from megatrain.runtime.files.model_source import planned_source
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import round_to_bf16
from megatrain.runtime.training.opening import exported_config
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan


@pytest.fixture
def saved(executable: Callable[..., Plan], tmp_path: Path) -> tuple[Plan, Path]:
    """Returns a bf16 plan, and a folder with fp32 weights for it."""
    plan = executable()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(plan.model), dtype=torch.float32).save_pretrained(
        tmp_path / "model"
    )
    return plan, tmp_path / "model"


# ---- export ----


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("computed", ["bf16", "fp32"])
def test_an_export_has_the_requested_dtype(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    computed: str,
    dtype: Any,
) -> None:
    """An export in fp32 has the masters, and an export in bf16 has the rounded masters.

    This does not depend on the compute dtype. The logits are those of these weights.
    """
    plan = executable("overlapped", dtype=computed)
    with session(plan) as running:
        running.step()
        running.executor.flush_update()
        export(running.state, plan, config_of(plan.model), tmp_path / "out", dtype=dtype)
        masters = {
            hub_name(layer.name, name): value
            for layer in plan.model.stack.values()
            for name, value in running.state.masters(layer).items()
        }
    expected = (
        masters
        if dtype == "fp32"
        else {name: round_to_bf16(value) for name, value in masters.items()}
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(
        stored[name].dtype == value.dtype and torch.equal(stored[name], value)
        for name, value in expected.items()
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    by_hand = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path / "out"), dtype=exported.dtype
    ).eval()
    by_hand.load_state_dict(expected)
    ids = torch.arange(24).view(2, 12)
    assert exported.config.use_cache
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, by_hand(ids).logits)


def test_tokenizer_and_generation_config_are_exported(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    plan, folder = saved
    GenerationConfig(temperature=0.3, do_sample=True, max_new_tokens=7).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f"the {name}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    with folder_weights(folder) as weights, session(plan, weights=weights) as running:
        export(
            running.state,
            plan,
            exported_config(folder, plan.model, init="model"),
            tmp_path / "out",
            source=folder,
        )
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 7
    )
    names = {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert set(os.listdir(tmp_path / "out")) == names
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "the tokenizer.json"


def test_a_companion_outside_the_folder_is_not_copied(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    plan, folder = saved
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to("../secret")
    with (
        session(plan) as running,
        pytest.raises(
            UserError, match=r"tokenizer\.json: found a link to .*secret, outside the folder"
        ),
    ):
        export(running.state, plan, config_of(plan.model), tmp_path / "out", source=folder)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_transformers_own_model(family: str) -> None:
    config = tiny_config(family)
    model = ModelSpec.from_config(config.to_dict(), family, family)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }  # others count as buffers
    stack = CheckpointNames(config).stack
    assert {
        hub_name(layer.name, tensor.name, stack): tensor.shape
        for layer in model.stack.values()
        for tensor in layer.tensors
    } == shapes


# ---- which files ----


def read_all(plan: Plan, folder: Path) -> None:
    with folder_weights(folder) as weights:
        for layer in plan.model.stack.values():
            for tensor in layer.tensors:
                weights(layer.name, tensor.name, tensor.shape)


def write_index(folder: Path, *names: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(enumerate(names))})
    )


def test_the_index_decides_which_files_are_read(saved: tuple[Plan, Path]) -> None:
    plan, folder = saved
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "stray.safetensors").write_bytes(b"of something else")
    write_index(folder, "part.safetensors")
    assert weight_files(folder) == [folder / "part.safetensors"]
    read_all(plan, folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "../outside.safetensors",
            (
                r"model: found a file named '\.\./outside\.safetensors'; allowed: a file in the"
                r" folder itself"
            ),
        ),
        ("/etc/passwd", r"found a file named '/etc/passwd'"),
        ("/" + "x" * 200, r"found a file named '/x{79}';"),
        ("..", r"found a file named '\.\.'"),
        (
            "link.safetensors",
            r"link\.safetensors: found a link to .*outside\.safetensors, outside the folder",
        ),
        (
            "absent.safetensors",
            r"absent\.safetensors: found a file that cannot be read \(no such file or directory\)",
        ),
        ("loop.safetensors", r"loop\.safetensors: found .*(Symlink loop|symbolic links)"),
        (3, r"found no `weight_map` of tensor to file"),
    ],
)
def test_a_file_outside_the_folder_is_refused(
    saved: tuple[Plan, Path], name: object, message: str
) -> None:
    plan, folder = saved
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    write_index(folder, name)
    with pytest.raises(UserError, match=message):
        read_all(plan, folder)


def test_the_hubs_cache_links_to_its_blobs(saved: tuple[Plan, Path]) -> None:
    plan, folder = saved
    snapshot = folder.parent / "models--org--name" / "snapshots" / "abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    read_all(plan, snapshot)


def test_pickled_weights_are_refused_by_name(saved: tuple[Plan, Path]) -> None:
    plan, folder = saved
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    message = (
        r"found no model\.safetensors and no index of shards, but pytorch_model\.bin, a pickle,"
        r" which is never opened: it may run any program; .*; fix: convert the weights"
    )
    with pytest.raises(UserError, match=message):
        read_all(plan, folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model\.safetensors: found a pickle, which is never opened"
    ):
        read_all(plan, folder)


def test_quantised_weights_are_refused(saved: tuple[Plan, Path]) -> None:
    plan, folder = saved
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes(
        data[:8] + data[8 : 8 + length].replace(b'"F32"', b'"I32"') + data[8 + length :]
    )
    with pytest.raises(
        UserError,
        match=(
            r"found quantized weights: packed int32, as in lm_head\.weight; allowed: bf16, fp16 or"
            r" fp32 weights; fix: dequantize the model first"
        ),
    ):
        read_all(plan, folder)


def test_code_that_comes_with_a_model_is_never_run(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    ran = folder.parent / "it ran"
    for name in ("configuration_evil", "modeling_evil"):
        (folder / f"{name}.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with folder_weights(folder) as weights, session(plan, weights=weights):
        exported_config(folder, plan.model, init="model")
    assert not ran.exists()


# ---- the hub ----


def test_a_local_folder_is_used_as_it_is(saved: tuple[Plan, Path]) -> None:
    assert model_folder(str(saved[1])) == saved[1]


@pytest.mark.parametrize("source", ["nowhere", "/nowhere/at/all", "a/b/c", "../x", "org/na me", ""])
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused_without_asking(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked")
    )
    with pytest.raises(
        UserError,
        match=(
            "found no such folder; allowed: a Hugging Face model folder, or a name on the hub such"
            " as org/name"
        ),
    ):
        model_folder(source) if source else model_folder("nowhere")


def test_a_hub_name_is_fetched_without_pickles_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_folder("org/name") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/name", None)
    assert {"config.json", "model*.safetensors"} <= set(asked["patterns"])
    assert not [
        pattern for pattern in asked["patterns"] if pattern.endswith((".py", ".bin", ".pt", "*"))
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("../models/here", "models/here"),
        ("../../outside", "{place}/outside"),
        ("../models/gone", "{place}/work/models/gone"),
        ("org/name@main", "org/name@main"),
        ("qwen2.5-7b", "qwen2.5-7b"),
    ],
)
def test_the_source_of_a_plan_is_shown_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    """A path in a plan is relative to the plan, but the user works in the current folder."""
    for folder in ("work/run", "work/models/here", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert planned_source(source, Path("run")) == expected.format(place=tmp_path)


@pytest.mark.parametrize(
    "revision", ["v1.0", "refs/pr/3", "0123456789abcdef0123456789abcdef01234567"]
)
def test_a_revision_of_a_hub_name_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **given: str(tmp_path / name / given["revision"]),
    )
    assert model_folder(f"org/name@{revision}") == tmp_path / "org/name" / revision


def test_offline_only_the_cache_is_used(tmp_path: Path) -> None:
    """Offline, a model in the cache is found, and a missing one gives a one-line error."""
    snapshot = (
        tmp_path
        / "hub"
        / "models--org--name"
        / "snapshots"
        / "0123456789abcdef0123456789abcdef01234567"
    )
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text(snapshot.name)
    program = (
        "from megatrain.runtime.files.model_folder import"
        " model_folder\nprint(model_folder('org/name'))\ntry:\n   "
        " model_folder('org/name@other')\nexcept Exception as error:\n   "
        " print(type(error).__name__, error)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    found, refused = done.stdout.splitlines()
    assert found == str(snapshot)
    assert refused.startswith(
        "UserError model org/name@other: found no such folder, and it could not be fetched from"
        " the hub ("
    )


def test_a_hub_that_cannot_be_reached_gives_a_one_line_error(tmp_path: Path) -> None:
    """A hub that cannot be reached gives a one-line error.

    No server listens on the port. The test runs in a separate process, because the library reads
    the address on import.
    """
    program = (
        "from megatrain.runtime.files.model_folder import model_folder\ntry:\n   "
        " model_folder('org/name')\nexcept Exception as error:\n    print(type(error).__name__,"
        " error)"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith(
        "UserError model org/name: found no such folder, and it could not be fetched from the hub ("
    )
    assert done.stdout.count("\n") == 1


# ---- memory ----

LOAD = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.files.model_files import ModelState, folder_weights
from megatrain.runtime.files.tensor_stream import TensorSource as Source, write_tensors
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.policies import lower

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

plan = Plan.load(Path(sys.argv[1]))
schedule = lower(plan)
limits = {"device_limit_bytes": plan.device_limit_bytes, "host_limit_bytes": plan.host_limit_bytes}
arenas = Arenas(schedule, torch.device("cpu"), **limits)
state = ModelState(plan, schedule, lambda: arenas)
with folder_weights(Path(sys.argv[2])) as weights:
    # imports and first touches
    weights("0", "mlp.up_proj.weight", plan.model.stack["0"].tensors[5].shape)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    state.load(weights)
peak = status("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
weights = {name: each for name, each in state.tensors().items() if name.endswith(".weights")}
sources = {name: Source.of(tensor) for name, tensor in weights.items()}
size, _ = write_tensors(Path(sys.argv[3]), sources)
final, writing = sum(each.nbytes for each in state.tensors().values()), status("VmHWM") - before
print(json.dumps({"peak": peak, "final": final, "written": size, "writing": writing}))
"""


def test_loading_takes_at_most_one_shard_of_extra_memory_and_saving_none(
    executable: Callable[..., Plan], driver: Driver, tmp_path: Path
) -> None:
    """Loading takes at most one shard of memory in addition to the final state, and saving none.

    The fp32 model has 130 MB in shards of 24 MB. Mapped files count.
    """
    plan = executable(
        hidden=640,
        intermediate=2048,
        heads=10,
        kv_heads=10,
        head_dim=64,
        layers=4,
        vocabulary=8_000,
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
    )
    from megatrain.runtime.files.tensor_stream import TensorSource, write_tensors

    names: dict[str, str] = {}
    shards: list[dict[str, TensorSource]] = [{}]
    for layer in plan.model.stack.values():
        for tensor in layer.tensors:
            if (
                shards[-1]
                and sum(held.bytes for held in shards[-1].values()) + tensor.elements * 4
                > 24_000_000
            ):
                shards.append({})
            shards[-1][hub_name(layer.name, tensor.name)] = TensorSource.of(
                torch.full(tensor.shape, 0.5)
            )
            names[hub_name(layer.name, tensor.name)] = f"model-{len(shards)}.safetensors"
    (tmp_path / "model").mkdir()
    sizes = [
        write_tensors(tmp_path / "model" / f"model-{number}.safetensors", shard)[0]
        for number, shard in enumerate(shards, 1)
    ]
    assert sum(sizes) > 125_000_000
    assert max(sizes) < 25_000_000
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": names})
    )
    plan.save(tmp_path / "plan.toml")
    (tmp_path / "load.py").write_text(LOAD)
    words = [str(tmp_path / name) for name in ("load.py", "plan.toml", "model", "state")]
    driver.start([[words]])
    assert driver.wait() == [0], driver.printed(0)
    found = json.loads(driver.printed(0))
    assert found["final"] == 12 * sum(layer.elements for layer in plan.model.stack.values())
    # The memory of the final state is touched before. A few pieces of 16 MiB may be in progress.
    assert found["peak"] <= max(sizes) + 2**26, found
    assert found["written"] > 60_000_000
    assert found["writing"] < 2**23, found
