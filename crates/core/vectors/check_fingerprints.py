#!/usr/bin/env python3
"""Recomputes the golden vectors of the request fingerprint from the published algorithm.

The algorithm is the module documentation of `oncegate_core::fingerprint`. This is a second implementation of
it, written for clarity and with nothing but the standard library: a model for other languages.

    check_fingerprints.py            compares with fingerprints.json, exit status 1 if anything differs
    check_fingerprints.py --write    writes the tags and digests into fingerprints.json
"""

import base64
import decimal
import hashlib
import json
import pathlib
import re
import sys

FILE = pathlib.Path(__file__).with_name("fingerprints.json")
MAX_SAFE_INTEGER = 2**53 - 1
MAX_DEPTH = 128
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"


class Raw(Exception):
    """The body has no canonical form."""


def count(number):
    return number.to_bytes(8, "big")


def part(data):
    return count(len(data)) + data


# Media type


def media_type(field):
    """The hashed name, the type (or None where the body is raw for its type), and the boundary."""
    field = field.strip(b" \t")
    essence = re.match(rb"(%b)/(%b)[ \t]*(?=;|\Z)" % (TOKEN, TOKEN), field)
    if not essence:
        return field, None, None
    parameters = {}
    rest = field[essence.end():]
    while rest:
        found = re.match(
            rb"""[ \t]*;[ \t]*(?:
                (?P<name>%b)=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[!#-+\--:<-\[\]-~]+))
                |(?=;|\Z)
            )[ \t]*(?=;|\Z)""" % TOKEN,
            rest,
            re.DOTALL | re.VERBOSE,
        )
        if not found:
            return field, None, None
        rest = rest[found.end():]
        if found["name"]:
            name = found["name"].lower()
            value = found["bare"]
            if value is None:
                value = re.sub(rb"(?s)\\(.)", rb"\1", found["quoted"])
            if name in (b"charset", b"boundary") and name in parameters:
                return field, None, None
            parameters[name] = value
    top, sub = essence[1].lower(), essence[2].lower()
    name = top + b"/" + sub
    if b"charset" in parameters:
        charset = parameters[b"charset"].lower()
        if not re.fullmatch(TOKEN, charset):
            return field, None, None
        if charset not in (b"utf-8", b"utf8"):
            return name + b";charset=" + charset, None, None
    return name, (top, sub), parameters.get(b"boundary")


# JSON


def canonical_number(text):
    grammar = r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?"
    sign, digits, fraction, exponent = re.fullmatch(grammar, text).groups()
    significant = (digits + (fraction or "")).strip("0")
    if not significant:
        return "0"
    if len((exponent or "").lstrip("+-0")) > 15:
        raise Raw("exponent")
    value = decimal.Decimal(text.removeprefix("-"))
    if value > MAX_SAFE_INTEGER:
        raise Raw("magnitude")
    if value == int(value):
        return sign + str(int(value))
    if len(significant) > 15 or value < decimal.Decimal("1e-307"):
        raise Raw("precision")
    # ECMAScript's Number::toString, from the shortest digits of the double.
    _, shortest, scale = decimal.Decimal(repr(float(text))).normalize().as_tuple()
    shortest = "".join(map(str, shortest))
    point = len(shortest) + scale
    if point > 0:
        return f"{sign}{shortest[:point]}.{shortest[point:]}"
    if point > -6:
        return f"{sign}0.{'0' * -point}{shortest}"
    return f"{sign}{shortest[0]}{'.' if len(shortest) > 1 else ''}{shortest[1:]}e{point - 1}"


class Number(str):
    """A number as it was written."""


def members(pairs):
    if len({name for name, _ in pairs}) < len(pairs):
        raise Raw("two members of one name")
    return dict(pairs)


def no_constant(text):
    raise Raw(text)


def parse_json(body):
    try:
        return json.loads(
            body.decode("utf-8"),
            parse_int=Number,
            parse_float=Number,
            parse_constant=no_constant,
            object_pairs_hook=members,
        )
    except (ValueError, RecursionError) as error:
        raise Raw(str(error)) from error


def canonical_string(text):
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Raw("half a surrogate pair")
    # What ensure_ascii leaves alone is what RFC 8785 leaves alone.
    return json.dumps(text, ensure_ascii=False)


def canonical_json(value, depth=0):
    if isinstance(value, Number):
        return canonical_number(value)
    if isinstance(value, str):
        return canonical_string(value)
    if isinstance(value, (list, dict)) and depth == MAX_DEPTH:
        raise Raw("depth")
    if isinstance(value, list):
        return "[" + ",".join(canonical_json(item, depth + 1) for item in value) + "]"
    if isinstance(value, dict):
        for name in value:
            canonical_string(name)
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        texts = (canonical_string(name) + ":" + canonical_json(value[name], depth + 1) for name in names)
        return "{" + ",".join(texts) + "}"
    return {None: "null", True: "true", False: "false"}[value]


ABSENT = object()


def tokens(pointer):
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def index(token):
    return int(token) if re.fullmatch("0|[1-9][0-9]*", token) else None


def without(value, paths):
    """The value without what the paths lead to."""
    if [] in paths:
        return ABSENT

    def below(step):
        return [path[1:] for path in paths if step(path[0])]

    if isinstance(value, dict):
        kept = {name: without(item, below(name.__eq__)) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item is not ABSENT}
    if isinstance(value, list):
        kept = [without(item, below(lambda token: index(token) == at)) for at, item in enumerate(value)]
        return [item for item in kept if item is not ABSENT]
    return value


def select(value, path, excluded):
    """The value that the path leads to, without what is excluded."""
    for token in path:
        if [] in excluded:
            return ABSENT
        if isinstance(value, dict) and token in value:
            value = value[token]
        elif isinstance(value, list) and index(token) is not None and index(token) < len(value):
            value = value[index(token)]
        else:
            return ABSENT
        excluded = [other[1:] for other in excluded if other[0] == token]
    return without(value, excluded)


def says_something(value):
    """Whether there is a string, a number, true or false in it."""
    if isinstance(value, dict):
        return any(map(says_something, value.values()))
    if isinstance(value, list):
        return any(map(says_something, value))
    return value is not ABSENT and value is not None


def json_body(body, rules):
    value = parse_json(body)
    canonical_json(value)
    excluded = [tokens(pointer) for pointer in rules["exclude"]]
    if not any(says_something(select(value, tokens(pointer), excluded)) for pointer in rules["include"]):
        left = without(value, excluded)
        return "json", part(canonical_json(left if says_something(left) else value).encode())
    pointers = sorted({pointer.encode() for pointer in rules["include"]})
    out = count(len(pointers))
    for pointer in pointers:
        found = select(value, tokens(pointer.decode()), excluded)
        out += part(pointer) + part(b"absent" if found is ABSENT else canonical_json(found).encode())
    return "json-include", out


# Forms


def decode_form(text):
    if re.search(rb"%(?![0-9A-Fa-f]{2})", text):
        raise Raw("percent")
    return re.sub(rb"%(..)", lambda found: bytes([int(found[1], 16)]), text.replace(b"+", b" "))


MAX_PAIRS = 16_384


def stem(name):
    found = re.search(rb"[0-9A-Za-z]+", name)
    return found[0].lower() if found else b""


def form_body(body):
    if b";" in body or body.count(b"&") >= MAX_PAIRS:
        raise Raw("read in different ways, or too long")
    pairs = []
    for segment in body.split(b"&"):
        name, equals, value = segment.partition(b"=")
        if not equals:
            raise Raw("no pair")
        pairs.append((decode_form(name), decode_form(value)))
    if all(re.fullmatch(rb"[ -~]*", name) for name, _ in pairs):
        pairs.sort(key=lambda pair: stem(pair[0]))
    return "form", count(len(pairs)) + b"".join(part(name) + part(value) for name, value in pairs)


# Multipart


def multipart_body(body, boundary):
    if boundary is None or not re.fullmatch(rb"[ -~]{0,69}[!-~]", boundary):
        raise Raw("boundary")
    delimiter = b"\r\n--" + boundary
    # The start of the body is as good as the CRLF before a delimiter.
    if not body.startswith(b"\r\n"):
        body = b"\r\n" + body
    pieces = body.split(delimiter)
    if len(pieces) < 2 or pieces[0] or pieces[-1] not in (b"--", b"--\r\n"):
        raise Raw("delimiters")
    out = count(len(pieces) - 2)
    for piece in pieces[1:-1]:
        if not piece.startswith(b"\r\n") or piece[2:].startswith(delimiter[2:]):
            raise Raw("delimiter")
        # The CRLF that ends the delimiter makes a part without header lines look like the others.
        head, empty_line, content = piece.partition(b"\r\n\r\n")
        if not empty_line:
            raise Raw("no empty line")
        fields = []
        for line in head.split(b"\r\n")[1:]:
            field = re.fullmatch(rb"(%b):([^\r\n\0]*)" % TOKEN, line)
            if not field:
                raise Raw("header line")
            fields.append((field[1].lower(), field[2].strip(b" \t")))
        fields.sort(key=lambda field: field[0])
        out += count(len(fields)) + b"".join(part(name) + part(value) for name, value in fields)
        out += part(content)
    return "multipart", out


# Fingerprints


def read_body(case, body, kind, boundary):
    rules = case["rules"]
    if rules["raw_bodies"] or case["content_coding"] or not body or kind is None:
        raise Raw("as it is")
    top, sub = kind
    if top == b"multipart":
        return multipart_body(body, boundary)
    if kind == (b"application", b"x-www-form-urlencoded"):
        return form_body(body)
    if kind == (b"application", b"json") or re.fullmatch(rb".+\+json", sub):
        return json_body(body, rules)
    raise Raw("no known type")


def fingerprint(case):
    """The tag and the digest of a case."""
    body = base64.b64decode(case["body_base64"]) if "body_base64" in case else case["body"].encode()
    name, kind, boundary = media_type(case["content_type"].encode())
    try:
        tag, content = read_body(case, body, kind, boundary)
    except Raw:
        tag, content = "raw", part(body)
    headers = sorted(((n.encode(), v.encode()) for n, v in case["headers"]), key=lambda header: header[0])
    digest = hashlib.sha256()
    for text in ("oncegate-fp-1", case["method"], case.get("authority", ""), case["target"]):
        digest.update(part(text.encode()))
    digest.update(part(name) + part(tag.encode()) + part(case["content_coding"].lower().encode()))
    digest.update(count(len(headers)) + b"".join(part(n) + part(v) for n, v in headers))
    digest.update(content)
    return tag, digest.hexdigest()


def fingerprint_of_parts(case):
    texts = ["oncegate-fp-parts-1", case["domain"], *case["parts"]]
    return hashlib.sha256(b"".join(part(text.encode()) for text in texts)).hexdigest()


def main():
    document = json.loads(FILE.read_text(encoding="utf-8"))
    wrong = 0
    seen = {}
    for case in document["requests"]:
        tag, digest = fingerprint(case)
        if "--write" in sys.argv:
            case["tag"], case["digest"] = tag, digest
        if (case.get("tag"), case.get("digest")) != (tag, digest):
            print(f"{case['name']}: computed {tag} {digest}")
            wrong += 1
        # Equal exactly where the file says so.
        if seen.setdefault(digest, case["name"]) != case.get("equals", case["name"]):
            print(f"{case['name']}: has the digest of {seen[digest]}")
            wrong += 1
    for case in document["parts"]:
        digest = fingerprint_of_parts(case)
        if "--write" in sys.argv:
            case["digest"] = digest
        if case.get("digest") != digest:
            print(f"{case['name']}: computed {digest}")
            wrong += 1
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(document, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")
    print(f"{len(document['requests'])} requests, {len(document['parts'])} lists of parts, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
