//! Derives the identifier of the record and the fingerprint from a request.

use std::borrow::Cow;
use std::io::Read;

use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use oncegate_core::fingerprint::FingerprintInput;
use oncegate_core::{
    Fingerprint, IdScheme, IdempotencyKey, Label, NaturalKey, NaturalKeyError, RecordId, Scope, limits,
};

use crate::budget::{BudgetExhausted, BudgetReservation};
use crate::carrier::{key_in_body, may_be_json};
use crate::credential::is_other_spelling;
use crate::key::KeyHeaderError;
use crate::mcp::{self, CallError, Message, ToolCall};
use crate::method;
use crate::overrides::overrides;
use crate::profile::{BodyComparison, KeyScope};
use crate::settings::{AuthorityRole, Settings};

/// The identifier of this request's record, and the label that operators see.
pub(crate) fn locate(
    settings: &Settings,
    ids: &IdScheme,
    scope: &Scope<'_>,
    parts: &Parts,
    key: &IdempotencyKey,
    call: Option<&ToolCall>,
) -> (RecordId, Label) {
    let (method, path) = (&*method::canonical(&parts.method), &*settings.canonical_path(parts.uri.path()));
    let mut operation = String::with_capacity(method.len() + 1 + path.len());
    operation.extend([method, " ", path]);
    if let Some(call) = call {
        // No path has this character.
        operation.extend(["#", &call.tool]);
    }
    let label = ids.label(scope, key, &operation);
    let endpoint = [method.as_bytes(), path.as_bytes()];
    let endpoint = match settings.profile.key_scope {
        KeyScope::Endpoint => &endpoint[..],
        KeyScope::Caller => &[],
    };
    // Most profiles have none of these fields.
    let id = match (&*settings.profile.key_scope_headers, endpoint) {
        ([], []) => ids.record_id(scope, key),
        ([], endpoint) => ids.record_id(&scope.with_operation_parts(endpoint), key),
        (names, endpoint) => {
            let values: Vec<_> = names.iter().map(|name| field_in_any_spelling(parts, name)).collect();
            let fields = names.iter().zip(&values);
            let fields = fields.flat_map(|(name, value)| [name.as_str().as_bytes(), value.as_slice()]);
            let operation: Vec<_> = endpoint.iter().copied().chain(fields).collect();
            ids.record_id(&scope.with_operation_parts(&operation), key)
        }
    };
    (id, label)
}

/// The value of a header field, with all its lines, and with those whose name has `_` for `-` or the reverse: a service may read
/// any of them.
fn field_in_any_spelling(parts: &Parts, name: &HeaderName) -> Vec<u8> {
    let is_own = |other: &HeaderName| other == name || is_other_spelling(other.as_str(), name.as_str());
    let lines = parts.headers.iter().filter(|(other, _)| is_own(other)).map(|(_, line)| line.as_bytes());
    lines.collect::<Vec<_>>().join(&b", "[..])
}

/// The host that a request is for: in lower case, with its port unless that is the one of HTTP or HTTPS. Empty if the
/// request names none.
pub(crate) fn authority(parts: &Parts) -> String {
    // RFC 9112, 3.2.2; RFC 9113, 8.3.1: the host in the target wins.
    let mut authority = match parts.uri.authority() {
        Some(authority) => authority.as_str().to_ascii_lowercase(),
        None => String::from_utf8_lossy(&field(parts, header::HOST)).trim().to_ascii_lowercase(),
    };
    if let Some((_, host)) = authority.rsplit_once('@') {
        authority = host.to_owned();
    }
    // TLS may have ended in a proxy in front, so both ports are default ports.
    for port in [":80", ":443", ":"] {
        if let Some(host) = authority.strip_suffix(port) {
            return host.to_owned();
        }
    }
    authority
}

/// The value of a header field, with all its lines: the layer does not know which line the service reads.
fn field(parts: &Parts, name: HeaderName) -> Cow<'_, [u8]> {
    let mut lines = parts.headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Cow::Borrowed(b""),
        (Some(line), None) => Cow::Borrowed(line.as_bytes()),
        (Some(first), Some(second)) => {
            let lines = [first, second].into_iter().chain(lines).map(HeaderValue::as_bytes);
            Cow::Owned(lines.collect::<Vec<_>>().join(&b", "[..]))
        }
    }
}

/// The reason why a body carries no key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BodyKeyError {
    /// The members from which the key is built are not there.
    Natural(NaturalKeyError),
    /// No member carries it.
    Missing,
    /// The member has an invalid key.
    Invalid(KeyHeaderError),
    /// The key of a call is built from its intent, and this is missing or invalid.
    Intent(CallError),
}

/// The message in this request.
pub(crate) fn message(settings: &Settings, parts: &Parts, body: &DecodedBody<'_>) -> Message {
    match body.coding.is_empty() || body.bytes.is_empty() {
        true => mcp::read(settings, &parts.headers, &body.bytes),
        false => Message::Refused(
            "Nothing was executed. The content coding of the body is unknown, so it is not known if the body calls a tool.",
        ),
    }
}

/// The fingerprint of a request that calls a tool. Only the call counts of its body, and of a call by intent nothing else of the
/// request, because no client can send another key for it.
pub(crate) fn call_fingerprint(
    settings: &Settings,
    ids: &IdScheme,
    parts: &Parts,
    call: &ToolCall,
) -> Fingerprint {
    if call.is_by_intent {
        let intent = ids.fingerprint(Fingerprint::of_parts("mcp-intent", &[call.compared.as_bytes()]));
        return match settings.authority {
            AuthorityRole::Compared => with_host(ids, intent, &authority(parts)),
            AuthorityRole::Ignored | AuthorityRole::Scope => intent,
        };
    }
    fingerprint_of(settings, ids, parts, (b"application/json", "", call.compared.as_bytes()))
}

/// The key that this request's body carries.
pub(crate) fn body_key(
    settings: &Settings,
    parts: &Parts,
    body: &DecodedBody<'_>,
) -> Result<IdempotencyKey, BodyKeyError> {
    if !body.coding.is_empty() && !body.bytes.is_empty() {
        return Err(BodyKeyError::Invalid(KeyHeaderError::Unreadable));
    }
    let content_type = field(parts, header::CONTENT_TYPE);
    if let Some(members) = &settings.natural_key {
        return natural_key(members, &content_type, &body.bytes);
    }
    let read = key_in_body(&settings.profile, &content_type, &body.bytes);
    read.ok_or(BodyKeyError::Missing)?.map_err(BodyKeyError::Invalid)
}

/// # Errors
/// If there is no key. A body that may be JSON, and that two programs could read in two ways, is an error of its own: it may have
/// the members.
fn natural_key(key: &NaturalKey, content_type: &[u8], body: &[u8]) -> Result<IdempotencyKey, BodyKeyError> {
    if !may_be_json(content_type, body) {
        return Err(BodyKeyError::Natural(NaturalKeyError::NotJson));
    }
    // It is read whatever its type, unless the type names another charset.
    let parameters = content_type.iter().position(|byte| *byte == b';').and_then(|at| content_type.get(at..));
    let content_type = [b"application/json", parameters.unwrap_or_default()].concat();
    key.of(&content_type, body).map_err(|why| match why {
        NaturalKeyError::NotJson => BodyKeyError::Invalid(KeyHeaderError::Unreadable),
        why => BodyKeyError::Natural(why),
    })
}

/// The number of bytes at the end of a digest that hash the host alone, if the host is compared. A request to another
/// host then has another fingerprint, and the layer can tell that nothing else differs. 22 and 10 bytes are far more
/// than anyone can search by brute force.
const HOST_BYTES: usize = 10;

/// Returns true if a stored fingerprint and that of a request differ in the host only.
pub(crate) fn differs_in_host_only(stored: &Fingerprint, own: &Fingerprint) -> bool {
    let rest = |fingerprint: &Fingerprint| fingerprint.digest().first_chunk::<{ 32 - HOST_BYTES }>().copied();
    stored != own && stored.version() == own.version() && rest(stored) == rest(own)
}

/// The fingerprint of a request: two requests with one key are the same if it is equal.
pub(crate) fn fingerprint(
    settings: &Settings,
    ids: &IdScheme,
    parts: &Parts,
    body: &DecodedBody<'_>,
) -> Fingerprint {
    fingerprint_of(settings, ids, parts, (&field(parts, header::CONTENT_TYPE), &body.coding, &body.bytes))
}

/// The fingerprint of a request with a body of this media type and coding.
fn fingerprint_of(
    settings: &Settings,
    ids: &IdScheme,
    parts: &Parts,
    (content_type, content_coding, body): (&[u8], &str, &[u8]),
) -> Fingerprint {
    let target = target(settings, parts);
    let headers: Vec<(&str, &[u8])> = settings
        .fingerprint_headers
        .iter()
        .flat_map(|name| parts.headers.get_all(name).iter().map(|value| (name.as_str(), value.as_bytes())))
        .chain(overrides(&parts.headers))
        .chain(settings.profile.first_sent_header.iter().flat_map(|name| {
            parts.headers.get_all(name).iter().map(|value| (name.as_str(), value.as_bytes()))
        }))
        .collect();
    let head = FingerprintInput {
        method: &method::canonical(&parts.method),
        target: &target,
        headers: &headers,
        ..FingerprintInput::default()
    };
    let fingerprint = settings.profile.fingerprint.fingerprint(&match settings.profile.body_comparison {
        BodyComparison::Nothing => head,
        BodyComparison::Canonical | BodyComparison::Raw => {
            FingerprintInput { content_type, content_coding, body, ..head }
        }
    });
    let fingerprint = ids.fingerprint(fingerprint);
    match settings.authority {
        AuthorityRole::Compared => with_host(ids, fingerprint, &authority(parts)),
        AuthorityRole::Ignored | AuthorityRole::Scope => fingerprint,
    }
}

fn with_host(ids: &IdScheme, fingerprint: Fingerprint, host: &str) -> Fingerprint {
    let host = ids.fingerprint(Fingerprint::of_parts("host", &[host.as_bytes()]));
    let mut digest = *fingerprint.digest();
    for (own, host) in digest.iter_mut().zip(host.digest()).skip(32 - HOST_BYTES) {
        *own = *host;
    }
    Fingerprint::from_parts(fingerprint.version(), digest).unwrap_or(fingerprint)
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
    /// The coding that could not be undone, or whose decoded body would be too large. Empty if there is none.
    coding: Cow<'a, str>,
    /// True if the decoded body would be too large.
    outgrows: bool,
}

impl DecodedBody<'_> {
    /// Returns true if the body is still encoded, because the decoded body would be larger than allowed.
    pub(crate) const fn outgrows(&self) -> bool {
        self.outgrows
    }
}

/// Undoes the content coding of a body. A body that cannot be decoded stays as it is, and so does one whose result would be
/// larger than `max` bytes or than [`limits::MAX_DECODED_RATIO`] times the bytes that were sent.
///
/// # Errors
/// If the budget is used up.
pub(crate) fn decode<'a>(
    parts: &'a Parts,
    body: &'a [u8],
    max: usize,
    held: &mut BudgetReservation,
) -> Result<DecodedBody<'a>, BudgetExhausted> {
    match field(parts, header::CONTENT_ENCODING) {
        Cow::Borrowed(coding) => decode_coding(coding, body, max, held),
        // Several lines: the layer does not know which one the service reads.
        Cow::Owned(codings) => {
            let coding = Cow::Owned(String::from_utf8_lossy(&codings).into_owned());
            Ok(DecodedBody { bytes: Cow::Borrowed(body), coding, outgrows: false })
        }
    }
}

fn decode_coding<'a>(
    coding: &'a [u8],
    body: &'a [u8],
    max: usize,
    held: &mut BudgetReservation,
) -> Result<DecodedBody<'a>, BudgetExhausted> {
    let max = max.min(body.len().saturating_mul(limits::MAX_DECODED_RATIO).max(limits::DECODED_FREE));
    let name = String::from_utf8_lossy(coding.trim_ascii());
    let undone = match name.to_ascii_lowercase().as_str() {
        "" | "identity" => {
            let bytes = Cow::Borrowed(body);
            return Ok(DecodedBody { bytes, coding: Cow::Borrowed(""), outgrows: false });
        }
        "gzip" | "x-gzip" => read_limited(MultiGzDecoder::new(body), MultiGzDecoder::into_inner, max, held)?,
        // RFC 9110, 8.4.1.2: zlib; some clients send bare deflate anyway.
        "deflate" => match read_limited(ZlibDecoder::new(body), ZlibDecoder::into_inner, max, held)? {
            DecodeResult::Damaged => {
                read_limited(DeflateDecoder::new(body), DeflateDecoder::into_inner, max, held)?
            }
            undone => undone,
        },
        _ => DecodeResult::Damaged,
    };
    let outgrows = matches!(undone, DecodeResult::TooLarge);
    Ok(match undone {
        DecodeResult::Whole(bytes) => {
            DecodedBody { bytes: Cow::Owned(bytes), coding: Cow::Borrowed(""), outgrows }
        }
        _ => DecodedBody { bytes: Cow::Borrowed(body), coding: name, outgrows },
    })
}

enum DecodeResult {
    Whole(Vec<u8>),
    TooLarge,
    Damaged,
}

/// Reads at most `max` bytes in steps, and reserves each step in the budget before it is read. A body with a `rest` after the
/// end of its compressed stream counts as damaged: the rest is part of the request, and a service may read it.
fn read_limited<'a, D: Read>(
    mut from: D,
    rest: impl Fn(D) -> &'a [u8],
    max: usize,
    held: &mut BudgetReservation,
) -> Result<DecodeResult, BudgetExhausted> {
    const STEP: usize = 16 * 1024;
    let mut to = Vec::new();
    loop {
        if !held.add(STEP) {
            return Err(BudgetExhausted);
        }
        let before = to.len();
        if from.by_ref().take(STEP as u64).read_to_end(&mut to).is_err() {
            return Ok(DecodeResult::Damaged);
        }
        if to.len() > max {
            return Ok(DecodeResult::TooLarge);
        }
        if to.len() < before + STEP {
            return Ok(if rest(from).is_empty() { DecodeResult::Whole(to) } else { DecodeResult::Damaged });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use std::io::Write as _;

    use crate::budget::Budget;

    const PLAIN: &[u8] = br#"{"amount":1}"#;

    fn decoded<'a>(coding: &'a [u8], body: &'a [u8], max: usize) -> (Cow<'a, [u8]>, Cow<'a, str>) {
        let budget = Budget::new(1 << 30);
        let body = decode_coding(coding, body, max, &mut BudgetReservation::nothing(budget)).unwrap();
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
            assert!(bomb.len() < free / limits::MAX_DECODED_RATIO, "{}", bomb.len());
            assert_eq!(decoded(b"gzip", &bomb, 1 << 20).1.is_empty(), undone, "{len}");
        }
        // A body that is large already may grow, too.
        let plain: Vec<u8> = (0..100_000_u32).flat_map(|number| (number % 1000).to_be_bytes()).collect();
        assert_eq!(decoded(b"gzip", &gzip(&plain, 9), 1 << 20).0, plain);
    }

    #[test]
    fn a_decoded_body_is_reserved_in_the_budget() {
        let plain: Vec<u8> = (0..100_000_u32).flat_map(u32::to_be_bytes).collect();
        let coded = gzip(&plain, 9);
        for (limit, fits) in [(plain.len() / 2, false), (2 * plain.len(), true)] {
            let budget = Budget::new(limit);
            let mut held = BudgetReservation::nothing(budget);
            assert_eq!(decode_coding(b"gzip", &coded, 1 << 20, &mut held).is_ok(), fits);
        }
    }

    #[test]
    fn bytes_after_the_end_of_a_compressed_body_count() {
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(PLAIN).unwrap();
        let mut deflate = DeflateEncoder::new(Vec::new(), Compression::default());
        deflate.write_all(PLAIN).unwrap();
        for (coding, body) in [
            ("deflate", zlib.finish().unwrap()),
            ("deflate", deflate.finish().unwrap()),
            ("gzip", gzip(PLAIN, 6)),
        ] {
            for tail in [&b"x"[..], b"\0", b"\0\0\0\0\0\0\0\0\0\0", b"another body"] {
                let longer = [&body[..], tail].concat();
                assert_eq!(
                    decoded(coding.as_bytes(), &longer, 100),
                    (Cow::Borrowed(&longer[..]), coding.into()),
                    "{tail:?}"
                );
            }
        }
        // RFC 1952, 2.2: a gzip file may have several members.
        let two = [gzip(PLAIN, 1), gzip(PLAIN, 9)].concat();
        assert_eq!(decoded(b"gzip", &two, 100).0, PLAIN.repeat(2));
    }

    fn head(target: &str, fields: &[(&'static str, &'static str)]) -> Parts {
        let mut request = http::Request::post(target);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn undone(parts: &Parts) -> DecodedBody<'_> {
        decode(parts, PLAIN, 100, &mut BudgetReservation::nothing(Budget::new(1 << 20))).unwrap()
    }

    #[test]
    fn a_host_has_one_spelling() {
        for (target, hosts, expected) in [
            ("/", &["Shop.Example"][..], "shop.example"),
            ("/", &["shop.example:80"], "shop.example"),
            ("/", &["shop.example:443"], "shop.example"),
            ("/", &["shop.example:"], "shop.example"),
            ("/", &["shop.example:8080"], "shop.example:8080"),
            ("/", &["shop.example:8443"], "shop.example:8443"),
            ("/", &["[2001:DB8::80]:80"], "[2001:db8::80]"),
            ("/", &["[2001:db8::80]"], "[2001:db8::80]"),
            ("http://Other.example:80/", &["shop.example"], "other.example"),
            ("https://me@other.example/", &[], "other.example"),
            ("/", &["a.example", "b.example"], "a.example, b.example"),
            ("/", &[], ""),
        ] {
            let fields: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            assert_eq!(authority(&head(target, &fields)), expected, "{target} {hosts:?}");
        }
    }

    #[test]
    fn every_line_of_a_field_counts() {
        const JSON: (&str, &str) = ("content-type", "application/json");
        let settings = Settings::default();
        let read = |parts: &Parts| fingerprint(&settings, &IdScheme::PLAIN, parts, &undone(parts));
        let of = |fields: &[_]| read(&head("/", fields));
        let plain = of(&[JSON]);
        for fields in [
            &[JSON, ("content-type", "text/plain")][..],
            &[("content-type", "text/plain"), JSON],
            &[JSON, JSON],
            &[JSON, ("content-encoding", "identity"), ("content-encoding", "br")],
            &[JSON, ("content-encoding", "br")],
            &[JSON, ("content-encoding", ""), ("content-encoding", "br")],
        ] {
            assert_ne!(of(fields), plain, "{fields:?}");
        }
        let key = |fields: &[_]| {
            let parts = head("/", fields);
            body_key(&natural(), &parts, &undone(&parts))
        };
        assert!(key(&[JSON]).is_ok());
        let unreadable = Err(BodyKeyError::Invalid(KeyHeaderError::Unreadable));
        assert!(key(&[JSON, ("content-type", "text/plain")]).is_ok());
        assert_eq!(key(&[JSON, ("content-type", "text/plain; charset=latin1")]), unreadable);
        assert_eq!(key(&[JSON, ("content-encoding", "br")]), unreadable);
    }

    fn natural() -> Settings {
        let key = NaturalKey::new(vec!["/amount".parse().unwrap()]).unwrap();
        Settings::default().with_natural_key(key)
    }

    #[test]
    fn a_body_that_may_be_json_is_read_or_refused_and_others_have_no_natural_key() {
        let of = |content_type: &'static str, body: &[u8]| {
            let parts = head("/", &[("content-type", content_type)]);
            let bytes = Cow::Borrowed(body);
            body_key(&natural(), &parts, &DecodedBody { bytes, coding: "".into(), outgrows: false })
        };
        const JSON: &str = "application/json";
        let expected = of(JSON, PLAIN).unwrap();
        for content_type in [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/x-amz-json-1.1",
            "application/vnd.shop+json; charset=utf-8",
        ] {
            assert_eq!(of(content_type, PLAIN).as_ref(), Ok(&expected), "{content_type}");
        }
        for (content_type, body) in [
            (JSON, &b"{"[..]),
            (JSON, b"amount=1"),
            (JSON, b" "),
            (JSON, b"{\"amount\":NaN}"),
            (JSON, b"\xef\xbb\xbf{\"amount\":1}"),
            (JSON, b"{\"amount\":1,\"amount\":1}"),
            (JSON, b"{\"amount\":9007199254740993}"),
            (JSON, b"{\"amount\":\"\xff\"}"),
            ("application/json; charset=latin1", PLAIN),
            ("text/plain", b" {\"amount\":1"),
            ("text/plain", b"{\0\"\0"),
            ("application/x-www-form-urlencoded", b"{\"amount\":1}="),
        ] {
            let unreadable = Err(BodyKeyError::Invalid(KeyHeaderError::Unreadable));
            assert_eq!(of(content_type, body), unreadable, "{content_type} {body:?}");
        }
        for (content_type, body) in [
            (JSON, &b""[..]),
            ("", b"amount=1"),
            ("text/plain", b"amount 1"),
            ("application/x-www-form-urlencoded", b"amount=1"),
            ("multipart/form-data; boundary=b", b"--b\r\n"),
            ("application/xml", b"<amount>1</amount>"),
        ] {
            let none = Err(BodyKeyError::Natural(NaturalKeyError::NotJson));
            assert_eq!(of(content_type, body), none, "{content_type} {body:?}");
        }
        assert!(matches!(of(JSON, b"[1]"), Err(BodyKeyError::Natural(NaturalKeyError::Missing(_)))));
    }

    #[test]
    fn a_field_of_the_scope_separates_keys() {
        let (scope, key) = (Scope::single_tenant(), IdempotencyKey::new("a").unwrap());
        for (profile, name, other_spelling) in
            [("aws", "x-amz-target", "x_amz_target"), ("stripe", "stripe-account", "stripe_account")]
        {
            let settings = Settings::new(crate::profile::Profile::named(profile).unwrap());
            let of =
                |fields: &[_]| locate(&settings, &IdScheme::PLAIN, &scope, &head("/", fields), &key, None).0;
            let one = of(&[(name, "one")]);
            assert_eq!(of(&[(name, "one"), ("x-other", "1")]), one);
            for other in [
                &[(name, "two")][..],
                &[],
                &[(name, "one"), (name, "two")],
                &[(name, "one"), (other_spelling, "two")],
                &[("x-other", "one")],
            ] {
                assert_ne!(of(other), one, "{other:?}");
            }
        }
    }

    #[test]
    fn the_host_is_compared_unless_it_is_ignored_or_has_keys_of_its_own() {
        let hosts = [head("/", &[("host", "a.example")]), head("/", &[("host", "b.example")])];
        let differ = |settings: &Settings| {
            let [a, b] = &hosts;
            let of = |parts: &Parts| fingerprint(settings, &IdScheme::PLAIN, parts, &undone(parts));
            of(a) != of(b)
        };
        assert!(differ(&Settings::default()));
        for role in [AuthorityRole::Ignored, AuthorityRole::Scope] {
            assert!(!differ(&Settings::default().with_authority(role)), "{role:?}");
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
