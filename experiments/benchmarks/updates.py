"""Times the optimizer's update of each state format, on the host's threads and on a GPU.

    python -m megatrain.experiments.benchmarks.updates [--threads 1,8,16] [--gpu-parameters N]
        [--states exact,master24,bf16-sr] [--seconds S]

Weights and gradients are bf16. A row has the median and the maximum of the parameters updated per
second over several repetitions. The last column has the bytes of state and gradients that are read
and written per second at the maximum. The host updates chunks of 2^22 parameters. The GPU updates
all N parameters at once (0 for no GPU).
"""

from __future__ import annotations

import statistics
import sys

import torch

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import run_program
from megatrain.runtime.calibration.cpu_adam_bench import ChunkUpdates
from megatrain.runtime.optimizer import adamw, blockwise
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.state_format import BLOCK, EXACT, FORMATS, PLANE_BYTES

_HOST_PARAMETERS, _CHUNK = 2**26, 2**22
_REPETITIONS = 7


def touched_bytes(state: str) -> float:
    """Returns the bytes per parameter that an update in this format reads and writes."""
    planes = FORMATS[state]
    low = PLANE_BYTES[planes.low] if planes.low else 0
    return 2 * (2 + low + 2 * PLANE_BYTES[planes.moments]) + 2


def on_host(state: str, threads: int, seconds: float) -> list[float]:
    """Returns the parameters that `threads` threads update per second, for each repetition."""
    chunks = ChunkUpdates(_HOST_PARAMETERS, torch.bfloat16, threads, state)
    try:
        kind = "cpu_update" if state == EXACT else f"cpu_update:{state}"
        durations = chunks.measure(8 * seconds)[kind, _CHUNK]
    finally:
        chunks.close()
    return [_CHUNK / duration * 1e9 for duration in durations]


def on_gpu(state: str, count: int) -> list[float]:
    """Returns the parameters that the GPU updates per second, for each repetition. It updates
    `count` parameters at once.
    """
    planes, gpu = FORMATS[state], torch.device("cuda")
    weights, gradient = (
        torch.empty(count, dtype=torch.bfloat16, device=gpu).uniform_(-0.02, 0.02) for _ in range(2)
    )
    low = None
    if planes.low:
        dtype = torch.int16 if planes.low == "int16" else torch.int8
        low = torch.zeros(count, dtype=dtype, device=gpu)
    coded = planes.moments == "block8"
    moments = torch.zeros(
        2,
        blockwise.records(count) if coded else count,
        dtype=torch.uint8 if coded else torch.float32,
        device=gpu,
    )
    clip, times = torch.ones((), device=gpu), []
    for number in range(1, _REPETITIONS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        (blockwise if coded else adamw).update(
            weights, low, moments, gradient, settings=AdamW(), rate=1e-5, number=number, clip=clip
        )
        end.record()
        end.synchronize()
        if number > 2:
            times.append(start.elapsed_time(end) / 1000)
    return [count / time for time in times]


def main() -> int:
    """Parses the options, prints the table, and returns the exit status."""
    parser = OneLineParser(prog="updates", description=__doc__)
    parser.add_argument("--threads", default="1,2", help="numbers of threads of the host")
    parser.add_argument("--gpu-parameters", type=float, default=0.0)
    parser.add_argument("--states", default=",".join(FORMATS))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of the host")
    args = parser.parse_args()
    print(f"{'format':10}{'place':>14}{'G parameters/s':>16}{'best':>9}{'GB/s':>9}")
    for state in args.states.split(","):
        rows = [
            (f"{threads} threads", on_host(state, int(threads), args.seconds))
            for threads in args.threads.split(",")
            if threads
        ]
        if args.gpu_parameters:
            rows.append(("GPU", on_gpu(state, int(args.gpu_parameters) // BLOCK * BLOCK)))
        for place, rates in rows:
            usual, best = statistics.median(rates) / 1e9, max(rates) / 1e9
            gigabytes = best * touched_bytes(state)
            print(f"{state:10}{place:>14}{usual:16.3f}{best:9.3f}{gigabytes:9.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("updates", main))
