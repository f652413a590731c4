"""Objects as they lie in a backend: envelope and payload, read and checked without being decoded.

What archives hold, and what the scrubber looks at. No codec is needed for it, as the envelope's checksum is over the
stored bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import anyio

from l2kit import envelope
from l2kit.adapter import L2Adapter
from l2kit.batches import INLINE_CPU_BYTES, current_lane
from l2kit.envelope import Envelope
from l2kit.errors import BackendError, BackendTimeoutError, CapacityError, CorruptObjectError, L2Error, first_error
from l2kit.inventory import looking_only
from l2kit.keys import ObjectKey
from l2kit.outcomes import StoreStatus

#: No stored object is larger; what claims to be is damaged or hostile, and gets no memory.
MAX_SEALED_BYTES: Final = 4 << 30

_ATTEMPTS: Final = 3

ResultT = TypeVar("ResultT")


def check_sealed(key: ObjectKey, stored: memoryview) -> Envelope:
    """Check that ``stored`` is the whole object ``key``, undamaged. CPU-bound: one pass over it.

    Raises:
        CorruptObjectError: it is not; the reason is one of `envelope.CORRUPTION_REASONS`.
    """
    header = envelope.parse(stored)
    metadata = stored[envelope.HEADER_BYTES : envelope.HEADER_BYTES + header.metadata_length]
    envelope.verify(header, key, metadata, [stored[header.payload_offset :]], len(stored))
    if not header.metadata_length and header.stored_length != header.layout.nbytes:
        raise CorruptObjectError("length", "an uncoded payload differs in length from its object")
    return header


async def read_sealed(adapter: L2Adapter[Any], key: ObjectKey, expected_bytes: int) -> memoryview | None:
    """The bytes that an open adapter has stored under ``key``, not checked; None when there is no such object.

    - ``expected_bytes`` is what a listing says; a replaced object of another size is read as well.
    - It takes ``config.timeout_s`` at most, as far as the adapter can be cancelled.
    - It is no use of the object: see `counts_as_use`.

    Raises:
        CorruptObjectError: ``length``; more is stored than `MAX_SEALED_BYTES`.
        L2Error: the backend failed.
    """
    nbytes = max(expected_bytes, envelope.HEADER_BYTES)
    for _ in range(_ATTEMPTS):
        if nbytes > MAX_SEALED_BYTES:
            raise CorruptObjectError("length", f"{nbytes} bytes are stored, no object has more than {MAX_SEALED_BYTES}")
        stored = memoryview(bytearray(nbytes))
        with looking_only():
            size = await _bounded(adapter, adapter.load_one(key, [stored]), "load")
        if size is None:
            return None
        if size <= nbytes:
            return stored[:size]
        nbytes = size
    raise BackendError(f"{adapter.name}: the object {key} grew with every attempt to read it")


async def read_checked(adapter: L2Adapter[Any], key: ObjectKey, expected_bytes: int) -> memoryview | None:
    """As :func:`read_sealed`, but checked: these bytes are the object.

    Raises:
        CorruptObjectError: they are not. Nothing was counted, and the object is still there.
        L2Error: the backend failed.
    """
    stored = await read_sealed(adapter, key, expected_bytes)
    if stored is None:
        return None
    if len(stored) <= INLINE_CPU_BYTES + envelope.HEADER_BYTES:
        check_sealed(key, stored)
    else:
        await adapter.run_in_thread(lambda: check_sealed(key, stored))
    return stored


async def read_head(adapter: L2Adapter[Any], key: ObjectKey) -> memoryview | None:
    """The first `envelope.HEADER_BYTES` of what is stored under ``key``, or less if there is less; None for a miss.

    Raises:
        L2Error: the backend failed.
    """
    head = memoryview(bytearray(envelope.HEADER_BYTES))
    with looking_only():
        size = await _bounded(adapter, adapter.load_one(key, [head]), "load")
    return None if size is None else head[:size]


def repadded(key: ObjectKey, stored: memoryview, alignment: int) -> list[memoryview]:
    """A checked object as a backend with this ``alignment`` would have it: its payload is the same, and not copied.

    CPU-bound where the padding differs: one pass over the payload.
    """
    header = envelope.parse(stored)
    if header.payload_offset == envelope.payload_offset(header.metadata_length, alignment):
        return [stored]
    metadata = bytes(stored[envelope.HEADER_BYTES : envelope.HEADER_BYTES + header.metadata_length])
    payload = stored[header.payload_offset :]
    head = envelope.seal(key, header.layout, [payload], metadata=metadata, alignment=alignment)
    return [memoryview(head), payload]


async def store_sealed(
    adapter: L2Adapter[Any], key: ObjectKey, stored: memoryview, *, repad: bool = False
) -> StoreStatus:
    """Store bytes that :func:`check_sealed` has passed in an open adapter.

    They are stored exactly as they are, or, with ``repad``, with the padding that the adapter's own stores have. An
    object with the padding of another backend is read in two steps, until it is stored anew.

    Raises:
        CapacityError: it is larger than the backend takes.
        L2Error: the backend failed.
    """
    data = [stored]
    if repad:
        alignment = adapter.capabilities.alignment
        data = await adapter.run_in_thread(lambda: repadded(key, stored, alignment))
    size, limit = sum(map(len, data)), adapter.capabilities.max_object_bytes
    if limit is not None and size > limit:
        raise CapacityError(f"{adapter.name}: {size} bytes exceed the largest object of {limit} bytes")
    token = current_lane.set("write")
    try:
        return await _bounded(adapter, adapter.store_one(key, data), "store")
    finally:
        current_lane.reset(token)


async def _bounded(adapter: L2Adapter[Any], call: Awaitable[ResultT], what: str) -> ResultT:
    """A hook's answer, in time, its errors translated."""
    limit_s = adapter.config.timeout_s
    with anyio.move_on_after(limit_s):
        try:
            return await call
        except Exception as caught:
            error = first_error(caught)
            if isinstance(error, L2Error):
                raise error from error.__cause__
            raise adapter.translate_error(error) from error
    raise BackendTimeoutError(f"{adapter.name}: no answer to a {what} within {limit_s:g} s")
