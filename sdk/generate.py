#!/usr/bin/env python3
"""Writes what the libraries in sdk/ share with the Rust code into each of them: profiles, conditions, signals, Redis scripts, limits.

    python3 sdk/generate.py            writes the files
    python3 sdk/generate.py --check    fails if one of them is not what would be written

The sources are the profiles and the lists of header fields of crates/http, the vectors that its tests and those of crates/client
write, and the scripts of crates/redis. No rule stands in two places.
"""

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ("ietf", "stripe", "classic")
SCRIPTS = ROOT / "crates/redis/lua"

NOTICE = "Written by sdk/generate.py. Do not edit."


def profile(name: str) -> dict:
    """A profile on top of `ietf`, as crates/http reads it: tables are merged, everything else is replaced."""
    read = tomllib.loads((ROOT / f"crates/http/profiles/{name}.toml").read_text())
    if name == "ietf":
        return read
    base = profile("ietf")
    # The texts of a refusal belong together: a profile that has its own takes nothing of the base but the texts.
    for key, value in read.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def script(path: Path) -> str:
    """A script with its shared parts, as `oncegate schema print redis` prints it."""
    lines = path.read_text().splitlines(keepends=True)
    part = lambda line: (SCRIPTS / "parts" / f"{line[4:].strip()}.lua").read_text()
    return "".join(part(line) if line.startswith("--@ ") else line for line in lines)


def redis_scripts() -> dict:
    page = (ROOT / "docs/reference/store-contract-redis.md").read_text()
    published = dict(re.findall(r"^\| `(\w+)` \| `([0-9a-f]{40})` \|$", page, re.MULTILINE))
    scripts = {}
    for name, digest in published.items():
        text = script(SCRIPTS / f"{name}.lua")
        found = hashlib.sha1(text.encode()).hexdigest()
        if found != digest:
            sys.exit(f"the script {name} has the digest {found}, and the page of the contract says {digest}")
        scripts[name] = {"sha1": digest, "text": text}
    return scripts


def between(text: str, start: str, end: str) -> str:
    """The part of a source from one text to another, which must both be there."""
    begin = text.index(start)
    return text[begin : text.index(end, begin)]


def header_fields() -> dict:
    """The lists of header fields: those that a record keeps or never keeps, and those that identify callers."""
    kept = (ROOT / "crates/http/src/headers.rs").read_text()
    credential = (ROOT / "crates/http/src/credential.rs").read_text()
    texts = lambda source: re.findall(r'"([a-z0-9-]+)"', source)
    constants = lambda source: [name.lower().replace("_", "-") for name in re.findall(r"header::([A-Z_]+)", source)]
    own = between(kept, "const KEPT:", "];")
    fields = {
        "kept": constants(own) + texts(own),
        "never": texts(between(kept, "const NEVER:", "];")) + texts(between(kept, "const REQUEST_IDS", "];")),
        "never_prefixes": texts(between(kept, "const NEVER_PREFIXES", "];")),
        "usual": texts(between(credential, "fn is_usual", "/// Fields")),
        "callers": texts(between(credential, "const LISTED", "];")),
        "caller_parts": texts(between(credential, "fn parts_from", "_ =>")),
        "no_caller_parts": texts(between(credential, "const PARTS", "];")),
    }
    empty = [name for name, found in fields.items() if not found]
    if empty:
        sys.exit(f"no header fields were found for {', '.join(empty)}: the source has another form")
    return fields


def vectors(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def contract() -> dict:
    meanings = vectors("crates/client/vectors/meanings.json")
    return {
        "notice": NOTICE,
        "postgres_version": 1,
        "redis_version": 1,
        "profiles": {name: profile(name) for name in PROFILES},
        "header_fields": header_fields(),
        "conditions": vectors("crates/http/vectors/conditions.json")["cases"],
        "signals": meanings["signals"],
        "problem_statuses": meanings["problem_statuses"],
        "redis": redis_scripts(),
    }


def outputs() -> dict[Path, str]:
    data = contract()
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    files = {}
    for library, path, shape in (
        ("python", "src/oncegate/contract.json", "{}"),
        ("go", "contract.json", "{}"),
        ("node", "src/contract.ts", f"// {NOTICE}\nexport const contract = {{}} as const;\n"),
    ):
        if (ROOT / "sdk" / library).is_dir():
            body = text if shape == "{}" else shape.replace("{}", text.rstrip("\n"), 1)
            files[ROOT / "sdk" / library / path] = body
    return files


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    stale = []
    for path, text in outputs().items():
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(str(path.relative_to(ROOT)))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run python3 sdk/generate.py")


if __name__ == "__main__":
    main()
