//! Texts with names in braces, which are replaced when they are used.

use std::fmt;

/// A text with names in braces. It is parsed once, and written without a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Template<N>(Box<[Part<N>]>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part<N> {
    Text(Box<str>),
    Name(N),
}

/// The error for a name in braces that has no meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnknownName(pub(crate) String);

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no such name {{{}}}", self.0)
    }
}

impl<N> Template<N> {
    /// The template of these texts, each followed by a name or not.
    pub(crate) fn of<const COUNT: usize>(parts: [(&str, Option<N>); COUNT]) -> Self {
        let parts = parts.into_iter().flat_map(|(text, name)| {
            [Some(Part::Text(text.into())), name.map(Part::Name)].into_iter().flatten()
        });
        Self(parts.collect())
    }

    /// Parses a text. Letters, digits, hyphens, underscores and colons in braces are a name. Any other brace stands for itself,
    /// so JSON needs no escapes: in JSON, a quote or another brace follows a brace.
    pub(crate) fn parse(text: &str, name_of: impl Fn(&str) -> Option<N>) -> Result<Self, UnknownName> {
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b':'))
        };
        let (mut parts, mut text_part, mut rest) = (Vec::new(), String::new(), text);
        while let Some((before, after)) = rest.split_once('{') {
            text_part.push_str(before);
            match after.split_once('}').filter(|(name, _)| is_name(name)) {
                Some((name, next)) => {
                    let name = name_of(name).ok_or_else(|| UnknownName(name.to_owned()))?;
                    parts.push(Part::Text(std::mem::take(&mut text_part).into()));
                    parts.push(Part::Name(name));
                    rest = next;
                }
                None => {
                    text_part.push('{');
                    rest = after;
                }
            }
        }
        text_part.push_str(rest);
        parts.push(Part::Text(text_part.into()));
        parts.retain(|part| !matches!(part, Part::Text(text) if text.is_empty()));
        Ok(Self(parts.into()))
    }

    /// Returns true if the text has this name.
    pub(crate) fn has(&self, name: &N) -> bool
    where
        N: PartialEq,
    {
        self.0.iter().any(|part| matches!(part, Part::Name(own) if own == name))
    }

    /// The text, with the names replaced by what `write` adds for them.
    pub(crate) fn render(&self, mut write: impl FnMut(&N, &mut String)) -> String {
        let mut text = String::with_capacity(512);
        for part in &self.0 {
            match part {
                Part::Text(fixed) => text.push_str(fixed),
                Part::Name(name) => write(name, &mut text),
            }
        }
        text
    }
}

/// The text as it was written.
impl<N: fmt::Display> fmt::Display for Template<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| match part {
            Part::Text(text) => f.write_str(text),
            Part::Name(name) => write!(f, "{{{name}}}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(name: &str) -> Option<String> {
        matches!(name, "a" | "b").then(|| name.to_uppercase())
    }

    #[test]
    fn names_are_replaced_and_other_braces_stand_for_themselves() {
        for (text, expected) in [
            ("", ""),
            ("{a}", "A"),
            ("x{a}{b}y", "xABy"),
            (r#"{"k":"{a}","n":{},"m":{b}}"#, r#"{"k":"A","n":{},"m":B}"#),
            ("{a", "{a"),
            ("{ a }", "{ a }"),
        ] {
            let template = Template::parse(text, letter).unwrap();
            assert_eq!(template.render(|name, text| text.push_str(name)), expected, "{text}");
            assert_eq!(template.to_string().to_lowercase(), text);
        }
    }

    #[test]
    fn an_unknown_name_is_an_error() {
        for name in ["c", "A", "b3", "a_b"] {
            assert_eq!(
                Template::parse(&format!("{{a}}{{{name}}}"), letter),
                Err(UnknownName(name.to_owned()))
            );
        }
    }
}
