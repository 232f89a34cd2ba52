"""Show the verdict of `check` on a page in the browser, and update it with every change.

Only this machine can open the page. --static writes the page as a folder of files, which need no
server, with answers for the library's models and machines.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatrain.experiments.cli import file_arguments, options
from megatrain.simulator.base.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port",
        type=options.whole("--port", 0, 65535),
        metavar="N",
        help="port to listen on (default 8765, or a free one if it is in use; 0 for a free one)",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--static", type=Path, metavar="DIR", help="write the page as files to a new folder"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="M",
        help="with --static: the models of the library to include (default: all)",
    )
    parser.add_argument(
        "--machines",
        nargs="+",
        metavar="H",
        help="with --static: the machines of the library to include (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    if args.static is not None:
        return _write(args)
    for name in ("models", "machines"):
        if getattr(args, name) is not None:
            raise UserError(
                f"--{name}",
                found="no --static",
                allowed=f"--{name} with --static DIR",
                fix="add --static DIR, or choose on the page",
            )
    return _serve(args)


def _write(args: argparse.Namespace) -> int:
    from megatrain.experiments.web.static_site import chosen, write_site

    options_given = {"--port": args.port is not None, "--no-browser": args.no_browser}
    for option, given in options_given.items():
        if given:
            raise UserError(
                option,
                found="--static as well",
                allowed="one of the two",
                fix=f"leave {option} out",
            )
    file_arguments.check_new(args.static)
    models, machines = chosen(args.models, args.machines)
    size = write_site(args.static, models, machines)
    print(f"wrote {args.static}, {size}: open {args.static / 'index.html'} in a browser")
    return 0


def _has_screen() -> bool:
    """Returns whether a browser can open a window.

    A browser in the terminal must not be opened: the server starts only after that browser ends.
    """
    names = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in names)


def _serve(args: argparse.Namespace) -> int:
    import webbrowser

    try:
        import flask  # noqa: F401
    except ImportError:
        raise UserError(
            "serve",
            found="no flask, which serves the page",
            allowed="flask 3 or newer",
            fix="run `pip install flask`",
        ) from None
    from megatrain.experiments.web.server import ADDRESS, make

    server, jobs = make(args.port)
    address = f"http://{ADDRESS}:{server.server_port}"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if not args.no_browser and _has_screen():
        webbrowser.open(address)
    try:
        server.serve_forever()  # returns after Ctrl-C or another signal
    finally:
        jobs.close()
        server.server_close()
    return 0
