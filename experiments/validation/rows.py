"""Published figures as rows, and the settings with which the rows of a machine are predicted.

`experiments/published/*.csv` has one line for each figure. A row has only what its source reports
(model, batch, sequence, ablation). `settings.toml` in the same folder has all assumptions.
"""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec

FOLDER = Path(__file__).parents[1] / "published"
SPEEDS = ("step_s", "tflops", "tokens_per_s")
PARTS = ("forward_s", "backward_s", "optimizer_s", "clip_s", "adam_s", "copy_s", "zero_s")
LAYERS = ("layer_forward_ms", "layer_both_ms")
DEVICE, HOST = ("device_gib",), ("host_gib", "rss_gib", "state_gb")
RATES = (
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "adam_g_per_s",
    "adam_fp32_g_per_s",
    "adam_bf16_g_per_s",
    "streamed_g_per_s",
)
GROUPS = {
    "speed": SPEEDS,
    "parts of a step": PARTS,
    "a layer": LAYERS,
    "device memory": DEVICE,
    "host memory": HOST,
    "rates": RATES,
    "runs or not": ("runs",),
}
PAPER, OTHERS, OWN = "the paper", "the authors' repository and others", "our measurements"
ORIGINS = (PAPER, OTHERS, OWN)
"""Who published a figure. Errors of different origins are never averaged together."""
_OWN_SETTINGS = ("h100-x2", "h200-a", "h200-b", "h200-x2", "h200-x4")
_ABLATIONS = ("buffers", "staging_buffers", "interval")


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure. A row without a policy cannot be predicted. `note` has the reason."""

    item: str
    """What the figure describes, as the source names it."""
    setting: str
    """Key of the row's setting in `settings.toml`."""
    policy: str
    """The policy that predicts the row. `engine` means ops on all lanes of `changes` at one time.
    """
    model: str
    """A model of the library."""
    changes: dict[str, str]
    """Changed keys of the model's config.json; `buffers`, `staging_buffers` and `interval` of the
    published code; `lanes` of a rate; `clipping` of the workload, `none` if a step was not clipped.
    """
    batch: int | None
    """Sequences in a micro-batch, or None if the source does not report it."""
    sequence: int | None
    """Tokens in a sequence, or None if the source does not report it."""
    quantity: str
    """What was measured: one of the names in GROUPS."""
    unit: str
    """The unit of `value`."""
    value: float | None
    """The figure, or None if the source gives no number. For `runs`, 1 if it ran, or 0 if it ran
    out of memory.
    """
    sure: Literal["++", "+", "?"]
    """`++`: read by two readers, or measured by this project. `+`: read by one reader. `?`:
    doubtful.
    """
    used: bool
    """Whether the figure is an input of a machine's file or a policy, or whether an assumption in
    `settings.toml` was chosen by it. Then it tests nothing.
    """
    source: str
    """The figure, table or file that reports the figure."""
    note: str
    """Why the figure cannot be predicted, or what was assumed for it."""
    bound: Literal["", "least"] = ""
    """`least` if the source only says that the figure exceeds `value`. A prediction above it has no
    error, and the row is left out of all means."""
    repeats: str = ""
    """The row of the same experiment that counts instead of this one. Empty for a row that counts.
    Seconds and TFLOPS of one run are one experiment."""

    def spec(self) -> ModelSpec:
        """Returns the model with the row's changes."""
        model = ModelSpec.load(self.model)
        keys = {
            key: int(value)
            for key, value in self.changes.items()
            if key not in (*_ABLATIONS, "lanes", "clipping")
        }
        return (
            ModelSpec.from_config(model.config | keys, f"row {self.item}", model.name)
            if keys
            else model
        )

    @property
    def ablation(self) -> dict[str, int]:
        """The changes to the published code."""
        return {key: int(value) for key, value in self.changes.items() if key in _ABLATIONS}

    @property
    def origin(self) -> str:
        """Who published the figure, one of ORIGINS."""
        if self.source.startswith("paper"):
            return PAPER
        return OWN if self.setting in _OWN_SETTINGS else OTHERS


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine, and the workload that is assumed if a row's source does not report it. `fill`
    means the largest workload that fits in device memory.
    """

    hardware: str
    """A machine of the library."""
    sequence: int | Literal["fill"]
    """Tokens in a sequence."""
    batch: int | Literal["fill"]
    """Sequences in a micro-batch."""
    assumed: str
    """The assumptions and their reasons, as text."""
    host_memory: str = ""
    """The machine's host memory, such as `512GiB`. Empty for the library's value."""
    link_gb_per_s: float | None = None
    """Bandwidth of the link in both directions. None for the library's value."""
    pinned_copies: bool = True
    """`copies` of `megatrain_code.Ablation`, for the published code."""
    packs: bool = False
    """`packs` of `megatrain_code.Ablation`, for the published code."""
    moments_bytes: int = 8
    """Bytes per parameter of both moments on the host: 8 in fp32, 4 in bf16."""

    def machine(self) -> HardwareSpec:
        """Returns the library's machine with the setting's host memory and link."""
        hardware = HardwareSpec.load(self.hardware)
        if self.host_memory:
            hardware = msgspec.structs.replace(hardware, host_bytes=parse_bytes(self.host_memory))
        if self.link_gb_per_s:
            hardware = msgspec.structs.replace(
                hardware,
                h2d_gb_per_s=self.link_gb_per_s,
                d2h_gb_per_s=self.link_gb_per_s,
                h2d_curve=(),
                d2h_curve=(),
            )
        return hardware


def load_settings() -> dict[str, Setting]:
    """Returns every setting by its key."""
    found = tomllib.loads((FOLDER / "settings.toml").read_text())
    return {name: msgspec.convert(setting, Setting) for name, setting in found.items()}


def load_rows() -> list[PublishedRow]:
    """Returns every published figure, file by file. Raises UserError for a malformed row, with its
    file and line.
    """
    rows = []
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open(newline="") as file:
            rows += [
                _row(f"{path.name}, line {line}", cells)
                for line, cells in enumerate(csv.DictReader(file), 2)
            ]
    return rows


def _row(where: str, cells: dict[str, str]) -> PublishedRow:
    """Returns the row of a line of a CSV file.

    `where` is the file and the line. Raises UserError if the line is not a valid row.
    """
    parsed: dict[str, Any] = dict(cells)
    try:
        parsed["changes"] = dict(part.split("=") for part in cells["changes"].split(";") if part)
        for key, kind in (("batch", int), ("sequence", int), ("value", float)):
            parsed[key] = kind(cells[key]) if cells[key] else None
        parsed["used"] = cells["used"] == "yes"
        row = msgspec.convert(parsed, PublishedRow)
    except (ValueError, KeyError, msgspec.ValidationError) as error:
        raise UserError(
            f"published rows: {where}",
            found=str(error),
            allowed="the columns of PublishedRow",
            fix="correct the line",
        ) from None
    known = [quantity for group in GROUPS.values() for quantity in group]
    if row.policy and (row.quantity not in known or row.value is None):
        raise UserError(
            f"published rows: {where}",
            found=f"quantity {row.quantity}, value {row.value}",
            allowed=", ".join(known),
            fix="correct the line",
        )
    if not row.policy and not row.note:
        raise UserError(
            f"published rows: {where}",
            found="neither a policy nor a note",
            allowed="one of them",
            fix="write why it cannot be predicted",
        )
    return row
