//! Values and inputs as JSON: stored in records, and compared by fingerprint.

use bytes::Bytes;
use oncegate_core::{
    Fingerprint, FingerprintInput, FingerprintRules, ResponseError, StoreError, StoredResponse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value that cannot be stored.
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

/// Encodes a value like a response of a service: 200, `application/json`.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<StoredResponse, EncodeError> {
    let body = serde_json::to_vec(value).map_err(EncodeError::Json)?;
    let headers: [(&str, &[u8]); 1] = [("content-type", b"application/json")];
    StoredResponse::new(200, &headers, &[Bytes::from(body)], &[]).map_err(EncodeError::Response)
}

/// Reads a stored value. The error contains nothing of the value; serde's own text would.
pub(crate) fn decode<T: DeserializeOwned>(response: &StoredResponse) -> Result<T, String> {
    serde_json::from_slice(response.as_body()).map_err(|error| {
        format!("its JSON does not fit the type at line {} column {}", error.line(), error.column())
    })
}

/// The fingerprint of an input in canonical JSON: the order of the entries of a map does not matter.
pub(crate) fn fingerprint<T: Serialize + ?Sized>(input: &T) -> serde_json::Result<Fingerprint> {
    let body = serde_json::to_vec(input)?;
    let input =
        FingerprintInput { content_type: b"application/json", body: &body, ..FingerprintInput::default() };
    Ok(FingerprintRules::new().fingerprint(&input))
}
