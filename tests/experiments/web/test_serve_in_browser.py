"""Tests of the page of `megatrain serve` in a headless Chromium, from a server and as files.

They type, turn sliders and follow links, and compare the numbers on the page with `check --json`.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from chromium import chromium

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.verdict import layout
from megatrain.experiments.web import static_site
from megatrain.simulator.model.specs import library

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SMALL = {"model": "qwen2.5-0.5b", "hardware": "rtx4090", "batch": "1", "seq": "256"}
CHECK = ["qwen2.5-0.5b", "--hardware", "rtx4090", "--batch", "1", "--seq", "256"]
MILLISECONDS = 60_000

Checked = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yields the address of a running server."""
    pytest.importorskip("flask")
    from megatrain.experiments.web.server import make

    server, jobs = make(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    jobs.close()
    server.server_close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Yields a function that opens a page of 1280 pixels, or of another width.

    An error of a script, a warning, and a request to another site fail the test. Messages of the
    browser about refused questions do not.
    """
    wrong: list[str] = []
    contexts = []

    def opened(address: str, width: int = 1280, scheme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
            accept_downloads=True,
        )
        context.set_default_timeout(MILLISECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: (
                wrong.append(message.text)
                if message.type in ("error", "warning") and "400 (BAD" not in message.text
                else None
            ),
        )
        site = address.partition("?")[0].rpartition("/")[0]
        page.on(
            "request",
            lambda request: (
                wrong.append(request.url)
                if not request.url.startswith((site, "blob:", "data:"))
                else None
            ),
        )
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Checked:
    """Returns a function that runs `megatrain check --json` and returns its output."""

    def run(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["check", *words, "--json"]) in (0, 3)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def settled(page: Page, verdict: dict[str, Any]) -> None:
    """Waits until the page shows the speed of `verdict`, and compares its other numbers."""
    speed = layout.speed(verdict["tokens_per_second"])
    page.locator("#speed", has_text=f"{speed} tokens/s").wait_for()
    page.locator("#answer[aria-busy=false]").wait_for()
    assert page.inner_text("#yes") == "YES"
    assert page.inner_text("#step").startswith(layout.seconds(verdict["step_seconds"]))
    spent = verdict["training"]
    took = layout.hours(spent["hours"], spent["hours_low"], spent["hours_high"])
    first, _, span = took.removesuffix(")").partition(" (")
    shown = page.inner_text("#time")
    assert shown.startswith(first)
    assert span in shown
    assert f"{spent['energy_kwh']:.3g} kWh" in shown.replace(",", "")
    for place, label in (("device", "VRAM"), ("host", "RAM")):
        peak, limit = (verdict[f"{place}_{end}_bytes"] for end in ("peak", "limit"))
        line = page.locator("#memory .line", has=page.locator(f"b:text-is('{label}')"))
        assert f"{layout.size(peak)} of {layout.size(limit)}" in line.inner_text()


def turn_to(page: Page, knob: str, value: str) -> None:
    """Turns a slider to the stop `value`, key by key."""
    slider = page.locator(f"#{knob}-slider")
    slider.press("Home")
    for _ in range(20):
        if slider.get_attribute("aria-valuetext") == value:
            return
        slider.press("ArrowRight")
    raise AssertionError(f"{knob} has no stop {value}")


def test_typing_a_model_and_turning_sliders_gives_the_numbers_of_check(
    open_page: Callable[..., Page], address: str, checked: Checked
) -> None:
    page = open_page(f"{address}?{urlencode({**SMALL, 'model': 'gemma-3-1b'})}")
    page.fill("#model", "Qwen/Qwen2.5-0.5B-Instruct")
    page.press("#model", "Enter")
    page.fill("#tokens", "10M")
    settled(page, checked(*CHECK, "--tokens", "10M"))
    assert page.locator("#answer").is_visible()
    turn_to(page, "seq", "512")
    turn_to(page, "batch", "2")
    turn_to(page, "accumulation", "2")
    turn_to(page, "host-memory", "64GiB")
    page.fill("#tokens", "2B")
    words = ["--batch", "2", "--seq", "512", "--accumulation", "2", "--host-memory", "64GiB"]
    settled(page, checked(*CHECK[:3], *words, "--tokens", "2B"))
    assert page.inner_text("#step-tokens") == "2,048 tokens a step"
    page.fill("#batch", "3")
    page.select_option("#hardware", "h200")
    page.select_option("#clipping", "none")
    words = ["qwen2.5-0.5b", "--hardware", "h200", "--batch", "3", *words[2:], "--clipping", "none"]
    settled(page, checked(*words, "--tokens", "2B"))


def test_link_command_and_json_have_all_choices(
    open_page: Callable[..., Page], address: str, checked: Checked, tmp_path: Path
) -> None:
    asked = {**SMALL, "clipping": "none", "policy": "resident", "state": "bf16-sr", "tokens": "5M"}
    first = open_page(f"{address}?{urlencode({**asked, 'hardware': '4090'})}")
    first.locator("body[data-ready]").wait_for()
    link = first.url
    query = {key: values[0] for key, values in parse_qs(urlsplit(link).query).items()}
    assert query.items() >= asked.items()
    second = open_page(link)
    second.locator("body[data-ready]").wait_for()
    assert second.url == link
    ids = ("model", "hardware", "batch", "seq", "clipping", "policy", "state", "tokens")
    assert [second.input_value(f"#{id}") for id in ids] == [query[id] for id in ids]
    assert second.inner_text("#figures") == first.inner_text("#figures")
    program, verb, *words = shlex.split(second.inner_text("#command"))
    assert (program, verb) == ("megatrain", "check")
    expected = checked(*words)
    with second.expect_download() as download:
        second.click("#download")
    download.value.save_as(tmp_path / "verdict.json")
    saved = json.loads((tmp_path / "verdict.json").read_text())
    training, same = saved.pop("training"), expected.pop("training")
    assert saved == expected
    assert training == pytest.approx(same)


def hold(page: Page, *parts: str) -> None:
    """Makes these parts of an answer wait until the page's `allow` is called."""
    page.evaluate(
        """(held) => {
          const asked = source.ask.bind(source);
          const allowed = new Promise((resolve) => { window.allow = resolve; });
          source.ask = async (part, ...rest) => {
            if (held.includes(part)) await allowed;
            return asked(part, ...rest);
          };
        }""",
        list(parts),
    )


def test_a_first_plan_is_shown_until_the_verdict_is_there(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("body[data-ready]").wait_for()
    hold(page, "verdict")
    page.select_option("#clipping", "none")
    page.locator("#answer.first").wait_for()
    assert "better ones are being searched" in page.inner_text("#speed")
    shown = ("#memory-section", "#step-section", "#timeline", "#time")
    assert [name for name in shown if not page.locator(name).is_visible()] == []
    assert not page.locator("#keep").is_visible(), "its command and link are not known yet"
    first = float(page.inner_text("#speed").split(" ", 1)[0].replace(",", ""))
    page.evaluate("window.allow()")
    page.locator("#answer:not(.first)[aria-busy=false]").wait_for()
    best = float(page.inner_text("#speed").split(" ", 1)[0].replace(",", ""))
    assert 0.9 * best <= first <= best
    assert "searched" not in page.inner_text("#speed")


def test_the_outlook_is_shown_until_the_verdict_is_there(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("body[data-ready]").wait_for()
    hold(page, "first", "verdict")
    page.select_option("#state", "master24")
    page.locator("#answer.planning").wait_for()
    assert page.inner_text("#yes") == "YES"
    assert "24-bit master weights" in page.inner_text("#sentence")
    most = page.inner_text("#speed").splitlines()[0]
    assert most.startswith("at most ")
    hidden = ("#memory-section", "#step-section", "#keep", "#time", ".why")
    assert [name for name in hidden if page.locator(name).is_visible()] == []
    page.select_option("#clipping", "none")
    faded = page.evaluate("getComputedStyle(document.getElementById('answer')).opacity")
    assert float(faded) < 1, "the bound is that of another question"
    page.locator("#answer.planning:not(.stale)").wait_for()
    page.evaluate("window.allow()")
    page.locator("#answer:not(.planning)[aria-busy=false]").wait_for()
    assert [name for name in hidden if not page.locator(name).is_visible()] == []
    assert "--state master24" in page.inner_text("#command")
    speed = page.inner_text("#speed").split(" ", 1)[0]
    assert float(speed.replace(",", "")) <= float(most.split()[2].replace(",", ""))


@pytest.mark.parametrize("missing", ["verdict", "advice"])
def test_what_is_known_remains_if_the_rest_takes_too_long(
    open_page: Callable[..., Page], address: str, missing: str
) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("body[data-ready]").wait_for()
    page.evaluate(
        """(missing) => {
      const asked = source.ask.bind(source);
      source.ask = async (part, ...rest) => {
        if (part !== missing) return asked(part, ...rest);
        await new Promise((resolve) => { window.fail = resolve; });
        throw new Error("the answer took too long");
      };
    }""",
        missing,
    )
    page.select_option("#state", "bf16-sr")
    known = ".first" if missing == "verdict" else ":not(.planning, .first)"
    page.locator(f"#answer{known}:not(.stale)").wait_for()
    page.evaluate("window.fail()")
    page.locator("#error", has_text="took too long").wait_for()
    assert page.inner_text("#yes") == "YES"
    assert "stochastic rounding" in page.inner_text("#sentence")
    assert page.locator("#trying").is_hidden()
    assert page.locator("#keep").is_visible() == (missing == "advice")
    assert ("search for better ones failed" in page.inner_text("#speed")) == (missing == "verdict")


def test_a_mistake_gives_a_one_line_error_and_the_next_answer_replaces_it(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode({**SMALL, 'model': '<b>qwen9</b>'})}")
    error = page.locator("#error")
    error.wait_for()
    assert error.inner_text().startswith("model <b>qwen9</b>: found no such name")
    assert page.locator("#answer").is_hidden()
    assert page.locator("#keep").is_hidden(), "the command of another question"
    page.fill("#model", "qwen2.5-0.5b")
    page.locator("#speed").wait_for()
    assert error.is_hidden()


def test_a_mistake_in_the_tokens_is_shown_and_the_command_is_not_copied(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode({**SMALL, 'tokens': 'foo'})}")
    page.locator("body[data-ready]").wait_for()
    error = page.locator("#tokens-error")
    assert error.inner_text().startswith("tokens: found 'foo'; allowed: a positive number")
    for text in ("1e9", "0", "1,5M", "1,00", "99999999T"):
        page.fill("#tokens", text)
        assert f"found '{text}'" in error.inner_text()
        assert page.locator("#copy-command").is_disabled()
    for text, option in (("1,000", " --tokens 1000"), ("2B", " --tokens 2B"), ("", "")):
        page.fill("#tokens", text)
        assert error.is_hidden()
        assert page.locator("#copy-command").is_enabled()
        assert page.inner_text("#command").endswith(f"--seq 256{option}")


def test_without_a_model_no_verdict_remains(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("#speed").wait_for()
    error = page.locator("#error", has_text="found no name")
    page.fill("#model", "")
    page.press("#model", "Enter")
    error.wait_for()
    assert page.locator("#answer").is_hidden()
    page.click("#paste summary")
    page.fill("#config", library()["qwen2.5-0.5b"].read_text())
    page.locator("#command", has_text="check config.json").wait_for()
    page.fill("#config", "")
    error.wait_for()
    assert page.locator("#answer").is_hidden()


def test_a_pasted_config_is_answered_and_in_the_link(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("#speed").wait_for()
    speed = page.inner_text("#speed")
    page.click("#paste summary")
    page.fill("#config", library()["qwen2.5-0.5b"].read_text())
    page.locator("#command", has_text="check config.json").wait_for()
    assert page.inner_text("#speed") == speed
    assert page.input_value("#model") == ""
    again = open_page(page.url)
    again.locator("#command", has_text="check config.json").wait_for()
    assert again.inner_text("#speed") == speed
    assert '"hidden_size":896' in again.input_value("#config")


def test_advice_can_be_tried(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("#advice button").first.wait_for()
    row = page.locator("#advice li", has=page.locator("button")).first
    promised = row.locator("span").nth(1).inner_text()
    row.locator("button").click()
    page.locator("#speed", has_text=promised).wait_for()


def test_a_machine_that_is_no_longer_compared_does_not_come_back(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode({**SMALL, 'policies': 'resident'})}")
    page.locator("#comparison[data-ready]", has_not=page.locator("td")).wait_for(state="attached")
    # answers of the comparison come when the test says so
    page.evaluate("""() => {
      window.answers = [];
      source.ask = () => new Promise((resolve) => window.answers.push(resolve));
    }""")
    for act in (page.check, page.uncheck):
        act("#compared-machines input[value=rtx4090]")
    page.evaluate("window.answers.forEach((arrive) => arrive({ rows: [] }))")
    page.evaluate("new Promise((resolve) => setTimeout(resolve))")
    assert page.locator("#comparison").is_hidden()


def test_machines_and_policies_are_compared_side_by_side(
    open_page: Callable[..., Page], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = open_page(f"{address}?{urlencode({**SMALL, 'policies': 'overlapped'})}")
    page.locator("body[data-ready]").wait_for()
    page.check("#compared-machines input[value=rtx4090]")
    page.check("#compared-policies input[value=resident]")
    page.locator("#comparison td:nth-child(3):not(.lacks)").wait_for()
    cli.main(["check", *CHECK, "--policy", "all", "--json"])
    found = json.loads(capsys.readouterr().out)["policies"]
    speeds = {verdict["policy"]: verdict["tokens_per_second"] for verdict in found}
    assert page.locator("#comparison th").all_inner_texts() == [
        "",
        "overlapped",
        "resident",
        "RTX 4090",
    ]
    assert page.locator("#comparison td").all_inner_texts() == [
        layout.speed(speeds["overlapped"]),
        layout.speed(speeds["resident"]),
    ]
    query = parse_qs(urlsplit(page.url).query)
    assert (query["machines"], query["policies"]) == (["rtx4090"], ["overlapped,resident"])


CUT = """() => [...document.querySelectorAll('select')].filter((each) => {
  const free = each.cloneNode(true);
  free.style.width = 'max-content';
  each.after(free);
  const width = free.offsetWidth;
  free.remove();
  return width > each.offsetWidth;
}).map(({ id }) => id)"""
"""JavaScript: the fields that are too narrow for their longest value."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    open_page: Callable[..., Page], address: str, scheme: str
) -> None:
    asked = {**SMALL, "hardware": "rtx4090", "machines": "rtx4090,h200"}
    page = open_page(f"{address}?{urlencode(asked)}", width=390, scheme=scheme)
    page.locator("#comparison[data-ready]").wait_for()
    page.click(".why summary")
    page.click("#paste summary")
    for width in (390, 320, 768, 950, 1000, 1181):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CUT) == [], width
    colours = page.evaluate(
        "() => { const c = document.getElementById('timeline'); return new"
        " Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size }"
    )
    assert colours > 20, "an empty canvas has one colour"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_notes_of_advice_are_not_squeezed(open_page: Callable[..., Page], address: str) -> None:
    """A note has at least 14 characters a line, beside the columns of names and speeds."""
    asked = {"model": "qwen2.5-7b", "hardware": "rtx3080-10gb", "batch": "4", "seq": "4096"}
    page = open_page(f"{address}?{urlencode(asked)}", width=1000)
    page.locator("#advice .said:not(:empty)").first.wait_for()
    for width in (390, 901, 1000, 1180, 1181, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        widths = page.evaluate(
            "[...document.querySelectorAll('#advice .said:not(:empty)')]"
            ".map((each) => each.getBoundingClientRect().width)"
        )
        assert min(widths) > 100, width


def test_every_field_has_a_name(open_page: Callable[..., Page], address: str) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    page.locator("#speed").wait_for()
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button, canvas')]"
        ".filter((each) => !(each.ariaLabel || each.labels?.length || each.textContent.trim()))"
        ".map((each) => each.outerHTML)"
    )
    assert nameless == []


def test_the_timeline_is_read_zoomed_and_moved(
    open_page: Callable[..., Page], address: str
) -> None:
    page = open_page(f"{address}?{urlencode(SMALL)}")
    canvas = page.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    page.locator("#kinds li").first.wait_for()
    box = canvas.bounding_box()
    assert box is not None
    bar = page.evaluate("timeline.rectangle(timeline.ops.id.indexOf('B1.m0'), timeline.panels[0])")
    page.mouse.move(box["x"] + (bar["left"] + bar["right"]) / 2, box["y"] + bar["top"] + 5)
    page.locator("#readout", has_text="B1.m0: backward").wait_for()
    page.click("#in")
    assert page.evaluate("(view.to - view.from) / view.end") == pytest.approx(0.5)
    page.click("#all")
    assert page.evaluate("(view.to - view.from) / view.end") == 1


def test_a_static_site_shows_the_same_without_a_server(
    open_page: Callable[..., Page],
    checked: Checked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(static_site, "BATCHES", (1, 2))
    monkeypatch.setattr(static_site, "SEQUENCES", (256,))
    site = tmp_path / "site"
    static_site.write_site(site, ["qwen2.5-0.5b"], ["rtx4090"])
    page = open_page((site / "index.html").as_uri())
    page.fill("#tokens", "3M")
    settled(page, checked(*CHECK, "--tokens", "3M"))
    turn_to(page, "batch", "2")
    expected = checked(*CHECK[:3], "--batch", "2", "--seq", "256", "--tokens", "3M")
    settled(page, expected)
    page.check("#compared-machines input[value=rtx4090]")
    page.locator("#comparison td.best").wait_for()
    assert page.inner_text("#comparison td.best") == layout.speed(expected["tokens_per_second"])
    assert page.locator("#accumulation").is_hidden()
    again = open_page(page.url)
    settled(again, expected)
    other = open_page(f"{page.url.partition('?')[0]}?{urlencode({**SMALL, 'batch': '7'})}")
    other.locator("#error", has_text="step: found 7 x 256; allowed: 1 x 256, 2 x 256").wait_for()
