//! JSON pointers (RFC 6901), and the values that they select from a canonical document.

use std::fmt;
use std::str::FromStr;

use super::json;

/// A place in a JSON document, as RFC 6901 writes it: `/items/0/price`.
///
/// `~1` stands for `/` in a member name, and `~0` for `~`. The empty pointer is the whole document. An array
/// is entered by a decimal index without leading zeros; `-`, the element after the last, never matches.
///
/// ```
/// use oncegate_core::{JsonPointer, JsonPointerError};
///
/// let pointer: JsonPointer = "/meta/sent~1at".parse()?;
/// assert_eq!(pointer.as_str(), "/meta/sent~1at");
/// assert_eq!(JsonPointer::parse("meta"), Err(JsonPointerError::MissingSlash));
/// assert_eq!(JsonPointer::parse("/a~2"), Err(JsonPointerError::BadEscape { at: 2 }));
/// # Ok::<(), JsonPointerError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JsonPointer {
    text: String,
    tokens: Vec<Token>,
}

impl JsonPointer {
    /// Reads a pointer in its plain spelling; the URI fragment spelling (`#/a`) is not accepted.
    ///
    /// # Errors
    /// [`JsonPointerError`] names the mistake and its position.
    pub fn parse(text: &str) -> Result<Self, JsonPointerError> {
        let mut tokens = Vec::new();
        if !text.is_empty() {
            let mut at = 1;
            for token in text.strip_prefix('/').ok_or(JsonPointerError::MissingSlash)?.split('/') {
                tokens.push(Token::parse(token, at)?);
                at += token.len() + 1;
            }
        }
        Ok(Self { text: text.to_owned(), tokens })
    }

    /// The pointer as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for JsonPointer {
    type Err = JsonPointerError;

    fn from_str(text: &str) -> Result<Self, JsonPointerError> {
        Self::parse(text)
    }
}

impl fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JsonPointer").field(&self.text).finish()
    }
}

/// The reason why a text is not a [`JsonPointer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonPointerError {
    /// The text is not empty and does not start with `/`.
    #[error("a JSON pointer is empty or starts with '/'")]
    MissingSlash,
    /// A `~` is not followed by `0` or `1`.
    #[error("'~' at byte {at} of a JSON pointer is not followed by '0' or '1'")]
    BadEscape {
        /// The position of the `~`, in bytes from the start of the pointer.
        at: usize,
    },
}

/// One step of a pointer: a member name or an array index.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Token {
    /// The member name in its canonical spelling, quotes included.
    name: Vec<u8>,
    /// The array index, if the token can be one.
    index: Option<usize>,
}

impl Token {
    /// Reads the token that starts at byte `start` of its pointer.
    fn parse(text: &str, start: usize) -> Result<Self, JsonPointerError> {
        for (at, _) in text.match_indices('~') {
            if !matches!(text.as_bytes().get(at + 1), Some(b'0' | b'1')) {
                return Err(JsonPointerError::BadEscape { at: start + at });
            }
        }
        let plain = text == "0" || !text.starts_with('0');
        let index =
            (plain && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten();
        // `~1` first: `~01` is the name `~1` (RFC 6901, section 4).
        Ok(Self { name: json::quoted(&text.replace("~1", "/").replace("~0", "~")), index })
    }
}

/// Appends the value that `pointer` finds in `document` to `out`, without the values at `excluded`. Appends nothing if there is
/// no such value, or if it is itself excluded.
///
/// `document` is canonical. `excluded` starts at the root of the document, as `pointer` does.
pub(super) fn select(document: &[u8], pointer: &JsonPointer, excluded: &[JsonPointer], out: &mut Vec<u8>) {
    let mut paths = excluded.iter().map(|excluded| excluded.tokens.as_slice()).collect::<Vec<_>>();
    let mut rest = document;
    for token in &pointer.tokens {
        if paths.iter().any(|path| path.is_empty()) {
            return;
        }
        let Some(value) = Children::of(rest).find(|child| child.matches(token)).map(|child| child.value)
        else {
            return;
        };
        paths = below(&paths, |first| first == token);
        rest = value;
    }
    prune(rest, &paths, out);
}

/// Appends `document`, which is canonical, to `out`, without the values at `excluded`.
pub(super) fn exclude(document: &[u8], excluded: &[JsonPointer], out: &mut Vec<u8>) {
    let paths = excluded.iter().map(|excluded| excluded.tokens.as_slice()).collect::<Vec<_>>();
    prune(document, &paths, out);
}

/// The rests of the paths whose first step matches.
fn below<'a>(paths: &[&'a [Token]], step: impl Fn(&Token) -> bool) -> Vec<&'a [Token]> {
    paths
        .iter()
        .filter_map(|path| path.split_first())
        .filter(|(first, _)| step(first))
        .map(|(_, rest)| rest)
        .collect()
}

/// Appends `value` without the values at `paths`. The recursion is bounded: a document is at most [`json::MAX_DEPTH`] deep.
fn prune(value: &[u8], paths: &[&[Token]], out: &mut Vec<u8>) {
    if paths.iter().any(|path| path.is_empty()) {
        return;
    }
    let (Some(open), Some(close)) = (value.first(), value.last()) else {
        return;
    };
    if paths.is_empty() || !matches!(open, b'{' | b'[') {
        out.extend_from_slice(value);
        return;
    }
    out.push(*open);
    let start = out.len();
    for child in Children::of(value) {
        let paths = below(paths, |first| child.matches(first));
        if paths.iter().any(|path| path.is_empty()) {
            continue;
        }
        if out.len() > start {
            out.push(b',');
        }
        if let Some(name) = child.name {
            out.extend_from_slice(name);
            out.push(b':');
        }
        prune(child.value, &paths, out);
    }
    out.push(*close);
}

/// A member or an element.
struct Child<'d> {
    /// Quotes included; elements have none.
    name: Option<&'d [u8]>,
    index: usize,
    value: &'d [u8],
}

impl Child<'_> {
    fn matches(&self, token: &Token) -> bool {
        match self.name {
            Some(name) => name == token.name,
            None => token.index == Some(self.index),
        }
    }
}

/// The members or elements of a canonical value; a scalar has none.
struct Children<'d> {
    rest: &'d [u8],
    members: bool,
    index: usize,
}

impl<'d> Children<'d> {
    fn of(value: &'d [u8]) -> Self {
        let (members, rest) = match value {
            [b'{', rest @ .., b'}'] => (true, rest),
            [b'[', rest @ .., b']'] => (false, rest),
            _ => (false, [].as_slice()),
        };
        Self { rest, members, index: 0 }
    }
}

impl<'d> Iterator for Children<'d> {
    type Item = Child<'d>;

    fn next(&mut self) -> Option<Child<'d>> {
        if self.rest.is_empty() {
            return None;
        }
        let mut name = None;
        if self.members {
            let (text, rest) = self.rest.split_at_checked(value_len(self.rest))?;
            name = Some(text);
            self.rest = rest.strip_prefix(b":")?;
        }
        let (value, rest) = self.rest.split_at_checked(value_len(self.rest))?;
        self.rest = rest.strip_prefix(b",").unwrap_or(rest);
        let index = self.index;
        self.index += 1;
        Some(Child { name, index, value })
    }
}

/// The length of the canonical value (or member name) that `text` begins with.
fn value_len(text: &[u8]) -> usize {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (at, byte) in text.iter().enumerate() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    in_string = false;
                    if depth == 0 {
                        return at + 1;
                    }
                }
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => depth += 1,
            b',' if depth == 0 => return at,
            b'}' | b']' => {
                // If it closes an outer value, a scalar has ended. If it closes the value itself, that has ended.
                match depth.checked_sub(1) {
                    None => return at,
                    Some(0) => return at + 1,
                    Some(outer) => depth = outer,
                }
            }
            _ => {}
        }
    }
    text.len()
}
