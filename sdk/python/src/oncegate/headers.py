"""The header fields that a record keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KEPT = frozenset(
    [
        "content-type",
        "content-encoding",
        "content-language",
        "content-disposition",
        "content-location",
        "location",
        "etag",
        "last-modified",
        "link",
        "cache-control",
        "vary",
        "content-range",
        "accept-patch",
        "preference-applied",
        "deprecation",
        "sunset",
    ]
)
_NEVER = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "date",
        "age",
        "expires",
        "set-cookie",
        "set-cookie2",
        "authorization",
        "www-authenticate",
        "authentication-info",
        "authentication-control",
        "optional-www-authenticate",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "clear-site-data",
        "strict-transport-security",
        "alt-svc",
        "via",
        "server",
        "traceparent",
        "tracestate",
        "baggage",
        "b3",
        "x-request-id",
        "request-id",
        "x-correlation-id",
        "x-trace-id",
        "server-timing",
        "retry-after",
        "idempotency-key",
        "idempotency-store",
        "idempotency-status",
        "traceresponse",
        "grpc-trace-bin",
        "uber-trace-id",
        "sentry-trace",
        "newrelic",
        "elastic-apm-traceparent",
        "x-ot-span-context",
        "x-cloud-trace-context",
        "x-guploader-uploadid",
        "x-amzn-trace-id",
        "x-amzn-requestid",
        "x-amzn-request-id",
        "x-amz-request-id",
        "x-amz-id-2",
        "x-amz-apigw-id",
        "apigw-requestid",
        "x-ms-request-id",
        "x-ms-client-request-id",
        "x-ms-correlation-request-id",
        "x-ms-routing-request-id",
        "x-msedge-ref",
        "x-azure-ref",
        "request-context",
        "x-correlationid",
        "correlation-id",
        "x-oss-request-id",
        "eagleeye-traceid",
        "cf-ray",
        "cf-request-id",
        "fly-request-id",
        "x-vercel-id",
        "x-nf-request-id",
        "x-akamai-request-id",
        "x-served-by",
        "x-timer",
        "x-github-request-id",
        "x-gitlab-meta",
        "paypal-debug-id",
        "x-shopify-request-id",
        "x-runtime",
    ]
)
_NEVER_PREFIXES = (
    "access-control-",
    "oncegate-",
    "ratelimit",
    "x-ratelimit-",
    "x-b3-",
    "x-datadog-",
    "x-instana-",
    "x-envoy-",
    "x-amz-cf-",
    "x-newrelic-",
)

Field = tuple[str, bytes]
MAX_KEPT_FIELDS = 128


def is_never_kept(name: str) -> bool:
    return name in _NEVER or name.startswith(_NEVER_PREFIXES)


def get(headers: Iterable[Field], name: str) -> bytes | None:
    """The first value of a field."""
    return next((value for own, value in headers if own == name), None)


def get_all(headers: Iterable[Field], name: str) -> list[bytes]:
    return [value for own, value in headers if own == name]


def put(headers: Sequence[Field], name: str, value: bytes) -> list[Field]:
    """The fields with this one instead of others of its name."""
    out, is_in = [], False
    for field in headers:
        if field[0] != name:
            out.append(field)
        elif not is_in:
            out.append((name, value))
            is_in = True
    if not is_in:
        out.append((name, value))
    return out


def without(headers: Iterable[Field], *names: str) -> list[Field]:
    return [field for field in headers if field[0] not in names]


def kept(headers: Sequence[Field], more: frozenset[str]) -> list[Field]:
    """The fields that a record keeps, fields of one name next to each other."""
    nominated = {token.strip(b" \t").lower() for value in get_all(headers, "connection") for token in value.split(b",")}
    groups: dict[str, list[Field]] = {}
    for name, value in headers:
        if (name in KEPT or name in more) and name.encode() not in nominated:
            groups.setdefault(name, []).append((name, value))
    return [field for group in groups.values() for field in group]


def restored(headers: Iterable[Field]) -> list[Field]:
    """The fields of a record that may be sent."""
    return [field for field in headers if field[0] in KEPT or not is_never_kept(field[0])]
