"""Whether a model fits a machine, how fast it trains there, and what binds."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatrain.experiments import options
from megatrain.simulator.errors import UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.planner import Choice


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b")
    options.add_hardware(parser)
    options.add_policy(parser)
    parser.add_argument("--cores", type=options.whole("--cores"), help="processor cores of the host; the CPU optimizer's rate scales with them")
    options.add_workload(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")


def choices(args: argparse.Namespace, hardware: HardwareSpec, source: str, hardware_name: str) -> list[Choice]:
    """The best plan of each policy that `args.policy` names, best first. `all`: other systems too; `best`: only what the runtime executes."""
    from megatrain.simulator import policies
    from megatrain.simulator.planner import search
    from megatrain.simulator.specs import ModelSpec

    named = {"best": policies.contenders(), "all": [*policies.names(), *policies.peers()]}.get(args.policy, [args.policy])
    model = ModelSpec.load(args.model)
    return search(
        model, hardware, options.workload(args), source=source, hardware_name=hardware_name,
        device_limit=args.device_memory, host_limit=args.host_memory, policies=named,
    )  # fmt: skip


def as_json(choice: Choice, hardware: HardwareSpec) -> dict[str, object]:
    """What `--json` prints of a plan; sizes in bytes, times in seconds."""
    import msgspec

    from megatrain.simulator.metrics import mfu, tflops_6n, tokens_per_second
    from megatrain.simulator.policies import is_prediction_only

    plan, account = choice.plan, choice.account
    peer = is_prediction_only(plan.policy)
    peak = hardware.peak_tflops.get(plan.workload.dtype)
    speed = (plan.model, plan.workload, choice.step_seconds)
    return {
        "feasible": choice.feasible, "binding": choice.bounds.binding if choice.feasible else account.binding, "policy": plan.policy,
        "step_seconds": choice.step_seconds, "tokens_per_second": tokens_per_second(plan.workload, choice.step_seconds), "tflops_6n": tflops_6n(*speed),
        "mfu": mfu(*speed, peak) if peak else None, "device_peak_bytes": account.device_peak_bytes, "device_limit_bytes": account.device_limit_bytes,
        "host_peak_bytes": account.host_peak_bytes, "host_limit_bytes": account.host_limit_bytes, "pools": dict(account.pools),
        "lower_bound_seconds": choice.bounds.lower_bound_ns / 1e9, "advice": account.advice, "extrapolated": list(choice.extrapolated),
        "prediction_only": peer, "knobs": {} if peer else msgspec.to_builtins(plan.knobs),
        "uncertainty": None if hardware.costs else hardware.uncertainty,
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    import msgspec

    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.policies import is_prediction_only

    hardware = HardwareSpec.load(args.hardware)
    if args.cores and hardware.costs is not None and args.cores != hardware.cores:
        raise UserError(
            "--cores", found=args.cores, allowed=f"{hardware.cores}, with which {hardware.name} was measured", fix="calibrate on that machine, or leave it out"
        )
    if args.cores:
        share = args.cores / hardware.cores
        hardware = msgspec.structs.replace(
            hardware, cores=args.cores, cpu_update_per_s=hardware.cpu_update_per_s * share, cpu_adam_per_s=hardware.cpu_adam_per_s * share
        )
    found = choices(args, hardware, args.model, args.hardware)
    if args.json:
        reports = [as_json(choice, hardware) for choice in found]
        print(json.dumps({"policies": reports} if args.policy == "all" else reports[0]))
    elif args.policy == "all":
        print(table(found))
    else:
        print(verdict(found[0], hardware))
    runnable = [choice for choice in found if not is_prediction_only(choice.plan.policy)] or found
    return 0 if runnable[0].feasible else 2


def limits(choice: Choice) -> str:
    """What the plan needs and may use, in each place."""
    from megatrain.simulator.units import format_bytes

    account = choice.account
    return (
        f"{format_bytes(account.device_limit_bytes)} of device memory (the nearest plan needs {format_bytes(account.device_peak_bytes)}) "
        f"and {format_bytes(account.host_limit_bytes)} of host memory (it needs {format_bytes(account.host_peak_bytes)})"
    )


def parameters(count: int) -> str:
    """A model's size as people say it.

    >>> parameters(7_615_616_512), parameters(57_632)
    ('7.616 G parameters', '57.63 k parameters')
    """
    unit, factor = next((unit, factor) for unit, factor in (("G ", 1e9), ("M ", 1e6), ("k ", 1e3), ("", 1)) if count >= factor or factor == 1)
    return f"{count / factor:.4g} {unit}parameters" if unit else f"{count} parameters"


def table(found: list[Choice]) -> str:
    """Every policy, a line each; other systems marked."""
    from megatrain.simulator.metrics import tokens_per_second
    from megatrain.simulator.policies import is_prediction_only
    from megatrain.simulator.units import format_bytes, format_seconds

    lines = [f"{'policy':<15} {'step':>11} {'tokens/s':>10} {'device':>11} {'host':>11}  binds, or lacks"]
    for choice in found:
        note = " (another system, prediction only)" if is_prediction_only(choice.plan.policy) else ""
        memory = [format_bytes(size) for size in (choice.account.device_peak_bytes, choice.account.host_peak_bytes)]
        if choice.feasible:
            speed = f"{format_seconds(choice.step_seconds):>11} {tokens_per_second(choice.plan.workload, choice.step_seconds):>10,.0f}"
            lines.append(f"{choice.plan.policy:<15} {speed} {memory[0]:>11} {memory[1]:>11}  {choice.bounds.binding}{note}")
        else:
            lines.append(
                f"{choice.plan.policy:<15} {'does not fit':>22} {memory[0]:>11} {memory[1]:>11}  {choice.account.binding}{note}; {choice.account.advice}"
            )
    return "\n".join(lines)


def verdict(choice: Choice, hardware: HardwareSpec) -> str:
    """One plan in full: does it fit, how fast, what fills the memory."""
    from megatrain.simulator.metrics import tflops_6n, tokens_per_second
    from megatrain.simulator.policies import is_prediction_only
    from megatrain.simulator.units import format_bytes, format_seconds

    plan, account = choice.plan, choice.account
    work = plan.workload
    knobs = ", ".join(f"{field} {getattr(plan.knobs, field)}" for field in plan.knobs.__struct_fields__ if field != "chunk_bytes")
    setting = "another system, prediction only" if is_prediction_only(plan.policy) else f"{knobs}, copies of {format_bytes(plan.knobs.chunk_bytes)}"
    lines = [
        f"{plan.model.name} ({parameters(plan.model.parameters)}) on {hardware.name}, {work.accumulation} x {work.batch} x {work.sequence} tokens, {work.dtype}",
        f"{'fits' if choice.feasible else 'DOES NOT FIT'} with policy {plan.policy}: {setting}",
    ]
    if choice.feasible:
        lines.append(
            f"step {format_seconds(choice.step_seconds)}, {tokens_per_second(work, choice.step_seconds):,.0f} tokens/s, "
            f"{tflops_6n(plan.model, work, choice.step_seconds):.3g} TFLOPS (6N); the {choice.bounds.binding} lane has the most work, "
            f"no order of these ops beats {format_seconds(choice.bounds.lower_bound_ns / 1e9)}"
        )
    else:
        lines.append(f"{account.binding} binds: {account.advice}")
    for place, peak, limit in (("device", account.device_peak_bytes, account.device_limit_bytes), ("host", account.host_peak_bytes, account.host_limit_bytes)):
        filled = min(round(30 * peak / limit), 30)
        lines.append(f"{place:<7}[{'#' * filled}{'.' * (30 - filled)}] {format_bytes(peak)} of {format_bytes(limit)}")
        lines += [
            f"    {pool.partition('.')[2]:<22}{format_bytes(bytes_):>12}"
            for pool, bytes_ in account.pools.items()
            if pool.startswith(place) and bytes_ >= peak / 1000
        ]
    source = f"measured {hardware.costs.date}" if hardware.costs else "not measured: from datasheet rates"
    if choice.feasible and not hardware.costs:
        low, high = (format_seconds(choice.step_seconds * (1 + sign * hardware.uncertainty)) for sign in (-1, 1))
        source += f", so a step may take {low} to {high}"
    outside = "outside what was measured" if hardware.costs else "beyond the copies that were measured"
    lines.append(f"costs: {source}" + (f"; {outside}: {', '.join(choice.extrapolated)}" if choice.extrapolated else ""))
    return "\n".join(lines)
