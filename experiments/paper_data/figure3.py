"""Figure 3: the paper's schedule, simulated with the costs that were measured on the H200 of our
stored run. The simulation takes about 2 s.

Memory limits and workload are those of our run, so the three timelines can be compared. The paper's
K = 4 does not fit these limits. K is the largest of 4, 2 and 1 that fits.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import PAPER, PAPER_KNOBS
from megatrain.experiments.paper_data.stored import RESULTS
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate as simulate_schedule
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

RUN = "h200-qwen2.5-7b-24GiB"


def simulate() -> Any:
    """Returns the data of `Figure3Data` in paper_figures."""
    stored, hardware = (
        Plan.load(RESULTS / RUN / "plan.toml"),
        HardwareSpec.load(str(RESULTS / RUN / "hardware.toml")),
    )
    costs = cost_model(hardware, stored.model, stored.workload)
    for interval in (4, 2, 1):
        knobs = msgspec.structs.replace(PAPER_KNOBS, checkpoint_interval=interval)
        plan = msgspec.structs.replace(
            stored, policy=PAPER, knobs=knobs, digest="", prediction=None
        )
        schedule = lower(plan)
        account = plan_account(plan, schedule, costs)
        if account.fits:
            break
    timeline = msgspec.structs.replace(
        simulate_schedule(schedule, costs), name="paper's schedule, simulated"
    )
    return {
        "run": RUN,
        "interval": plan.knobs.checkpoint_interval,
        "device_gib": account.device_peak_bytes / 2**30,
        "host_gib": account.host_peak_bytes / 2**30,
        "timeline": msgspec.to_builtins(timeline),
    }
