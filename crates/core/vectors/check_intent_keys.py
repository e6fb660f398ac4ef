#!/usr/bin/env python3
"""Computes the vectors for derived keys of intents from their description alone.

    check_intent_keys.py          checks the file beside this script
    check_intent_keys.py --write  writes it

A second implementation: it shares nothing with the Rust one but the description in the documentation.
"""
import hashlib
import json
import pathlib
import struct
import sys
import uuid

PATH = pathlib.Path(__file__).parent / "intent_keys.json"


def lp(octets: bytes) -> bytes:
    return struct.pack(">Q", len(octets)) + octets


def derived(name: str, parts: list[str]) -> str:
    hashed = lp(b"oncegate-intent-1") + lp(name.encode()) + struct.pack(">Q", len(parts))
    hashed += b"".join(lp(part.encode()) for part in parts)
    bits = bytearray(hashlib.sha256(hashed).digest()[:16])
    bits[6] = bits[6] & 0x0F | 0x80
    bits[8] = bits[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(bits)))


CASES = [
    ("order", ["order-123", "v2"]),
    ("order", ["order-123", "v1"]),
    ("order", ["order-123v2"]),
    ("order", ["order-123", "", "v2"]),
    ("orderorder-123", ["v2"]),
    ("order", []),
    ("", []),
    ("", [""]),
    ("refund", ["order-123", "v2"]),
    ("payout", ["2026-11-21", "müller & söhne", "EUR 5,00"]),
]


def main() -> int:
    cases = [{"name": name, "parts": parts, "key": derived(name, parts)} for name, parts in CASES]
    vectors = {"description": "Keys of intents derived from business identity; see Key::derived.", "cases": cases}
    text = json.dumps(vectors, indent=1, ensure_ascii=False) + "\n"
    if "--write" in sys.argv:
        PATH.write_text(text)
    elif PATH.read_text() != text:
        print(f"{PATH.name} differs from what its description gives", file=sys.stderr)
        return 1
    else:
        print(f"{PATH.name}: {len(cases)} cases agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
