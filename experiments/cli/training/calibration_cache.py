"""Calibrations of this machine, kept in the user's cache folder for the next training.

A calibration is for one machine, one model and one sequence length. Its file is named
MACHINE-DIGEST--MODEL_SHAPE--WORKLOAD_SHAPE.toml.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec
import torch

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.training.progress import measuring
from megatrain.experiments.cli.verdict.layout import fitted
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.runtime import machine
from megatrain.runtime.calibration.calibrate import calibrate
from megatrain.runtime.calibration.presets import most_tokens, row_counts
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.user_cache import user_cache
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.optimizer import ADAMW
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload

_FORMAT = 2
"""A number that grows when calibrations measure more, so that machines are measured again."""
_LONGEST_NAME = 200
"""The maximum length of a file's name without its ending. File systems allow 255 characters."""


def calibration(
    model: ModelSpec,
    workload: Workload,
    device: torch.device,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    again: bool = False,
) -> Path:
    """Returns the file of this machine's calibration for a model and a workload.

    If the cache does not have it, this machine is measured first, which takes one to three
    minutes.

    Args:
        model: the model whose layers are measured.
        workload: the workload. Its batch and accumulation are ignored: several batches are
            measured.
        device: the device to measure.
        device_bytes: replaces the device memory that the machine reports.
        host_bytes: replaces the host memory that the machine reports.
        again: whether to measure although the cache has the calibration.

    Raises UserError if the machine cannot be measured, or if the cache cannot be written.
    """
    measured, *others = _measured(workload, device)
    limits = (device_bytes, host_bytes)
    file = user_cache() / "calibrations" / _name(model, measured, device, limits)
    if not again and _usable(file):
        print(fitted(f"this machine's calibration: {file}"), flush=True)
        return file
    file_arguments.check_writable(file)
    if note := options.note_on_cpu(device):
        print(fitted(note), flush=True)
    print(
        fitted(f"this machine is measured once for {model.name}, one to three minutes"), flush=True
    )
    with measuring() as progress:
        hardware = calibrate(
            "this-machine",
            model,
            measured,
            config_of(model),
            device,
            grid=others,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            progress=progress,
        )
    write_hardware(file, hardware, "megatrain train")
    print(fitted(f"wrote {file}"), flush=True)
    return file


def _measured(workload: Workload, device: torch.device) -> list[Workload]:
    """Returns the workloads to measure: one with many tokens, one with an eighth of its rows, and
    one with a single row. The planner interpolates between them.
    """
    tokens = most_tokens(device.type, machine.device_bytes(device))
    return [
        msgspec.structs.replace(
            workload.whole_rows,
            batch=rows,
            accumulation=1,
            optimizer=ADAMW,
            state=EXACT,
            gradients="exact",
        )
        for rows in row_counts(tokens, workload.sequence)
    ]


def _name(
    model: ModelSpec,
    workload: Workload,
    device: torch.device,
    limits: tuple[int | None, int | None],
) -> str:
    """Returns the name of a calibration's file. Its digest covers the machine, the memory limits,
    the model's config, the workload and `_FORMAT`.
    """
    described = machine.describe(device)
    parts = (_FORMAT, described, limits, model.config, workload)
    digest = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]
    shapes = _plain(f"{model.shape}--{workload.shape}")
    name = f"{_plain(str(described['device']))}-{digest}--{shapes}"
    return f"{name[:_LONGEST_NAME]}.toml"


def _plain(text: str) -> str:
    """Returns `text` with a hyphen for each run of characters other than letters, digits, points
    and hyphens.
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-")


def _usable(file: Path) -> bool:
    """Returns whether `file` is a calibration that this version can read."""
    try:
        return file.is_file() and HardwareSpec.load(str(file)).costs is not None
    except UserError:
        return False
