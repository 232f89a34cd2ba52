"""Trains the same model with megatrain and with plain PyTorch, and compares losses and weights.

    python -m megatrain.experiments.compare_adamw

Three runs start from the same random weights and use the same data and hyperparameters.

* *ours*: the schedule of a plan, with masters in two 16-bit halves, the loss in chunks, and
  recomputed layers.
* *reference*: transformers' whole model in bf16, `torch.optim.AdamW` on fp32 masters, and
  `clip_grad_norm_`. Only the batches and the first weights come from our runtime.
* *again*: the reference with another attention kernel, eager instead of SDPA. It computes the same
  mathematics with other rounding. Its distance from the reference is the noise of bf16 compute.

Ours passes if two conditions hold. In each step, the relative difference of the loss is at most
`LOSS_LIMIT`. For each class of tensors, the distance of the final weights from the reference is at
most `NOISE_LIMIT` times the noise. For two runs with independent rounding of the same size, this
ratio is 1. The limit is larger because kernels round differently. An error in the mathematics, such
as a missing gradient, a step that is counted twice, or no bias correction, changes weights by a
large part of the distance that they move in training. The noise is some hundredths of this
distance.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.runtime.batch import Batch
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import describe, device_bytes, host_bytes
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.base.files import write_json
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Plan

LOSS_LIMIT, NOISE_LIMIT = 1e-3, 1.5
SETTINGS = AdamW(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, max_norm=1.0)
WARM_UP_STEPS = 10
Weights = dict[str, torch.Tensor]
"""fp32 master weights on the CPU, by their names in a checkpoint."""
Feed = Callable[[int], Batch]
"""Number of a step, from 1 -> its batch."""


class AdamWRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one of the three runs."""

    losses: list[float]
    """Loss of each step."""
    weights: Weights
    """Weights after the last step."""
    seconds: float
    """Wall time of the whole run in seconds."""


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """Distances between runs for one class of tensors, after the last step.

    Distances are L2 norms, divided by the distance from the first to the last weights of the
    reference.
    """

    parameters: int
    """Number of parameters in this class."""
    ours: float
    """Distance between ours and the reference."""
    noise: float
    """Distance between the reference with another attention kernel and the reference."""
    ratio: float
    """`ours` divided by `noise`."""


def run_ours(
    plan: Plan, config: PretrainedConfig, feed: Feed, rates: Sequence[float], device: torch.device
) -> AdamWRun:
    """Trains with the executor from random weights of seed 0, one step for each learning rate of
    `rates`.
    """
    begin, losses = time.perf_counter(), []
    with Executor(plan, config, SETTINGS, device) as executor:
        executor.state.load(random_weights(0, device))
        for number, rate in enumerate(rates, 1):
            losses.append(executor.step([feed(number)], rate=rate, number=number).loss)
        weights = {
            hub_name(layer.name, name): master.cpu()
            for layer in plan.model.stack.values()
            for name, master in executor.state.masters(layer).items()
        }
    return AdamWRun(losses=losses, weights=weights, seconds=time.perf_counter() - begin)


def run_plain(
    config: PretrainedConfig,
    first: Weights,
    feed: Feed,
    rates: Sequence[float],
    device: torch.device,
    attention: str,
) -> AdamWRun:
    """Trains with plain PyTorch from the weights `first`: the whole model is on the device, without
    loss chunks and recompute.
    """
    begin, losses = time.perf_counter(), []
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).train()
    parameters = dict(model.named_parameters())
    masters = {name: first[name].to(device, copy=True).requires_grad_() for name in parameters}
    # As usual, norms, biases and embeddings have no weight decay.
    decaying = [
        master for name, master in masters.items() if master.ndim > 1 and "embed_tokens" not in name
    ]
    others = [
        master for name, master in masters.items() if master.ndim < 2 or "embed_tokens" in name
    ]
    groups = [
        {"params": decaying, "weight_decay": SETTINGS.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.epsilon)
    for number in range(len(rates) + 1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        if number == len(rates):
            break
        batch = feed(number + 1)
        logits = model(input_ids=batch.ids.to(device), use_cache=False).logits.float()
        loss = cross_entropy(logits.view(-1, logits.shape[-1]), batch.labels.to(device).view(-1))
        loss.backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None, name
            masters[name].grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters.values(), SETTINGS.max_norm)
        for group in adamw.param_groups:
            group["lr"] = rates[number]
        adamw.step()
        losses.append(float(loss.detach()))
        del logits, loss
    return AdamWRun(
        losses=losses,
        weights={name: master.detach().cpu() for name, master in masters.items()},
        seconds=time.perf_counter() - begin,
    )


def class_of(name: str) -> str:
    """Returns the class of a tensor from its name in a checkpoint."""
    return next(
        (
            kind
            for part, kind in (
                ("norm", "norms"),
                ("bias", "biases"),
                ("embed_tokens", "embedding"),
                ("lm_head", "head"),
                ("self_attn", "attention"),
                ("mlp", "mlp"),
            )
            if part in name
        ),
        "other",
    )


def loss_differences(ours: AdamWRun, reference: AdamWRun) -> dict[str, float]:
    """Returns the largest and the mean relative difference of the losses over all steps."""
    differences = [
        abs(mine - other) / abs(other)
        for mine, other in zip(ours.losses, reference.losses, strict=True)
    ]
    return {"most": max(differences), "mean": sum(differences) / len(differences)}


def classes(
    first: Weights, ours: AdamWRun, reference: AdamWRun, again: AdamWRun
) -> dict[str, Class]:
    """Returns the distances for each class of tensors, and for all tensors under `all`."""

    def distance(names: list[str], one: Weights, other: Weights) -> float:
        return (
            float(sum((one[name].double() - other[name].double()).square().sum() for name in names))
            ** 0.5
        )

    def compared(names: list[str]) -> Class:
        moved = distance(names, reference.weights, first)
        mine, noise = (distance(names, run.weights, reference.weights) for run in (ours, again))
        ratio = mine / noise if noise else float(mine > 0) * sys.float_info.max
        return Class(
            parameters=sum(first[name].numel() for name in names),
            ours=mine / moved,
            noise=noise / moved,
            ratio=ratio,
        )

    kinds: dict[str, list[str]] = {}
    for name in reference.weights:
        kinds.setdefault(class_of(name), []).append(name)
    return {
        **{kind: compared(names) for kind, names in kinds.items()},
        "all": compared(list(reference.weights)),
    }


def failures(losses: dict[str, float], by_class: dict[str, Class]) -> Iterator[str]:
    """Yields a line for each number that exceeds its limit."""
    if not losses["most"] <= LOSS_LIMIT:
        yield f"losses differ by {losses['most']:.2e} of the reference's, more than {LOSS_LIMIT:g}"
    for kind, found in by_class.items():
        if not found.ratio <= NOISE_LIMIT:
            yield (
                f"weights, {kind}: {found.ratio:.2f} times as far from the reference as the"
                f" reference with another attention kernel, more than {NOISE_LIMIT:g}"
            )


def parser() -> options.OneLineParser:
    """Returns the parser for the options of the comparison."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.compare_adamw",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "--model",
        default="qwen2.5-0.5b",
        help=(
            "a Hugging Face folder, a config.json, or a name in the library; weights are random"
            " (default qwen2.5-0.5b)"
        ),
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(__file__).resolve().parent,
        help="text files, read as bytes (default: the sources of this package)",
    )
    parser.add_argument(
        "--policy",
        choices=policies.names(),
        default="overlapped",
        help="the policy that makes our schedule (default overlapped)",
    )
    parser.add_argument("--steps", type=options.whole("--steps"), default=50)
    parser.add_argument("--batch", type=options.whole("--batch"), default=8)
    parser.add_argument("--seq", type=options.whole("--seq"), default=512)
    parser.add_argument(
        "--loss-chunk",
        type=options.whole("--loss-chunk"),
        default=1024,
        help="number of tokens whose logits exist at one time, in our run (default 1024)",
    )
    parser.add_argument(
        "--rate",
        type=options.real("--rate"),
        default=1e-4,
        help=f"learning rate after {WARM_UP_STEPS} steps of linear warm-up (default 1e-4)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    options.add_device(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the comparison, prints it, and returns the exit status."""
    if args.out:
        file_arguments.check_writable(args.out)
    device, model = options.device(args), ModelSpec.load(args.model)
    work = Workload(batch=args.batch, sequence=args.seq, loss_chunk=args.loss_chunk)
    knobs = Knobs(weight_slots=1 if args.policy == "sequential" else 2)
    most = device_bytes(device), host_bytes()
    plan = Plan(
        policy=args.policy,
        hardware="",
        source="",
        device_limit_bytes=most[0],
        host_limit_bytes=most[1],
        model=model,
        workload=work,
        knobs=knobs,
    )
    plan = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    config = config_of(model)
    corpus, _ = open_data(
        DataOptions(data=str(args.data), packing="plain"), work, None, model.vocabulary
    )
    rates = [args.rate * min(1.0, number / WARM_UP_STEPS) for number in range(1, args.steps + 1)]

    def feed(number: int) -> Batch:
        return corpus.step(number)[0]

    drawn = random_weights(0, device)
    first = {
        hub_name(layer.name, tensor.name): drawn(layer.name, tensor.name, tensor.shape).cpu()
        for layer in model.stack.values()
        for tensor in layer.tensors
    }
    runs = {"ours": run_ours(plan, config, feed, rates, device)}
    for name, attention in (("reference", "sdpa"), ("again", "eager")):
        runs[name] = run_plain(config, first, feed, rates, device, attention)
    for name, done in runs.items():
        print(
            f"{name.ljust(10)} loss {done.losses[0]:.4f} .. {done.losses[-1]:.4f} in {args.steps}"
            f" steps, {done.seconds:.1f} s",
            flush=True,
        )
    ours, reference, again = runs.values()
    losses, noise, by_class = (
        loss_differences(ours, reference),
        loss_differences(again, reference),
        classes(first, ours, reference, again),
    )
    print(
        f"losses, relative to the reference: ours differ by {losses['most']:.2e} at most,"
        f" {losses['mean']:.2e} on average; noise {noise['most']:.2e}, {noise['mean']:.2e}"
    )
    print(
        f"{'weights'.ljust(12)}{'parameters':>14}{'ours':>10}{'noise':>10}{'ratio':>8}   distances"
        " divided by how far the reference moved"
    )
    for kind, found in by_class.items():
        print(
            f"{kind.ljust(12)}{found.parameters:>14,}{found.ours:>10.4f}{found.noise:>10.4f}"
            f"{found.ratio:>8.2f}"
        )
    failed = list(failures(losses, by_class))
    print(
        "\n".join(failed)
        or f"passed: losses within {LOSS_LIMIT:g}, weights within {NOISE_LIMIT:g} times the noise"
    )
    if args.out:
        arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
        }
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe(device),
            "arguments": arguments,
            "limits": {"loss": LOSS_LIMIT, "noise": NOISE_LIMIT},
            "losses": {name: done.losses for name, done in runs.items()},
            "seconds": {name: done.seconds for name, done in runs.items()},
            "loss_differences": {"ours": losses, "noise": noise},
            "weights": by_class,
            "failures": failed,
        }
        write_json(args.out, result)
        print(f"wrote {args.out}")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns 0 if ours passes, 1 if not, 2 for a mistake of the user."""
    return run_program("compare_adamw", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
