"""Configuration of the documentation site: `make docs` builds it with Sphinx into `build/docs`.

The source folder is the repository, so that a relative link means the same on the site and in the
repository. The API reference is read from the source files; nothing of megatrain is imported.
"""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING

from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import pending_xref
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils.nodes import Node, document
    from sphinx.application import Sphinx

project = "megatrain"
author = "the megatrain authors"
extensions = [
    "myst_parser",
    "autoapi.extension",
    "sphinx.ext.autodoc",  # used only for its event `autodoc-process-docstring`
]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "examples/README.md",
    "experiments/results/*/README.md",
    "paper_figures/README.md",
]
exclude_patterns = [
    ".*",
    "docs/_templates",
    "build",
    "demo",
    "run",
    "runs",
    "figures",
    "tests",
    "typings",
    "**/__pycache__",
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = [
    "autoapi.python_import_resolution"  # for constants assigned as a tuple: `A, B = 1, 2`
]

html_theme = "furo"
html_title = "megatrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
templates_path = ["_templates"]
highlight_language = "none"  # blocks that name no language are commands and their output
pygments_style = "friendly"
pygments_dark_style = "monokai"

autoapi_dirs = ["typings/megatrain"]  # the packages under their real names
autoapi_follow_symlinks = True
autoapi_python_use_implicit_namespaces = True
autoapi_ignore = [
    "*/megatrain/__init__.py",  # only the version
    "*/megatrain/experiments*",
    "*/megatrain/paper_figures*",
    "*/__pycache__*",
]
autoapi_root = "docs/api"
autoapi_add_toctree_entry = False
autoapi_options = ["members", "undoc-members", "show-inheritance"]
autoapi_template_dir = "docs/_templates/autoapi"
autoapi_own_page_level = "module"


class Markdown(SphinxDirective):
    """A directive whose content is Markdown. With it, docstrings can be Markdown."""

    has_content = True

    def run(self) -> list[Node]:
        document = new_document(self.get_source_info()[0], self.state.document.settings)
        MystParser().parse("\n".join(self.content), document)
        # Otherwise each docstring would keep a document of its own, 1 GB in all.
        for node in document.findall():
            node.document = self.state.document
        return document.children


def _as_markdown(
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Wraps a docstring in the directive `markdown`, and its doctests in code blocks."""
    text = re.sub(
        r"(?m)(?:^>>> .*\n)(?:.+\n?)*",
        lambda match: f"```pycon\n{match[0].rstrip()}\n```\n",
        "\n".join(lines),
    )
    lines[:] = [".. markdown::", "", *("   " + line for line in text.splitlines()), ""]


def _unlink_builtins(_app: Sphinx, tree: document) -> None:
    """Removes links of builtin types such as `bytes`: Sphinx would link a field of that name."""
    for node in list(tree.findall(pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node["reftarget"]):
            node.replace_self(node.children)


def setup(app: Sphinx) -> None:
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", _as_markdown)
    app.connect("doctree-read", _unlink_builtins)
