"""TrainingRun: the interface of a running training for callbacks. `Trainer` implements it."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline, median_timeline

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from megatrain.runtime.data.summary import DataSummary
    from megatrain.runtime.execution.executor import Executor
    from megatrain.runtime.files.model_files import ModelState
    from megatrain.runtime.training.config import Config


class TrainingRun(abc.ABC):
    """A running training. Attributes that `fit` sets are available from `on_start` on."""

    plan: Plan
    """The plan that is executed."""
    out: Path | None
    """The run folder, or None if there is none."""
    origin: Path
    """The folder to which paths in the plan are relative."""
    config: Config
    """All settings that are not in the plan."""
    device: torch.device
    """The device that computes."""
    source: str
    """The model's folder, or its name on the hub."""
    folder: Path | None
    """The folder with the model, its tokenizer and its generation config, or None if the initial
    weights are random and there is no such folder. Set by `fit`."""
    model_config: PretrainedConfig
    """The transformers config of the trained model. Set by `fit`."""
    exported_config: PretrainedConfig
    """The config that an export writes. Set by `fit`."""
    executor: Executor
    """The executor of the steps. Set by `fit`."""
    first_step: int
    """The number of the first step that this executor does. It is 1 unless a checkpoint was
    restored or the plan was switched."""
    finished: bool
    """Whether no further step will be done."""
    saved_step: int | None
    """The number of the step after which the newest checkpoint was saved, or None if this training
    has saved none."""
    timelines: list[Timeline]
    """The timelines of the newest steps, without the warm-up steps. Empty after a switch."""
    data_summaries: dict[str, DataSummary]
    """The summaries of the `training` and the `evaluation` data. Empty if they do not come from
    files."""
    device_bytes_before: int
    """The number of bytes that were allocated on the device before this training."""

    @property
    def measured(self) -> Timeline:
        """The timeline of the step with the median duration, without warm-up steps. Raises
        ValueError if `timelines` is empty.
        """
        return median_timeline(self.timelines)

    @property
    @abc.abstractmethod
    def stopped(self) -> str:
        """The reason if a callback stopped the training early, otherwise empty."""

    @property
    def state(self) -> ModelState:
        """The weights and moments, with all updates so far applied.

        Available only while `fit` runs. Raises UserError before and after. With several GPUs, only
        callbacks of rank 0 can read weights.
        """
        begun = hasattr(self, "executor")
        if not begun or self.executor.closed:
            raise UserError(
                "training: state",
                found=f"a training that has {'ended' if begun else 'not begun'}",
                allowed="reading it while `fit` runs",
                fix="read it in a callback, or read the exported model afterwards",
            )
        return self.executor.state

    @abc.abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the training after the current step. A callback calls this in `on_step` or in
        `on_evaluation`. In any other method, it ends the training after the next step.

        This step counts as the last one: the model is evaluated, saved and exported as the config
        says. `reason` is reported to the user.
        """

    @abc.abstractmethod
    def switch(self, plan: Path | str) -> None:
        """Continues under another plan after the current step. A callback calls this.

        The state is passed on in a checkpoint of this step. The result is the same, bit for bit.

        If the checkpoint cannot be written, or if the other plan is refused, runs out of memory or
        fails in an op before its first step has ended, a note says so and the training continues
        under its present plan. If this is not possible either, a RunError names the command that
        resumes the run from the checkpoint. The other plan is written to the run folder after its
        first step.

        Args:
            plan: file of a plan for the same model and workload.

        Raises UserError if there is no run folder, if there are several GPUs, or if the plan cannot
        be executed.
        """

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Passes one line of text for the user to every callback."""
