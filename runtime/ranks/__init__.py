"""Ranks: the processes that train together on several GPUs, one for each GPU.

`torchrun` starts them, on one host or on several. They communicate through `torch.distributed`:
with gloo on the CPU and with NCCL between GPUs.

In a step, an op waits at most `TIMEOUT_S` seconds for other ranks, and on GPUs up to
`NEW_TIMEOUT_S` seconds in the first steps. Between steps, only rank 0 reads and writes the run's
files. The other ranks wait for its messages as long as its process runs. Every wait ends early when
a rank has ended or has reported why it stops.

* `joining`: how ranks find each other, and agree on what must be the same
* `ranks`: what they exchange, and how they notice that one is lost
* `rank_board`: where a rank shows the others what it does
* `board_mirror`: copies of boards on other hosts
"""

from megatrain.runtime.ranks.joining import (
    WithoutPlan,
    check_started,
    identity,
    joined,
    launcher,
    refuse_without_ranks,
    started_ranks,
)
from megatrain.runtime.ranks.ranks import RankLost, Ranks

__all__ = [
    "RankLost",
    "Ranks",
    "WithoutPlan",
    "check_started",
    "identity",
    "joined",
    "launcher",
    "refuse_without_ranks",
    "started_ranks",
]
