//! The URL of a database, which is shown without its password, and whose relative paths can be made absolute.

use std::fmt;
use std::io;
use std::path::PathBuf;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::cached;

/// The URL of a database. It may contain a password, so it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct StoreUrl(String);

/// The parameters that name files.
const FILES: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];

impl StoreUrl {
    /// A URL that [`oncegate_postgres::PostgresOptions`] accepts.
    pub(super) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Changes each path in the parameters. A parameter that contains a certificate itself, in PEM, is not changed.
    pub(super) fn change_paths(
        &mut self,
        mut change: impl FnMut(&mut PathBuf) -> io::Result<()>,
    ) -> io::Result<()> {
        let (url, fragment) = self.0.split_at(self.0.find('#').unwrap_or(self.0.len()));
        let Some((base, query)) = url.split_once('?') else { return Ok(()) };
        let mut parameters = Vec::new();
        for parameter in query.split('&') {
            parameters.push(match parameter.split_once('=') {
                Some((name, value)) if FILES.contains(&name) && names_file(value) => {
                    let mut path = PathBuf::from(decoded(value));
                    change(&mut path)?;
                    let path = path.to_str().ok_or_else(|| io::Error::other("the path is not UTF-8"))?;
                    format!("{name}={}", utf8_percent_encode(path, PATH))
                }
                _ => parameter.to_owned(),
            });
        }
        self.0 = format!("{base}?{}{fragment}", parameters.join("&"));
        Ok(())
    }

    /// The whole URL, for connecting.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&safe_url(&self.0))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A URL without its login and its parameters, even if it is malformed. Other texts are not changed.
pub(crate) fn safe_url(text: &str) -> String {
    if cached::is_one(text) {
        return cached::shown(text);
    }
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (login, place) = match rest.rsplit_once('@') {
        Some((_, place)) => ("…@", place),
        None => ("", rest),
    };
    let place = place.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{login}{place}")
}

fn names_file(value: &str) -> bool {
    let text = decoded(value);
    !text.is_empty() && !text.trim_start().starts_with("-----BEGIN")
}

/// The value of a parameter, as it is decoded when the URL is read (application/x-www-form-urlencoded).
fn decoded(value: &str) -> String {
    percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned()
}

/// Encodes all characters but those that RFC 3986 calls unreserved, and slashes.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

#[cfg(test)]
mod tests {
    use super::*;

    fn in_etc(url: &str) -> String {
        let mut url = StoreUrl::new(url);
        url.change_paths(|path| {
            *path = PathBuf::from("/etc").join(&*path);
            Ok(())
        })
        .unwrap();
        url.reveal().to_owned()
    }

    #[test]
    fn the_files_of_a_url_are_changed_and_nothing_else() {
        for (url, changed) in [
            ("postgres://u:p%40@h/d", "postgres://u:p%40@h/d"),
            ("postgres://u@h/d?", "postgres://u@h/d?"),
            ("postgres://u@h/d?sslrootcert=ca.pem", "postgres://u@h/d?sslrootcert=/etc/ca.pem"),
            (
                "postgres://u@h/d?sslkey=a/k&options=-c%20x=y&sslcert=%2Fc%2B",
                "postgres://u@h/d?sslkey=/etc/a/k&options=-c%20x=y&sslcert=/c%2B",
            ),
            (
                "postgres://u@h/d?sslcert=a+b%20%zz%C3%A9&host=x",
                "postgres://u@h/d?sslcert=/etc/a%20b%20%25zz%C3%A9&host=x",
            ),
            ("postgres://u@h/d?sslcert=&sslkey", "postgres://u@h/d?sslcert=&sslkey"),
            ("postgres://u@h/d?sslkey=-----BEGIN+KEY-----", "postgres://u@h/d?sslkey=-----BEGIN+KEY-----"),
            ("postgres://u@h/d?sslkey=k#sslkey=k", "postgres://u@h/d?sslkey=/etc/k#sslkey=k"),
        ] {
            assert_eq!(in_etc(url), changed);
        }
    }
}
