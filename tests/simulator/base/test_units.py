"""Tests of sizes and durations as text, and of the examples in the simulator's docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatrain.simulator
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import (
    exact_size,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_count,
    rounded_up,
)

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(megatrain.simulator.__path__, "megatrain.simulator.")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_there_are_examples_in_the_docstrings() -> None:
    attempted = {
        name: doctest.testmod(importlib.import_module(name)).attempted
        for name in ("megatrain.simulator.base.units", "megatrain.simulator.schedule.op")
    }
    assert all(attempted.values()), attempted


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512B", 512),
        ("24G", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("24gb", 24 * 10**9),
        ("24gib", 24 * 2**30),
        ("1.5 T", 3 * 2**39),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("1.5GiB", 3 * 2**29),
        ("2tb", 2 * 10**12),
        (" 64mib ", 2**26),
        ("0.5 KiB", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "0",
        "24",
        "1e9",
        "1.5.2 GB",
        "12 parsecs",
        "1,5GiB",
        "nan",
        "inf",
        "9999999999 TiB",
        "1 GiB 2",
        "٣GiB",
        "9" * 400,
        "0.4B",
    ],
)
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_bytes(text, "--device-memory")
    message = str(caught.value)
    assert message.startswith("--device-memory: found ")
    assert "allowed: " in message
    assert "fix: " in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "0", "0.4", "-1", "1 GiB", "9" * 400])
def test_a_text_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--tokens: found .*allowed: .*fix: "):
        parse_count(text, "--tokens")


def test_the_error_for_a_number_without_a_unit_suggests_one() -> None:
    for number, size in (
        ("24", "24GiB"),
        ("1.5", "1.5GiB"),
        ("400000", "400kB"),
        ("402653184", "384MiB"),
        ("25769803776", "24GiB"),
        ("5000000000", "5GB"),
        ("123457", "123457B"),
    ):
        with pytest.raises(UserError, match=f"found {number}, a number .*; fix: write {size}$"):
            parse_bytes(number, "--device-memory")
        parse_bytes(size)


@given(st.integers(1, 2**59))
def test_the_value_of_an_option_is_not_rounded(size: int) -> None:
    assert parse_bytes(exact_size(size)) == pytest.approx(size, rel=1e-15)
    assert 0 <= rounded_up(size) - size < max(2**20, size / 8 + 1)


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_bytes(text) >= 0


@given(st.integers(0, 2**59))
def test_written_sizes_read_back_to_three_digits(size: int) -> None:
    text = format_bytes(size)
    if size:
        assert abs(parse_bytes(text) - size) <= 0.005 * size + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.0, "2.000 s"),
        (0.25, "250.000 ms"),
        (0.0, "0.0 us"),
        (-0.002, "-2.000 ms"),
        (1e-6, "1.0 us"),
    ],
)
def test_durations_are_written_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
