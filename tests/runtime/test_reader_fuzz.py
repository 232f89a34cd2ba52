"""Fuzz tests of reading checkpoints, plans and configs.

Each input is read, or refused with a UserError of one line. There is no other exception and no
hang.
"""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
import tomli_w
import torch
import xxhash
from hypothesis import strategies as st

from megatrain.runtime.batch import Batch
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import RunState
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "layer_types": ["full_attention"] * 2,
}
ODD = st.sampled_from(
    [
        None,
        True,
        False,
        -1,
        0,
        1,
        3,
        2**31,
        2**63,
        10**18,
        10**30,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "../..",
        "/",
        "\0",
        "x" * 5000,
        "llama",
        [],
        {},
        [[]],
        {"a": {}},
    ]
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value inside `value`."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    for key, inside in inner:
        yield (key,)
        yield from ((key, *rest) for rest in places(inside))


@st.composite
def spoiled(draw: st.DrawFn, good: Any) -> Any:
    """Draws `good` with up to three values replaced, removed or added."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(list(places(value)) or [("x",)]))
        holder = value
        for key in way:
            holder = holder[key]
        change = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if change == "replace" or not isinstance(holder, dict):
            holder[last] = copy.deepcopy(draw(ODD))
        elif change == "remove":
            holder.pop(last, None)
        else:
            holder[
                draw(
                    st.sampled_from(
                        [
                            "x",
                            "",
                            "quantization_config",
                            "auto_map",
                            "text_config",
                            "sliding_window",
                        ]
                    )
                )
            ] = copy.deepcopy(draw(ODD))
    return value


@st.composite
def spoiled_text(draw: st.DrawFn, good: bytes) -> bytes:
    """Draws `good` with some bytes changed or cut off, or random bytes."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=100))
    data = bytearray(good)
    for at, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4)
    ):
        data[at] = byte
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def accepted(read: Callable[[], object]) -> bool:
    """Returns whether `read` accepts its input. Asserts that a UserError is one line."""
    try:
        read()
    except UserError as error:
        message = str(error)
    else:
        return True
    assert "\n" not in message
    assert len(message) < 20_000
    return False


def fuzz(test: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns two tests of a function: with 300 cases, and with 5,000 for the nightly run."""
    quick, thorough = (
        hypothesis.settings(max_examples=count, database=None)(
            hypothesis.given(data=st.data())(test)
        )
        for count in (300, 5000)
    )
    return quick, pytest.mark.nightly(thorough)


# ---- configs ----


def read_a_config(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = data.draw(
        spoiled(CONFIG).map(lambda value: json.dumps(value).encode())
        | spoiled_text(json.dumps(CONFIG).encode())
    )
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(text)

    def read() -> None:
        model = ModelSpec.load(str(path))
        assert model.parameters == sum(layer.parameters for layer in model.stack.values())

    accepted(read)


test_any_config, test_any_config_nightly = fuzz(read_a_config)


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("size", [-1, 0, 10**9, 2**63, 10**30])
def test_a_config_with_absurd_sizes_is_refused(tmp_path: Path, key: str, size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "layer_types": None, key: size}))
    with pytest.raises(UserError, match=key):
        ModelSpec.load(str(tmp_path / "config.json"))


# ---- a run's config ----

RUN_CONFIG: dict[str, Any] = tomllib.loads(
    tomli_w.dumps(msgspec.to_builtins(Config(training=TrainingSettings(steps=100))))
)


def read_a_run_config(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "run.toml"
    text = data.draw(spoiled(RUN_CONFIG) | spoiled_text(tomli_w.dumps(RUN_CONFIG).encode()))
    try:
        path.write_bytes(text if isinstance(text, bytes) else tomli_w.dumps(text).encode())
    except (TypeError, ValueError):  # TOML has no null
        hypothesis.reject()

    def read() -> None:
        config = Config.load(path)
        assert config.schedule.at(1, config.training.steps) >= 0

    accepted(read)


test_any_run_config, test_any_run_config_nightly = fuzz(read_a_run_config)


# ---- plans ----


@pytest.fixture(scope="module")
def plan(executable: Callable[..., Plan]) -> Plan:
    return executable("overlapped")


def read_a_plan(plan: Plan, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    plan.save(tmp_path_factory.getbasetemp() / "good.toml")
    good = tomllib.loads((tmp_path_factory.getbasetemp() / "good.toml").read_text())
    path = tmp_path_factory.getbasetemp() / "plan.toml"
    text = data.draw(spoiled(good) | spoiled_text(tomli_w.dumps(good).encode()))
    try:
        path.write_bytes(text if isinstance(text, bytes) else tomli_w.dumps(text).encode())
    except (TypeError, ValueError):  # TOML has no null
        hypothesis.reject()
    accepted(lambda: Plan.load(path))


test_any_plan, test_any_plan_nightly = fuzz(read_a_plan)


# ---- checkpoints ----


@pytest.fixture(scope="module")
def running(
    plan: Plan, session: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Checkpoints]]:
    """Opens a session with one checkpoint."""
    states = random.getstate(), torch.get_rng_state()
    with session(plan) as made:
        checkpoints = Checkpoints(tmp_path_factory.mktemp("fuzzed"))
        work = plan.workload
        made.executor.step(
            [
                Batch(*torch.zeros(2, work.batch, work.sequence, dtype=torch.int64))
                for _ in range(work.accumulation)
            ],
            rate=1e-2,
            number=1,
        )
        checkpoints.save(made.executor, RunState(step=1, loss=2.0, settings={"seed": 0}))
        (checkpoints.path(1) / "manifest.json").rename(checkpoints.folder / "good.json")
        yield made, checkpoints
    random.setstate(states[0])
    torch.set_rng_state(states[1])


def read_a_checkpoint(running: tuple[Any, Checkpoints], data: st.DataObject) -> None:
    """Checks that a changed manifest is refused or restores the checkpoint of step 1.

    Manifests are changed with and without a matching checksum.
    """
    session, checkpoints = running
    good = (checkpoints.folder / "good.json").read_bytes()

    def seal(content: Any) -> bytes:
        text = json.dumps(content).encode()
        return (
            b'{"checksum":"'
            + xxhash.xxh3_128_hexdigest(text).encode()
            + b'","content":'
            + text
            + b"}"
        )

    altered = data.draw(
        spoiled_text(good)
        | spoiled(json.loads(good)["content"]).map(seal)
        | spoiled(json.loads(good)).map(lambda value: json.dumps(value).encode())
    )
    (checkpoints.path(1) / "manifest.json").write_bytes(altered)
    if accepted(lambda: checkpoints.restore(session.executor, {"seed": 0})):
        assert checkpoints.steps() == [1]


test_any_checkpoint, test_any_checkpoint_nightly = fuzz(read_a_checkpoint)
