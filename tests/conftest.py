"""Setup that all tests share: the hypothesis profile, the skip of `cuda` tests, small plans.

The setup also keeps the workers of pytest-xdist from slowing each other down.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from started_ranks import Driver

from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Plan

# Tests ignore the hardware files in the user's folder.
os.environ["MEGATRAIN_MACHINES"] = str(Path(__file__).with_name("no-machines"))
# Each worker has a core of its own. More threads of PyTorch only wait for each other there. Torch
# reads this when it is imported, and processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under `nohup`, SIGHUP is ignored. Programs that tests start inherit this, and a training leaves it
# ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pytest.register_assert_rewrite("whole_models", "reference_lengths")
hypothesis.settings.register_profile(
    "megatrain", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("megatrain")


def pytest_configure(config: pytest.Config) -> None:
    """Makes a cache folder for the tests, which all workers of the session share."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="megatrain-cache-")
        os.environ["MEGATRAIN_CACHE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("cuda" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Excludes everything that exists now from garbage collection, and collects less often.

    The tests and the imported libraries stay to the end. A full collection would visit them each
    time, which takes half a second.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_stay() -> None:
    """Does the same before each file of tests, with all that earlier files have imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns a scheduler that gives each worker one half of the files, and moves tests at the end.

    Tests of a file then share the fixtures of their module, which the default scheduler makes in
    every worker.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


MODEL_KEYS = {
    "family": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
"""Short name in tests -> key of config.json."""


def small_model(name: str = "small", **changes: Any) -> ModelSpec:
    """Returns a model of a few thousand parameters.

    `changes` are short names (`MODEL_KEYS`) or keys of config.json.
    """
    sizes = {
        "family": "llama",
        "layers": 4,
        "hidden": 64,
        "intermediate": 96,
        "heads": 4,
        "kv_heads": 2,
        "vocabulary": 256,
        "tied": False,
        **changes,
    }
    if sizes["family"] == "mistral":
        sizes = {"sliding_window": 0, **sizes}
    return ModelSpec.from_config(
        {MODEL_KEYS.get(key, key): value for key, value in sizes.items()}, name, name
    )


def small_plan(policy: str = "double_buffer", **changes: Any) -> Plan:
    """Returns a plan for a model of a few thousand parameters.

    `changes` may name any field of the model, the workload, the knobs or the plan.
    """

    def chosen(into: type, **defaults: Any) -> dict[str, Any]:
        return {key: changes.pop(key, value) for key, value in defaults.items()} | {
            key: changes.pop(key) for key in list(changes) if key in into.__struct_fields__
        }

    given = {key: changes.pop(key) for key in list(changes) if key in MODEL_KEYS}
    model = changes.pop("model", None) or small_model(**{"hidden": 32, "head_dim": 8, **given})
    workload = Workload(**chosen(Workload, batch=2, sequence=16))
    knobs = Knobs(**chosen(Knobs, weight_slots={"sequential": 1}.get(policy, 2), chunk_bytes=4096))
    defaults = {
        "hardware": "here.toml",
        "source": "small",
        "device_limit_bytes": 2**24,
        "host_limit_bytes": 2**26,
    }
    return Plan(
        policy=policy, model=model, workload=workload, knobs=knobs, **{**defaults, **changes}
    )


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ModelSpec]:
    return small_model


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return small_plan


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Starts the ranks of plans for several GPUs from one process, which imports PyTorch once."""
    made = Driver(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Forgets the cost models and the plans of earlier tests. What a test replaces would otherwise
    not be used, and counts of calls would depend on the order of the tests.
    """
    if costs := sys.modules.get("megatrain.simulator.costs"):
        costs._shared.cache_clear()
    if plans := sys.modules.get("megatrain.simulator.planner.known_plans"):
        plans._recent.clear()


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes predictions ignore `library_bytes`, for models of a few megabytes, whose limits are
    smaller than that.
    """
    datasheet = importlib.import_module("megatrain.simulator.costs.datasheet").Datasheet
    begin = datasheet.__init__

    def without(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.library_bytes = 0

    monkeypatch.setattr(datasheet, "__init__", without)


@pytest.fixture
def fast_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens calibration, for tests that do not check its numbers."""
    from megatrain.runtime.calibration import calibrate, contention, link
    from megatrain.runtime.calibration import microbenchmarks as rates

    monkeypatch.setattr(calibrate, "_SECONDS", 0.02)
    monkeypatch.setattr(calibrate, "_HOST_SECONDS", 0.02)
    monkeypatch.setattr(calibrate, "_COMPUTE_SECONDS", 0.001)
    monkeypatch.setattr(calibrate, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(calibrate, "_LEAST_UPDATED", 2**18)
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(contention, "_UPDATED", 2**18)
    monkeypatch.setattr(rates, "_TOUCHED_BYTES", 2**20)
    monkeypatch.setitem(rates._MATRIX_ROWS, "cpu", 128)
    monkeypatch.setattr(link, "COPY_SIZES", (2**16, 2**18, 2**20, 2**22))
