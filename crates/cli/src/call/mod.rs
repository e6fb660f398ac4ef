//! `oncegate call`: sends one intent from a script or a cron job, or the pending intents of a journal.

mod args;
mod outcome;
mod request;
mod transport;

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use oncegate_client::{Api, Client, DefiniteResponse, JournalDir, PendingIntent, ResumeError, RetryPolicy};
use oncegate_core::ErrorChain;
use oncegate_seal::Keyring;

pub(crate) use self::args::CallArgs;
pub(crate) use self::outcome::exit_codes;
use self::outcome::{End, Sink};
use self::transport::Wire;
pub(crate) use self::transport::trusting_file;
use crate::admin::time;
use crate::config::{parse_seal_keys, seal_keys_in};

/// Runs the command. The exit code reports how it ended.
pub(crate) fn run(args: &CallArgs) -> ExitCode {
    if std::env::var_os(crate::log::VARIABLE).is_some()
        && let Err(error) = crate::log::start(crate::log::LogFormat::Text)
    {
        complain!("error: {error}");
        return End::Usage.into();
    }
    match crate::block_on(execute(args)) {
        Ok(Ok(end)) => end.into(),
        Ok(Err(usage)) => {
            complain!("error: {usage}");
            End::Usage.into()
        }
        Err(error) => {
            complain!("error: {error}");
            End::Nothing.into()
        }
    }
}

/// Runs the command. `Err` is wrong usage: nothing was recorded and nothing was sent.
async fn execute(args: &CallArgs) -> Result<End, String> {
    if args.list || args.resume {
        let Some(path) = &args.journal else { return Err("give the journal: --journal DIR".to_owned()) };
        // A mistyped name must not look like a journal without pending intents.
        if fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Err(format!("--journal {}: there is no such directory", path.display()));
        }
        return if args.list { Ok(list(&journal(args, path)?).await) } else { resume(args, path).await };
    }
    if args.plain && args.intent.is_some() && args.journal.is_none() {
        return Err(
            "--intent has no effect with --plain: no key is sent, and nothing else remembers the intent. \
             Give --journal DIR, or leave out --intent"
                .to_owned(),
        );
    }
    call(args).await
}

fn journal(args: &CallArgs, path: &Path) -> Result<JournalDir, String> {
    let opened = JournalDir::open(path);
    let opened = opened.map_err(|error| format!("--journal {}: {}", path.display(), ErrorChain(&error)))?;
    let opened = opened.with_finished_retention(args.keep_finished);
    let opened = match journal_keys(args)? {
        Some(keys) => opened.with_seal_keys(keys),
        None => opened,
    };
    Ok(if args.other_credentials { opened.with_other_credentials() } else { opened })
}

/// The variable with the keys of the journal. It is no flag, because other users can see command lines.
const JOURNAL_KEYS: &str = "ONCEGATE_JOURNAL_KEYS";

/// The keys of the journal.
fn journal_keys(args: &CallArgs) -> Result<Option<Keyring>, String> {
    let keys = std::env::var_os(JOURNAL_KEYS);
    match (&args.journal_key_file, keys) {
        (Some(_), Some(_)) => Err(format!(
            "--journal-key-file and {JOURNAL_KEYS} are both set; the keys must come from one source, so leave one out"
        )),
        (Some(file), None) => {
            let keys = seal_keys_in(file);
            keys.map(Some).map_err(|why| format!("--journal-key-file {}: {why}", file.display()))
        }
        (None, Some(keys)) => {
            let keys = keys.into_string().map_err(|_| "it is not valid UTF-8".to_owned());
            let keys = keys.and_then(|keys| parse_seal_keys(&keys.replace(',', "\n")));
            keys.map(Some).map_err(|why| format!("{JOURNAL_KEYS}: {why}"))
        }
        (None, None) => Ok(None),
    }
}

async fn call(args: &CallArgs) -> Result<End, String> {
    let request = request::read(args, &mut io::stdin().lock())?;
    let mut client = client(args)?;
    let mut sink = Sink::open(args)?;
    let has_journal = args.journal.is_some();
    // Last, so that an error in the other arguments creates no directory.
    if let Some(path) = &args.journal {
        client = client.with_journal(Arc::new(journal(args, path)?));
    }
    let key = request.intent.key().as_str().unwrap_or_default().to_owned();
    let print_key = || {
        let hint =
            if has_journal { "; the journal keeps it" } else { "; to send it again, give it with --key" };
        complain!("key: {key}{hint}");
    };
    let is_key_new = request.is_new_key && !args.plain;
    if is_key_new && !args.silent {
        print_key();
    }
    if args.verbose {
        complain!("> {} {}", request.intent.method(), request.intent.uri());
    }
    let sent = client.send(&request.intent).await;
    let end = outcome::say(args, &mut sink, sent);
    // Without the key, the call could not be repeated.
    if is_key_new && args.silent && !matches!(end, End::Done | End::Refused) {
        print_key();
    }
    Ok(end)
}

async fn resume(args: &CallArgs, path: &Path) -> Result<End, String> {
    let fields = request::fields(args)?;
    let client = client(args)?;
    let journal = journal(args, path)?;
    let resume = journal.resume_pending(&client).await;
    let resume =
        resume.map_err(|error| format!("--journal {}: {}", journal.path().display(), ErrorChain(&error)))?;
    let resume = resume.with_concurrency(usize::from(args.concurrency)).map_err(|error| error.to_string())?;
    let mut resume = resume.with_fields(move |_| Ok(fields.clone()));
    let mut worst = End::Done;
    while let Some(end) = resume.next().await {
        let end = match end {
            Err(damaged) => {
                complain!("error: {damaged}; the request in it is unknown");
                // If the file can be read again, the next --resume finds the outcome.
                if damaged.is_unreadable { End::Open } else { End::Unknown }
            }
            Ok(resumed) => {
                let name = name(&resumed.pending);
                match resumed.end {
                    Ok(response) => resumed_line(args, &name, &response),
                    Err(ResumeError::Gone) => End::Done,
                    Err(ResumeError::Sending(open)) => {
                        let end = outcome::end_of(&open);
                        complain!("{name}: {}{}", end.words(), outcome::why(&open));
                        end
                    }
                    Err(error) => {
                        let hint = match error {
                            ResumeError::OtherCredentials => outcome::OLD_CREDENTIALS,
                            _ => "",
                        };
                        complain!("{name}: {}{hint}", ErrorChain(&error));
                        if resumed.pending.maybe_sent { End::Open } else { End::Nothing }
                    }
                }
            }
        };
        worst = worst.max(end);
    }
    Ok(worst)
}

fn resumed_line(args: &CallArgs, name: &str, outcome: &DefiniteResponse) -> End {
    let end = outcome::verdict(outcome.verdict);
    if !args.silent {
        let replayed = if outcome.replayed { ", replayed" } else { "" };
        complain!("{name}: {} ({}{replayed})", end.words(), outcome.response.status());
    }
    end
}

/// Lists the journal, one line for each intent.
async fn list(journal: &JournalDir) -> End {
    let found = match journal.pending().await {
        Ok(found) => found,
        Err(error) => {
            complain!("error: --journal {}: {}", journal.path().display(), ErrorChain(&error));
            return End::Usage;
        }
    };
    let mut out = io::stdout().lock();
    let mut end = End::Done;
    if found.is_empty() {
        complain!("no pending requests in {}", journal.path().display());
    }
    for one in found {
        let printed = match one {
            Ok(pending) => {
                let state = match (pending.in_flight, pending.maybe_sent) {
                    (true, _) => "in flight",
                    (false, true) => "may have happened",
                    // Also if it was sent and turned away before the operation.
                    (false, false) => "nothing happened",
                };
                writeln!(out, "{}, {state}, {}", name(&pending), pending.path.display())
            }
            Err(damaged) => {
                end = End::Unknown;
                writeln!(out, "cannot be read, {damaged}")
            }
        };
        match printed {
            Ok(()) => {}
            // `oncegate call --list | head` is not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return end,
            Err(error) => {
                complain!("error: the list could not be written: {error}");
                return end.max(End::Output);
            }
        }
    }
    end
}

/// The description of a pending intent in a list. It leaves out the query, which may be confidential.
fn name(pending: &PendingIntent) -> String {
    let uri = &pending.uri;
    let at = time(pending.created_at);
    let host = uri.authority().map_or("", |authority| authority.as_str());
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{at} {} {host}{} key {}", pending.method, uri.path(), pending.key.as_str().unwrap_or_default())
}

fn client(args: &CallArgs) -> Result<Client<Wire>, String> {
    let mut policy = RetryPolicy::default()
        .with_attempt_timeout(args.max_time)
        .with_deadline(args.deadline)
        .with_key_lifetime(args.key_lifetime);
    if let Some(attempts) = args.attempts() {
        policy = policy.with_max_attempts(attempts).map_err(|error| format!("--attempts: {error}"))?;
    }
    if args.plain {
        policy = policy.with_api(Api::Plain);
    }
    let is_https = args.url.as_ref().is_none_or(|url| url.scheme_str() == Some("https"));
    let client = Client::new(transport::wire(args.cacert.as_deref(), is_https, args.connect_timeout)?);
    Ok(client.with_policy(policy).with_carrier(request::carrier(args)))
}
