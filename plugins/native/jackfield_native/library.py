"""The loaded kernels. Pointers and strides are taken from torch tensors by the plugins; nothing is checked in C.

Threads: work is shared out by the OpenMP runtime that torch has loaded, so that both use the same threads. Calls can be
kept, and made again by whoever knows that their tensors are still in place.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_float, c_int, c_long, c_void_p
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from jackfield.errors import PluginError
from jackfield_native.build import library_path
from jackfield_native.toolchain import runtime_file

MAPS = Path("/proc/self/maps")

TYPES = {
    word: number
    for number, word in enumerate(
        ("F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    )
}
"""GGML's words of the storage types that the kernels read, with their numbers in formats.h."""
TILE_OUTPUTS = 4
"""Rows of weight that a thread decodes at once; OUTS in simd.h."""
MOST_HEAD_SIZE = 512
"""MOST_SIZE in attention.c."""
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

P, L, F, N = c_void_p, c_long, c_float, c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "jf_set_runtime": (P, P),
    "jf_team_size": (N,),
    "jf_integer_rows": (),
    "jf_product": (N, P, L, P, L, P, P, L, L, L, L, P, N, N),
    "jf_decode": (N, P, L, P, L, L, L, N),
    "jf_rms_norm": (P, P, P, L, L, L, L, L, F, N),
    "jf_add_rms_norm": (P, P, P, P, P, L, L, L, L, F, N),
    "jf_gated": (N, P, P, L, L, L, N),
    "jf_rotary": (P, P, L, L, L, L, L, L, N),
    "jf_prepare": (P, L, P, L, L, P, P, F, P, L, L, L, P, L, L, L, P, L, L, L, L, L, L, N),
    "jf_write": (P, L, L, P, L, L, P, L, L, L, P, L, L, L, P, L, L, L, L, L, N),
    "jf_attend": (P, L, L, P, L, L, L, P, L, L, L, P, L, L, P, P, P, P, P, L, L, L, L, L, L, L, F, F, N),
}
"""Arguments of every function; the C sources say what they are."""
SETTINGS = frozenset({"jf_set_runtime", "jf_team_size", "jf_integer_rows"})


class Library:
    """Functions by the names in ``SIGNATURES``, as attributes.

    Args:
        functions: those that compute nothing in tensors are not kept.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._threads = threading.local()
        for name, function in functions.items():
            setattr(self, name, function if name in SETTINGS else partial(self._call, function))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels have no {name}")

    def keep(self, take: Callable[[Callable[[], Any]], None] | None) -> None:
        """Give every call of this thread to ``take`` too, without arguments, from now on; None: no more."""
        self._threads.take = take

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)
        take = getattr(self._threads, "take", None)
        if take is not None:
            take(partial(function, *arguments))


@lru_cache
def kernels() -> Any:
    """Return the kernels, built now where this machine has not built them before.

    Raises:
        PluginError: they cannot be built, or there is no OpenMP runtime.
    """
    return load(library_path())


def loaded() -> Library | None:
    """Return the kernels where something in this process has loaded them."""
    return kernels() if kernels.cache_info().currsize else None


def load(path: Path) -> Library:
    """Return a built library, ready for use."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.jf_team_size.restype = library.jf_integer_rows.restype = c_int
    runtime = ctypes.CDLL(str(loaded_runtime()))
    addresses = (ctypes.cast(getattr(runtime, name), c_void_p) for name in ("GOMP_parallel", "omp_get_thread_num"))
    library.jf_set_runtime(*addresses)
    return Library({name: getattr(library, name) for name in SIGNATURES})


def loaded_runtime() -> Path:
    """Return the file of the OpenMP runtime that torch uses in this process."""
    mapped = []
    if MAPS.exists():
        names = {line.split(maxsplit=5)[5] for line in MAPS.read_text().splitlines() if line.count("/")}
        mapped = [Path(name) for name in sorted(names) if Path(name).name.startswith(("libgomp", "libiomp5", "libomp"))]
    # A second runtime may have come with another package; torch's own lies beside it.
    home = str(Path(torch.__file__).parent)
    mapped.sort(key=lambda path: not str(path).startswith(home))
    found = mapped[0] if mapped else runtime_file()
    if found is None:
        raise PluginError(
            "torch has loaded no OpenMP runtime",
            field="native kernels",
            value=torch.__version__,
            remedy="use a wheel of torch from PyPI, or choose the torch plugins",
        )
    return found


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor's numbers begin; None for None."""
    return None if tensor is None else tensor.data_ptr()
