//! The variables of OpenTelemetry (`OTEL_*`), as far as settings of the sidecar mean the same.
//!
//! They count only if the file, `ONCEGATE_*` and the flags say nothing, because they may be meant for all programs of a machine.
//! As the specification demands, an empty value counts as unset, and an unknown value is ignored with a warning.

use std::ffi::OsString;

use super::Entry;
use super::problem::{Problem, Source};
use super::settings::{Raw, Setting, Values};

const DISABLED: &str = "OTEL_SDK_DISABLED";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const RESOURCE: &str = "OTEL_RESOURCE_ATTRIBUTES";
const METRICS_INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const TRACES_EXPORTER: &str = "OTEL_TRACES_EXPORTER";
const METRICS_EXPORTER: &str = "OTEL_METRICS_EXPORTER";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";

/// Reads the variables of OpenTelemetry.
pub(super) fn read(variables: &[(OsString, OsString)], problems: &mut Vec<Problem>) -> Vec<Entry> {
    let value = |name: &str| {
        let found = variables.iter().find(|(known, _)| known == name)?;
        found.1.to_str().map(str::trim).filter(|value| !value.is_empty()).map(str::to_owned)
    };
    if value(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Vec::new();
    }
    let mut entries = Vec::new();
    let mut warnings = Vec::new();
    let mut ignored = |variable: &str, why: String| warnings.push((variable.to_owned(), why));
    let mut set = |name: &str, variable: &str, text: String| {
        if let Some(setting) = Setting::named(name) {
            entries.push(Entry { setting, raw: Raw::Text(text), source: Source::Env(variable.to_owned()) });
        }
    };
    for (name, variable) in [
        ("otlp-endpoint", ENDPOINT),
        ("otlp-headers", HEADERS),
        ("otlp-service-name", SERVICE_NAME),
        ("otlp-resource-attributes", RESOURCE),
    ] {
        if let Some(text) = value(variable) {
            set(name, variable, text);
        }
    }
    if let (Some(protocol), Some(_)) = (value(PROTOCOL), value(ENDPOINT))
        && protocol != "http/protobuf"
    {
        ignored(
            PROTOCOL,
            format!("{protocol:?} is ignored: the sidecar speaks http/protobuf only, usually on port 4318"),
        );
    }
    if let Some(millis) = value(METRICS_INTERVAL) {
        match millis.parse::<u64>() {
            Ok(millis) => set("otlp-metrics-interval", METRICS_INTERVAL, format!("{millis}ms")),
            Err(_) => ignored(
                METRICS_INTERVAL,
                format!("{millis:?} is ignored: it is not a number of milliseconds"),
            ),
        }
    }
    let mut signals = Vec::new();
    let mut is_given = false;
    for (variable, signal, default) in
        [(TRACES_EXPORTER, "traces", true), (METRICS_EXPORTER, "metrics", false)]
    {
        let exporters = value(variable);
        is_given |= exporters.is_some();
        let is_sent = match exporters.as_deref() {
            None => default,
            Some("none") => false,
            Some(exporters) if exporters.split(',').any(|exporter| exporter.trim() == "otlp") => true,
            Some(other) => {
                ignored(variable, format!("{other:?} is ignored: the sidecar knows otlp and none"));
                default
            }
        };
        signals.extend(Some(signal).filter(|_| is_sent));
    }
    // If nothing is to be sent, there is no collector.
    let is_silent = is_given && signals.is_empty();
    if is_given && !is_silent {
        set(
            "otlp-signals",
            if signals.contains(&"traces") { TRACES_EXPORTER } else { METRICS_EXPORTER },
            signals.join(","),
        );
    }
    if let Some(sampler) = value(SAMPLER) {
        let ratio = match sampler.strip_prefix("parentbased_").unwrap_or(&sampler) {
            "always_on" => Some("1".to_owned()),
            "always_off" => Some("0".to_owned()),
            "traceidratio" => Some(value(SAMPLER_ARGUMENT).unwrap_or_else(|| "1".to_owned())),
            _ => None,
        };
        match ratio {
            Some(ratio) => set("trace-sample-ratio", SAMPLER, ratio),
            None => ignored(
                SAMPLER,
                format!("{sampler:?} is ignored: the sidecar knows always_on, always_off and traceidratio"),
            ),
        }
    }
    entries.retain(|entry| !(is_silent && entry.setting.name == "otlp-endpoint"));
    entries.retain(|entry| match (entry.setting.set)(&mut Values::default(), &entry.raw, &entry.source) {
        Ok(()) => true,
        Err(errors) => {
            let why = format!("is ignored: {}", errors.join("; "));
            problems.push(Problem::warning(entry.source.clone(), why));
            false
        }
    });
    let warnings = warnings.into_iter().map(|(variable, why)| Problem::warning(Source::Env(variable), why));
    problems.extend(warnings);
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(variables: &[(&str, &str)]) -> (Vec<(&'static str, String)>, Vec<String>) {
        let mut problems = Vec::new();
        let variables: Vec<_> = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let entries = read(&variables, &mut problems).into_iter().map(|entry| match entry.raw {
            Raw::Text(text) => (entry.setting.name, text),
            Raw::List(_) => panic!("a list"),
        });
        (entries.collect(), problems.iter().map(Problem::to_string).collect())
    }

    #[test]
    fn variables_of_opentelemetry_set_what_means_the_same() {
        let (entries, problems) = read_all(&[
            (ENDPOINT, "http://c:4318"),
            (HEADERS, "a=b"),
            (SERVICE_NAME, "shop"),
            (RESOURCE, "k8s.pod.name=a,b=c"),
            (METRICS_INTERVAL, "5000"),
            (TRACES_EXPORTER, "otlp"),
            (METRICS_EXPORTER, "otlp"),
            (SAMPLER, "parentbased_traceidratio"),
            (SAMPLER_ARGUMENT, "0.25"),
            (PROTOCOL, "http/protobuf"),
        ]);
        assert_eq!(problems, [""; 0]);
        let expected = [
            ("otlp-endpoint", "http://c:4318"),
            ("otlp-headers", "a=b"),
            ("otlp-service-name", "shop"),
            ("otlp-resource-attributes", "k8s.pod.name=a,b=c"),
            ("otlp-metrics-interval", "5000ms"),
            ("otlp-signals", "traces,metrics"),
            ("trace-sample-ratio", "0.25"),
        ];
        assert_eq!(entries, expected.map(|(name, text)| (name, text.to_owned())));
    }

    #[test]
    fn what_is_unknown_is_ignored_with_a_warning_and_what_is_empty_without() {
        let (entries, problems) = read_all(&[
            (ENDPOINT, "http://c:4317"),
            (PROTOCOL, "grpc"),
            (SAMPLER, "jaeger_remote"),
            (METRICS_INTERVAL, "5s"),
            (TRACES_EXPORTER, "zipkin"),
            (METRICS_EXPORTER, ""),
        ]);
        let expected = [("otlp-endpoint", "http://c:4317"), ("otlp-signals", "traces")];
        assert_eq!(entries, expected.map(|(name, text)| (name, text.to_owned())));
        assert_eq!(problems.len(), 4, "{problems:?}");
        assert!(problems.iter().all(|problem| problem.contains("is ignored")));
        assert_eq!(read_all(&[(ENDPOINT, ""), (PROTOCOL, "grpc"), (SAMPLER, "")]), (Vec::new(), Vec::new()));
        // A value that a setting does not take is no reason not to start.
        let (entries, problems) = read_all(&[
            (ENDPOINT, "c:4318"),
            (HEADERS, "whisper"),
            (RESOURCE, "a=b,c"),
            (METRICS_INTERVAL, "1"),
        ]);
        assert_eq!(entries, []);
        assert!(
            problems.len() == 4 && problems.iter().all(|problem| problem.contains("is ignored: ")),
            "{problems:?}"
        );
        assert!(!problems.join("").contains("whisper"));
        let none = read_all(&[(ENDPOINT, "http://c:4318"), (TRACES_EXPORTER, "none")]);
        assert_eq!(none, (Vec::new(), Vec::new()));
        let off = read_all(&[(DISABLED, "TRUE"), (ENDPOINT, "http://c:4318")]);
        assert_eq!(off, (Vec::new(), Vec::new()));
    }
}
