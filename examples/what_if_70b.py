"""Predicts on which machines, and with how much host memory, 70B can be fine-tuned, and how fast.

    python examples/what_if_70b.py

It needs no GPU and does not import PyTorch. It takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from megatrain.simulator import HardwareSpec, ModelSpec, Workload, search

MACHINES = ("rtx4090", "a100-80-sxm", "h200")
HOST_GIB = (512, 1024, 1536)


def what_if(
    model: str = "llama-3.1-70b",
    machines: Sequence[str] = MACHINES,
    host_gib: Sequence[int] = HOST_GIB,
    batch: int = 4,
    sequence: int = 1024,
) -> pd.DataFrame:
    """Returns one row for each machine and size of host memory, with the fastest plan's numbers.

    The column `tokens_per_second` is NaN where no plan fits. `host_gib` is the host memory of the
    machine, and `device_gib` and `host_peak_gib` are the predicted peaks. All are in GiB.
    """
    spec = ModelSpec.load(model)
    workload = Workload(batch=batch, sequence=sequence, documents=True, short_recompute=True)
    rows = []
    for name in machines:
        for size in host_gib:
            limit = size * 2**30
            best = search(
                spec, HardwareSpec.load(name), workload, host_limit=limit, policies=["overlapped"]
            )[0]
            speed = workload.step_tokens / best.step_seconds
            rows.append(
                {
                    "machine": name,
                    "host_gib": size,
                    "fits": best.feasible,
                    "tokens_per_second": speed if best.feasible else float("nan"),
                    "device_gib": best.account.device_peak_bytes / 2**30,
                    "host_peak_gib": best.account.host_peak_bytes / 2**30,
                }
            )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    table = what_if()
    print(table.pivot(index="machine", columns="host_gib", values="tokens_per_second").round(0))
    print(table.round(1).to_string(index=False))
