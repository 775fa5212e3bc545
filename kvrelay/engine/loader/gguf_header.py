"""Reads the header of a GGUF file: scalar metadata and where each tensor lies.

The `gguf` package's reader makes an object of every token and merge in the vocabulary, seconds of work that weights
do not need; arrays are stepped over here. Layout: docs/gguf.md in ggml-org/ggml.
"""

import struct
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT_BYTES = 32

_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file: shape (rows first), quantisation, and byte offset from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """Scalar metadata by key, and tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(data: memoryview) -> Header:
    """Parse the header at the start of a file's bytes.

    Raises:
        ValueError: these are not the bytes of a GGUF file of a known version, or they end early.
    """
    cursor = _Cursor(data)
    try:
        return _read(cursor)
    except struct.error as error:
        raise ValueError(f"the file ends early, at byte {cursor.offset} of its header") from error


def _read(cursor: "_Cursor") -> Header:
    if cursor.bytes(4) != MAGIC:
        raise ValueError("the file does not begin with GGUF")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version}; supported: {', '.join(map(str, VERSIONS))}")
    tensor_count, field_count = cursor.number("<Q"), cursor.number("<Q")
    fields = dict(cursor.field() for _ in range(field_count))
    places = dict(cursor.place() for _ in range(tensor_count))
    alignment = fields.get("general.alignment", ALIGNMENT_DEFAULT_BYTES)
    start = -(-cursor.offset // alignment) * alignment
    tensors = {name: TensorPlace(place.shape, place.kind, start + place.offset) for name, place in places.items()}
    return Header(fields, tensors)


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.offset)
        self.offset += struct.calcsize(form)
        return value

    def bytes(self, count: int) -> bytes:
        self.offset += count
        return bytes(self._data[self.offset - count : self.offset])

    def text(self) -> str:
        return self.bytes(self.number("<Q")).decode()

    def field(self) -> tuple[str, Any]:
        name = self.text()
        return name, self._value(GGUFValueType(self.number("<I")))

    def place(self) -> tuple[str, TensorPlace]:
        name = self.text()
        dims = [self.number("<Q") for _ in range(self.number("<I"))]
        kind = GGMLQuantizationType(self.number("<I"))
        return name, TensorPlace(tuple(reversed(dims)), kind, self.number("<Q"))

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._skip_array()
        return self.number(_FORMATS[kind])

    def _skip_array(self) -> None:
        kind, count = GGUFValueType(self.number("<I")), self.number("<Q")
        if kind in _FORMATS:
            self.offset += struct.calcsize(_FORMATS[kind]) * count
            return
        for _ in range(count):
            if kind == GGUFValueType.STRING:
                length = self.number("<Q")  # read first: reading moves the offset
                self.offset += length
            else:
                self._skip_array()
