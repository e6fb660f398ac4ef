//! What is to happen once: a request, and the key that it keeps.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use oncegate_core::{IdempotencyKey, KeyError, Timestamp};

use crate::key::{Carrier, check_key, now, uuid_v7_key};

/// One thing that is to happen once: the request that asks for it, and the key under which it is asked for, however often.
///
/// Everything that a process needs to ask again after a restart is in here, and nothing of how often or how fast: a journal
/// writes down these parts and builds the intent again with [`Intent::with_key`], [`Intent::with_created_at`] and
/// [`Intent::sent_before`]. A corrected request is another intent, with a key of its own.
///
/// `Debug` shows neither key nor headers nor body, and of the address only the host.
#[derive(Clone)]
pub struct Intent {
    key: IdempotencyKey,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
    created_at: Timestamp,
    sent_before: bool,
    key_lifetime: Option<Duration>,
    replaces: Option<IdempotencyKey>,
    carrier: Option<Carrier>,
}

/// Why there is no [`Intent`].
#[derive(Debug)]
#[non_exhaustive]
pub enum IntentError {
    /// The key is empty or too long.
    Key(KeyError),
    /// The key has a character that is not visible ASCII, or a quote or a comma: not every header syntax can carry it.
    KeyCharacter,
    /// The system has no random bits. A key made without them could equal the key of another intent.
    NoRandomness,
    /// Its address is no URI with a scheme and a host.
    Uri,
    /// A header field that cannot be sent.
    Header,
}

impl fmt::Display for IntentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(error) => error.fmt(f),
            Self::KeyCharacter => {
                f.write_str("the key has a character that is not visible ASCII, or a quote or a comma")
            }
            Self::NoRandomness => f.write_str("the system has no random bits to make a key of"),
            Self::Uri => f.write_str("the address is no URI with a scheme and a host"),
            Self::Header => f.write_str("the name or the value of a header field cannot be sent"),
        }
    }
}

impl std::error::Error for IntentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Key(error) => error.source(),
            Self::KeyCharacter | Self::NoRandomness | Self::Uri | Self::Header => None,
        }
    }
}

impl From<KeyError> for IntentError {
    fn from(error: KeyError) -> Self {
        Self::Key(error)
    }
}

impl Intent {
    /// An intent with a new key, a UUID of version 7, and no body.
    ///
    /// # Errors
    /// Where the address is not absolute, or the system has no random bits.
    pub fn new(method: Method, uri: impl TryInto<Uri>) -> Result<Self, IntentError> {
        let uri = uri.try_into().map_err(|_| IntentError::Uri)?;
        if uri.scheme().is_none() || uri.host().is_none() {
            return Err(IntentError::Uri);
        }
        Ok(Self {
            key: uuid_v7_key()?,
            method,
            uri,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            created_at: now(),
            sent_before: false,
            key_lifetime: None,
            replaces: None,
            carrier: None,
        })
    }

    /// The intent that takes the place of this one, with a new key: what was refused is corrected with it. Give it the
    /// corrected body, and its own derived key where this one has such a key.
    ///
    /// A [`Journal`](crate::Journal) does not let it be sent while this one has no definite answer: both could take effect.
    ///
    /// # Errors
    /// As [`Intent::new`].
    pub fn corrected(&self) -> Result<Self, IntentError> {
        let fresh = Self::new(self.method.clone(), self.uri.clone())?;
        Ok(Self {
            headers: self.headers.clone(),
            body: self.body.clone(),
            key_lifetime: self.key_lifetime,
            replaces: Some(self.key.clone()),
            carrier: self.carrier.clone(),
            ..fresh
        })
    }

    /// An intent to `POST`. See [`Intent::new`].
    ///
    /// # Errors
    /// As [`Intent::new`].
    pub fn post(uri: impl TryInto<Uri>) -> Result<Self, IntentError> {
        Self::new(Method::POST, uri)
    }

    /// The key of the intent, instead of a new one: an [`IdempotencyKey`], or text.
    ///
    /// # Errors
    /// [`IntentError::Key`] and [`IntentError::KeyCharacter`]: a key of an intent is 1 to 255 visible ASCII characters without
    /// quote and comma.
    pub fn with_key<K>(self, key: K) -> Result<Self, IntentError>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
    {
        let key = key.try_into().map_err(|error| IntentError::Key(error.into()))?;
        check_key(&key)?;
        Ok(Self { key, ..self })
    }

    /// The body, whole, because it may have to be sent again.
    #[must_use]
    pub fn with_body(self, body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// A body of the media type `application/json`.
    #[must_use]
    pub fn with_json(mut self, json: impl Into<Bytes>) -> Self {
        let json_type = HeaderValue::from_static("application/json");
        self.headers.insert(http::header::CONTENT_TYPE, json_type);
        self.with_body(json)
    }

    /// One more header field.
    ///
    /// # Errors
    /// [`IntentError::Header`] where the name or the value cannot be sent.
    pub fn with_header(
        mut self,
        name: impl TryInto<HeaderName>,
        value: impl TryInto<HeaderValue>,
    ) -> Result<Self, IntentError> {
        let name = name.try_into().map_err(|_| IntentError::Header)?;
        let value = value.try_into().map_err(|_| IntentError::Header)?;
        self.headers.append(name, value);
        Ok(self)
    }

    /// These header fields, instead of those that it has. A field of the carrier's name gives way to the key.
    #[must_use]
    pub fn with_headers(self, headers: HeaderMap) -> Self {
        Self { headers, ..self }
    }

    /// When the intent came to be, by the clock of whoever had it. The lifetime of its key is counted from here.
    #[must_use]
    pub fn with_created_at(self, created_at: Timestamp) -> Self {
        Self { created_at, ..self }
    }

    /// How long the service promises to know the key, where that is less than
    /// [the policy](crate::RetryPolicy::with_key_lifetime) says.
    #[must_use]
    pub fn with_key_lifetime(self, key_lifetime: Duration) -> Self {
        Self { key_lifetime: Some(key_lifetime), ..self }
    }

    /// The field that carries its key, instead of the [client's](crate::Client::with_carrier): an intent that was sent in one
    /// field is not protected in another.
    #[must_use]
    pub fn with_carrier(self, carrier: Carrier) -> Self {
        Self { carrier: Some(carrier), ..self }
    }

    /// Signal that the request may have been sent before, by this process or by another one, and that no definite answer is
    /// known. So nothing but an answer about the operation itself ends it as refused.
    #[must_use]
    pub fn sent_before(self) -> Self {
        Self { sent_before: true, ..self }
    }

    /// Its key.
    #[must_use]
    pub const fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// The method.
    #[must_use]
    pub const fn method(&self) -> &Method {
        &self.method
    }

    /// The address.
    #[must_use]
    pub const fn uri(&self) -> &Uri {
        &self.uri
    }

    /// The header fields, without the key.
    #[must_use]
    pub const fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The body.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        &self.body
    }

    /// When it came to be.
    #[must_use]
    pub const fn created_at(&self) -> Timestamp {
        self.created_at
    }

    /// How long the service promises to know the key, where this intent says so.
    #[must_use]
    pub const fn key_lifetime(&self) -> Option<Duration> {
        self.key_lifetime
    }

    /// The field that carries its key, where this intent says so.
    #[must_use]
    pub const fn carrier(&self) -> Option<&Carrier> {
        self.carrier.as_ref()
    }

    /// The key of the intent that this one [corrects](Intent::corrected).
    #[must_use]
    pub const fn replaces(&self) -> Option<&IdempotencyKey> {
        self.replaces.as_ref()
    }

    /// Whether it may have been sent before.
    #[must_use]
    pub const fn was_sent_before(&self) -> bool {
        self.sent_before
    }
}

impl fmt::Debug for Intent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intent")
            .field("method", &self.method)
            .field("host", &self.uri.host().unwrap_or_default())
            .field("octets", &self.body.len())
            .field("sent_before", &self.sent_before)
            .finish_non_exhaustive()
    }
}
