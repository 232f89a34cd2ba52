"""TrainingRun: what callbacks can read and do while a training runs. `Trainer` is one."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING

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
    """A training that runs. The attributes that `fit` sets are available from `on_start` on."""

    plan: Plan
    """the plan that is executed"""
    out: Path | None
    """the run folder; None if there is none"""
    origin: Path
    """folder that relative paths in the plan are relative to"""
    config: Config
    """all settings that are not in the plan"""
    device: torch.device
    """the device that computes"""
    source: str
    """the model's folder or its name on the hub"""
    folder: Path | None
    """folder with the model, its tokenizer and its generation config; None if the weights are
    random and there is no such folder"""
    model_config: PretrainedConfig
    """transformers' config of the model that is trained; set by `fit`"""
    exported_config: PretrainedConfig
    """the config that an export writes; set by `fit`"""
    executor: Executor
    """executes the steps; set by `fit`"""
    first_step: int
    """number of the first step to do with this executor; restoring a checkpoint and switching to
    another plan set it"""
    finished: bool
    """whether no further step will be done"""
    saved_step: int | None
    """number of the step after which the newest checkpoint was saved; None if this training has
    saved none"""
    timelines: list[Timeline]
    """timelines of the newest steps, without the warm-up steps"""
    data_summaries: dict[str, DataSummary]
    """what is in the `training` and the `evaluation` data; empty if they do not come from files"""
    device_bytes_before: int
    """bytes allocated on the device before this training"""

    @property
    def measured(self) -> Timeline:
        """Returns the timeline of the step with the median duration, without warm-up steps."""
        return median_timeline(self.timelines)

    @property
    def state(self) -> ModelState:
        """Returns the weights and moments with all updates so far applied.

        Available only while `fit` runs.
        """
        return self.executor.state

    @abc.abstractmethod
    def stop(self, reason: str) -> None:
        """Ends the training after the current step. Called from a callback.

        It counts as the last step: the model is evaluated, saved and exported as the config says.
        """

    @abc.abstractmethod
    def switch(self, plan: Path | str) -> None:
        """Continues under another plan after the current step. Called from a callback.

        The state is handed over by a checkpoint of that step. The result is the same, bit for bit.
        If the checkpoint cannot be written, or if the other plan is refused, runs out of memory or
        fails in an op before its first step has ended, a note says so and the training continues
        under the plan that it has. If that is not possible any more, the error names the command
        that resumes the run from the checkpoint. The run folder has the other plan from the end of
        its first step on.

        Args:
            plan: file of a plan of the same model and workload.

        Raises UserError if there is no run folder, or if the plan cannot be executed.
        """

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Passes one line of text for the user to every callback."""
