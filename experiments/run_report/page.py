"""Writes a run as one HTML file that works offline. Text and tables are plain HTML. Scripts draw
the interactive pictures.

Style, scripts and data are inline, so nothing is fetched. The data are JSON in a script element.
They contain ids of ops, kinds, classes and numbers, but no text of users, which could close the
element. Text of users is escaped and shown in the tables.
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
    """Writes the page of `run` to `path` in one atomic operation. Raises UserError if `path` cannot
    be written, or if a file of the run has unexpected content.
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
