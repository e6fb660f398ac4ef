//! The last surveys of the store, so that a page of the dashboard does not wait until a large store is read.
//!
//! ```text
//! the last survey of the question                  the page
//! ───────────────────────────────────────────────  ──────────────────────────────────────────────────────────────
//! took at most WAIT                                 waits for a new one, so it shows the store as it is
//! took longer, and is at most REST times as old     shows the last one, with its time
//! is older, up to KEEP                              waits for a new one for WAIT, then shows the last one, with its
//!                                                   time, and loads itself again
//! there is none                                     waits for a new one for WAIT, then says that the records are
//!                                                   being counted, and loads itself again
//! ```
//!
//! So the surveys of an open page need at most one part in [`REST`] of the time, and there are none while no page is asked for. A
//! survey that could read only a part of the store is renewed earlier ([`PART_REST`]), because the next one may find more.
//! One survey runs at a time. One that waits for its turn is given up if no page has asked for it for some seconds
//! ([`UNASKED`]): its page was closed. After an operator has changed something through this sidecar, no earlier survey counts.
//!
//! A page without a survey loads itself again with a [`Ticket`] in its address: the time at which it was first asked for. It gets
//! the survey that began after that time, also if that one failed, or read only a part of the store. So it never waits for ever,
//! and a failure is on the page. If an operator changes something meanwhile, the page waits for another survey, but not longer
//! than [`CHANGES_TIMEOUT`]: then it shows the one that ended, and says that there was a change. Some seconds after the end of
//! its survey a ticket means nothing any more ([`FETCH_TIMEOUT`]): the page had its answer, and the operator loads it again.
//!
//! A survey is numbers and places. The records on a page are read anew for each page.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use http::StatusCode;
use oncegate_core::{Fingerprint, KeyTag, RecordId, StateName, Store, SurveyQuery, Timestamp, limits};
use oncegate_engine::LogThrottle;
use tokio::time::{Instant, timeout};

use super::durations::{Durations, FamilyWriter, REQUEST_BOUNDS, label};
use super::keys::request_of_operation;
use super::listing::{self, Places, TimeQuery, WALK_TIMEOUT};
use super::problem::Problem;
use super::survey::survey;
use crate::config::Config;

/// The time for which a page waits for a new survey.
const WAIT: Duration = Duration::from_millis(50);

/// The time for which a survey is kept.
const KEEP: Duration = Duration::from_secs(60);

/// The age up to which a survey is not renewed, as a multiple of the time that it took.
const REST: u32 = 20;

/// The same for a survey of a part of the store.
const PART_REST: u32 = 5;

/// The time after which a survey that waits for its turn is given up if no page has asked for it. Pages that wait ask twice a
/// second, and once without JavaScript or in a window behind others.
const UNASKED: Duration = Duration::from_secs(5);

/// The interval of the lines of the log about surveys that fail.
const FAILED_INTERVAL: Duration = Duration::from_secs(60);

/// The most surveys that are kept of each kind: of the pages of a list, one for each. A survey has at most some 50 places.
const MAX_KEPT: usize = 32;

/// The most questions of a kind that wait for their survey.
const MAX_RUNNING: usize = 16;

/// The longest text of a question, in bytes. Longer ones are named by their digest.
const MAX_QUESTION: usize = 256;

/// The time after which a page that waits shows a survey although an operator has changed something since it began.
const CHANGES_TIMEOUT: Duration = WALK_TIMEOUT;

/// The time after the end of a survey in which a page that waited for it asks for it. After that, a page that is loaded again is
/// a new question.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest time for which a ticket is valid: a survey may have to wait for [`MAX_RUNNING`] others of each kind.
const MAX_TICKET_AGE: Duration = Duration::from_secs(600);

/// The requests that change no record although their method could.
const READING: [&str; 5] = ["/keys/search", "/v1/keys/find", "/v1/keys/tag", "/login", "/logout"];

/// The surveys of a sidecar. All clones share them.
#[derive(Clone, Default)]
pub(crate) struct Surveys {
    common: Arc<Common>,
    places: Arc<Mutex<Kept<Places>>>,
    /// Those of the page of unsettled records, so that lists with many filters do not take its place.
    stuck: Arc<Mutex<Kept<Places>>>,
    routes: Arc<Mutex<Kept<RouteCounts>>>,
    searches: Arc<Mutex<Kept<Hits>>>,
}

impl fmt::Debug for Surveys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surveys").finish_non_exhaustive()
    }
}

/// The result of a survey.
trait Findings: Send + Sync + 'static {
    /// False for those of a part of the store: the next survey may find more.
    fn is_complete(&self) -> bool;
}

impl Findings for Places {
    fn is_complete(&self) -> bool {
        self.is_complete
    }
}

impl Findings for RouteCounts {
    fn is_complete(&self) -> bool {
        self.is_complete
    }
}

impl Findings for Hits {
    fn is_complete(&self) -> bool {
        !matches!(self, Self::None { is_complete: false, .. })
    }
}

/// The end of a survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SurveyResult {
    /// The whole store was read, or as much as the question needs.
    Complete,
    /// The time was over before the end of the store.
    Part,
    /// The store did not answer, or refused.
    Failed,
}

impl SurveyResult {
    const ALL: [Self; 3] = [Self::Complete, Self::Part, Self::Failed];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Part => "part",
            Self::Failed => "failed",
        }
    }

    fn of<T: Findings>(found: &Result<T, Problem>) -> Self {
        match found {
            Ok(findings) if findings.is_complete() => Self::Complete,
            Ok(_) => Self::Part,
            Err(problem) if problem.status().is_server_error() => Self::Failed,
            // A search that finds nothing, or too much.
            Err(_) => Self::Complete,
        }
    }
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    One(RecordId),
    /// Several records of a key.
    Several,
    None {
        /// True if the whole store was read.
        is_complete: bool,
        /// The records that cannot be read and may be those that are searched.
        unreadable: u64,
    },
}

/// The time of the store to which a page belongs that does not show the present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AsOf {
    pub(super) at: Timestamp,
    /// True if a newer survey is running.
    pub(super) is_renewing: bool,
    /// True if an operator has changed something since.
    pub(super) is_before_change: bool,
}

/// The time at which a page was first asked for, in nanoseconds of this process. It is in the address with which the page loads
/// itself again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u64);

impl Ticket {
    /// Reads the ticket of an address. Any other text is none.
    pub(super) fn read(text: &str) -> Option<Self> {
        text.parse().ok().map(Self)
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The answer to a page.
#[derive(Debug)]
pub(super) enum Answer<T> {
    /// With its time if it is not that of the question.
    Found(Arc<T>, Option<AsOf>),
    /// The survey runs. The page may ask again with the ticket.
    Running(Ticket),
}

impl Surveys {
    /// The places of the records on a page with this address. Those of one key are always read for the page that asks.
    pub(super) async fn places(
        &self,
        address: &str,
        query: &TimeQuery,
        store: &Arc<dyn Store>,
        ticket: Option<Ticket>,
    ) -> Result<Answer<Places>, Problem> {
        let (find, of) = (query.clone(), store.clone());
        let question = Question { text: address, accepts_earlier: query.list.key.is_none(), ticket };
        let is_stuck = address.split('?').next() == Some("/stuck");
        let kept = if is_stuck { &self.stuck } else { &self.places };
        self.common.ask(kept, question, store, async move { find.find(&*of).await }).await
    }

    /// Writes the durations of the surveys.
    pub(super) fn write_durations(&self, writer: &mut FamilyWriter<'_>) -> fmt::Result {
        let results = SurveyResult::ALL.map(|result| label("result", result.as_str()));
        let series = results.into_iter().zip(&self.common.durations);
        writer.write(
            ("survey_duration", "Duration of surveys of the store for pages of the dashboard"),
            false,
            series,
        )
    }

    /// The time of the last change by an operator.
    #[cfg(test)]
    pub(super) fn changed(&self) -> Option<Instant> {
        lock(&self.common.ended_at).change
    }

    /// The numbers of records by route.
    pub(super) async fn routes(
        &self,
        config: &Arc<Config>,
        store: &Arc<dyn Store>,
        ticket: Option<Ticket>,
    ) -> Result<Answer<RouteCounts>, Problem> {
        let (of_config, of) = (config.clone(), store.clone());
        // The kept counts have the configuration, so no other one gets its place in memory.
        let text = format!("{:p}", Arc::as_ptr(config));
        let question = Question { text: &text, accepts_earlier: true, ticket };
        let find = async move { RouteCounts::find(&*of, of_config).await };
        self.common.ask(&self.routes, question, store, find).await
    }

    /// Searches for a record by the beginning of its identifier, or else for the records of a key.
    pub(super) async fn search(
        &self,
        search: Search,
        store: &Arc<dyn Store>,
        ticket: Option<Ticket>,
    ) -> Result<Answer<Hits>, Problem> {
        let (name, of) = (search.name(), store.clone());
        let question = Question { text: &name, accepts_earlier: false, ticket };
        self.common.ask(&self.searches, question, store, async move { search.find(&*of).await }).await
    }

    /// The result of a search for a key that was begun before. `None` if there is none, or not any more.
    pub(super) async fn searched(
        &self,
        key: KeyTag,
        ticket: Ticket,
    ) -> Option<Result<Answer<Hits>, Problem>> {
        let name = Search { beginning: None, key: Some(key) }.name();
        self.common.asked_before(&self.searches, &name, ticket).await
    }
}

/// The subject of a search.
pub(super) struct Search {
    /// The beginning of the identifier of a record.
    pub(super) beginning: Option<String>,
    pub(super) key: Option<KeyTag>,
}

impl Search {
    /// The name of the question. A key that looks like the beginning of a record is in no address, so its tag is the name.
    fn name(&self) -> String {
        match (&self.key, &self.beginning) {
            (Some(key), _) => format!("key {key}"),
            (None, beginning) => format!("record {}", beginning.as_deref().unwrap_or_default()),
        }
    }

    async fn find(self, store: &dyn Store) -> Result<Hits, Problem> {
        if let Some(beginning) = self.beginning {
            match (listing::find(store, &beginning).await, self.key) {
                (Ok(id), _) => return Ok(Hits::One(id)),
                // A key may consist of hexadecimal digits, too.
                (Err(problem), Some(_)) if problem.status() == StatusCode::NOT_FOUND => {}
                (Err(problem), _) => return Err(problem),
            }
        }
        match self.key {
            Some(key) => listing::records_of_key(store, key).await,
            None => Ok(Hits::None { is_complete: true, unreadable: 0 }),
        }
    }
}

/// A question of a page.
struct Question<'a> {
    /// Equal texts are equal questions.
    text: &'a str,
    /// False if only a survey counts that began after the question.
    accepts_earlier: bool,
    ticket: Option<Ticket>,
}

/// Notes a change at the end of each request that may make one, so that the next page shows it. A refused request made none.
/// It is called behind the guard.
pub(super) async fn note_changes(State(surveys): State<Surveys>, request: Request, next: Next) -> Response {
    let is_reading = request.method().is_safe() || READING.contains(&request.uri().path());
    let change = (!is_reading).then(|| Change(Some(surveys.common)));
    let response = next.run(request).await;
    if let Some(mut change) = change
        && response.status().is_client_error()
    {
        change.0 = None;
    }
    response
}

/// A change that may be made until this is dropped; `None` if there was none.
struct Change(Option<Arc<Common>>);

impl Drop for Change {
    fn drop(&mut self) {
        if let Some(common) = &self.0 {
            common.change();
        }
    }
}

struct Common {
    /// The beginning of the time of tickets.
    epoch: Instant,
    /// Held by the survey that runs.
    turn: tokio::sync::Mutex<()>,
    ended_at: Mutex<EndedAt>,
    /// By the result of the surveys.
    durations: [Durations; SurveyResult::ALL.len()],
    failures: LogThrottle,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            turn: tokio::sync::Mutex::default(),
            ended_at: Mutex::default(),
            durations: SurveyResult::ALL.map(|_| Durations::new(REQUEST_BOUNDS)),
            failures: LogThrottle::new(FAILED_INTERVAL),
        }
    }
}

/// The times of the last events before which surveys that began do not count.
#[derive(Clone, Copy, Default)]
struct EndedAt {
    /// A change by an operator.
    change: Option<Instant>,
    /// A survey that failed.
    failure: Option<Instant>,
}

impl EndedAt {
    fn is_before_change(&self, begun: Instant) -> bool {
        self.change.is_some_and(|change| begun < change)
    }

    /// True for a survey that a new page may show.
    fn counts(&self, begun: Instant) -> bool {
        !self.is_before_change(begun) && self.failure.is_none_or(|failure| begun >= failure)
    }
}

/// The surveys of one kind.
struct Kept<T> {
    /// The last one of each question, the newest first.
    last: VecDeque<(String, Ended<T>)>,
    running: HashMap<String, Running<T>>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self { last: VecDeque::new(), running: HashMap::new() }
    }
}

impl<T> Kept<T> {
    fn last(&self, question: &str) -> Option<Ended<T>> {
        self.last.iter().find(|(of, _)| of == question).map(|(_, ended)| ended.clone())
    }

    /// Forgets what is too old.
    fn prune(&mut self, now: Instant) {
        self.last.retain(|(_, ended)| now.saturating_duration_since(ended.begun) <= KEEP);
    }

    /// Gives up the surveys that wait for their turn although no page waits for them any more.
    fn drop_unasked(&mut self, now: Instant) {
        self.running.retain(|_, running| running.begun.get().is_some() || !running.is_unasked(now));
    }
}

/// A survey that ended.
struct Ended<T> {
    begun: Instant,
    /// The time of its end.
    at: Instant,
    found: Found<T>,
}

impl<T> Clone for Ended<T> {
    fn clone(&self) -> Self {
        Self { begun: self.begun, at: self.at, found: self.found.clone() }
    }
}

struct Survey<T> {
    answer: Arc<T>,
    begun: Instant,
    took: Duration,
    /// The time of the store when it began.
    at: Timestamp,
}

impl<T: Findings> Survey<T> {
    /// True if no other survey begins yet.
    fn rests(&self, now: Instant) -> bool {
        let rest = if self.answer.is_complete() { REST } else { PART_REST };
        self.took > WAIT && now.saturating_duration_since(self.begun) <= self.took * (rest + 1)
    }

    fn answer(&self, is_renewing: bool, is_before_change: bool) -> Answer<T> {
        Answer::Found(self.answer.clone(), Some(AsOf { at: self.at, is_renewing, is_before_change }))
    }
}

type Found<T> = Result<Arc<Survey<T>>, Problem>;

type SharedFound<T> = Shared<BoxFuture<'static, Found<T>>>;

/// A survey that runs, or waits for its turn.
struct Running<T> {
    /// The time at which it began to read.
    begun: Arc<OnceLock<Instant>>,
    /// The time at which a page asked for it last.
    asked: Instant,
    found: SharedFound<T>,
}

impl<T> Running<T> {
    fn is_unasked(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.asked) > UNASKED
    }
}

/// A page that asks.
#[derive(Clone, Copy)]
struct Asking {
    now: Instant,
    /// The time at which it was asked for the first time.
    first: Instant,
    has_ticket: bool,
}

impl Asking {
    fn waited(&self) -> Duration {
        self.now.saturating_duration_since(self.first)
    }

    fn is_late_for<T>(&self, ended: &Ended<T>) -> bool {
        ended.begun >= self.first && self.now.saturating_duration_since(ended.at) > FETCH_TIMEOUT
    }
}

impl Common {
    /// No survey counts that began before.
    fn change(&self) {
        lock(&self.ended_at).change = Some(Instant::now());
    }

    fn asking(&self, ticket: Option<Ticket>) -> Asking {
        let now = Instant::now();
        // A ticket of an earlier process may be of the future.
        let first = ticket.and_then(|ticket| self.epoch.checked_add(Duration::from_nanos(ticket.0)));
        let first = first.filter(|first| *first <= now && now.duration_since(*first) <= MAX_TICKET_AGE);
        Asking { now, first: first.unwrap_or(now), has_ticket: first.is_some() }
    }

    fn ticket(&self, asking: &Asking) -> Ticket {
        let first = asking.first.saturating_duration_since(self.epoch);
        Ticket(u64::try_from(first.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The survey that ended since the page was first asked for.
    fn answer_of<T: Findings>(
        &self,
        ended: Option<&Ended<T>>,
        asking: &Asking,
    ) -> Option<Result<Answer<T>, Problem>> {
        let ended = ended.filter(|ended| asking.has_ticket && ended.begun >= asking.first)?;
        let is_before_change = lock(&self.ended_at).is_before_change(ended.begun);
        match &ended.found {
            Ok(_) if is_before_change && asking.waited() < CHANGES_TIMEOUT => None,
            Ok(survey) => Some(Ok(survey.answer(false, is_before_change))),
            Err(problem) => Some(Err(problem.clone())),
        }
    }

    async fn ask<T: Findings>(
        self: &Arc<Self>,
        kept: &Arc<Mutex<Kept<T>>>,
        question: Question<'_>,
        store: &Arc<dyn Store>,
        find: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<Answer<T>, Problem> {
        let Question { text, accepts_earlier, ticket } = question;
        let name = name_of(text);
        let (last, running, asking) = {
            let ended_at = *lock(&self.ended_at);
            let mut all = lock(kept);
            let mut asking = self.asking(ticket);
            all.prune(asking.now);
            let ended = all.last(&name);
            if ended.as_ref().is_some_and(|ended| asking.is_late_for(ended)) {
                // The page had its answer, and is loaded again.
                asking = self.asking(None);
            }
            if let Some(answer) = self.answer_of(ended.as_ref(), &asking) {
                return answer;
            }
            let last = ended.filter(|ended| accepts_earlier && ended_at.counts(ended.begun));
            let last = last.and_then(|ended| ended.found.ok());
            if let Some(last) = last.as_ref().filter(|last| last.rests(asking.now)) {
                return Ok(last.answer(false, false));
            }
            let joined = all.running.get_mut(&name).filter(|running| match running.begun.get() {
                None => true,
                Some(begun) => ended_at.counts(*begun) && (accepts_earlier || *begun >= asking.first),
            });
            let joined = joined.map(|running| {
                running.asked = asking.now;
                running.found.clone()
            });
            let running = match joined {
                Some(running) => running,
                None => {
                    all.drop_unasked(asking.now);
                    if all.running.len() >= MAX_RUNNING {
                        return Err(Problem::busy("Too many lists are being read; try again."));
                    }
                    self.begin(kept, &mut all, &name, store.clone(), find)
                }
            };
            (last, running, asking)
        };
        match (timeout(WAIT, running).await, last) {
            (Ok(found), _) => {
                let found = found?;
                let is_present = found.begun >= asking.now;
                Ok(if is_present {
                    Answer::Found(found.answer.clone(), None)
                } else {
                    found.answer(false, lock(&self.ended_at).is_before_change(found.begun))
                })
            }
            (Err(_), Some(last)) => Ok(last.answer(true, false)),
            (Err(_), None) => Ok(Answer::Running(self.ticket(&asking))),
        }
    }

    /// The answer to a question that was asked with this ticket. It begins no survey.
    async fn asked_before<T: Findings>(
        &self,
        kept: &Mutex<Kept<T>>,
        text: &str,
        ticket: Ticket,
    ) -> Option<Result<Answer<T>, Problem>> {
        let asking = self.asking(Some(ticket));
        let name = name_of(text);
        let (ended, running) = {
            let mut all = lock(kept);
            all.prune(asking.now);
            let running = all.running.get_mut(&name).map(|running| {
                running.asked = asking.now;
                running.found.clone()
            });
            (all.last(&name), running)
        };
        let ended = ended.filter(|ended| asking.has_ticket && ended.begun >= asking.first);
        let found = match (ended, running) {
            (Some(ended), _) => ended.found,
            (None, Some(running)) => match timeout(WAIT, running).await {
                Ok(found) => found,
                Err(_) => return Some(Ok(Answer::Running(self.ticket(&asking)))),
            },
            (None, None) => return None,
        };
        Some(found.map(|found| found.answer(false, false)))
    }

    /// Begins a survey, which runs to its end even if no page waits for it any more. But one for which no page waits when its
    /// turn comes does not run.
    fn begin<T: Findings>(
        self: &Arc<Self>,
        kept: &Arc<Mutex<Kept<T>>>,
        all: &mut Kept<T>,
        name: &str,
        store: Arc<dyn Store>,
        find: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> SharedFound<T> {
        let begun_at = Arc::new(OnceLock::new());
        let entry = Entry { kept: kept.clone(), name: name.to_owned(), begun_at: begun_at.clone() };
        let common = self.clone();
        let task = tokio::spawn(async move {
            let turn = common.turn.lock().await;
            if !entry.is_asked_for() {
                return Err(Problem::busy("No page waits for this survey any more."));
            }
            let (begun, at) = (*entry.begun_at.get_or_init(Instant::now), store.now());
            // A page that waits must get an answer, also if there is none.
            let found = AssertUnwindSafe(find).catch_unwind().await;
            let found = found.unwrap_or_else(|_| Err(ended_early()));
            drop(turn);
            common.note(&found, begun.elapsed());
            let survey = |answer| Survey { answer: Arc::new(answer), begun, took: begun.elapsed(), at };
            let found = found.map(|answer| Arc::new(survey(answer)));
            let mut kept = lock(&entry.kept);
            kept.last.retain(|(of, _)| *of != entry.name);
            kept.last
                .push_front((entry.name.clone(), Ended { begun, at: Instant::now(), found: found.clone() }));
            kept.last.truncate(MAX_KEPT);
            found
        });
        let found = async move {
            let ended = task.await;
            ended.unwrap_or_else(|_| Err(ended_early()))
        };
        let found = found.boxed().shared();
        let running = Running { begun: begun_at, asked: Instant::now(), found: found.clone() };
        all.running.insert(name.to_owned(), running);
        found
    }

    /// Notes the end of a survey.
    fn note<T: Findings>(&self, found: &Result<T, Problem>, took: Duration) {
        let result = SurveyResult::of(found);
        if let Some(durations) = self.durations.get(result as usize) {
            durations.observe(took, None);
        }
        let (SurveyResult::Failed, Err(problem)) = (result, found) else { return };
        // A page must not show an earlier survey as if the store could be read.
        lock(&self.ended_at).failure = Some(Instant::now());
        if let Some(suppressed) = self.failures.pass() {
            let (error, took) = (problem.detail(), crate::config::duration_text(took));
            tracing::warn!(
                suppressed,
                error,
                took,
                "the store could not be read for a page of the dashboard"
            );
        }
    }
}

fn ended_early() -> Problem {
    Problem::internal("The survey ended early; see the log.")
}

/// The name of a question. It is short, also if the question is not.
fn name_of(question: &str) -> String {
    if question.len() <= MAX_QUESTION {
        question.to_owned()
    } else {
        Fingerprint::of_parts("survey", &[question.as_bytes()]).to_string()
    }
}

/// The place of a running survey, which it leaves at its end.
struct Entry<T> {
    kept: Arc<Mutex<Kept<T>>>,
    name: String,
    begun_at: Arc<OnceLock<Instant>>,
}

impl<T> Entry<T> {
    /// Returns false, and leaves its place, if no page waits for the survey any more.
    fn is_asked_for(&self) -> bool {
        let mut all = lock(&self.kept);
        all.drop_unasked(Instant::now());
        all.running.get(&self.name).is_some_and(|running| Arc::ptr_eq(&running.begun, &self.begun_at))
    }
}

impl<T> Drop for Entry<T> {
    fn drop(&mut self) {
        let mut all = lock(&self.kept);
        // After a change, another survey of the question may run.
        if all.running.get(&self.name).is_some_and(|running| Arc::ptr_eq(&running.begun, &self.begun_at)) {
            all.running.remove(&self.name);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The numbers of records by route and state.
#[derive(Debug)]
pub(super) struct RouteCounts {
    numbers: BTreeMap<(Option<usize>, StateName), u64>,
    /// True if the whole store was read.
    pub(super) is_complete: bool,
    _config: Arc<Config>,
}

impl RouteCounts {
    async fn find(store: &dyn Store, config: Arc<Config>) -> Result<Self, Problem> {
        let mut numbers = BTreeMap::new();
        // Most records have one of a few operations.
        let mut known: HashMap<String, Option<usize>> = HashMap::new();
        let mut query = SurveyQuery::default();
        query.by_operation = true;
        let is_complete = survey(store, &query, |part| {
            for count in part.counts {
                let operation = count.operation.unwrap_or_default();
                let place = known.get(&operation).copied().unwrap_or_else(|| {
                    let (method, path) = request_of_operation(&operation);
                    let place = config.route_number(&method, path);
                    if known.len() < limits::MAX_PAGE_RECORDS {
                        known.insert(operation, place);
                    }
                    place
                });
                *numbers.entry((place, count.state)).or_default() += count.records;
            }
        })
        .await?;
        Ok(Self { numbers, is_complete, _config: config })
    }

    /// The numbers of a route; `None` for requests that match no route.
    pub(super) fn of(&self, place: Option<usize>) -> Vec<(StateName, u64)> {
        let states = StateName::ALL.into_iter();
        states.filter_map(|state| Some((state, *self.numbers.get(&(place, state))?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use oncegate_core::{MemoryStore, SystemClock};

    use super::*;

    /// Surveys that take a time, and return their number.
    struct Fixture {
        common: Arc<Common>,
        kept: Arc<Mutex<Kept<usize>>>,
        store: Arc<dyn Store>,
        begun: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                common: Arc::default(),
                kept: Arc::default(),
                store: Arc::new(MemoryStore::new(SystemClock::new())),
                begun: Arc::default(),
                running: Arc::default(),
            }
        }

        async fn ask_with(
            &self,
            question: &str,
            takes: u64,
            ticket: Option<Ticket>,
        ) -> Result<Shown, Problem> {
            let (begun, running) = (self.begun.clone(), self.running.clone());
            let find = async move {
                let number = begun.fetch_add(1, Ordering::Relaxed) + 1;
                assert_eq!(running.fetch_add(1, Ordering::Relaxed), 0, "one survey runs at a time");
                tokio::time::sleep(Duration::from_millis(takes)).await;
                running.fetch_sub(1, Ordering::Relaxed);
                assert_ne!(takes, PANICS, "on demand");
                if takes == FAILS { Err(Problem::busy("away")) } else { Ok(number) }
            };
            let question =
                Question { text: question, accepts_earlier: !question.contains("key_tag"), ticket };
            let asked = Instant::now();
            let answer = self.common.ask(&self.kept, question, &self.store, find).await;
            assert!(asked.elapsed() <= WAIT, "{:?}", asked.elapsed());
            Ok(match answer? {
                Answer::Found(number, None) => Now(*number),
                Answer::Found(number, Some(as_of)) if as_of.is_before_change => BeforeChange(*number),
                Answer::Found(number, Some(as_of)) => Earlier(*number, as_of.is_renewing),
                Answer::Running(ticket) => Waits(ticket),
            })
        }

        async fn ask(&self, question: &str, takes: u64) -> Result<Shown, Problem> {
            self.ask_with(question, takes, None).await
        }

        async fn asked(&self, takes: u64) -> Shown {
            self.ask("/keys", takes).await.unwrap_or_else(|problem| panic!("{problem:?}"))
        }

        /// The ticket of a page that waits.
        async fn waits(&self, question: &str, takes: u64) -> Ticket {
            match self.ask(question, takes).await {
                Ok(Waits(ticket)) => ticket,
                other => panic!("{other:?}"),
            }
        }

        /// Loads a page again until it has an answer, as a browser does.
        async fn filled(&self, question: &str, takes: u64, ticket: Ticket) -> Result<Shown, Problem> {
            loop {
                pass(500).await;
                match self.ask_with(question, takes, Some(ticket)).await {
                    Ok(Waits(again)) => assert_eq!(again, ticket),
                    answer => return answer,
                }
            }
        }

        fn change(&self) {
            drop(Change(Some(self.common.clone())));
        }
    }

    /// The time of a survey that fails, and of one that panics.
    const FAILS: u64 = 130;
    const PANICS: u64 = 170;

    /// The content of a page.
    #[derive(Debug, PartialEq, Eq)]
    enum Shown {
        Now(usize),
        /// With true if it is being renewed.
        Earlier(usize, bool),
        BeforeChange(usize),
        Waits(Ticket),
    }

    use Shown::{BeforeChange, Earlier, Now, Waits};

    /// The number of a survey.
    impl Findings for usize {
        fn is_complete(&self) -> bool {
            *self != 7
        }
    }

    async fn pass(millis: u64) {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_answers_fast_is_read_for_each_page() {
        let fixture = Fixture::new();
        for number in 1..=5 {
            assert_eq!(fixture.asked(49).await, Now(number));
        }
        // If one survey takes longer than the others, the page shows the one before.
        assert_eq!(fixture.asked(400).await, Earlier(5, true));
        pass(400).await;
        assert_eq!(fixture.asked(49).await, Earlier(6, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_of_a_slow_store_shows_the_last_survey_and_renews_it() {
        let fixture = Fixture::new();
        let ticket = fixture.waits("/keys", 250).await;
        assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(1, false));
        pass(4500).await;
        assert_eq!(fixture.asked(250).await, Earlier(1, false));
        assert_eq!(fixture.begun.load(Ordering::Relaxed), 1, "it rests");
        pass(300).await;
        assert_eq!(fixture.asked(250).await, Earlier(1, true));
        // It was renewed although no page waited for it.
        pass(1000).await;
        assert_eq!(fixture.asked(250).await, Earlier(2, false));
        assert_eq!(fixture.begun.load(Ordering::Relaxed), 2);
        // The last survey is too old.
        pass(60_000).await;
        assert_eq!(fixture.begun.load(Ordering::Relaxed), 2, "no page was asked for");
        let ticket = fixture.waits("/keys", 250).await;
        assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(3, false));
        // A store that has become fast.
        pass(10_000).await;
        assert_eq!(fixture.asked(20).await, Now(4));
        assert_eq!(fixture.asked(20).await, Now(5));
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_change_no_earlier_survey_counts() {
        let fixture = Fixture::new();
        let before = fixture.waits("/keys", 250).await;
        pass(250).await;
        fixture.change();
        // Neither for a new page nor for one that waits.
        let ticket = fixture.waits("/keys", 250).await;
        assert_eq!(fixture.ask_with("/keys", 250, Some(before)).await.unwrap(), Waits(before));
        assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(2, false));
        // One that runs at the time of the change does not count either.
        let first = fixture.waits("/stuck", 250).await;
        fixture.change();
        let second = fixture.waits("/stuck", 250).await;
        assert_eq!(fixture.filled("/stuck", 250, first).await.unwrap(), Earlier(4, false));
        assert_eq!(fixture.filled("/stuck", 250, second).await.unwrap(), Earlier(4, false));
        assert!(lock(&fixture.kept).running.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_does_not_wait_for_ever_while_operators_change_records() {
        let fixture = Fixture::new();
        let ticket = fixture.waits("/keys", 250).await;
        let begun = Instant::now();
        let shown = loop {
            pass(100).await;
            fixture.change();
            match fixture.ask_with("/keys", 250, Some(ticket)).await.unwrap() {
                Waits(_) => assert!(begun.elapsed() < CHANGES_TIMEOUT * 2),
                shown => break shown,
            }
        };
        assert!(matches!(shown, BeforeChange(_)), "{shown:?}");
        assert!(begun.elapsed() > CHANGES_TIMEOUT - WAIT * 2, "{:?}", begun.elapsed());
    }

    /// Without JavaScript, the ticket stays in the address, and an operator loads it again.
    #[tokio::test(start_paused = true)]
    async fn a_page_that_has_its_answer_is_a_new_question_when_it_is_loaded_again() {
        let fixture = Fixture::new();
        let ticket = fixture.waits("/keys", 250).await;
        assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(1, false));
        pass(20_000).await;
        assert_eq!(fixture.ask_with("/keys", 250, Some(ticket)).await.unwrap(), Earlier(1, true));
        pass(6000).await;
        fixture.change();
        let Ok(Waits(next)) = fixture.ask_with("/keys", 250, Some(ticket)).await else {
            panic!("it shows a survey from before the change");
        };
        assert_ne!(next, ticket);
        assert_eq!(fixture.filled("/keys", 250, next).await.unwrap(), Earlier(3, false));
    }

    #[tokio::test(start_paused = true)]
    async fn pages_with_one_question_share_a_survey() {
        let fixture = Fixture::new();
        let (first, second) = tokio::join!(fixture.waits("/keys", 250), fixture.waits("/keys", 250));
        let third = fixture.waits("/keys", 250).await;
        let other = fixture.waits("/stuck", 250).await;
        for ticket in [first, second, third] {
            assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(1, false));
        }
        assert_eq!(fixture.filled("/stuck", 250, other).await.unwrap(), Earlier(2, false));
    }

    #[tokio::test(start_paused = true)]
    async fn the_records_of_one_key_are_never_those_of_an_earlier_question() {
        let fixture = Fixture::new();
        let first = fixture.waits("/keys?key_tag=1", 250).await;
        pass(100).await;
        let second = fixture.waits("/keys?key_tag=1", 250).await;
        assert_eq!(fixture.filled("/keys?key_tag=1", 250, first).await.unwrap(), Earlier(2, false));
        assert_eq!(fixture.filled("/keys?key_tag=1", 250, second).await.unwrap(), Earlier(2, false));
        fixture.waits("/keys?key_tag=1", 250).await;
        pass(300).await;
        fixture.waits("/keys?key_tag=1", 250).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_survey_that_fails_ends_the_others_and_the_wait_for_it() {
        let fixture = Fixture::new();
        let kept = fixture.waits("/keys", 250).await;
        pass(250).await;
        for (question, takes) in [("/stuck", FAILS), ("/keys", FAILS), ("/routes", PANICS)] {
            let ticket = fixture.waits(question, takes).await;
            let begun = fixture.begun.load(Ordering::Relaxed);
            for _ in 0..3 {
                assert!(fixture.filled(question, takes, ticket).await.is_err(), "{question}");
            }
            assert_eq!(fixture.begun.load(Ordering::Relaxed), begun, "{question}: it is not read again");
        }
        // The page that waited before has a survey of its own.
        assert!(fixture.ask_with("/keys", 250, Some(kept)).await.is_err());
        // And a new page is a new try.
        let ticket = fixture.waits("/keys", 250).await;
        assert_eq!(fixture.filled("/keys", 250, ticket).await.unwrap(), Earlier(5, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_of_a_store_stays_on_the_page_until_the_next_one_is_read() {
        let fixture = Fixture::new();
        fixture.begun.store(6, Ordering::Relaxed);
        let ticket = fixture.waits("/stuck", 5000).await;
        assert_eq!(fixture.filled("/stuck", 5000, ticket).await.unwrap(), Earlier(7, false));
        // The page is asked for every 15 seconds, and every second while it is renewed.
        let begun = Instant::now();
        while fixture.begun.load(Ordering::Relaxed) < 8 {
            let Ok(Earlier(7, _)) = fixture.ask("/stuck", 5000).await else { panic!("the rows are gone") };
            pass(1000).await;
        }
        assert!((20..=26).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        for _ in 0..3 {
            assert_eq!(fixture.ask("/stuck", 5000).await.unwrap(), Earlier(7, true));
            pass(1000).await;
        }
        pass(2000).await;
        assert_eq!(fixture.ask("/stuck", 5000).await.unwrap(), Earlier(8, false));
        assert_eq!(fixture.begun.load(Ordering::Relaxed), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_whose_page_is_gone_is_not_read_before_others() {
        let fixture = Fixture::new();
        for number in 0..MAX_RUNNING - 1 {
            fixture.waits(&format!("/keys?{number}"), 5000).await;
        }
        let begun = Instant::now();
        let ticket = fixture.waits("/stuck", 1000).await;
        // The first one runs already. The second one has a page that asks for it as long as it waits.
        let second = loop {
            pass(500).await;
            assert!(fixture.ask("/keys?1", 5000).await.is_ok());
            match fixture.ask_with("/stuck", 1000, Some(ticket)).await.unwrap() {
                Waits(_) => assert!(begun.elapsed() < UNASKED * 4, "{:?}", begun.elapsed()),
                Earlier(number, false) => break number,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((second, fixture.begun.load(Ordering::Relaxed)), (3, 3));
        assert!(lock(&fixture.kept).running.is_empty());
        // A page that comes back to its list gets it.
        let ticket = fixture.waits("/keys?7", 5000).await;
        assert_eq!(fixture.filled("/keys?7", 5000, ticket).await.unwrap(), Earlier(4, false));
    }

    #[tokio::test(start_paused = true)]
    async fn lists_whose_pages_are_gone_leave_their_places() {
        let fixture = Fixture::new();
        for number in 0..MAX_RUNNING {
            fixture.waits(&format!("/keys?{number}"), 60_000).await;
        }
        assert!(fixture.ask("/keys", 60).await.is_err());
        pass(6000).await;
        let ticket = fixture.waits("/keys", 60).await;
        assert_eq!(lock(&fixture.kept).running.len(), 2, "the one that runs, and this one");
        assert_eq!(fixture.filled("/keys", 60, ticket).await.unwrap(), Earlier(2, false));
    }

    #[tokio::test(start_paused = true)]
    async fn surveys_are_counted_by_their_results() {
        let fixture = Fixture::new();
        for (question, takes) in [("/keys", 250), ("/stuck", FAILS)] {
            let ticket = fixture.waits(question, takes).await;
            let _ = fixture.filled(question, takes, ticket).await;
        }
        fixture.begun.store(6, Ordering::Relaxed);
        let ticket = fixture.waits("/routes", 5000).await;
        fixture.filled("/routes", 5000, ticket).await.unwrap();
        let surveys = Surveys { common: fixture.common.clone(), ..Surveys::default() };
        let mut text = String::new();
        surveys.write_durations(&mut FamilyWriter { out: &mut text, has_exemplars: false }).unwrap();
        for (result, seconds) in [("complete", "0.2"), ("failed", "0.1"), ("part", "5.0")] {
            let sum = format!("oncegate_survey_duration_seconds_sum{{result=\"{result}\"}} {seconds}");
            let count = format!("oncegate_survey_duration_seconds_count{{result=\"{result}\"}} 1\n");
            assert!(text.contains(&sum) && text.contains(&count), "{text}");
        }
    }

    #[test]
    fn a_search_that_finds_nothing_is_no_failure_of_the_store() {
        let found = |problem| SurveyResult::of::<Hits>(&Err(problem));
        assert_eq!(found(Problem::no_record_like("abcdef")), SurveyResult::Complete);
        assert_eq!(found(Problem::busy("away")), SurveyResult::Failed);
        assert_eq!(
            SurveyResult::of(&Ok(Hits::None { is_complete: false, unreadable: 0 })),
            SurveyResult::Part
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_of_another_process_or_of_long_ago_is_none() {
        let fixture = Fixture::new();
        let ticket = fixture.waits("/keys", 5000).await;
        for other in [Ticket(u64::MAX), Ticket(3_600_000_000_000)] {
            assert!(
                matches!(fixture.ask_with("/keys", 5000, Some(other)).await, Ok(Waits(own)) if own != other)
            );
        }
        pass(2 * u64::try_from(MAX_TICKET_AGE.as_millis()).unwrap()).await;
        assert!(
            matches!(fixture.ask_with("/keys", 250, Some(ticket)).await, Ok(Waits(own)) if own != ticket)
        );
        assert_eq!(Ticket::read("x"), None);
        assert_eq!(Ticket::read(&ticket.to_string()), Some(ticket));
    }

    #[tokio::test(start_paused = true)]
    async fn a_search_is_asked_for_and_not_begun_again() {
        let fixture = Fixture::new();
        let again = async |ticket| {
            let answer = fixture.common.asked_before(&fixture.kept, "/keys?key_tag=1", ticket).await;
            answer.map(|answer| answer.map(|answer| matches!(answer, Answer::Running(_))))
        };
        assert!(again(Ticket(0)).await.is_none());
        let ticket = fixture.waits("/keys?key_tag=1", 250).await;
        assert!(matches!(again(ticket).await, Some(Ok(true))));
        // A change does not matter to a search: the page to which it leads is read anew.
        fixture.change();
        pass(200).await;
        assert!(matches!(again(ticket).await, Some(Ok(false))));
        pass(61_000).await;
        assert!(again(ticket).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_kept_and_what_waits_is_bounded() {
        let fixture = Fixture::new();
        let long = "x".repeat(MAX_QUESTION + 1);
        for question in (0..MAX_KEPT + 5).map(|n| n.to_string()).chain([long]) {
            let ticket = fixture.waits(&question, 60).await;
            assert!(matches!(fixture.filled(&question, 60, ticket).await, Ok(Earlier(_, false))));
        }
        assert_eq!(lock(&fixture.kept).last.len(), MAX_KEPT);
        assert!(lock(&fixture.kept).last.iter().all(|(name, _)| name.len() <= MAX_QUESTION));
        for question in (0..MAX_RUNNING).map(|n| format!("other {n}")) {
            fixture.waits(&question, 1000).await;
        }
        assert!(fixture.ask("one more", 60).await.is_err());
        pass(20_000).await;
        assert!(lock(&fixture.kept).running.is_empty(), "they run to their ends");
        assert!(fixture.ask("one more", 60).await.is_ok());
    }
}
