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


MEANINGS = vectors("crates/client/vectors/meanings.json")


def contract() -> dict:
    return {
        "notice": NOTICE,
        "postgres_version": 1,
        "redis_version": 1,
        "profiles": {name: profile(name) for name in PROFILES},
        "header_fields": header_fields(),
        "conditions": vectors("crates/http/vectors/conditions.json")["cases"],
        "signals": MEANINGS["signals"],
        "problem_statuses": MEANINGS["problem_statuses"],
        "redis": redis_scripts(),
    }


def mark(text: str) -> str:
    """The function `mark` of sdk/browser/src/hash.ts, for ASCII."""
    found, digits = 1, ""
    for letter in text.encode("ascii"):
        found = (found ^ letter ^ found >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    while found:
        found, digit = divmod(found, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def signals(library: str) -> str:
    """The signals and the statuses of problems in the form that verdict.ts reads.

    Browsers download them. They get a hash of 32 bits instead of each text, which is a third of the size.
    """
    rows: dict[str, list[str]] = {}
    for rule in MEANINGS["signals"]:
        signal, at = rule["signal"], rule["at"]
        match at:
            case {"header": name, "value": value}:
                text = f"h{name}={value}"
            case {"header": name, "unless_status": 409}:
                text = f"h{name}"
            case {"member": path, "value": value}:
                text = f"m.{path}={value}"
            case {"name": name}:
                text = f"n{name}"
            case {"problem": problem}:
                text = f"{'q' if signal == 'NotExecuted' else 'p'}{problem}"
            case _:
                sys.exit(f"verdict.ts of Node does not know rules such as {at}")
        if signal in rows and signal != list(rows)[-1]:
            sys.exit(f"the rules of {signal} are not together, and verdict.ts of Node takes the first signal that applies")
        rows.setdefault(signal, []).append(text)
    if next(iter(rows)) != "Replayed":
        sys.exit("verdict.ts of Node takes the first row of the signals for the one of replays")
    texts = [text for found in rows.values() for text in found]
    if len({mark(text) for text in texts}) != len(set(texts)):
        sys.exit("two signals have the same hash")
    if library == "browser":
        function = "export { mark } from './hash.js';"
        row = lambda number, signal, found: f"  // {signal}:\n" + "".join(f"  //   {text}\n" for text in found) + f"  '{' '.join([str(number), *map(mark, found)])}',\n"
        after = ".map((row) => row.split(' '))"
    else:
        function = "export const mark = (text: string): string => text;"
        row = lambda _, signal, found: f"  [\n    '{signal}',\n" + "".join(f"    {json.dumps(text, ensure_ascii=False)},\n" for text in found) + "  ],\n"
        after = ""
    listed = "".join(row(number, signal, found) for number, (signal, found) in enumerate(rows.items()))
    statuses = "".join(f"  {json.dumps([row['problem'], *row['http'], *row['grpc']])},\n" for row in MEANINGS["problem_statuses"])
    return f"""// {NOTICE}
{function}

/**
 * Signals, each with the marks of its rules; the first that applies counts. `h`: a header field with this value, whatever its case, or with
 * any value unless the status is 409. `m`: a member of the body with this value, by its path. `n`: a name of the error. `p`: a problem. `q`: a
 * problem that counts only with the URN of Oncegate, or next to `retry: same-key`.
 */
export const SIGNALS: readonly string[][] = [
{listed}]{after};
/** The statuses of HTTP and of gRPC that a refusal has after which nothing was executed. */
export const PROBLEM_STATUSES: readonly (readonly [problem: string, ...statuses: number[]])[] = [
{statuses}];
"""


def outputs() -> dict[Path, str]:
    data = contract()
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    # Node has the signals in a file of their own.
    own = json.dumps({key: data[key] for key in data if key not in ("signals", "problem_statuses")}, indent=1, ensure_ascii=False)
    # The meaning of a response is one file in TypeScript, which the library for browsers has as a copy.
    verdict = (ROOT / "sdk/node/src/verdict.ts").read_text()
    # A browser always sends a key, and takes server errors for `again`: its copy has nothing else.
    for general, keyed in (
        ("{ protection, serverErrors, inDoubt }: AttemptContext, status", "inDoubt: boolean, status"),
        ("  const keyed = protection === 'keyed';\n", ""),
        ("  const isDoubtful = inDoubt && protection !== 'safe';\n", ""),
        ("isDoubtful && keyed", "inDoubt"),
        ("isDoubtful", "inDoubt"),
        ("keyed && ", ""),
        ("if (keyed) {", "{"),
        ("protection === 'safe' ? 'done' : 'unknown'", "'unknown'"),
        ("serverErrors === 'final' ? 'failed' : 'unknown'", "'unknown'"),
        ("  if (serverErrors === 'final') return 'failed';\n", ""),
        ("  if (code >= 502 && code <= 504) return again;\n", ""),
        ("protection === 'once' || serverErrors === 'unknown' ? 'unknown' : again", "again"),
    ):
        if general not in verdict:
            sys.exit(f"verdict.ts of Node has no {general!r}, which is left out for browsers")
        verdict = verdict.replace(general, keyed)
    # Signals are numbers there.
    for number, signal in enumerate(dict.fromkeys(rule["signal"] for rule in MEANINGS["signals"])):
        verdict = verdict.replace(f"'{signal}'", f"'{number}' /* {signal} */")
    unused = between(verdict, "/** How a request that", "export type Meaning")
    verdict = verdict.replace(unused, "")
    files = {
        ROOT / "sdk/node/src/signals.ts": signals("node"),
        ROOT / "sdk/browser/src/signals.ts": signals("browser"),
        ROOT / "sdk/browser/src/verdict.ts": f"// {NOTICE} It is a copy of sdk/node/src/verdict.ts.\n{verdict}",
    }
    for library, path, shape in (
        ("python", "src/oncegate/contract.json", "{}"),
        ("go", "contract.json", "{}"),
        ("node", "src/contract.ts", f"// {NOTICE}\nexport const contract = {{}} as const;\n"),
    ):
        if (ROOT / "sdk" / library).is_dir():
            files[ROOT / "sdk" / library / path] = text if shape == "{}" else shape.replace("{}", own, 1)
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
