//! Bodies of type `application/x-www-form-urlencoded`.

use std::ops::Range;

use crate::limits;

/// The pairs of a form, decoded and in canonical order.
pub(super) struct Form {
    /// All names and values, decoded, in the order of the body.
    bytes: Vec<u8>,
    pairs: Vec<Pair>,
}

struct Pair {
    name: Range<usize>,
    value: Range<usize>,
}

impl Form {
    /// Reads a form; `None` if servers read it in different ways, or if it has too many pairs.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        if body.contains(&b';') {
            return None;
        }
        let mut form = Self { bytes: Vec::new(), pairs: Vec::new() };
        for segment in body.split(|byte| *byte == b'&') {
            if form.pairs.len() == limits::MAX_FORM_PAIRS {
                return None;
            }
            let equals = segment.iter().position(|byte| *byte == b'=')?;
            let (name, value) = segment.split_at_checked(equals)?;
            let pair = Pair { name: form.decode(name)?, value: form.decode(value.strip_prefix(b"=")?)? };
            form.pairs.push(pair);
        }
        let Self { bytes, pairs } = &mut form;
        let name = |pair: &Pair| bytes.get(pair.name.clone()).unwrap_or_default();
        if pairs.iter().all(|pair| name(pair).iter().all(|byte| matches!(byte, b' '..=b'~'))) {
            // A stable sort: pairs of one stem keep their order.
            pairs.sort_by(|a, b| stem(name(a)).cmp(stem(name(b))));
        }
        Some(form)
    }

    pub(super) fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Names and values.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let text = |range: &Range<usize>| self.bytes.get(range.clone()).unwrap_or_default();
        self.pairs.iter().map(move |pair| (text(&pair.name), text(&pair.value)))
    }

    /// Appends `text`, decoded. Returns its position.
    fn decode(&mut self, text: &[u8]) -> Option<Range<usize>> {
        let start = self.bytes.len();
        let mut bytes = text.iter();
        while let Some(byte) = bytes.next() {
            self.bytes.push(match byte {
                b'+' => b' ',
                b'%' => hex(*bytes.next()?)? << 4 | hex(*bytes.next()?)?,
                byte => *byte,
            });
        }
        Some(start..self.bytes.len())
    }
}

/// The stem of a name: its first run of letters and digits, in lower case.
///
/// Names that some framework treats as one have the same stem. PHP makes `a.b`, `a b` and `a_b` one name, and ASP.NET `A`
/// and `a`. `items[][id]` and `items[][count]` build one list together, whose elements depend on the order of the pairs.
fn stem(name: &[u8]) -> impl Iterator<Item = u8> {
    let start = name.iter().position(u8::is_ascii_alphanumeric).unwrap_or(name.len());
    let run = name.iter().skip(start).take_while(|byte| byte.is_ascii_alphanumeric());
    run.map(u8::to_ascii_lowercase)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}
