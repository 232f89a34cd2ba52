"""The files of the page, which the server and the static site share."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from megatrain.simulator.hardware import machine as machines
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import optimizer
from megatrain.simulator.model.specs import ModelSpec, library
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.policies import names, peers

_OWN, _SHARED = "megatrain.experiments.web", "megatrain.experiments.run_report"
_FILES = {
    "index.html": (_OWN, "page.html"),
    "page.css": (_OWN, "page.css"),
    "axes.js": (_SHARED, "axes.js"),
    "view.js": (_SHARED, "view.js"),
    "timeline.js": (_SHARED, "timeline.js"),
    "state.js": (_OWN, "state.js"),
    "show.js": (_OWN, "show.js"),
    "page.js": (_OWN, "page.js"),
}
"""Name on the page -> package and name of the file."""


def page_files(source: str) -> dict[str, str]:
    """Returns name -> text for each file of the page.

    `source` is the script that gets the answers: `served.js` asks a server, and `stored.js` reads
    the files of a static site.
    """
    chosen = {**_FILES, "source.js": (_OWN, source)}
    return {
        name: (files(package) / file).read_text(encoding="utf-8")
        for name, (package, file) in chosen.items()
    }


def library_data(
    models: list[str] | None = None, hardware: list[str] | None = None
) -> dict[str, Any]:
    """Returns the choices of the page's fields: models and machines, the smallest first, policies,
    state formats and optimizers. By default, it has all models and machines of the library.
    """
    specs = [ModelSpec.load(str(path)) for name, path in library().items() if _in(name, models)]
    found = [HardwareSpec.of_library(name) for name in machines.library() if _in(name, hardware)]
    return {
        "models": [
            {"name": spec.name, "parameters": spec.parameters}
            for spec in sorted(specs, key=lambda spec: spec.parameters)
        ],
        "machines": [
            {
                "name": spec.name,
                "title": spec.title or spec.name,
                "device_bytes": spec.device_bytes,
                "host_bytes": spec.host_bytes,
                "unified": spec.unified,
            }
            for spec in sorted(found, key=lambda spec: (spec.device_bytes, spec.name))
        ],
        "policies": {"own": names(), "others": peers()},
        "states": [{"name": state.name, "what": state.what} for state in FORMATS.values()],
        "optimizers": optimizer.registered(),
    }


def _in(name: str, chosen: list[str] | None) -> bool:
    return chosen is None or name in chosen
