"""Row: a published figure as data, and Setting: what all rows of one machine are predicted with.

`experiments/published/*.csv` has the rows, a line a figure; `settings.toml` beside them all that had to be assumed. A row may say what its source
says (model, batch, sequence, the ablation); it has no assumption of its own.
"""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.units import parse_bytes

FOLDER = Path(__file__).parents[1] / "published"
SPEEDS = ("step_s", "tflops", "tokens_per_s")
PARTS = ("forward_s", "backward_s", "optimizer_s", "clip_s", "adam_s", "copy_s", "zero_s")
LAYERS = ("layer_forward_ms", "layer_both_ms")
DEVICE, HOST = ("device_gib",), ("host_gib", "rss_gib", "state_gb")
RATES = ("h2d_gb_per_s", "d2h_gb_per_s", "adam_g_per_s", "adam_fp32_g_per_s", "adam_bf16_g_per_s", "streamed_g_per_s")
GROUPS = {"speed": SPEEDS, "parts of a step": PARTS, "a layer": LAYERS, "device memory": DEVICE, "host memory": HOST, "rates": RATES, "runs or not": ("runs",)}
_ABLATIONS = ("buffers", "slabs", "interval")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure. Without a policy it cannot be predicted, and `note` says why."""

    item: str
    setting: str
    policy: str
    """what really ran; `engine`: ops of the lanes in `changes`, side by side"""
    model: str
    changes: dict[str, str]
    """config.json's keys; `buffers`, `slabs`, `interval` of the published code; `lanes`"""
    batch: int | None
    sequence: int | None
    quantity: str
    unit: str
    value: float | None
    """None where the source has a word and no number; of `runs` 1 or, out of memory, 0"""
    sure: Literal["++", "+", "?"]
    """two readers or measured here; one reader; doubtful"""
    used: bool
    """the figure itself stands in a machine's file or a policy, so it tests nothing"""
    source: str
    note: str
    """why it cannot be predicted"""

    def spec(self) -> ModelSpec:
        """The model, changed as the row says."""
        model = ModelSpec.load(self.model)
        keys = {key: int(value) for key, value in self.changes.items() if key not in (*_ABLATIONS, "lanes")}
        return ModelSpec.from_config(model.config | keys, f"row {self.item}", model.name) if keys else model

    @property
    def ablation(self) -> dict[str, int]:
        return {key: int(value) for key, value in self.changes.items() if key in _ABLATIONS}


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine, and the workload where the source tells none. `fill`: the largest that the device's memory holds."""

    hardware: str
    sequence: int | Literal["fill"]
    batch: int | Literal["fill"]
    assumed: str
    host_memory: str = ""
    link_gb_per_s: float | None = None
    pinned_copies: bool = True
    """of the published code: `megatrain_code.Ablation.copies`"""
    moments_bytes: int = 8
    """a parameter's moments on the host: 8 in fp32, 4 in bf16"""

    def machine(self) -> HardwareSpec:
        """The library's machine with what is told of the source's."""
        hardware = HardwareSpec.load(self.hardware)
        if self.host_memory:
            hardware = msgspec.structs.replace(hardware, host_bytes=parse_bytes(self.host_memory))
        if self.link_gb_per_s:
            hardware = msgspec.structs.replace(hardware, h2d_gb_per_s=self.link_gb_per_s, d2h_gb_per_s=self.link_gb_per_s, h2d_curve=(), d2h_curve=())
        return hardware


def load_settings() -> dict[str, Setting]:
    found = tomllib.loads((FOLDER / "settings.toml").read_text())
    return {name: msgspec.convert(setting, Setting) for name, setting in found.items()}


def load_rows() -> list[Row]:
    """Every published figure, file by file. Raises UserError naming file and line."""
    rows = []
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(newline="") as file:
            rows += [_row(f"{path.name}, line {line}", cells) for line, cells in enumerate(csv.DictReader(file), 2)]
    return rows


def _row(where: str, cells: dict[str, str]) -> Row:
    parsed: dict[str, Any] = dict(cells)
    try:
        parsed["changes"] = dict(part.split("=") for part in cells["changes"].split(";") if part)
        for key, kind in (("batch", int), ("sequence", int), ("value", float)):
            parsed[key] = kind(cells[key]) if cells[key] else None
        parsed["used"] = cells["used"] == "yes"
        row = msgspec.convert(parsed, Row)
    except (ValueError, KeyError, msgspec.ValidationError) as error:
        raise UserError(f"published rows: {where}", found=str(error), allowed="the columns of Row", fix="correct the line") from None
    known = [quantity for group in GROUPS.values() for quantity in group]
    if row.policy and (row.quantity not in known or row.value is None):
        raise UserError(f"published rows: {where}", found=f"quantity {row.quantity}, value {row.value}", allowed=", ".join(known), fix="correct the line")
    if not row.policy and not row.note:
        raise UserError(f"published rows: {where}", found="neither a policy nor a note", allowed="one of them", fix="say why it cannot be predicted")
    return row
