"""Compares the speed of the command and of planning on this machine with a stored result.

    python -m megatrain.experiments.benchmarks.speed [--stored FILE] [--tolerance 1.25]
        [--write FILE] [CASE ...]

Each case is timed alternately with a fixed piece of Python, the reference. The ratio of the two
processor times depends much less on the machine and its load than seconds do. The output is a table
of the new and the stored ratios. The exit status is 1 if a ratio is more than `--tolerance` times
the stored ratio.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatrain.experiments.cli.program import run_program
from megatrain.experiments.sweep import grid
from megatrain.experiments.sweep.simulated import Simulator, likeness
from megatrain.simulator.base.files import read_json, write_json
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.batch_splits import best_split
from megatrain.simulator.planner.search import candidates, search
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import explain

STORED = Path(__file__).parents[1] / "results" / "speed" / "speed.json"
_REPETITIONS = 3
_CLI = [sys.executable, "-m", "megatrain.experiments.cli"]
Timed = Callable[[], float]
"""A function that does the work of a case and returns its processor time in seconds."""


class SpeedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one run of this command."""

    machine: str
    """Processor, cores and version of Python."""
    date: str
    """Day of the run, as YYYY-MM-DD."""
    ratios: dict[str, float]
    """Case -> its processor time divided by the reference's."""


def reference() -> float:
    """Returns the processor time in seconds of a fixed piece of work. Like planning, it uses
    dictionaries, tuples, a heap and integers.
    """
    start = time.process_time()
    heap: list[tuple[int, int]] = []
    seen: dict[int, tuple[int, int]] = {}
    value = 1
    for number in range(150_000):
        value = value * 48271 % 2147483647
        heapq.heappush(heap, (value, number))
        if number % 2:
            seen[number] = heapq.heappop(heap)
    assert len(seen) == 75_000
    return time.process_time() - start


def _command(*words: str) -> Timed:
    """Returns a function that times a `megatrain` command in its own process, start included."""

    def run() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*_CLI, *words], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


def _here(prepare: Callable[[], Callable[[], object]]) -> Timed:
    """Returns a function that times the work that `prepare` returns, without `prepare` itself."""

    def run() -> float:
        work = prepare()
        gc.collect()
        start = time.process_time()
        work()
        return time.process_time() - start

    return run


def _search() -> Callable[[], object]:
    model, hardware = ModelSpec.load("qwen2.5-14b"), HardwareSpec.load("h200")
    return lambda: search(
        model, hardware, Workload(batch=32, sequence=1024), host_limit=256 * 2**30
    )


def _split(tokens: int) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        model, hardware = ModelSpec.load("qwen2.5-14b"), HardwareSpec.load("h200")
        return lambda: explain(
            best_split(model, hardware, Workload(batch=1, sequence=1024), tokens)[0], hardware
        )

    return prepare


def _explain() -> Callable[[], object]:
    """Returns a function that explains a plan of a dense 120B model (134 layers of Qwen2.5-72B)."""
    config = {
        key: value
        for key, value in ModelSpec.load("qwen2.5-72b").config.items()
        if key not in ("layer_types", "max_window_layers")
    }
    model, hardware = (
        ModelSpec(name="dense", config={**config, "num_hidden_layers": 134}),
        HardwareSpec.load("h200"),
    )
    choice = candidates(model, hardware, Workload(batch=32, sequence=1024), host_limit=2**41)[0]
    return lambda: explain(choice, hardware)


def _sweep() -> Callable[[], object]:
    """Returns a function that simulates 24 plans of a 14B model."""
    hardware = HardwareSpec.load("h200")
    base = Plan(
        policy="overlapped",
        hardware="h200",
        source="qwen2.5-14b",
        model=ModelSpec.load("qwen2.5-14b"),
        workload=Workload(batch=32, sequence=1024),
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=2**39,
    )
    values = {
        "policy": ["k_buffer", "overlapped"],
        "chunk_bytes": ["64MiB", "256MiB"],
        "batch": ["4", "8", "16"],
        "device_memory": ["24GiB", "80GiB"],
    }
    plans = grid.plans(
        base, [dict(grid.axis(name, found, "speed") for name, found in values.items())]
    )
    assert len(plans) == 24

    def simulate() -> None:
        simulator = Simulator(hardware)
        for number, plan in enumerate(sorted(plans, key=likeness)):
            simulator.row(plan, str(number))

    return simulate


CASES: dict[str, Timed] = {
    "megatrain --help": _command("--help"),
    "megatrain train --help": _command("train", "--help"),
    "check 7B": _command("check", "qwen2.5-7b", "--hardware", "h200"),
    "check gpt-oss-120b": _command(
        "check",
        "gpt-oss-120b",
        "--hardware",
        "h200",
        "--host-memory",
        "2TB",
        "--tokens",
        "1B",
        "--gpus",
        "8",
    ),
    "search 14B": _here(_search),
    "plan 14B, 32,768 tokens a step": _here(_split(32768)),
    "plan 14B, 131,072 tokens a step": _here(_split(131072)),
    "explain dense 120B": _here(_explain),
    "sweep 24 plans of 14B": _here(_sweep),
}


def ratio(case: Timed) -> tuple[float, float]:
    """Returns the median over a few repetitions of the processor time of `case` divided by the
    reference's, and the least processor time of `case` in seconds.
    """
    ratios, times = [], []
    for _ in range(_REPETITIONS):
        around = [reference()]
        times.append(case())
        around.append(reference())
        ratios.append(times[-1] / statistics.mean(around))
    return statistics.median(ratios), min(times)


def run(arguments: list[str] | None = None) -> int:
    """Times the cases, prints the table, and returns 1 if one is too slow, else 0."""
    parser = argparse.ArgumentParser(prog="speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"one or more of: {'; '.join(CASES)}"
    )
    parser.add_argument("--stored", type=Path, default=STORED, help="the result to compare with")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1.25,
        help="largest accepted ratio, as a multiple of the stored one (default 1.25)",
    )
    parser.add_argument("--write", type=Path, help="store the result of this run in a file")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"found case {unknown[0]!r}; allowed: {', '.join(CASES)}")
    stored = (
        msgspec.convert(read_json(args.stored), SpeedResult).ratios if args.stored.exists() else {}
    )
    print(f"{'case':34} {'seconds':>8} {'ratio':>8} {'stored':>8} {'change':>7}")
    ratios, slower = {}, []
    for name in args.cases or CASES:
        ratios[name], seconds = ratio(CASES[name])
        change = ratios[name] / stored[name] if name in stored else None
        shown = ("-", "-") if change is None else (f"{stored[name]:.2f}", f"{change - 1:+.0%}")
        print(
            f"{name:34} {seconds:8.3f} {ratios[name]:8.2f} {shown[0]:>8} {shown[1]:>7}", flush=True
        )
        slower += [name] if change is not None and change > args.tolerance else []
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            args.write,
            SpeedResult(
                machine=_machine(),
                date=time.strftime("%Y-%m-%d"),
                ratios={name: round(found, 3) for name, found in ratios.items()},
            ),
        )
    if slower:
        print(f"slower than {args.tolerance:g} times the stored ratio: {', '.join(slower)}")
    return int(bool(slower))


def _machine() -> str:
    """Returns the processor's name, its cores and the version of Python."""
    from megatrain.runtime.host import cores, processor

    return f"{processor()}, {cores()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(run_program("speed", run))
