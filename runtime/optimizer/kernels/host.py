"""The C kernels. They are compiled at first use with the system's compiler, stored in a cache
folder, and called through ctypes, which releases the GIL.

Compilation takes a second, once on each machine. Without a compiler, the optimizer does the same
arithmetic in PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain.runtime.user_cache import user_cache
from megatrain.simulator.base.atomic_files import AtomicWrite

_SOURCE = Path(__file__).with_name("host.c")
_INCLUDED = _SOURCE.with_name("shares.h")
_COMPILERS = ("cc", "gcc", "clang")
# -ffast-math is left out, because it would change the bits of results.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
BLOCK = 2**14
"""Elements that a thread takes at a time: 0.05 ms of an update, or four rows of a sum."""
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class HostKernels:
    """The `Kernels` of one compiled library. Tensors must be in host memory. They need no alignment
    beyond the alignment of their elements.
    """

    def __init__(self, library: ctypes.CDLL, threads: int = 1, block: int = BLOCK) -> None:
        """Starts `threads` - 1 threads of the library, which work together with the calling thread
        and run until `close`. A thread takes `block` elements of an op at a time. `block` must be a
        multiple of 4,096.
        """
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

        def function(name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
            symbol = getattr(library, f"megatrain_{name}")
            symbol.argtypes, symbol.restype = arguments, result
            return symbol

        self._library = library
        self._disband = function("disband", pointer)
        update = (pointer, count, *[pointer] * 5, flag, *[pointer] * 4)
        self._adamw = function("adamw", *update)
        self._blockwise_adamw = function("blockwise_adamw", *update, *[ctypes.c_int64] * 2)
        self._row_sums = function("row_sums", pointer, count, pointer, flag, flag, pointer)
        self._ratio_sums = function(
            "ratio_sums", pointer, count, pointer, flag, pointer, flag, pointer, pointer
        )
        self._fold = function("fold", count, pointer)
        self._accumulate = function("accumulate", pointer, count, pointer, pointer, flag, flag)
        self._team: int | None = (
            function("team", flag, count, result=pointer)(threads, block) if threads > 1 else None
        )

    def on(self, threads: int, block: int = BLOCK) -> HostKernels:
        """Returns the same kernels with `threads` threads of their own."""
        return HostKernels(self._library, threads, block)

    def close(self) -> None:
        """Ends the threads. No other method may be running. Later calls run on the calling thread
        only. Must not be called in a forked process, which does not have the threads.
        """
        if self._team is not None:
            self._disband(self._team)
            self._team = None

    def adamw(
        self,
        weights: torch.Tensor,
        low: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        gradient: torch.Tensor,
        clip: torch.Tensor | None,
        scale: torch.Tensor | None,
        copy_to: torch.Tensor | None,
        scalars: Sequence[float],
    ) -> None:
        self._adamw(
            self._team,
            weights.numel(),
            weights.data_ptr(),
            _address(low),
            first.data_ptr(),
            second.data_ptr(),
            gradient.data_ptr(),
            _is_fp32(gradient),
            _address(clip),
            _address(scale),
            _address(copy_to),
            (ctypes.c_float * len(scalars))(*scalars),
        )

    def blockwise_adamw(
        self,
        weights: torch.Tensor,
        low: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        gradient: torch.Tensor,
        clip: torch.Tensor | None,
        scale: torch.Tensor | None,
        copy_to: torch.Tensor | None,
        scalars: Sequence[float],
        states: tuple[int, int],
    ) -> None:
        self._blockwise_adamw(
            self._team,
            weights.numel(),
            weights.data_ptr(),
            _address(low),
            first.data_ptr(),
            second.data_ptr(),
            gradient.data_ptr(),
            _is_fp32(gradient),
            _address(clip),
            _address(scale),
            _address(copy_to),
            (ctypes.c_float * len(scalars))(*scalars),
            *states,
        )

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        self._row_sums(
            self._team,
            gradient.numel(),
            gradient.data_ptr(),
            _is_fp32(gradient),
            int(square),
            sums.data_ptr(),
        )

    def ratio_sums(
        self,
        gradient: torch.Tensor,
        second: torch.Tensor,
        sums: torch.Tensor,
        scalars: Sequence[float],
    ) -> None:
        self._ratio_sums(
            self._team,
            gradient.numel(),
            gradient.data_ptr(),
            _is_fp32(gradient),
            second.data_ptr(),
            int(second.dtype == torch.uint8),
            sums.data_ptr(),
            (ctypes.c_float * len(scalars))(*scalars),
        )

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        self._fold(sums.numel(), sums.data_ptr())
        return sums[0]

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        self._accumulate(
            self._team,
            total.numel(),
            total.data_ptr(),
            gradient.data_ptr(),
            _is_fp32(gradient),
            int(first),
        )

    def sum_parts(self, total: torch.Tensor, parts: torch.Tensor, *, first: bool) -> None:
        for number, part in enumerate(part for rows in parts for part in rows):
            self.accumulate(total, part, first=first and number == 0)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_fp32(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.float32)


@functools.cache
def host_kernels() -> HostKernels | None:
    """Returns kernels that run on the calling thread. If they cannot be compiled, logs one warning
    and returns None.
    """
    source = _SOURCE.read_bytes() + _INCLUDED.read_bytes()
    compilers = [path for path in map(shutil.which, _COMPILERS) if path]
    content = b"|".join([source, *map(str.encode, _FLAGS), _processor()])
    name = f"host-{hashlib.sha256(content).hexdigest()[:24]}.so"
    try:
        folder = user_cache()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _loaded(folder / name, compilers)
    except (OSError, RuntimeError) as problem:
        # for example no home folder, a full disk, or a file system that forbids execution
        _log.info("kernels: not stored in the cache folder: %s", problem)
    try:
        # the library stays loaded after its file is deleted
        with tempfile.TemporaryDirectory() as private:
            return _loaded(Path(private) / name, compilers)
    except (OSError, RuntimeError) as problem:
        _log.warning(
            "kernels: %s; the optimizer runs in PyTorch on the CPU, which is several times slower",
            problem,
        )
    return None


def _loaded(path: Path, compilers: list[str]) -> HostKernels:
    """Returns the kernels of the library at `path`. Compiles it first if it is missing or damaged.

    Raises RuntimeError if no compiler works, and OSError if the file cannot be written or loaded.
    """
    if not _intact(path):
        _compile(path, compilers)
    return HostKernels(ctypes.CDLL(str(path)))


def _intact(path: Path) -> bool:
    """Returns whether the file at `path` has the SHA-256 digest that is stored at its end. Loading
    a truncated library would kill the process.
    """
    content = path.read_bytes() if path.is_file() else b""
    return (
        len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]
    )


def _compile(path: Path, compilers: list[str]) -> None:
    """Compiles the library to a temporary file and renames this file to `path`. Several processes
    may do this at the same time, because each renames a complete file with the same content. Raises
    RuntimeError if no compiler works.
    """
    problems = []
    for compiler in compilers:
        with AtomicWrite(path, folder=True) as folder:
            output = folder / path.name
            done = subprocess.run(
                [compiler, *_FLAGS, str(_SOURCE), "-o", str(output), "-lm"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                content = output.read_bytes()
                output.write_bytes(content + hashlib.sha256(content).digest())
                output.replace(path)
                return
            problems.append(f"{compiler}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
    raise RuntimeError("; ".join(problems) or f"found no C compiler ({', '.join(_COMPILERS)})")


def _processor() -> bytes:
    """Returns the properties of the processor that the result of -march=native depends on. They are
    part of the library's name, because different machines may share a cache folder.
    """
    about = Path("/proc/cpuinfo")
    lines = (
        about.read_text().split("\n\n", 1)[0].splitlines()
        if about.is_file()
        else [platform.processor()]
    )
    return "\n".join(
        [
            platform.machine(),
            *(line for line in lines if line.startswith(("model", "flags", "Features", "CPU"))),
        ]
    ).encode()
