//! Bodies of type `application/x-www-form-urlencoded`.

/// The pairs of a form, decoded and in canonical order.
pub(super) struct Form {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Form {
    /// `None` for a body that servers read in different ways: an empty segment, a segment without `=`, or a
    /// `%` that no two hexadecimal digits follow.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut pairs = Vec::new();
        for segment in body.split(|byte| *byte == b'&') {
            let equals = segment.iter().position(|byte| *byte == b'=')?;
            let (name, value) = segment.split_at_checked(equals)?;
            pairs.push((decode(name)?, decode(value.strip_prefix(b"=")?)?));
        }
        // A stable sort: values of one name keep their order.
        pairs.sort_by(|(a, _), (b, _)| root(a).cmp(root(b)));
        Some(Self { pairs })
    }

    pub(super) fn pairs(&self) -> &[(Vec<u8>, Vec<u8>)] {
        &self.pairs
    }
}

/// The name up to its first bracket. `items[][id]` and `items[][count]` build one list together in many
/// frameworks, and which pairs make one element depends on their order.
fn root(name: &[u8]) -> &[u8] {
    name.split(|byte| *byte == b'[').next().unwrap_or_default()
}

fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => hex(*bytes.next()?)? << 4 | hex(*bytes.next()?)?,
            byte => *byte,
        });
    }
    Some(out)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}
