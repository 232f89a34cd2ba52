"""Tests of the fused kernels: they give the bits of the PyTorch code.

PyTorch is used where there are no kernels. If Triton is installed,
`TRITON_INTERPRET=1 pytest tests/runtime/optimizer/test_kernels.py` tests its kernels in the
interpreter. `test_cuda.py` tests them on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from any_floats import any_floats
from hypothesis import given, settings
from hypothesis import strategies as st
from started_ranks import Driver

from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.adamw import (
    ALONE,
    AdamW,
    WorkerThreads,
    accumulate,
    join,
    ratio_sums,
    sum_of_squares,
    sum_parts,
    update,
    update_scales,
)
from megatrain.runtime.optimizer.kernels import host
from megatrain.runtime.optimizer.kernels.choice import Kernels, kernels
from megatrain.runtime.optimizer.kernels.host import HostKernels, host_kernels

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LENGTHS = st.integers(1, 300) | st.sampled_from([4095, 4096, 4097, 12_289, 33_000])


@pytest.fixture(scope="module", params=["c", "triton"])
def fused(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "c":
        return host_kernels() or pytest.skip("no C compiler")
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    from megatrain.runtime.optimizer.kernels.device import DeviceKernels

    return DeviceKernels()


@pytest.fixture(scope="module")
def three_threads() -> Iterator[WorkerThreads]:
    workers = WorkerThreads(3, block=4096)
    yield workers
    workers.close()


@contextmanager
def using(chosen: Kernels | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "kernels", lambda _: chosen)
        yield


def bits(values: torch.Tensor) -> list[int]:
    """Returns the bits of values. All NaNs have the same bits here."""
    return torch.where(
        values.isnan(), torch.tensor(0x7FC0_0000, dtype=torch.int32), values.view(torch.int32)
    ).tolist()


# ---- the arithmetic ----


@given(
    count=LENGTHS,
    offset=st.integers(0, 70),
    seed=st.integers(0, 2**32),
    wild=st.booleans(),
    planes=st.booleans(),
    dtype=DTYPES,
    threads=st.booleans(),
    clip=st.none() | st.sampled_from([1.0, 0.37, 1e-30, 0.0]),
    scale=st.none() | st.sampled_from([1.0, 0.61, 1e-30, float("nan")]),
    decay=st.none() | st.sampled_from([0.0, 0.1]),
    copied=st.booleans(),
    number=st.integers(1, 1000),
)
@settings(max_examples=150)
def test_an_update_s_bits_are_pytorch_s(
    fused: Kernels,
    three_threads: WorkerThreads,
    count: int,
    offset: int,
    seed: int,
    wild: bool,
    planes: bool,
    dtype: torch.dtype,
    threads: bool,
    clip: float | None,
    scale: float | None,
    decay: float | None,
    copied: bool,
    number: int,
) -> None:
    """An update of any range of elements gives PyTorch's bits.

    The elements before and after the range are unchanged.
    """
    whole, part = count + offset + 5, slice(offset, offset + count)
    generator = torch.Generator().manual_seed(seed)
    master, gradient, first, second = (any_floats(generator, whole, wild=wild) for _ in range(4))
    gradient = gradient.to(dtype)
    results = []
    for chosen in (fused, None):
        weights, low, moments = (
            master.clone(),
            None,
            torch.stack([first, second if wild else second.abs()]),
        )
        if planes:
            high, low = (
                torch.empty(whole, dtype=torch.bfloat16),
                torch.empty(whole, dtype=torch.int16),
            )
            optimizer.split(weights, high, low)
            weights = high
        copy = torch.zeros_like(weights)
        with using(chosen):
            update(
                weights[part],
                None if low is None else low[part],
                moments[:, part],
                gradient[part],
                settings=AdamW(weight_decay=0.01),
                rate=1e-2,
                number=number,
                clip=None if clip is None else torch.tensor(clip),
                workers=three_threads if threads and chosen is host_kernels() else ALONE,
                weight_decay=decay,
                copy_to=copy[part] if copied else None,
                scale=None if scale is None else torch.tensor(scale),
            )
        now = weights if low is None else join(weights, low)
        results.append([bits(now), bits(moments[0]), bits(moments[1])])
        if copied:
            assert scale != scale or torch.equal(
                copy[part].view(torch.uint8), weights[part].view(torch.uint8)
            )
        assert scale != scale or int(copy.count_nonzero()) == int(
            copy[part].count_nonzero() if copied else 0
        )
    assert results[0] == results[1]


@given(
    count=LENGTHS,
    offset=st.integers(0, 70),
    seed=st.integers(0, 2**32),
    wild=st.booleans(),
    dtype=DTYPES,
    threads=st.booleans(),
)
@settings(max_examples=60)
def test_a_sum_of_squares_has_pytorch_s_bits(
    fused: Kernels,
    three_threads: WorkerThreads,
    count: int,
    offset: int,
    seed: int,
    wild: bool,
    dtype: torch.dtype,
    threads: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = any_floats(generator, count + offset, wild=wild).to(dtype)[offset:]
    if wild and seed % 2:  # otherwise the sum of random bit patterns is a NaN
        gradient = torch.where(gradient.abs() < 1e15, gradient, torch.zeros((), dtype=dtype))
    with using(fused):
        ours = sum_of_squares(
            gradient, three_threads if threads and fused is host_kernels() else ALONE
        )
    with using(None):
        assert bits(ours) == bits(sum_of_squares(gradient))


@given(
    rows=st.integers(1, 200),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    wild=st.booleans(),
    dtype=DTYPES,
    threads=st.booleans(),
    number=st.integers(1, 1000),
)
@settings(max_examples=100)
def test_sums_of_ratios_have_pytorch_s_bits(
    fused: Kernels,
    three_threads: WorkerThreads,
    rows: int,
    offset: int,
    seed: int,
    wild: bool,
    dtype: torch.dtype,
    threads: bool,
    number: int,
) -> None:
    """Sums over any rows of 64 elements give PyTorch's bits.

    The values before and after the sums are unchanged.
    """
    part, generator = slice(64 * offset, 64 * (offset + rows)), torch.Generator().manual_seed(seed)
    gradient, second = (
        any_floats(generator, 64 * (rows + 5), wild=wild).to(dtype),
        any_floats(generator, 64 * (rows + 5), wild=wild),
    )
    results = []
    for chosen in (fused, None):
        sums = torch.full((rows + 5,), 7.0)
        workers = three_threads if threads and chosen is host_kernels() else ALONE
        with using(chosen):
            ratio_sums(
                gradient[part],
                second[part],
                sums[offset : offset + rows],
                settings=AdamW(),
                number=number,
                workers=workers,
            )
        results.append(bits(sums))
        assert bits(sums[:offset]) + bits(sums[offset + rows :]) == bits(torch.full((5,), 7.0))
    assert results[0] == results[1]


@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_scales_have_pytorch_s_bits(fused: Kernels, counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = [torch.rand(count, generator=generator) * 200 for count in counts]
    results = []
    for chosen in (fused, None):
        with using(chosen):
            results.append(
                bits(update_scales(sums, torch.tensor([64.0 * count for count in counts])))
            )
    assert results[0] == results[1]


def test_more_rows_than_a_row_has_elements(fused: Kernels) -> None:
    """A tensor with more rows than a row has elements gives PyTorch's bits.

    Its row sums are folded in more than one piece.
    """
    sums = torch.rand(2**14, generator=torch.Generator().manual_seed(0))
    wanted = optimizer._fold(sums.clone().view(1, -1))[0]
    assert torch.equal(fused.fold(sums), wanted)


@given(
    count=LENGTHS,
    offset=st.integers(0, 70),
    seed=st.integers(0, 2**32),
    dtype=DTYPES,
    first=st.booleans(),
)
def test_sums_of_gradients_have_pytorch_s_bits(
    fused: Kernels,
    three_threads: WorkerThreads,
    count: int,
    offset: int,
    seed: int,
    dtype: torch.dtype,
    first: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before, gradient = (
        any_floats(generator, count + offset, wild=True),
        any_floats(generator, count + offset, wild=True).to(dtype),
    )
    for workers in (
        (ALONE, three_threads) if fused is host_kernels() else (ALONE,)
    ):  # Triton's interpreter runs in one thread
        results = []
        for chosen in (fused, None):
            total = before.clone()
            with using(chosen):
                accumulate(total[offset:], gradient[offset:], first=first, workers=workers)
            results.append(bits(total))
        assert results[0] == results[1]


@settings(max_examples=20)
@given(
    st.integers(1, 5000),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 999),
    DTYPES,
    st.booleans(),
)
def test_parts_of_a_sum_are_added_one_after_the_other(
    fused: Kernels, count: int, ranks: int, sources: int, seed: int, dtype: torch.dtype, first: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    room = any_floats(generator, sources * ranks * count, wild=True).to(dtype)
    # as binding.py has them: all sources of a rank before those of the next rank
    parts = room.view(sources, ranks, count).transpose(0, 1)
    before = any_floats(generator, count, wild=True)
    expected, results = before.clone(), []
    for number, part in enumerate(part for rows in parts for part in rows):
        expected = part.float() if first and number == 0 else expected + part.float()
    for chosen in (fused, None):
        total = before.clone()
        with using(chosen):
            sum_parts(total, parts, first=first)
        results.append(bits(total))
    assert results == [bits(expected)] * 2


def test_tensors_that_a_kernel_does_not_take_go_through_pytorch() -> None:
    gradient = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    strided, narrow = gradient.T.flatten()[::2], gradient[0].half()
    assert optimizer.kernels_for(ALONE, (strided, None)) is None
    assert optimizer.kernels_for(ALONE, (narrow, None)) is None
    assert torch.equal(sum_of_squares(strided), sum_of_squares(strided.contiguous()))
    assert torch.equal(sum_of_squares(narrow), sum_of_squares(narrow.float()))


def test_tensors_of_unequal_length_are_refused() -> None:
    weights, moments = torch.zeros(10), torch.zeros(2, 10)
    with pytest.raises(AssertionError):
        update(
            weights, None, moments, torch.zeros(9), settings=AdamW(), rate=1e-2, number=1, clip=None
        )
    with pytest.raises(AssertionError):
        update(
            weights,
            None,
            torch.zeros(2, 9),
            torch.zeros(10),
            settings=AdamW(),
            rate=1e-2,
            number=1,
            clip=None,
        )


# ---- the library ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns an empty cache folder. No library is loaded yet."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.delenv("MEGATRAIN_KERNELS", raising=False)
    host_kernels.cache_clear()
    yield tmp_path / "cache"
    host_kernels.cache_clear()


def works(found: Kernels | None) -> bool:
    if found is None:
        return False
    sums = torch.zeros(1)
    found.row_sums(torch.full((100,), 2.0), sums, square=True)
    return float(sums) == 400


@pytest.fixture
def compiler() -> None:
    if not any(map(host.shutil.which, host._COMPILERS)):
        pytest.skip("no C compiler")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        lambda content: content[:5000] + b"?" + content[5001:],
    ],
)
def test_a_damaged_library_is_compiled_again(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    assert works(host_kernels())
    (library,) = cache.iterdir()
    whole, again = library.read_bytes(), library.with_name("aside")
    again.write_bytes(damage(whole))
    again.replace(library)  # a new file, because this process has the old one mapped
    host_kernels.cache_clear()
    assert works(host_kernels())
    assert host._intact(library)
    assert list(cache.iterdir()) == [library]


@pytest.mark.usefixtures("cache", "compiler")
def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(host_kernels())
    host_kernels.cache_clear()
    monkeypatch.setattr(host, "_COMPILERS", ())
    assert works(host_kernels())


@pytest.mark.usefixtures("compiler")
def test_processes_may_compile_at_once(cache: Path, driver: Driver, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, torch
os.environ["MEGATRAIN_CACHE"] = {str(tmp_path / "cache")!r}
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.kernels.host import host_kernels
assert host_kernels() is not None
print(float(optimizer.sum_of_squares(torch.full((100,), 2.0))))
""")
    driver.start([[[str(program)]]] * 2)
    assert driver.wait() == [0, 0], driver.printed(0)
    assert [driver.printed(rank).strip() for rank in range(2)] == ["400.0", "400.0"]
    (library,) = cache.iterdir()
    assert host._intact(library)


@pytest.mark.usefixtures("compiler")
def test_without_a_cache_folder_there_are_still_kernels(cache: Path) -> None:
    cache.write_text("not a folder")
    assert works(host_kernels())


@pytest.mark.parametrize("missing", [True, False])
def test_without_a_working_compiler_pytorch_is_used(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: bool,
) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'no headers' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o600 if missing else 0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_kernels() is None
    assert ("found no C compiler" if missing else "cc: no headers") in caplog.text
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert float(sum_of_squares(torch.full((100,), 2.0))) == 400
    assert list(cache.iterdir()) == []


def test_kernels_can_be_switched_off_and_are_for_cpus_and_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRAIN_KERNELS", "eager")
    assert kernels(torch.device("cpu")) is None
    assert kernels(torch.device("cuda")) is None
    monkeypatch.delenv("MEGATRAIN_KERNELS")
    assert kernels(torch.device("meta")) is None


def test_callers_take_turns_and_shares_add_up() -> None:
    """Several Python threads can share one team of worker threads.

    Every update is complete when its call returns, even after the team is closed.
    """
    alone = host_kernels()
    assert alone is not None
    team, count = alone.on(5, block=4096), 4096 * 9 + 17
    drawn = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def updated(kernels: HostKernels, gradient: torch.Tensor, times: int) -> torch.Tensor:
        weights, moments = torch.zeros(count), torch.zeros(2, count)
        for number in range(1, times + 1):
            scalars = optimizer.Scalars.of(AdamW(), 1e-2, number)
            kernels.adamw(
                weights, None, moments[0], moments[1], gradient, None, None, None, scalars
            )
        return weights

    expected = [updated(alone, gradient, 30) for gradient in drawn]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda gradient: updated(team, gradient, 30), drawn))
    team.close()
    team.close()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(updated(team, drawn[0], 30), expected[0])


@pytest.mark.skipif(host_kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_team_has_the_requested_threads_until_it_is_closed(threads: int) -> None:
    """A team has the requested number of threads, including the caller's, until it is closed."""
    alone = host_kernels()
    assert alone is not None
    running = Path("/proc/self/task")
    before = len(list(running.iterdir()))
    team = alone.on(threads)
    assert len(list(running.iterdir())) == before + threads - 1
    team.close()
    assert len(list(running.iterdir())) == before
