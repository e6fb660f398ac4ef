//! The format of an intent's file: two lines of text, then the body.
//!
//! ```text
//! oncegate-intent 1 maybe-sent 2c26b46b…      (SHA-256 over everything below this line)
//! {"key":"…","method":"POST","uri":"…","created_at":1763762400000,…,"body":27}
//! the body, of that many bytes
//! ```
//!
//! With seal keys, an entry has version 2, and what follows its first line is encrypted:
//!
//! ```text
//! oncegate-intent 2 maybe-sent 9b871512…      (SHA-256 over everything below this line)
//! the sealed form of the second line and the body, bound to the name of the file (docs/reference/sealing.md)
//! ```
//!
//! The hash is there in both versions, so that damage is found without the key. The state is outside of the hash, because it
//! is the only part that changes in place. Its two words differ in so many letters that damage does not turn one into the
//! other.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use oncegate_core::{IdempotencyKey, Timestamp};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::sealing::EntrySeal;
use crate::intent::Intent;
use crate::key::Carrier;

/// The size of the largest entry in bytes: an intent is held in memory to be sent, with its body in one piece.
pub(super) const MAX_ENTRY_BYTES: u64 = 16 * 1024 * 1024;

const MAGIC: &[u8] = b"oncegate-intent ";
const VERSION: &[u8] = b"1";
/// The version of a sealed entry.
const SEALED_VERSION: &[u8] = b"2";

/// The position of the state in the file.
pub(super) const STATE_AT: u64 = (MAGIC.len() + VERSION.len() + 1) as u64;

/// The intent may have been sent.
pub(super) const MAYBE_SENT: &[u8; 10] = b"maybe-sent";
/// No service has processed the intent: that is certain.
pub(super) const NEVER_SENT: &[u8; 10] = b"never-sent";

/// The reason why the content of a file cannot be used.
#[derive(Debug)]
pub(super) enum EntryError {
    /// It is no complete intent.
    Damaged(String),
    /// It is encrypted with a key that this process does not have.
    Sealed(String),
}

impl From<&str> for EntryError {
    fn from(reason: &str) -> Self {
        Self::Damaged(reason.to_owned())
    }
}

/// The content of a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) intent: Intent,
    pub(super) maybe_sent: bool,
    pub(super) caller: Caller,
}

impl Entry {
    /// Returns `true` if the headers are those of the caller of the entry: the same secrets, and no others.
    pub(super) fn is_of(&self, headers: &HeaderMap) -> bool {
        self.caller.has(headers, self.intent.headers())
    }
}

/// A digest of a caller's credentials. It recognizes them, and does not contain them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    /// The headers that were not stored, and have to be added again.
    pub(super) left_out: Vec<HeaderName>,
    /// Their digest, if there are any.
    credentials: Option<Credentials>,
}

impl Caller {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut left_out = Vec::new();
        for (name, value) in headers {
            if is_secret(name, value) && !left_out.contains(name) {
                left_out.push(name.clone());
            }
        }
        let credentials = (!left_out.is_empty()).then(|| {
            let mut salt = [0; 16];
            // Without random bits the salt is zero. Only the owner can read the file.
            let _drawn = getrandom::fill(&mut salt);
            Credentials::of(salt, &left_out, headers)
        });
        Self { left_out, credentials }
    }

    /// Returns `true` if the headers have the same secrets, and no others.
    ///
    /// `written` are the stored headers: another version of this program may have stored secrets among them.
    pub(super) fn has(&self, headers: &HeaderMap, written: &HeaderMap) -> bool {
        let is_known = |name: &HeaderName, value: &HeaderValue| {
            self.left_out.contains(name) || written.get_all(name).iter().any(|known| known == value)
        };
        headers.iter().all(|(name, value)| !is_secret(name, value) || is_known(name, value))
            && self.credentials.is_none_or(|known| known.are(&self.left_out, headers))
    }

    /// Returns the headers that were left out and are not among these.
    pub(super) fn missing_in<'a>(&'a self, headers: &'a HeaderMap) -> impl Iterator<Item = &'a HeaderName> {
        self.left_out.iter().filter(|name| !headers.contains_key(*name))
    }

    pub(super) fn to_json(&self) -> (Value, Value) {
        let left_out: Vec<_> = self.left_out.iter().map(HeaderName::as_str).collect();
        let credentials = self.credentials.map(|Credentials { salt, digest }| hex(&salt) + &hex(&digest));
        (json!(left_out), json!(credentials))
    }

    pub(super) fn from_json(left_out: &Value, credentials: &Value) -> Option<Self> {
        let left_out = left_out.as_array()?.iter();
        let left_out = left_out.map(|name| HeaderName::from_bytes(name.as_str()?.as_bytes()).ok());
        Some(Self {
            left_out: left_out.collect::<Option<_>>()?,
            credentials: match credentials {
                Value::Null => None,
                text => Some(Credentials::read(text.as_str()?)?),
            },
        })
    }
}

/// A salt, and SHA-256 over it and the credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Credentials {
    salt: [u8; 16],
    digest: [u8; 32],
}

impl Credentials {
    fn of(salt: [u8; 16], names: &[HeaderName], headers: &HeaderMap) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"oncegate-intent-credentials-1\n");
        hash.update(salt);
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_be_bytes());
            hash.update(bytes);
        };
        for name in names {
            for value in headers.get_all(name) {
                part(name.as_str().as_bytes());
                part(value.as_bytes());
            }
        }
        Self { salt, digest: hash.finalize().into() }
    }

    /// Returns `true` if the headers of these names have the same digest.
    fn are(&self, names: &[HeaderName], headers: &HeaderMap) -> bool {
        *self == Self::of(self.salt, names, headers)
    }

    fn read(text: &str) -> Option<Self> {
        let bytes = |hex: &str| -> Option<Vec<u8>> {
            let pairs = hex.as_bytes().chunks_exact(2);
            pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
        };
        let (salt, digest) = text.split_at_checked(32)?;
        Some(Self { salt: bytes(salt)?.try_into().ok()?, digest: bytes(digest)?.try_into().ok()? })
    }
}

/// The usual names of headers with credentials.
const CREDENTIALS: [&str; 20] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "api-key",
    "apikey",
    "x-api-token",
    "x-api-secret",
    "x-auth-key",
    "x-auth-token",
    "x-access-token",
    "x-session-token",
    "x-amz-security-token",
    "x-goog-api-key",
    "x-functions-key",
    "ocp-apim-subscription-key",
    "x-shopify-access-token",
    "x-vault-token",
    "private-token",
    "job-token",
];

/// Returns `true` if the header must not be stored: a usual name of a credential, or marked as sensitive.
fn is_secret(name: &HeaderName, value: &HeaderValue) -> bool {
    value.is_sensitive() || CREDENTIALS.contains(&name.as_str())
}

/// Encodes the file of an intent that is about to be sent for the first time.
///
/// # Errors
/// If it cannot be sealed.
pub(super) fn encode(intent: &Intent, seal: &EntrySeal) -> Result<Vec<u8>, EntryError> {
    let mut headers = Vec::new();
    let caller = Caller::of(intent.headers());
    for (name, value) in intent.headers() {
        if !caller.left_out.contains(name) {
            // Each byte becomes the character with the same number, so that every value has a text.
            let value: String = value.as_bytes().iter().map(|byte| char::from(*byte)).collect();
            headers.push(json!([name.as_str(), value]));
        }
    }
    let (left_out, credentials) = caller.to_json();
    let about = json!({
        "key": intent.key().as_str().unwrap_or_default(),
        "method": intent.method().as_str(),
        "uri": intent.uri().to_string(),
        "created_at": intent.created_at().as_millis(),
        "key_lifetime": intent.key_lifetime().map(|life| u64::try_from(life.as_millis()).unwrap_or(u64::MAX)),
        "carrier": intent.carrier().map(|carrier| json!([carrier.name().as_str(), carrier.is_quoted()])),
        "headers": headers,
        "left_out": left_out,
        "credentials": credentials,
        "body": intent.body().len(),
    });
    let mut rest = about.to_string().into_bytes();
    rest.push(b'\n');
    rest.extend_from_slice(intent.body());
    let (version, rest) = match seal.seal(&file_name(intent.key()), &rest)? {
        Some(sealed) => (SEALED_VERSION, sealed),
        None => (VERSION, rest),
    };
    let mut file = Vec::with_capacity(rest.len() + 128);
    for part in [MAGIC, version, b" ", MAYBE_SENT, b" ", &digest(version, &rest), b"\n", &rest] {
        file.extend_from_slice(part);
    }
    Ok(file)
}

/// Decodes a file with this name, and verifies all of it.
pub(super) fn decode(name: &str, file: &[u8], seal: &EntrySeal) -> Result<Entry, EntryError> {
    let rest = file.strip_prefix(MAGIC).ok_or("it does not begin like an intent")?;
    let (version, rest) = rest.split_at_checked(VERSION.len()).ok_or("it is cut off")?;
    let rest = rest.strip_prefix(b" ").filter(|_| [VERSION, SEALED_VERSION].contains(&version));
    let rest = rest.ok_or("this program does not know its version")?;
    let (state, rest) = rest.split_at_checked(MAYBE_SENT.len()).ok_or("it is cut off")?;
    let maybe_sent = match state {
        state if state == MAYBE_SENT => true,
        state if state == NEVER_SENT => false,
        _ => return Err("its state is invalid".into()),
    };
    let rest = rest.strip_prefix(b" ").ok_or("its first line is damaged")?;
    let (expected, rest) = rest.split_at_checked(64).ok_or("it is cut off")?;
    let rest = rest.strip_prefix(b"\n").ok_or("its first line is damaged")?;
    if digest(version, rest) != expected {
        return Err("its checksum is wrong".into());
    }
    let opened;
    let rest = if version == SEALED_VERSION {
        opened = seal.open(name, rest)?;
        &opened
    } else {
        rest
    };
    let end = rest.iter().position(|byte| *byte == b'\n').ok_or("it has no body")?;
    let (about, body) = rest.split_at_checked(end).ok_or("it has no body")?;
    let about: Map<String, Value> =
        serde_json::from_slice(about).map_err(|error| EntryError::Damaged(error.to_string()))?;
    // Only a program other than Oncegate writes invalid content with a valid checksum.
    let (intent, caller) = read(&about, body.get(1..).unwrap_or_default())
        .ok_or("its checksum is valid, but its content is not an intent")?;
    let intent = if maybe_sent { intent.sent_before() } else { intent };
    Ok(Entry { intent, maybe_sent, caller })
}

fn read(about: &Map<String, Value>, body: &[u8]) -> Option<(Intent, Caller)> {
    let text = |name: &str| about.get(name)?.as_str();
    let number = |name: &str| about.get(name)?.as_u64();
    let method = Method::from_bytes(text("method")?.as_bytes()).ok()?;
    let uri: Uri = text("uri")?.parse().ok()?;
    let mut headers = HeaderMap::new();
    for field in about.get("headers")?.as_array()? {
        let name = HeaderName::from_bytes(field.get(0)?.as_str()?.as_bytes()).ok()?;
        let bytes = field.get(1)?.as_str()?.chars().map(|one| u8::try_from(u32::from(one)).ok());
        let value = HeaderValue::from_bytes(&bytes.collect::<Option<Vec<u8>>>()?).ok()?;
        headers.append(name, value);
    }
    if number("body")? != body.len() as u64 {
        return None;
    }
    let mut intent = Intent::new(method, uri)
        .ok()?
        .with_key(text("key")?)
        .ok()?
        .with_headers(headers)
        .with_created_at(Timestamp::from_millis(number("created_at")?))
        .with_body(Bytes::copy_from_slice(body));
    match about.get("key_lifetime")? {
        Value::Null => {}
        millis => intent = intent.with_key_lifetime(Duration::from_millis(millis.as_u64()?)),
    }
    match about.get("carrier")? {
        Value::Null => {}
        carrier => {
            let name = HeaderName::from_bytes(carrier.get(0)?.as_str()?.as_bytes()).ok()?;
            let bare = Carrier::named(name);
            let quoted = carrier.get(1)?.as_bool()?;
            intent = intent.with_carrier(if quoted { bare.quoted() } else { bare });
        }
    }
    Some((intent, Caller::from_json(about.get("left_out")?, about.get("credentials")?)?))
}

/// Returns the name of the file of this key.
pub(super) fn file_name(key: &IdempotencyKey) -> String {
    let mut hash = Sha256::new();
    hash.update(b"oncegate-intent-file-1\n");
    hash.update(key.as_bytes());
    let hex = hex(&hash.finalize());
    format!("{}.intent", hex.get(..32).unwrap_or(&hex))
}

fn digest(version: &[u8], rest: &[u8]) -> [u8; 64] {
    let mut hash = Sha256::new();
    hash.update(MAGIC);
    hash.update(version);
    hash.update(rest);
    let hex = hex(&hash.finalize());
    hex.as_bytes().try_into().unwrap_or([b'-'; 64])
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
