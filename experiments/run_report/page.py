"""Writes a run as one HTML file that works offline. Text and tables are plain HTML, and scripts
draw the pictures that can be zoomed and hovered.

Nothing is fetched: style, scripts and data are inline. The data are JSON in a script element. They
hold ids of ops, kinds, classes and numbers, but no text that a user wrote, which could close the
element. Text that a user wrote is escaped and shown in the tables.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

import msgspec

from megatrain.experiments.run_report import sections, training_sections
from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.experiments.run_report.data import pictures
from megatrain.simulator.base.files import read_text, write_text

_SCRIPTS = ("axes.js", "view.js", "timeline.js", "memory.js", "training.js", "page.js")


def write_page(run: ComparedRun, path: Path) -> None:
    """Writes the page of `run` to `path`, whole or not at all. Raises UserError if `path` cannot be
    written, or if a file of the run is not as the command writes it.
    """
    here = Path(__file__).parent
    data_json = msgspec.json.encode(pictures(run)).decode()
    text = Template(read_text(here / "page.html")).substitute(
        title=escape(sections.title(run)),
        heading=sections.heading(run),
        figures=sections.figures(run),
        lead=sections.lead(run),
        curves=training_sections.curves(run),
        evaluations=training_sections.evaluations(run),
        data=training_sections.data(run),
        samples=training_sections.samples(run),
        plan=sections.plan(run),
        errors=sections.errors(run),
        memory=sections.memory(run),
        machine=sections.machine(run),
        style=read_text(here / "page.css"),
        data_json=data_json,
        script="\n".join(read_text(here / name) for name in _SCRIPTS),
    )
    write_text(path, text)
