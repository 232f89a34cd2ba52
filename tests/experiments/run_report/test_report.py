"""Tests of the report page of a run: its text, and how a headless Chromium shows it.

The tests in Chromium move the mouse over the page, click and type.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import pytest
from chromium import chromium

from megatrain.experiments.cli import main as cli
from megatrain.experiments.run_report import sections, why
from megatrain.experiments.run_report.compared_run import compare_run
from megatrain.experiments.run_report.step_record import Evaluation
from megatrain.experiments.run_report.training_sections import evaluations
from megatrain.runtime.training.answers import Answer, add_answer
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_report import ErrorReport
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.timeline import Timeline
from megatrain.simulator.verdict.marginal_memory import one_more_gib

if TYPE_CHECKING:
    from playwright.sync_api import Page


RESULTS = Path(__file__).parents[3] / "experiments" / "results"


class Reported(NamedTuple):
    """The page of a run, and the values that it must show."""

    page: Path
    measured: Timeline
    predicted: Timeline
    errors: ErrorReport


@pytest.fixture(scope="module")
def evenly_measured(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the finished run with other measured times: its ops follow one another.

    Each op takes 1 ms and a little more than the previous one, so each is wide enough to be pointed
    at. Tests must not change the folder.
    """
    folder = tmp_path_factory.mktemp("even") / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("model", "checkpoints"))
    measured, end_ns, spans = Timeline.load(folder / "measured.json"), 0, {}
    for number, span in enumerate(sorted(measured.spans, key=lambda each: each.start_ns)):
        start_ns, end_ns = end_ns, end_ns + 10**6 + 10**4 * number
        spans[span.op] = msgspec.structs.replace(span, start_ns=start_ns, end_ns=end_ns)
    even = msgspec.structs.replace(measured, spans=tuple(spans[each.op] for each in measured.spans))
    even.save(folder / "measured.json")
    return folder


@pytest.fixture(scope="module")
def reported(evenly_measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    page = tmp_path_factory.mktemp("report") / "new" / "page.html"
    assert cli.main(["report", str(evenly_measured), "--out", str(page)]) == 0
    run = compare_run(evenly_measured)
    return Reported(page, run.measured, run.predicted, run.errors)


def test_the_page_is_one_file_without_requests(evenly_measured: Path, reported: Reported) -> None:
    text = reported.page.read_text()
    assert [file.name for file in reported.page.parent.iterdir()] == ["page.html"]
    assert not (evenly_measured / "report.html").exists()
    assert not re.search(
        r"https?://|\bsrc=|<link|@import|\bimport\b|fetch\(|XMLHttpRequest|url\(", text
    )
    assert len(text) < 300_000


def test_the_page_has_its_numbers_without_a_script(reported: Reported) -> None:
    text = re.sub(r"<script.*</script>", "", reported.page.read_text(), flags=re.DOTALL)
    assert format_seconds(reported.measured.makespan_ns / 1e9) in text
    assert format_seconds(reported.predicted.makespan_ns / 1e9) in text
    for kind in reported.errors.kinds:
        assert (
            f"<td class=text>{kind.kind}</td><td>{kind.count}</td>"
            f"<td>{format_seconds(kind.predicted_seconds)}</td>" in text
        )
    for peak in reported.errors.memory:
        assert format_bytes(peak.measured_bytes) in text
    for fact in ("optimizer adamw", "state format exact", "clipping global"):
        assert f" &middot; {fact} &middot; " in text


def test_a_run_whose_recomputed_layers_reuse_memory_has_a_page(workplace: Path) -> None:
    """A run has a page although its memory account lacks slots that its schedule has.

    These are the slots for recomputed activations.
    """
    plan = Plan.load(workplace / "plan.toml")
    knobs = msgspec.structs.replace(plan.knobs, placement=Placement(saved_activations="1-3"))
    plan = msgspec.structs.replace(plan, knobs=knobs, digest="")
    msgspec.structs.replace(plan, digest=lower(plan).digest).save(workplace / "kept.toml")
    assert (
        cli.main(
            [
                "train",
                "kept.toml",
                "--data",
                "corpus",
                "--steps",
                "3",
                "--device",
                "cpu",
                "--out",
                "run",
            ]
        )
        == 0
    )
    assert cli.main(["report", "run", "--out", "page.html"]) == 0


def test_the_page_shows_the_gain_of_more_memory_on_the_run_s_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says what one more GiB gains, in the words of `megatrain plan`.

    Device memory is tight in this run. Other policies are not searched, which would take longest.
    """
    asked: list[tuple[Any, ...]] = []
    bought: list[Any] = []

    def ask(*given: Any) -> Any:
        asked.append(given)
        bought.extend(one_more_gib(*given))
        return bought

    monkeypatch.setattr(why, "one_more_gib", ask)
    monkeypatch.setattr(sections, "rivals", lambda _: [])
    page, run = tmp_path / "page.html", RESULTS / "h200-qwen2.5-7b-24GiB"
    assert cli.main(["report", str(run), "--out", str(page)]) == 0
    ((choice, hardware, _),) = asked
    assert hardware == HardwareSpec.load(str(run / "hardware.toml"))
    assert choice.plan.knobs == Plan.load(run / "plan.toml").knobs
    device, host = bought
    assert device.gain > 0.005
    text = page.read_text()
    (line,) = [
        line for line in text.split("<li>") if line.startswith("one more GiB of device memory: ")
    ]
    assert line.startswith(
        f"one more GiB of device memory: {device.gain:+.1%}, {device.tokens_per_second:,.0f}"
        " tokens/s: "
    )
    assert "on the device," in line
    assert host.knobs is None
    assert "<li>one more GiB of host memory: no gain.</li>" in text
    assert "<em>e</em> is the embedding" in text


def test_a_name_cannot_end_the_script_or_become_a_tag(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("model"))
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "device": "</script><b>&"}))
    assert cli.main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text
    assert text.count("</script>") == 2


def test_a_folder_without_a_measured_step_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"megatrain: {tmp_path}: found no measured.json; allowed: "
    )
    assert list(tmp_path.iterdir()) == []


class Trained(NamedTuple):
    """The page of a run with evaluations, and the rows of its `metrics.jsonl`."""

    page: Path
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Returns a run of 60 steps with three evaluations and a few documents that were left out."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("model", "checkpoints"))
    row = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    steps, evaluations, lines = [], [], []
    for step in range(1, 61):
        loss = 5 / step + step % 3 / 7
        norm = None if step == 9 else 3 + 1 / step
        rate = 1e-5 * (61 - step) / 60
        steps.append({**row, "step": step, "loss": loss, "gradient_norm": norm, "rate": rate})
        lines.append(steps[-1])
        if step % 20 == 0:
            found = {"step": step, "evaluation_loss": 800 / step, "perplexity": step * 1.5}
            evaluations.append({**found, "tokens": 1234, "seconds": 0.25})
            lines.append({**evaluations[-1], "perplexity": None if step == 20 else step * 1.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = json.loads((folder / "data.json").read_text())
    more = {"rows": 402, "unusable": 2, "cut": 7, "cut_tokens": 1800, "targets": 1000}
    changed = {"training": {**counts["training"], **more, "tokens": 4000}}
    (folder / "data.json").write_text(json.dumps(changed))
    long = "https://example.org/" + "a" * 300
    add_answer(folder, Answer(step=3, model="model", question=long, answer=long))
    assert cli.main(["report", str(folder)]) == 0
    return Trained(folder / "report.html", steps, evaluations)


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Page, list[str]]]:
    """Yields a page of a headless Chromium without a network, and the list of its errors.

    Errors, warnings and requests to the network are added to the list.
    """
    with chromium() as browser:
        context = browser.new_context(
            viewport={"width": 1280, "height": 1000}, offline=True, reduced_motion="reduce"
        )
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: (
                wrong.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                wrong.append(request.url) if not request.url.startswith("file:") else None
            ),
        )
        yield page, wrong


@pytest.fixture
def page(opened: tuple[Page, list[str]], reported: Reported) -> Iterator[Page]:
    """Yields the run's page in Chromium.

    An error or warning of its script and a request to the network fail the test.
    """
    page, wrong = opened
    wrong.clear()
    page.goto(reported.page.as_uri())
    yield page
    assert wrong == []


def point(page: Page, op: str, panel: str) -> tuple[float, float]:
    """Returns the middle of an op's bar on the screen."""
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline").bounding_box()
    bar = page.evaluate(f"timeline.rectangle(numberOf.get('{op}'), {panel})")
    assert box is not None
    return box["x"] + (bar["left"] + bar["right"]) / 2, box["y"] + (bar["top"] + bar["bottom"]) / 2


def shown(page: Page) -> float:
    """Returns the share of the step that is in view."""
    share: float = page.evaluate("(view.to - view.from) / view.end")
    return share


def test_the_page_shows_this_run_s_step_and_peaks(page: Page, reported: Reported) -> None:
    """The step is the median of the steady steps, as in the comparison of several runs."""
    figures, steps = page.locator(".figures").inner_text(), reported.errors.steps
    assert steps is not None
    for seconds in (steps.median_seconds, steps.predicted_seconds):
        assert format_seconds(seconds) in figures
    assert (
        format_bytes(
            next(
                peak.measured_bytes
                for peak in reported.errors.memory
                if peak.what == "device pools"
            )
        )
        in figures
    )
    assert page.evaluate("measured.step") == reported.measured.makespan_ns
    drawn = page.evaluate(
        "(id) => { const c = document.getElementById(id); return new"
        " Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size }",
        "timeline",
    )
    assert drawn > 20, "an empty canvas has one colour"
    reasons = page.locator(".why li").all_text_contents()
    assert [line for line in reasons if line.startswith("one more GiB")] == [
        f"one more GiB of {place} memory: no gain." for place in ("device", "host")
    ]


def test_a_click_on_an_op_shows_its_numbers(page: Page, reported: Reported) -> None:
    for op in ("B2.m0", "F1.m0"):
        page.mouse.click(*point(page, op, "measured"))
        assert page.locator("#readout b").first.inner_text() == op
        assert page.locator("#measured-duration").inner_text() == format_seconds(
            reported.measured.by_op[op].duration_ns / 1e9
        )
        assert page.locator("#predicted-duration").inner_text() == format_seconds(
            reported.predicted.by_op[op].duration_ns / 1e9
        )
    page.keyboard.press("Escape")
    assert page.locator("#measured-duration").count() == 0


def test_hovering_an_op_names_it_and_its_duration(page: Page, reported: Reported) -> None:
    page.mouse.move(*point(page, "B1.m0", "measured"))
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "B1.m0 backward" in tip.inner_text()
    assert (
        f"measured {format_seconds(reported.measured.by_op['B1.m0'].duration_ns / 1e9)}"
        in tip.inner_text()
    )
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_zooming_keeps_the_time_under_the_pointer_and_dragging_moves_it(page: Page) -> None:
    assert shown(page) == 1
    x, y = point(page, "B2.m0", "measured")
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    page.wait_for_function("view.to - view.from < 0.8 * view.end")
    assert point(page, "B2.m0", "measured")[0] == pytest.approx(x, abs=1.5)
    page.mouse.down()
    page.mouse.move(x + 120, y, steps=4)
    page.mouse.up()
    assert point(page, "B2.m0", "measured")[0] == pytest.approx(x + 120, abs=1.5)
    assert page.locator("#measured-duration").count() == 0, "a drag selects nothing"
    before = shown(page)
    page.click("#in")
    assert shown(page) == pytest.approx(before / 2)
    page.click("#all")
    assert shown(page) == 1


def test_an_op_is_found_by_its_name_and_from_the_tables(page: Page, reported: Reported) -> None:
    page.fill("#find", "f2")
    page.press("#find", "Enter")
    assert page.locator("#readout b").first.inner_text() == "F2.m0"
    assert shown(page) < 1
    page.fill("#find", "F99")
    page.press("#find", "Enter")
    assert page.locator("#find.wrong").count() == 1
    worst = next(kind for kind in reported.errors.kinds if kind.kind == "backward").worst_op
    page.locator(f"table button.op[data-op='{worst}']").first.click()
    assert page.locator("#readout b").first.inner_text() == worst
    page.locator("#kinds button", has_text="forward").first.click()
    assert page.locator("#kinds button[aria-pressed=true]").inner_text() == "forward"


# Records the words on each canvas. Clearing a canvas removes its words, because the page may draw a
# canvas several times while its width changes.
_RECORD = """() => {
  window.written = [];
  const { fillText: fill, clearRect: clear } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.clearRect = function (...all) {
    window.written = window.written.filter((each) => each.row[0] !== this.canvas.id);
    clear.call(this, ...all);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const wide = this.measureText(text).width;
    const from = { left: x, center: x - wide / 2, right: x - wide }[this.textAlign];
    const row = [this.canvas.id, y], edge = this.canvas.clientWidth;
    window.written.push({ text, row, edge, from, to: from + wide });
    fill.call(this, text, x, y);
  }; }"""


def test_the_curves_and_evaluations_are_those_of_the_metrics(page: Page, trained: Trained) -> None:
    page.goto(trained.page.as_uri())
    shown = page.evaluate("data.training")
    keys = {"steps": "step", "losses": "loss", "rates": "rate", "norms": "gradient_norm"}
    for name, key in {**keys, "speeds": "tokens_per_second"}.items():
        found = [row[key] for row in trained.steps]
        assert all(
            a == b if b is None else a == pytest.approx(b, rel=1e-5, abs=1e-6)
            for a, b in zip(shown[name], found, strict=True)
        ), name
    first, *others = page.locator("h3:has-text('Evaluations') + .wide tbody tr").all_inner_texts()
    assert first.split() == ["20", "40.0000", "-", "1,234", "250.000", "ms"]
    assert [line.split() for line in others] == [
        ["40", "20.0000", "60.00", "1,234", "250.000", "ms"],
        ["60", "13.3333", "90.00", "1,234", "250.000", "ms", "best"],
    ]
    last = sum(row["loss"] for row in trained.steps[-2:]) / 2
    tile = page.locator(".figures div").first.inner_text()
    assert f"{last:.4f}" in tile
    assert "evaluation 13.3333 after step 60" in tile
    note = page.locator("h2:has-text('Training') + .note").inner_text()
    assert "Learning rate at most 1e-5, 1.67e-7 in the last step." in note
    assert "Gradient norm before clipping: median 3.03, largest 4 in step 1." in note
    assert page.locator("#curves").inner_text().split("\n") == [
        "each step",
        "mean of 2 steps",
        "evaluation",
    ]
    page.locator("#training").hover(position={"x": 62, "y": 100})
    assert page.locator("#tip").inner_text().split("\n")[:4] == [
        "step 1",
        "loss 5.1429",
        "learning rate 1e-5",
        "gradient norm 4",
    ]


def test_the_data_of_the_run_are_counted(trained: Trained, reported: Reported) -> None:
    text = trained.page.read_text()
    for name, cell in (
        ("rows in the files", "402"),
        ("rows left out, because they cannot be used", "2"),
        ("documents cut at 16 tokens", "7 (1,800 tokens)"),
        ("tokens with loss", "1,000, 25.0 %"),
    ):
        assert f"<td class=text>{name}</td><td>{cell}</td>" in text
    plain = reported.page.read_text()
    assert "tokens with loss" in plain
    assert "Evaluations" not in plain
    assert "cannot be used" not in plain, "a row of zeros says nothing"


def test_a_run_without_counted_data_has_a_page(finished: Path, tmp_path: Path) -> None:
    """Batches made by a Python caller are not counted, and older runs have no file of counts."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("model"))
    (folder / "data.json").unlink()
    assert cli.main(["report", str(folder)]) == 0
    assert "tokens with loss" not in (folder / "report.html").read_text()


def test_the_first_last_and_best_of_many_evaluations_are_shown(trained: Trained) -> None:
    run = compare_run(trained.page.parent)
    losses = [4.0, *[3.0] * 50, 1.0, *[2.0] * 50]
    many = [Evaluation(step, loss, None, 9, 0.5) for step, loss in enumerate(losses, 1)]
    text = evaluations(run._replace(record=run.record._replace(evaluations=many)))
    shown = [int(step) for step in re.findall(r"<tr><td>(\d+)</td>", text)]
    assert {1, 52, 102} <= set(shown)
    assert len(shown) <= 21
    assert f"{len(shown)} of 102 evaluations." in text


def test_the_plan_names_rebuilt_outputs_in_words(evenly_measured: Path) -> None:
    run = compare_run(evenly_measured)
    for rebuild in (0, 1):
        knobs = msgspec.structs.replace(run.plan.knobs, rebuild_outputs=rebuild)
        text = sections.plan(run._replace(plan=msgspec.structs.replace(run.plan, knobs=knobs)))
        assert ("outputs of norms and gates" in text) is bool(rebuild)
        assert "rebuild outputs" not in text


def test_the_plan_shows_the_memory_for_exchanges_only_with_several_gpus(
    evenly_measured: Path,
) -> None:
    run = compare_run(evenly_measured)
    for room in (0, 3 * 2**20):
        knobs = msgspec.structs.replace(run.plan.knobs, exchange_bytes=room)
        text = sections.plan(run._replace(plan=msgspec.structs.replace(run.plan, knobs=knobs)))
        assert ("exchange of gradients" in text) is bool(room)
        assert ("3.00 MiB" in text) is bool(room)
        assert "exchange bytes" not in text


def test_the_top_explains_measured_predicted_and_limit(reported: Reported) -> None:
    text = reported.page.read_text()
    for word in ("measured", "Predicted", "limits"):
        assert f"<em>{word}</em>" in text
    # The steady steps, not the one recorded step, whose time differs on a busy machine.
    assert reported.errors.steps is not None
    error = reported.errors.steps.median_error
    slower = "slower" if error > 0 else "faster"
    assert f"a step {100 * abs(error):.1f} % {slower} than the measured one" in text


_CONTRASTS = """() => {
  const hex = (colour) => "#" + colour.match(/\\d+/g).slice(0, 3)
    .map((part) => Number(part).toString(16).padStart(2, "0")).join("");
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!colour.startsWith("rgba(0, 0, 0, 0")) return hex(colour);
    }
    return null;
  };
  element("tip").hidden = false;
  element("tip").innerHTML = "<b>op</b><span>size</span>";
  document.querySelector("#kinds button").click();
  const texts = [...document.querySelectorAll("body *")].filter((each) =>
    !["SCRIPT", "NOSCRIPT"].includes(each.tagName) && [...each.childNodes].some((node) =>
      node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
  const low = texts.map((each) => [contrast(hex(getComputedStyle(each).color), behind(each)),
    each.tagName, each.textContent.slice(0, 30)]).filter(([ratio]) => ratio < 4.5);
  const lines = ["loss", "pale-loss", "evaluation", "rate", "norm", "speed", "mark"]
    .map((name) => [contrast(themed(name), GROUND), name]);
  const filled = [...timeline.colours, ...Object.values(data.memory.classes).map(visible)]
    .map((colour) => [contrast(colour, PALE), colour]);
  return { count: texts.length, low, lines, filled };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_on_light_and_dark_screens(
    page: Page, trained: Trained, scheme: Literal["light", "dark"]
) -> None:
    """Text has the contrast of WCAG AA for text, and lines and bars that for graphics.

    Light colours of bars are those of the other pictures.
    """
    page.emulate_media(color_scheme=scheme)
    page.goto(trained.page.as_uri())
    found = page.evaluate(_CONTRASTS)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert background == ("rgb(20, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert found["count"] > 100
    assert found["low"] == []
    if scheme == "dark":
        assert [line for line in found["lines"] + found["filled"] if line[0] < 3] == []
    else:
        assert page.evaluate("data.kinds.every((kind) => visible(kind.colour) === kind.colour)")


_PIXEL = """() => {
  const ratio = devicePixelRatio, [panel] = timeline.panels;
  const x = ratio * (timeline.left + timeline.width - 3), y = ratio * (panel.top + 4);
  const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(timeline.canvas, -x, -y);
  return [...copy.getImageData(0, 0, 1, 1).data];
}"""


def test_pictures_follow_the_screen_and_are_printed_light(page: Page) -> None:
    def corner() -> list[int]:
        """Returns the colour of the compute row after the end of the predicted step."""
        pixel: list[int] = page.evaluate(_PIXEL)
        return pixel[:3]

    page.wait_for_function("timeline.canvas.width > 300")
    light = page.evaluate("[PALE, timeline.colours]")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("PALE === '#20272e'")
    assert corner() == [0x20, 0x27, 0x2E]
    assert page.evaluate("timeline.colours") != light[1]
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("PALE === '#f3f5f7'")
    assert page.evaluate("[PALE, timeline.colours]") == light
    assert corner() == [0xF3, 0xF5, 0xF7]
    page.emulate_media(media="screen", color_scheme="light")


@pytest.mark.parametrize("width", [390, 340])
def test_a_phone_shows_the_report_without_scrolling_sideways(
    page: Page, trained: Trained, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(trained.page.as_uri())
    scrolled, shown = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    cut = page.evaluate(
        "[...document.querySelectorAll('dd, dt, small, p, li')]"
        ".filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
    )
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert scrolled == shown == width
    assert cut == []


@pytest.mark.parametrize("width", [1280, 1000])
def test_both_columns_of_the_data_are_visible(page: Page, trained: Trained, width: int) -> None:
    """The name of a row is broken, so its numbers are not cut off beside another table."""
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(trained.page.as_uri())
    cut = page.evaluate(
        """() => {
            const row = [...document.querySelectorAll("tr")]
                .find((each) => each.textContent.startsWith("documents cut at"));
            row.cells[0].textContent = "documents left out, whose answer begins after 2,048 tokens";
            row.insertCell().textContent = "33 (1,399 tokens)";
            const table = row.closest(".wide");
            return table.scrollWidth - table.clientWidth;
        }"""
    )
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert cut <= 0


@pytest.mark.parametrize("width", [1000, 420, 340])
def test_no_words_in_the_pictures_overlap_or_are_cut_off_however_narrow_the_page(
    page: Page, width: int
) -> None:
    page.evaluate(_RECORD)
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_function("new Set(window.written.map((each) => each.row[0])).size === 4")
    written = [word for word in page.evaluate("window.written") if word["text"]]
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert [word for word in written if word["from"] < 0 or word["to"] > word["edge"] + 0.5] == []
    rows: dict[tuple[str, float], set[tuple[float, float, str]]] = {}
    for word in written:
        rows.setdefault(tuple(word["row"]), set()).add((word["from"], word["to"], word["text"]))
    neighbors = [pair for words in rows.values() for pair in pairwise(sorted(words))]
    assert len(neighbors) > 10
    assert [(first[2], second[2]) for first, second in neighbors if first[1] > second[0]] == []


@pytest.mark.parametrize("share", [2.0, 0.75])
def test_the_reason_says_whether_everything_would_fit_the_device(
    evenly_measured: Path, share: float
) -> None:
    """Regression test: "so part of it streams" was said of 3 MiB of state and a limit of 10 GiB."""
    run = compare_run(evenly_measured)
    account = plan_account(run.plan, run.schedule, run.costs)
    assert account.host_peak_bytes
    limit = int(share * (account.device_peak_bytes + account.host_peak_bytes))
    limited = run._replace(plan=msgspec.structs.replace(run.plan, device_limit_bytes=limit))
    reason = why.reasons(limited)[0]
    assert ("it would all fit there, but the policy" in reason) == (share > 1)
    assert ("so part of it streams from host memory" in reason) == (share < 1)
