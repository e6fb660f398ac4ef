//! The requests of one probe, and what is known about the API so far.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use oncegate_core::IdempotencyKey;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::ProbeOptions;
use crate::budget::Budget;
use crate::error::{ProbeError, Untested};
use crate::expectations::Expectations;
use crate::operation::{Count, Operation, Values};
use crate::target::{Stream, Target};
use crate::wire::{Reply, WireRequest, exchange};

/// The longest pause between two attempts for a request that is in progress.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// The shortest pause.
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// The placeholder for the key in the body or the path.
const KEY: &str = "{key}";

/// Statuses after which the same request under the same key is sent again.
const TRY_AGAIN: [u16; 5] = [409, 423, 425, 429, 503];

/// The state of a running probe.
pub(crate) struct Session {
    /// The address as the report shows it, without its query.
    pub(crate) url: String,
    pub(crate) target: Target,
    pub(crate) operation: Operation,
    pub(crate) expectations: Expectations,
    pub(crate) options: ProbeOptions,
    pub(crate) budget: Budget,
    /// The path and query of the operation, with placeholders.
    path: String,
    /// The header field for the key; `None` if a placeholder has it.
    key_header: Option<String>,
    /// The server of the counting URL, and its path with placeholders.
    count_at: Option<(Target, String)>,
    numbers: AtomicU64,
    /// The time that a plain request takes.
    latency: Mutex<Duration>,
    /// The reason why effects are not counted, if they are not.
    no_counter: Mutex<Option<String>>,
    /// Responses that ask to wait: their status, and whether `Retry-After` is readable, malformed or missing.
    waits: Mutex<Vec<(u16, RetryAfter)>>,
    /// True after the operator has ended the probe.
    interrupted: watch::Sender<bool>,
}

/// The state of the field `Retry-After` of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryAfter {
    Readable,
    Malformed,
    Missing,
}

/// The values of the placeholders of one request, and a key.
#[derive(Clone)]
pub(crate) struct Intent {
    pub(crate) values: Values,
    pub(crate) key: String,
}

/// The differences of an attempt from the plain request.
#[derive(Default)]
pub(crate) struct Change<'a> {
    /// The body instead of that of the operation, filled.
    pub(crate) body: Option<String>,
    /// Fields that replace those of the operation with the same name.
    pub(crate) headers: &'a [(String, String)],
}

/// The result of a client that comes back.
pub(crate) enum Return {
    Definite(Reply),
    /// The API still asks to wait.
    Waiting {
        status: u16,
        after: Duration,
    },
}

impl Return {
    /// The response; an error if the API still asks to wait.
    pub(crate) fn definite(self) -> Result<Reply, Untested> {
        match self {
            Self::Definite(reply) => Ok(reply),
            Self::Waiting { status, after } => {
                Err(Untested(format!("the retry still got {status} after {} s", after.as_secs_f32())))
            }
        }
    }
}

/// The cause of a response, as far as it can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Execution {
    /// The operation was executed for this response.
    Executed,
    /// The response is that of an earlier execution.
    Replayed,
    /// Nothing tells.
    Unknown,
}

impl Session {
    pub(crate) async fn new(
        uri: &http::Uri,
        operation: Operation,
        options: ProbeOptions,
    ) -> Result<Self, ProbeError> {
        let target = Target::resolve(uri, options.tls.as_ref(), options.may_leave).await?;
        let given = uri.path_and_query().map_or("/", |path| path.as_str());
        let base = given.trim_end_matches('/');
        let path = operation.path.as_ref().map_or_else(|| given.to_owned(), |path| format!("{base}{path}"));
        let count_at = match &operation.count {
            Count::Url { url, .. } if url.starts_with('/') => Some((target.clone(), format!("{base}{url}"))),
            Count::Url { url, .. } => {
                // The authority has no placeholders, so that the address that was checked is used.
                let rest = url.find("://").map_or(0, |at| at + 3);
                let end =
                    url.get(rest..).and_then(|rest| rest.find(['/', '?'])).map_or(url.len(), |at| rest + at);
                let (server, path) = url.split_at(end);
                let server = server
                    .parse()
                    .map_err(|_| ProbeError::Usage(format!("[count] url: {server} is not an address")))?;
                let target = Target::resolve(&server, options.tls.as_ref(), options.may_leave).await?;
                Some((target, if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }))
            }
            Count::None | Count::Member(_) => None,
        };
        let key_header = key_header(&operation, &path, &options.expectations)?;
        let no_counter = matches!(operation.count, Count::None).then(|| "no counter".to_owned());
        let url = format!("{}://{}{}", uri.scheme_str().unwrap_or("http"), target.authority, uri.path());
        Ok(Self {
            url,
            target,
            expectations: options.expectations.clone(),
            budget: Budget::new(options.max_requests, options.rate),
            operation,
            options,
            path,
            key_header,
            count_at,
            numbers: AtomicU64::new(1),
            latency: Mutex::default(),
            no_counter: Mutex::new(no_counter),
            waits: Mutex::default(),
            interrupted: watch::Sender::new(false),
        })
    }

    /// Ends the row that runs, and all later ones.
    pub(crate) fn interrupt(&self) {
        self.interrupted.send_replace(true);
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        *self.interrupted.borrow()
    }

    /// The output of a part of the probe; an error if the operator ends the probe before it.
    pub(crate) async fn unless_interrupted<T>(&self, part: impl Future<Output = T>) -> Result<T, Untested> {
        let mut interrupted = self.interrupted.subscribe();
        tokio::select! {
            biased;
            _ = interrupted.wait_for(|interrupted| *interrupted) => Err(Untested::new("interrupted")),
            output = part => Ok(output),
        }
    }

    /// New values for the placeholders, and a new key.
    pub(crate) fn intent(&self) -> Result<Intent, Untested> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Ok(Intent {
            values: Values { uuid: uuid()?, number, date: httpdate::fmt_http_date(SystemTime::now()) },
            key: uuid()?,
        })
    }

    /// Sends a request with the values of another one, under a new key.
    pub(crate) async fn again(&self, other: &Intent) -> Result<Reply, Untested> {
        self.send(&Intent { values: other.values.clone(), key: uuid()? }).await
    }

    /// The value of the header field for a key, as the operation writes keys.
    pub(crate) fn written(&self, key: &str) -> Vec<u8> {
        if self.operation.is_key_quoted && !self.has_key_placeholder() {
            format!("\"{key}\"").into_bytes()
        } else {
            key.as_bytes().to_vec()
        }
    }

    /// Returns `true` if the key is in the body or in the path, and not in a header field.
    pub(crate) fn has_key_placeholder(&self) -> bool {
        self.key_header.is_none()
    }

    /// The bytes of a request. Each key becomes a field line of its own, or the only one replaces the placeholder.
    pub(crate) fn request(&self, values: &Values, keys: &[Vec<u8>], change: &Change<'_>) -> WireRequest {
        let is_replaced =
            |name: &str| change.headers.iter().any(|(field, _)| field.eq_ignore_ascii_case(name));
        let kept = self.operation.headers.iter().filter(|(field, _)| !is_replaced(field));
        let filled: Vec<_> =
            kept.chain(change.headers).map(|(field, value)| (field.as_str(), values.fill(value))).collect();
        let mut fields: Vec<(&str, &[u8])> =
            filled.iter().map(|(field, value)| (*field, value.as_bytes())).collect();
        let mut body =
            change.body.clone().or_else(|| self.operation.body.as_ref().map(|body| values.fill(body)));
        let mut path = values.fill(&self.path);
        match &self.key_header {
            Some(name) => fields.extend(keys.iter().map(|key| (name.as_str(), key.as_slice()))),
            None => {
                let key = keys.first().map(|key| String::from_utf8_lossy(key)).unwrap_or_default();
                body = body.map(|body| body.replace(KEY, &key));
                path = path.replace(KEY, &key);
            }
        }
        WireRequest::new(&self.operation.method, &path, &self.target.authority, &fields, body.as_deref())
    }

    /// Sends a plain request under the key of the intent.
    pub(crate) async fn send(&self, intent: &Intent) -> Result<Reply, Untested> {
        self.send_with(&intent.values, &[self.written(&intent.key)], &Change::default()).await
    }

    /// Sends a request with these field lines for the key.
    pub(crate) async fn send_with(
        &self,
        values: &Values,
        keys: &[Vec<u8>],
        change: &Change<'_>,
    ) -> Result<Reply, Untested> {
        self.budget.take(1).await?;
        let request = self.request(values, keys, change);
        self.in_time(async {
            let mut stream = self.target.connect().await?;
            exchange(&mut *stream, request.whole()).await
        })
        .await
    }

    async fn in_time(&self, reply: impl Future<Output = Result<Reply, String>>) -> Result<Reply, Untested> {
        let reply = timeout(self.options.max_time, reply).await;
        let reply = reply.map_err(|_| {
            Untested::new(format!("no response within {} s", self.options.max_time.as_secs_f32()))
        })?;
        reply.map_err(|error| Untested(format!("a request got no response: {error}")))
    }

    /// Returns `true` if the same request can get another response later.
    fn asks_to_wait(&self, reply: &Reply) -> bool {
        TRY_AGAIN.contains(&reply.status) || self.expectations.in_progress.contains(&reply.status)
    }

    /// Remembers a response that asks to wait.
    fn note(&self, reply: &Reply) {
        if self.asks_to_wait(reply) {
            let state =
                match reply.headers.get("retry-after").map(|value| value.to_str().unwrap_or_default().trim())
                {
                    None => RetryAfter::Missing,
                    Some(text) if pause_of(text).is_some() => RetryAfter::Readable,
                    Some(_) => RetryAfter::Malformed,
                };
            lock(&self.waits).push((reply.status, state));
        }
    }

    /// Responses so far that ask to wait.
    pub(crate) fn waits(&self) -> Vec<(u16, RetryAfter)> {
        lock(&self.waits).clone()
    }

    /// Sends equal requests at the same time, over connections that are open before.
    pub(crate) async fn send_at_once(
        &self,
        intent: &Intent,
        count: u32,
    ) -> Result<Vec<Result<Reply, Untested>>, Untested> {
        self.budget.take(count).await?;
        let request = self.request(&intent.values, &[self.written(&intent.key)], &Change::default());
        let mut streams: Vec<Box<dyn Stream>> = Vec::new();
        for _ in 0..count {
            let stream = timeout(self.options.max_time, self.target.connect()).await;
            streams.push(stream.map_err(|_| Untested::new("connecting takes too long"))?.map_err(Untested)?);
        }
        let sending = streams.iter_mut().map(|stream| self.in_time(exchange(&mut **stream, request.whole())));
        let replies = futures_util::future::join_all(sending).await;
        replies.iter().flatten().for_each(|reply| self.note(reply));
        Ok(replies)
    }

    /// Sends a request until its outcome is definite: the client that comes back.
    pub(crate) async fn come_back(&self, intent: &Intent) -> Result<Return, Untested> {
        let end = Instant::now() + self.options.max_time;
        loop {
            let reply = self.send(intent).await?;
            if !self.asks_to_wait(&reply) {
                return Ok(Return::Definite(reply));
            }
            self.note(&reply);
            let asked = reply.field("retry-after").and_then(pause_of).unwrap_or(Duration::from_millis(250));
            let pause = asked.clamp(MIN_PAUSE, MAX_PAUSE);
            if Instant::now() + pause > end {
                return Ok(Return::Waiting { status: reply.status, after: self.options.max_time });
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Opens a connection, by way of a proxy if there is one, for a request that will be broken off.
    pub(crate) async fn open(&self, proxy: Option<SocketAddr>) -> Result<Box<dyn Stream>, Untested> {
        self.budget.take(1).await?;
        let connecting = async {
            match proxy {
                Some(proxy) => self.target.connect_through(proxy).await,
                None => self.target.connect().await,
            }
        };
        let stream = timeout(self.options.max_time, connecting).await;
        stream.map_err(|_| Untested::new("connecting takes too long"))?.map_err(Untested)
    }

    /// The reason why effects cannot be counted; `None` if they can.
    pub(crate) fn no_counter(&self) -> Option<String> {
        lock(&self.no_counter).clone()
    }

    pub(crate) fn disable_counter(&self, reason: String) {
        *lock(&self.no_counter) = Some(reason);
    }

    pub(crate) fn latency(&self) -> Duration {
        *lock(&self.latency)
    }

    pub(crate) fn set_latency(&self, latency: Duration) {
        *lock(&self.latency) = latency;
    }

    /// Returns `true` if a counting URL counts effects, also those whose response is lost.
    pub(crate) fn has_counting_url(&self) -> bool {
        self.count_at.is_some() && self.no_counter().is_none()
    }

    /// The number that the counting URL reports at once; `None` without a counting URL.
    pub(crate) async fn count(&self, values: &Values) -> Result<Option<u64>, Untested> {
        let (Some((target, path)), None) = (&self.count_at, self.no_counter()) else { return Ok(None) };
        let Count::Url { pointer, headers, .. } = &self.operation.count else { return Ok(None) };
        self.budget.take(1).await?;
        let filled: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), values.fill(value))).collect();
        let fields: Vec<_> = filled.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let request = WireRequest::new("GET", &values.fill(path), &target.authority, &fields, None);
        let exchange = async {
            let mut stream = target.connect().await?;
            exchange(&mut *stream, request.whole()).await
        };
        let reply = timeout(self.options.max_time, exchange).await;
        let reply = reply.map_err(|_| Untested::new("the counting URL did not respond in time"))?;
        let reply = reply.map_err(|error| Untested(format!("the counting URL: {error}")))?;
        if !reply.is_success() {
            return Err(Untested(format!("the counting URL responded {}", reply.status)));
        }
        let json = reply.json().ok_or_else(|| Untested::new("the counting URL responded no JSON"))?;
        let number = match json.pointer(pointer) {
            Some(serde_json::Value::Number(number)) => number.as_u64(),
            Some(serde_json::Value::Array(list)) => Some(list.len() as u64),
            _ => None,
        };
        number.map(Some).ok_or_else(|| {
            Untested(format!("the response of the counting URL has no number and no array at {pointer:?}"))
        })
    }

    /// The count after everything that was sent has had time to take effect.
    pub(crate) async fn settled_count(&self, values: &Values) -> Result<Option<u64>, Untested> {
        if let (true, Count::Url { settle, .. }) = (self.has_counting_url(), &self.operation.count) {
            tokio::time::sleep(*settle).await;
        }
        self.count(values).await
    }

    /// The value of the member that differs for each effect.
    pub(crate) fn member(&self, reply: &Reply) -> Option<serde_json::Value> {
        match &self.operation.count {
            Count::Member(pointer) if self.no_counter().is_none() => {
                reply.json()?.pointer(pointer).filter(|value| !value.is_null()).cloned()
            }
            _ => None,
        }
    }

    /// Returns `true` if the response is marked as a replay.
    pub(crate) fn is_marked(&self, reply: &Reply) -> bool {
        let own = self.expectations.replay_marker.iter().map(|(name, _)| name.as_str());
        let known = [
            "idempotent-replayed", "x-idempotent-replayed", "idempotency-replayed", "x-idempotency-replayed",
        ];
        let is_true = |value: &str| !value.trim().eq_ignore_ascii_case("false");
        own.chain(known).any(|name| reply.field(name).is_some_and(is_true))
    }

    /// The cause of a successful response after `first`. `effects` are those that the counting URL saw in between.
    pub(crate) fn execution(&self, first: &Reply, second: &Reply, effects: Option<u64>) -> Execution {
        if let Some(effects) = effects {
            return if effects == 0 { Execution::Replayed } else { Execution::Executed };
        }
        match (self.member(first), self.member(second)) {
            (Some(a), Some(b)) if a == b => Execution::Replayed,
            (Some(_), Some(_)) => Execution::Executed,
            _ if self.is_marked(second) => Execution::Replayed,
            _ => Execution::Unknown,
        }
    }

    /// The reason why it cannot be told if an operation was executed.
    pub(crate) fn unseen(&self) -> Untested {
        Untested(self.no_counter().unwrap_or_else(|| {
            "the response has not the counted member, and is not marked as a replay".to_owned()
        }))
    }
}

/// The header field that carries the key; `None` if the placeholder for it is in the body or in the path.
fn key_header(
    operation: &Operation,
    path: &str,
    expected: &Expectations,
) -> Result<Option<String>, ProbeError> {
    let has_key = |body: &String| body.contains(KEY);
    if path.contains(KEY) {
        return Ok(None);
    }
    if operation.body.as_ref().is_some_and(has_key) {
        let of_statuses = operation.statuses.iter().filter_map(|status| status.body.as_ref());
        let others = operation.other_body.iter().map(|body| ("other-body", body));
        for (name, body) in others.chain(of_statuses.map(|body| ("[[status]] body", body))) {
            if !has_key(body) {
                return Err(ProbeError::Usage(format!(
                    "{name}: the body of the operation has the key, and this one has none: write {KEY} in it, too"
                )));
            }
        }
        return Ok(None);
    }
    let name = operation.key_header.as_ref().or(expected.key_header.as_ref()).ok_or_else(|| {
        let name = &expected.name;
        ProbeError::Usage(format!(
            "the profile {name} has no header field for the key: write {KEY} in the body or the path of the operation"
        ))
    })?;
    if operation.headers.iter().any(|(field, _)| field.eq_ignore_ascii_case(name)) {
        return Err(ProbeError::Usage(format!(
            "[headers] {name}: the probe itself writes the key; leave it out"
        )));
    }
    Ok(Some(name.clone()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The pause that `Retry-After` asks for: seconds, or a date.
fn pause_of(text: &str) -> Option<Duration> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let then = httpdate::parse_http_date(text).ok()?;
    Some(then.duration_since(SystemTime::now()).unwrap_or_default())
}

/// A random UUID, version 4.
fn uuid() -> Result<String, Untested> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Untested(format!("no random numbers: {error}")))?;
    let key = IdempotencyKey::uuid(u128::from_be_bytes(bytes), 4);
    key.as_str().map(str::to_owned).ok_or_else(|| Untested::new("no key could be made"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(pause_of("7"), Some(Duration::from_secs(7)));
        assert_eq!(pause_of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        for text in ["", "soon", "-1", "1.5"] {
            assert_eq!(pause_of(text), None);
        }
    }
}
