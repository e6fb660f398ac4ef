//! How senders sign their webhooks, as each of them has published it.

use std::fmt;
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

type HmacSha256 = Hmac<Sha256>;

/// Most secrets of one scheme. A rotation has two; each costs a pass over the payload.
const SECRETS_MAX: usize = 8;

/// Most signatures in one request that are looked at. A rotation has two.
const SIGNATURES_MAX: usize = 16;

/// Fewest octets that Standard Webhooks asks of a secret.
const STANDARD_SECRET_MIN: usize = 24;

/// Most octets of a secret. HMAC takes any number, but nobody has so long a one on purpose.
const SECRET_MAX: usize = 1024;

/// The tolerance that every published library has.
const TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// Longest tolerance. Within it a request that somebody has recorded is as good as new.
const TOLERANCE_MAX: Duration = Duration::from_secs(60 * 60);

/// How a sender signs its webhooks, and the secrets it does so with.
///
/// Verification compares in constant time and looks at the octets of the payload as they came. `Debug` shows no secret.
#[derive(Clone)]
pub struct WebhookScheme {
    kind: Kind,
    /// HMAC, keyed: what a request is fed to.
    keys: Vec<HmacSha256>,
    tolerance: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Standard,
    Stripe,
    GitHub,
}

/// Why a request is not taken for a webhook. Its sender hears less of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WebhookRefusal {
    /// A header that the scheme has is not there.
    HeaderMissing,
    /// A header of the scheme is there twice or is not what the scheme says.
    HeaderMalformed,
    /// No signature fits any secret.
    SignatureWrong,
    /// The signature is good, and its time is too far from ours.
    TimestampOutOfTolerance,
}

impl WebhookRefusal {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::HeaderMissing, Self::HeaderMalformed, Self::SignatureWrong, Self::TimestampOutOfTolerance];

    /// The word that logs and metrics have for it.
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

impl fmt::Display for WebhookRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::error::Error for WebhookRefusal {}

impl WebhookScheme {
    /// Standard Webhooks 1.0, with a secret `whsec_…`: `webhook-id`, `webhook-timestamp` and `webhook-signature`, or the same
    /// with `svix-`. Signatures `v1` are HMAC-SHA256; those of Ed25519 (`v1a`) are not looked at.
    ///
    /// # Errors
    /// Where the secret is not Base64 of 24 octets or more, as the specification asks.
    pub fn standard(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::Standard).with_secret(secret)
    }

    /// Stripe, with the signing secret of an endpoint: `Stripe-Signature: t=…,v1=…`.
    ///
    /// # Errors
    /// Where the secret is empty, longer than 1024 octets, or has white space around it.
    pub fn stripe(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::Stripe).with_secret(secret)
    }

    /// GitHub, with the secret of a webhook: `X-Hub-Signature-256` and `X-GitHub-Delivery`. Only the payload is signed: there is
    /// no time in it, and every header is only as good as the way it came.
    ///
    /// # Errors
    /// Where the secret is empty, longer than 1024 octets, or has white space around it.
    pub fn github(secret: &str) -> Result<Self, ConfigError> {
        Self::new(Kind::GitHub).with_secret(secret)
    }

    const fn new(kind: Kind) -> Self {
        Self { kind, keys: Vec::new(), tolerance: TOLERANCE }
    }

    /// Takes what is signed with this secret, too: the one before, or the next one, while it is changed. Eight at most.
    ///
    /// # Errors
    /// Where the secret is not one of the scheme, as for the first, or there are eight.
    pub fn with_secret(mut self, secret: &str) -> Result<Self, ConfigError> {
        if self.keys.len() >= SECRETS_MAX {
            return Err(ConfigError::new(format!("a webhook has at most {SECRETS_MAX} secrets")));
        }
        let secret = match self.kind {
            Kind::Standard => standard_secret(secret)?,
            Kind::Stripe | Kind::GitHub => plain_secret(secret)?,
        };
        let key = HmacSha256::new_from_slice(&secret)
            .map_err(|_| ConfigError::new("the secret of a webhook is no key of HMAC"))?;
        self.keys.push(key);
        Ok(self)
    }

    /// How far the time in the signature may be from ours, to either side. Five minutes by default, as every published
    /// library has it.
    ///
    /// # Errors
    /// Outside a second to an hour; and with GitHub, which signs no time.
    pub fn with_tolerance(self, tolerance: Duration) -> Result<Self, ConfigError> {
        if self.kind == Kind::GitHub {
            return Err(ConfigError::new("GitHub signs no time, so there is no tolerance"));
        }
        let bounds = Duration::from_secs(1)..=TOLERANCE_MAX;
        if bounds.contains(&tolerance) {
            Ok(Self { tolerance, ..self })
        } else {
            let what = format!("the tolerance is {tolerance:?}; it must be from 1s to {TOLERANCE_MAX:?}");
            Err(ConfigError::new(what))
        }
    }

    /// The request as a message, if it is signed as it should be, at a time that fits `now`.
    ///
    /// The message has the identifier that the sender gives it as its [`broker_id`](Message::broker_id): `webhook-id`, the `id`
    /// of Stripe's event, or `X-GitHub-Delivery`. Of the headers it has what describes the payload, and those of the scheme
    /// but for signatures.
    ///
    /// # Errors
    /// Why it is not taken. Nothing of it may be recorded then.
    pub fn verify(
        &self,
        topic: &str,
        headers: &HeaderMap,
        payload: Bytes,
        now: Timestamp,
    ) -> Result<Message, WebhookRefusal> {
        let (id, names) = match self.kind {
            Kind::Standard => self.verify_standard(headers, &payload, now)?,
            Kind::Stripe => self.verify_stripe(headers, &payload, now)?,
            Kind::GitHub => self.verify_github(headers, &payload)?,
        };
        let mut message = Message::new(topic, payload);
        message.broker_id = id;
        for name in DESCRIBING.iter().chain(names) {
            message = copied(message, headers, name);
        }
        Ok(message)
    }

    fn verify_standard(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
        now: Timestamp,
    ) -> Result<(Option<String>, &'static [&'static str]), WebhookRefusal> {
        // One family or the other: nothing of a request is verified under the one and read from the other.
        let (names, signature): (&[&str], &str) = if headers.contains_key("webhook-id") {
            (&["webhook-id", "webhook-timestamp"], "webhook-signature")
        } else {
            (&["svix-id", "svix-timestamp"], "svix-signature")
        };
        let [id, timestamp] = names else { return Err(WebhookRefusal::HeaderMissing) };
        let id = one(headers, id)?;
        // A full stop would leave it open where the identifier ends and the time begins in what is signed.
        if id.is_empty() || id.contains('.') {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        let timestamp = one(headers, timestamp)?;
        let signed_at = seconds(timestamp)?;
        let entries: Vec<_> = one(headers, signature)?.split(' ').collect();
        let signatures = entries.iter().filter_map(|entry| entry.strip_prefix("v1,")).map(|signature| {
            // Strict: no other spelling of the same octets.
            STANDARD.decode(signature).ok()
        });
        self.check(&[id.as_bytes(), b".", timestamp.as_bytes(), b".", payload], signatures)?;
        self.check_time(signed_at, now)?;
        Ok((Some(id.to_owned()), names))
    }

    fn verify_stripe(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
        now: Timestamp,
    ) -> Result<(Option<String>, &'static [&'static str]), WebhookRefusal> {
        let entries: Vec<_> = one(headers, "stripe-signature")?.split(',').collect();
        let mut times = entries.iter().filter_map(|entry| entry.strip_prefix("t="));
        let (Some(timestamp), None) = (times.next(), times.next()) else {
            return Err(WebhookRefusal::HeaderMalformed);
        };
        let signed_at = seconds(timestamp)?;
        // Other schemes than `v1` are not looked at, so that nobody can choose a weaker one.
        let signatures = entries.iter().filter_map(|entry| entry.strip_prefix("v1=")).map(hex);
        self.check(&[timestamp.as_bytes(), b".", payload], signatures)?;
        self.check_time(signed_at, now)?;
        Ok((event_id(payload), &[]))
    }

    fn verify_github(
        &self,
        headers: &HeaderMap,
        payload: &[u8],
    ) -> Result<(Option<String>, &'static [&'static str]), WebhookRefusal> {
        let id = one(headers, "x-github-delivery")?;
        let signature = one(headers, "x-hub-signature-256")?;
        if id.is_empty() {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        let signature = signature.strip_prefix("sha256=").ok_or(WebhookRefusal::HeaderMalformed)?;
        self.check(&[payload], std::iter::once(hex(signature)))?;
        Ok((Some(id.to_owned()), GITHUB))
    }

    /// Whether one of the signatures is that of one of the secrets.
    fn check(
        &self,
        signed: &[&[u8]],
        signatures: impl Iterator<Item = Option<Vec<u8>>>,
    ) -> Result<(), WebhookRefusal> {
        // What is not even a signature counts, too, so that nobody makes us look through many.
        let signatures: Vec<_> = signatures.take(SIGNATURES_MAX + 1).collect();
        if signatures.is_empty() || signatures.len() > SIGNATURES_MAX {
            return Err(WebhookRefusal::HeaderMalformed);
        }
        for key in &self.keys {
            let mut mac = key.clone();
            for part in signed {
                mac.update(part);
            }
            for signature in signatures.iter().flatten() {
                // In constant time, and of the whole length.
                if mac.clone().verify_slice(signature).is_ok() {
                    return Ok(());
                }
            }
        }
        Err(WebhookRefusal::SignatureWrong)
    }

    /// Both are whole seconds, as in the published libraries.
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

/// What says how to read a payload.
const DESCRIBING: &[&str] = &["content-type", "content-encoding"];

/// What GitHub says of an event, without the signatures.
const GITHUB: &[&str] = &[
    "x-github-delivery",
    "x-github-event",
    "x-github-hook-id",
    "x-github-hook-installation-target-id",
    "x-github-hook-installation-target-type",
];

/// The message with every value that the request has of this header.
pub(super) fn copied(mut message: Message, headers: &HeaderMap, name: &str) -> Message {
    let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else { return message };
    for value in headers.get_all(&name) {
        message = message.with_header(name.as_str(), Bytes::copy_from_slice(value.as_bytes()));
    }
    message
}

/// The value of a header that is there once, in visible ASCII.
fn one<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h str, WebhookRefusal> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().ok_or(WebhookRefusal::HeaderMissing)?;
    if values.next().is_some() {
        return Err(WebhookRefusal::HeaderMalformed);
    }
    value.to_str().map_err(|_| WebhookRefusal::HeaderMalformed)
}

/// Seconds since the Unix epoch: digits, and nothing else.
fn seconds(text: &str) -> Result<u64, WebhookRefusal> {
    let is_good = (1..=12).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    if is_good {
        text.parse().map_err(|_| WebhookRefusal::HeaderMalformed)
    } else {
        Err(WebhookRefusal::HeaderMalformed)
    }
}

/// The 32 octets of 64 small hexadecimal digits.
fn hex(text: &str) -> Option<Vec<u8>> {
    fn digit(octet: u8) -> Option<u8> {
        match octet {
            b'0'..=b'9' => Some(octet - b'0'),
            b'a'..=b'f' => Some(octet - b'a' + 10),
            _ => None,
        }
    }
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// The member `id` of an event in JSON.
fn event_id(payload: &[u8]) -> Option<String> {
    let event: Value = serde_json::from_slice(payload).ok()?;
    let id = event.get("id")?.as_str()?;
    (!id.is_empty()).then(|| id.to_owned())
}

fn standard_secret(text: &str) -> Result<Vec<u8>, ConfigError> {
    let secret = STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text)).map_err(|_| {
        ConfigError::new("the secret is not whsec_ and Base64, as Standard Webhooks writes it")
    })?;
    if (STANDARD_SECRET_MIN..=SECRET_MAX).contains(&secret.len()) {
        Ok(secret)
    } else {
        let what = format!(
            "the secret has {} octets; Standard Webhooks asks for {STANDARD_SECRET_MIN} or more",
            secret.len()
        );
        Err(ConfigError::new(what))
    }
}

/// A secret that is used as it is written.
fn plain_secret(text: &str) -> Result<Vec<u8>, ConfigError> {
    // Whoever knows that a secret is missing can sign with the empty one.
    if text.is_empty() || text.len() > SECRET_MAX {
        return Err(ConfigError::new(format!("the secret must have from 1 to {SECRET_MAX} octets")));
    }
    if text.trim() != text {
        return Err(ConfigError::new("the secret has white space around it: perhaps the end of a line"));
    }
    Ok(text.as_bytes().to_vec())
}
