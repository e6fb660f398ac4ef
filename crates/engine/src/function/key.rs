//! Keys of text and values.

use std::fmt::{Display, Write as _};

use oncegate_core::{IdempotencyKey, KeyError};

/// Builds a readable key of text and values, so that different lists of values give different keys.
///
/// With a plain `-` between them, `x-y` and `z` would give the same key as `x` and `y-z`. So in each value, the first character
/// of the text after it is percent-encoded as in a URL (`x%2Dy-z`), and so is `%`. If there is no text between two values, or
/// text that begins with `%`, a comma is inserted. The last value is not encoded.
///
/// ```
/// use oncegate_engine::KeyText;
///
/// let key = |a: &str, b: u32| KeyText::new("order-").value(&a).text("-").value(&b).key();
/// assert_eq!(key("A1", 2)?.as_bytes(), b"order-A1-2");
/// assert_eq!(key("A-1", 2)?.as_bytes(), b"order-A%2D1-2");
/// assert!(key("", 2).is_err());
/// # Ok::<(), oncegate_core::KeyError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct KeyText {
    text: String,
    /// The last value, which is encoded once the text after it is known.
    last: Option<String>,
    lacks_value: bool,
}

impl KeyText {
    /// Begins with this text, which may be empty.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self::default().text(text)
    }

    /// Adds text.
    #[must_use]
    pub fn text(mut self, text: &str) -> Self {
        if let Some(first) = text.chars().next() {
            self.end_value(if first == '%' { None } else { Some(first) });
            self.text.push_str(text);
        }
        self
    }

    /// Adds a value.
    #[must_use]
    pub fn value(mut self, value: &(impl Display + ?Sized)) -> Self {
        self.end_value(None);
        let value = value.to_string();
        self.lacks_value |= value.is_empty();
        self.last = Some(value);
        self
    }

    /// The key.
    ///
    /// # Errors
    /// [`KeyError::EmptyValue`] if a value is empty: all calls with an empty value would share one key. Otherwise as for
    /// [`IdempotencyKey::new`].
    pub fn key(mut self) -> Result<IdempotencyKey, KeyError> {
        if self.lacks_value {
            return Err(KeyError::EmptyValue);
        }
        self.text.push_str(&self.last.unwrap_or_default());
        self.text.try_into()
    }

    /// Writes the last value, encoded so that it ends at the character `next`, or at an inserted comma.
    fn end_value(&mut self, next: Option<char>) {
        let Some(value) = self.last.take() else { return };
        let end = next.unwrap_or(',');
        for character in value.chars() {
            if character == end || character == '%' {
                for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                    // Writing to a string cannot fail.
                    let _ = write!(self.text, "%{byte:02X}");
                }
            } else {
                self.text.push(character);
            }
        }
        if next.is_none() {
            self.text.push(',');
        }
    }
}

impl TryFrom<KeyText> for IdempotencyKey {
    type Error = KeyError;

    fn try_from(text: KeyText) -> Result<Self, KeyError> {
        text.key()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn different_lists_of_values_give_different_keys() {
        let values = ["-", "--", "a", "a-", "-a", "%", "%2D", "%252D", ",", "a,", "é", "2D", "%C3%A9", "-,%"];
        for (text, suffix) in
            [("-", ""), ("--", "-"), ("", ""), ("%", ""), ("%2D", "x"), ("é", "é"), (",", ",")]
        {
            let mut seen = HashMap::new();
            for a in values {
                for b in values {
                    for c in values {
                        let key =
                            KeyText::new("k").value(a).text(text).value(b).text("-").value(c).text(suffix);
                        let key = key.key().unwrap().as_bytes().to_vec();
                        let before = seen.insert(key, (a, b, c));
                        assert_eq!(before, None, "{text:?} {a:?} {b:?} {c:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_value_is_written_as_it_is() {
        let key = KeyText::new("order-").value("5%-7").key().unwrap();
        assert_eq!(key.as_bytes(), b"order-5%-7");
    }

    #[test]
    fn an_empty_value_is_refused() {
        assert_eq!(KeyText::new("order-").value("").key(), Err(KeyError::EmptyValue));
        assert_eq!(KeyText::new("").key(), Err(KeyError::Empty));
        let long = "a".repeat(256);
        assert_eq!(KeyText::new("").value(&long).key(), Err(KeyError::TooLong { bytes: 256 }));
    }
}
