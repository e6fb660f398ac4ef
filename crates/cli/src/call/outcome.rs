//! The end of a call: an exit code for scripts, and a line for people.

use std::error::Error as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use http::HeaderMap;
use oncegate_client::{Advice, DefiniteResponse, SendError, SendErrorKind, Verdict};
use oncegate_core::{ErrorChain, Timestamp};

use super::args::CallArgs;
use crate::admin::time;

/// The end of a call; of several, the last one in this order counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Done,
    /// The response is definite, but could not be written out.
    Output,
    Refused,
    Usage,
    /// It took no effect, and the same call can be made again.
    Nothing,
    /// It was turned away before the operation, and the same call can be made again when the reason is fixed.
    TurnedAway,
    /// It may have taken effect, and the same call finds out.
    Open,
    /// It may have taken effect, and no call can find out.
    Unknown,
}

/// Every exit code, its meaning, and the reaction of a script. A test compares them with the page docs/guides/calling.md.
const EXIT_CODES: [(End, &str, &str); 8] = [
    (End::Done, "done", "goes on"),
    (
        End::Refused,
        "refused, for good: nothing happened",
        "alerts an operator; a corrected request is another intent",
    ),
    (
        End::Usage,
        "wrong usage, or a journal that cannot be used or has another request under this key, of which nothing happened: nothing \
         was sent",
        "fixes that, then makes the same call",
    ),
    (End::Nothing, "nothing happened, for certain", "makes the same call later"),
    (End::Open, "it may have happened", "makes the same call later, which finds out"),
    (
        End::Unknown,
        "it may have happened, and no further call can find out",
        "alerts an operator, who has to find out",
    ),
    (
        End::Output,
        "done, but there is no response: it could not be written out, or the journal has the intent as done and the service \
         may have forgotten the key",
        "goes on; while the service remembers the key, the same call gets the response",
    ),
    (
        End::TurnedAway,
        "turned away before the operation: nothing happened",
        "fixes the reason, then makes the same call; if that one gets the same response as a replay, another intent",
    ),
];

/// The exit codes, for `--help`.
pub(crate) fn exit_codes() -> String {
    let mut text = "Exit codes, and what a script does:\n".to_owned();
    for (end, meaning, script) in EXIT_CODES {
        text.push_str(&format!("  {}  {meaning}\n     -> {script}\n", end.code()));
    }
    let mut ends = EXIT_CODES.map(|(end, ..)| end);
    ends.sort_unstable_by(|a, b| b.cmp(a));
    let order: Vec<_> = ends.iter().map(|end| end.code().to_string()).collect();
    text.push_str(&format!(
        "With --resume, the worst of several ends counts, in the order {}. With --list, 5 if something cannot be read.",
        order.join(", ")
    ));
    text
}

/// Advice for an intent that was made with other credentials.
pub(super) const OLD_CREDENTIALS: &str = " (give the old ones, or --other-credentials)";

impl End {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Refused => 1,
            Self::Usage => 2,
            Self::Nothing => 3,
            Self::Open => 4,
            Self::Unknown => 5,
            Self::Output => 6,
            Self::TurnedAway => 7,
        }
    }

    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Nothing => "nothing happened; make the same call again later",
            Self::TurnedAway => {
                "turned away before the operation; fix the reason, then make the same call again"
            }
            Self::Open => "it may have happened; make the same call again later",
            Self::Unknown => "it may have happened; an operator has to find out",
            Self::Output => "done, but there is no response to write out",
            Self::Usage => "nothing was sent; fix that, then make the same call again",
        }
    }
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        Self::from(end.code())
    }
}

/// The end of a call with a definite response.
pub(super) fn verdict(verdict: Verdict) -> End {
    match verdict {
        Verdict::Done => End::Done,
        Verdict::Refused(_) => End::Refused,
        Verdict::TurnedAway => End::TurnedAway,
        // The verdict is final, but does not tell what took effect, or the response is lost.
        _ => End::Unknown,
    }
}

/// The end of a call without a definite response.
pub(super) fn end_of(open: &SendError) -> End {
    if open.kind() == SendErrorKind::DoneBefore {
        return End::Output;
    }
    // A directory without the rights has to be fixed; a full disk may get better by itself.
    let source = open.source().and_then(|source| source.downcast_ref::<io::Error>());
    let denied = [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem];
    if open.kind() == SendErrorKind::Journal && source.is_some_and(|error| denied.contains(&error.kind())) {
        return End::Usage;
    }
    match (open.may_have_taken_effect(), open.is_resumable()) {
        (false, true) => End::Nothing,
        (true, true) => End::Open,
        (true, false) => End::Unknown,
        // Another key, or the removal of the stored request, is needed: later calls would end the same way.
        (false, false)
            if matches!(open.kind(), SendErrorKind::Unsendable | SendErrorKind::JournalConflict) =>
        {
            End::Usage
        }
        (false, false) => End::Nothing,
    }
}

/// The reason, with its causes.
pub(super) fn why(open: &SendError) -> String {
    let mut words = format!(": {}", ErrorChain(open));
    if open.kind() == SendErrorKind::OtherCredentials {
        words.push_str(OLD_CREDENTIALS);
    }
    if open.kind() == SendErrorKind::JournalConflict && !open.may_have_taken_effect() {
        words.push_str(" (another key: another --intent or --key)");
    }
    if open.response().is_some_and(|response| is_host_differs(response.headers())) {
        words
            .push_str(" (the key was used at another host: make the call with the address of the first one)");
    }
    if let Some(Ok(since)) = open.come_back_at().map(|at| at.duration_since(UNIX_EPOCH)) {
        let millis = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        words.push_str(&format!("; not before {}", time(Timestamp::from_millis(millis))));
    }
    words
}

/// True for a refusal because the first request with the key went to another host.
fn is_host_differs(headers: &HeaderMap) -> bool {
    let status = headers.get("idempotency-status").and_then(|value| value.to_str().ok());
    status.is_some_and(|status| status.split(';').any(|part| part.trim() == "problem=host-differs"))
}

/// A hint about the reason, by the status.
fn hint(status: u16) -> &'static str {
    match status {
        401 | 403 | 407 | 511 => "; check the credentials and their rights",
        404 | 405 | 421 | 501 => "; check the address; with another method it is another intent",
        411 | 413 | 417 | 431 => "; a limit of the service or of a hop before it",
        426 | 505 => "; the service requires another protocol",
        300..=399 => "; the service redirects to another address",
        _ => "",
    }
}

/// The destination of the body. It is opened before the request is sent: an error after that would come too late.
pub(super) struct Sink(Option<File>);

impl Sink {
    pub(super) fn open(args: &CallArgs) -> Result<Self, String> {
        let Some(path) = &args.output else { return Ok(Self(None)) };
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        Ok(Self(Some(file.map_err(|error| format!("--output {}: {error}", path.display()))?)))
    }

    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(file) => {
                if file.metadata()?.is_file() {
                    file.set_len(0)?;
                }
                file.write_all(head)?;
                file.write_all(body)
            }
            None => {
                let mut out = io::stdout().lock();
                out.write_all(head)?;
                out.write_all(body)?;
                out.flush()
            }
        }
    }
}

/// Writes the response to its destination, and the message about it to the standard error.
pub(super) fn say(args: &CallArgs, sink: &mut Sink, sent: Result<DefiniteResponse, SendError>) -> End {
    let (end, words, response) = match sent {
        Ok(outcome) => {
            let end = verdict(outcome.verdict);
            let status = outcome.response.status();
            let more = match outcome.verdict {
                Verdict::Refused(Advice::NewKey) => {
                    "; the key belongs to another request, which may have happened"
                }
                Verdict::Refused(Advice::FixRequest) => "; a corrected request takes a key of its own",
                Verdict::TurnedAway => hint(status.as_u16()),
                Verdict::Failed => "; the service keeps this failure, and does not report what took effect",
                Verdict::Unreplayable => "; it was processed, and its response is no longer available",
                _ => "",
            };
            let replayed = if outcome.replayed { ", replayed" } else { "" };
            let words = format!("{} ({status}, attempts: {}{replayed}){more}", end.words(), outcome.attempts);
            (end, words, Some(outcome.response))
        }
        Err(open) => {
            let end = end_of(&open);
            (end, format!("{}{}", end.words(), why(&open)), open.into_response())
        }
    };
    if end != End::Done && !(args.silent && end == End::Refused) {
        complain!("oncegate: {words}");
    } else if args.verbose {
        complain!("* {words}");
    }
    let Some(response) = response else { return end };
    let mut head = Vec::new();
    if args.include || args.verbose {
        let status = response.status();
        let line = format!(
            "{:?} {} {}",
            response.version(),
            status.as_u16(),
            status.canonical_reason().unwrap_or_default()
        );
        head.extend_from_slice(line.trim_end().as_bytes());
        head.extend_from_slice(b"\r\n");
        for (name, value) in response.headers() {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                head.extend_from_slice(part);
            }
        }
        head.extend_from_slice(b"\r\n");
    }
    if args.verbose {
        for line in String::from_utf8_lossy(&head).lines().filter(|line| !line.is_empty()) {
            complain!("< {line}");
        }
    }
    let head = if args.include { head.as_slice() } else { &[] };
    if let Err(error) = sink.write(head, response.body()) {
        complain!("oncegate: {}, and the response could not be written: {error}", end.words());
        // A script that reads only the exit code must not assume that it got the response.
        return if end == End::Done { End::Output } else { end };
    }
    end
}
