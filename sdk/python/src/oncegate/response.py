"""Stored responses, in the encoding that all libraries and sidecars share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .headers import kept

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
        cls,
        status: int,
        headers: Mapping[str, bytes | str] | Iterable[tuple[str, bytes | str]] = (),
        body: bytes | str = b"",
    ) -> StoredResponse:
        """A response from texts or bytes. Names of header fields are brought to lower case."""
        listed = headers.items() if isinstance(headers, Mapping) else headers
        fields = tuple(
            (name.lower(), value.encode("latin-1") if isinstance(value, str) else value) for name, value in listed
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


def response_of(response: Any, more: frozenset[str] = frozenset()) -> StoredResponse:
    """The stored response for a response of this library or of Starlette, FastAPI, Django, Flask or Werkzeug.

    Of a framework's response, the header fields that a record keeps are taken, and those in `more`. Raises TypeError for
    everything else, and for a response whose body is not there yet.
    """
    if isinstance(response, StoredResponse):
        return response
    kind = f"{type(response).__module__}.{type(response).__name__}"
    wanted = (
        "pass a StoredResponse, such as oncegate.StoredResponse.of(201, [('content-type', 'application/json')], b'{}')"
    )
    if getattr(response, "streaming", False) or getattr(response, "is_streamed", False):
        raise TypeError(f"the response is a {kind}, whose body is a stream: {wanted}")
    if getattr(response, "is_rendered", True) is False:
        raise TypeError(f"the response is a {kind} that is not rendered yet: call its render() first")
    status, headers = getattr(response, "status_code", None), getattr(response, "headers", None)
    bodies = (getattr(response, name, None) for name in ("body", "content", "data"))
    body = next((found for found in bodies if isinstance(found, bytes)), None)
    if not isinstance(status, int) or headers is None or body is None:
        raise TypeError(f"the response is a {kind}: {wanted}, or a response of Starlette, FastAPI, Django or Flask")
    fields = [(name.lower(), value.encode("latin-1")) for name, value in headers.items()]
    return StoredResponse(status, tuple(kept(fields, more)), body)
