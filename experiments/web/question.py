"""Question: what a reader of the page asks. It is converted to the options of `megatrain check`.

A request can name only models and machines of the library. No value of it is used as a path.
"""

from __future__ import annotations

import argparse
import shlex

import msgspec

from megatrain.experiments.cli import options
from megatrain.experiments.cli.verdict.this_machine import this_machine
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, decode_config, read_json
from megatrain.simulator.base.names import meant, suggestion
from megatrain.simulator.hardware import machine as machines
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import optimizer
from megatrain.simulator.model.specs import ModelSpec, library
from megatrain.simulator.policies import names, peers

LARGEST_REQUEST = 64 * 2**10
"""Largest allowed size of a request, in bytes. A config.json has a few thousand bytes."""
LONGEST_VALUE = 200
"""Largest allowed length of a value in characters, except of a pasted config."""
MOST = {"batch": 4096, "seq": 2**22, "accumulation": 64}
"""Option -> its largest allowed value. The limits keep an answer from taking minutes."""


class Question(
    msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True
):
    """A model, a machine and a workload. Every value is written as on the command line. An empty
    value means the default.
    """

    model: str = ""
    """A model of the library, in any spelling that `meant` finds. Not used if `config` is set."""
    config: str = ""
    """The text of a config.json, or empty."""
    hardware: str = ""
    """A machine of the library, in any spelling that `meant` finds. Empty for this machine."""
    host_memory: str = ""
    """Host memory of the machine, such as `256GiB`."""
    batch: str = ""
    """Sequences of a micro-batch. Empty lets the planner choose."""
    seq: str = ""
    """Tokens of a sequence."""
    accumulation: str = ""
    """Micro-batches of a step."""
    policy: str = ""
    """A policy, another system, or `best`."""
    clipping: str = ""
    """How gradients are clipped."""
    state: str = ""
    """Formats of the optimizer state."""
    optimizer: str = ""
    """A registered optimizer."""

    @classmethod
    def read(cls, data: object) -> Question:
        """Returns the question of a request's JSON object. Raises UserError if it is not one."""
        question = convert(data, cls, "request")
        for name, value in msgspec.to_builtins(question).items():
            if name != "config" and len(value) > LONGEST_VALUE:
                raise UserError(
                    name,
                    found=f"{len(value)} characters",
                    allowed=f"at most {LONGEST_VALUE}",
                    fix="write less",
                )
        return question

    def options(self) -> dict[str, str]:
        """Returns the options that are not empty, except model and machine."""
        values = msgspec.to_builtins(self)
        return {
            name: value
            for name, value in values.items()
            if value and name not in ("model", "config", "hardware")
        }

    def arguments(self) -> argparse.Namespace:
        """Returns the options of `megatrain check` that ask this question.

        Raises UserError for a value that the command would refuse, for a number above `MOST`, and
        for a policy or an optimizer that is not installed.
        """
        # the command also takes Python files
        for option, value, known in (
            ("--policy", self.policy, ["best", *names(), *peers()]),
            ("--optimizer", self.optimizer, optimizer.registered()),
        ):
            if value and value not in known:
                raise UserError(
                    option,
                    found=value,
                    allowed=", ".join(known),
                    fix=suggestion(value, known, "leave it out"),
                )
        words = [f"--{name}={value}" for name, value in self.options().items()]
        if self.hardware:  # only whether it is given matters; `machine` finds the machine
            words.append("--hardware=library")
        parser = options.OneLineParser(prog="megatrain check")
        options.add_check(parser)
        args = parser.parse_args(["model", *words])
        for name, most in MOST.items():
            if (getattr(args, name) or 1) > most:
                raise UserError(
                    f"--{name}",
                    found=f"{getattr(args, name):,}",
                    allowed=f"at most {most:,} on this page",
                    fix="ask `megatrain check` for more",
                )
        return args

    def spec(self) -> ModelSpec:
        """Returns the model.

        Raises UserError if the library does not have it, or if the config is not that of a
        supported model.
        """
        if self.config:
            try:
                config = decode_config(self.config)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    "config.json",
                    found=f"text that is not JSON ({error})",
                    allowed="the content of a model's config.json",
                    fix="copy the whole file",
                ) from None
            return ModelSpec.from_config(config, "config.json")
        known = library()
        name = meant(self.model, known)
        if name is None:
            raise UserError(
                f"model {self.model}",
                found="no such name in the library" if self.model else "no name",
                allowed="a name such as qwen2.5-7b or Qwen/Qwen2.5-7B, or the content of a"
                " config.json",
                fix=suggestion(self.model, known, "paste the model's config.json"),
            )
        return ModelSpec.from_config(read_json(known[name]), str(known[name]), name)

    def machine(self) -> HardwareSpec:
        """Returns the machine.

        Raises UserError if the library does not have it, or if this machine is asked for and has no
        known GPU.
        """
        if not self.hardware:
            return this_machine()
        known = machines.library()
        name = meant(self.hardware, known)
        if name is None:
            raise UserError(
                f"machine {self.hardware}",
                found="no such name in the library",
                allowed="a name such as rtx4090 or h200",
                fix=suggestion(self.hardware, known, "choose one of the list"),
            )
        return HardwareSpec.of_library(name)

    def command(self, model: ModelSpec, hardware: HardwareSpec) -> str:
        """Returns the command line of the same question. It calls a pasted config config.json."""
        words = ["megatrain", "check", "config.json" if self.config else model.name]
        if self.hardware:
            words += ["--hardware", hardware.name]
        for name, value in self.options().items():
            words += [f"--{name}", value]
        return " ".join(shlex.quote(word) for word in words)
