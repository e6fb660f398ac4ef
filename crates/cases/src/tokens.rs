//! Tokens that name callers (JWT), and the key that verifies them.

use std::pin::Pin;

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use oncegate_http::{JwksSource, JwtAlgorithm, JwtVerifier};
use serde_json::{Value, json};

/// The audience of valid tokens.
pub(crate) const AUDIENCE: &str = "cases";
/// The algorithm of valid tokens.
pub(crate) const ALGORITHM: JwtAlgorithm = JwtAlgorithm::Hs256;

const SECRET: [u8; 32] = *b"a secret that only the cases use";
/// `SECRET` in base64url.
const ENCODED: &str = "YSBzZWNyZXQgdGhhdCBvbmx5IHRoZSBjYXNlcyB1c2U";
/// The name of the key.
const KEY: &str = "current";

/// The key set, as its file has it.
pub(crate) fn key_set() -> String {
    json!({"keys": [{"kty": "oct", "kid": KEY, "k": ENCODED}]}).to_string()
}

/// The verifier of a layer.
pub(crate) fn verifier() -> JwtVerifier {
    let verifier = JwtVerifier::new(&[ALGORITHM], File).expect("a private source");
    verifier.with_audiences(&[AUDIENCE.to_owned()]).expect("an audience")
}

/// The key set in this process.
struct File;

impl JwksSource for File {
    fn fetch(
        &self,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>>> + Send + '_>>
    {
        Box::pin(std::future::ready(Ok(key_set().into_bytes())))
    }

    fn is_private(&self) -> bool {
        true
    }
}

/// A token, valid for ten minutes unless it is changed.
pub(crate) struct Token {
    claims: Value,
    kid: &'static str,
    secret: [u8; 32],
}

impl Token {
    /// A valid token of this caller.
    pub(crate) fn of(subject: &str) -> Self {
        let claims = json!({"sub": subject, "aud": AUDIENCE});
        Self { claims, kid: KEY, secret: SECRET }.ends_in(600)
    }

    /// Ends in this many seconds.
    pub(crate) fn ends_in(self, seconds: i64) -> Self {
        let now = i64::try_from(jsonwebtoken::get_current_timestamp()).expect("a time of this age");
        self.with("exp", json!(now + seconds))
    }

    /// Replaces a claim; null removes it.
    pub(crate) fn with(mut self, claim: &str, value: Value) -> Self {
        let claims = self.claims.as_object_mut().expect("an object");
        match value {
            Value::Null => claims.remove(claim),
            value => claims.insert(claim.to_owned(), value),
        };
        self
    }

    /// Names another key than the one that signs.
    pub(crate) fn of_key(self, kid: &'static str) -> Self {
        Self { kid, ..self }
    }

    /// Is signed with a secret that another party made up.
    pub(crate) fn forged(self) -> Self {
        Self { secret: [7; 32], ..self }
    }

    /// The value of the field `Authorization`.
    pub(crate) fn bearer(&self) -> String {
        let header = Header { kid: Some(self.kid.to_owned()), ..Header::new(Algorithm::HS256) };
        let key = EncodingKey::from_secret(&self.secret);
        format!("Bearer {}", jsonwebtoken::encode(&header, &self.claims, &key).expect("a token"))
    }
}
