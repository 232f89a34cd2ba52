"""The C kernels: compiled at first use with the system's compiler, kept in a cache folder, called through ctypes, which releases Python's lock.

It costs a second once a machine. Where no compiler is found the optimizer does the same arithmetic in PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.simulator.aside import Aside

_SOURCE = Path(__file__).with_name("host.c")
_INCLUDED = _SOURCE.with_name("shares.h")
_COMPILERS = ("cc", "gcc", "clang")
# never fast-math: the bits are promised
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-pthread")
BLOCK = 2**14  # elements that one of several threads takes at a time: 0.05 ms of an update, and four rows of a sum
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class HostKernels:
    """The functions of one compiled library. Tensors are contiguous, in host memory, of the dtypes that each says; any run of elements will do."""

    def __init__(self, library: ctypes.CDLL, threads: int = 1, block: int = BLOCK) -> None:
        """`threads`: of the library's own, with the caller's; they take an op's elements `block` by block, a multiple of 4,096. More than one until `close`."""
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

        def function(name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
            found = getattr(library, f"megatrain_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self._library = library
        self._disband = function("disband", pointer)
        self._adamw = function("adamw", pointer, count, pointer, pointer, pointer, pointer, pointer, flag, pointer, pointer, pointer, pointer)
        self._row_sums = function("row_sums", pointer, count, pointer, flag, flag, pointer)
        self._ratio_sums = function("ratio_sums", pointer, count, pointer, flag, pointer, pointer, pointer)
        self._fold = function("fold", count, pointer)
        self._accumulate = function("accumulate", pointer, count, pointer, pointer, flag, flag)
        self._team: int | None = function("team", flag, count, result=pointer)(threads, block) if threads > 1 else None

    def on(self, threads: int, block: int = BLOCK) -> HostKernels:
        """The same on so many threads."""
        return HostKernels(self._library, threads, block)

    def close(self) -> None:
        """Ends the threads. No call may be under way; later ones run on the caller's. Not for a process that was forked since: threads are not."""
        if self._team is not None:
            self._disband(self._team)
            self._team = None

    def adamw(
        self, weights: torch.Tensor, low: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
        clip: torch.Tensor | None, scale: torch.Tensor | None, copy_to: torch.Tensor | None, scalars: Sequence[float],
    ) -> None:  # fmt: skip
        """All [n], `clip` and `scale` one factor each: as in `optimizer.update`. `scalars` in the order of `Scalars`; ctypes rounds them to nearest."""
        addresses = (weights.data_ptr(), _address(low), first.data_ptr(), second.data_ptr(), gradient.data_ptr())
        rounded = (ctypes.c_float * len(scalars))(*scalars)
        self._adamw(self._team, weights.numel(), *addresses, _is_fp32(gradient), _address(clip), _address(scale), _address(copy_to), rounded)

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        """`sums` [rows] fp32 of `gradient` [n] bf16 or fp32: each 4096 of them, or of their squares, folded."""
        self._row_sums(self._team, gradient.numel(), gradient.data_ptr(), _is_fp32(gradient), int(square), sums.data_ptr())

    def ratio_sums(self, gradient: torch.Tensor, second: torch.Tensor, sums: torch.Tensor, scalars: Sequence[float]) -> None:
        """`gradient` bf16 or fp32, `second` fp32 [n], n a multiple of 64; the first n / 64 of `sums`: as in `optimizer.ratio_sums`."""
        rounded = (ctypes.c_float * len(scalars))(*scalars)
        self._ratio_sums(self._team, gradient.numel(), gradient.data_ptr(), _is_fp32(gradient), second.data_ptr(), sums.data_ptr(), rounded)

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum of `sums` [2^k] fp32 by halving, 0-dimensional; `sums` are lost."""
        self._fold(sums.numel(), sums.data_ptr())
        return sums[0]

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        """`total` [n] fp32 = (first) or += `gradient` [n] bf16 or fp32."""
        self._accumulate(self._team, total.numel(), total.data_ptr(), gradient.data_ptr(), _is_fp32(gradient), int(first))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_fp32(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.float32)


@functools.cache
def host_kernels() -> HostKernels | None:
    """None, and one warning, where nothing compiles."""
    source = _SOURCE.read_bytes() + _INCLUDED.read_bytes()
    compilers = [path for path in map(shutil.which, _COMPILERS) if path]
    name = f"host-{hashlib.sha256(b'|'.join([source, *map(str.encode, _FLAGS), _processor()])).hexdigest()[:24]}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _loaded(folder / name, compilers)
    except (OSError, RuntimeError) as problem:  # no home, a full disk, a folder that forbids execution
        _log.info("kernels: not kept: %s", problem)
    try:
        with tempfile.TemporaryDirectory() as private:  # a library once loaded needs no file
            return _loaded(Path(private) / name, compilers)
    except (OSError, RuntimeError) as problem:
        _log.warning("kernels: %s; on a CPU the optimizer runs in PyTorch, several times slower", problem)
    return None


def _loaded(path: Path, compilers: list[str]) -> HostKernels:
    """The library at `path`, compiled if it is not there or damaged. Raises RuntimeError where nothing compiles, OSError."""
    if not _intact(path):
        _compile(path, compilers)
    return HostKernels(ctypes.CDLL(str(path)))


def _intact(path: Path) -> bool:
    """Its own SHA-256 follows the library: loading a truncated one would kill the process."""
    content = path.read_bytes() if path.is_file() else b""
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _compile(path: Path, compilers: list[str]) -> None:
    """Written aside and renamed, so that processes may race: each renames a whole file of the same content."""
    problems = []
    for compiler in compilers:
        with Aside(path, folder=True) as folder:
            output = folder / path.name
            done = subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(output), "-lm"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                content = output.read_bytes()
                output.write_bytes(content + hashlib.sha256(content).digest())
                output.replace(path)
                return
            problems.append(f"{compiler}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
    raise RuntimeError("; ".join(problems) or f"found no C compiler ({', '.join(_COMPILERS)})")


def _processor() -> bytes:
    """What -march=native looks at: a cache folder may be shared by different machines."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().split("\n\n", 1)[0].splitlines() if about.is_file() else [platform.processor()]
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(("model", "flags", "Features", "CPU")))]).encode()
