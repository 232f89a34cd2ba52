"""Times the simulator on this machine: lowering, evaluator and engine, for one model with 1, 4 and
16 micro-batches per step.

    python -m megatrain.experiments.benchmarks.simulator_speed [MODEL [POLICY]]

Times are the CPU time of one core, the least of several repetitions. The last column includes
building a Timeline with its spans and digest.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import run_program
from megatrain.simulator import policies
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.costs import Replayed, cost_model
from megatrain.simulator.engine import discrete_event as engine
from megatrain.simulator.engine import evaluator
from megatrain.simulator.hardware.cost_table import HostMemorySpec
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Plan

_REPETITIONS = 5
_MICRO_BATCHES = (1, 4, 16)
_MEMORY = HostMemorySpec(gb_per_s=220.0)  # of a host with 64 cores
Result = TypeVar("Result")


def seconds(work: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the least CPU time of several repetitions in seconds, and `work`'s last result."""
    times = []
    for _ in range(_REPETITIONS):
        gc.collect()
        start = time.process_time()
        result = work()
        times.append(time.process_time() - start)
    return min(times), result


def row(plan: Plan, hardware: HardwareSpec) -> list[str]:
    """Returns the row of a plan: its micro-batches, its ops, and the speed of each part."""
    lowering, schedule = seconds(lambda: policies.lower_uncached(plan))
    ops = len(schedule.ops)
    compiling, _ = seconds(
        lambda: (fresh := msgspec.structs.replace(schedule)).compiled and fresh.sizes
    )
    checking, _ = seconds(schedule.check)
    shared = cost_model(hardware, plan.model, plan.workload)
    alone = Replayed(evaluator.evaluate(schedule, shared))
    static, _ = seconds(lambda: evaluator.uncontended_makespan_ns(schedule, shared))
    free, _ = seconds(lambda: engine.makespan_ns(schedule, alone))
    together, _ = seconds(lambda: engine.makespan_ns(schedule, shared))
    timeline, _ = seconds(lambda: engine.simulate(msgspec.structs.replace(schedule), shared))
    per_op = [f"{1e6 * spent / ops:.2f}" for spent in (lowering, compiling, checking)]
    return [
        str(plan.workload.accumulation),
        str(ops),
        *per_op,
        *(f"{ops / spent / 1e6:.2f}" for spent in (static, free, together, timeline)),
    ]


def main() -> int:
    """Parses the arguments, prints the table, and returns the exit status."""
    name = "python -m megatrain.experiments.benchmarks.simulator_speed"
    parser = OneLineParser(prog=name, description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen2.5-14b", metavar="MODEL")
    parser.add_argument("policy", nargs="?", default="double_buffer", metavar="POLICY")

    def run() -> int:
        args = parser.parse_args()
        print_speeds(args.model, args.policy)
        return 0

    return run_program(name, run)


def print_speeds(model: str, policy: str) -> None:
    """Prints the table for a model and a policy."""
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), host_memory=_MEMORY)
    head = [
        "micro-batches",
        "ops",
        "lower us/op",
        "compile us/op",
        "check us/op",
        "evaluator M ops/s",
        "engine, free",
        "engine, contended",
        "engine, with timeline and digest",
    ]
    rows = [head]
    for accumulation in _MICRO_BATCHES:
        plan = Plan(
            policy=policy,
            hardware="h200",
            source=model,
            device_limit_bytes=hardware.device_bytes,
            host_limit_bytes=hardware.host_bytes,
            model=ModelSpec.load(model),
            workload=Workload(batch=8, sequence=1024, accumulation=accumulation),
            knobs=Knobs(),
        )
        rows.append(row(plan, hardware))
    print("\n".join([f"{model}, {policy}, 64 MiB copies", *align(rows, left=())]))


if __name__ == "__main__":
    sys.exit(main())
