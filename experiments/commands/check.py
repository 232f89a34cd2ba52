"""Whether a model fits a machine, how fast it trains there, what binds, and what would help."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatrain.experiments import options
from megatrain.experiments.uncollected import uncollected
from megatrain.simulator.errors import UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.planner import Choice
    from megatrain.simulator.verdict import Verdict


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b")
    options.add_hardware(parser)
    options.add_policy(parser)
    parser.add_argument("--cores", type=options.whole("--cores"), help="processor cores of the host; the CPU optimizer's rate scales with them")
    options.add_workload(parser)
    options.add_step_tokens(parser)
    parser.add_argument("--tokens", type=options.count("--tokens"), metavar="N", help="also days and energy of training on so many tokens, e.g. 1B")
    parser.add_argument("--gpus", type=options.whole("--gpus"), default=1, metavar="N", help="also a first estimate for so many GPUs of one host")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")


def policies(named: str) -> list[str]:
    """What `--policy` stands for. `best`: what the runtime executes and may be the fastest; `all`: yardsticks and other systems too."""
    from megatrain.simulator.policies import contenders, names, peers

    return {"best": contenders(), "all": [*names(), *peers()]}.get(named, [named])


def choices(args: argparse.Namespace, hardware: HardwareSpec, source: str, hardware_name: str) -> list[Choice]:
    """The best plan of each policy that `args.policy` names, best first; of the fastest split into micro-batches where only a step's tokens are given."""
    from megatrain.simulator.planner import candidates
    from megatrain.simulator.specs import ModelSpec

    model = ModelSpec.load(args.model)
    work, limits = options.workload(args, model), {"device_limit": args.device_memory, "host_limit": args.host_memory}
    step_tokens = getattr(args, "tokens_per_step", None)
    if step_tokens is None:
        return candidates(model, hardware, work, source=source, hardware_name=hardware_name, policies=policies(args.policy), **limits)
    from megatrain.simulator.splits import best_split

    if work.accumulation > 1:
        raise UserError("--tokens-per-step", found="--accumulation beside it", allowed="one of them", fix="leave --accumulation and --batch out")
    return best_split(model, hardware, work, step_tokens, source=source, hardware_name=hardware_name, policies=policies(args.policy), **limits)


def as_json(verdict: Verdict) -> dict[str, object]:
    """What `--json` prints: every field of the verdict; sizes in bytes, times in seconds."""
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(verdict)
    return found


def with_cores(hardware: HardwareSpec, cores: int | None) -> HardwareSpec:
    """`hardware` with another number of cores, and the host's optimizers faster or slower in proportion. Raises UserError where it was measured."""
    import msgspec

    if not cores:
        return hardware
    if hardware.costs is not None and cores != hardware.cores:
        raise UserError(
            "--cores", found=cores, allowed=f"{hardware.cores}, with which {hardware.name} was measured", fix="calibrate on that machine, or leave it out"
        )
    share = cores / hardware.cores
    return msgspec.structs.replace(
        hardware, cores=cores, cpu_update_per_s=hardware.cpu_update_per_s * share, cpu_adam_per_s=hardware.cpu_adam_per_s * share
    )  # fmt: skip


@uncollected()
def run(args: argparse.Namespace) -> int:
    from megatrain.experiments import report
    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.several import check_gpus
    from megatrain.simulator.verdict import brief, in_full

    hardware = with_cores(HardwareSpec.load(args.hardware), args.cores)
    check_gpus(args.gpus, hardware)
    if args.policy == "all" and args.gpus != 1:
        raise UserError("--gpus", found=f"{args.gpus} with --policy all", allowed="one policy, or best", fix="name a policy, or leave --gpus out")
    found = choices(args, hardware, args.model, args.hardware)
    if args.policy == "all":
        verdicts = [brief(choice, hardware, tokens=args.tokens) for choice in found]
        print(json.dumps({"policies": [as_json(verdict) for verdict in verdicts]}) if args.json else report.table(verdicts))
        own = [verdict for verdict in verdicts if not verdict.prediction_only]
        return 0 if own[0].feasible else 2
    verdict = in_full(found[0], hardware, policies(args.policy), gpus=args.gpus, tokens=args.tokens)
    print(json.dumps(as_json(verdict)) if args.json else report.text(verdict))
    return 0 if verdict.feasible else 2
