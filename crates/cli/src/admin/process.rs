//! Metrics of the process, under the names that the clients of Prometheus in other languages use.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

/// A registry with the metrics of this process. They have no prefix.
pub(super) fn registry() -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(ProcessCollector { boot: boot_time() }));
    registry
}

/// Reads `/proc` at each scrape. On other systems there are no such metrics.
#[derive(Debug)]
struct ProcessCollector {
    /// The start of the system, in seconds since 1970.
    boot: Option<f64>,
}

/// The fields of `/proc/self/stat` (proc_pid_stat(5)) that are shown.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    cpu_ticks: f64,
    threads: f64,
    /// After the start of the system.
    start_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    fn read(text: &str) -> Option<Self> {
        // The name of the program is in parentheses, and may contain spaces and parentheses.
        let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().collect();
        // The state is the third field of the file, and the first one here.
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// A limit; infinite if there is none.
fn limit(resource: Resource) -> f64 {
    getrlimit(resource).current.map_or(f64::INFINITY, |limit| limit as f64)
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let ticks = clock_ticks_per_second() as f64;
        let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::read(&text));
        let open_files = fs::read_dir("/proc/self/fd").map(|files| files.count().saturating_sub(1)).ok();
        let mut gauge = |name: &str, help, unit: Option<Unit>, value: Option<f64>| match value {
            Some(value) => ConstGauge::new(value).encode(encoder.encode_descriptor(
                name,
                help,
                unit.as_ref(),
                MetricType::Gauge,
            )?),
            None => Ok(()),
        };
        let help = "Start of the process, in seconds since 1970.";
        let start = stat.zip(self.boot).map(|(stat, boot)| boot + stat.start_ticks / ticks);
        gauge("process_start_time", help, Some(Unit::Seconds), start)?;
        let resident = stat.map(|stat| stat.resident_pages * page_size() as f64);
        gauge("process_resident_memory", "Resident memory.", Some(Unit::Bytes), resident)?;
        let virtual_bytes = stat.map(|stat| stat.virtual_bytes);
        gauge("process_virtual_memory", "Virtual memory.", Some(Unit::Bytes), virtual_bytes)?;
        let help = "Limit of the virtual memory; infinite if there is none.";
        gauge("process_virtual_memory_max", help, Some(Unit::Bytes), Some(limit(Resource::As)))?;
        gauge("process_threads", "Threads of the operating system.", None, stat.map(|stat| stat.threads))?;
        gauge("process_open_fds", "Open files.", None, open_files.map(|files| files as f64))?;
        gauge("process_max_fds", "Limit of open files.", None, Some(limit(Resource::Nofile)))?;
        if let Some(stat) = stat {
            let help = "Time of processors that the process used.";
            let unit = Unit::Seconds;
            let cpu = encoder.encode_descriptor("process_cpu", help, Some(&unit), MetricType::Counter)?;
            ConstCounter::new(stat.cpu_ticks / ticks).encode(cpu)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found_behind_any_name_of_the_program() {
        let line = "42 (a) b (c) S 1 42 42 0 -1 4194560 900 0 0 0 150 50 0 0 20 0 7 0 12345 104857600 2560 18446744073709551615 1";
        let expected = Stat {
            cpu_ticks: 200.0,
            threads: 7.0,
            start_ticks: 12345.0,
            virtual_bytes: 104_857_600.0,
            resident_pages: 2560.0,
        };
        assert_eq!(Stat::read(line), Some(expected));
        assert_eq!(Stat::read("42 (a) S 1"), None);
        assert_eq!(Stat::read(""), None);
    }
}
