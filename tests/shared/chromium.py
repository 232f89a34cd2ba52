"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the Chromium of the system, or the one that `playwright install chromium` has fetched.

    Skips the test if there is neither, or no playwright.
    """
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as driver:
        if program is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        browser = driver.chromium.launch(executable_path=program)
        yield browser
        browser.close()
