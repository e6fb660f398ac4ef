//! How an intent is written down: three lines' worth of text, then the body.
//!
//! ```text
//! oncegate-intent 1 maybe-sent 2c26b46b…      (SHA-256 over everything below this line)
//! {"key":"…","method":"POST","uri":"…","created_at":1763762400000,…,"body":27}
//! the body, so many octets
//! ```
//!
//! The state is outside of the hash, because it is the one thing that changes, in place. Its two words differ in so many
//! letters that damage does not make one of the other.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use oncegate_core::{IdempotencyKey, Timestamp};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::intent::Intent;
use crate::key::Carrier;

/// Largest entry in octets: an intent is held in memory to be sent, and its body has to be in one piece.
pub(super) const MAX_ENTRY_BYTES: u64 = 16 * 1024 * 1024;

const MAGIC: &[u8] = b"oncegate-intent ";
const VERSION: &[u8] = b"1";

/// Where the state stands in the file.
pub(super) const STATE_AT: u64 = (MAGIC.len() + VERSION.len() + 1) as u64;

/// The intent may have been sent.
pub(super) const MAYBE_SENT: &[u8; 10] = b"maybe-sent";
/// It is certain that it was not processed by anybody.
pub(super) const NEVER_SENT: &[u8; 10] = b"never-sent";

/// The content of a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) intent: Intent,
    pub(super) maybe_sent: bool,
    pub(super) caller: Caller,
}

impl Entry {
    /// Whether these fields are those of the caller that it was written down for: the same secrets, and no others.
    pub(super) fn is_of(&self, headers: &HeaderMap) -> bool {
        self.caller.has(headers, self.intent.headers())
    }
}

/// Tells whether credentials are those that an intent was sent with, and does not hold them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    /// The fields that were not written down, and that have to be added again.
    pub(super) left_out: Vec<HeaderName>,
    /// What they were, if there are any.
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
            // Without random bits it is a digest without salt, in a file that only its owner can read.
            let _drawn = getrandom::fill(&mut salt);
            Credentials::of(salt, &left_out, headers)
        });
        Self { left_out, credentials }
    }

    /// Whether these fields hold the same secrets, and no others. `written` are the fields that were written down: those of
    /// another version of this program may have secrets among them.
    pub(super) fn has(&self, headers: &HeaderMap, written: &HeaderMap) -> bool {
        let is_known = |name: &HeaderName, value: &HeaderValue| {
            self.left_out.contains(name) || written.get_all(name).iter().any(|known| known == value)
        };
        headers.iter().all(|(name, value)| !is_secret(name, value) || is_known(name, value))
            && self.credentials.is_none_or(|known| known.are(&self.left_out, headers))
    }

    /// The first field that was left out and is not among these.
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
        let mut part = |octets: &[u8]| {
            hash.update((octets.len() as u64).to_be_bytes());
            hash.update(octets);
        };
        for name in names {
            for value in headers.get_all(name) {
                part(name.as_str().as_bytes());
                part(value.as_bytes());
            }
        }
        Self { salt, digest: hash.finalize().into() }
    }

    /// Whether these are the fields of these names that it was made of.
    fn are(&self, names: &[HeaderName], headers: &HeaderMap) -> bool {
        *self == Self::of(self.salt, names, headers)
    }

    fn read(text: &str) -> Option<Self> {
        let octets = |hex: &str| -> Option<Vec<u8>> {
            let pairs = hex.as_bytes().chunks_exact(2);
            pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
        };
        let (salt, digest) = text.split_at_checked(32)?;
        Some(Self { salt: octets(salt)?.try_into().ok()?, digest: octets(digest)?.try_into().ok()? })
    }
}

/// Fields that say who is asking, by the names that services give them.
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

/// These are not written down; nor are those that are marked as sensitive.
fn is_secret(name: &HeaderName, value: &HeaderValue) -> bool {
    value.is_sensitive() || CREDENTIALS.contains(&name.as_str())
}

/// The file of an intent that is about to be sent for the first time.
pub(super) fn encode(intent: &Intent) -> Vec<u8> {
    let mut headers = Vec::new();
    let caller = Caller::of(intent.headers());
    for (name, value) in intent.headers() {
        if !caller.left_out.contains(name) {
            // Octets as the characters with the same numbers, so that there is a text for each.
            let value: String = value.as_bytes().iter().map(|octet| char::from(*octet)).collect();
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
    let mut file = Vec::with_capacity(rest.len() + 128);
    for part in [MAGIC, VERSION, b" ", MAYBE_SENT, b" ", &digest(&rest), b"\n", &rest] {
        file.extend_from_slice(part);
    }
    file
}

/// Reads a file from end to end.
pub(super) fn decode(file: &[u8]) -> Result<Entry, String> {
    let rest = file.strip_prefix(MAGIC).ok_or("it does not begin as an intent does")?;
    let rest = rest.strip_prefix(VERSION).and_then(|rest| rest.strip_prefix(b" "));
    let rest = rest.ok_or("it is of a version that this program does not know")?;
    let (state, rest) = rest.split_at_checked(MAYBE_SENT.len()).ok_or("it breaks off")?;
    let maybe_sent = match state {
        state if state == MAYBE_SENT => true,
        state if state == NEVER_SENT => false,
        _ => return Err("its state is none".to_owned()),
    };
    let rest = rest.strip_prefix(b" ").ok_or("its first line is damaged")?;
    let (expected, rest) = rest.split_at_checked(64).ok_or("it breaks off")?;
    let rest = rest.strip_prefix(b"\n").ok_or("its first line is damaged")?;
    if digest(rest) != expected {
        return Err("its checksum is wrong".to_owned());
    }
    let end = rest.iter().position(|octet| *octet == b'\n').ok_or("it has no body")?;
    let (about, body) = rest.split_at_checked(end).ok_or("it has no body")?;
    let about: Map<String, Value> = serde_json::from_slice(about).map_err(|error| error.to_string())?;
    // Behind a right checksum only a program that is no Oncegate writes what does not fit.
    let (intent, caller) = read(&about, body.get(1..).unwrap_or_default())
        .ok_or("its checksum is right, and yet it is no intent")?;
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
        let octets = field.get(1)?.as_str()?.chars().map(|one| u8::try_from(u32::from(one)).ok());
        let value = HeaderValue::from_bytes(&octets.collect::<Option<Vec<u8>>>()?).ok()?;
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

/// What the file of this key is called.
pub(super) fn file_name(key: &IdempotencyKey) -> String {
    let mut hash = Sha256::new();
    hash.update(b"oncegate-intent-file-1\n");
    hash.update(key.as_bytes());
    let hex = hex(&hash.finalize());
    format!("{}.intent", hex.get(..32).unwrap_or(&hex))
}

fn digest(rest: &[u8]) -> [u8; 64] {
    let mut hash = Sha256::new();
    hash.update(MAGIC);
    hash.update(VERSION);
    hash.update(rest);
    let hex = hex(&hash.finalize());
    hex.as_bytes().try_into().unwrap_or([b'-'; 64])
}

pub(super) fn hex(octets: &[u8]) -> String {
    octets.iter().map(|octet| format!("{octet:02x}")).collect()
}
