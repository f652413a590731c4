"""Page-aligned memory to copy through, where the caller's memory does not lie as the device wants it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Final

from l2kit_nvme.geometry import PAGE_BYTES
from l2kit_nvme.transfers import MAX_TRANSFER_BYTES, Run

#: Below this a copy by Python is over before others could have used the interpreter.
_SMALL_COPY_BYTES: Final = 32 << 10
#: Buffers that are kept for the next transfer; each costs memory only when it has been used.
_KEPT: Final = 32


class _Buffer(ctypes.Structure):
    """``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Where the memory of a view begins; read-only memory has an address as well."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


class Aligned:
    """One buffer of page-aligned memory, as large as the largest transfer."""

    def __init__(self) -> None:
        self._memory: Final = memoryview(mmap.mmap(-1, MAX_TRANSFER_BYTES))
        self._address: Final = address_of(self._memory)

    def vector(self, parts: Sequence[Run]) -> list[memoryview]:
        """What to hand to the system call for ``parts``: their own memory, or pieces of this one."""
        vector: list[memoryview] = []
        position = 0
        for part in parts:
            if part.view is not None:
                vector.append(part.view)
            else:
                vector.append(self._memory[position : position + part.nbytes])
                position += part.nbytes
        return vector

    def copy(self, data: bytes) -> memoryview:
        """``data`` in aligned memory, until it is used for something else."""
        self._memory[: len(data)] = data
        return self._memory[: len(data)]

    def fill(self, parts: Sequence[Run]) -> None:
        """Before writing: copy in what does not go as it is."""
        position = 0
        for part in parts:
            for view in part.copied:
                if len(view) > _SMALL_COPY_BYTES:
                    ctypes.memmove(self._address + position, address_of(view), len(view))
                else:
                    self._memory[position : position + len(view)] = view
                position += len(view)

    def drain(self, parts: Sequence[Run]) -> None:
        """After reading: copy out what does not go as it is."""
        position = 0
        for part in parts:
            for view in part.copied:
                if len(view) > _SMALL_COPY_BYTES:
                    ctypes.memmove(address_of(view), self._address + position, len(view))
                else:
                    view[:] = self._memory[position : position + len(view)]
                position += len(view)


class AlignedPool:
    """Buffers for as many transfers as run at once: never more than the adapter has threads. Thread-safe; one lock."""

    def __init__(self) -> None:
        """Empty; a buffer is made when one is missing."""
        self._lock = threading.Lock()
        self._kept: list[Aligned] = []

    def take(self) -> Aligned:
        """A buffer of the caller's own."""
        with self._lock:
            if self._kept:
                return self._kept.pop()
        return Aligned()

    def give_back(self, buffer: Aligned) -> None:
        """The caller no longer uses it."""
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(buffer)

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._kept.clear()


#: What lies behind the end of an object is written as zeros, and read into nowhere.
ZEROS: Final = memoryview(bytes(PAGE_BYTES))
