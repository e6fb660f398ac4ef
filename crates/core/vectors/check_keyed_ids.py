#!/usr/bin/env python3
"""A second implementation of keyed identities: with `--write` it writes keyed_ids.json, otherwise it compares.

The plain identities come from check_record_ids.py. Only the modules of Python itself are needed.
"""

import hashlib
import hmac
import json
import pathlib
import sys

from check_record_ids import caller_digest, lp, record_ids

HERE = pathlib.Path(__file__).parent
LABEL = b"oncegate-id-1 "


def keyed(secret: bytes, what: bytes, plain: bytes = b"") -> bytes:
    return hmac.new(secret, LABEL + what + plain, hashlib.sha256).digest()


def vectors():
    secrets = []
    for secret in (bytes(range(32)), b"\xff" * 32):
        name = keyed(secret, b"name")[:8].hex()
        cases = []
        for case in record_ids()["cases"]:
            caller = caller_digest([(part["kind"], bytes.fromhex(part["identity_hex"])) for part in case["caller"]])
            key = hashlib.sha256(lp(b"oncegate-key-1") + lp(bytes.fromhex(case["key_hex"]).lower())).digest()
            # The digest of a fingerprint is any 32 bytes; those of the record do.
            plain = bytes.fromhex(case["record_id"])
            cases.append({
                "name": case["name"],
                "record_id": keyed(secret, b"record", plain).hex(),
                "caller_tag": keyed(secret, b"caller", caller)[:8].hex() if any(caller) else "00" * 8,
                "key_tag": keyed(secret, b"key", key)[:8].hex(),
                "fingerprint_digest_hex": plain.hex(),
                "fingerprint": keyed(secret, b"compare", b"\x01" + plain).hex(),
            })
        secrets.append({
            "secret_hex": secret.hex(),
            "name": name,
            "text": f"ogids1_{name}_{secret.hex()}",
            "mark": {
                "record_id": hashlib.sha256(b"oncegate-id-secret-1").hexdigest(),
                "attempt": keyed(secret, b"attempt")[:16].hex(),
                "fingerprint": keyed(secret, b"check").hex(),
            },
            "cases": cases,
        })
    description = "Keyed identities; see IdScheme. The cases are those of record_ids.json, by their names."
    return {"description": description, "secrets": secrets}


def main() -> int:
    path = HERE / "keyed_ids.json"
    text = json.dumps(vectors(), indent=1) + "\n"
    if "--write" in sys.argv:
        path.write_text(text)
    elif path.read_text() != text:
        print("keyed_ids.json differs from what its description gives", file=sys.stderr)
        return 1
    print(f"keyed_ids.json: {sum(len(one['cases']) for one in vectors()['secrets'])} cases agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
