"""The page's server. It listens on this machine only.

It answers only requests whose Host names this machine. Otherwise another site could reach it with a
name that resolves to 127.0.0.1. It sends only the files of the page, which it has in memory, so a
request's path never opens a file.
"""

from __future__ import annotations

import contextlib
import errno
import io
from typing import Any

from flask import Flask, Response, jsonify, request
from msgspec import json
from werkzeug.exceptions import HTTPException
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from megatrain.experiments.cli.verdict.this_machine import this_machine
from megatrain.experiments.web.files import library_data, page_files
from megatrain.experiments.web.jobs import Jobs, Superseded
from megatrain.experiments.web.question import LARGEST_REQUEST, Question
from megatrain.simulator.base.errors import RunError, UserError

ADDRESS, USUAL_PORT = "127.0.0.1", 8765
_NAMES = (ADDRESS, "localhost")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PARTS = {
    "outlook": "answer",
    "first": "answer",
    "verdict": "answer",
    "advice": "answer",
    "policies": "compared",
}
"""Part of an answer, as the page asks for it -> the kind of job that computes it."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(jobs: Jobs, port: int) -> Flask:
    """Returns the application that answers on `port` with the results of `jobs`."""
    app = Flask(__name__, static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_REQUEST
    files = page_files("served.js")
    library = {**library_data(), "this_machine": _this_machine()}

    @app.before_request
    def refuse_others() -> tuple[Response, int] | None:
        origin = request.headers.get("Origin")
        name = request.host.partition(":")[0]  # a tunnel may end at another port
        if name not in _NAMES or origin not in (None, f"http://{request.host}"):
            error = UserError(
                "request",
                found=origin or request.host,
                allowed=f"http://{ADDRESS}:{port}",
                fix="open that address",
            )
            return _refused(error, 403)
        return None

    @app.after_request
    def with_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response

    @app.get("/")
    @app.get("/<name>")
    def page(name: str = "index.html") -> Response | tuple[Response, int]:
        if name not in files:
            known = f"http://{ADDRESS}:{port}"
            return _refused(
                UserError("address", found="no such page", allowed=known, fix=f"open {known}"), 404
            )
        return Response(
            files[name], content_type=f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        )

    @app.get("/api/library")
    def the_library() -> Response:
        return jsonify(library)

    @app.post("/api/<part>")
    def ask(part: str) -> Response | tuple[Response, int]:
        if part not in _PARTS or request.mimetype != "application/json":
            error = UserError(
                "request",
                found=f"{request.mimetype or 'no type'} to {part}",
                allowed=f"application/json to {', '.join(_PARTS)}",
                fix="ask from the page",
            )
            return _refused(error, 404)
        question, tab, turn = _read(request.get_data())
        answer = jobs.answer(_PARTS[part], part, question, tab, turn)
        return Response(json.encode(answer), content_type="application/json")

    @app.errorhandler(UserError)
    @app.errorhandler(RunError)
    def mistake(error: Exception) -> tuple[Response, int]:
        return _refused(error, 400)

    @app.errorhandler(Superseded)
    def superseded(_: Superseded) -> tuple[Response, int]:
        return _refused(RunError("superseded by a later question"), 409)

    @app.errorhandler(HTTPException)
    def unusual(error: HTTPException) -> tuple[Response, int]:
        found = f"request: {error.name.lower()}"
        if error.code == 413:
            found = f"request: found more than {LARGEST_REQUEST // 2**10} KiB; paste less"
        return _refused(RunError(found), error.code or 500)

    return app


def make(port: int | None) -> tuple[BaseWSGIServer, Jobs]:
    """Returns a server that listens on `port`, and its jobs. The port 0 means any free port.

    Without a port, the server listens on `USUAL_PORT`, or on a free port if that is in use. Raises
    UserError if the port cannot be opened.
    """
    try:
        server = _listening(USUAL_PORT if port is None else port)
    except UserError:
        if port is not None:
            raise
        server = _listening(0)
    jobs = Jobs()
    server.app = make_app(jobs, server.server_port)
    return server, jobs


def _listening(port: int) -> BaseWSGIServer:
    """Returns a server without an application. Raises UserError if the port cannot be opened."""

    class Quiet(WSGIRequestHandler):
        """A handler that does not log each request."""

        def log_request(self, *_: object, **__: object) -> None:
            pass

    def not_yet(*_: object) -> list[bytes]:
        raise AssertionError  # replaced before the first request

    try:
        # werkzeug prints to standard error if the port is in use
        with contextlib.redirect_stderr(io.StringIO()):
            return make_server(ADDRESS, port, not_yet, threaded=True, request_handler=Quiet)
    except (OSError, SystemExit) as error:  # werkzeug exits if the port is in use
        taken = isinstance(error, SystemExit) or error.errno == errno.EADDRINUSE
        raise UserError(
            "--port",
            found=f"{port}, which " + ("is in use" if taken else "may not be used"),
            allowed="a free port, or 0 for any",
            fix="leave --port out",
        ) from None


def _read(body: bytes) -> tuple[Question, str, int]:
    """Returns the question of a request, the id of its tab, and the number of the turn.

    Raises UserError if the request does not have all three.
    """
    try:
        data = json.decode(body)
        tab, turn = data.pop("tab"), data.pop("turn")
        if not (isinstance(tab, str) and len(tab) <= 64 and isinstance(turn, int)):
            raise TypeError
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise UserError(
            "request",
            found="something else",
            allowed="an object with a question, a tab and a turn",
            fix="ask from the page",
        ) from None
    return Question.read(data), tab, turn


def _refused(error: Exception, status: int) -> tuple[Response, int]:
    return jsonify({"error": str(error)}), status


def _this_machine() -> dict[str, Any] | None:
    """Returns this machine's title and memory, or None if it has no known GPU."""
    try:
        found = this_machine()
    except UserError:
        return None
    return {
        "title": found.title,
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
    }
