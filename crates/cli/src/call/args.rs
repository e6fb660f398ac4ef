//! The flags of `oncegate call`, which are those of curl if curl has the same feature.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use http::header::HeaderName;
use http::{Method, Uri};

use crate::config::duration;

/// Sends one request until there is a definite response.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("payload").args(["data", "data_binary", "json"]))]
#[command(group = clap::ArgGroup::new("work").args(["resume", "list"]))]
pub(crate) struct CallArgs {
    /// The method, such as POST
    #[arg(required_unless_present = "work", conflicts_with = "work", value_parser = method)]
    pub(super) method: Option<Method>,
    /// curl's flag for the method, which is the first argument here.
    #[arg(short = 'X', long = "request", hide = true, value_parser = no_request)]
    _request: Option<Method>,
    /// The address, with http:// or https://
    #[arg(required_unless_present = "work", conflicts_with = "work", value_parser = url)]
    pub(super) url: Option<Uri>,

    /// The intent of the request, such as order-123. The key is derived from it, so it is the same in every call and
    /// on every machine. A corrected request is another intent, such as order-123-v2
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["key", "work"], value_parser = NonEmptyStringValueParser::new(), help_heading = "Key")]
    pub(super) intent: Option<String>,
    /// The key itself. Without --intent and --key a new key is made and written to the standard error
    #[arg(long, conflicts_with = "work", help_heading = "Key")]
    pub(super) key: Option<String>,
    /// The header field that carries the key
    #[arg(long, value_name = "NAME", default_value = "Idempotency-Key", value_parser = header_name, help_heading = "Key")]
    pub(super) carrier: HeaderName,
    /// Writes the key in quotes, as the draft of the header field demands; most services accept it without quotes
    #[arg(long, help_heading = "Key")]
    pub(super) quoted: bool,
    /// The time for which the service remembers a key: a request that may have been sent is not sent again under an
    /// older key
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration, help_heading = "Key")]
    pub(super) key_lifetime: Duration,
    /// For a service without keys: a request that it may have processed is not sent again
    #[arg(long, conflicts_with_all = ["key", "quoted"], help_heading = "Key")]
    pub(super) plain: bool,

    /// Keeps the intent in this directory until there is a definite response, so that it survives this process
    #[arg(
        long,
        value_name = "DIR",
        env = "ONCEGATE_JOURNAL",
        hide_env_values = true,
        help_heading = "Journal"
    )]
    pub(super) journal: Option<PathBuf>,
    /// Encrypts the entries of the journal with the first key in this file, and opens those of all its keys: one key in each
    /// line, as `oncegate seal-key new` prints it. ONCEGATE_JOURNAL_KEYS can hold the keys instead, with commas between them.
    /// Entries in plain text are read, too
    #[arg(
        long,
        value_name = "FILE",
        env = "ONCEGATE_JOURNAL_KEY_FILE",
        hide_env_values = true,
        help_heading = "Journal"
    )]
    pub(super) journal_key_file: Option<PathBuf>,
    /// Sends the pending requests of the journal. It contains no credentials (-u, Authorization, Cookie, X-Api-Key and the like):
    /// give them again
    #[arg(long, help_heading = "Journal", conflicts_with_all = ["payload", "output", "include"])]
    pub(super) resume: bool,
    /// With --resume: the most requests that are sent at the same time. One at a time, the oldest goes first; with more, the
    /// service gets them in any order
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "method", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Journal")]
    pub(super) concurrency: u16,
    /// Continues with other credentials than before. Only for a service that identifies its callers in another way: if it
    /// identifies them by the credential, as Oncegate does by default, a request that was executed before executes again
    #[arg(long, requires = "journal", help_heading = "Journal")]
    pub(super) other_credentials: bool,
    /// The time for which the journal remembers a finished intent: the same --intent is not sent again
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = duration, help_heading = "Journal")]
    pub(super) keep_finished: Duration,
    /// Lists the pending requests of the journal, and sends nothing
    #[arg(long, help_heading = "Journal", conflicts_with_all = ["payload", "output", "include"])]
    pub(super) list: bool,

    /// A header field, such as "Accept: text/plain", or @FILE with one field per line
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE|@FILE", help_heading = "Request")]
    pub(super) headers: Vec<String>,
    /// A body of the media type application/json: the text itself, @FILE, or @- for the standard input
    #[arg(long, value_name = "TEXT|@FILE|-", allow_hyphen_values = true, help_heading = "Request")]
    pub(super) json: Option<String>,
    /// A form body: the text itself, or @FILE without its line ends; several are joined by &
    #[arg(
        short = 'd',
        long,
        value_name = "TEXT|@FILE|-",
        allow_hyphen_values = true,
        help_heading = "Request"
    )]
    pub(super) data: Vec<String>,
    /// A body, byte for byte: the text itself, @FILE, or @- for the standard input
    #[arg(long, value_name = "TEXT|@FILE|-", allow_hyphen_values = true, help_heading = "Request")]
    pub(super) data_binary: Option<String>,
    /// User and password. Other users can see command lines: better use -H @FILE with the field Authorization, or the environment
    #[arg(
        short = 'u',
        long,
        value_name = "USER:PASSWORD",
        env = "ONCEGATE_CALL_USER",
        hide_env_values = true,
        help_heading = "Request"
    )]
    pub(super) user: Option<String>,
    /// Trusts the certificates in this file, in PEM, and no others
    #[arg(long, value_name = "FILE", help_heading = "Request")]
    pub(super) cacert: Option<PathBuf>,

    /// The longest time of one attempt, in seconds, such as 1.5, or with a unit, such as 30s or 2m
    #[arg(short = 'm', long, value_name = "DURATION", default_value = "30s", value_parser = time, help_heading = "Retries")]
    pub(super) max_time: Duration,
    /// The longest time that connecting may take
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = time, help_heading = "Retries")]
    pub(super) connect_timeout: Duration,
    /// The most attempts [default: 6]
    #[arg(long, value_name = "N", conflicts_with = "retry", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Retries")]
    pub(super) attempts: Option<u32>,
    /// As in curl: the most retries, which is one less than --attempts
    #[arg(long, value_name = "N", help_heading = "Retries")]
    pub(super) retry: Option<u32>,
    /// The longest time of all attempts together, with the pauses between them
    #[arg(long, visible_alias = "retry-max-time", value_name = "DURATION", default_value = "2m", value_parser = time, help_heading = "Retries")]
    pub(super) deadline: Duration,

    /// Writes the body of the response to this file, which is opened before anything is sent
    #[arg(short = 'o', long, value_name = "FILE", help_heading = "Output")]
    pub(super) output: Option<PathBuf>,
    /// Writes status line and header fields of the response before its body
    #[arg(short = 'i', long, help_heading = "Output")]
    pub(super) include: bool,
    /// Prints only errors
    #[arg(short = 's', long, conflicts_with = "verbose", help_heading = "Output")]
    pub(super) silent: bool,
    /// Prints the attempts and the header fields of the response. Header fields of the request are not shown
    #[arg(short = 'v', long, help_heading = "Output")]
    pub(super) verbose: bool,
}

impl CallArgs {
    pub(super) fn attempts(&self) -> Option<u32> {
        self.attempts.or(self.retry.map(|again| again.saturating_add(1)))
    }
}

/// Without header fields, bodies, keys and passwords.
impl std::fmt::Debug for CallArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallArgs").field("method", &self.method).finish_non_exhaustive()
    }
}

fn method(text: &str) -> Result<Method, String> {
    let known = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"];
    match Method::from_bytes(text.as_bytes()) {
        // Methods are case-sensitive, so `post` would be another method.
        Ok(method) if !known.contains(&text) && known.contains(&text.to_ascii_uppercase().as_str()) => {
            Err(format!("write {}", method.as_str().to_ascii_uppercase()))
        }
        Ok(method) if !text.contains("://") => Ok(method),
        _ => Err("the method comes first: POST https://…".to_owned()),
    }
}

fn no_request(text: &str) -> Result<Method, String> {
    Err(format!("the method comes first, without a flag: {text} https://…"))
}

fn url(text: &str) -> Result<Uri, String> {
    let whole = || {
        "write the whole address with http:// or https://, such as https://bank.example/payouts".to_owned()
    };
    let uri: Uri = text.parse().map_err(|_| whole())?;
    match uri.scheme_str() {
        Some("http" | "https") if uri.host().is_some_and(|host| !host.is_empty()) => {}
        _ => return Err(whole()),
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(
            "remove user and password from the address; give them with -u, or with -H @FILE".to_owned()
        );
    }
    Ok(uri)
}

fn header_name(text: &str) -> Result<HeaderName, String> {
    text.parse().map_err(|_| "it is not the name of a header field".to_owned())
}

/// Reads a time. Numbers without a unit are seconds, as in curl, also with decimals.
fn time(text: &str) -> Result<Duration, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = if is_number { text.parse().ok() } else { None };
    let time = match seconds.map(Duration::try_from_secs_f64) {
        Some(time) => time.map_err(|error| format!("{text:?}: {error}"))?,
        None => duration(text)?,
    };
    if time.is_zero() { Err("it must be more than zero".to_owned()) } else { Ok(time) }
}
