"""Tests of plan files: they read back as written, and an error names the wrong key in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Clipping, Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import FORMAT, Knobs, Plan, Prediction

Make = Callable[..., Plan]

size = st.integers(1, 2**20)
text = st.text(st.characters(codec="utf-8"), max_size=20)
seconds = st.floats(0, 1e9)
heads = st.tuples(st.integers(1, 64), st.integers(1, 64))
models = st.builds(
    lambda groups, name, **config: ModelSpec(
        name=name,
        config={
            "num_key_value_heads": groups[0],
            "num_attention_heads": groups[0] * groups[1],
            **config,
        },
    ),
    heads,
    name=text,
    model_type=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    num_hidden_layers=st.integers(1, 1024),
    hidden_size=size,
    intermediate_size=size,
    head_dim=size,
    vocab_size=size,
    tie_word_embeddings=st.booleans(),
    rms_norm_eps=st.floats(0, 1),
)
workloads = st.builds(
    Workload,
    batch=size,
    sequence=size,
    accumulation=st.integers(1, 1024),
    dtype=st.sampled_from(["bf16", "fp32"]),
    clipping=st.sampled_from(get_args(Clipping)),
    loss_chunk=size,
)
knobs = st.builds(
    Knobs,
    weight_slots=st.integers(1, 4096),
    gradient_slots=st.integers(1, 4096),
    gradient_staging=st.integers(0, 99),
    chunk_bytes=st.integers(4096, 2**40),
    checkpoint_interval=size,
    rebuild_outputs=st.integers(0, 1),
)
predictions = st.builds(
    Prediction,
    step_seconds=seconds,
    lower_bound_seconds=seconds,
    device_peak_bytes=size,
    host_peak_bytes=size,
    binding=text,
)
plans = st.builds(
    Plan,
    policy=text,
    digest=text,
    hardware=text,
    source=text,
    device_limit_bytes=size,
    host_limit_bytes=size,
    model=models,
    workload=workloads,
    knobs=knobs,
    prediction=st.none() | predictions,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plan=plans)
def test_a_plan_reads_back_as_it_was_written(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan


def test_a_plan_is_a_small_readable_file(tmp_path: Path, make_plan: Make) -> None:
    make_plan().save(tmp_path / "plan.toml")
    written = (tmp_path / "plan.toml").read_text()
    assert written.startswith("# A megatrain plan.")
    assert 'policy = "double_buffer"' in written
    assert "[knobs]\nweight_slots = 2" in written
    assert "[prediction]" not in written
    assert len(written.splitlines()) <= 55


def table_of(plan: Plan) -> dict[str, Any]:
    table = msgspec.to_builtins(plan) | {"prediction": msgspec.to_builtins(PREDICTION)}
    for field in ("attention", "document_length", "fp8", "head_groups", "token_piece"):
        del table["workload"][field]  # None, which TOML cannot express
    del table["network_gb_per_s"]
    return tomllib.loads(tomli_w.dumps(table))


PREDICTION = Prediction(
    step_seconds=1.5, lower_bound_seconds=1.0, device_peak_bytes=5, host_peak_bytes=6, binding="h2d"
)
GONE = object()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        # unknown
        (
            "slots",
            3,
            [
                "top level",
                "unknown key `slots`",
                "allowed: device_limit_bytes, digest, format",
                "fix: remove `slots`",
            ],
        ),
        (
            "knobs.weight_slot",
            3,
            [
                "knobs: ",
                "unknown key `weight_slot`",
                "allowed: checkpoint_interval, chunk_bytes",
                "fix: remove `weight_slot`",
            ],
        ),
        (
            "model.experts",
            8,
            ["model: ", "unknown key `experts`", "allowed: config, name", "fix: remove `experts`"],
        ),
        (
            "prediction.eta",
            8,
            [
                "prediction: ",
                "unknown key `eta`",
                "allowed: binding, device_peak_bytes",
                "fix: remove `eta`",
            ],
        ),
        # missing
        ("policy", GONE, ["top level", "no key `policy`", "fix: add `policy`"]),
        ("model.config", GONE, ["model: ", "no key `config`", "fix: add `config`"]),
        ("workload", GONE, ["top level", "no key `workload`", "fix: add `workload`"]),
        # of a wrong type
        ("policy", 3, ["policy: ", "found `int`", "allowed: `str`", "fix: correct this value"]),
        ("knobs", 3, ["knobs: ", "found `int`", "allowed: `object`", "fix: correct this value"]),
        (
            "knobs.weight_slots",
            "2",
            ["knobs.weight_slots: ", "found `str`", "allowed: `int`", "fix: correct this value"],
        ),
        (
            "knobs.weight_slots",
            2.5,
            ["knobs.weight_slots: ", "found `float`", "allowed: `int`", "fix: correct this value"],
        ),
        (
            "knobs.weight_slots",
            True,
            ["knobs.weight_slots: ", "found `bool`", "allowed: `int`", "fix: correct this value"],
        ),
        (
            "model.config",
            "no",
            ["model.config: ", "found `str`", "allowed: `object`", "fix: correct this value"],
        ),
        (
            "model.config.tie_word_embeddings",
            "no",
            ["model small: tie_word_embeddings: ", "found 'no'", "allowed: true or false", "fix: "],
        ),
        (
            "device_limit_bytes",
            "24GiB",
            ["device_limit_bytes: ", "found `str`", "allowed: `int`", "fix: correct this value"],
        ),
        (
            "prediction.step_seconds",
            [1],
            [
                "prediction.step_seconds: ",
                "found `array`",
                "allowed: `float`",
                "fix: correct this value",
            ],
        ),
        # out of range
        (
            "format",
            FORMAT + 1,
            ["format: ", f"found {FORMAT + 1}", f"allowed: {FORMAT}", "megatrain plan"],
        ),
        (
            "workload.dtype",
            "fp8",
            ["workload.dtype: ", "found 'fp8'", "allowed: 'bf16', 'fp32'", "fix: "],
        ),
        (
            "workload.clipping",
            "value",
            [
                "workload.clipping: ",
                "found 'value'",
                "allowed: 'global', 'layer', 'update', 'adagc', 'none'",
                "fix: ",
            ],
        ),
        (
            "knobs.weights_ahead",
            2,
            ["knobs: weights_ahead: ", "found 2", "allowed: 0 or 1", "fix: set weights_ahead = 1"],
        ),
        (
            "knobs.rebuild_outputs",
            -1,
            ["knobs: rebuild_outputs: ", "found -1", "allowed: 0 or 1", "set rebuild_outputs = 1"],
        ),
        (
            "knobs.micro_batch_group",
            2,
            ["knobs: micro_batch_group: ", "found 2", "a divisor of the accumulation, 1", "fix: "],
        ),
        ("workload.batch", 0, ["workload: batch: ", "found 0", "allowed: 1 to ", "fix: set batch"]),
        (
            "workload.sequence",
            -5,
            ["workload: sequence: ", "found -5", "allowed: 1 to ", "fix: set sequence"],
        ),
        (
            "knobs.weight_slots",
            0,
            ["knobs: weight_slots: ", "found 0", "allowed: 1 to ", "fix: set weight_slots = 2"],
        ),
        (
            "knobs.gradient_staging",
            -1,
            [
                "knobs: gradient_staging: ",
                "found -1",
                "allowed: 0 to ",
                "fix: set gradient_staging",
            ],
        ),
        (
            "knobs.chunk_bytes",
            1,
            [
                "knobs: chunk_bytes: ",
                "found 1",
                "allowed: 4096 to ",
                "fix: set chunk_bytes = 67108864",
            ],
        ),
        (
            "knobs.exchange_bytes",
            -1,
            ["knobs: exchange_bytes: ", "found -1", "allowed: 0 to ", "fix: leave it out"],
        ),
        (
            "knobs.checkpoint_interval",
            2**63,
            [
                "knobs: checkpoint_interval: ",
                "found 9223372036854775808",
                "allowed: 1 to ",
                "fix: set checkpoint_interval = 1",
            ],
        ),
        (
            "model.config.num_hidden_layers",
            0,
            ["model small: num_hidden_layers: ", "found 0", "allowed: 1 to", "fix: "],
        ),
        (
            "model.config.num_key_value_heads",
            3,
            ["model small: num_key_value_heads: ", "found 3", "a divisor of the 4", "fix: "],
        ),
        (
            "model.config.model_type",
            "gpt5",
            ["model small: model_type: ", "found 'gpt5'", "did you mean", "gpt2"],
        ),
        ("device_limit_bytes", 0, ["device_limit_bytes: ", "found 0", "allowed: >= 1", "fix: "]),
        ("host_limit_bytes", -1, ["host_limit_bytes: ", "found -1", "allowed: >= 1", "fix: "]),
    ],
)
def test_a_wrong_key_gives_a_one_line_error_that_names_it(
    tmp_path: Path, make_plan: Make, key: str, value: object, words: list[str]
) -> None:
    table = table_of(make_plan())
    *inner, last = key.split(".")
    target = table
    for part in inner:
        target = target[part]
    if value is GONE:
        del target[last]
    else:
        target[last] = value
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(table))
    with pytest.raises(UserError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("knob", "least"),
    [
        ("weight_slots", 1),
        ("gradient_slots", 1),
        ("gradient_staging", 0),
        ("chunk_bytes", 4096),
        ("checkpoint_interval", 1),
        ("state_slots", 1),
        ("micro_batch_group", 1),
    ],
)
def test_a_knob_below_its_least_value_is_refused(knob: str, least: int) -> None:
    assert getattr(Knobs(**{knob: least}), knob) == least
    with pytest.raises(UserError, match=f"^knobs: {knob}: found {least - 1}; allowed: {least} to "):
        Knobs(**{knob: least - 1})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"policy",
        b"policy = ",
        b"[knobs\n",
        b"\x00\xff\xfe",
        "policy = 'ä'".encode("latin-1"),
        b"{}",
        b"a = 1\na = 2\n",
        b"[[model]]\n",
        b"x = " + b"[" * 5000,
        b"x = " + b"9" * 5000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_corrupt_plan_gives_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "found " in message
    assert "allowed: " in message
    assert "fix: " in message
    assert "\n" not in message


def test_a_plan_without_documents_does_not_mention_them(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    for documents in (False, True):
        plan = make_plan(documents=documents)
        plan.save(tmp_path / "plan.toml")
        assert ("documents" in (tmp_path / "plan.toml").read_text()) is documents
        assert Plan.load(tmp_path / "plan.toml") == plan
        assert plan.workload.shape == "2x16-bf16" + ("-documents" if documents else "")
        assert lower(plan).buffer["device.tokens:0"].bytes == (3 if documents else 2) * 8 * 32, (
            "the buffer has ids, labels and, if there are any, documents"
        )


@pytest.mark.parametrize("rebuild", [0, 1])
def test_a_plan_names_rebuilt_outputs_only_if_there_are_any(
    make_plan: Callable[..., Plan], tmp_path: Path, rebuild: int
) -> None:
    """Plans that were made before the knob existed have the same text and the same digest."""
    before, plan = (
        make_plan(compiled=True, **knobs) for knobs in ({}, {"rebuild_outputs": rebuild})
    )
    plan.save(tmp_path / "plan.toml")
    assert ("rebuild_outputs" in (tmp_path / "plan.toml").read_text()) is bool(rebuild)
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert (lower(plan).digest == lower(before).digest) is not bool(rebuild)


def test_a_plan_that_names_no_knob_keeps_its_meaning() -> None:
    """The defaults of knobs and workload stay the same.

    A stored plan file may leave them out, so another default would change its meaning.
    """
    knobs = msgspec.to_builtins(Knobs())
    assert set(knobs.pop("placement").values()) == {""}
    assert knobs == {
        "weight_slots": 2,
        "gradient_slots": 2,
        "gradient_staging": 2,
        "chunk_bytes": 64 * 2**20,
        "checkpoint_interval": 1,
        "state_slots": 2,
        "weights_ahead": 0,
        "micro_batch_group": 1,
        "rebuild_outputs": 0,
        "exchange_bytes": 0,
    }
    workload = msgspec.convert({"batch": 3, "sequence": 5}, Workload)
    assert workload == Workload(
        batch=3,
        sequence=5,
        accumulation=1,
        dtype="bf16",
        clipping="global",
        compiled=False,
        attention=None,
        loss_chunk=1024,
        documents=False,
    )


def test_the_path_of_a_plan_may_be_a_string(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    file = str(tmp_path / "plan.toml")
    make_plan().save(file)
    assert Plan.load(file) == make_plan()
