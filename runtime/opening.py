"""What a run needs before its first step, each looked at before anything is allocated or written: does the plan fit, where is the model, the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

from megatrain.runtime.batch import Batch
from megatrain.runtime.config import Config
from megatrain.runtime.data import Corpus
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.units import format_bytes


class Source(Protocol):
    """Where batches come from."""

    def step(self, number: int) -> list[Batch]:
        """The micro-batches of step `number`, from 1: always the same."""


def open_data(data: Source | Path | str, config: Config, plan: Plan) -> tuple[Source, Source | None]:
    """What is trained and what is evaluated on, where there is such. Raises UserError where a file is missing or too short for one step."""

    def read(path: Path) -> Corpus:
        return Corpus.read(path, plan.workload, vocabulary=plan.model.vocabulary, seed=config.training.seed)

    training = read(Path(data)) if isinstance(data, Path | str) else data
    return training, read(Path(config.data.evaluation_data)) if config.data.evaluation_data else None


def find_model(folder: Path, plan: Plan, *, random: bool) -> Path | None:
    """`folder` where it holds the plan's model; None where it holds none and its weights are not needed, but `random` ones.

    Raises UserError where there is none but one is needed, or another one.
    """
    if _is_model(folder, plan.model):
        return folder
    if random:
        return None
    raise UserError(f"model {folder}", found="no config.json", allowed="a Hugging Face model folder", fix="check `source` in the plan, or pass --init random")


def refuse_what_does_not_fit(plan: Plan, schedule: Schedule) -> None:
    """Activations and workspace included, as predicted; the pools themselves are checked where they are allocated. Raises UserError."""
    if plan.prediction is None:
        return
    for place, peak, limit in (
        ("device", plan.prediction.device_peak_bytes, plan.device_limit_bytes),
        ("host", plan.prediction.host_peak_bytes, plan.host_limit_bytes),
    ):
        if peak > limit:
            pools = Counter({buffer.pool: 0 for buffer in schedule.buffers})
            for buffer in schedule.buffers:
                pools[buffer.pool] += buffer.allocated if buffer.place == place else 0
            (largest, size), *_ = pools.most_common(1)
            raise UserError(
                f"{place} memory", found=f"a plan whose peak is {format_bytes(peak)}, of which {largest} {format_bytes(size)}", allowed=format_bytes(limit),
                fix=f"raise the limit by {format_bytes(peak - limit)}, or make a plan for this limit with `megatrain plan`",
            )  # fmt: skip


def _is_model(folder: Path, planned: ModelSpec) -> bool:
    """Whether `folder` has a model. Raises UserError where it is another one than was planned."""
    config = folder / "config.json"
    if not config.exists():
        return False
    found = ModelSpec.load(str(config))
    both = found.config.keys() & planned.config.keys()
    keys = [key for key in found.config if key in both and found.config[key] != planned.config[key]]
    if keys or found.stack != planned.stack:  # a key that one of them leaves out has its default there
        shown = keys or sorted(found.config.keys() ^ planned.config.keys())
        differs, expected = (", ".join(f"{key} {model.config.get(key)}" for key in shown) for model in (found, planned))
        raise UserError(str(config), found=differs, allowed=f"{expected}, as planned", fix="make the plan again with `megatrain plan`")
    return True
