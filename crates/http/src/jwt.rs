//! Callers that a signed token names: a JWT (RFC 7519) in `Authorization: Bearer`.
//!
//! A token names a caller only if everything holds: the algorithm is one of those that the service chose, the key is one of the
//! key set (JWKS, RFC 7517), the signature is right, and the token is valid at this time, with a small leeway. Every other
//! request is refused. It never counts as anonymous.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use http::header;
use http::request::Parts;
use jsonwebtoken::crypto::aws_lc;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use oncegate_core::ErrorChain;
use oncegate_engine::{ConfigError, LogThrottle};
use serde_json::{Map, Value};

mod source;

use source::FetchObserver;
pub use source::{JwksFetch, JwksSource};

/// The difference of clocks that is accepted for `exp` and `nbf`.
const LEEWAY: Duration = Duration::from_secs(30);

/// The age at which a key set is fetched again, while the one in use goes on to be used.
const REFRESH_AGE: Duration = Duration::from_secs(5 * 60);

/// The age beyond which a key set is no longer used, if no newer one can be fetched.
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The age from which the log says how long the key set may still be used.
const WARNING_AGE: Duration = Duration::from_secs(12 * 60 * 60);

/// The shortest time between two fetches. Tokens with invented key identifiers must not become requests to the issuer.
const FETCH_INTERVAL: Duration = Duration::from_secs(10);

/// The same while there are no keys at all, and all requests are refused.
const FIRST_FETCH_INTERVAL: Duration = Duration::from_secs(1);

/// The longest time that a fetch may take, and so the longest time that a request waits for keys.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);

/// The largest key set, in bytes and in keys.
const MAX_KEY_SET_BYTES: usize = 256 * 1024;
const MAX_KEYS: usize = 100;

/// The most keys that are tried for one token. Keys of one set may have the same identifier.
const MAX_CANDIDATES: usize = 4;

/// The largest token. Real ones have a few kilobytes.
const MAX_TOKEN_BYTES: usize = 16 * 1024;

/// The shortest symmetric key (RFC 7518, 3.2, for HS256).
const MIN_SECRET_BYTES: usize = 32;

const TOO_SLOW: &str = "it took more than 5 seconds";

const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// An algorithm of signatures (RFC 7518, RFC 8037). There is no `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JwtAlgorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// RSASSA-PKCS1-v1_5 with SHA-384.
    Rs384,
    /// RSASSA-PKCS1-v1_5 with SHA-512.
    Rs512,
    /// RSASSA-PSS with SHA-256.
    Ps256,
    /// RSASSA-PSS with SHA-384.
    Ps384,
    /// RSASSA-PSS with SHA-512.
    Ps512,
    /// ECDSA on P-256 with SHA-256.
    Es256,
    /// ECDSA on P-384 with SHA-384.
    Es384,
    /// Ed25519.
    EdDsa,
    /// HMAC with SHA-256: each program that can verify a token can also make one.
    Hs256,
    /// HMAC with SHA-384.
    Hs384,
    /// HMAC with SHA-512.
    Hs512,
}

impl JwtAlgorithm {
    /// Every algorithm.
    pub const ALL: [Self; 12] = [
        Self::Rs256,
        Self::Rs384,
        Self::Rs512,
        Self::Ps256,
        Self::Ps384,
        Self::Ps512,
        Self::Es256,
        Self::Es384,
        Self::EdDsa,
        Self::Hs256,
        Self::Hs384,
        Self::Hs512,
    ];

    /// The name in the header of a token.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Ps256 => "PS256",
            Self::Ps384 => "PS384",
            Self::Ps512 => "PS512",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::EdDsa => "EdDSA",
            Self::Hs256 => "HS256",
            Self::Hs384 => "HS384",
            Self::Hs512 => "HS512",
        }
    }

    /// Returns true if one key both signs and verifies.
    #[must_use]
    pub const fn is_symmetric(self) -> bool {
        matches!(self, Self::Hs256 | Self::Hs384 | Self::Hs512)
    }

    const fn library(self) -> Algorithm {
        match self {
            Self::Rs256 => Algorithm::RS256,
            Self::Rs384 => Algorithm::RS384,
            Self::Rs512 => Algorithm::RS512,
            Self::Ps256 => Algorithm::PS256,
            Self::Ps384 => Algorithm::PS384,
            Self::Ps512 => Algorithm::PS512,
            Self::Es256 => Algorithm::ES256,
            Self::Es384 => Algorithm::ES384,
            Self::EdDsa => Algorithm::EdDSA,
            Self::Hs256 => Algorithm::HS256,
            Self::Hs384 => Algorithm::HS384,
            Self::Hs512 => Algorithm::HS512,
        }
    }
}

/// Verifies the tokens that name callers. Copies share their keys.
///
/// The key set is fetched when the first token arrives, again after 5 minutes, and when a token names an unknown key, at most
/// every 10 seconds. If it cannot be fetched, the last one is used for at most 24 hours. Without any, every request is refused.
/// `exp` is required; `exp` and `nbf` are checked by the system's clock with a leeway of 30 seconds.
#[derive(Clone)]
pub struct JwtVerifier {
    inner: Arc<Inner>,
    validation: Arc<Validation>,
}

struct Inner {
    source: Box<dyn JwksSource>,
    cache: Mutex<Cache>,
    /// One fetch at a time.
    turn: tokio::sync::Mutex<()>,
    warnings: LogThrottle,
    observer: OnceLock<FetchObserver>,
}

#[derive(Clone, Default)]
struct Cache {
    keys: Option<(Arc<KeySet>, Instant)>,
    /// The begin of the last fetch.
    tried: Option<Instant>,
    is_fetching: bool,
    /// True if the last fetch brought no key set.
    has_failed: bool,
    /// Grows with each fetch.
    fetches: u64,
}

impl Cache {
    /// The keys that may be used now.
    fn usable(&self) -> Option<&KeySet> {
        let (keys, since) = self.keys.as_ref()?;
        (since.elapsed() < MAX_AGE && !keys.0.is_empty()).then_some(&**keys)
    }
}

/// The keys of a key set that can verify signatures. None if the issuer has withdrawn all.
struct KeySet(Vec<Key>);

struct Key {
    id: Option<String>,
    /// The only algorithm of the key, if the key set says so.
    algorithm: Option<Algorithm>,
    key: DecodingKey,
}

/// The reason why a token names no caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenFault {
    Repeated,
    Malformed,
    Algorithm,
    UnknownKey,
    NoKeys,
    Signature,
    Expired,
    NotYetValid,
    Issuer,
    Audience,
    WithoutExpiry,
    WithoutClaim,
}

impl TokenFault {
    /// The value of `WWW-Authenticate` (RFC 6750, 3.1), by which clients know that they need another token.
    pub(crate) const fn challenge(self) -> Option<&'static str> {
        match self {
            Self::NoKeys => None,
            _ => Some("Bearer error=\"invalid_token\""),
        }
    }

    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Repeated => "was sent more than once",
            Self::Malformed => {
                "is not a signed token (JWT) of the scheme Bearer, or a claim in it has a wrong form"
            }
            Self::Algorithm => "is signed with an algorithm that this service does not accept",
            Self::UnknownKey => "names a key that this service does not know",
            Self::NoKeys => "cannot be verified at the moment: the keys of its issuer are not available",
            Self::Signature => "has a signature that is not right",
            Self::Expired => "has expired",
            Self::NotYetValid => "is not valid yet",
            Self::Issuer => "is not from the issuer that this service trusts",
            Self::Audience => "is not meant for this service",
            Self::WithoutExpiry => "has no time at which it expires",
            Self::WithoutClaim => {
                "lacks the claim that names its caller, or it is neither a text nor a whole number"
            }
        }
    }
}

impl JwtVerifier {
    /// Accepts tokens that are signed with one of these algorithms and with a key of this source.
    ///
    /// # Errors
    /// If there is no algorithm, or a symmetric one together with others: their keys must never be mixed. Or if it is symmetric
    /// and the source is not [private](JwksSource::is_private).
    pub fn new(algorithms: &[JwtAlgorithm], source: impl JwksSource) -> Result<Self, ConfigError> {
        let Some(first) = algorithms.first() else {
            return Err(ConfigError::new(
                "the list of algorithms of tokens is empty, so every token would be refused",
            ));
        };
        let symmetric = algorithms.iter().filter(|algorithm| algorithm.is_symmetric()).count();
        if symmetric != 0 && symmetric != algorithms.len() {
            return Err(ConfigError::new(
                "the algorithms of tokens are both symmetric (HS…) and asymmetric; choose one kind, because a public key must \
                 never be taken for a secret",
            ));
        }
        if symmetric != 0 && !source.is_private() {
            return Err(ConfigError::new(
                "the algorithms of tokens are symmetric (HS…), so the key must come from a file that only the operator can write; \
                 with a key that an issuer publishes, every client can make tokens",
            ));
        }
        // Without this, the library panics if another crate of the program turns on its second provider.
        let _provider_of_the_program = aws_lc::DEFAULT_PROVIDER.install_default();
        let mut validation = Validation::new(first.library());
        validation.algorithms = algorithms.iter().map(|algorithm| algorithm.library()).collect();
        validation.leeway = LEEWAY.as_secs();
        validation.validate_nbf = true;
        validation.validate_aud = false;
        let inner = Inner {
            source: Box::new(source),
            cache: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            warnings: LogThrottle::new(WARNING_INTERVAL),
            observer: OnceLock::new(),
        };
        Ok(Self { inner: Arc::new(inner), validation: Arc::new(validation) })
    }

    /// Accepts only tokens with this issuer (`iss`).
    #[must_use]
    pub fn with_issuer(mut self, issuer: &str) -> Self {
        let validation = Arc::make_mut(&mut self.validation);
        validation.set_issuer(&[issuer]);
        validation.required_spec_claims.insert("iss".to_owned());
        self
    }

    /// Accepts only tokens that are meant for one of these audiences (`aud`). Without it, a token for another service of the
    /// issuer names a caller, too.
    ///
    /// # Errors
    /// If the list is empty.
    pub fn with_audiences(mut self, audiences: &[String]) -> Result<Self, ConfigError> {
        if audiences.is_empty() {
            return Err(ConfigError::new(
                "the list of audiences of tokens is empty, so every token would be refused",
            ));
        }
        let validation = Arc::make_mut(&mut self.validation);
        validation.set_audience(audiences);
        validation.validate_aud = true;
        validation.required_spec_claims.insert("aud".to_owned());
        Ok(self)
    }

    /// Checks that a key set can be used with the algorithms of this verifier.
    ///
    /// # Errors
    /// If it is not a key set, or has no key for these algorithms.
    pub fn check(&self, key_set: &[u8]) -> Result<(), ConfigError> {
        let (_, lack) = KeySet::read(key_set, &self.validation.algorithms).map_err(ConfigError::new)?;
        lack.map_or(Ok(()), |lack| Err(ConfigError::new(lack)))
    }

    /// Fetches the key set from its source, and checks it as [`check`](Self::check) does. The keys in use stay as they are.
    ///
    /// # Errors
    /// If it cannot be fetched within 5 seconds, or cannot be used.
    pub async fn check_source(&self) -> Result<(), ConfigError> {
        match tokio::time::timeout(FETCH_TIMEOUT, self.inner.source.fetch()).await {
            Err(_) => Err(ConfigError::new(TOO_SLOW)),
            Ok(Err(error)) => Err(ConfigError::new(ErrorChain(&*error).to_string())),
            Ok(Ok(key_set)) => self.check(&key_set),
        }
    }

    /// Calls this closure with the result of each fetch. It must not block. All copies share the first one that is given.
    pub fn observe_fetches(&self, observer: impl Fn(JwksFetch) + Send + Sync + 'static) {
        let _given_before = self.inner.observer.set(Box::new(observer));
    }

    /// Fetches the key set now, so that the first request need not wait for it. An error is logged.
    pub async fn refresh(&self) {
        self.inner.clone().fetch(self.validation.algorithms.clone(), Duration::ZERO).await;
    }

    /// Fetches the key set if there is none, or if it is 5 minutes old. A program that calls it every minute notices that the
    /// issuer is away even while there are no requests.
    pub async fn refresh_if_old(&self) {
        if self.key_set_age().is_none_or(|age| age >= REFRESH_AGE) {
            self.inner.clone().fetch(self.validation.algorithms.clone(), FIRST_FETCH_INTERVAL).await;
        }
    }

    /// The age of the key set: the time since the last fetch that brought one. `None` if there was none.
    #[must_use]
    pub fn key_set_age(&self) -> Option<Duration> {
        self.inner.cache().keys.as_ref().map(|(_, since)| since.elapsed())
    }

    /// Returns true if there is a key that can verify tokens, in a key set that is not older than 24 hours. Otherwise every
    /// token is refused.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        self.inner.cache().usable().is_some()
    }

    /// Takes over the key set of another verifier with the same source and algorithms, so that a reload while the issuer is away
    /// does not lose it.
    pub fn take_keys_of(&self, other: &Self) {
        if self.validation.algorithms == other.validation.algorithms {
            let keys = other.inner.cache().keys.clone();
            self.inner.cache().keys = keys;
        }
    }

    /// Returns true if the other one is a copy of this one, and checks the same.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.validation == other.validation
    }

    /// Fetches keys if the token of this request cannot be verified without them, and waits for them.
    pub(crate) async fn prepare(&self, request: &Parts) {
        let Ok(Some(token)) = bearer(request) else { return };
        let now = Instant::now();
        let cache = self.inner.cache().clone();
        let interval = if cache.keys.is_some() { FETCH_INTERVAL } else { FIRST_FETCH_INTERVAL };
        let is_due =
            cache.is_fetching || cache.tried.is_none_or(|tried| now.duration_since(tried) >= interval);
        if !is_due {
            return;
        }
        let current = cache.keys.filter(|(_, since)| now.duration_since(*since) < MAX_AGE);
        let (must_wait, is_old) = match &current {
            None => (true, true),
            Some((keys, since)) => (keys.lacks_key_of(token), now.duration_since(*since) >= REFRESH_AGE),
        };
        if !must_wait && (!is_old || cache.is_fetching) {
            return;
        }
        // In a task of its own: the fetch goes on if the client of this request leaves.
        let fetch = tokio::spawn(self.inner.clone().fetch(self.validation.algorithms.clone(), interval));
        if must_wait {
            let _cancelled = fetch.await;
        }
    }

    /// The identity in this claim of the request's token. `None` if the request has no token.
    pub(crate) fn identity(&self, request: &Parts, claim: &str) -> Result<Option<Vec<u8>>, TokenFault> {
        let Some(token) = bearer(request)? else { return Ok(None) };
        let claims = self.verify(token)?;
        let (kind, value) = match claims.get(claim) {
            Some(Value::String(text)) if !text.is_empty() => (b's', text.clone()),
            Some(Value::Number(number)) if number.is_u64() || number.is_i64() => (b'n', number.to_string()),
            _ => return Err(TokenFault::WithoutClaim),
        };
        // The same subject of two issuers is two callers.
        let issuer = match claims.get("iss") {
            None => "",
            Some(Value::String(issuer)) if !issuer.is_empty() => issuer,
            // The library accepts a list. Without a name in it, the callers of all such issuers would be one.
            Some(_) => return Err(TokenFault::Issuer),
        };
        let mut identity = (issuer.len() as u64).to_be_bytes().to_vec();
        identity.extend_from_slice(issuer.as_bytes());
        identity.push(kind);
        identity.extend_from_slice(value.as_bytes());
        Ok(Some(identity))
    }

    fn verify(&self, token: &str) -> Result<Map<String, Value>, TokenFault> {
        let header = jsonwebtoken::decode_header(token).map_err(|error| fault(&error))?;
        // RFC 7515, 4.1.11: this code understands no extension.
        if header.crit.is_some() {
            return Err(TokenFault::Malformed);
        }
        if !self.validation.algorithms.contains(&header.alg) {
            return Err(TokenFault::Algorithm);
        }
        // The library refuses every token if one of the accepted algorithms needs a key of another kind.
        let validation = Validation { algorithms: vec![header.alg], ..Validation::clone(&self.validation) };
        let cache = self.inner.cache().clone();
        let keys = cache.usable().ok_or(TokenFault::NoKeys)?;
        // The key may be a new one that could not be fetched: this is no fault of the token.
        let unknown = if cache.has_failed { TokenFault::NoKeys } else { TokenFault::UnknownKey };
        let mut result = Err(unknown);
        for key in keys.candidates(header.kid.as_deref(), header.alg).take(MAX_CANDIDATES) {
            match jsonwebtoken::decode::<Map<String, Value>>(token, &key.key, &validation) {
                Ok(token) => return Ok(token.claims),
                Err(error) => result = Err(fault(&error)),
            }
            if result != Err(TokenFault::Signature) {
                break;
            }
        }
        result
    }
}

fn fault(error: &jsonwebtoken::errors::Error) -> TokenFault {
    match error.kind() {
        ErrorKind::ExpiredSignature => TokenFault::Expired,
        ErrorKind::ImmatureSignature => TokenFault::NotYetValid,
        ErrorKind::InvalidIssuer => TokenFault::Issuer,
        ErrorKind::InvalidAudience => TokenFault::Audience,
        ErrorKind::MissingRequiredClaim(claim) => match claim.as_str() {
            "iss" => TokenFault::Issuer,
            "aud" => TokenFault::Audience,
            _ => TokenFault::WithoutExpiry,
        },
        ErrorKind::InvalidSignature => TokenFault::Signature,
        ErrorKind::InvalidAlgorithm | ErrorKind::InvalidAlgorithmName | ErrorKind::UnsupportedAlgorithm => {
            TokenFault::Algorithm
        }
        _ => TokenFault::Malformed,
    }
}

/// The token of a request; `None` if it has no credential.
///
/// # Errors
/// If there is another credential, or several: the layer does not know which one the service reads.
fn bearer(request: &Parts) -> Result<Option<&str>, TokenFault> {
    let mut lines = request.headers.get_all(header::AUTHORIZATION).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(TokenFault::Repeated);
    }
    let text = line.to_str().map_err(|_| TokenFault::Malformed)?.trim();
    let (scheme, token) = text.split_once(' ').unwrap_or((text, ""));
    let token = token.trim_start();
    match (scheme.eq_ignore_ascii_case("bearer"), token) {
        _ if text.is_empty() => Ok(None),
        (true, "") => Ok(None),
        (true, token) if token.len() <= MAX_TOKEN_BYTES && token.bytes().all(is_of_token) => Ok(Some(token)),
        _ => Err(TokenFault::Malformed),
    }
}

fn is_of_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

impl Inner {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches the key set, unless another task has done so meanwhile, or within this interval.
    async fn fetch(self: Arc<Self>, algorithms: Vec<Algorithm>, interval: Duration) {
        let fetches = self.cache().fetches;
        let _turn = self.turn.lock().await;
        {
            let mut cache = self.cache();
            let is_recent = cache.tried.is_some_and(|tried| tried.elapsed() < interval);
            if cache.fetches != fetches || is_recent {
                return;
            }
            (cache.tried, cache.is_fetching) = (Some(Instant::now()), true);
        }
        let fetched = tokio::time::timeout(FETCH_TIMEOUT, self.source.fetch()).await;
        let (keys, failure) = match fetched {
            Err(_) => (Err(TOO_SLOW.to_owned()), JwksFetch::Failed),
            Ok(Err(error)) => (Err(ErrorChain(&*error).to_string()), JwksFetch::Failed),
            Ok(Ok(json)) => (KeySet::read(&json, &algorithms), JwksFetch::Unusable),
        };
        if let Some(observer) = self.observer.get() {
            observer(if matches!(keys, Ok((_, None))) { JwksFetch::Fetched } else { failure });
        }
        let mut cache = self.cache();
        cache.is_fetching = false;
        cache.has_failed = keys.is_err();
        cache.fetches += 1;
        let error = match keys {
            Ok((keys, lack)) => {
                // Also without keys: an issuer whose only key was stolen withdraws it so.
                cache.keys = Some((Arc::new(keys), Instant::now()));
                lack
            }
            Err(error) => Some(error),
        };
        let is_usable = cache.usable().is_some();
        let age = cache.keys.as_ref().filter(|_| is_usable).map(|(_, since)| since.elapsed());
        drop(cache);
        if let Some(error) = error {
            self.warn(&error, age);
        }
    }

    /// `age` is that of the key set in use, if there is one.
    fn warn(&self, error: &str, age: Option<Duration>) {
        let Some(suppressed) = self.warnings.pass() else { return };
        match age {
            Some(age) if age < WARNING_AGE => tracing::warn!(
                suppressed,
                error,
                "no keys that verify tokens were fetched; the last key set is used until it is 24 hours old"
            ),
            Some(age) => tracing::error!(
                suppressed,
                error,
                minutes_left = MAX_AGE.saturating_sub(age).as_secs() / 60,
                "no keys that verify tokens were fetched; soon the last key set is 24 hours old, and all requests whose caller a token \
                 names are refused"
            ),
            None => tracing::error!(
                suppressed,
                error,
                "no keys that verify tokens were fetched; all requests whose caller a token names are refused"
            ),
        }
    }
}

impl KeySet {
    /// Reads the keys that can verify signatures of these algorithms. Other keys of the set are left out. If none is left, the
    /// reason comes with the empty set.
    fn read(json: &[u8], algorithms: &[Algorithm]) -> Result<(Self, Option<String>), String> {
        if json.len() > MAX_KEY_SET_BYTES {
            return Err(format!("the key set is larger than {} KiB", MAX_KEY_SET_BYTES / 1024));
        }
        let set: Value = serde_json::from_slice(json).map_err(|_| "the key set is not JSON".to_owned())?;
        let Some(keys) = set.get("keys").and_then(Value::as_array) else {
            return Err("it is not a key set (JWKS): it has no list `keys`".to_owned());
        };
        if keys.len() > MAX_KEYS {
            return Err(format!("the key set has {} keys; at most {MAX_KEYS} are accepted", keys.len()));
        }
        let usable: Vec<_> = keys.iter().filter_map(|key| Key::read(key, algorithms)).collect();
        let lack = usable.is_empty().then(|| {
            let names: Vec<_> = algorithms.iter().map(|algorithm| format!("{algorithm:?}")).collect();
            format!(
                "the key set has no key that can verify signatures of {} (keys: {}; a symmetric key needs {MIN_SECRET_BYTES} bytes)",
                names.join(", "),
                keys.len()
            )
        });
        Ok((Self(usable), lack))
    }

    /// The keys that may have signed a token with this header. A token that names no key matches a key only if no other key
    /// could have signed it.
    fn candidates(&self, id: Option<&str>, algorithm: Algorithm) -> impl Iterator<Item = &Key> {
        let fits = move |key: &&Key| {
            key.algorithm.is_none_or(|own| own == algorithm)
                && key.key.family().algorithms().contains(&algorithm)
                && id.is_none_or(|id| key.id.as_deref() == Some(id))
        };
        let is_ambiguous = id.is_none() && self.0.iter().filter(fits).nth(1).is_some();
        self.0.iter().filter(fits).filter(move |_| !is_ambiguous)
    }

    /// Returns true if this token names a key that the set does not have.
    fn lacks_key_of(&self, token: &str) -> bool {
        jsonwebtoken::decode_header(token)
            .is_ok_and(|header| self.candidates(header.kid.as_deref(), header.alg).next().is_none())
    }
}

impl Key {
    fn read(key: &Value, algorithms: &[Algorithm]) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(key.clone()).ok()?;
        let is_for_signatures = !matches!(jwk.common.public_key_use, Some(PublicKeyUse::Encryption));
        let verifies =
            jwk.common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
        let algorithm = match jwk.common.key_algorithm {
            None => None,
            Some(algorithm) => Some(Algorithm::try_from(algorithm).ok()?),
        };
        if let AlgorithmParameters::OctetKey(secret) = &jwk.algorithm
            && secret.value.trim_end_matches('=').len() * 3 / 4 < MIN_SECRET_BYTES
        {
            return None;
        }
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        let fits = |wanted: &Algorithm| {
            key.family().algorithms().contains(wanted) && algorithm.is_none_or(|own| own == *wanted)
        };
        (is_for_signatures && verifies && algorithms.iter().any(fits)).then(|| Self {
            id: jwk.common.key_id,
            algorithm,
            key: key.clone(),
        })
    }
}

impl fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JwtVerifier").field("algorithms", &self.validation.algorithms).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::HeaderValue;
    use jsonwebtoken::{EncodingKey, Header};
    use serde_json::json;

    use super::*;
    use crate::body::BoxError;

    /// A source whose key set the test changes; `None` is away.
    #[derive(Clone, Default)]
    struct Place {
        json: Arc<Mutex<Option<String>>>,
        fetches: Arc<AtomicUsize>,
        private: bool,
    }

    impl JwksSource for Place {
        fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, BoxError>> + Send + '_>> {
            self.fetches.fetch_add(1, Ordering::Relaxed);
            let json = self.json.lock().unwrap().clone();
            Box::pin(async move { json.map(String::into_bytes).ok_or_else(|| "away".into()) })
        }

        fn is_private(&self) -> bool {
            self.private
        }
    }

    impl Place {
        fn set(&self, keys: &[Value]) {
            *self.json.lock().unwrap() = Some(json!({ "keys": keys }).to_string());
        }
    }

    struct Issuer {
        key: EncodingKey,
        id: &'static str,
        algorithm: Algorithm,
    }

    impl Issuer {
        fn new(id: &'static str) -> Self {
            let pair = rcgen::KeyPair::generate().unwrap();
            let _other_test_was_first = aws_lc::DEFAULT_PROVIDER.install_default();
            Self { key: EncodingKey::from_ec_der(&pair.serialize_der()), id, algorithm: Algorithm::ES256 }
        }

        /// The key of RFC 8037, appendix A.
        fn of_ed25519(id: &'static str) -> Self {
            let mut der = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20".to_vec();
            let secret = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
            der.extend((0..32).map(|i| u8::from_str_radix(&secret[2 * i..2 * i + 2], 16).unwrap()));
            let _other_test_was_first = aws_lc::DEFAULT_PROVIDER.install_default();
            Self { key: EncodingKey::from_ed_der(&der), id, algorithm: Algorithm::EdDSA }
        }

        fn jwk(&self) -> Value {
            if self.algorithm == Algorithm::EdDSA {
                let x = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
                return json!({"kty": "OKP", "crv": "Ed25519", "kid": self.id, "x": x});
            }
            let mut jwk =
                serde_json::to_value(Jwk::from_encoding_key(&self.key, self.algorithm).unwrap()).unwrap();
            jwk["kid"] = self.id.into();
            jwk
        }

        fn token(&self, claims: &Value) -> String {
            let mut header = Header::new(self.algorithm);
            header.kid = Some(self.id.to_owned());
            jsonwebtoken::encode(&header, claims, &self.key).unwrap()
        }
    }

    fn in_seconds(seconds: i64) -> i64 {
        i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap() + seconds
    }

    fn claims(subject: &str) -> Value {
        json!({"sub": subject, "iss": "https://issuer.test", "aud": ["orders", "other"], "exp": in_seconds(60)})
    }

    fn request(lines: &[&str]) -> Parts {
        let mut request = http::Request::new(());
        for line in lines {
            request.headers_mut().append(header::AUTHORIZATION, HeaderValue::from_str(line).unwrap());
        }
        request.into_parts().0
    }

    async fn identity(verifier: &JwtVerifier, lines: &[&str]) -> Result<Option<Vec<u8>>, TokenFault> {
        let request = request(lines);
        verifier.prepare(&request).await;
        verifier.identity(&request, "sub")
    }

    async fn of(verifier: &JwtVerifier, token: &str) -> Result<Option<Vec<u8>>, TokenFault> {
        identity(verifier, &[&format!("Bearer {token}")]).await
    }

    fn verifier(place: &Place) -> JwtVerifier {
        JwtVerifier::new(&[JwtAlgorithm::Es256], place.clone()).unwrap()
    }

    #[tokio::test]
    async fn a_renewed_token_names_the_same_caller_and_another_issuer_another_one() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        place.set(&[issuer.jwk()]);
        let verifier = verifier(&place);
        let ada = of(&verifier, &issuer.token(&claims("ada"))).await.unwrap().unwrap();
        let mut renewed = claims("ada");
        renewed["exp"] = in_seconds(3600).into();
        renewed["jti"] = "2".into();
        let renewed = issuer.token(&renewed);
        for line in [format!("Bearer {renewed}"), format!("bearer  {renewed} "), format!("BEARER {renewed}")]
        {
            assert_eq!(identity(&verifier, &[&line]).await, Ok(Some(ada.clone())), "{line}");
        }
        let mut of_another_issuer = claims("ada");
        of_another_issuer["iss"] = "https://other.test".into();
        for other in [claims("eve"), of_another_issuer] {
            assert_ne!(of(&verifier, &issuer.token(&other)).await.unwrap().unwrap(), ada, "{other}");
        }
        let mut number = claims("7");
        let text = of(&verifier, &issuer.token(&number)).await.unwrap();
        number["sub"] = 7.into();
        assert_ne!(of(&verifier, &issuer.token(&number)).await.unwrap(), text);
        assert_eq!(place.fetches.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn algorithms_of_several_kinds_of_keys_are_accepted_together() {
        let (ec, ed, place) = (Issuer::new("ec"), Issuer::of_ed25519("ed"), Place::default());
        place.set(&[ec.jwk(), ed.jwk()]);
        let all = [JwtAlgorithm::Rs256, JwtAlgorithm::Es256, JwtAlgorithm::EdDsa];
        let verifier = JwtVerifier::new(&all, place.clone()).unwrap();
        let ada = of(&verifier, &ec.token(&claims("ada"))).await.unwrap();
        assert!(ada.is_some());
        assert_eq!(of(&verifier, &ed.token(&claims("ada"))).await, Ok(ada));
        let only_ed = JwtVerifier::new(&[JwtAlgorithm::EdDsa], place).unwrap();
        assert_eq!(of(&only_ed, &ec.token(&claims("ada"))).await, Err(TokenFault::Algorithm));
    }

    #[tokio::test]
    async fn an_issuer_that_is_no_text_names_no_caller() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        place.set(&[issuer.jwk()]);
        let verifier = verifier(&place);
        for unusable in
            [json!(["https://issuer.test"]), json!([]), json!(7), json!({}), json!(null), json!("")]
        {
            let mut claims = claims("ada");
            claims["iss"] = unusable.clone();
            let refused = of(&verifier, &issuer.token(&claims)).await.unwrap_err();
            assert!(matches!(refused, TokenFault::Issuer | TokenFault::Malformed), "{unusable}: {refused:?}");
        }
    }

    #[tokio::test]
    async fn a_token_that_is_not_whole_valid_and_trusted_names_no_caller() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        place.set(&[issuer.jwk()]);
        let verifier = verifier(&place)
            .with_issuer("https://issuer.test")
            .with_audiences(&["orders".to_owned()])
            .unwrap();
        let with = |name: &str, value: Value| {
            let mut claims = claims("ada");
            claims[name] = value;
            issuer.token(&claims)
        };
        let without = |name: &str| {
            let mut claims = claims("ada");
            claims.as_object_mut().unwrap().remove(name);
            issuer.token(&claims)
        };
        for accepted in [
            with("exp", in_seconds(-20).into()),
            with("nbf", in_seconds(20).into()),
            with("aud", "orders".into()),
        ] {
            assert!(of(&verifier, &accepted).await.unwrap().is_some());
        }
        let forger = Issuer::new("a");
        let stranger = Issuer::new("b");
        let good = issuer.token(&claims("ada"));
        let (signed, signature) = good.rsplit_once('.').unwrap();
        let (head, _) = signed.split_once('.').unwrap();
        let eve = stranger.token(&claims("eve"));
        let payload_of_eve = eve.split('.').nth(1).unwrap();
        let mut critical = Header::new(Algorithm::ES256);
        critical.kid = Some("a".to_owned());
        critical.crit = Some(vec!["exp".to_owned()]);
        // The public key taken for a secret.
        let secret = EncodingKey::from_secret(issuer.jwk()["x"].as_str().unwrap().as_bytes());
        let confused = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims("ada"), &secret).unwrap();
        let unsigned = "eyJhbGciOiJub25lIn0"; // {"alg":"none"}
        for (token, expected) in [
            (with("exp", in_seconds(-40).into()), TokenFault::Expired),
            (with("nbf", in_seconds(40).into()), TokenFault::NotYetValid),
            (with("exp", "soon".into()), TokenFault::WithoutExpiry),
            (without("exp"), TokenFault::WithoutExpiry),
            (with("iss", "https://eve.test".into()), TokenFault::Issuer),
            (with("iss", json!(["https://issuer.test"])), TokenFault::Issuer),
            (without("iss"), TokenFault::Issuer),
            (with("aud", "invoices".into()), TokenFault::Audience),
            (without("aud"), TokenFault::Audience),
            (without("sub"), TokenFault::WithoutClaim),
            (with("sub", json!(["ada"])), TokenFault::Malformed),
            (with("sub", "".into()), TokenFault::WithoutClaim),
            (forger.token(&claims("ada")), TokenFault::Signature),
            (stranger.token(&claims("ada")), TokenFault::UnknownKey),
            (format!("{head}.{payload_of_eve}.{signature}"), TokenFault::Signature),
            (format!("{signed}."), TokenFault::Signature),
            (confused, TokenFault::Algorithm),
            (jsonwebtoken::encode(&critical, &claims("ada"), &issuer.key).unwrap(), TokenFault::Malformed),
            (format!("{unsigned}.{payload_of_eve}."), TokenFault::Malformed),
            (format!("{good}, Bearer {eve}"), TokenFault::Malformed),
            (format!("{good}.{signature}"), TokenFault::Malformed),
            ("opaque".to_owned(), TokenFault::Malformed),
            ("a.".repeat(MAX_TOKEN_BYTES), TokenFault::Malformed),
        ] {
            assert_eq!(of(&verifier, &token).await, Err(expected), "{token}");
        }
        for (lines, expected) in [
            (vec![], Ok(None)),
            (vec![String::new()], Ok(None)),
            (vec!["Bearer".to_owned()], Ok(None)),
            (vec!["Basic YTpi".to_owned()], Err(TokenFault::Malformed)),
            (vec![format!("DPoP {good}")], Err(TokenFault::Malformed)),
            (vec![good.clone()], Err(TokenFault::Malformed)),
            (vec![format!("Bearer {good}"), format!("Bearer {good}")], Err(TokenFault::Repeated)),
        ] {
            let lines: Vec<_> = lines.iter().map(String::as_str).collect();
            assert_eq!(identity(&verifier, &lines).await, expected, "{lines:?}");
        }
    }

    #[tokio::test]
    async fn new_keys_are_fetched_when_a_token_names_one_but_not_for_each_invented_name() {
        let (old, new, place) = (Issuer::new("old"), Issuer::new("new"), Place::default());
        place.set(&[old.jwk()]);
        let verifier = verifier(&place);
        assert!(of(&verifier, &old.token(&claims("ada"))).await.is_ok());
        place.set(&[old.jwk(), new.jwk()]);
        for _ in 0..100 {
            let refused = of(&verifier, &new.token(&claims("ada"))).await;
            assert_eq!(refused, Err(TokenFault::UnknownKey));
        }
        assert_eq!(place.fetches.load(Ordering::Relaxed), 1);
        verifier.inner.cache().tried = Instant::now().checked_sub(FETCH_INTERVAL);
        assert!(of(&verifier, &new.token(&claims("ada"))).await.is_ok());
        assert!(of(&verifier, &old.token(&claims("ada"))).await.is_ok());
        assert_eq!(place.fetches.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn the_result_of_each_fetch_is_reported() {
        let place = Place::default();
        let verifier = verifier(&place);
        let results = Arc::new(Mutex::new(Vec::new()));
        let seen = results.clone();
        verifier.observe_fetches(move |result| seen.lock().unwrap().push(result));
        verifier.refresh().await;
        place.set(&[]);
        verifier.refresh().await;
        place.set(&[Issuer::new("a").jwk()]);
        verifier.clone().with_issuer("b").refresh().await;
        assert_eq!(*results.lock().unwrap(), [JwksFetch::Failed, JwksFetch::Unusable, JwksFetch::Fetched]);
    }

    #[tokio::test]
    async fn while_the_issuer_is_away_known_keys_are_used_for_a_day() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        let verifier = verifier(&place);
        let token = issuer.token(&claims("ada"));
        assert_eq!(of(&verifier, &token).await, Err(TokenFault::NoKeys));
        // The next fetch is a second later.
        place.set(&[issuer.jwk()]);
        assert_eq!(of(&verifier, &token).await, Err(TokenFault::NoKeys));
        verifier.inner.cache().tried = Instant::now().checked_sub(FIRST_FETCH_INTERVAL);
        assert!(of(&verifier, &token).await.is_ok());

        *place.json.lock().unwrap() = None;
        verifier.refresh().await;
        assert!(of(&verifier, &token).await.is_ok());
        // The issuer may have made a new key, which cannot be fetched: this is no fault of the token.
        assert_eq!(of(&verifier, &Issuer::new("new").token(&claims("ada"))).await, Err(TokenFault::NoKeys));
        assert!(verifier.has_keys() && verifier.key_set_age().unwrap() < REFRESH_AGE);
        let since = Instant::now().checked_sub(MAX_AGE).unwrap();
        verifier.inner.cache().keys.as_mut().unwrap().1 = since;
        assert_eq!(of(&verifier, &token).await, Err(TokenFault::NoKeys));
        assert!(!verifier.has_keys() && verifier.key_set_age().unwrap() >= MAX_AGE);
        let reloaded = self::verifier(&place);
        verifier.inner.cache().keys.as_mut().unwrap().1 = Instant::now();
        reloaded.take_keys_of(&verifier);
        assert!(of(&reloaded, &token).await.is_ok());
    }

    #[tokio::test]
    async fn an_issuer_withdraws_its_only_key() {
        let (stolen, other, place) = (Issuer::new("a"), Issuer::of_ed25519("b"), Place::default());
        let verifier = verifier(&place);
        let token = stolen.token(&claims("ada"));
        for (withdrawn, is_read) in [
            (Some(json!({"keys": []})), true),
            (Some(json!({"keys": [other.jwk()]})), true),
            (Some(json!({"errors": []})), false),
            (None, false),
        ] {
            place.set(&[stolen.jwk()]);
            verifier.refresh().await;
            assert!(of(&verifier, &token).await.is_ok());
            *place.json.lock().unwrap() = withdrawn.as_ref().map(Value::to_string);
            verifier.refresh().await;
            let accepted = of(&verifier, &token).await;
            assert_eq!(accepted.is_err(), is_read, "{withdrawn:?}");
            assert!(!is_read || accepted == Err(TokenFault::NoKeys), "{withdrawn:?}");
        }
        // A reload does not bring it back.
        place.set(&[]);
        verifier.refresh().await;
        let reloaded = self::verifier(&place);
        reloaded.take_keys_of(&verifier);
        assert_eq!(of(&reloaded, &token).await, Err(TokenFault::NoKeys));
    }

    #[tokio::test]
    async fn an_old_key_set_is_fetched_again_without_a_request() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        place.set(&[issuer.jwk()]);
        let verifier = verifier(&place);
        let fetches = || place.fetches.load(Ordering::Relaxed);
        verifier.refresh_if_old().await;
        verifier.refresh_if_old().await;
        assert_eq!(fetches(), 1);
        {
            let mut cache = verifier.inner.cache();
            cache.tried = Instant::now().checked_sub(REFRESH_AGE);
            cache.keys.as_mut().unwrap().1 = Instant::now().checked_sub(REFRESH_AGE).unwrap();
        }
        verifier.refresh_if_old().await;
        assert_eq!(fetches(), 2);
        assert!(verifier.key_set_age().unwrap() < REFRESH_AGE);
    }

    #[tokio::test]
    async fn requests_that_arrive_during_a_fetch_wait_for_it() {
        let (issuer, place) = (Issuer::new("a"), Place::default());
        place.set(&[issuer.jwk()]);
        let verifier = verifier(&place);
        let token = issuer.token(&claims("ada"));
        let (one, other) = tokio::join!(of(&verifier, &token), of(&verifier, &token));
        assert!(one.is_ok() && other.is_ok());
        assert_eq!(place.fetches.load(Ordering::Relaxed), 1);
    }

    /// The clock of the test stands still until all tasks wait, and then goes on to the next timer.
    #[tokio::test(start_paused = true)]
    async fn an_issuer_that_never_answers_is_given_up() {
        struct Silent;
        impl JwksSource for Silent {
            fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, BoxError>> + Send + '_>> {
                Box::pin(std::future::pending())
            }
        }
        let verifier = JwtVerifier::new(&[JwtAlgorithm::Es256], Silent).unwrap();
        let begun = tokio::time::Instant::now();
        let refused = of(&verifier, &Issuer::new("a").token(&claims("ada"))).await;
        assert_eq!(refused, Err(TokenFault::NoKeys));
        assert!(begun.elapsed() < FETCH_TIMEOUT + Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_key_set_is_bounded_and_has_a_key_for_the_algorithms() {
        let issuer = Issuer::new("a");
        let verifier = verifier(&Place::default());
        let check =
            |json: Value| verifier.check(json.to_string().as_bytes()).map_err(|error| error.to_string());
        let with = |name: &str, value: Value| {
            let mut jwk = issuer.jwk();
            jwk[name] = value;
            json!({"keys": [{"kty": "new"}, 7, jwk]})
        };
        assert_eq!(check(with("use", "sig".into())), Ok(()));
        assert_eq!(check(with("key_ops", json!(["verify"]))), Ok(()));
        for unusable in [
            with("use", "enc".into()),
            with("key_ops", json!(["sign"])),
            with("alg", "ES384".into()),
            json!({"keys": []}),
            json!({"keys": [{"kty": "oct", "kid": "a", "k": "c2VjcmV0"}]}),
        ] {
            assert!(
                check(unusable.clone()).unwrap_err().contains("can verify signatures of ES256"),
                "{unusable}"
            );
        }
        assert!(check(json!([1])).unwrap_err().contains("has no list `keys`"));
        assert!(check(json!({"keys": vec![0; MAX_KEYS + 1]})).unwrap_err().contains("101 keys"));
        assert!(
            check(json!({"a": "a".repeat(MAX_KEY_SET_BYTES)})).unwrap_err().contains("larger than 256 KiB")
        );
        assert!(verifier.check(b"{").unwrap_err().to_string().contains("not JSON"));
    }

    #[tokio::test]
    async fn symmetric_keys_come_from_private_places_and_are_long_enough() {
        let new = |algorithms: &[JwtAlgorithm], private| {
            JwtVerifier::new(algorithms, Place { private, ..Place::default() })
                .map_err(|error| error.to_string())
        };
        assert!(new(&[], true).unwrap_err().contains("empty"));
        assert!(new(&[JwtAlgorithm::Hs256], false).unwrap_err().contains("from a file"));
        assert!(new(&[JwtAlgorithm::Hs256, JwtAlgorithm::Es256], true).unwrap_err().contains("one kind"));
        let place = Place { private: true, ..Place::default() };
        let verifier = JwtVerifier::new(&[JwtAlgorithm::Hs256], place.clone()).unwrap();
        let secret = [7; MIN_SECRET_BYTES];
        let encoded = "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc";
        place.set(&[json!({"kty": "oct", "k": encoded})]);
        let token = jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &claims("ada"),
            &EncodingKey::from_secret(&secret),
        );
        assert!(of(&verifier, &token.unwrap()).await.unwrap().is_some());
        let short = json!({"keys": [{"kty": "oct", "k": encoded.get(2..).unwrap()}]}).to_string();
        assert!(verifier.check(short.as_bytes()).unwrap_err().to_string().contains("32 bytes"));
    }

    #[tokio::test]
    async fn a_token_that_names_no_key_needs_a_set_with_one_key() {
        let (issuer, other, place) = (Issuer::new("a"), Issuer::new("b"), Place::default());
        place.set(&[issuer.jwk()]);
        let token =
            jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims("ada"), &issuer.key).unwrap();
        assert!(of(&verifier(&place), &token).await.is_ok());
        place.set(&[issuer.jwk(), other.jwk()]);
        assert_eq!(of(&verifier(&place), &token).await, Err(TokenFault::UnknownKey));
    }
}
