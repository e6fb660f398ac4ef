//! Recognises header fields that identify a caller, by their names.

use std::borrow::Cow;

/// Returns true if a field of this name, in lower case, carries a credential or names the caller that a proxy in
/// front identified. `_` counts as `-`, because many services treat them alike.
///
/// A list of such names cannot be complete, because each vendor invents its own. So a name counts if it contains a typical
/// part of such names. A field that is wrongly taken for a credential costs a refusal that names it. A credential that is not
/// recognised would give one caller the response of another.
pub(crate) fn is_credential(name: &str) -> bool {
    if is_usual(name) {
        return false;
    }
    let name = hyphenated(name);
    LISTED.contains(&&*name) || (looks_like_one(&name) && !is_known_as_none(&name))
}

/// Returns true if the value of a field of this name changes each time that a request is sent.
pub(crate) fn changes_each_time(name: &str) -> bool {
    ["signature", "dpop", "hmac"].iter().any(|part| name.contains(part))
}

/// Returns true if the credential in an `Authorization` field changes each time that a request is sent, because it
/// signs the request, the time or a counter. A retry then has another credential than the first request.
pub(crate) fn is_new_each_time(authorization: &[u8]) -> bool {
    const SCHEMES: [&str; 11] = [
        "digest", "signature", "hawk", "mac", "aws", "sharedkey", "sharedkeylite", "negotiate", "ntlm",
        "hoba", "mutual",
    ];
    let end = authorization.iter().position(|byte| *byte == b' ').unwrap_or(authorization.len());
    let (scheme, rest) = authorization.split_at(end);
    let scheme = scheme.to_ascii_lowercase();
    let contains = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|window| window == part);
    SCHEMES.iter().any(|known| known.as_bytes() == scheme)
        || (!rest.is_empty() && (contains(&scheme, b"hmac") || scheme.starts_with(b"scram-")))
        // OAuth 1.0. Others use the name for tokens that stay.
        || (scheme == b"oauth" && contains(rest, b"oauth_nonce"))
}

/// Returns true if two names differ, and are equal to a service that treats `_` as `-`.
pub(crate) fn is_other_spelling(one: &str, other: &str) -> bool {
    one.len() == other.len() && one != other && hyphenated(one) == hyphenated(other)
}

pub(crate) fn hyphenated(name: &str) -> Cow<'_, str> {
    if name.contains('_') { Cow::Owned(name.replace('_', "-")) } else { Cow::Borrowed(name) }
}

/// Returns true for the fields of nearly all requests, which need no closer look.
fn is_usual(name: &str) -> bool {
    matches!(
        name,
        "accept"
            | "accept-encoding"
            | "accept-language"
            | "connection"
            | "content-encoding"
            | "content-length"
            | "content-type"
            | "forwarded"
            | "host"
            | "idempotency-key"
            | "origin"
            | "referer"
            | "traceparent"
            | "user-agent"
            | "via"
            | "x-forwarded-for"
            | "x-forwarded-host"
            | "x-forwarded-proto"
            | "x-request-id"
    )
}

/// Fields that identify a caller and have none of the usual parts in their names.
const LISTED: [&str; 8] = [
    "cookie", "cookie2", "remote-user", "x-remote-user", "x-forwarded-user", "x-forwarded-email",
    "x-auth-request-user", "x-consumer-id",
];

fn looks_like_one(name: &str) -> bool {
    let bytes = name.as_bytes();
    bytes.iter().enumerate().any(|(at, first)| {
        let rest = bytes.get(at..).unwrap_or_default();
        parts_from(*first).iter().any(|part| rest.starts_with(part.as_bytes()))
            || (rest.starts_with(b"auth") && !is_of_authors(rest))
    })
}

/// The substrings of the names of such fields, by their first letter.
const fn parts_from(letter: u8) -> &'static [&'static str] {
    match letter {
        b'a' => &["api-key", "apikey", "access-key", "accesskey", "app-key", "appkey", "assertion"],
        b'b' => &["bearer"],
        b'c' => &["credential", "client-cert", "clientcert", "client-dn", "client-s-dn", "client-key"],
        b'd' => &["dpop"],
        b'f' => &["functions-key"],
        b'h' => &["hmac"],
        b'i' => &["identity"],
        b'j' => &["jwt"],
        b'l' => &["license-key"],
        b'm' => &["master-key"],
        b'o' => &["oidc"],
        b'p' => &["password", "passwd", "passphrase", "principal", "private-key"],
        b's' => &["saml", "secret", "session", "signature", "subscription-key"],
        b't' => &["token"],
        b'u' => &["user-id", "userid", "user-name", "username", "user-email", "user-login"],
        _ => &[],
    }
}

/// `author` and `authority`, but not `authorization`.
fn is_of_authors(from_auth: &[u8]) -> bool {
    let after = from_auth.get(4..).unwrap_or_default();
    after.starts_with(b"or") && !after.starts_with(b"oriz") && !after.starts_with(b"oris")
}

/// Returns true for fields that look like credentials and identify no caller: tokens of forms against forged requests and
/// robots, idempotency keys, locks, fields that only a browser or the sidecar sets, and fields of responses.
fn is_known_as_none(name: &str) -> bool {
    const PARTS: [&str; 7] =
        ["csrf", "xsrf", "antiforgery", "anti-forgery", "verificationtoken", "captcha", "idempoten"];
    const BEGINNINGS: [&str; 3] = ["sec-", "www-", "oncegate-"];
    name == "lock-token"
        || name.contains("verification-token")
        || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
        || PARTS.iter().any(|part| name.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_known_by_their_names() {
        for name in [
            "cookie",
            "x-api-key",
            "api-key",
            "apikey",
            "x_api_key",
            "x-auth-token",
            "x-access-token",
            "x-session-token",
            "x-user-token",
            "x-goog-api-key",
            "x-amz-security-token",
            "ocp-apim-subscription-key",
            "private-token",
            "client-cert",
            "x-ssl-client-cert",
            "remote-user",
            "remote_user",
            "x-remote-user",
            "x-forwarded-user",
            "x-forwarded-email",
            "x-forwarded-preferred-username",
            "x-forwarded-access-token",
            "x-forwarded-client-cert",
            "x-auth-request-user",
            "x-auth-request-email",
            "x-auth-request-access-token",
            "x-authenticated-user",
            "x-authenticated-userid",
            "x-consumer-id",
            "cf-access-jwt-assertion",
            "tailscale-user-login",
            "x-amzn-oidc-data",
            "x-amzn-oidc-identity",
            "x-goog-iap-jwt-assertion",
            "x-goog-authenticated-user-id",
            "x-ms-client-principal",
            "x-amz-access-token",
            "x-hub-signature-256",
            "x-authorization",
            "proxy-authorization",
            "x-authorisation",
            "authentication",
            "x-oauth-scopes",
            "authtoken",
            "x-rapidapi-key",
        ] {
            assert!(is_credential(name), "{name}");
        }
    }

    #[test]
    fn other_fields_are_no_credentials() {
        for name in [
            "accept",
            "accept-encoding",
            "accept-language",
            "cache-control",
            "connection",
            "content-digest",
            "content-length",
            "content-type",
            "date",
            "expect",
            "forwarded",
            "from",
            "host",
            "idempotency-key",
            "idempotency-token",
            "if-match",
            "keep-alive",
            "lock-token",
            "oncegate-token",
            "oncegate_token",
            "origin",
            "pragma",
            "prefer",
            "priority",
            "referer",
            "requestverificationtoken",
            "sec-ch-ua",
            "sec-fetch-user",
            "sec-websocket-key",
            "te",
            "traceparent",
            "tracestate",
            "upgrade-insecure-requests",
            "user-agent",
            "via",
            "www-authenticate",
            "x-amz-date",
            "x-anti-forgery-token",
            "x-author",
            "x-authority",
            "x-cache-key",
            "x-correlation-id",
            "x-csrf-token",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-http-method-override",
            "x-real-ip",
            "x-recaptcha-token",
            "x-request-id",
            "x-requested-with",
            "x-tenant",
            "x_csrf_token",
        ] {
            assert!(!is_credential(name), "{name}");
        }
    }

    #[test]
    fn credentials_that_sign_a_request_are_new_each_time() {
        for new in [
            "Digest username=\"ada\", nc=00000001",
            "AWS4-HMAC-SHA256 Credential=AKID/20261122/eu/s3/aws4_request, Signature=0",
            "AWS AKID:signature",
            "HMAC-SHA256 id:signature",
            "Hawk id=\"a\", ts=\"1\", nonce=\"b\", mac=\"c\"",
            "OAuth oauth_consumer_key=\"a\", oauth_nonce=\"b\"",
            "signature keyId=\"a\"",
            "SharedKey account:signature",
            "Negotiate YII=",
            "SCRAM-SHA-256 data=biws",
        ] {
            assert!(is_new_each_time(new.as_bytes()), "{new}");
        }
        for same in
            ["Bearer a", "Basic YTpi", "DPoP a", "OAuth token", "token hmac", "hmac", "secret", "", "Token a"]
        {
            assert!(!is_new_each_time(same.as_bytes()), "{same}");
        }
    }

    #[test]
    fn spellings_differ_in_hyphens_only() {
        assert!(is_other_spelling("x_tenant", "x-tenant"));
        assert!(is_other_spelling("x-tenant-id", "x_tenant-id"));
        assert!(!is_other_spelling("x-tenant", "x-tenant"));
        assert!(!is_other_spelling("x-tenant", "xxtenant"));
    }
}
