//! Errors and warnings about a configuration, with the source of the value.

use std::fmt;
use std::sync::Arc;

pub(crate) use oncegate_http::nearest;

use super::settings::Setting;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The default.
    Default,
    /// The command line, by the flag's name with its dashes.
    Flag(String),
    /// The environment, by the variable's name.
    Env(String),
    /// The file.
    File(FilePlace),
}

/// A place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePlace {
    pub(crate) file: Arc<str>,
    pub(crate) line: usize,
    pub(crate) column: usize,
    /// The name of the key, if the place is that of a key.
    pub(crate) key: Option<String>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Flag(name) | Self::Env(name) => f.write_str(name),
            Self::File(FilePlace { file, line, column, key }) => {
                write!(f, "{file}:{line}:{column}")?;
                key.as_ref().map_or(Ok(()), |key| write!(f, ": {key}"))
            }
        }
    }
}

/// The severity of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    /// Oncegate does not start with it.
    Error,
    /// The sidecar starts, but the operator should know of it.
    Warning,
}

/// One error or warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) severity: Severity,
    pub(crate) source: Option<Source>,
    pub(crate) message: String,
}

impl Problem {
    pub(crate) fn error(source: impl Into<Option<Source>>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, source: source.into(), message: message.into() }
    }

    pub(crate) fn warning(source: impl Into<Option<Source>>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, source: source.into(), message: message.into() }
    }

    /// The position in the output: first the file from top to bottom, then the environment, then the flags.
    pub(crate) fn rank(&self) -> (u8, usize, usize) {
        match &self.source {
            Some(Source::File(place)) => (0, place.line, place.column),
            Some(Source::Env(_)) => (1, 0, 0),
            Some(Source::Flag(_)) => (2, 0, 0),
            Some(Source::Default) | None => (3, 0, 0),
        }
    }

    /// Returns true if the problem is about the value of this setting.
    pub(crate) fn is_about(&self, setting: &Setting) -> bool {
        match &self.source {
            Some(Source::Flag(name)) => {
                name.strip_prefix("--").is_some_and(|name| setting.flag().as_deref() == Some(name))
            }
            Some(Source::Env(name)) => *name == setting.variable(),
            Some(Source::File(place)) => place.key.as_deref() == Some(setting.name),
            Some(Source::Default) | None => false,
        }
    }

    pub(crate) fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            None | Some(Source::Default) => f.write_str(&self.message),
            Some(source) => write!(f, "{source}: {}", self.message),
        }
    }
}

/// All errors, one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.0.iter().enumerate() {
            write!(f, "{}{problem}", if at == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// `; did you mean X?` for the candidate that is nearest to the written name, or nothing if none is near.
pub(crate) fn did_you_mean<'a>(written: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(written, candidates).map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested_and_a_far_one_is_not() {
        let names = ["lease", "listen", "retention", "max-request-body", "max-response-body"];
        for (written, expected) in [
            ("leese", Some("lease")),
            ("max_request_body", Some("max-request-body")),
            ("RETENTION", Some("retention")),
            ("max-respnse-body", Some("max-response-body")),
            ("colour", None),
            ("x", None),
        ] {
            assert_eq!(nearest(written, names), expected, "{written}");
        }
        assert_eq!(did_you_mean("leese", names), "; did you mean `lease`?");
        assert_eq!(did_you_mean("colour", names), "");
    }
}
