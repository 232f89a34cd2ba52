"""Figure 3: the pipeline's timeline of one step, as simulated above as measured. `python -m megatrain.paper_figures.figure3 --out DIR`

The paper draws its schedule by hand. This is the same schedule (policy `double_buffer`) on one H200, from the stored run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatrain.simulator.draw import timeline_png
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json
from megatrain.simulator.plan import Plan
from megatrain.simulator.timeline import Timeline

RUN = Path(__file__).parents[1] / "experiments" / "results" / "h200-qwen2.5-3b"


def figure(run: Path, out: Path) -> Path:
    """Draws the timelines stored in `run` into `out`; returns the picture. Raises UserError where a file of the run is missing or malformed."""
    plan, machine = Plan.load(run / "plan.toml"), read_json(run / "environment.json")
    timelines = [Timeline.load(run / f"{name}.json") for name in ("predicted", "measured")]
    work = plan.workload
    title = f"Figure 3: one step of {plan.model.name}, policy {plan.policy}"
    picture = out / "figure3.png"
    timeline_png(
        picture, timelines, title, f"{machine['device']}, {machine['cores']} cores; {work.accumulation} x {work.batch} x {work.sequence} tokens, {work.dtype}"
    )
    return picture


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the picture")
    try:
        print(figure(RUN, parser.parse_args().out))
    except UserError as error:
        print(f"figure3: {error}; or make the run again with {RUN / 'run.sh'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
