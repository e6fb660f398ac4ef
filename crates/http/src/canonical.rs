//! From a request to its record and its fingerprint.

use std::borrow::Cow;
use std::io::Read;

use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::header;
use http::request::Parts;
use oncegate_core::fingerprint::FingerprintInput;
use oncegate_core::{Fingerprint, IdempotencyKey, Label, NaturalKey, NoNaturalKey, RecordId, Scope, limits};

use crate::budget::{Held, NoRoom};
use crate::profile::KeyScope;
use crate::settings::Settings;

/// Where the record of this request is, and what an operator sees of it.
pub(crate) fn locate(
    settings: &Settings,
    scope: &Scope<'_>,
    parts: &Parts,
    key: &IdempotencyKey,
) -> (RecordId, Label) {
    let (method, path) = (parts.method.as_str(), &*settings.canonical_path(parts.uri.path()));
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
    key: &NaturalKey,
    parts: &Parts,
    body: &DecodedBody<'_>,
) -> Result<IdempotencyKey, NoNaturalKey> {
    let content_type = parts.headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if body.coding.is_empty() { key.of(content_type, &body.bytes) } else { Err(NoNaturalKey::NotJson) }
}

/// What makes this request the same as another.
pub(crate) fn fingerprint(settings: &Settings, parts: &Parts, body: &DecodedBody<'_>) -> Fingerprint {
    let target = target(settings, parts);
    let field = |name| parts.headers.get(name).map_or(&b""[..], |value| value.as_bytes());
    let headers: Vec<(&str, &[u8])> = settings
        .fingerprint_headers
        .iter()
        .flat_map(|name| parts.headers.get_all(name).iter().map(|value| (name.as_str(), value.as_bytes())))
        .collect();
    settings.fingerprint.fingerprint(&FingerprintInput {
        method: parts.method.as_str(),
        authority: "",
        target: &target,
        content_type: field(header::CONTENT_TYPE),
        content_coding: &body.coding,
        headers: &headers,
        body: &body.bytes,
    })
}

/// Path and query, with one spelling for all spellings of the path that are one path on this route.
fn target<'a>(settings: &Settings, parts: &'a Parts) -> Cow<'a, str> {
    let sent = parts.uri.path_and_query().map_or_else(|| parts.uri.path(), |target| target.as_str());
    match settings.canonical_path(parts.uri.path()) {
        Cow::Borrowed(_) => Cow::Borrowed(sent),
        Cow::Owned(path) => Cow::Owned(match parts.uri.query() {
            Some(query) => format!("{path}?{query}"),
            None => path,
        }),
    }
}

/// A body with its content coding undone, so that the same body compressed twice is the same body.
pub(crate) struct DecodedBody<'a> {
    bytes: Cow<'a, [u8]>,
    /// The coding that could not be undone, or whose body would be too large then. Empty where there is none.
    coding: Cow<'a, str>,
    /// Whether the body would be too large.
    outgrows: bool,
}

impl DecodedBody<'_> {
    /// Whether a content coding is left, because the body would be larger than it may be without it.
    pub(crate) const fn outgrows(&self) -> bool {
        self.outgrows
    }
}

/// Undoes the content coding of a body. What cannot be undone, or would be larger than `max` bytes or than
/// [`limits::DECODED_RATIO_MAX`] times what was sent, stays as it is.
///
/// # Errors
/// Where the budget has no room for what comes of it.
pub(crate) fn decode<'a>(
    parts: &'a Parts,
    body: &'a [u8],
    max: usize,
    held: &mut Held,
) -> Result<DecodedBody<'a>, NoRoom> {
    let coding = parts.headers.get(header::CONTENT_ENCODING).map_or(&b""[..], |value| value.as_bytes());
    decode_coding(coding, body, max, held)
}

fn decode_coding<'a>(
    coding: &'a [u8],
    body: &'a [u8],
    max: usize,
    held: &mut Held,
) -> Result<DecodedBody<'a>, NoRoom> {
    let max = max.min(body.len().saturating_mul(limits::DECODED_RATIO_MAX).max(limits::DECODED_FREE));
    let name = String::from_utf8_lossy(coding.trim_ascii());
    let undone = match name.to_ascii_lowercase().as_str() {
        "" | "identity" => {
            let bytes = Cow::Borrowed(body);
            return Ok(DecodedBody { bytes, coding: Cow::Borrowed(""), outgrows: false });
        }
        "gzip" | "x-gzip" => read_limited(MultiGzDecoder::new(body), max, held)?,
        // RFC 9110, 8.4.1.2: zlib; some clients send bare deflate anyway.
        "deflate" => match read_limited(ZlibDecoder::new(body), max, held)? {
            Undone::Damaged => read_limited(DeflateDecoder::new(body), max, held)?,
            undone => undone,
        },
        _ => Undone::Damaged,
    };
    let outgrows = matches!(undone, Undone::TooLarge);
    Ok(match undone {
        Undone::Whole(bytes) => DecodedBody { bytes: Cow::Owned(bytes), coding: Cow::Borrowed(""), outgrows },
        _ => DecodedBody { bytes: Cow::Borrowed(body), coding: name, outgrows },
    })
}

/// A content coding, undone.
enum Undone {
    Whole(Vec<u8>),
    TooLarge,
    Damaged,
}

/// Reads at most `max` bytes, a step at a time, and takes each step from the budget before it is read.
fn read_limited(mut from: impl Read, max: usize, held: &mut Held) -> Result<Undone, NoRoom> {
    const STEP: usize = 16 * 1024;
    let mut to = Vec::new();
    loop {
        if !held.add(STEP) {
            return Err(NoRoom);
        }
        let before = to.len();
        if from.by_ref().take(STEP as u64).read_to_end(&mut to).is_err() {
            return Ok(Undone::Damaged);
        }
        if to.len() > max {
            return Ok(Undone::TooLarge);
        }
        if to.len() < before + STEP {
            return Ok(Undone::Whole(to));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use std::io::Write as _;
    use std::sync::Arc;

    use crate::budget::Budget;

    const PLAIN: &[u8] = br#"{"amount":1}"#;

    fn decoded<'a>(coding: &'a [u8], body: &'a [u8], max: usize) -> (Cow<'a, [u8]>, Cow<'a, str>) {
        let budget = Arc::new(Budget::new(1 << 30));
        let body = decode_coding(coding, body, max, &mut Held::nothing(budget)).unwrap();
        (body.bytes, body.coding)
    }

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
    fn a_body_that_grows_too_much_stays_coded() {
        let free = limits::DECODED_FREE;
        for (len, undone) in [(free, true), (free + 1, false), (8 * free, false)] {
            let bomb = gzip(&vec![b'x'; len], 9);
            assert!(bomb.len() < free / limits::DECODED_RATIO_MAX, "{}", bomb.len());
            assert_eq!(decoded(b"gzip", &bomb, 1 << 20).1.is_empty(), undone, "{len}");
        }
        // What is large already may grow, too.
        let plain: Vec<u8> = (0..100_000_u32).flat_map(|number| (number % 1000).to_be_bytes()).collect();
        assert_eq!(decoded(b"gzip", &gzip(&plain, 9), 1 << 20).0, plain);
    }

    #[test]
    fn what_comes_of_a_body_is_taken_from_the_budget() {
        let plain: Vec<u8> = (0..100_000_u32).flat_map(u32::to_be_bytes).collect();
        let coded = gzip(&plain, 9);
        for (limit, fits) in [(plain.len() / 2, false), (2 * plain.len(), true)] {
            let budget = Arc::new(Budget::new(limit));
            let mut held = Held::nothing(budget);
            assert_eq!(decode_coding(b"gzip", &coded, 1 << 20, &mut held).is_ok(), fits);
        }
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
