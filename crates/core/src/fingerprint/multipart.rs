//! Bodies of type `multipart/*` (RFC 2046, section 5.1), read without their boundary.
//!
//! Strict on purpose: if two readers could see different parts, the body stays raw.

use super::media_type::{is_token, trim};
use crate::limits;

/// One part of a multipart body.
pub(super) struct Part<'b> {
    /// Names in lower case, sorted; fields of one name keep their order.
    pub(super) headers: Vec<(Vec<u8>, &'b [u8])>,
    pub(super) body: &'b [u8],
}

/// The parts of `body`, in order.
pub(super) fn read<'b>(body: &'b [u8], boundary: &[u8]) -> Option<Vec<Part<'b>>> {
    let delimiter = [b"\r\n--", boundary].concat();
    let dashes = delimiter.strip_prefix(b"\r\n")?;
    let mut rest = body.strip_prefix(b"\r\n").unwrap_or(body).strip_prefix(dashes)?;
    let mut parts = Vec::new();
    let mut left = limits::MAX_MULTIPART_ITEMS;
    loop {
        // `rest` begins after a delimiter.
        if let Some(epilogue) = rest.strip_prefix(b"--") {
            return matches!(epilogue, b"" | b"\r\n").then_some(parts);
        }
        let part = rest.strip_prefix(b"\r\n")?;
        let end = find(part, &delimiter)?;
        let (part, after) = part.split_at_checked(end)?;
        if part.starts_with(dashes) {
            return None;
        }
        let part = read_part(part, left)?;
        left = left.checked_sub(1 + part.headers.len())?;
        parts.push(part);
        rest = after.strip_prefix(delimiter.as_slice())?;
    }
}

/// Reads a part; `None` if it is invalid or has more than `max` header lines.
fn read_part(mut rest: &[u8], max: usize) -> Option<Part<'_>> {
    let mut headers = Vec::new();
    loop {
        let (line, after) = rest.split_at_checked(find(rest, b"\r\n")?)?;
        rest = after.strip_prefix(b"\r\n")?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_at_checked(line.iter().position(|byte| *byte == b':')?)?;
        // A line that continues the one before has no token before its colon.
        if headers.len() == max
            || !is_token(name)
            || line.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0))
        {
            return None;
        }
        headers.push((name.to_ascii_lowercase(), trim(value.strip_prefix(b":")?)));
    }
    headers.sort_by(|(a, _), (b, _)| a.cmp(b));
    Some(Part { headers, body: rest })
}

/// The first position of `needle` in `haystack`.
fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = needle.first()?;
    let mut from = 0;
    loop {
        let at = from + haystack.get(from..)?.iter().position(|byte| byte == first)?;
        if haystack.get(at..)?.starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
}
