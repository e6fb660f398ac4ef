//! Intents: a request that must take effect once, and its key.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use oncegate_core::{IdempotencyKey, KeyError, Timestamp};

use crate::key::{Carrier, check_key, now, uuid_v7_key};

/// A request that must take effect once, and the key that every attempt carries.
///
/// An intent holds everything that a process needs to send the request again after a restart, but no retry limits. A journal
/// stores its parts and builds it again with [`Intent::with_key`], [`Intent::with_created_at`] and
/// [`Intent::sent_before`]. A corrected request is another intent with its own key.
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

/// An [`Intent`] could not be made.
///
/// `Debug` prints the text as well, because that is what a `main` that returns the error shows.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum IntentError {
    /// The key is empty or too long.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The key has a character that is not visible ASCII, or a quote or a comma: not every header syntax can carry it.
    #[error("the key has a character that is not visible ASCII, or a quote or a comma")]
    KeyCharacter,
    /// The system has no random bits. A key made without them could equal the key of another intent.
    #[error("the system has no random bits to make a key of")]
    NoRandomness,
    /// The address is not a URI with a scheme and a host.
    #[error("the address is not a URI with a scheme and a host, such as https://shop.example/payments")]
    Uri,
    /// The name or the value of a header cannot be sent.
    #[error("the name or the value of a header cannot be sent")]
    Header,
}

impl fmt::Debug for IntentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Key(error) => return f.debug_tuple("Key").field(error).finish(),
            Self::KeyCharacter => "KeyCharacter",
            Self::NoRandomness => "NoRandomness",
            Self::Uri => "Uri",
            Self::Header => "Header",
        };
        write!(f, "{name}: {self}")
    }
}

impl Intent {
    /// Creates an intent with a new key, a UUID of version 7, and no body.
    ///
    /// # Errors
    /// If the address is not absolute, or the system has no random bits.
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

    /// Creates a corrected intent, with a new key, that replaces this one after a refusal.
    ///
    /// Give it the corrected body. If this intent has a derived key, derive another one. A [`Journal`](crate::Journal) does not
    /// send the corrected intent while this one has no definite response, because both could take effect.
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

    /// Creates an intent with the method `POST`. See [`Intent::new`].
    ///
    /// # Errors
    /// As [`Intent::new`].
    pub fn post(uri: impl TryInto<Uri>) -> Result<Self, IntentError> {
        Self::new(Method::POST, uri)
    }

    /// Sets the key, instead of a new one: an [`IdempotencyKey`], or text.
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

    /// Sets the body. It is held in memory, because it may be sent again.
    #[must_use]
    pub fn with_body(self, body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Sets a body of the media type `application/json`.
    #[must_use]
    pub fn with_json(mut self, json: impl Into<Bytes>) -> Self {
        let json_type = HeaderValue::from_static("application/json");
        self.headers.insert(http::header::CONTENT_TYPE, json_type);
        self.with_body(json)
    }

    /// Adds a header.
    ///
    /// # Errors
    /// [`IntentError::Header`] if the name or the value cannot be sent.
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

    /// Replaces all headers. A header with the name of the carrier is replaced by the key.
    #[must_use]
    pub fn with_headers(self, headers: HeaderMap) -> Self {
        Self { headers, ..self }
    }

    /// Sets the time at which the intent was created. The lifetime of the key starts there.
    #[must_use]
    pub fn with_created_at(self, created_at: Timestamp) -> Self {
        Self { created_at, ..self }
    }

    /// Sets the time for which the service keeps the key, if it is shorter than
    /// [that of the policy](crate::RetryPolicy::with_key_lifetime).
    #[must_use]
    pub fn with_key_lifetime(self, key_lifetime: Duration) -> Self {
        Self { key_lifetime: Some(key_lifetime), ..self }
    }

    /// Sets the header that carries the key, instead of [that of the client](crate::Client::with_carrier). An intent that was
    /// sent with its key in one header is not protected with its key in another one.
    #[must_use]
    pub fn with_carrier(self, carrier: Carrier) -> Self {
        Self { carrier: Some(carrier), ..self }
    }

    /// Marks the request as possibly sent before, by any process, without a definite response. A refusal is then definite only if
    /// it is a response about the operation itself.
    #[must_use]
    pub fn sent_before(self) -> Self {
        Self { sent_before: true, ..self }
    }

    /// The key.
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

    /// The headers, without the key.
    #[must_use]
    pub const fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The body.
    #[must_use]
    pub const fn body(&self) -> &Bytes {
        &self.body
    }

    /// The time at which the intent was created.
    #[must_use]
    pub const fn created_at(&self) -> Timestamp {
        self.created_at
    }

    /// The time for which the service keeps the key, if the intent sets it.
    #[must_use]
    pub const fn key_lifetime(&self) -> Option<Duration> {
        self.key_lifetime
    }

    /// The header that carries the key, if the intent sets it.
    #[must_use]
    pub const fn carrier(&self) -> Option<&Carrier> {
        self.carrier.as_ref()
    }

    /// The key of the intent that this one [corrects](Intent::corrected).
    #[must_use]
    pub const fn replaces(&self) -> Option<&IdempotencyKey> {
        self.replaces.as_ref()
    }

    /// `true` if the request may have been sent before.
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
            .field("body_bytes", &self.body.len())
            .field("sent_before", &self.sent_before)
            .finish_non_exhaustive()
    }
}
