"""Builds the commands that `megatrain check` suggests, with the options that it was given."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from megatrain.simulator.base.units import exact_size

if TYPE_CHECKING:
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.verdict.verdict import Verdict


def next_commands(args: argparse.Namespace, verdict: Verdict) -> list[tuple[list[str], str]]:
    """Returns the words of each command, and a phrase on what it does.

    For a model that fits, the commands train it and write its plan. Otherwise, one lists the models
    that fit with the same options except the micro-batch. If the model fits on the several GPUs of
    `--gpus`, one writes the plan for them. No command of `plan` is suggested with `--cores`, which
    it does not have. Training needs weights, so a model that is not a folder is called MODEL.

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
    machine = [*(hardware or ["--hardware", "hardware.toml"]), *limits]
    work = verdict.workload
    kept = _kept(args, verdict, work)
    policy = [] if args.policy == "best" else ["--policy", args.policy]
    several = _for_several(args, verdict, machine)
    if not verdict.feasible:
        others = _options({"cores": (args.cores, None), "seq": (work.sequence, 1024)})
        words = ["check", *hardware, *limits, *others, *policy, *kept]
        return [*several, (_quoted(*words), "lists the models that fit")]
    if verdict.prediction_only or not verdict.cuda:
        return several
    measured = [*hardware, *limits] if verdict.calibrated else []
    model = args.model if os.path.isdir(args.model) else "MODEL"
    size = _options({"tokens-per-step": (args.tokens_per_step, None)})
    trained = [*measured, *policy, *size, *kept, "--out", "RUN"]
    planned = [*machine, *policy, *_size(verdict, work), *kept, "--out", "plan.toml"]
    plan = (
        _quoted("plan", args.model, *planned),
        "only writes the plan of this verdict, for `megatrain train`",
    )
    return [
        (
            _quoted("train", model, "--data", "DATA", *trained),
            "on that machine: measures it if needed, plans and trains",
        ),
        *([plan] if args.cores is None else []),
        *several,
    ]


def _for_several(
    args: argparse.Namespace, verdict: Verdict, machine: list[str]
) -> list[tuple[list[str], str]]:
    """Returns the command that writes the plan for the GPUs of `--gpus`, or nothing if they cannot
    share the step, if the model does not fit on them, or with `--cores`.
    """
    shared = verdict.multi_gpu
    if not shared or not shared.feasible or not shared.workload or args.cores is not None:
        return []
    gpus = {
        "gpus": (shared.gpus, None),
        "hosts": (shared.hosts, 1),
        "network": (None if args.network is None else f"{args.network:g}", None),
    }
    work = msgspec.structs.replace(
        shared.workload, accumulation=shared.workload.accumulation // shared.gpus
    )
    kept = _kept(args, verdict, work, fits=True)
    words = [*machine, *_options(gpus), *_size(verdict, work), *kept, "--out", "several.toml"]
    return [(_quoted("plan", args.model, *words), f"writes the plan for {shared.gpus} GPUs")]


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


def _size(verdict: Verdict, work: Workload) -> list[str]:
    """Returns the options for batch, sequence and accumulation of `work`, and for the loss chunk if
    it was chosen for them. They are not for `train`, which chooses them from the data.
    """
    return _options(
        {
            "batch": (work.batch, None),
            "seq": (work.sequence, None),
            "accumulation": (work.accumulation, 1),
            "loss-chunk": (work.loss_chunk if verdict.chunk_chosen else None, None),
            "document-length": (work.document_length, None),
        }
    )


def _kept(
    args: argparse.Namespace, verdict: Verdict, work: Workload, *, fits: bool | None = None
) -> list[str]:
    """Returns the other options of `work` that differ from the defaults. `fits` says whether the
    model fits with this workload, which is the verdict by default.

    `train` needs them, too. Without them it would plan another workload, which may not fit.
    """
    fits = verdict.feasible if fits is None else fits
    values: dict[str, tuple[object, object]] = {
        "dtype": ("fp8" if work.fp8 else work.dtype, "bf16"),
        "fp8-scaling": (work.fp8 or "rowwise", "rowwise"),
        "clipping": (work.clipping, "global"),
        "optimizer": (work.optimizer, "adamw"),
        "state": (work.state if fits else args.state, "exact"),
        "gradients": (work.gradients, "exact"),
        "attention": (work.attention if fits else args.attention, None),
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
