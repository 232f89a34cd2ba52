"""Tests of the default set of calibration, which is measured if no model is named.

Its layers fit the machine, and the help lists them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from megatrain.experiments.commands import calibrate as command
from megatrain.runtime.calibration.presets import (
    CPU,
    LARGE,
    LARGE_DEVICE_BYTES,
    LARGE_HOST_BYTES,
    SMALL,
    CalibrationPreset,
    model_of,
    preset_for,
    set_of_named,
    usual_grid,
)
from megatrain.simulator.model.layer_memory import max_saved_bytes, transient_bytes
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

GIB = 2**30


def test_the_default_set_has_the_layers_that_fit_the_machine() -> None:
    assert preset_for("cuda", 137 * GIB, 128 * GIB) is LARGE
    assert (
        preset_for("cuda", 23 * GIB, 128 * GIB) is preset_for("cuda", 137 * GIB, 16 * GIB) is SMALL
    )
    assert preset_for("cpu", 512 * GIB, 512 * GIB) is CPU


@pytest.mark.parametrize("chosen", [LARGE, SMALL, CPU], ids=["large", "small", "cpu"])
def test_widths_ascend_and_heads_are_grouped_queries_of_128(chosen: CalibrationPreset) -> None:
    models = [model_of(name) for name in chosen.models]
    assert sorted(model.hidden for model in models) == [model.hidden for model in models]
    for model in models:
        heads, _, rest = model.shape.rpartition("-")[0].rpartition("-")[2].partition(":")
        kept, _, size = rest.partition("x")
        assert (int(size), int(heads) > int(kept)) == (128, True), model.shape


def test_a_small_model_has_the_proportions_of_a_large_one() -> None:
    config = model_of("llama-512").config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert repr([config[key] for key in sizes]) == "[512, 1792, 4, 2]", "whole numbers"


@pytest.mark.parametrize(
    ("chosen", "policy", "device", "host"),
    [
        (LARGE, "resident", LARGE_DEVICE_BYTES, LARGE_HOST_BYTES),
        (SMALL, "double_buffer", 12 * GIB, 16 * GIB),
    ],
)
def test_the_chosen_layers_fit(
    make_plan: Callable[..., Plan], chosen: CalibrationPreset, policy: str, device: int, host: int
) -> None:
    """The chosen layers fit the smallest machine for which they are chosen.

    The device holds the pools, and the saved activations and temporaries of a layer. The host holds
    the optimizer state of the first model, with gradients of two micro-batches.
    """
    points = [(chosen.batch, chosen.sequence), *chosen.grid]
    for name in chosen.models:
        model = model_of(name).shortest(3)
        for batch, sequence in points:
            plan = make_plan(policy, model=model, batch=batch, sequence=sequence, chunk_bytes=2**27)
            taken = [buffer for buffer in lower(plan).buffers if buffer.place == "device"]
            work = plan.workload
            temporary = max_saved_bytes(model, work) + transient_bytes(model, work)
            assert sum(buffer.allocated for buffer in taken) + temporary < 0.9 * device, (
                name,
                batch,
                sequence,
            )
    plan = make_plan(
        "sequential",
        model=model_of(chosen.models[0]).shortest(3),
        batch=4,
        sequence=1024,
        accumulation=2,
        chunk_bytes=2**27,
    )
    assert (
        sum(buffer.allocated for buffer in lower(plan).buffers if buffer.place == "host")
        < 0.9 * host
    )


def test_the_help_names_the_sets() -> None:
    parser = argparse.ArgumentParser(prog="megatrain calibrate")
    command.describe(parser)
    text = " ".join(parser.format_help().split())
    points = ", ".join(
        f"{batch}x{sequence}" for batch, sequence in ((LARGE.batch, LARGE.sequence), *LARGE.grid)
    )
    assert f"{', '.join(LARGE.models)} at {points}" in text
    assert [4 * part for part in (SMALL.batch, *(batch for batch, _ in SMALL.grid))] == [
        LARGE.batch,
        *(batch for batch, _ in LARGE.grid),
    ]
    assert f"{', '.join(SMALL.models)} at a quarter of these batches" in text
    widths, points = (
        ", ".join(name.removeprefix("llama-") for name in CPU.models),
        ", ".join(f"{b}x{s}" for b, s in ((CPU.batch, CPU.sequence), *CPU.grid)),
    )
    assert f"Llama layers {widths} wide in {CPU.dtype} at {points}" in text


def test_the_usual_grid_lies_around_the_workload_and_not_on_it() -> None:
    def points(**changes: Any) -> list[tuple[int, int]]:
        return [
            (point.batch, point.sequence)
            for point in usual_grid(Workload(**{"batch": 32, "sequence": 1024, **changes}))
        ]

    assert points() == [(4, 1024), (16, 1024), (64, 1024), (64, 512), (16, 2048)]
    assert points(compiled=True) == [(8, 1024), (64, 1024), (16, 2048)]
    assert points(batch=56) == [(7, 1024), (28, 1024), (112, 1024), (112, 512), (28, 2048)]
    assert points(batch=28, compiled=True) == [(7, 1024), (56, 1024), (14, 2048)]
    assert points(batch=1, sequence=1) == [(2, 1), (1, 2)]


@pytest.mark.parametrize(
    ("sequence", "longest", "length"),
    [(None, None, 128), (None, 64, 64), (None, 4096, 128), (96, 64, 96)],
)
def test_a_row_of_a_named_model_has_the_usual_length_or_the_longest_or_the_users(
    sequence: int | None, longest: int | None, length: int
) -> None:
    assert CPU.sequence == 128
    chosen = set_of_named("cpu", 8 * GIB, sequence=sequence, longest=longest)
    assert (chosen.batch, chosen.sequence, chosen.dtype) == (512 // length, length, "fp32")
    assert chosen.grid == ((1, length),)


def test_a_large_gpu_measures_a_named_model_around_the_largest_batch() -> None:
    assert set_of_named(
        "cuda", LARGE_DEVICE_BYTES, sequence=None, longest=None
    ) == CalibrationPreset((), 32768 // LARGE.sequence, LARGE.sequence, None, "bf16")
    small = set_of_named("cuda", LARGE_DEVICE_BYTES - 1, sequence=1024, longest=None)
    assert (small.batch, small.grid) == (8, ((1, 1024),))
