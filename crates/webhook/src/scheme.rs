//! Signature schemes: the formats of the senders, as they have published them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, HeaderName};
use oncegate_core::Timestamp;
use oncegate_engine::ConfigError;
use oncegate_inbox::Message;
use serde_json::Value;
use sha2::Sha256;

use crate::generic::GenericHmac;

type HmacSha256 = Hmac<Sha256>;

/// The maximum number of secrets. A rotation needs two, and each costs a pass over the payload.
const MAX_SECRETS: usize = 8;

/// The maximum number of signatures in a request. A rotation needs two.
const MAX_SIGNATURES: usize = 16;

/// The minimum length of a secret that Standard Webhooks requires.
const MIN_STANDARD_SECRET: usize = 24;

/// The maximum length of a secret. HMAC accepts any length, but a longer one is a mistake.
const MAX_SECRET: usize = 1024;

/// The tolerance of every published library.
const TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// The maximum tolerance. Within the tolerance a recorded request can be sent again by an attacker.
const MAX_TOLERANCE: Duration = Duration::from_secs(60 * 60);

/// The signature scheme of a sender, and its secrets.
///
/// Verification compares in constant time, over the bytes of the payload as they arrived. `Debug` shows no secret.
#[derive(Clone)]
pub struct WebhookScheme {
    kind: Kind,
    /// HMAC states, initialized with the secrets.
    keys: Vec<HmacSha256>,
    tolerance: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Standard,
    Stripe,
    GitHub,
    Generic(Arc<GenericHmac>),
}

/// The identifier of a verified request, and the headers that the handler gets.
type Verified<'s> = (Option<String>, Vec<&'s str>);

impl Kind {
    /// Returns `true` if the signature covers a time.
    fn signs_time(&self) -> bool {
        match self {
            Self::Standard | Self::Stripe => true,
            Self::GitHub => false,
            Self::Generic(format) => format.timestamp().is_some(),
        }
    }
}

/// The reason why a request was refused. The sender does not get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{}", self.as_str())]
#[non_exhaustive]
pub enum WebhookRefusal {
    /// A header of the scheme is missing.
    HeaderMissing,
    /// A header of the scheme occurs twice, or does not have the format of the scheme.
    HeaderMalformed,
    /// No signature matches any secret.
    SignatureWrong,
    /// The signature is valid, and its time is outside the tolerance.
    TimestampOutOfTolerance,
}

impl WebhookRefusal {
    /// All reasons.
    pub const ALL: [Self; 4] =
        [Self::HeaderMissing, Self::HeaderMalformed, Self::SignatureWrong, Self::TimestampOutOfTolerance];

    /// The word for this reason in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HeaderMissing => "header-missing",
            Self::HeaderMalformed => "header-malformed",
            Self::SignatureWrong => "signature-wrong",
            Self::TimestampOutOfTolerance => "timestamp-out-of-tolerance",
        }
    }
}

impl WebhookScheme {
    /// Standard Webhooks 1.0, with a secret `whsec_…`.
    ///
    /// The headers are `webhook-id`, `webhook-timestamp` and `webhook-signature`, or the same with `svix-`. Signatures
    /// `v1` are HMAC-SHA256. Signatures of Ed25519 (`v1a`) are ignored.
    ///
    /// # Errors
    /// [`ConfigError`] if the secret is not Base64 of at least 24 bytes, as the specification requires.
    pub fn standard(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::Standard).with_secret(secret)
    }

    /// Stripe, with the signing secret of an endpoint: `Stripe-Signature: t=…,v1=…`.
    ///
    /// # Errors
    /// [`ConfigError`] if the secret is empty, longer than 1024 bytes, or has white space around it.
    pub fn stripe(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::Stripe).with_secret(secret)
    }

    /// GitHub, with the secret of a webhook: `X-Hub-Signature-256` and `X-GitHub-Delivery`.
    ///
    /// Only the payload is signed. There is no signed time, and headers are only as trustworthy as the connection.
    ///
    /// # Errors
    /// [`ConfigError`] if the secret is empty, longer than 1024 bytes, or has white space around it.
    pub fn github(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::GitHub).with_secret(secret)
    }

    pub(crate) fn generic(format: GenericHmac, secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::Generic(Arc::new(format))).with_secret(secret)
    }

    const fn new(kind: Kind) -> Self {
        Self { kind, keys: Vec::new(), tolerance: TOLERANCE }
    }

    /// Also accepts signatures with this secret, for a rotation. At most eight secrets.
    ///
    /// # Errors
    /// [`ConfigError`] if the secret is invalid for the scheme, or if there are eight already.
    pub fn with_secret(mut self, secret: &str) -> Result<Self, ConfigError> {
        if self.keys.len() >= MAX_SECRETS {
            return Err(ConfigError::new(format!("a webhook has at most {MAX_SECRETS} secrets")));
        }
        let secret = match self.kind {
            Kind::Standard => standard_secret(secret)?,
            Kind::Stripe | Kind::GitHub | Kind::Generic(_) => plain_secret(secret)?,
        };
        let key = HmacSha256::new_from_slice(&secret)
            .map_err(|_| ConfigError::new("the secret is not a valid HMAC key"))?;
        self.keys.push(key);
        Ok(self)
    }

    /// Sets how far the signed time may differ from the clock, in either direction. Default: five minutes.
    ///
    /// # Errors
    /// [`ConfigError`] outside a second to an hour, and for schemes that sign no time.
    pub fn with_tolerance(self, tolerance: Duration) -> Result<Self, ConfigError> {
        if !self.kind.signs_time() {
            return Err(ConfigError::new("this sender signs no time, so there is no tolerance to set"));
        }
        let bounds = Duration::from_secs(1)..=MAX_TOLERANCE;
        if bounds.contains(&tolerance) {
            Ok(Self { tolerance, ..self })
        } else {
            let what = format!("the tolerance is {tolerance:?}; it must be from 1s to {MAX_TOLERANCE:?}");
            Err(ConfigError::new(what))
        }
    }

    /// Verifies a request at the time `now`, and returns its message.
    ///
    /// The [`broker_id`](Message::broker_id) of the message is the sender's identifier: `webhook-id`, the `id` of
    /// Stripe's event, `X-GitHub-Delivery`, or the identifier of a [`GenericHmac`]. The message has the headers that
    /// describe the payload, and the headers of the scheme except signatures.
    ///
    /// # Errors
    /// The reason for the refusal. The caller must not record anything then.
    pub fn verify(
        &self,
        topic: &str,
        headers: &HeaderMap,
        payload: Bytes,
        now: Timestamp,
    ) -> Result<Message, WebhookRefusal> {
        let (id, names) = match &self.kind {
            Kind::Standard => self.verify_standard(headers, &payload, now)?,
            Kind::Stripe => self.verify_stripe(headers, &payload, now)?,
            Kind::GitHub => self.verify_github(headers, &payload)?,
            Kind::Generic(format) => self.verify_generic(format, headers, &payload, now)?,
        };
        let mut message = Message::new(topic, payload);
        message.broker_id = id;
        for name in DESCRIBING_HEADERS.iter().copied().chain(names) {
            message = copied(message, headers, name);
        }
        Ok(message)
    }

    fn verify_standard(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
        now: Timestamp,
    ) -> Result<Verified<'static>, WebhookRefusal> {
        // Never mix the two families: a header of one must not be read if the other one is verified.
        let (names, signature): (&[&str], &str) = if headers.contains_key("webhook-id") {
            (&["webhook-id", "webhook-timestamp"], "webhook-signature")
        } else {
            (&["svix-id", "svix-timestamp"], "svix-signature")
        };
        let [id, timestamp] = names else { return Err(WebhookRefusal::HeaderMissing) };
        let id = one(headers, id)?;
        // With a full stop in the identifier, its end would be ambiguous in the signed text.
        if id.is_empty() || id.contains('.') {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        let timestamp = one(headers, timestamp)?;
        let signed_at = seconds(timestamp)?;
        let entries: Vec<_> = one(headers, signature)?.split(' ').collect();
        let signatures = entries.iter().filter_map(|entry| entry.strip_prefix("v1,")).map(|signature| {
            // Strict decoding: each signature has one spelling only.
            STANDARD.decode(signature).ok()
        });
        self.check(&[id.as_bytes(), b".", timestamp.as_bytes(), b".", payload], signatures)?;
        self.check_time(signed_at, now)?;
        Ok((Some(id.to_owned()), names.to_vec()))
    }

    fn verify_stripe(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
        now: Timestamp,
    ) -> Result<Verified<'static>, WebhookRefusal> {
        let entries: Vec<_> = one(headers, "stripe-signature")?.split(',').collect();
        let mut times = entries.iter().filter_map(|entry| entry.strip_prefix("t="));
        let (Some(timestamp), None) = (times.next(), times.next()) else {
            return Err(WebhookRefusal::HeaderMalformed);
        };
        let signed_at = seconds(timestamp)?;
        // Other versions than `v1` are ignored, so that an attacker cannot choose a weaker one.
        let signatures = entries.iter().filter_map(|entry| entry.strip_prefix("v1=")).map(hex);
        self.check(&[timestamp.as_bytes(), b".", payload], signatures)?;
        self.check_time(signed_at, now)?;
        Ok((event_id(payload), Vec::new()))
    }

    fn verify_github(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
    ) -> Result<Verified<'static>, WebhookRefusal> {
        let id = one(headers, "x-github-delivery")?;
        let signature = one(headers, "x-hub-signature-256")?;
        if id.is_empty() {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        let signature = signature.strip_prefix("sha256=").ok_or(WebhookRefusal::HeaderMalformed)?;
        self.check(&[payload], std::iter::once(hex(signature)))?;
        Ok((Some(id.to_owned()), GITHUB_HEADERS.to_vec()))
    }

    fn verify_generic<'s>(
        &self,
        format: &'s GenericHmac,
        headers: &HeaderMap,
        payload: &[u8],
        now: Timestamp,
    ) -> Result<Verified<'s>, WebhookRefusal> {
        let signature = format.signature(headers)?;
        let signed_at = match format.timestamp() {
            Some(name) => Some(seconds(one(headers, name.as_str())?)?),
            None => None,
        };
        self.check(&format.signed_text(headers, payload)?, std::iter::once(signature))?;
        if let Some(signed_at) = signed_at {
            self.check_time(signed_at, now)?;
        }
        Ok((format.id(headers, payload)?, format.copied_headers()))
    }

    /// Checks that one of the signatures matches one of the secrets.
    fn check(
        &self,
        signed: &[&[u8]],
        signatures: impl Iterator<Item = Option<Vec<u8>>>,
    ) -> Result<(), WebhookRefusal> {
        // Malformed signatures count, too. Otherwise a request could contain any number of them.
        let signatures: Vec<_> = signatures.take(MAX_SIGNATURES + 1).collect();
        if signatures.is_empty() || signatures.len() > MAX_SIGNATURES {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        for key in &self.keys {
            let mut mac = key.clone();
            for part in signed {
                mac.update(part);
            }
            for signature in signatures.iter().flatten() {
                // The comparison is in constant time, over the whole length.
                if mac.clone().verify_slice(signature).is_ok() {
                    return Ok(());
                }
            }
        }
        Err(WebhookRefusal::SignatureWrong)
    }

    /// Compares whole seconds, as the published libraries do.
    fn check_time(&self, signed_at: u64, now: Timestamp) -> Result<(), WebhookRefusal> {
        let away = (now.as_millis() / 1000).abs_diff(signed_at);
        if away <= self.tolerance.as_secs() { Ok(()) } else { Err(WebhookRefusal::TimestampOutOfTolerance) }
    }
}

impl fmt::Debug for WebhookScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookScheme")
            .field("kind", &self.kind)
            .field("secrets", &self.keys.len())
            .field("tolerance", &self.tolerance)
            .finish()
    }
}

/// The headers that describe a payload.
const DESCRIBING_HEADERS: &[&str] = &["content-type", "content-encoding"];

/// The headers of GitHub that describe an event, without the signatures.
const GITHUB_HEADERS: &[&str] = &[
    "x-github-delivery",
    "x-github-event",
    "x-github-hook-id",
    "x-github-hook-installation-target-id",
    "x-github-hook-installation-target-type",
];

/// Copies all values of a header to the message.
pub(crate) fn copied(mut message: Message, headers: &HeaderMap, name: &str) -> Message {
    let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { return message };
    for value in headers.get_all(&name) {
        message = message.with_header(name.as_str(), Bytes::copy_from_slice(value.as_bytes()));
    }
    message
}

/// Returns the value of a header that occurs once, in visible ASCII.
pub(crate) fn one<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h str, WebhookRefusal> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().ok_or(WebhookRefusal::HeaderMissing)?;
    if values.next().is_some() {
        return Err(WebhookRefusal::HeaderMalformed);
    }
    value.to_str().map_err(|_| WebhookRefusal::HeaderMalformed)
}

/// Parses seconds since the Unix epoch: digits only.
fn seconds(text: &str) -> Result<u64, WebhookRefusal> {
    let is_good = (1..=12).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    if is_good {
        text.parse().map_err(|_| WebhookRefusal::HeaderMalformed)
    } else {
        Err(WebhookRefusal::HeaderMalformed)
    }
}

/// Decodes 64 lower-case hexadecimal digits to 32 bytes.
pub(crate) fn hex(text: &str) -> Option<Vec<u8>> {
    fn digit(byte: u8) -> Option<u8> {
        match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        }
    }
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// Returns the member `id` of a JSON event.
fn event_id(payload: &[u8]) -> Option<String> {
    let event: Value = serde_json::from_slice(payload).ok()?;
    let id = event.get("id")?.as_str()?;
    (!id.is_empty()).then(|| id.to_owned())
}

fn standard_secret(text: &str) -> Result<Vec<u8>, ConfigError> {
    let secret = STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text)).map_err(|_| {
        ConfigError::new("the secret is not `whsec_` and Base64, as Standard Webhooks requires")
    })?;
    if (MIN_STANDARD_SECRET..=MAX_SECRET).contains(&secret.len()) {
        Ok(secret)
    } else {
        let what = format!(
            "the secret has {} bytes; Standard Webhooks asks for {MIN_STANDARD_SECRET} or more",
            secret.len()
        );
        Err(ConfigError::new(what))
    }
}

/// Checks a secret that is used as it is written.
fn plain_secret(text: &str) -> Result<Vec<u8>, ConfigError> {
    // With an empty secret every attacker could sign.
    if text.is_empty() || text.len() > MAX_SECRET {
        return Err(ConfigError::new(format!("the secret must have from 1 to {MAX_SECRET} bytes")));
    }
    if text.trim() != text {
        return Err(ConfigError::new("the secret has white space around it, perhaps a line end: remove it"));
    }
    Ok(text.as_bytes().to_vec())
}
