//! Histograms of durations that every request updates: a few atomic additions, and no lock that threads share.
//!
//! The metrics library has histograms behind a lock, and cannot write exemplars for histograms of its users. So these write
//! their own text, in the format of OpenMetrics.

use std::fmt::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_http::TraceRef;

/// The upper bounds of the buckets, in microseconds, ascending.
pub(super) type Bounds = &'static [u64];

/// From 50 microseconds, a write to memory, to 10 seconds, a disk in trouble.
pub(super) const STORE_BOUNDS: Bounds = &[
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 2_500_000,
    10_000_000,
];

/// From a millisecond to a minute.
pub(super) const REQUEST_BOUNDS: Bounds = &[
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    15_000_000, 60_000_000,
];

/// The durations of one series.
#[derive(Debug)]
pub(super) struct Durations {
    bounds: Bounds,
    /// The number of durations in each bucket alone. The last bucket has no bound.
    buckets: Box<[Bucket]>,
    /// An overflow would take 584 years.
    sum_nanos: AtomicU64,
}

#[derive(Debug, Default)]
struct Bucket {
    count: AtomicU64,
    exemplar: Mutex<Option<Exemplar>>,
}

/// One duration of a bucket, with the trace in which it was measured.
#[derive(Clone, Debug)]
struct Exemplar {
    trace_id: Box<str>,
    seconds: f64,
    at: SystemTime,
}

impl Durations {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            buckets: (0..=bounds.len()).map(|_| Bucket::default()).collect(),
            sum_nanos: AtomicU64::new(0),
        }
    }

    /// Adds a duration. That of a trace whose spans are recorded becomes the exemplar of its bucket.
    pub(super) fn observe(&self, took: Duration, trace: Option<TraceRef<'_>>) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let place = self.bounds.partition_point(|bound| bound.saturating_mul(1000) < nanos);
        self.sum_nanos.fetch_add(nanos, Ordering::Relaxed);
        let Some(bucket) = self.buckets.get(place) else { return };
        bucket.count.fetch_add(1, Ordering::Relaxed);
        if let Some(trace) = trace.filter(|trace| trace.is_sampled)
            // A thread that would have to wait leaves the exemplar of the other one.
            && let Ok(mut exemplar) = bucket.exemplar.try_lock()
        {
            let (trace_id, seconds) = (trace.trace_id.into(), took.as_secs_f64());
            *exemplar = Some(Exemplar { trace_id, seconds, at: SystemTime::now() });
        }
    }

    fn is_empty(&self) -> bool {
        self.buckets.iter().all(|bucket| bucket.count.load(Ordering::Relaxed) == 0)
    }

    /// Writes the samples of the family `name` with these labels (`a="b",c="d"`, or nothing).
    fn write(&self, out: &mut String, name: &str, labels: &str, has_exemplars: bool) -> fmt::Result {
        let comma = if labels.is_empty() { "" } else { "," };
        let braces = |labels: &str| if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let mut total = 0;
        let mut lines = String::new();
        for (place, bucket) in self.buckets.iter().enumerate() {
            total += bucket.count.load(Ordering::Relaxed);
            let le = self.bounds.get(place).map_or_else(|| "+Inf".to_owned(), |micros| seconds_text(*micros));
            write!(lines, "{name}_bucket{{{labels}{comma}le=\"{le}\"}} {total}")?;
            let exemplar = bucket.exemplar.try_lock().ok().and_then(|exemplar| exemplar.clone());
            if let Some(Exemplar { trace_id, seconds, at }) = exemplar.filter(|_| has_exemplars) {
                let at = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                write!(lines, " # {{trace_id=\"{trace_id}\"}} {seconds} {at:.3}")?;
            }
            lines.push('\n');
        }
        let sum = Duration::from_nanos(self.sum_nanos.load(Ordering::Relaxed)).as_secs_f64();
        writeln!(out, "{name}_sum{} {sum:?}", braces(labels))?;
        // The sum of the buckets, so that it equals the last one even while others count.
        writeln!(out, "{name}_count{} {total}", braces(labels))?;
        out.push_str(&lines);
        Ok(())
    }
}

/// The number of seconds as OpenMetrics writes it: with a point.
fn seconds_text(micros: u64) -> String {
    let seconds = Duration::from_micros(micros).as_secs_f64();
    let text = seconds.to_string();
    if text.contains('.') { text } else { format!("{text}.0") }
}

/// Writes the text of families of durations.
pub(super) struct FamilyWriter<'a> {
    pub(super) out: &'a mut String,
    pub(super) has_exemplars: bool,
}

impl FamilyWriter<'_> {
    /// Writes a family: `name` without the prefix and the unit, and its series with their labels. A series that is `optional`
    /// is left out until it has a duration.
    pub(super) fn write<'d>(
        &mut self,
        (name, help): (&str, &str),
        optional: bool,
        series: impl IntoIterator<Item = (String, &'d Durations)>,
    ) -> fmt::Result {
        let name = format!("oncegate_{name}_seconds");
        write!(self.out, "# HELP {name} {help}.\n# TYPE {name} histogram\n# UNIT {name} seconds\n")?;
        for (labels, durations) in series {
            if !(optional && durations.is_empty()) {
                durations.write(self.out, &name, &labels, self.has_exemplars)?;
            }
        }
        Ok(())
    }
}

/// One label, as `name="value"`.
pub(super) fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn text(durations: &Durations, labels: &str, has_exemplars: bool) -> String {
        let mut out = String::new();
        durations.write(&mut out, "x_seconds", labels, has_exemplars).unwrap();
        out
    }

    #[test]
    fn a_duration_counts_in_its_bucket_and_in_all_above() {
        let durations = Durations::new(&[50, 1_000_000]);
        for micros in [50, 51, 1_000_000, 1_000_001] {
            durations.observe(Duration::from_micros(micros), None);
        }
        assert_eq!(
            text(&durations, "", true),
            "x_seconds_sum 2.000102\nx_seconds_count 4\nx_seconds_bucket{le=\"0.00005\"} 1\n\
             x_seconds_bucket{le=\"1.0\"} 3\nx_seconds_bucket{le=\"+Inf\"} 4\n"
        );
    }

    #[test]
    fn the_last_recorded_trace_is_the_exemplar_of_its_bucket() {
        let durations = Durations::new(&[1_000_000]);
        let trace = |is_sampled| Some(TraceRef { trace_id: TRACE, is_sampled });
        durations.observe(Duration::from_millis(250), trace(true));
        durations.observe(Duration::from_secs(2), trace(false));
        let shown = text(&durations, "a=\"b\"", true);
        let line = shown.lines().find(|line| line.contains('#')).unwrap();
        let start = format!("x_seconds_bucket{{a=\"b\",le=\"1.0\"}} 1 # {{trace_id=\"{TRACE}\"}} 0.25 ");
        assert!(line.starts_with(&start), "{shown}");
        assert_eq!(shown.matches('#').count(), 1, "{shown}");
        assert!(!text(&durations, "a=\"b\"", false).contains('#'));
    }

    #[test]
    fn values_of_labels_are_escaped() {
        assert_eq!(label("route", "/a\"\\\n"), r#"route="/a\"\\\n""#);
    }
}
