//! Detects responses whose body has no reliable end, or a transfer coding that is not decoded.

use http::{HeaderMap, Response, StatusCode, Version, header};
use hyper::body::{Body as _, Incoming};

/// Returns true if the end of the connection ends the body, so that a truncated body looks complete.
pub(super) fn is_unframed(response: &Response<Incoming>) -> bool {
    response.version() < Version::HTTP_2
        && !response.body().is_end_stream()
        && response.body().size_hint().exact().is_none()
        && !transfer_codings(response.headers()).any(is_chunked)
        && response.status() != StatusCode::SWITCHING_PROTOCOLS
}

/// Returns true if the body has a transfer coding that the library does not decode (RFC 9112, 6.1 and 7). The library
/// decodes one `chunked`, which must be the last coding.
pub(super) fn has_other_coding(response: &Response<Incoming>) -> bool {
    if response.body().is_end_stream() {
        return false;
    }
    let mut codings = transfer_codings(response.headers()).peekable();
    while let Some(coding) = codings.next() {
        let is_last = codings.peek().is_none();
        // `identity` is not a coding (RFC 2616, 3.6), but old services send it.
        if !(is_chunked(coding) && is_last || coding.eq_ignore_ascii_case(b"identity")) {
            return true;
        }
    }
    false
}

fn transfer_codings(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(header::TRANSFER_ENCODING).into_iter();
    lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii))
}

const fn is_chunked(coding: &[u8]) -> bool {
    coding.eq_ignore_ascii_case(b"chunked")
}
