"""Builds the commands that `megatrain check` suggests, with the options that it was given."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatrain.simulator.base.units import exact_size

if TYPE_CHECKING:
    from megatrain.simulator.verdict.verdict import Verdict


def next_commands(args: argparse.Namespace, verdict: Verdict) -> list[tuple[list[str], str]]:
    """Returns the words of each command, and a phrase on what it does.

    For a model that fits, the commands train it and write its plan, also for several GPUs if
    the verdict is about them. Otherwise, the command lists
    the models that fit with the same options except the micro-batch. Training needs weights, so a
    model that is not a folder is called MODEL.

    Args:
        args: the options as they were given, with `--state any` not yet replaced.
        verdict: the verdict on the model.
    """
    limits = [
        word
        for name, size in (("device", args.device_memory), ("host", args.host_memory))
        if size is not None
        for word in (f"--{name}-memory", exact_size(size))
    ]
    hardware = ["--hardware", args.hardware] if args.hardware else []
    kept = _kept(args, verdict)
    policy = [] if args.policy == "best" else ["--policy", args.policy]
    if not verdict.feasible:
        others = _options({"cores": (args.cores, None), "seq": (verdict.workload.sequence, 1024)})
        words = ["check", *hardware, *limits, *others, *policy, *kept]
        return [(_quoted(*words), "lists the models that fit")]
    if verdict.prediction_only:
        return []
    measured = [*hardware, *limits] if verdict.calibrated else []
    model = args.model if os.path.isdir(args.model) else "MODEL"
    named = hardware or ["--hardware", "hardware.toml"]
    commands = [
        (
            _quoted("train", model, "--data", "DATA", *measured, *policy, *kept, "--out", "RUN"),
            "on that machine: measures it if needed, plans and trains",
        ),
        (
            _quoted(
                "plan",
                args.model,
                *named,
                *limits,
                *policy,
                *_size(verdict, verdict.workload.loss_chunk if verdict.chunk_chosen else None),
                *kept,
                "--out",
                "plan.toml",
            ),
            "only writes the plan of this verdict, for `megatrain train`",
        ),
    ]
    shared = verdict.multi_gpu
    if shared and shared.feasible and shared.workload:
        gpus = _options(
            {
                "gpus": (shared.gpus, None),
                "hosts": (shared.hosts, 1),
                "network": (None if args.network is None else f"{args.network:g}", None),
            }
        )
        chunk = shared.workload.loss_chunk if verdict.chunk_chosen else None
        words = [*named, *limits, *policy, *gpus, *_size(verdict, chunk), *kept]
        commands.append(
            (
                _quoted("plan", args.model, *words, "--out", "several.toml"),
                f"writes the plan for {shared.gpus} GPUs",
            )
        )
    return commands


def _quoted(*words: str) -> list[str]:
    return ["megatrain", *(shlex.quote(word) for word in words)]


def _options(values: Mapping[str, tuple[object, object]]) -> list[str]:
    """Returns the words of the options whose value differs from the default.

    `values` maps the name of an option, without hyphens, to its value and its default.
    """
    return [
        word
        for name, (value, default) in values.items()
        if value != default
        for word in (f"--{name}", str(value))
    ]


def _size(verdict: Verdict, loss_chunk: int | None) -> list[str]:
    """Returns the options for batch, sequence and accumulation, and for `loss_chunk` if it is not
    None. They are not for `train`, which chooses them from the data.
    """
    work = verdict.workload
    return _options(
        {
            "batch": (work.batch, None),
            "seq": (work.sequence, None),
            "accumulation": (work.accumulation, 1),
            "loss-chunk": (loss_chunk, None),
        }
    )


def _kept(args: argparse.Namespace, verdict: Verdict) -> list[str]:
    """Returns the other options of the workload that differ from the defaults.

    `train` needs them, too. Without them it would plan another workload, which may not fit.
    """
    work = verdict.workload
    values: dict[str, tuple[object, object]] = {
        "dtype": ("fp8" if work.fp8 else work.dtype, "bf16"),
        "fp8-scaling": (work.fp8 or "rowwise", "rowwise"),
        "clipping": (work.clipping, "global"),
        "optimizer": (work.optimizer, "adamw"),
        "state": (args.state if not verdict.feasible else work.state, "exact"),
        "gradients": (work.gradients, "exact"),
        "attention": (work.attention if verdict.feasible else args.attention, None),
        "loss-chunk": (None if verdict.chunk_chosen else work.loss_chunk, None),
        "token-piece": (work.token_piece, None),
        "head-groups": (work.head_groups, None),
    }
    flags = {
        "--compile": work.compiled,
        "--no-dropout": work.no_dropout,
        "--plain-packing": args.documents is False,
        "--documents": args.documents is True,
    }
    return _options(values) + [flag for flag, given in flags.items() if given]
