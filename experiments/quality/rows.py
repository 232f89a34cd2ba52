"""The settings of all runs, the specification of one run, and the row with its result."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from megatrain.simulator.base.files import convert, read_json

Part = Literal["training", "fine-tune"]
LOSSES = 10
"""Steps whose training losses are averaged into one value of a row."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all runs of a folder share."""

    hidden: int
    """Width of the model."""
    layers: int
    """Number of decoder layers."""
    vocabulary: int
    """Rows of the embedding and of the head."""
    batch: int
    """Rows of a step."""
    sequence: int
    """Tokens of a row."""
    steps: int
    """Optimizer steps of a training from random weights."""
    rate: float
    """Peak learning rate. The warm-up takes 3 % of the steps, and a cosine decay to 0 follows."""
    fine_tune_steps: int
    """Optimizer steps of a fine-tuning."""
    fine_tune_rate: float
    """Constant learning rate of a fine-tuning."""
    evaluations: int
    """Evaluations of the held-out text in each run."""
    text_bytes: int
    """Bytes of text after which no further file is read."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    compiled: bool = True
    """Whether layers run through torch.compile."""

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    def steps_of(self, part: Part) -> int:
        """Returns the optimizer steps of a run of `part`."""
        return self.steps if part == "training" else self.fine_tune_steps


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    part: Part
    """`training` starts from random weights, and `fine-tune` from the weights that `exact` trained
    with the least seed."""
    variant: str
    """The variant's name (`variant.py`)."""
    seed: int
    """Seed of the weights and of the order of the data."""
    device: str
    """`auto`, `cuda` or `cpu`."""
    parallel: int
    """Number of runs that share the device."""
    settings: RunSettings
    """The settings that all runs share."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.part}-{self.variant}-seed{self.seed}"


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fine-tuning moved the weights from its first weights."""

    distance: float
    """L2 norm of the change of all master weights."""
    relative: float
    """`distance` divided by the L2 norm of the first weights."""
    changed: float
    """Share of the master weights that changed."""


class QualityRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run, or the reason for its failure."""

    spec: RunSpec
    """The run."""
    parameters: int = 0
    """Parameters of the model."""
    tokens: int = 0
    """Tokens that were trained on, with repetitions."""
    epoch_tokens: int = 0
    """Tokens of the training text."""
    held_out_tokens: int = 0
    """Labelled tokens of each evaluation."""
    training: tuple[tuple[int, float], ...] = ()
    """(number of a step, mean training loss of the `LOSSES` steps that end with it)."""
    held_out: tuple[tuple[int, float], ...] = ()
    """(number of a step, loss on the held-out text after it). Step 0, which only a fine-tuning has,
    stands for the weights before its first step."""
    step_seconds: float = 0.0
    """Median time of a step in seconds, while `parallel` runs share the device."""
    interval_seconds: float = 0.0
    """Median time in seconds between the ends of two steps, including data and records."""
    seconds: float = 0.0
    """Wall time of all steps and evaluations since the run began or was resumed."""
    movement: Movement | None = None
    """How far a fine-tuning moved the weights. None for other runs."""
    machine: dict[str, object] = {}
    """The machine that it ran on, from `runtime.machine.describe`."""
    failure: str = ""
    """The reason for the failure. Empty if the run is complete."""


def load_rows(folder: Path) -> list[QualityRow]:
    """Returns the rows of all runs in `folder`, sorted by part, variant and seed.

    Raises UserError for a file that is not a row.
    """
    rows = [
        convert(read_json(path), QualityRow, str(path))
        for path in sorted(folder.glob("runs/*.json"))
    ]
    return sorted(rows, key=lambda row: (row.spec.part != "training", row.spec.name))
