//! The settings of OTLP, and the readers of their values.

use std::fmt;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use http::uri::{PathAndQuery, Scheme, Uri};
use percent_encoding::percent_decode_str;

use crate::config::{Upstream, shown_url};

/// Everything that the exporter needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OtlpOptions {
    pub(crate) endpoint: OtlpEndpoint,
    pub(crate) headers: OtlpHeaders,
    pub(crate) signals: Vec<Signal>,
    pub(crate) service_name: String,
    pub(crate) resource: ResourceAttributes,
    pub(crate) metrics_interval: Duration,
}

/// One kind of data that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Traces,
    Metrics,
}

impl Signal {
    pub(crate) const ALL: [Self; 2] = [Self::Traces, Self::Metrics];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
        }
    }
}

/// The address of a collector, to which the path of each signal is added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OtlpEndpoint {
    pub(crate) server: Upstream,
    /// Without the slash at the end.
    base: String,
}

impl OtlpEndpoint {
    /// Returns true if others cannot read what is sent: it is encrypted, or stays on this machine.
    pub(crate) fn is_private(&self) -> bool {
        let host = self.server.authority.host();
        self.server.scheme == Scheme::HTTPS || matches!(host, "localhost" | "127.0.0.1" | "[::1]")
    }

    pub(super) fn path(&self, signal: Signal) -> Option<PathAndQuery> {
        format!("{}/v1/{}", self.base, signal.as_str()).parse().ok()
    }
}

/// Reads the address of a collector.
pub(crate) fn endpoint(text: &str) -> Result<OtlpEndpoint, String> {
    const ALLOWED: &str =
        "write the address of the collector for OTLP over HTTP, such as \"http://127.0.0.1:4318\"";
    // First of all, because the other errors repeat the value.
    if text.contains('@') {
        return Err(format!(
            "the URL has a user name or password; put credentials into ONCEGATE_OTLP_HEADERS; {ALLOWED}"
        ));
    }
    let shown = shown_url(text);
    let uri: Uri = text.parse().map_err(|_| format!("{shown:?} is not a URL; {ALLOWED}"))?;
    let parts = uri.into_parts();
    let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
        return Err(format!("{shown:?} is not a URL with a scheme and a host; {ALLOWED}"));
    };
    if !["http", "https"].contains(&scheme.as_str()) || authority.host().is_empty() {
        return Err(format!("{shown:?} is not an http or https URL; {ALLOWED}"));
    }
    let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    if path.query().is_some() {
        return Err(format!("{shown:?} has a query, which a collector does not read; {ALLOWED}"));
    }
    let base = path.path().trim_end_matches('/');
    if let Some(own) =
        Signal::ALL.into_iter().find_map(|signal| base.strip_suffix(&format!("/v1/{}", signal.as_str())))
    {
        let meant = format!("{scheme}://{authority}{own}");
        return Err(format!(
            "{shown:?} has the path of one signal, which the sidecar adds itself; write {meant:?}"
        ));
    }
    Ok(OtlpEndpoint { server: Upstream { scheme, authority: authority.clone() }, base: base.to_owned() })
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.server, self.base)
    }
}

/// The fields that are sent to the collector, which may hold credentials. Their values are shown nowhere.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct OtlpHeaders(pub(super) Vec<(HeaderName, HeaderValue)>);

impl OtlpHeaders {
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for OtlpHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

/// Reads `NAME=VALUE,…`, with values in percent-encoding. No error repeats a value.
pub(crate) fn headers(text: &str) -> Result<OtlpHeaders, String> {
    const ALLOWED: &str =
        "write NAME=VALUE, several separated by commas, such as \"authorization=Bearer%20TOKEN\"";
    let mut headers = Vec::new();
    for (number, pair) in text.split(',').map(str::trim).enumerate().filter(|(_, pair)| !pair.is_empty()) {
        let number = number + 1;
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| format!("the pair number {number} has no \"=\"; {ALLOWED}"))?;
        let name = name.trim();
        let named = HeaderName::try_from(name).map_err(|_| {
            format!("the name of the pair number {number} is no name of a header field; {ALLOWED}")
        })?;
        let value = percent_decode_str(value.trim()).collect::<Vec<_>>();
        let mut value = HeaderValue::try_from(value).map_err(|_| {
            format!("the value of {named} has a character that a header field cannot contain; {ALLOWED}")
        })?;
        value.set_sensitive(true);
        headers.push((named, value));
    }
    if headers.is_empty() { Err(format!("the value is empty; {ALLOWED}")) } else { Ok(OtlpHeaders(headers)) }
}

/// Further facts about this process, such as its pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceAttributes(pub(super) Vec<(String, String)>);

/// Reads `NAME=VALUE`, with the value in percent-encoding.
pub(crate) fn attribute(text: &str) -> Result<(String, String), String> {
    const ALLOWED: &str = "write NAME=VALUE, such as \"deployment.environment.name=production\"";
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} has no \"=\"; {ALLOWED}"))?;
    let (name, value) = (name.trim(), value.trim());
    if name.is_empty() {
        return Err(format!("{text:?} has no name; {ALLOWED}"));
    }
    let value = percent_decode_str(value)
        .decode_utf8()
        .map_err(|_| format!("{text:?}: the value is not valid UTF-8; {ALLOWED}"))?;
    Ok((name.to_owned(), value.into_owned()))
}

impl FromIterator<(String, String)> for ResourceAttributes {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(attributes: I) -> Self {
        Self(attributes.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_signal_is_added_to_the_endpoint() {
        for (text, traces) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318 /v1/traces"),
            ("https://collector.example/", "https://collector.example /v1/traces"),
            ("http://c:4318/otlp/", "http://c:4318/otlp /otlp/v1/traces"),
        ] {
            let read = endpoint(text).unwrap();
            assert_eq!(format!("{read} {}", read.path(Signal::Traces).unwrap()), traces);
        }
        for (text, why) in [
            ("127.0.0.1:4318", "scheme and a host"),
            ("grpc://c:4317", "http or https"),
            ("http://c:4318/v1/traces", "write \"http://c:4318\""),
            ("http://c?a=b", "query"),
            ("", "not a URL"),
        ] {
            let error = endpoint(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(!endpoint("http://me:secret@c").unwrap_err().contains("secret"));
    }

    #[test]
    fn headers_are_read_and_never_shown() {
        let read = headers("Authorization=Bearer%20s3cret, x-tenant=shop").unwrap();
        assert_eq!(read.0.len(), 2);
        assert_eq!(read.0[0].1.as_bytes(), b"Bearer s3cret");
        assert_eq!(format!("{read:?}"), "[\"authorization\", \"x-tenant\"]");
        for bad in ["s3cret", "a b=s3cret", "x=s3cret%0a", ",", ""] {
            let error = headers(bad).unwrap_err();
            assert!(!error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn attributes_are_read() {
        assert_eq!(attribute("a.b = c%20d").unwrap(), ("a.b".to_owned(), "c d".to_owned()));
        assert!(attribute("a").is_err() && attribute("=b").is_err() && attribute("a=%ff").is_err());
    }
}
