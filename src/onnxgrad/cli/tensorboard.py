"""Event files for TensorBoard: scalars in its record format, written with nothing but the standard library."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed
MASK = 0xA282EAD8  # added to a checksum that is itself part of what is stored
START = b"\x08\x01"  # SessionLog.status = START


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, which zlib does not have."""
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + MASK) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _message(field: int, content: bytes) -> bytes:
    """A field of protobuf that holds bytes, text or another message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


class EventFile:
    """A new file in `folder`, which TensorBoard shows as one run; `step` is where a resumed run begins again.

    What earlier files of the folder have after that step is then left out by TensorBoard.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / name
        self._file = self.path.open("xb")
        self._record(now, 0, _message(3, b"brain.Event:2"))  # the version of the format
        if step:
            self._record(now, step + 1, _message(7, START))
        self._file.flush()

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by tag."""
        summary = b"".join(
            _message(1, _message(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items()
        )
        self._record(time.time(), step, _message(5, summary))

    def flush(self) -> None:
        """To the disk, for TensorBoard to see."""
        self._file.flush()

    def _record(self, when: float, step: int, what: bytes) -> None:
        event = b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))
