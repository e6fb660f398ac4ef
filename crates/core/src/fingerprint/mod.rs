//! The fingerprint of a request: equal fingerprints mean the same request.
//!
//! A key that comes back with the same fingerprint is a retry. With another fingerprint it is a mistake, and is refused. So
//! the fingerprint ignores what an honest retry may change (member order, white space, the spelling of `1.0`, a new
//! multipart boundary) and nothing else. **No two bodies that differ in meaning are ever made equal:** if a canonical form
//! would do that, or is not defined, the bytes count as they are.
//!
//! # Exactly what is hashed
//! The fingerprint of version 1 is the SHA-256 of the following items in this order. *Part* means the length of some bytes
//! as an unsigned 64-bit big-endian integer, and then the bytes. *Count* means an unsigned 64-bit big-endian integer alone.
//!
//! 1. part: `oncegate-fp-1`;
//! 2. part: the method, as given;
//! 3. part: the authority (host and port) that the request is for, as given; empty if it does not count;
//! 4. part: the target, path and query as received;
//! 5. part: the media type, below;
//! 6. part: the body's tag: `json`, `json-include`, `form`, `multipart` or `raw`;
//! 7. part: the content coding that could not be undone, in ASCII lower case; normally empty;
//! 8. count of the chosen headers; for each of them part: name, part: value. They are sorted by name as
//!    bytes; values of one name keep their order;
//! 9. the body, as its tag says:
//!    - `json`: part: the canonical JSON;
//!    - `json-include`: count of the included pointers, without repetitions; for each of them, sorted as
//!      bytes, part: the pointer as configured, part: the canonical JSON of its value, or the six letters
//!      `absent`, which are not JSON;
//!    - `form`: count of the pairs; for each of them part: name, part: value;
//!    - `multipart`: count of the parts; for each of them count of its header fields, for each of these part:
//!      name, part: value; and then part: the part's body;
//!    - `raw`: part: the body as received.
//!
//! ## Media type
//! Spaces and tabs around the field value are dropped. If it follows the grammar of RFC 9110, section 8.3.1
//! (`type/subtype` and parameters, which may be empty; an unquoted value may hold any visible ASCII character
//! but `"`, `,`, `;` and `\`), what is hashed is `type/subtype` in lower case, without parameters. There is
//! one exception: a `charset` that is neither `utf-8` nor `utf8`, in any case, gives
//! `type/subtype;charset=value`, all in lower case, and makes the body `raw`. If it does not follow the
//! grammar, if `charset` or `boundary` is there twice, or if a `charset` is not a token, then the value is
//! hashed as it is and the body is `raw`.
//!
//! ## Which tag
//! `raw` with [raw bodies](FingerprintRules::with_raw_bodies), with a content coding, and for an empty body,
//! whatever its type: an absent body is an empty body. Otherwise `multipart/*` is `multipart`,
//! `application/x-www-form-urlencoded` is `form`, and `application/json` and every other type whose subtype
//! ends in `+json` after at least one more character is `json` (`json-include` if pointers are
//! included and one of them selects a value). Everything else, and everything that can't be read by the rules below, is
//! `raw`.
//!
//! ## JSON
//! The canonical form of RFC 8785: no white space, members sorted by the UTF-16 code units of their names,
//! strings in their shortest spelling, numbers as ECMAScript prints them. `null` is not absent, and arrays
//! are ordered. There is no canonical form, and the body is `raw`, if one of these holds:
//!
//! 1. it is not valid UTF-8, or not JSON by RFC 8259 (a byte order mark, `NaN`, a trailing comma, anything
//!    after the value);
//! 2. arrays and objects are nested more than 128 deep;
//! 3. an object has two members of one name, compared after escapes are undone and without regard to case (Unicode's
//!    simple mappings): programs that ignore case read `amount` and `Amount` as one member, and which of the two counts
//!    depends on their order;
//! 4. a string contains half a surrogate pair;
//! 5. a number, read as an exact decimal, is neither 0 nor
//!    - an integer with a magnitude of at most 2^53 − 1, nor
//!    - a fraction with a magnitude between 10^−307 and 2^53 − 1 and at most 15 significant digits (those
//!      from the first to the last that is not 0).
//!
//! Rule 5 is what makes numbers safe: those that pass are all different doubles, so `1.0`, `1` and `1e0` are
//! equal and 9007199254740992 and 9007199254740993 are not.
//!
//! Excluded members and elements are left out of the canonical form, commas included; an array index means
//! the position before anything is left out. With included pointers, exclusion comes first: a value inside an
//! excluded value is `absent`.
//!
//! Pointers never make all bodies equal. *Nothing to compare* is a text without any string, number, `true` or
//! `false` in it: nothing at all, `null`, empty arrays and objects, and arrays and objects of these. If all
//! included pointers together select nothing to compare (a misspelt pointer selects nothing), the body is
//! `json`, as if no pointer was included. If exclusion leaves nothing to compare, the canonical form of the
//! whole document counts.
//!
//! ## Forms
//! The body is split at `&`, and each segment at its first `=`. In names and values `+` is a space and `%`
//! with two hexadecimal digits is a byte. Pairs are sorted, stably, by the *stem* of their name, as bytes: the
//! first run of ASCII letters and digits in it, in lower case. So pairs whose names have the same stem keep their
//! order, because a server may read them as one name or as one list. In the opposite order, `a.b=1&a_b=2` has another
//! meaning in PHP, `A=1&a=2` in ASP.NET, and `i[][id]=1&i[][n]=2` in many frameworks. If a name has a byte other than
//! space and visible ASCII, the pairs are not sorted at all.
//!
//! The body is `raw` if one of these holds:
//!
//! 1. there is an empty segment, a segment without `=`, or a `%` without its digits;
//! 2. there is a `;` (written as itself), which some servers read as a `&`;
//! 3. there are more than 16 384 pairs.
//!
//! ## Multipart
//! Parts in their order, without preamble, boundary and epilogue. All header fields of a part count, names in
//! lower case, values without spaces and tabs around them, sorted by name, fields of one name in their order.
//! The parts' bodies are bytes, whatever their type. The body is `raw` if one of these holds:
//!
//! 1. there is no boundary, or it is not 1 to 70 printable ASCII characters, the last not a space;
//! 2. a delimiter is not `--`, the boundary and CRLF (the last: `--`, the boundary and `--`), with CRLF
//!    before it (the first: or the start of the body);
//! 3. something other than CRLF comes before the first delimiter, or after the last one;
//! 4. a part does not have header lines (a token, a colon, a value without CR, LF and NUL), an empty line and
//!    a body;
//! 5. parts and header lines are more than 16 384 together.
//!
//! # Caveats
//! - Parameters other than `charset` don't count. If `application/json;v=1` and `;v=2` are different requests, choose the
//!   header `content-type`.
//! - Pointers work on JSON that has a canonical form. In a body that is `raw`, an excluded member counts like
//!   any other byte.
//! - The caller undoes content codings before it calls this code.
//! - A multipart body inside another one keeps its boundary, so it differs after each encoding.
//! - The fingerprint uses no secret. A reader of it can test guesses about a small body.
//!
//! # Example
//! ```
//! use oncegate_core::{FingerprintInput, FingerprintRules};
//!
//! let rules = FingerprintRules::new();
//! let of = |body: &str| {
//!     rules.fingerprint(&FingerprintInput {
//!         method: "POST",
//!         target: "/v1/payments",
//!         content_type: b"application/json",
//!         body: body.as_bytes(),
//!         ..FingerprintInput::default()
//!     })
//! };
//!
//! // The same payment, spelt another way.
//! assert_eq!(of(r#"{"amount": 10.0, "to": "é"}"#), of(r#"{"to":"\u00e9","amount":10}"#));
//! // Another payment.
//! assert_ne!(of(r#"{"amount": 10.0, "to": "é"}"#), of(r#"{"amount": 10.1, "to": "é"}"#));
//! ```

mod form;
mod json;
mod media_type;
mod multipart;
mod natural;
mod pointer;

use std::cell::Cell;
use std::fmt;

use sha2::{Digest as _, Sha256};

use self::form::Form;
use self::media_type::{Kind, MediaType};
use self::multipart::Part;
pub use self::natural::{NaturalKey, NaturalKeyError};
pub use self::pointer::{JsonPointer, JsonPointerError};
use crate::id::write_hex;

/// The first part of a request's fingerprint. It changes with [`Fingerprint::VERSION`].
const REQUEST: &[u8] = b"oncegate-fp-1";

/// The first part of [`Fingerprint::of_parts`], so that no list of parts has the fingerprint of a request.
const PARTS: &[u8] = b"oncegate-fp-parts-1";

/// The canonical form of a JSON text (RFC 8785), in which numbers that a double may not hold stay as they are spelt. `None` if no
/// canonical form distinguishes it from every other text.
pub(crate) fn canonical_json(text: &[u8]) -> Option<Vec<u8>> {
    json::canonicalize_with_all_numbers(text, &mut json::Scratch::default()).map(<[u8]>::to_vec)
}

/// A versioned SHA-256 of a request: equal fingerprints mean the same request.
///
/// Two fingerprints are equal if version and digest are. The [module page](self) defines the content of the hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    version: u8,
    digest: [u8; 32],
}

impl Fingerprint {
    /// The version that this code writes, and the only one that it reads.
    pub const VERSION: u8 = 1;

    /// A fingerprint read back from a record. `None` if the version is unknown: then the record can't be compared with a
    /// request, and must not count as another request.
    #[must_use]
    pub fn from_parts(version: u8, digest: [u8; 32]) -> Option<Self> {
        (version == Self::VERSION).then_some(Self { version, digest })
    }

    /// A fingerprint of this version with this digest.
    pub(crate) const fn of_digest(digest: [u8; 32]) -> Self {
        Self { version: Self::VERSION, digest }
    }

    /// The fingerprint of something that is not an HTTP request: a message, a call.
    ///
    /// `domain` names the kind of thing; different domains never share a fingerprint. Lengths keep the parts apart, so
    /// `["ab", "c"]` is not `["a", "bc"]`. The hash covers part: `oncegate-fp-parts-1`, part: `domain`, and each of `parts`,
    /// in the notation of the [module page](self).
    ///
    /// ```
    /// use oncegate_core::Fingerprint;
    ///
    /// let of = |parts: &[&[u8]]| Fingerprint::of_parts("orders", parts);
    /// assert_eq!(of(&[b"ab", b"c"]), of(&[b"ab", b"c"]));
    /// assert_ne!(of(&[b"ab", b"c"]), of(&[b"a", b"bc"]));
    /// ```
    #[must_use]
    pub fn of_parts(domain: &str, parts: &[&[u8]]) -> Self {
        let mut scratch = Scratch::take();
        let mut hasher = Hasher::new(&mut scratch.pending);
        hasher.part(PARTS);
        hasher.part(domain.as_bytes());
        parts.iter().for_each(|part| hasher.part(part));
        let fingerprint = hasher.finish();
        scratch.give_back();
        fingerprint
    }

    /// The version of the rules that made the digest.
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.version
    }

    /// The SHA-256.
    #[must_use]
    pub const fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

/// The version and the first four bytes: enough to tell two apart in a log, not enough to search for a body.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({}:", self.version)?;
        write_hex(f, self.digest.first_chunk::<4>().unwrap_or(&[0; 4]))?;
        f.write_str("..)")
    }
}

/// The version, a colon and the digest in 64 lower-case hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.version)?;
        write_hex(f, &self.digest)
    }
}

/// The parts of a request that the fingerprint covers, borrowed.
#[derive(Clone, Copy, Default)]
pub struct FingerprintInput<'a> {
    /// The request method, as received.
    pub method: &'a str,
    /// The host of the request, with the port if it is not the default. Empty if requests to different hosts may be the
    /// same.
    pub authority: &'a str,
    /// Path and query, as received.
    pub target: &'a str,
    /// The value of the `Content-Type` field, as received; empty if there is none.
    pub content_type: &'a [u8],
    /// The content coding that could **not** be undone. Empty if there was none, or if `body` is decoded.
    pub content_coding: &'a str,
    /// The headers that count, names in lower case. Order matters only among fields of one name.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// The body; empty if there is none.
    pub body: &'a [u8],
}

/// Method and sizes: headers and bodies don't belong in logs.
impl fmt::Debug for FingerprintInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FingerprintInput")
            .field("method", &self.method)
            .field("headers", &self.headers.len())
            .field("body", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// The rules by which requests are compared.
///
/// By default, JSON, forms and multipart bodies are compared in their canonical form ([module page](self)), and all of the
/// body counts. Change the rules of a running service with care: a retry after the change is compared with a record from
/// before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FingerprintRules {
    raw_bodies: bool,
    // Both lists are sorted and without repetitions, because the order of configuration doesn't count.
    include: Vec<JsonPointer>,
    exclude: Vec<JsonPointer>,
}

impl FingerprintRules {
    /// The default rules.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Compares bodies byte by byte, whatever their type. Pointers have no effect then.
    #[must_use]
    pub fn with_raw_bodies(mut self) -> Self {
        self.raw_bodies = true;
        self
    }

    /// Compares only this value of a JSON body, and the other included values.
    ///
    /// An included value that is not in the body counts as absent, which differs from `null`. A body without any of the
    /// included values is compared as a whole, so that a misspelt pointer does not make all bodies equal.
    ///
    /// ```
    /// use oncegate_core::{FingerprintInput, FingerprintRules, JsonPointer};
    ///
    /// let rules = FingerprintRules::new().include(JsonPointer::parse("/order")?);
    /// let of = |body: &str| {
    ///     let content_type = b"application/json";
    ///     rules.fingerprint(&FingerprintInput { content_type, body: body.as_bytes(), ..Default::default() })
    /// };
    /// assert_eq!(of(r#"{"order":7,"sent":"09:00"}"#), of(r#"{"order":7,"sent":"09:01"}"#));
    /// assert_ne!(of(r#"{"order":7,"sent":"09:00"}"#), of(r#"{"order":8,"sent":"09:00"}"#));
    /// # Ok::<(), oncegate_core::JsonPointerError>(())
    /// ```
    #[must_use]
    pub fn include(mut self, pointer: JsonPointer) -> Self {
        insert(&mut self.include, pointer);
        self
    }

    /// Ignores this value of a JSON body: a time stamp, a trace id, or another value that is new in each retry. If nothing
    /// else is in the body, it is compared as a whole.
    #[must_use]
    pub fn exclude(mut self, pointer: JsonPointer) -> Self {
        insert(&mut self.exclude, pointer);
        self
    }

    /// The values that are compared, sorted; empty if all of the body is.
    #[must_use]
    pub fn included(&self) -> &[JsonPointer] {
        &self.include
    }

    /// The values that are ignored, sorted.
    #[must_use]
    pub fn excluded(&self) -> &[JsonPointer] {
        &self.exclude
    }

    /// The fingerprint of a request under these rules. It never fails: a body that can't be read counts byte by byte.
    #[must_use]
    pub fn fingerprint(&self, input: &FingerprintInput<'_>) -> Fingerprint {
        let mut scratch = Scratch::take();
        let Scratch { json, selected, pending } = scratch.as_mut();
        let media_type = MediaType::read(input.content_type);
        let body = self.read_body(input, &media_type.kind, json, selected);

        let mut hasher = Hasher::new(pending);
        hasher.part(REQUEST);
        hasher.part(input.method.as_bytes());
        hasher.part(input.authority.as_bytes());
        hasher.part(input.target.as_bytes());
        hasher.part(&media_type.name);
        hasher.part(body.tag().as_bytes());
        hasher.part(input.content_coding.to_ascii_lowercase().as_bytes());
        hash_headers(input.headers, &mut hasher);
        body.hash(&mut hasher);
        let fingerprint = hasher.finish();
        scratch.give_back();
        fingerprint
    }

    fn read_body<'a>(
        &'a self,
        input: &FingerprintInput<'a>,
        kind: &Kind,
        json: &'a mut json::Scratch,
        selected: &'a mut Vec<u8>,
    ) -> Body<'a> {
        let body = input.body;
        if self.raw_bodies || body.is_empty() || !input.content_coding.is_empty() {
            return Body::Raw(body);
        }
        match kind {
            Kind::Json => json::canonicalize(body, json).map(|document| self.select(document, selected)),
            Kind::Form => Form::read(body).map(Body::Form),
            Kind::Multipart { boundary } => multipart::read(body, boundary).map(Body::Multipart),
            Kind::Raw => None,
        }
        .unwrap_or(Body::Raw(body))
    }

    /// The part of a document that counts. Never so little that all documents would be equal.
    fn select<'a>(&'a self, document: &'a [u8], selected: &'a mut Vec<u8>) -> Body<'a> {
        let includes = self.include.iter().any(|pointer| {
            selected.clear();
            pointer::select(document, pointer, &self.exclude, selected);
            json::has_value(selected)
        });
        if includes {
            return Body::Included { rules: self, document };
        }
        if self.exclude.is_empty() {
            return Body::Json(document);
        }
        selected.clear();
        pointer::exclude(document, &self.exclude, selected);
        Body::Json(if json::has_value(selected) { selected } else { document })
    }
}

fn insert(pointers: &mut Vec<JsonPointer>, pointer: JsonPointer) {
    if let Err(place) = pointers.binary_search(&pointer) {
        pointers.insert(place, pointer);
    }
}

/// A body in the form in which it is compared.
enum Body<'a> {
    Json(&'a [u8]),
    Included { rules: &'a FingerprintRules, document: &'a [u8] },
    Form(Form),
    Multipart(Vec<Part<'a>>),
    Raw(&'a [u8]),
}

impl Body<'_> {
    fn tag(&self) -> &'static str {
        match self {
            Self::Json(_) => "json",
            Self::Included { .. } => "json-include",
            Self::Form(_) => "form",
            Self::Multipart(_) => "multipart",
            Self::Raw(_) => "raw",
        }
    }

    fn hash(&self, hasher: &mut Hasher<'_>) {
        match self {
            Self::Json(bytes) | Self::Raw(bytes) => hasher.part(bytes),
            Self::Included { rules, document } => {
                hasher.count(rules.include.len());
                let mut value = Vec::new();
                for pointer in &rules.include {
                    value.clear();
                    pointer::select(document, pointer, &rules.exclude, &mut value);
                    hasher.part(pointer.as_str().as_bytes());
                    hasher.part(if value.is_empty() { b"absent" } else { &value });
                }
            }
            Self::Form(form) => {
                hasher.count(form.len());
                for (name, value) in form.pairs() {
                    hasher.part(name);
                    hasher.part(value);
                }
            }
            Self::Multipart(parts) => {
                hasher.count(parts.len());
                for part in parts {
                    hasher.count(part.headers.len());
                    for (name, value) in &part.headers {
                        hasher.part(name);
                        hasher.part(value);
                    }
                    hasher.part(part.body);
                }
            }
        }
    }
}

fn hash_headers(headers: &[(&str, &[u8])], hasher: &mut Hasher<'_>) {
    hasher.count(headers.len());
    let mut write = |headers: &[(&str, &[u8])]| {
        for (name, value) in headers {
            hasher.part(name.as_bytes());
            hasher.part(value);
        }
    };
    if headers.is_sorted_by_key(|(name, _)| *name) {
        return write(headers);
    }
    let mut headers = headers.to_vec();
    // A stable sort: fields of one name keep their order.
    headers.sort_by_key(|(name, _)| *name);
    write(&headers);
}

/// SHA-256 over parts and counts. Short parts are gathered first, because hashing is fast only on whole blocks.
struct Hasher<'s> {
    sha256: Sha256,
    pending: &'s mut Vec<u8>,
}

impl<'s> Hasher<'s> {
    /// Longest part that is gathered, in bytes. Longer parts are hashed without a copy.
    const GATHERED: usize = 512;

    fn new(pending: &'s mut Vec<u8>) -> Self {
        pending.clear();
        Self { sha256: Sha256::new(), pending }
    }

    fn count(&mut self, count: usize) {
        self.pending.extend_from_slice(&(count as u64).to_be_bytes());
    }

    fn part(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        if bytes.len() <= Self::GATHERED {
            self.pending.extend_from_slice(bytes);
        }
        if bytes.len() > Self::GATHERED || self.pending.len() > Self::GATHERED {
            self.sha256.update(&self.pending);
            self.pending.clear();
        }
        if bytes.len() > Self::GATHERED {
            self.sha256.update(bytes);
        }
    }

    fn finish(mut self) -> Fingerprint {
        self.sha256.update(&self.pending);
        Fingerprint { version: Fingerprint::VERSION, digest: self.sha256.finalize().into() }
    }
}

/// Buffers that a thread keeps from one fingerprint to the next.
#[derive(Default)]
struct Scratch {
    json: json::Scratch,
    selected: Vec<u8>,
    pending: Vec<u8>,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

impl Scratch {
    /// Most bytes that a thread keeps: one very large body must not cost its memory forever.
    const KEPT: usize = 256 * 1024;

    fn take() -> Box<Self> {
        SCRATCH.try_with(Cell::take).ok().flatten().unwrap_or_default()
    }

    fn give_back(self: Box<Self>) {
        let held = self.json.capacity() + self.selected.capacity() + self.pending.capacity();
        if held <= Self::KEPT {
            // This fails only in a thread that is ending, which needs no buffers.
            let _ = SCRATCH.try_with(|kept| kept.set(Some(self)));
        }
    }
}

#[cfg(test)]
mod tests;
