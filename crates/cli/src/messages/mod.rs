//! `oncegate dead-letters` and `oncegate outbox`: messages that wait for an operator, in a database or through a sidecar.
//!
//! Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 the database or the sidecar cannot be reached.

mod access;
mod print;

use std::io::{self, StdoutLock, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use oncegate_postgres::messages::RequeueTerms;
use serde_json::Value;

use self::access::{Backend, MessageAccess};
use crate::admin::messages::{
    MessageAction, MessageChange, MessageKind, accepted, outbox_state, read_broker_window,
};
use crate::keys::{AuditArgs, Confirm, Failure, ask, confirmation, env};

/// Lists, shows, requeues and drops dead letters.
#[derive(Args, Debug)]
pub(crate) struct DeadLettersArgs {
    #[command(flatten)]
    access: MessageAccess,
    #[command(subcommand)]
    command: DeadLettersCommand,
}

#[derive(Subcommand, Debug)]
enum DeadLettersCommand {
    /// Lists dead letters, the newest first, and counts all by consumer, topic and reason
    #[command(visible_alias = "list")]
    Ls(LetterFilter),
    /// Shows one dead letter, and the reasons why it should not be published again
    Show {
        /// The number of the dead letter, as a listing shows it
        number: u64,
        /// Shows its payload, and the values of its headers, too
        #[arg(long)]
        payload: bool,
        #[command(flatten)]
        window: Window,
    },
    /// Publishes messages again, through the outbox: their consumer processes them as new ones, once
    ///
    /// In one transaction the dead letter and its receipt go, and the message is written into the outbox. A relay of the outbox
    /// must run, and publish to the broker and the topic from which the message came. All consumers of that topic get it, and
    /// those that processed it recognise it, as long as they keep its receipt.
    Requeue {
        /// The numbers of the dead letters
        #[arg(required = true, value_name = "NUMBER")]
        numbers: Vec<u64>,
        /// Accepts a reason against it that `show` names: outcome-unknown, new-identity, old. Give it several times
        #[arg(long, value_name = "WORD")]
        accept: Vec<String>,
        #[command(flatten)]
        window: Window,
        #[command(flatten)]
        why: AuditArgs,
    },
    /// Deletes dead letters. Their messages stay dead as long as their receipts are kept
    Drop(Changed),
    /// Lists the changes that operators made to dead letters and to the outbox, newest first
    Audit(AuditPage),
}

/// Lists, shows, requeues and drops messages of the outbox.
#[derive(Args, Debug)]
pub(crate) struct OutboxArgs {
    #[command(flatten)]
    access: MessageAccess,
    #[command(subcommand)]
    command: OutboxCommand,
}

#[derive(Subcommand, Debug)]
enum OutboxCommand {
    /// Lists messages, the oldest first, and counts all by state
    #[command(visible_alias = "list")]
    Ls {
        /// Only messages in this state: refused by the broker; failing, which a relay tries again; waiting; or all
        #[arg(long, value_name = "STATE", default_value = "refused")]
        state: String,
        /// The most messages to list, from 1 to 1000
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: u32,
        /// Continues a listing after the message with this number
        #[arg(long, value_name = "NUMBER")]
        after: Option<u64>,
    },
    /// Shows one message
    Show {
        /// The number of the message, as a listing shows it
        number: u64,
        /// Shows its payload, and the values of its headers, too
        #[arg(long)]
        payload: bool,
    },
    /// Has refused messages published again, each at its place among those with its order key
    Requeue(Changed),
    /// Deletes refused messages, which are then never published; those behind them go on
    Drop(Changed),
    /// Lists the changes that operators made to dead letters and to the outbox, newest first
    Audit(AuditPage),
}

#[derive(Args, Debug)]
struct LetterFilter {
    /// Only dead letters of this consumer
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only dead letters from this topic
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Only dead letters with this reason: attempts-exhausted, rejected, no-identity, identity-reused, outcome-unknown, or a word
    /// of the consumer's own
    #[arg(long, value_name = "WORD")]
    with_reason: Option<String>,
    /// Only dead letters since this time in UTC, such as 2026-02-28T12:34, or for at most so long, such as 2h
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only dead letters before this time, or for at least so long
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// The most dead letters to list, from 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Continues a listing before the dead letter with this number
    #[arg(long, value_name = "NUMBER")]
    before: Option<u64>,
}

#[derive(Args, Debug)]
struct Window {
    /// The time for which the broker drops a message whose identifier it knows: 2m for NATS, 5m for a FIFO queue of Amazon SQS,
    /// unless they are configured otherwise; 0s for RabbitMQ and Kafka
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = read_broker_window)]
    broker_window: Duration,
}

/// Messages, and the reason for their change.
#[derive(Args, Debug)]
struct Changed {
    /// The numbers of the messages, as a listing shows them
    #[arg(required = true, value_name = "NUMBER")]
    numbers: Vec<u64>,
    #[command(flatten)]
    why: AuditArgs,
}

#[derive(Args, Debug)]
struct AuditPage {
    /// The most entries to list, from 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Continues before the entry with this number
    #[arg(long, value_name = "NUMBER")]
    before: Option<u64>,
}

/// Runs `oncegate dead-letters`. The exit code reports how it ended.
pub(crate) fn run_dead_letters(args: &DeadLettersArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| dead_letters(args, env, confirmation(), out).await)
}

/// Runs `oncegate outbox`. The exit code reports how it ended.
pub(crate) fn run_outbox(args: &OutboxArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| outbox(args, env, confirmation(), out).await)
}

async fn dead_letters(
    args: &DeadLettersArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let as_json = args.access.as_json();
    let flags = args.access.flags();
    let backend = args.access.backend(&env)?;
    match &args.command {
        DeadLettersCommand::Ls(filter) => {
            check_limit(filter.limit)?;
            let before = filter.before.map(|number| number.to_string());
            let page =
                backend.dead_letters(&filter.parameters(before.as_deref()), filter.limit as usize).await?;
            print::dead_letters(&page, as_json, out)
        }
        DeadLettersCommand::Show { number, payload, window } => {
            let view = backend.dead_letter(*number, window.broker_window, *payload).await?;
            print::dead_letter(&view, &flags, as_json, out)
        }
        DeadLettersCommand::Requeue { numbers, accept, window, why } => {
            let accepted = accepted(accept).map_err(|words| Failure::Usage(format!("--{words}")))?;
            let terms = RequeueTerms { accepted, broker_window: window.broker_window };
            let question = "publish them again through the outbox: their consumer processes them, and so does every other consumer of \
                            their topics that has no receipt of them";
            let shown = async |number| backend.dead_letter(number, window.broker_window, false).await;
            confirmed(numbers, confirm, why.yes, question, shown, print::dead_letter_summary).await?;
            let note = why.json(&env);
            let change = MessageChange {
                terms,
                ..MessageChange::new(MessageKind::DeadLetter, MessageAction::Requeue)
            };
            each(numbers, as_json, out, async |number| backend.change(number, &change, &note).await).await
        }
        DeadLettersCommand::Drop(Changed { numbers, why }) => {
            let question = "delete them for ever, with their payloads; their messages are not processed";
            let shown = async |number| backend.dead_letter(number, Duration::ZERO, false).await;
            confirmed(numbers, confirm, why.yes, question, shown, print::dead_letter_summary).await?;
            let note = why.json(&env);
            let change = MessageChange::new(MessageKind::DeadLetter, MessageAction::Drop);
            each(numbers, as_json, out, async |number| backend.change(number, &change, &note).await).await
        }
        DeadLettersCommand::Audit(page) => audit(&backend, page, as_json, out).await,
    }
}

async fn outbox(
    args: &OutboxArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let as_json = args.access.as_json();
    let flags = args.access.flags();
    let backend = args.access.backend(&env)?;
    let shown = async |number| backend.outbox_message(number, false).await;
    match &args.command {
        OutboxCommand::Ls { state, limit, after } => {
            check_limit(*limit)?;
            let only = outbox_state(state).map_err(|words| Failure::Usage(format!("--{words}")))?;
            let page = backend.outbox(only, *after, *limit as usize).await?;
            print::outbox(&page, only, as_json, out)
        }
        OutboxCommand::Show { number, payload } => {
            let view = backend.outbox_message(*number, *payload).await?;
            print::outbox_message(&view, &flags, as_json, out)
        }
        OutboxCommand::Requeue(Changed { numbers, why }) => {
            let question = "publish them again";
            confirmed(numbers, confirm, why.yes, question, shown, print::outbox_summary).await?;
            let note = why.json(&env);
            let change = MessageChange::new(MessageKind::Outbox, MessageAction::Requeue);
            each(numbers, as_json, out, async |number| backend.change(number, &change, &note).await).await
        }
        OutboxCommand::Drop(Changed { numbers, why }) => {
            let question =
                "delete them for ever: they are never published, and those behind them go on without them";
            confirmed(numbers, confirm, why.yes, question, shown, print::outbox_summary).await?;
            let note = why.json(&env);
            let change = MessageChange::new(MessageKind::Outbox, MessageAction::Drop);
            each(numbers, as_json, out, async |number| backend.change(number, &change, &note).await).await
        }
        OutboxCommand::Audit(page) => audit(&backend, page, as_json, out).await,
    }
}

async fn audit(
    backend: &Backend,
    page: &AuditPage,
    as_json: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    check_limit(page.limit)?;
    let view = backend.audit(page.before, page.limit as usize).await?;
    print::audit(&view, as_json, out)
}

/// Shows the messages on a terminal, and asks before they are changed.
async fn confirmed(
    numbers: &[u64],
    confirm: Option<Confirm<'_>>,
    is_sure: bool,
    question: &str,
    show: impl AsyncFn(u64) -> Result<Value, Failure>,
    summary: impl Fn(&Value) -> String,
) -> Result<(), Failure> {
    let Some(confirm) = confirm.filter(|_| !is_sure) else { return Ok(()) };
    let mut text = String::new();
    for number in numbers {
        text.push_str(&summary(&show(*number).await?));
        text.push('\n');
    }
    if confirm(&format!("{text}{question}? [y/N] "))? {
        Ok(())
    } else {
        Err(Failure::Refused("not confirmed; nothing was changed".to_owned()))
    }
}

/// Changes messages one after the other. One that is refused does not keep the others from their change; the first failure is
/// returned, and the others are printed as they happen.
async fn each(
    numbers: &[u64],
    as_json: bool,
    out: &mut impl Write,
    change: impl AsyncFn(u64) -> Result<Value, Failure>,
) -> Result<(), Failure> {
    let mut failed: Option<String> = None;
    for (at, number) in numbers.iter().enumerate() {
        match change(*number).await {
            Ok(done) => print::changed(*number, &done, as_json, out)?,
            Err(Failure::Refused(words)) if numbers.len() > 1 => {
                if let Some(earlier) = failed.replace(words) {
                    complain!("error: {earlier}");
                }
            }
            // The others would fail in the same way.
            Err(failure) => {
                let left = numbers.len() - at;
                if let Some(earlier) = failed {
                    complain!("error: {earlier}");
                }
                if numbers.len() > 1 {
                    complain!("{left} of {} messages were not changed", numbers.len());
                }
                return Err(failure);
            }
        }
    }
    failed.map_or(Ok(()), |words| Err(Failure::Refused(words)))
}

fn check_limit(limit: u32) -> Result<(), Failure> {
    if (1..=1000).contains(&limit) {
        Ok(())
    } else {
        Err(Failure::Usage(format!("--limit {limit}: from 1 to 1000 is allowed")))
    }
}

impl LetterFilter {
    /// The parameters of the admin API.
    fn parameters<'a>(&'a self, before: Option<&'a str>) -> [(&'static str, Option<&'a str>); 6] {
        [
            ("consumer", self.consumer.as_deref()),
            ("topic", self.topic.as_deref()),
            ("reason", self.with_reason.as_deref()),
            ("since", self.since.as_deref()),
            ("until", self.until.as_deref()),
            ("before", before),
        ]
    }
}

/// Prints a member that is missing as nothing.
fn is_missing(value: &Value) -> bool {
    matches!(value, Value::Null) || value.as_str().is_some_and(str::is_empty)
}

/// The error of a write.
fn wrote(result: io::Result<()>) -> Result<(), Failure> {
    result.map_err(Failure::Output)
}
