//! Paths: one spelling for each of them, and the patterns that choose the settings of a request.
//!
//! A service may answer `/orders`, `//orders`, `/%6Frders`, `/orders/` and `/Orders` in the same way. If they were five paths
//! to the layer, a request could avoid the settings of its route by its spelling, and a retry in another spelling would
//! execute again. So both the route and the record are chosen by the *canonical* path:
//!
//! 1. Percent-encoded unreserved characters are decoded, other escapes get upper-case digits (RFC 3986, 6.2.2.1 and 6.2.2.2).
//! 2. Dot segments are removed (6.2.2.3) and repeated slashes are merged. This comes after 1: `%2e%2e` is a dot segment.
//! 3. A slash at the end is removed, unless [`TrailingSlash::Exact`].
//! 4. The fixed parts of a pattern replace the text that they matched, unless [`PathCase::Exact`]. The text of a parameter
//!    keeps its spelling: it may be an identifier in which upper and lower case differ.
//!
//! The service gets the path as the client sent it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use oncegate_engine::ConfigError;

/// The meaning of a slash at the end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum TrailingSlash {
    /// `/orders` and `/orders/` are one path.
    #[default]
    Ignore,
    /// They are two paths.
    Exact,
}

/// The meaning of upper and lower case in the fixed parts of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PathCase {
    /// The pattern `/orders/{id}` matches `/Orders/7`, too. Parameters keep their case.
    #[default]
    Ignore,
    /// It does not.
    Exact,
}

/// The paths that a route matches, such as `/payments/{id}` (one segment) or `/v1/{*rest}` (the rest of the path).
#[derive(Clone)]
pub struct PathPattern {
    /// As it was written.
    text: Arc<str>,
    /// In canonical form, with the slash at the end.
    segments: Arc<[Segment]>,
    /// The names of the parameters, each with the position of its segment.
    names: Arc<[(usize, Box<str>)]>,
    slash: TrailingSlash,
    case: PathCase,
}

/// The pattern of one segment of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    /// This text. Empty: the path ends with a slash.
    Fixed(Box<str>),
    /// At least one character between these two texts.
    Parameter { before: Box<str>, after: Box<str> },
    /// At least one character, with all segments that follow.
    Rest,
}

impl PathPattern {
    /// Reads a pattern: `{name}` stands for one segment or a part of it, `{*name}` at the end for all that follows, `{{` and
    /// `}}` for braces.
    ///
    /// # Errors
    /// If it does not start with a slash, has a query or a fragment, or is malformed.
    pub fn new(pattern: &str) -> Result<Self, ConfigError> {
        let error = |what: String| ConfigError::new(format!("path pattern {pattern:?}: {what}"));
        if !pattern.starts_with('/') {
            return Err(error("it must start with a slash, as every path does".to_owned()));
        }
        if let Some((_, surplus)) = pattern.find(['?', '#']).and_then(|at| pattern.split_at_checked(at)) {
            return Err(error(format!(
                "it would match nothing, because a path has no query and no fragment; leave out {surplus:?}"
            )));
        }
        // The syntax of other programs for a parameter would be taken literally and match nothing, and the route would be
        // unprotected without a warning.
        let foreign = |segment: &&str| {
            segment.starts_with(':') || (segment.contains('*') && !segment.starts_with("{*"))
        };
        if let Some(segment) = pattern.split('/').find(foreign) {
            return Err(error(format!(
                "{segment:?} would match nothing but itself; write {{name}} for one segment, {{*rest}} for all that follows"
            )));
        }
        let canonical = canonical(pattern, TrailingSlash::Exact);
        let texts: Vec<&str> = canonical.split('/').skip(1).collect();
        let mut segments = Vec::with_capacity(texts.len());
        let mut names = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            let (segment, name) = Segment::read(text).map_err(&error)?;
            names.extend(name.map(|name| (at, name.into())));
            if segment == Segment::Rest && at + 1 < texts.len() {
                return Err(error(format!("{text:?} stands for all that follows; nothing may follow it")));
            }
            segments.push(segment);
        }
        let (slash, case) = (TrailingSlash::default(), PathCase::default());
        Ok(Self { text: pattern.into(), segments: segments.into(), names: names.into(), slash, case })
    }

    /// Sets the spellings of a path that the pattern matches.
    #[must_use]
    pub const fn with_spelling(mut self, slash: TrailingSlash, case: PathCase) -> Self {
        self.slash = slash;
        self.case = case;
        self
    }

    /// Returns true if the pattern matches this path, in any of its spellings. The path has no query.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        self.matches_canonical(&canonical(path, self.slash))
    }

    /// The canonical spelling of a path that the pattern matches.
    pub(crate) fn canonical<'a>(&self, path: &'a str) -> Cow<'a, str> {
        let path = canonical(path, self.slash);
        if self.case == PathCase::Exact || !self.matches_canonical(&path) {
            return path;
        }
        let mut spelled = String::with_capacity(path.len());
        let mut rest = path.get(1..).unwrap_or_default();
        for segment in self.segments() {
            let (text, next) = rest.split_once('/').unwrap_or((rest, ""));
            spelled.push('/');
            match segment {
                Segment::Fixed(fixed) => spelled.push_str(fixed),
                Segment::Parameter { before, after } => {
                    let value = text.get(before.len()..text.len().saturating_sub(after.len()));
                    spelled.extend([before, value.unwrap_or_default(), after]);
                }
                Segment::Rest => spelled.push_str(rest),
            }
            rest = next;
        }
        if spelled == path { path } else { Cow::Owned(spelled) }
    }

    /// Returns true if it matches every path that the other pattern matches. A route with the other pattern is then
    /// never used after it.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        if (self.slash, other.slash) == (TrailingSlash::Exact, TrailingSlash::Ignore) {
            return false;
        }
        let others = without_slash(&other.segments, self.slash);
        let mut others = others.iter();
        for segment in self.segments() {
            match (segment, others.next()) {
                (Segment::Rest, Some(Segment::Fixed(text))) => return !text.is_empty() || others.len() > 0,
                (Segment::Rest, Some(_)) => return true,
                (_, None | Some(Segment::Rest)) => return false,
                (Segment::Fixed(this), Some(Segment::Fixed(other_text))) => {
                    let same = match (self.case, other.case) {
                        (PathCase::Ignore, _) => this.eq_ignore_ascii_case(other_text),
                        (PathCase::Exact, PathCase::Exact) => this == other_text,
                        (PathCase::Exact, PathCase::Ignore) => {
                            this == other_text && !this.bytes().any(|byte| byte.is_ascii_alphabetic())
                        }
                    };
                    if !same {
                        return false;
                    }
                }
                (Segment::Fixed(_), Some(Segment::Parameter { .. })) => return false,
                (Segment::Parameter { before, after }, Some(other_segment)) => {
                    let (starts, ends, least) = match other_segment {
                        Segment::Fixed(text) => (text, text, before.len() + after.len() + 1),
                        Segment::Parameter { before, after } => (before, after, 0),
                        Segment::Rest => return false,
                    };
                    // Only texts in the same spelling, so that case need not be compared.
                    let fits = starts.starts_with(&**before) && ends.ends_with(&**after);
                    let plain = before.is_empty() && after.is_empty();
                    if !fits || starts.len() < least || (!plain && self.case != other.case) {
                        return false;
                    }
                }
            }
        }
        others.next().is_none()
    }

    /// The values of the parameters with this name in a path that the pattern matches, in the path's canonical spelling. Several
    /// parameters of one pattern may have the same name.
    pub(crate) fn values(&self, name: &str, path: &str) -> Vec<String> {
        let path = self.canonical(path);
        let rest = path.get(1..).unwrap_or_default();
        let value = |at: usize| match self.segments.get(at)? {
            Segment::Fixed(_) => None,
            Segment::Parameter { before, after } => {
                let text = rest.split('/').nth(at)?;
                Some(text.get(before.len()..text.len().checked_sub(after.len())?)?.to_owned())
            }
            Segment::Rest => Some(rest.split('/').skip(at).collect::<Vec<_>>().join("/")),
        };
        self.names.iter().filter(|(_, own)| **own == *name).filter_map(|(at, _)| value(*at)).collect()
    }

    /// The names of the parameters, in their order.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|(_, name)| &**name)
    }

    /// The pattern as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    fn segments(&self) -> &[Segment] {
        without_slash(&self.segments, self.slash)
    }

    fn matches_canonical(&self, path: &str) -> bool {
        let Some(mut rest) = path.strip_prefix('/') else { return false };
        let segments = self.segments();
        for (at, segment) in segments.iter().enumerate() {
            if *segment == Segment::Rest {
                return !rest.is_empty();
            }
            let is_last = at + 1 == segments.len();
            match (rest.split_once('/'), is_last) {
                (None, true) => return segment.matches(rest, self.case),
                (Some((text, next)), false) if segment.matches(text, self.case) => rest = next,
                _ => return false,
            }
        }
        false
    }
}

/// The segments without the empty one that a slash at the end makes, if that slash has no meaning. The root keeps it.
fn without_slash(segments: &[Segment], slash: TrailingSlash) -> &[Segment] {
    match segments {
        [before @ .., Segment::Fixed(last)]
            if slash == TrailingSlash::Ignore && last.is_empty() && !before.is_empty() =>
        {
            before
        }
        all => all,
    }
}

impl Segment {
    /// Reads a segment, with the name of its parameter if it has one.
    fn read(text: &str) -> Result<(Self, Option<&str>), String> {
        let (mut before, mut after) = (String::new(), String::new());
        let mut parameter = None;
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let (plain, from_brace) = rest.split_at(at);
            let side = if parameter.is_some() { &mut after } else { &mut before };
            side.push_str(plain);
            if let Some(next) = from_brace.strip_prefix("{{") {
                side.push('{');
                rest = next;
                continue;
            }
            if let Some(next) = from_brace.strip_prefix("}}") {
                side.push('}');
                rest = next;
                continue;
            }
            let inside = from_brace.strip_prefix('{').and_then(|inside| inside.split_once('}'));
            let Some((name, next)) = inside else {
                return Err(format!(
                    "a brace in {text:?} is not closed, or not opened; write {{{{ or }}}} for a brace itself"
                ));
            };
            let (is_rest, name) = name.strip_prefix('*').map_or((false, name), |name| (true, name));
            if name.is_empty() || name.contains(['{', '*']) {
                return Err(format!("a parameter in {text:?} has no name, or one that is not a name"));
            }
            if is_rest {
                let is_whole =
                    plain.is_empty() && before.is_empty() && parameter.is_none() && next.is_empty();
                return if is_whole { Ok((Self::Rest, Some(name))) } else { Err(alone(text)) };
            }
            if parameter.is_some() {
                return Err(format!("{text:?} has two parameters in one segment"));
            }
            parameter = Some(name);
            rest = next;
        }
        let side = if parameter.is_some() { &mut after } else { &mut before };
        side.push_str(rest);
        let segment = match parameter {
            Some(_) => Self::Parameter { before: before.into(), after: after.into() },
            None => Self::Fixed(before.into()),
        };
        Ok((segment, parameter))
    }

    /// Returns true if one segment of a path matches. [`Rest`](Self::Rest) never does, because it is more than one
    /// segment.
    fn matches(&self, text: &str, case: PathCase) -> bool {
        let same = |one: &[u8], other: &str| match case {
            PathCase::Ignore => one.eq_ignore_ascii_case(other.as_bytes()),
            PathCase::Exact => one == other.as_bytes(),
        };
        let text = text.as_bytes();
        match self {
            Self::Fixed(fixed) => same(text, fixed),
            Self::Parameter { before, after } => {
                text.len() > before.len() + after.len()
                    && text.get(..before.len()).is_some_and(|start| same(start, before))
                    && text.get(text.len() - after.len()..).is_some_and(|end| same(end, after))
            }
            Self::Rest => false,
        }
    }
}

fn alone(text: &str) -> String {
    format!("{text:?} has something next to {{*…}}, which stands for whole segments")
}

/// The canonical spelling of a path, steps 1 to 3. A target that is not a path, such as `*`, stays as it is.
pub(crate) fn canonical(path: &str, slash: TrailingSlash) -> Cow<'_, str> {
    let ends_with_slash = path.len() > 1 && path.ends_with('/');
    let is_spelled_otherwise = path.contains('%')
        || !path.is_ascii()
        || path.as_bytes().windows(2).any(|pair| matches!(pair, [b'/', b'/' | b'.']))
        || (ends_with_slash && slash == TrailingSlash::Ignore);
    if !is_spelled_otherwise || !path.starts_with('/') {
        return Cow::Borrowed(path);
    }
    let decoded = decode_unreserved(path);
    let mut segments: Vec<&str> = Vec::new();
    let mut ends_with_slash = false;
    for segment in decoded.split('/').skip(1) {
        ends_with_slash = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            _ => segments.push(segment),
        }
    }
    let mut spelled = String::with_capacity(decoded.len());
    for segment in &segments {
        spelled.push('/');
        spelled.push_str(segment);
    }
    if spelled.is_empty() || (ends_with_slash && slash == TrailingSlash::Exact) {
        spelled.push('/');
    }
    Cow::Owned(spelled)
}

/// Decodes unreserved characters (RFC 3986, 2.3), encodes bytes that must be encoded, and writes the digits of escapes in upper
/// case. A percent sign that starts no escape stays.
fn decode_unreserved(path: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut spelled = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let escaped = match byte {
            b'%' => hex(ahead.next()).zip(hex(ahead.next())).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        if escaped.is_some() {
            bytes = ahead;
        }
        match escaped {
            None if byte.is_ascii() => spelled.push(char::from(byte)),
            Some(plain) if plain.is_ascii_alphanumeric() || b"-._~".contains(&plain) => {
                spelled.push(char::from(plain));
            }
            other => {
                let byte = other.unwrap_or(byte);
                spelled.push('%');
                for digit in [byte >> 4, byte & 15] {
                    spelled.push(DIGITS.get(usize::from(digit)).map_or('0', |digit| char::from(*digit)));
                }
            }
        }
    }
    spelled
}

fn hex(digit: Option<u8>) -> Option<u8> {
    u8::try_from(char::from(digit?).to_digit(16)?).ok()
}

impl fmt::Debug for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PathPattern")
            .field("text", &self.text)
            .field("slash", &self.slash)
            .field("case", &self.case)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use PathCase::Exact as ExactCase;
    use TrailingSlash::Exact as ExactSlash;

    fn pattern(text: &str) -> PathPattern {
        PathPattern::new(text).unwrap()
    }

    fn exact(text: &str) -> PathPattern {
        pattern(text).with_spelling(ExactSlash, ExactCase)
    }

    #[test]
    fn a_pattern_matches_whole_paths_in_every_spelling() {
        for (text, path, loose, strict) in [
            ("/payments", "/payments", true, true),
            ("/payments", "/payments/", true, false),
            ("/payments/", "/payments", true, false),
            ("/payments", "/Payments", true, false),
            ("/payments", "//payments", true, true),
            ("/payments", "/%70ayments", true, true),
            ("/payments", "/%50ayments", true, false),
            ("/payments", "/x/../payments", true, true),
            ("/payments", "/x/%2e%2E/payments", true, true),
            ("/payments", "/./payments", true, true),
            ("/payments", "/payments/.", true, false),
            ("/payments", "/payments%2F", false, false),
            ("/payments", "/payment", false, false),
            ("/payments/{id}", "/payments/7", true, true),
            ("/payments/{id}", "/payments/", false, false),
            ("/payments/{id}", "/payments/7/refunds", false, false),
            ("/payments/{id}/", "/payments/7/", true, true),
            ("/payments/{id}:refund", "/payments/7:Refund", true, false),
            ("/payments/{id}:refund", "/payments/:refund", false, false),
            ("/v1/{*rest}", "/v1/payments/7", true, true),
            ("/v1/{*rest}", "/V1/payments/7/", true, false),
            ("/v1/{*rest}", "/v1", false, false),
            ("/v1/{*rest}", "/v1/", false, false),
            ("/{*rest}", "/", false, false),
            ("/", "/", true, true),
            ("/", "//", true, true),
            ("/", "/a", false, false),
            ("/caf%C3%A9", "/caf%c3%a9", true, true),
            ("/café", "/caf%c3%a9", true, true),
            ("//a/./b", "/a/b", true, true),
            ("/{{a}}", "/{a}", true, true),
            ("/a", "*", false, false),
        ] {
            assert_eq!(pattern(text).matches(path), loose, "{text} {path}");
            assert_eq!(exact(text).matches(path), strict, "exact: {text} {path}");
        }
    }

    #[test]
    fn an_invalid_pattern_is_refused_with_its_text() {
        for text in [
            "payments", "", "/{", "/}", "/{}", "/{*}", "/{a}{b}", "/{*rest}/more", "/a{*rest}", "/v1/*",
            "/v1/**", "/payments/:id", "/a*b", "/orders?page=1", "/orders#top",
        ] {
            let error = PathPattern::new(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("path pattern {text:?}: ")), "{error}");
        }
        assert!(PathPattern::new("/a?b=1").unwrap_err().to_string().ends_with("leave out \"?b=1\""));
    }

    #[test]
    fn the_canonical_path_is_the_same_for_every_spelling() {
        for (path, slash_ignored, slash_exact) in [
            ("/a/b", "/a/b", "/a/b"),
            ("/a/b/", "/a/b", "/a/b/"),
            ("/a//b", "/a/b", "/a/b"),
            ("///", "/", "/"),
            ("/", "/", "/"),
            ("/a/./b/../c", "/a/c", "/a/c"),
            ("/a/..", "/", "/"),
            ("/../../a", "/a", "/a"),
            ("/a/b/..", "/a", "/a/"),
            ("/%7Ea/%2e./b", "/b", "/b"),
            ("/a%2fb%3a", "/a%2Fb%3A", "/a%2Fb%3A"),
            ("/100%", "/100%", "/100%"),
            ("/%zz", "/%zz", "/%zz"),
            ("/.a/..b", "/.a/..b", "/.a/..b"),
            ("*", "*", "*"),
            ("", "", ""),
        ] {
            assert_eq!(canonical(path, TrailingSlash::Ignore), slash_ignored, "{path}");
            assert_eq!(canonical(path, ExactSlash), slash_exact, "{path}");
            let again = canonical(slash_exact, ExactSlash);
            assert_eq!(again, slash_exact, "{path} again");
        }
    }

    #[test]
    fn fixed_parts_are_spelled_as_in_the_pattern_and_parameters_as_in_the_path() {
        let items = pattern("/items/{id}/Sell");
        assert_eq!(items.canonical("/Items/AbC/sell/"), "/items/AbC/Sell");
        assert_eq!(items.canonical("/items/AbC/Sell"), "/items/AbC/Sell");
        assert_eq!(pattern("/v1/{*rest}").canonical("/V1//A/b"), "/v1/A/b");
        assert_eq!(pattern("/x-{a}.json").canonical("/X-Y.JSON"), "/x-Y.json");
        assert_eq!(exact("/items/{id}").canonical("/items/a/"), "/items/a/");
    }

    #[test]
    fn a_pattern_covers_another_if_nothing_is_left_for_it() {
        for (first, second, covers) in [
            ("/a", "/a", true),
            ("/a", "/A/", true),
            ("/a", "/b", false),
            ("/{x}", "/a", true),
            ("/{x}", "/{y}", true),
            ("/a", "/{x}", false),
            ("/{x}", "/a/b", false),
            ("/{*rest}", "/a/b", true),
            ("/{*rest}", "/a/{x}", true),
            ("/{*rest}", "/", false),
            ("/a/{*rest}", "/a/{*rest}", true),
            ("/a/{*rest}", "/a", false),
            ("/a/{x}", "/a/{*rest}", false),
            ("/x-{a}", "/x-y-{b}", true),
            ("/x-{a}", "/x-", false),
            ("/x-{a}", "/{b}", false),
            ("/a/{x}/c", "/a/b/c", true),
        ] {
            assert_eq!(pattern(first).covers(&pattern(second)), covers, "{first} {second}");
        }
        assert!(!exact("/a").covers(&pattern("/a")), "the other one also matches /a/ and /A");
        assert!(pattern("/a").covers(&exact("/A/")));
        assert!(!exact("/a").covers(&exact("/A")));
    }
}
