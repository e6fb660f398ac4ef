"""Stored responses, in the encoding that all libraries and sidecars share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Fields", "StoredResponse"]

Fields = Sequence[tuple[str, bytes]]
"""Header fields: names in lower case, and values as bytes."""

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
MAX_FIELDS = 256


class DecodeError(ValueError):
    """The bytes are not a stored response of a version that this library knows."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as a record keeps it: status, header fields, body, and trailer fields."""

    status: int
    headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""
    trailers: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(
        cls, status: int, headers: Iterable[tuple[str, bytes | str]] = (), body: bytes | str = b""
    ) -> StoredResponse:
        """A response from texts or bytes. Names of header fields are brought to lower case."""
        fields = tuple(
            (name.lower(), value.encode("latin-1") if isinstance(value, str) else value) for name, value in headers
        )
        return cls(status, fields, body.encode() if isinstance(body, str) else body)

    def encode(self) -> bytes:
        """The response as bytes.

        Raises ValueError if the response has a status, a field or a size that no store takes.
        """
        if not 200 <= self.status <= 999:
            raise ValueError(f"a stored response has a status from 200 to 999, and not {self.status}")
        if len(self.headers) > MAX_FIELDS or len(self.trailers) > MAX_FIELDS:
            raise ValueError(f"a stored response has at most {MAX_FIELDS} header fields")
        out = [struct.pack(">BHHH", VERSION, self.status, len(self.headers), len(self.trailers))]
        for name, value in (*self.headers, *self.trailers):
            out += struct.pack(">HI", len(name), len(value)), name.encode("ascii"), value
        out.append(self.body)
        encoded = b"".join(out)
        if len(encoded) > MAX_BYTES:
            raise ValueError(f"a stored response has at most {MAX_BYTES} bytes, and not {len(encoded)}")
        return encoded

    @classmethod
    def decode(cls, encoded: bytes) -> StoredResponse:
        """The response in these bytes. Raises :class:`DecodeError` if there is none."""
        try:
            version, status, headers, trailers = struct.unpack_from(">BHHH", encoded)
            if version != VERSION or not 200 <= status <= 999 or max(headers, trailers) > MAX_FIELDS:
                raise DecodeError("the stored response is of an unknown version, or damaged")
            at, fields = 7, []
            for _ in range(headers + trailers):
                name_size, value_size = struct.unpack_from(">HI", encoded, at)
                at += 6
                end = at + name_size + value_size
                if end > len(encoded):
                    raise DecodeError("the stored response is cut short")
                fields.append((encoded[at : at + name_size].decode("ascii"), bytes(encoded[at + name_size : end])))
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            raise DecodeError("the stored response is damaged") from error
        return cls(status, tuple(fields[:headers]), bytes(encoded[at:]), tuple(fields[headers:]))
