"""Tests of `megatrain serve` without a browser: answers, refusals, and a static site's files."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.verdict import from_options
from megatrain.experiments.files.hardware_file import write_shared
from megatrain.experiments.web import static_site
from megatrain.experiments.web.answer import answer
from megatrain.experiments.web.files import library_data
from megatrain.experiments.web.jobs import Jobs, Superseded
from megatrain.experiments.web.question import Question
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import library
from megatrain.simulator.model.state_format import FORMATS

if TYPE_CHECKING:
    from werkzeug.test import TestResponse

ROOT = Path(__file__).parents[3]
HERE = "http://127.0.0.1:8765"
SMALL = {"model": "qwen2.5-0.5b", "hardware": "rtx4090", "batch": "1", "seq": "256"}
CHECK = ["qwen2.5-0.5b", "--hardware", "rtx4090", "--batch", "1", "--seq", "256"]

Ask = Callable[..., "TestResponse"]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    found = Jobs()
    yield found
    found.close()


@pytest.fixture(scope="module")
def ask(jobs: Jobs) -> Ask:
    """Returns a function that sends a question to the server and returns the response."""
    pytest.importorskip("flask")
    from megatrain.experiments.web.server import make_app

    client = make_app(jobs, 8765).test_client()
    turns = iter(range(1, 1000))

    def send(part: str, question: dict[str, Any], **options: Any) -> TestResponse:
        data = {**question, "tab": "test", "turn": next(turns)}
        return client.post(f"/api/{part}", base_url=HERE, json=data, **options)

    return send


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Returns what `megatrain check --json` prints."""
    capsys.readouterr()
    assert cli.main(["check", *words, "--json"]) in (0, 3)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_is_what_check_prints(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    first, full = ask("verdict", SMALL).json, ask("advice", SMALL).json
    expected = checked(capsys, *CHECK, "--tokens", "1B")
    assert full["verdict"] == expected
    limits = ("longest_context", "longest_context_in_pieces", "largest_batch")
    later = {"advice": [], "one_more_gib": [], **dict.fromkeys(limits)}
    assert first["verdict"] == {**expected, **later}
    assert first["command"] == "megatrain check " + " ".join(CHECK)
    assert first["shown"]["answer"] == "YES"
    assert first["shown"]["speed"] == f"{expected['tokens_per_second']:,.0f}"
    shown = [entry for entry in expected["advice"] if not entry["compressed"]]
    assert len(full["shown"]["advice"]) == len(shown) > 0
    timeline = first["timeline"]
    assert 0 < max(timeline["end"]) / 1e6 <= expected["step_seconds"] + 1e-6  # rounded to us
    assert {len(timeline[name]) for name in ("id", "kind", "lane", "start", "end")} == {
        len(timeline["id"])
    }


def test_state_format_and_optimizer_are_those_of_check(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*CHECK, "--state", "master24", "--optimizer", "adamw"]
    answer = ask("advice", {**SMALL, "state": "master24", "optimizer": "adamw"}).json
    assert answer["verdict"] == checked(capsys, *words, "--tokens", "1B")
    assert answer["verdict"]["workload"]["state"] == "master24"
    first = ask("verdict", {**SMALL, "state": "master24", "optimizer": "adamw"}).json
    assert first["command"] == "megatrain check " + " ".join(words)
    known = library_data([], [])
    assert [each["name"] for each in known["states"]] == list(FORMATS)
    assert "adamw" in known["optimizers"]


@pytest.mark.parametrize("host", ["16GiB", "64GiB"])
def test_the_outlook_agrees_with_the_verdict(ask: Ask, host: str) -> None:
    question = {**SMALL, "model": "llama-3.2-3b", "host-memory": host, "accumulation": "4"}
    outlook, full = ask("outlook", question).json, ask("verdict", question).json
    found, shown = outlook["shown"], full["shown"]
    assert found["answer"] == shown["answer"] == ("NO" if host == "16GiB" else "YES")
    assert found["sentence"] == shown["sentence"]
    if host == "16GiB":
        assert found["memory"] == shown["memory"]
        assert "speed" not in found
    else:
        assert "memory" not in found
        most = float(found["speed"].removeprefix("at most ").replace(",", ""))
        assert full["verdict"]["tokens_per_second"] <= most


def test_there_is_no_outlook_of_another_system(ask: Ask) -> None:
    assert ask("outlook", {**SMALL, "policy": "zero3_offload"}).json is None
    assert ask("first", {**SMALL, "policy": "zero3_offload"}).json is None


def test_the_first_plan_fits_and_is_nearly_as_fast_as_the_best(ask: Ask) -> None:
    question = {**SMALL, "model": "llama-3.2-3b", "host-memory": "64GiB"}
    first, full = ask("first", question).json, ask("verdict", question).json
    assert first["verdict"]["feasible"]
    assert first["shown"]["memory"][0]["peak_bytes"] <= first["shown"]["memory"][0]["limit_bytes"]
    assert first["timeline"]["end"]
    speeds = [answer["verdict"]["tokens_per_second"] for answer in (first, full)]
    assert 0.9 * speeds[1] <= speeds[0] <= speeds[1]


def test_an_error_of_the_first_plan_is_left_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search leaves out a policy that refuses the model, if another one accepts it."""

    def refuse(*_: object) -> None:
        raise UserError("policy overlapped", found="no", allowed="yes", fix="none")

    monkeypatch.setattr(from_options, "first_plan", refuse)
    parts = dict(answer(Question.read(SMALL)))
    assert parts["first"] is None
    assert parts["verdict"]


def test_a_model_that_does_not_fit_has_no_first_plan(ask: Ask) -> None:
    assert ask("first", {**SMALL, "model": "llama-3.2-3b", "host-memory": "16GiB"}).json is None


def test_a_long_context_is_computed_in_pieces_as_check_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences would fit and be as fast, but chosen pieces are for one sequence."""
    monkeypatch.setattr(from_options, "PIECES", (16384,))
    values = {"model": "qwen2.5-0.5b", "hardware": "rtx3080-10gb", "seq": "131072"}
    parts = answer(Question.read(values))
    (_, first), (name, outlook), (_, full) = itertools.islice(parts, 3)
    assert first
    assert full
    assert (name, outlook and outlook["shown"]["answer"]) == ("outlook", "YES")
    assert first["verdict"]["workload"]["token_piece"] == full["verdict"]["workload"]["token_piece"]
    # An unfinished answer keeps the garbage collector off, also for later tests.
    parts.close()  # type: ignore[attr-defined]
    words = ("qwen2.5-0.5b", "--hardware", "rtx3080-10gb", "--seq", "131072")
    expected = checked(capsys, *words)
    found = json.loads(json.dumps(full["verdict"]))
    same = ("workload", "batch_chosen", "step_seconds", "knobs")
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}


def test_a_model_that_does_not_fit_is_answered_without_a_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**SMALL, "hardware": "rtx3080-10gb", "clipping": "none", "host-memory": "1GiB"}
    values["model"] = "llama-3.2-1b"
    words = ["llama-3.2-1b", "--hardware", "rtx3080-10gb", *CHECK[3:], "--clipping", "none"]
    expected = checked(capsys, *words, "--host-memory", "1GiB", "--tokens", "1B")
    assert not expected["feasible"]
    searched: list[object] = []
    monkeypatch.setattr(from_options, "choices", lambda *given: searched.append(given))
    parts: dict[str, Any] = dict(answer(Question.read(values)))
    assert not searched
    assert json.loads(json.dumps(parts["advice"]["verdict"])) == expected


def test_a_model_that_does_not_fit_has_no_timeline(ask: Ask) -> None:
    answer = ask("verdict", {**SMALL, "model": "llama-3.1-8b", "host-memory": "16GiB"})
    assert answer.json["verdict"]["feasible"] is False
    assert answer.json["shown"]["answer"] == "NO"
    assert answer.json["timeline"] is None
    assert any(place["too_little"] for place in answer.json["shown"]["memory"])


def test_a_micro_batch_that_fits_is_found_as_check_does(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"model": "qwen2.5-0.5b", "hardware": "dgx-spark", "seq": "256"}
    expected = checked(capsys, "qwen2.5-0.5b", "--hardware", "dgx-spark", "--seq", "256")
    verdict = ask("verdict", question).json["verdict"]
    assert verdict["workload"] == expected["workload"]
    assert verdict["batch_chosen"] is True
    assert verdict["step_seconds"] == expected["step_seconds"]


def test_policies_are_compared_as_check_does(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask("policies", SMALL).json["rows"]
    capsys.readouterr()
    cli.main(["check", *CHECK, "--policy", "all", "--json"])
    expected = json.loads(capsys.readouterr().out)["policies"]
    assert [(row["policy"], row["tokens_per_second"]) for row in rows] == [
        (verdict["policy"], verdict["tokens_per_second"]) for verdict in expected
    ]


def test_a_pasted_config_is_a_model_and_its_essentials_are_the_same_model(ask: Ask) -> None:
    named = ask("verdict", SMALL).json["verdict"]
    text = library()["qwen2.5-0.5b"].read_text()
    pasted = ask("verdict", {**SMALL, "model": "", "config": text}).json
    assert pasted["verdict"]["step_seconds"] == named["step_seconds"]
    assert pasted["command"].startswith("megatrain check config.json ")
    again = ask("verdict", {**SMALL, "model": "", "config": json.dumps(pasted["config"])}).json
    assert again["verdict"] == pasted["verdict"]
    assert again["config"] == pasted["config"]


def refusal(question: dict[str, Any]) -> str:
    """Returns the error of a question, which is answered in this process."""
    try:
        read = Question.read(question)
        read.arguments()
        read.spec()
        read.machine()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": "qwen9"}, "found no such name"),
        ({"model": ""}, "found no name"),
        ({"model": "config.json"}, "found no such name"),
        ({"model": "./tiny"}, "found no such name"),
        ({"hardware": "hardware.toml"}, "found no such name"),
        ({"hardware": "h300"}, "did you mean"),
        ({"policy": "./own.py"}, "--policy: found ./own.py"),
        ({"policy": "all"}, "--policy: found all"),
        ({"batch": "-1"}, "--batch: "),
        ({"batch": "1e9"}, "--batch: "),
        ({"batch": "9999"}, "allowed: at most 4,096"),
        ({"accumulation": "65"}, "allowed: at most 64"),
        ({"seq": "--json"}, "--seq: "),
        ({"host-memory": "24"}, "--host-memory: "),
        ({"clipping": "x" * 201}, "allowed: at most 200"),
        ({"config": "{"}, "found text that is not JSON"),
        ({"config": "[1]"}, "config.json"),
        ({"config": '{"model_type": "bert"}'}, "config.json"),
        ({"config": "[" * 20000}, "found text that is not JSON"),
        ({"optimizer": "./own.py"}, "--optimizer: found ./own.py"),
        ({"state": "exakt"}, "--state: "),
        ({"seed": "1"}, "unknown key"),
        ({"batch": 1}, "request: batch"),
    ],
)
def test_a_mistake_gives_a_one_line_error_and_no_path_is_read(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], part: str
) -> None:
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath('read').touch()\n")
    for name in ("config.json", "tiny", "hardware.toml"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    question = {**SMALL, **change}
    response = ask("verdict", question)
    error = response.json["error"]
    assert (response.status_code, part in error, "\n" in error) == (400, True, False), error
    assert refusal(question) == error
    assert not (tmp_path / "read").exists()


def test_a_name_is_not_a_path_even_if_the_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen2.5-0.5b", "rtx4090"):
        (tmp_path / name).write_text("not a model and not a machine")
    monkeypatch.chdir(tmp_path)
    question = Question.read(SMALL)
    assert question.spec().name == "qwen2.5-0.5b"
    assert question.machine().name == "rtx4090"


def test_a_machine_that_others_measured_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Path("experiments/results/h200-heldout/hardware.toml")
    shared = HardwareSpec.load(str(ROOT / measured)).shared("EPYC 9654", "0.1.0")
    write_shared(tmp_path / "theirs.toml", msgspec.structs.replace(shared, host_bytes=2**40))
    monkeypatch.setenv("MEGATRAIN_MACHINES", str(tmp_path))
    machine = Question(model="qwen2.5-0.5b", hardware="H200").machine()
    assert machine == HardwareSpec.load("h200")
    assert machine.measured_by_others == shared.date
    (listed,) = library_data([], ["h200"])["machines"]
    assert listed["host_bytes"] == 2**40


@pytest.fixture(scope="module")
def client(jobs: Jobs) -> Any:
    pytest.importorskip("flask")
    from megatrain.experiments.web.server import make_app

    return make_app(jobs, 8765).test_client()


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("http://127.0.0.1:8765", {}, 200),
        ("http://localhost:8765", {"Origin": "http://localhost:8765"}, 200),
        ("http://localhost:9000", {"Origin": "http://localhost:9000"}, 200),
        ("http://localhost:8765", {"Origin": "http://localhost:9000"}, 403),
        ("http://localhost:8765", {"Origin": "https://localhost:8765"}, 403),
        ("http://evil.example:8765", {}, 403),
        ("http://127.0.0.1.evil.example:8765", {}, 403),
        ("http://127.0.0.1:8765", {"Origin": "http://evil.example"}, 403),
        ("http://127.0.0.1:8765", {"Origin": "null"}, 403),
    ],
)
def test_only_requests_from_the_page_are_answered(
    client: Any, host: str, headers: dict[str, str], status: int
) -> None:
    for path in ("/", "/page.css", "/api/library"):
        response = client.get(path, base_url=host, headers=headers)
        assert response.status_code == status
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers
    if status == 403:
        assert response.json["error"].endswith("fix: open that address")


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("get", "/gone", {}, 404),
        ("get", "/../pyproject.toml", {}, 404),
        ("get", "/%2e%2e%2fpyproject.toml", {}, 404),
        ("get", "/stored.js", {}, 404),
        ("get", "/api/verdict", {}, 405),
        ("post", "/", {}, 405),
        ("post", "/api/gone", {"json": {}}, 404),
        ("post", "/api/verdict", {"data": "{}", "content_type": "text/plain"}, 404),
        ("post", "/api/verdict", {"data": "{", "content_type": "application/json"}, 400),
        ("post", "/api/verdict", {"data": "[" * 60000, "content_type": "application/json"}, 400),
        ("post", "/api/verdict", {"json": {"tab": "a"}}, 400),
        ("post", "/api/verdict", {"json": {"tab": "a", "turn": "1"}}, 400),
        ("post", "/api/verdict", {"json": ["tab"]}, 400),
        ("post", "/api/verdict", {"json": {"config": "x" * 70000}}, 413),
    ],
)
def test_another_request_is_refused_in_one_line(
    client: Any, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    response = getattr(client, method)(path, base_url=HERE, **options)
    assert response.status_code == status
    assert "\n" not in response.json["error"].strip()


def test_the_page_sends_no_other_requests(client: Any) -> None:
    page = client.get("/", base_url=HERE).text
    names = [part.partition('"')[0] for part in page.split('src="')[1:]] + ["page.css"]
    assert "source.js" in names
    for name in names:
        response = client.get(f"/{name}", base_url=HERE)
        assert response.status_code == 200
        assert "://" not in response.text.replace("http://127.0.0.1", "")
    assert "://" not in page


def test_a_later_question_ends_the_job_of_an_earlier_one(jobs: Jobs) -> None:
    slow = Question(model="llama-3.1-405b", hardware="h200", host_memory="8TiB", accumulation="64")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            jobs.answer("answer", "advice", slow, "impatient", 1)
        except Exception as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while ("answer", slow) not in jobs._kept:
        time.sleep(0.005)
    process = jobs._kept["answer", slow]._process
    assert jobs.answer("answer", "verdict", Question.read(SMALL), "impatient", 2)
    waiting.join(60)
    process.join(60)
    assert [type(error) for error in raised] == [Superseded]
    assert process.exitcode
    with pytest.raises(Superseded):
        jobs.answer("answer", "verdict", slow, "impatient", 1)


def test_an_answer_is_cached(jobs: Jobs) -> None:
    question = Question.read(SMALL)
    first = jobs.answer("answer", "advice", question, "one", 1)
    assert jobs.answer("answer", "advice", question, "another", 1) is first


def test_a_job_that_dies_is_an_error_and_is_not_cached(jobs: Jobs) -> None:
    question = Question(model="llama-3.1-405b", hardware="h200", accumulation="63")
    threading.Thread(target=_kill, args=(jobs, ("answer", question))).start()
    with pytest.raises(RunError, match="took too long"):
        jobs.answer("answer", "advice", question, "dying", 1)
    assert ("answer", question) not in jobs._kept


def _kill(jobs: Jobs, key: tuple[str, Question]) -> None:
    """Kills the process of a job, as its limit of processor time does."""
    while key not in jobs._kept:
        time.sleep(0.005)
    jobs._kept[key]._process.kill()


def test_the_server_listens_on_this_machine_alone() -> None:
    pytest.importorskip("flask")
    from megatrain.experiments.web.server import make

    server, own = make(0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=f"found {server.server_port}, which is in use"):
            make(server.server_port)
    finally:
        own.close()
        server.server_close()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--port", "65536"], "--port: found '65536'"),
        (["--models", "qwen2.5-0.5b"], "--models: found no --static"),
        (["--static", "site", "--port", "0"], "--port: found --static as well"),
        (["--static", "site", "--models", "qwen9"], "--models: found qwen9"),
        (["--static", "site", "--machines", "h300"], "--machines: found h300"),
        (["--static", "."], "found something there already"),
    ],
)
def test_a_mistake_in_the_command_gives_a_one_line_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_flask_the_error_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flask", None)
    assert cli.main(["serve", "--no-browser"]) == 2
    assert capsys.readouterr().err.endswith("fix: run `pip install flask`\n")


def test_a_static_site_has_the_answers_of_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(static_site, "BATCHES", (1,))
    monkeypatch.setattr(static_site, "SEQUENCES", (256,))
    site = tmp_path / "site"
    words = ["--static", str(site), "--models", "Qwen/Qwen2.5-0.5B", "--machines", "4090"]
    assert cli.main(["serve", *words]) == 0
    assert "wrote" in capsys.readouterr().out
    assert {file.name for file in (site / "data").iterdir()} == {
        "library.js",
        "qwen2.5-0.5b--rtx4090.js",
    }
    script = (site / "data" / "qwen2.5-0.5b--rtx4090.js").read_text()
    start, text = script.split(", ", 1)
    assert start == 'arrived("qwen2.5-0.5b--rtx4090"'
    answers = json.loads(text.removesuffix(");\n"))
    assert answers["1x256"]["verdict"] == checked(capsys, *CHECK, "--tokens", "1B")
    assert answers["1x256"]["policies"]["rows"]
    page = (site / "index.html").read_text()
    for name in page.split('src="')[1:]:
        assert (site / name.partition('"')[0]).is_file()


def test_a_static_site_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_: object) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "one", {}
        raise KeyboardInterrupt

    monkeypatch.setattr(static_site, "_computed", stopped)
    with pytest.raises(KeyboardInterrupt):
        static_site.write_site(tmp_path / "site", ["a"], ["b"])
    assert list(tmp_path.iterdir()) == []


def test_this_machine_can_be_chosen_where_its_gpu_is_known(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flask")
    from megatrain.experiments.web import question, server

    mine = HardwareSpec.load("l40s")
    for module in (question, server):
        monkeypatch.setattr(module, "this_machine", lambda: mine)
    client = server.make_app(jobs, 8765).test_client()
    shown = client.get("/api/library", base_url=HERE).json["this_machine"]
    assert (shown["title"], shown["host_bytes"]) == (mine.title, mine.host_bytes)
    asked = Question.read({**SMALL, "hardware": ""})
    assert asked.machine() is mine
    command = asked.command(asked.spec(), mine)
    assert command == "megatrain check qwen2.5-0.5b --batch 1 --seq 256"
    assert asked.arguments().hardware is None


def test_no_machine_is_this_one_without_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no NVIDIA GPU on this machine"):
        Question.read({**SMALL, "hardware": ""}).machine()
