//! The flags of `oncegate call`: those of curl where curl has one for it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use http::header::HeaderName;
use http::{Method, Uri};

use crate::config::duration;

/// Sends one request until there is a definite answer.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("payload").args(["data", "data_binary", "json"]))]
#[command(group = clap::ArgGroup::new("work").args(["resume", "list"]))]
pub(crate) struct CallArgs {
    /// The method, such as POST
    #[arg(required_unless_present = "work", conflicts_with = "work", value_parser = method)]
    pub(super) method: Option<Method>,
    /// curl's way to say the method, which is the first argument here.
    #[arg(short = 'X', long = "request", hide = true, value_parser = no_request)]
    _request: Option<Method>,
    /// The address, with http:// or https://
    #[arg(required_unless_present = "work", conflicts_with = "work", value_parser = url)]
    pub(super) url: Option<Uri>,

    /// The intent of the request, such as order-123. The key is derived from it, so it is the same in every call and
    /// on every machine. A corrected request is another intent, such as order-123-v2
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["key", "work"], value_parser = NonEmptyStringValueParser::new(), help_heading = "Key")]
    pub(super) intent: Option<String>,
    /// The key itself. Without --intent and --key a new one is made, and written to the standard error
    #[arg(long, conflicts_with = "work", help_heading = "Key")]
    pub(super) key: Option<String>,
    /// The header field that carries the key
    #[arg(long, value_name = "NAME", default_value = "Idempotency-Key", value_parser = header_name, help_heading = "Key")]
    pub(super) carrier: HeaderName,
    /// Writes the key in quotes, as the draft of the header field demands; most services take it bare
    #[arg(long, help_heading = "Key")]
    pub(super) quoted: bool,
    /// The time for which the service remembers a key: a request that may have been sent is not sent again under an
    /// older key
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration, help_heading = "Key")]
    pub(super) key_lifetime: Duration,
    /// The service knows no keys: nothing is sent again that it may have processed
    #[arg(long, conflicts_with_all = ["key", "quoted"], help_heading = "Key")]
    pub(super) plain: bool,

    /// Keeps the intent in this directory until there is a definite answer, so that it survives this process
    #[arg(long, value_name = "DIR", env = "ONCEGATE_JOURNAL", help_heading = "Journal")]
    pub(super) journal: Option<PathBuf>,
    /// Sends again what is in the journal. Credentials (-u, Authorization, Cookie, X-Api-Key and their like) are not in it: give
    /// them again
    #[arg(long, help_heading = "Journal", conflicts_with_all = ["payload", "output", "include"])]
    pub(super) resume: bool,
    /// With --resume: how many are sent at once. With more than one the service gets them in any order; one at a time they go
    /// oldest first
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "method", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Journal")]
    pub(super) concurrency: u16,
    /// Goes on under other credentials than before. Only where the service knows its callers by something else: where it takes
    /// the credential for the caller, as Oncegate does by default, what was executed for the old one executes again
    #[arg(long, requires = "journal", help_heading = "Journal")]
    pub(super) other_credentials: bool,
    /// The time for which the journal remembers a finished intent: the same --intent is not sent again
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = duration, help_heading = "Journal")]
    pub(super) keep_finished: Duration,
    /// Says what is in the journal, and sends nothing
    #[arg(long, help_heading = "Journal", conflicts_with_all = ["payload", "output", "include"])]
    pub(super) list: bool,

    /// A header field, such as "Accept: text/plain", or @FILE with one in each line
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE|@FILE", help_heading = "Request")]
    pub(super) headers: Vec<String>,
    /// A body of the media type application/json: the text itself, @FILE, or @- for the standard input
    #[arg(long, value_name = "TEXT|@FILE|-", allow_hyphen_values = true, help_heading = "Request")]
    pub(super) json: Option<String>,
    /// A body as of a form: the text itself, or @FILE without the ends of its lines; several are joined by &
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
    /// User and password. Others see command lines: -H @FILE with the field Authorization is better, or the environment
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
    /// As in curl: how often it is sent again, which is one less than --attempts
    #[arg(long, value_name = "N", help_heading = "Retries")]
    pub(super) retry: Option<u32>,
    /// The longest time of all attempts together, with the pauses between them
    #[arg(long, visible_alias = "retry-max-time", value_name = "DURATION", default_value = "2m", value_parser = time, help_heading = "Retries")]
    pub(super) deadline: Duration,

    /// Writes the body of the answer to this file, which is opened before anything is sent
    #[arg(short = 'o', long, value_name = "FILE", help_heading = "Output")]
    pub(super) output: Option<PathBuf>,
    /// Writes status line and fields of the answer before its body
    #[arg(short = 'i', long, help_heading = "Output")]
    pub(super) include: bool,
    /// Says nothing but errors
    #[arg(short = 's', long, conflicts_with = "verbose", help_heading = "Output")]
    pub(super) silent: bool,
    /// Says what happens: fields of the answer, attempts. Fields of the request are not shown
    #[arg(short = 'v', long, help_heading = "Output")]
    pub(super) verbose: bool,
}

impl CallArgs {
    pub(super) fn attempts(&self) -> Option<u32> {
        self.attempts.or(self.retry.map(|again| again.saturating_add(1)))
    }
}

/// Without fields, bodies, keys and passwords.
impl std::fmt::Debug for CallArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallArgs").field("method", &self.method).finish_non_exhaustive()
    }
}

fn method(text: &str) -> Result<Method, String> {
    let known = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"];
    match Method::from_bytes(text.as_bytes()) {
        // Methods are case-sensitive, and `post` is always a mistake.
        Ok(method) if !known.contains(&text) && known.contains(&text.to_ascii_uppercase().as_str()) => {
            Err(format!("write {}", method.as_str().to_ascii_uppercase()))
        }
        Ok(_) if text.contains("://") => Err("the method comes first: POST https://…".to_owned()),
        Ok(method) => Ok(method),
        Err(_) => Err("the method comes first: POST https://…".to_owned()),
    }
}

fn no_request(text: &str) -> Result<Method, String> {
    Err(format!("the method comes first, without a flag: {text} https://…"))
}

fn url(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|_| "it is no URL".to_owned())?;
    match uri.scheme_str() {
        Some("http" | "https") if uri.host().is_some_and(|host| !host.is_empty()) => {}
        _ => return Err("write the whole address, such as https://bank.example/payouts".to_owned()),
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("take user and password out of the address: -u, or -H @FILE".to_owned());
    }
    Ok(uri)
}

fn header_name(text: &str) -> Result<HeaderName, String> {
    text.parse().map_err(|_| "it is no name of a header field".to_owned())
}

/// Bare numbers are seconds, as in curl, with decimals where needed.
fn time(text: &str) -> Result<Duration, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = if is_number { text.parse().ok() } else { None };
    let time = match seconds.map(Duration::try_from_secs_f64) {
        Some(time) => time.map_err(|error| format!("{text:?}: {error}"))?,
        None => duration(text)?,
    };
    if time.is_zero() { Err("it has to be more than nothing".to_owned()) } else { Ok(time) }
}
