//! The URL of a database, which is shown without its password, and whose relative paths can be made absolute.

use std::fmt;
use std::io;
use std::path::PathBuf;

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
                    format!("{name}={}", encoded(path))
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

/// A URL without its password and its parameters, even if it is malformed. Other texts are not changed.
pub(crate) fn safe_url(text: &str) -> String {
    if cached::is_one(text) {
        return cached::shown(text);
    }
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (user, place) = match rest.rsplit_once('@') {
        Some((user, place)) => (user.split([':', '/']).next().unwrap_or_default(), place),
        None => ("", rest),
    };
    let place = place.split(['?', '#']).next().unwrap_or_default();
    let at = if user.is_empty() { "" } else { "@" };
    format!("{scheme}://{user}{at}{place}")
}

fn names_file(value: &str) -> bool {
    let text = decoded(value);
    !text.is_empty() && !text.trim_start().starts_with("-----BEGIN")
}

/// The value of a parameter, as it is decoded when the URL is read (application/x-www-form-urlencoded).
fn decoded(value: &str) -> String {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escaped = match (first, after) {
            (b'%', [high, low, ..]) => digit(high).zip(digit(low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        bytes.push(match (escaped, first) {
            (Some(byte), _) => byte,
            (None, b'+') => b' ',
            (None, byte) => *byte,
        });
        rest = if escaped.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn encoded(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

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
