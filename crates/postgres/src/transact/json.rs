//! Values as records keep them, and inputs as they are compared.

use bytes::Bytes;
use oncegate_core::{
    Fingerprint, FingerprintInput, FingerprintRules, ResponseError, StoreError, StoredResponse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a value cannot be kept.
pub(crate) enum EncodeError {
    Json(serde_json::Error),
    Response(ResponseError),
}

impl From<EncodeError> for StoreError {
    fn from(error: EncodeError) -> Self {
        match error {
            EncodeError::Json(error) => not_json(error),
            EncodeError::Response(error) => Self::invalid("the value cannot be stored").with_source(error),
        }
    }
}

pub(crate) fn not_json(error: serde_json::Error) -> StoreError {
    StoreError::invalid("the value cannot be written as JSON").with_source(error)
}

/// As an answer of a service would be: 200, `application/json`.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<StoredResponse, EncodeError> {
    let body = serde_json::to_vec(value).map_err(EncodeError::Json)?;
    let headers: [(&str, &[u8]); 1] = [("content-type", b"application/json")];
    StoredResponse::new(200, &headers, &[Bytes::from(body)], &[]).map_err(EncodeError::Response)
}

/// Reads a stored value. The reason of a failure shows nothing of the value, which serde's own text would.
pub(crate) fn decode<T: DeserializeOwned>(response: &StoredResponse) -> Result<T, String> {
    serde_json::from_slice(&response.body()).map_err(|error| {
        format!("its JSON does not fit the type at line {} column {}", error.line(), error.column())
    })
}

/// Canonical where JSON has a canonical form: the order of a map's entries is no difference.
pub(crate) fn fingerprint<T: Serialize + ?Sized>(input: &T) -> serde_json::Result<Fingerprint> {
    let body = serde_json::to_vec(input)?;
    let input =
        FingerprintInput { content_type: b"application/json", body: &body, ..FingerprintInput::default() };
    Ok(FingerprintRules::new().fingerprint(&input))
}
