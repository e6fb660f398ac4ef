#!/usr/bin/env python3
"""Computes the vectors for record identifiers, downstream keys and stored responses, from their description alone.

    check_record_ids.py          checks the files beside this script
    check_record_ids.py --write  writes them

A second implementation: it shares nothing with the Rust one but the description in the documentation.
"""
import hashlib
import json
import pathlib
import struct
import sys
import uuid

HERE = pathlib.Path(__file__).parent


def lp(octets: bytes) -> bytes:
    return struct.pack(">Q", len(octets)) + octets


def caller_digest(caller) -> bytes:
    """`caller` is a list of pairs of kind and identity, empty for a single tenant."""
    if not caller:
        return bytes(32)
    pairs = b"".join(lp(kind.encode()) + lp(identity) for kind, identity in caller)
    return hashlib.sha256(lp(b"oncegate-caller-1") + pairs).digest()


def owner_digest(service, caller) -> bytes:
    if service is None:
        return caller_digest(caller)
    return hashlib.sha256(lp(b"oncegate-service-1") + lp(service.encode()) + lp(caller_digest(caller))).digest()


def record_id(service, caller, operation, key) -> bytes:
    parts = lp(b"oncegate-record-1") + lp(owner_digest(service, caller)) + struct.pack(">Q", len(operation))
    return hashlib.sha256(parts + b"".join(map(lp, operation)) + lp(key)).digest()


def key_tag(key: bytes) -> bytes:
    return hashlib.sha256(lp(b"oncegate-key-1") + lp(key.lower())).digest()[:8]


def downstream_key(record: bytes, step: str) -> str:
    digest = hashlib.sha256(lp(b"oncegate-downstream-1") + lp(record) + lp(step.encode())).digest()
    bits = bytearray(digest[:16])
    bits[6] = bits[6] & 0x0F | 0x80
    bits[8] = bits[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(bits)))


def record_cases():
    bearer = [("header:authorization", b"Bearer sk_test_1")]
    payments = [b"POST", b"/v1/payments"]
    uuid_key = b"8e03978e-40d5-43e8-bc93-6894a57f9324"
    session = [("cookie:sid", b"31d4d96e"), ("header:x-tenant", b"acme")]
    return [
        ("single tenant, no operation", None, [], [], b"k"),
        ("single tenant, endpoint", None, [], payments, uuid_key),
        ("caller by credential, endpoint", None, bearer, payments, uuid_key),
        ("caller by credential, caller only", None, bearer, [], uuid_key),
        ("another credential", None, [("header:authorization", b"Bearer sk_test_2")], payments, uuid_key),
        ("same identity of another kind", None, [("header:x-tenant", b"Bearer sk_test_1")], payments, uuid_key),
        ("anonymous", None, [("anonymous", b"")], payments, uuid_key),
        ("caller of two parts", None, session, payments, uuid_key),
        ("caller of one of these parts", None, session[1:], payments, uuid_key),
        ("border between two parts of a caller", None, [("cookie:sid", b"31d4d96eacme")], payments, uuid_key),
        ("caller by host", None, [("authority", b"acme.example"), *bearer], payments, uuid_key),
        ("border between method and path, 1", None, [], [b"POST", b"/ab"], b"c"),
        ("border between method and path, 2", None, [], [b"POST/a", b"b"], b"c"),
        ("border between path and key", None, [], [b"POST", b"/a"], b"bc"),
        ("separators in a key", None, [], [b"POST", b"/a"], b":|/\x00\xff"),
        ("key of 255 octets", None, [], payments, b"k" * 255),
        ("case of a key counts", None, [], payments, uuid_key.upper()),
        ("service, single tenant", "orders", [], payments, uuid_key),
        ("another service", "stock", [], payments, uuid_key),
        ("service, caller by credential", "orders", bearer, payments, uuid_key),
        ("service, caller of two parts, caller only", "orders", session, [], uuid_key),
    ]


def record_ids():
    cases = []
    for name, service, caller, operation, key in record_cases():
        record = record_id(service, caller, operation, key)
        cases.append({
            "name": name,
            "service": service,
            "caller": [{"kind": kind, "identity_hex": identity.hex()} for kind, identity in caller],
            "operation_hex": [part.hex() for part in operation],
            "key_hex": key.hex(),
            "key_tag": key_tag(key).hex(),
            "caller_tag": caller_digest(caller)[:8].hex(),
            "record_id": record.hex(),
            "downstream_keys": {step: downstream_key(record, step) for step in ["", "charge", "ship", "~undo charge"]},
        })
    return {"description": "Record identifiers and downstream keys; see RecordId.", "cases": cases}


def responses():
    table = [
        ("empty 204", 204, [], b"", []),
        ("JSON", 201, [("content-type", b"application/json"), ("location", b"/orders/1")], b'{"id":1}', []),
        ("octets that are no text", 200, [("x", b"\xff")], bytes(range(256)), []),
        ("two fields of one name, and trailers", 200, [("link", b"a"), ("link", b"b")], b"x", [("grpc-status", b"0")]),
    ]
    cases = []
    for name, status, headers, body, trailers in table:
        encoded = struct.pack(">BHHH", 1, status, len(headers), len(trailers))
        for field, value in headers + trailers:
            encoded += struct.pack(">HI", len(field), len(value)) + field.encode() + value
        encoded += body
        cases.append({
            "name": name,
            "status": status,
            "headers": [[field, value.hex()] for field, value in headers],
            "trailers": [[field, value.hex()] for field, value in trailers],
            "body_hex": body.hex(),
            "encoded_hex": encoded.hex(),
        })
    return {"description": "Stored responses as octets; see StoredResponse.", "cases": cases}


def main() -> int:
    wrong = 0
    for name, vectors in [("record_ids.json", record_ids()), ("responses.json", responses())]:
        path = HERE / name
        text = json.dumps(vectors, indent=1) + "\n"
        if "--write" in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            print(f"{name} differs from what its description gives", file=sys.stderr)
            wrong = 1
        else:
            print(f"{name}: {len(vectors['cases'])} cases agree")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
