//! The text formats of metrics: OpenMetrics 1.0.0, and version 0.0.4 of the older format of Prometheus.

use http::header::{self, HeaderMap};

/// The form in which metrics are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exposition {
    OpenMetrics,
    Prometheus,
}

impl Exposition {
    /// The form that the client prefers (RFC 9110, 12.5.1); without a preference, the older one. A client that accepts neither
    /// gets the older one, too, which a person can read.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let fields = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let ranges: Vec<_> =
            fields.flat_map(|field| split_outside_quotes(field, ',')).filter_map(MediaRange::read).collect();
        let quality = |form: Self| {
            // The most specific range counts, whatever the others say.
            let fitting = ranges.iter().filter_map(|range| Some((range.precedence(form)?, range.quality)));
            fitting.max_by_key(|(precedence, quality)| (*precedence, *quality))
        };
        // A client that lists only `*/*`, as curl and browsers do, has no preference.
        let open_metrics =
            quality(Self::OpenMetrics).filter(|(precedence, _)| *precedence > Precedence::Anything);
        let prometheus = quality(Self::Prometheus);
        match (open_metrics, prometheus) {
            (Some((_, open_metrics)), prometheus)
                if open_metrics > 0 && open_metrics >= prometheus.map_or(0, |(_, quality)| quality) =>
            {
                Self::OpenMetrics
            }
            _ => Self::Prometheus,
        }
    }

    const fn media_type(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::OpenMetrics => ("application", "openmetrics-text", "1.0.0"),
            Self::Prometheus => ("text", "plain", "0.0.4"),
        }
    }

    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts a text in OpenMetrics to this form.
    pub(super) fn of_open_metrics(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => prometheus(&text),
        }
    }
}

/// The precedence of a range: a more specific one counts more. Ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Precedence {
    /// `*/*`
    Anything,
    /// `text/*`
    Type,
    /// `text/plain`
    Subtype,
    /// `text/plain;version=0.0.4`
    Version,
}

/// One element of `Accept`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MediaRange<'a> {
    kind: &'a str,
    subtype: &'a str,
    version: Option<&'a str>,
    /// In thousandths.
    quality: u16,
}

impl<'a> MediaRange<'a> {
    /// `None` if it is malformed: then it counts for nothing.
    fn read(text: &'a str) -> Option<Self> {
        let mut parts = split_outside_quotes(text, ';').map(str::trim);
        let (kind, subtype) = parts.next()?.split_once('/')?;
        let mut range = Self { kind, subtype, version: None, quality: 1000 };
        for part in parts.filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=')?;
            let (name, value) = (name.trim_end(), value.trim_start());
            if name.eq_ignore_ascii_case("q") {
                range.quality = thousandths(value)?;
                // What follows are no parameters of the media type.
                break;
            }
            if name.eq_ignore_ascii_case("version") {
                range.version = Some(value.trim_matches('"'));
            }
        }
        Some(range)
    }

    /// The precedence of this range for a form; `None` if the form is not in it. Parameters other than the version (`charset`,
    /// `escaping`) are ignored: the names of these metrics need no escaping.
    fn precedence(&self, form: Exposition) -> Option<Precedence> {
        let (kind, subtype, version) = form.media_type();
        let fits = |wanted: &str, is: &str| wanted.eq_ignore_ascii_case(is);
        match (self.kind, self.subtype) {
            ("*", "*") => Some(Precedence::Anything),
            (wanted, "*") => fits(wanted, kind).then_some(Precedence::Type),
            (wanted, sub) if fits(wanted, kind) && fits(sub, subtype) => match self.version {
                None => Some(Precedence::Subtype),
                Some(wanted) => (wanted == version).then_some(Precedence::Version),
            },
            _ => None,
        }
    }
}

/// A `qvalue`: `0`, `1` or a number between with at most three decimals.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if decimals.len() > 3 || !decimals.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let decimals: u16 = format!("{decimals:0<3}").parse().ok()?;
    match (whole, decimals) {
        ("0", decimals) => Some(decimals),
        ("1", 0) => Some(1000),
        _ => None,
    }
}

/// Splits a field at a character that does not stand in a quoted string.
fn split_outside_quotes(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    text.split(move |c| {
        let was_escaped = std::mem::take(&mut is_escaped);
        match c {
            '\\' if is_quoted && !was_escaped => is_escaped = true,
            '"' if !was_escaped => is_quoted = !is_quoted,
            _ => {}
        }
        c == separator && !is_quoted
    })
}

/// Converts a text to the older format. There, the name of a counter ends in `_total` in its descriptions, too, an info is a
/// gauge whose name ends in `_info`, and there are no units and no end mark.
fn prometheus(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = Some(rest);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            if let Some((_, words)) = help.take().and_then(|help| help.split_once(' ')) {
                out.extend(["# HELP ", name, suffix, " ", words, "\n"]);
            }
            out.extend(["# TYPE ", name, suffix, " ", kind, "\n"]);
        } else if !line.starts_with('#') {
            out.extend([line, "\n"]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_the_form_that_it_prefers() {
        const PROMETHEUS_2: &str = "application/openmetrics-text;version=1.0.0;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        const PROMETHEUS_2_42: &str = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        const PROMETHEUS_3: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,\
             text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        const PROMETHEUS_3_NATIVE: &str = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,\
             application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (accept, form) in [
            ("", Exposition::Prometheus),
            ("*/*", Exposition::Prometheus),
            ("text/plain", Exposition::Prometheus),
            ("application/openmetrics-text", Exposition::OpenMetrics),
            (PROMETHEUS_2, Exposition::OpenMetrics),
            (PROMETHEUS_2_42, Exposition::OpenMetrics),
            (PROMETHEUS_3, Exposition::OpenMetrics),
            (PROMETHEUS_3_NATIVE, Exposition::OpenMetrics),
            ("text/plain;q=0.9, application/openmetrics-text; q=0.1", Exposition::Prometheus),
            ("text/plain;q=0.5, application/openmetrics-text;q=0.501", Exposition::OpenMetrics),
            ("application/openmetrics-text;q=0", Exposition::Prometheus),
            ("APPLICATION/OpenMetrics-Text; Q=1.000", Exposition::OpenMetrics),
            ("application/*;q=0.9, text/plain;q=0.1", Exposition::OpenMetrics),
            // The more specific range counts, even if it is worth less.
            ("application/openmetrics-text;q=0.1, application/*, text/plain;q=0.5", Exposition::Prometheus),
            (
                "application/openmetrics-text;version=1.0.0;q=0, application/openmetrics-text, */*",
                Exposition::Prometheus,
            ),
            // Another version is another format.
            (
                "application/openmetrics-text;version=0.0.1, text/plain;version=0.0.4;q=0.1",
                Exposition::Prometheus,
            ),
            ("application/openmetrics-text;version=\"1.0.0\"", Exposition::OpenMetrics),
            ("text/html;x=\"a, application/openmetrics-text\"", Exposition::Prometheus),
            // No quality: such a range counts for nothing.
            ("application/openmetrics-text;q=NaN", Exposition::Prometheus),
            ("application/openmetrics-text;q=1.1", Exposition::Prometheus),
            ("application/openmetrics-text;q=-1", Exposition::Prometheus),
            ("application/openmetrics-text;q=0.5000", Exposition::Prometheus),
            ("image/png", Exposition::Prometheus),
        ] {
            let mut headers = HeaderMap::new();
            if !accept.is_empty() {
                headers.insert(header::ACCEPT, accept.parse().unwrap());
            }
            assert_eq!(Exposition::of(&headers), form, "{accept}");
        }
    }

    #[test]
    fn names_and_types_are_those_of_the_older_format() {
        let text = "# HELP a Counted.\n# TYPE a counter\na_total{x=\"# y\"} 1\n# HELP b Facts.\n# TYPE b info\n\
             b_info{v=\"1\"} 1\n# HELP c_seconds Took.\n# TYPE c_seconds histogram\n# UNIT c_seconds seconds\n\
             c_seconds_sum 0.0\nc_seconds_count 0\nc_seconds_bucket{le=\"+Inf\"} 0\n# EOF\n";
        let expected = "# HELP a_total Counted.\n# TYPE a_total counter\na_total{x=\"# y\"} 1\n\
             # HELP b_info Facts.\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n\
             # HELP c_seconds Took.\n# TYPE c_seconds histogram\n\
             c_seconds_sum 0.0\nc_seconds_count 0\nc_seconds_bucket{le=\"+Inf\"} 0\n";
        assert_eq!(prometheus(text), expected);
    }
}
