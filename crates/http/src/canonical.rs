//! From a request to its record and its fingerprint.

use std::borrow::Cow;
use std::io::Read as _;

use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::header;
use http::request::Parts;
use oncegate_core::fingerprint::FingerprintInput;
use oncegate_core::{Fingerprint, IdempotencyKey, Label, NaturalKey, NoNaturalKey, RecordId, Scope};

use crate::profile::KeyScope;
use crate::settings::Settings;

/// Where the record of this request is, and what an operator sees of it.
pub(crate) fn locate(
    settings: &Settings,
    scope: &Scope<'_>,
    parts: &Parts,
    key: &IdempotencyKey,
) -> (RecordId, Label) {
    let (method, path) = (parts.method.as_str(), parts.uri.path());
    let mut operation = String::with_capacity(method.len() + 1 + path.len());
    operation.extend([method, " ", path]);
    let label = Label::new(scope.caller_tag(), &operation);
    let id = match settings.profile.key_scope {
        KeyScope::Endpoint => RecordId::derive(&scope.within(&[method.as_bytes(), path.as_bytes()]), key),
        KeyScope::Caller => RecordId::derive(scope, key),
    };
    (id, label)
}

/// The key that this request's body carries.
pub(crate) fn natural_key(
    settings: &Settings,
    key: &NaturalKey,
    parts: &Parts,
    body: &[u8],
) -> Result<IdempotencyKey, NoNaturalKey> {
    let field = |name| parts.headers.get(name).map_or(&b""[..], |value| value.as_bytes());
    match decoded(field(header::CONTENT_ENCODING), body, settings.max_request_body) {
        (body, coding) if coding.is_empty() => key.of(field(header::CONTENT_TYPE), &body),
        _ => Err(NoNaturalKey::NotJson),
    }
}

/// What makes this request the same as another.
pub(crate) fn fingerprint(settings: &Settings, parts: &Parts, body: &[u8]) -> Fingerprint {
    let target = parts.uri.path_and_query().map_or_else(|| parts.uri.path(), |target| target.as_str());
    let field = |name| parts.headers.get(name).map_or(&b""[..], |value| value.as_bytes());
    let (body, content_coding) = decoded(field(header::CONTENT_ENCODING), body, settings.max_request_body);
    let headers: Vec<(&str, &[u8])> = settings
        .fingerprint_headers
        .iter()
        .flat_map(|name| parts.headers.get_all(name).iter().map(|value| (name.as_str(), value.as_bytes())))
        .collect();
    settings.fingerprint.fingerprint(&FingerprintInput {
        method: parts.method.as_str(),
        authority: "",
        target,
        content_type: field(header::CONTENT_TYPE),
        content_coding: &content_coding,
        headers: &headers,
        body: &body,
    })
}

/// The body with its content coding undone, so that the same body compressed twice is the same body. What cannot be
/// undone, or would not fit the limit then, stays as it is, with the coding's name.
fn decoded<'a>(coding: &'a [u8], body: &'a [u8], limit: usize) -> (Cow<'a, [u8]>, Cow<'a, str>) {
    let name = String::from_utf8_lossy(coding.trim_ascii());
    let undone = match name.to_ascii_lowercase().as_str() {
        "" | "identity" => return (Cow::Borrowed(body), Cow::Borrowed("")),
        "gzip" | "x-gzip" => read_limited(MultiGzDecoder::new(body), limit),
        // RFC 9110, 8.4.1.2: zlib; some send bare deflate all the same.
        "deflate" => read_limited(ZlibDecoder::new(body), limit)
            .or_else(|| read_limited(DeflateDecoder::new(body), limit)),
        _ => None,
    };
    match undone {
        Some(undone) => (Cow::Owned(undone), Cow::Borrowed("")),
        None => (Cow::Borrowed(body), name),
    }
}

fn read_limited(from: impl std::io::Read, limit: usize) -> Option<Vec<u8>> {
    let mut to = Vec::new();
    from.take(limit as u64 + 1).read_to_end(&mut to).ok()?;
    (to.len() <= limit).then_some(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use std::io::Write as _;

    const PLAIN: &[u8] = br#"{"amount":1}"#;

    fn gzip(plain: &[u8], level: u32) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn codings_are_undone() {
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(PLAIN).unwrap();
        let mut deflate = DeflateEncoder::new(Vec::new(), Compression::default());
        deflate.write_all(PLAIN).unwrap();
        for (coding, body) in [
            ("gzip", gzip(PLAIN, 1)),
            ("x-gzip", gzip(PLAIN, 9)),
            ("GZIP", gzip(PLAIN, 6)),
            ("deflate", zlib.finish().unwrap()),
            ("deflate", deflate.finish().unwrap()),
            ("identity", PLAIN.to_vec()),
            ("", PLAIN.to_vec()),
        ] {
            let (body, left) = decoded(coding.as_bytes(), &body, 100);
            assert_eq!((&*body, &*left), (PLAIN, ""), "{coding}");
        }
    }

    #[test]
    fn a_body_that_would_not_fit_the_limit_stays_coded() {
        let bomb = gzip(&[0; 101], 9);
        assert_eq!(decoded(b"gzip", &bomb, 100), (Cow::Borrowed(&bomb[..]), "gzip".into()));
        let fits = gzip(&[0; 100], 9);
        assert_eq!(decoded(b"gzip", &fits, 100).0.len(), 100);
    }

    #[test]
    fn unknown_codings_and_broken_bodies_stay_as_they_are() {
        assert_eq!(decoded(b"br", b"x", 9), (Cow::Borrowed(&b"x"[..]), "br".into()));
        assert_eq!(decoded(b"gzip", b"x", 9), (Cow::Borrowed(&b"x"[..]), "gzip".into()));
        let whole = gzip(PLAIN, 6);
        let cut = &whole[..whole.len() - 1];
        assert_eq!(decoded(b"gzip", cut, 100).1, "gzip");
    }
}
