//! The stores with ten million records against the same with ten thousand.

use std::process::Command;

use super::servers::{program, scratch};
use crate::run::{Result, output, target};
use crate::test::install_postgres;

const FEW: u64 = 10_000;

/// The largest size of a record while stores are filled: on the disk, and in the memory store. Measured, and a
/// margin.
const DISK_PER_RECORD: u64 = 1500;
const MEMORY_PER_RECORD: u64 = 800;

pub(super) fn run(records: u64) -> Result<String> {
    install_postgres()?;
    let mut text = String::new();
    let free = free_disk()?;
    if free < records * DISK_PER_RECORD {
        return Err(format!("{records} records need {} MiB of disk", (records * DISK_PER_RECORD) >> 20));
    }
    let directory = scratch("growth")?;
    let (small, large) = (directory.join("small"), directory.join("large"));
    let (few, many) = (FEW.to_string(), records.to_string());
    let benches = || Command::new(program("oncegate-benches"));
    text.push_str("embedded store, small responses, 64 in flight\n\n```json\n");
    for (store, records) in [(&small, &few), (&large, &many)] {
        text.push_str(&output(benches().arg("fill").arg(store).arg(records))?);
    }
    for (store, records) in [(&small, &few), (&large, &many)] {
        text.push_str(&output(benches().arg("memory-of").arg(store).arg(records))?);
    }
    text.push_str("```\n\n");
    text.push_str(&output(benches().arg("growth").arg(&small).arg(&few).arg(&large).arg(&many))?);
    let purged = (records / 10).to_string();
    text.push_str(
        "\nlatency of a claim and its completion, 64 in flight, while expired records are purged\n\n",
    );
    text.push_str(&output(benches().arg("purge-latency").arg(directory.join("purged")).arg(&purged))?);
    text.push_str("\nmemory store, small responses, two threads\n\n");
    if free_memory()? < records * MEMORY_PER_RECORD {
        text.push_str("not measured: there is not enough memory\n");
    } else {
        text.push_str(&output(benches().arg("growth-memory").arg(&few).arg(&many))?);
    }
    text.push_str("\nPostgreSQL, small responses, 64 in flight\n\n");
    text.push_str(&output(benches().arg("growth-postgres").arg(&few).arg(&many))?);
    Ok(text)
}

fn free_disk() -> Result<u64> {
    std::fs::create_dir_all(target()).map_err(|error| error.to_string())?;
    let text = output(Command::new("df").args(["--output=avail", "--block-size=1"]).arg(target()))?;
    text.lines().nth(1).and_then(|line| line.trim().parse().ok()).ok_or(format!("df said {text}"))
}

fn free_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").map_err(|error| error.to_string())?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes * 1024).ok_or_else(|| "no MemAvailable".into())
}
