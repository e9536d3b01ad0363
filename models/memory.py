"""Memory of this process or of its GPU: what tensors hold by layer, and the measured peak. Numbers are bytes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

logger = logging.getLogger(__name__)

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)")
GROWTH = 1.05
"""Memory may grow by this factor from the second epoch to the last before it counts as a leak."""
HOLES = 0.05
"""The free memory inside the heap that may stay resident, as a share of what is in use."""
LARGE, HUGE_PAGE = 8 * 2**20, 2 * 2**20
"""Bytes from which `large_tensor` leaves the heap, and what its memory is rounded up to: a quarter more at most."""


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `500 MB` and the like."""
    number, unit = SIZE.fullmatch(text).groups()  # type: ignore[union-attr]
    return int(float(number) * (1024 if "i" in unit else 1000) ** ("KMGT".index(unit[0]) + 1))


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors made inside the mode and still alive, by the name that `layer` had when they were made.

    Works on real and on fake tensors. `peak` is the most that was alive at once and `at_peak` its parts by name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = "other"
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._known: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.add(value, self.layer)
        return out

    def add(self, tensor: torch.Tensor, layer: str) -> None:
        """Count a tensor's storage under `layer` for as long as it lives; a storage counts once."""
        storage = tensor.untyped_storage()
        # The address alone may be used again by a later storage
        known = self._known.get(storage._cdata)
        if known is not None and known() is storage:
            return
        size, key = storage.nbytes(), storage._cdata
        self._names[key] = layer

        def forget(reference: Any) -> None:
            if self._known.get(key) is reference:
                self.live[self._names[key]] -= size
                self.total -= size
                del self._known[key], self._names[key]

        self._known[key] = weakref.ref(storage, forget)
        self.live[layer] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, +self.live

    def move(self, tensor: torch.Tensor, layer: str) -> None:
        """Count a known tensor's storage under another name from now on."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known() is storage:
            self.live[self._names[storage._cdata]] -= storage.nbytes()
            self.live[layer] += storage.nbytes()
            self._names[storage._cdata] = layer


class PeakMemory:
    """How far memory rises from here on, at its highest: on CUDA what torch allocated, elsewhere the resident set (Linux)."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self.before = torch.cuda.memory_allocated() if device == "cuda" else _status("VmRSS")

    @property
    def growth(self) -> int | None:
        """Bytes above the start at the highest moment so far; None where the kernel does not tell."""
        if not self.before and self.device != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else _status("VmHWM")
        return max(0, peak - self.before)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: sizes in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def in_use(device: str) -> int:
    """Bytes in use now: what torch allocated on CUDA, else what the C library has handed out and not got back, and large
    tensors outside its heap (glibc; with another one the resident set, 0 where the kernel does not tell)."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError, AttributeError):
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd) + _Block.live
    return _status("VmRSS")


class LeakGuard:
    """Warns, once, when memory at the end of an epoch has grown past GROWTH times that of the second epoch (the first one
    still fills pools and caches)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.epochs: list[int] = []
        self.warned = False

    def __call__(self, on_purpose: int) -> None:
        """To be called at the end of every epoch; `on_purpose` are bytes held now that come and go, such as the best weights."""
        self.epochs.append(max(0, in_use(self.device) - on_purpose))
        if len(self.epochs) > 2 and self.epochs[-1] > GROWTH * self.epochs[1] > 0 and not self.warned:
            self.warned = True
            logger.warning(
                "memory grew from %.0f MiB after epoch 2 to %.0f MiB after epoch %d: something is kept from update to update",
                self.epochs[1] / 2**20, self.epochs[-1] / 2**20, len(self.epochs),
            )  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on a GPU (torch, cuDNN, cuBLAS) or in the CPU's allocator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search(_OUT_OF_MEMORY, str(error)) is not None
    )


_OUT_OF_MEMORY = (
    r"(?i)out of memory|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_SUPPORTED|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't|not enough)|bad_?alloc"
)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>


@contextlib.contextmanager
def steady_heap() -> Iterator[None]:
    """Inside, glibc keeps freed memory for the next update instead of giving it back and faulting it in again, and its
    threshold for mapping large blocks stays where it is: without this the heap of a training run breaks up and grows. Does
    nothing with other C libraries. On leaving, what is free goes back to the system."""
    try:
        mallopt = ctypes.CDLL(None).mallopt  # glibc's
    except (OSError, AttributeError):
        yield
        return
    mallopt(_MMAP_THRESHOLD, 2**30)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**26)
        close_holes()


def close_holes() -> None:
    """Give the free pages inside the C library's heap back to the system, where that is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapHoles:
    """Keeps the resident heap near what is in use, by closing its holes when they have grown past HOLES.

    glibc's aligned blocks leave holes that an equal one does not fit (sourceware bug 14581), so that a heap which is taken and
    freed in turns grows by a fifth over what is ever in use at once. A page given back is a page fault when it is wanted again.
    """

    def __init__(self) -> None:
        self._outside: int | None = None  # resident, though not in the heap

    def __call__(self) -> None:
        """To be called before a part of an update that takes and frees much memory."""
        used = in_use("cpu")
        beside = _resident() - used  # the holes are in it
        if self._outside is None or beside - self._outside > HOLES * used:
            close_holes()
            self._outside = _resident() - used
        else:  # something else may have given memory back since
            self._outside = min(self._outside, beside)


def _resident() -> int:
    """Resident bytes of this process that are no file's; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        _, resident, files = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(files)) * mmap.PAGESIZE
    return 0


class _Block(mmap.mmap):
    """Memory of a large tensor, given back with it."""

    live = 0

    def __del__(self) -> None:
        _Block.live -= len(self)


def large_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU, outside the C library's heap from LARGE bytes on: it leaves no hole there, and where the
    kernel has huge pages its memory comes with one page fault in 2 MiB.

    Raises MemoryError when there is none.
    """
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // HUGE_PAGE) * HUGE_PAGE
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        block = _Block(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {size} bytes: {error}") from error
    _Block.live += size
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=dtype, count=count).view(shape)


def _status(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
