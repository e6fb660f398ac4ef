//! Writes lines in a thread of its own, so that a slow reader of them delays no request.

use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

/// The most lines that wait to be written.
const MAX_WAITING: usize = 8192;

/// Limits the time that the end of the process waits for the last lines.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(2);

/// Writes lines in the order in which they come. If too many wait, further ones are dropped and counted. All clones write
/// to one thread.
#[derive(Clone, Debug)]
pub(crate) struct LineWriter {
    entries: SyncSender<Entry>,
    dropped: Counter,
}

#[derive(Debug)]
enum Entry {
    /// With its line feed.
    Line(Vec<u8>),
    /// Writes all lines before it now, and confirms that.
    Flush(SyncSender<()>),
}

impl LineWriter {
    /// Starts the thread. Lines that are dropped are counted in `dropped`.
    pub(crate) fn start(
        thread: &str,
        out: impl Write + Send + 'static,
        dropped: Counter,
    ) -> io::Result<Self> {
        let (entries, waiting) = sync_channel(MAX_WAITING);
        let write = move || {
            // If the reader is gone, only the lines are lost.
            let _gone = write_all(&waiting, &mut BufWriter::new(out));
        };
        std::thread::Builder::new().name(thread.to_owned()).spawn(write)?;
        Ok(Self { entries, dropped })
    }

    /// Queues a line, which includes its line feed. Never waits.
    pub(crate) fn write(&self, line: Vec<u8>) {
        if self.entries.try_send(Entry::Line(line)).is_err() {
            self.dropped.inc();
        }
    }

    /// The number of lines that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    /// Waits, for a bounded time, until every line is written.
    pub(crate) fn flush(&self) {
        let (done, is_done) = sync_channel(1);
        if self.entries.try_send(Entry::Flush(done)).is_ok() {
            let _late = is_done.recv_timeout(CLOSING_TIMEOUT);
        }
    }
}

fn write_all(waiting: &Receiver<Entry>, out: &mut impl Write) -> io::Result<()> {
    loop {
        let entry = match waiting.try_recv() {
            Ok(entry) => entry,
            Err(TryRecvError::Disconnected) => return out.flush(),
            Err(TryRecvError::Empty) => {
                out.flush()?;
                match waiting.recv() {
                    Ok(entry) => entry,
                    Err(_) => return Ok(()),
                }
            }
        };
        match entry {
            Entry::Line(line) => out.write_all(&line)?,
            Entry::Flush(done) => {
                out.flush()?;
                let _gone = done.try_send(());
            }
        }
    }
}
