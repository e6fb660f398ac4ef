//! Values as records keep them, and inputs as they are compared.

use std::fmt;

use bytes::Bytes;
use oncegate_core::{Fingerprint, FingerprintInput, FingerprintRules, ResponseError, StoredResponse};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a value cannot be kept.
pub(crate) enum EncodeError {
    Json(serde_json::Error),
    Response(ResponseError),
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => write!(f, "the value cannot be written as JSON: {error}"),
            Self::Response(error) => write!(f, "the value is {error}"),
        }
    }
}

/// As an answer of a service would be: 200, `application/json`.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<StoredResponse, EncodeError> {
    let body = serde_json::to_vec(value).map_err(EncodeError::Json)?;
    let headers: [(&str, &[u8]); 1] = [("content-type", b"application/json")];
    StoredResponse::new(200, &headers, &[Bytes::from(body)], &[]).map_err(EncodeError::Response)
}

pub(crate) fn decode<T: DeserializeOwned>(response: &StoredResponse) -> serde_json::Result<T> {
    serde_json::from_slice(&response.body())
}

/// Canonical where JSON has a canonical form: the order of a map's entries is no difference.
pub(crate) fn fingerprint<T: Serialize + ?Sized>(input: &T) -> serde_json::Result<Fingerprint> {
    let body = serde_json::to_vec(input)?;
    let input =
        FingerprintInput { content_type: b"application/json", body: &body, ..FingerprintInput::default() };
    Ok(FingerprintRules::new().fingerprint(&input))
}
