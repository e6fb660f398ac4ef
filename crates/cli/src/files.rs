//! Reads files that operators name: no more than a limit, and for no longer than a limit.
//!
//! A wrong name may be that of a device without an end, or of a pipe that no program writes to.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use crate::config::size_text;

/// The largest text of settings, rules or operations.
pub(crate) const MAX_TEXT: u64 = 16 * 1024 * 1024;

/// The largest file with one secret.
pub(crate) const MAX_SECRET: u64 = 64 * 1024;

/// The largest file of certificates, or of lists of revoked ones, which may be long.
pub(crate) const MAX_PEM: u64 = 64 * 1024 * 1024;

/// The time for a pipe. Its writer may be a program that asks a server for a secret.
const PIPE_TIMEOUT: Duration = Duration::from_secs(30);

/// Reads a file of at most `max` bytes. A pipe has some time.
///
/// # Errors
/// If the file cannot be read, is larger, or is a pipe that has not ended in time.
pub(crate) fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_within(path, max, PIPE_TIMEOUT)
}

/// The same for a UTF-8 text.
///
/// # Errors
/// As for [`read`], and if it is no such text.
pub(crate) fn read_text(path: &Path, max: u64) -> io::Result<String> {
    let text = String::from_utf8(read(path, max)?);
    text.map_err(|_| io::Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}

fn read_within(path: &Path, max: u64, timeout: Duration) -> io::Result<Vec<u8>> {
    // Otherwise, to open a pipe waits for its writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let until = Instant::now() + timeout;
    let (mut bytes, mut part) = (Vec::new(), vec![0; 64 * 1024]);
    loop {
        match (&file).read(&mut part) {
            // Also a pipe that no program has opened for writing yet.
            Ok(0) if bytes.is_empty() && is_pipe(&file) => match wait(&file, until) {
                Ok(events) if !events.contains(PollFlags::IN) => return Ok(bytes),
                Ok(_) => {}
                Err(error) => return Err(error),
            },
            Ok(0) => return Ok(bytes),
            Ok(count) => {
                bytes.extend_from_slice(part.get(..count).unwrap_or_default());
                if bytes.len() as u64 > max {
                    return Err(io::Error::other(format!("it is larger than {}", size_text(max))));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => drop(wait(&file, until)?),
            Err(error) => return Err(error),
        }
    }
}

fn is_pipe(file: &File) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    file.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo())
}

/// Waits until there is something to read, or the end.
fn wait(file: &File, until: Instant) -> io::Result<PollFlags> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut waiting = [PollFd::new(file, PollFlags::IN)];
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut waiting, Some(&timeout)) {
            Ok(0) => return Err(io::Error::new(ErrorKind::TimedOut, "the pipe has not ended in time")),
            Ok(_) => return Ok(waiting.first().map_or(PollFlags::empty(), PollFd::revents)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn pipe(directory: &Path) -> std::path::PathBuf {
        let path = directory.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    #[test]
    fn a_file_has_a_limit_also_if_it_has_no_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("text");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        assert_eq!(read_text(&path, 4).unwrap_err().to_string(), "it is larger than 4 bytes");
        assert_eq!(read(Path::new("/dev/null"), 4).unwrap(), b"");
        let endless = read(Path::new("/dev/zero"), 1024).unwrap_err();
        assert_eq!(endless.to_string(), "it is larger than 1KiB");
    }

    #[test]
    fn a_pipe_is_read_until_its_writer_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = pipe(directory.path());
        let writer = path.clone();
        let writer = std::thread::spawn(move || {
            let mut file = OpenOptions::new().write(true).open(writer).unwrap();
            file.write_all(b"one ").unwrap();
            std::thread::yield_now();
            file.write_all(&[b'x'; 200_000]).unwrap();
        });
        assert_eq!(read(&path, MAX_TEXT).unwrap().len(), 200_004);
        writer.join().unwrap();
    }

    #[test]
    fn a_pipe_without_a_writer_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = read_within(&pipe(directory.path()), 4, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.to_string(), "the pipe has not ended in time");
    }
}
