//! The text formats of metrics: OpenMetrics, and the older format of Prometheus.

use http::header::{self, HeaderMap};

/// The form in which metrics are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exposition {
    OpenMetrics,
    Prometheus,
}

impl Exposition {
    /// The form that the client prefers; without a preference, the older one.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let accepts: Vec<_> =
            headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
        let weight = |media_type: &str| {
            let ranges = accepts.iter().flat_map(|value| value.split(','));
            let weights = ranges.filter_map(|range| {
                let mut parts = range.split(';').map(str::trim);
                let is_meant = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(media_type));
                let q = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
                is_meant.then(|| q.map_or(1.0, |q| q.trim().parse::<f32>().unwrap_or(0.0)))
            });
            weights.fold(0.0_f32, f32::max)
        };
        let open_metrics = weight("application/openmetrics-text");
        if open_metrics > 0.0 && open_metrics >= weight("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
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
        for (accept, form) in [
            ("", Exposition::Prometheus),
            ("*/*", Exposition::Prometheus),
            ("text/plain", Exposition::Prometheus),
            ("application/openmetrics-text", Exposition::OpenMetrics),
            (PROMETHEUS_2, Exposition::OpenMetrics),
            ("text/plain;q=0.9, application/openmetrics-text; q=0.1", Exposition::Prometheus),
            ("application/openmetrics-text;q=0", Exposition::Prometheus),
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
