//! Metrics as OTLP sends them (`ExportMetricsServiceRequest`): those of `/metrics`, under the same names.
//!
//! The text for Prometheus is the source, so that both ways show the same. It is converted by the rules of OpenTelemetry for
//! OpenMetrics: the name of a family stays (a counter without `_total`, which the other direction adds again), units are
//! `s` and `By`, and an info is a gauge of 1.

use std::time::SystemTime;

use super::Resource;
use super::wire::MessageWriter;

/// `AGGREGATION_TEMPORALITY_CUMULATIVE`
const CUMULATIVE: u64 = 2;

/// A family of the text.
#[derive(Debug, Default, PartialEq)]
struct Family<'a> {
    name: &'a str,
    help: &'a str,
    kind: &'a str,
    unit: &'a str,
    samples: Vec<Sample<'a>>,
}

/// One line of the text.
#[derive(Debug, PartialEq)]
struct Sample<'a> {
    name: &'a str,
    labels: Vec<(&'a str, String)>,
    value: f64,
}

/// The body of a request to the collector with these metrics, which are a text in OpenMetrics without exemplars.
pub(super) fn encode(resource: &Resource, text: &str, (start, now): (SystemTime, SystemTime)) -> Vec<u8> {
    let times = (nanos(start), nanos(now));
    let mut message = MessageWriter::default();
    message.message(1, |metrics| {
        metrics.message(1, |message| resource.write(message));
        metrics.message(2, |scope| {
            scope.message(1, Resource::write_scope);
            for family in families(text) {
                family.write(scope, times);
            }
        });
    });
    message.into_bytes()
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn families(text: &str) -> Vec<Family<'_>> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (Some(what), Some(name)) = (words.next(), words.next()) else { continue };
            let rest = words.next().unwrap_or_default();
            if families.last().is_none_or(|family| family.name != name) {
                families.push(Family { name, ..Family::default() });
            }
            let Some(family) = families.last_mut() else { continue };
            match what {
                "HELP" => family.help = rest,
                "TYPE" => family.kind = rest,
                "UNIT" => family.unit = rest,
                _ => {}
            }
        } else if let (Some(family), Some(sample)) = (families.last_mut(), Sample::read(line)) {
            family.samples.push(sample);
        }
    }
    families
}

impl<'a> Sample<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let name_ends = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at_checked(name_ends)?;
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            while !rest.starts_with('}') {
                let (label, after) = rest.trim_start_matches(',').split_once("=\"")?;
                let (value, after) = quoted(after)?;
                labels.push((label, value));
                rest = after;
            }
            rest = rest.strip_prefix('}')?;
        }
        Some(Self { name, labels, value: rest.trim().parse().ok()? })
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, value)| value.as_str())
    }
}

/// The text up to the closing quote, without its escapes, and the rest behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((place, c)) = chars.next() {
        match c {
            '"' => return Some((value, text.get(place + 1..)?)),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            c => value.push(c),
        }
    }
    None
}

impl Family<'_> {
    fn write(&self, scope: &mut MessageWriter, times: (u64, u64)) {
        // A value that is not a number is not known yet.
        if self.samples.iter().all(|sample| sample.value.is_nan()) {
            return;
        }
        scope.message(2, |metric| {
            let suffix = if self.kind == "info" { "_info" } else { "" };
            metric.text(1, &format!("{}{suffix}", self.name));
            metric.text(2, self.help);
            metric.text(
                3,
                match self.unit {
                    "seconds" => "s",
                    "bytes" => "By",
                    _ => "",
                },
            );
            match self.kind {
                "counter" => metric.message(7, |sum| {
                    self.write_numbers(sum, times);
                    sum.number(2, CUMULATIVE);
                    sum.number(3, 1);
                }),
                "histogram" => metric.message(9, |histogram| {
                    self.write_histograms(histogram, times);
                    histogram.number(2, CUMULATIVE);
                }),
                _ => metric.message(5, |gauge| self.write_numbers(gauge, times)),
            }
        });
    }

    fn write_numbers(&self, points: &mut MessageWriter, (start, now): (u64, u64)) {
        for sample in self.samples.iter().filter(|sample| !sample.value.is_nan()) {
            points.message(1, |point| {
                write_labels(point, 7, &sample.labels);
                if self.kind == "counter" {
                    point.fixed64(2, start);
                }
                point.fixed64(3, now);
                point.double_always(4, sample.value);
            });
        }
    }

    /// Each histogram is its sum, its count and its buckets, one after the other.
    fn write_histograms(&self, points: &mut MessageWriter, (start, now): (u64, u64)) {
        let mut samples = self.samples.iter().peekable();
        while let Some(sum) = samples.next() {
            let Some(count) = samples.next() else { return };
            let (mut bounds, mut buckets, mut below) = (Vec::new(), Vec::new(), 0.0);
            while let Some((sample, bound)) =
                samples.peek().and_then(|sample| Some((*sample, sample.label("le")?)))
            {
                // Those of Prometheus count all values up to the bound, those of OTLP only the ones above the bound before.
                buckets.push((sample.value - below).max(0.0) as u64);
                below = sample.value;
                bounds.extend(bound.parse::<f64>().ok().filter(|bound| bound.is_finite()));
                samples.next();
            }
            points.message(1, |point| {
                write_labels(point, 9, &sum.labels);
                point.fixed64(2, start);
                point.fixed64(3, now);
                point.fixed64(4, count.value as u64);
                point.double_always(5, sum.value);
                point.packed(6, buckets.iter().map(|count| count.to_le_bytes()));
                point.packed(7, bounds.iter().map(|bound| bound.to_le_bytes()));
            });
        }
    }
}

fn write_labels(point: &mut MessageWriter, field: u32, labels: &[(&str, String)]) {
    for (name, value) in labels {
        point.message(field, |pair| {
            pair.text(1, name);
            pair.message(2, |any| any.text_always(1, value));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_its_labels_and_their_escapes() {
        let sample = Sample::read(r#"a_total{x="1",y="q\"\\\n}"} 2.5"#).unwrap();
        assert_eq!((sample.name, sample.value), ("a_total", 2.5));
        assert_eq!(sample.labels, [("x", "1".to_owned()), ("y", "q\"\\\n}".to_owned())]);
        assert_eq!(Sample::read("a 1").unwrap().labels, []);
        assert!(Sample::read("a NaN").unwrap().value.is_nan());
        for bad in ["", "a", "a{", "a{x} 1", "a{x=\"1} 2", "a one"] {
            assert_eq!(Sample::read(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_text_is_read_family_by_family() {
        let text = "# HELP a A thing.\n# TYPE a counter\na_total 1\n# HELP b_bytes B.\n# TYPE b_bytes gauge\n# UNIT b_bytes bytes\n\
                    b_bytes 2\n# HELP c C.\n# TYPE c gauge\n# EOF\n";
        let families = families(text);
        assert_eq!(
            families.iter().map(|f| (f.name, f.kind, f.unit)).collect::<Vec<_>>(),
            [("a", "counter", ""), ("b_bytes", "gauge", "bytes"), ("c", "gauge", ""),]
        );
        assert_eq!(families[0].help, "A thing.");
        assert_eq!(families[1].samples[0].value, 2.0);
    }
}
