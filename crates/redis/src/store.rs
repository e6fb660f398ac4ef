//! The store.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use oncegate_core::{
    Advisory, AuditEntry, Capabilities, ChangeListener, Claim, Command, Complete, Completion, Durability,
    Extent, ListPage, ListQuery, OnAbandoned, Outcome, Record, RecordId, RecordStep, Resolution, Resolve,
    Rewrite, ServerClock, Store, StoreError, StoreFuture, Survey, SurveyQuery, Timestamp, Write, decide,
    limits, listen,
};
use pin_project_lite::pin_project;
use redis::{Cmd, Value, cmd};
use tokio::runtime::Handle;

use crate::applied_check::AppliedCheck;
use crate::contract::{AUDIT_KEY, Script, Scripts, record_key};
use crate::error::{Failure, RedisOpenError};
use crate::link::{Connection, Link};
use crate::list;
use crate::options::RedisOptions;
use crate::probe::Finding;
use crate::replicas::Replicas;
use crate::reply::{Reply, audit_entry, unexpected_reply};
use crate::slots::Node;
use crate::survey;
use crate::watch::{Listener, MAX_WATCHERS};

/// The store on Redis or Valkey. See the [crate's documentation](crate).
pub struct RedisStore {
    pub(crate) shared: StoreInner,
    listener: ChangeListener,
}

pub(crate) struct StoreInner {
    pub(crate) link: Arc<Link>,
    scripts: Scripts,
    pub(crate) survey_script: Script,
    replicas: Replicas,
    clock: ServerClock,
    #[cfg(test)]
    pub(crate) test_clock: Option<Arc<dyn oncegate_core::Clock>>,
}

/// The key that a check writes.
const CHECK_KEY: &str = "oncegate:{check}";

/// The number of attempts to add an entry to a Cluster's audit trail.
const AUDIT_ATTEMPTS: u32 = 3;

impl RedisStore {
    /// Connects, and inspects the server.
    ///
    /// Call it within a Tokio runtime with time and I/O, on which the connection then lives. The store may be used from any
    /// thread, with or without a runtime.
    ///
    /// # Errors
    /// [`RedisOpenError`] if the server cannot be reached, is older than 7.0, refuses the login, or evicts records.
    pub async fn open(options: RedisOptions) -> Result<Self, RedisOpenError> {
        Self::open_with(options, Scripts::published()).await
    }

    pub(crate) async fn open_with(options: RedisOptions, scripts: Scripts) -> Result<Self, RedisOpenError> {
        let link = Link::open(options, Handle::current()).await?;
        let time = link.send(&cmd("TIME")).await?;
        let (seconds, micros): (u64, u64) =
            redis::from_redis_value(time).map_err(|_| RedisOpenError::from(Failure::UnexpectedReply))?;
        let now = Timestamp::from_millis(seconds.saturating_mul(1000).saturating_add(micros / 1000));
        let replicas = Replicas::default();
        if let Some(wait) = link.options().wait {
            replicas.prove(wait, &link, &link.connection().await?).await?;
        }
        let shared = StoreInner {
            link,
            survey_script: survey::script(),
            scripts,
            replicas,
            clock: ServerClock::new(now),
            #[cfg(test)]
            test_clock: None,
        };
        Ok(Self { shared, listener: ChangeListener::new(MAX_WATCHERS) })
    }

    #[cfg(test)]
    pub(crate) fn with_test_clock(mut self, clock: Arc<dyn oncegate_core::Clock>) -> Self {
        self.shared.test_clock = Some(clock);
        self
    }

    /// The findings about the server, each a sentence: its kind, and the records that its configuration can lose.
    ///
    /// The server is inspected at each connection and check, and once a minute.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.shared.link.server().findings()
    }

    /// Runs a future within the store's runtime. Any thread may poll it.
    fn run<'a, T: Send + 'a>(
        &'a self,
        future: impl Future<Output = Result<T, StoreError>> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let is_cluster = self.shared.link.options().is_cluster();
        let future = async move {
            future.await.map_err(|error| {
                // If a part of a Cluster is unavailable, the other parts are not.
                let is_of_a_part = is_cluster && !error.is_unsent() && error.extent() == Extent::Store;
                if is_of_a_part { error.with_extent(Extent::Record) } else { error }
            })
        };
        Box::pin(OnRuntime { runtime: self.shared.link.runtime(), future })
    }
}

impl StoreInner {
    /// Calls a script by its digest, or with its full text if the server does not know it.
    async fn call(
        &self,
        connection: &Connection,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<Reply, Failure> {
        let command = |name, script| self.script_call(name, script, keys, arguments);
        let mut result = self.link.send_on(connection, &command("EVALSHA", script.sha1())).await;
        if matches!(&result, Err(failure) if failure.is("NOSCRIPT")) {
            result = self.link.send_on(connection, &command("EVAL", script.code())).await;
        }
        self.reply(result?)
    }

    /// The same on one node, for a script without declared keys.
    pub(crate) async fn call_node(
        &self,
        connection: &Connection,
        node: &Node,
        script: &Script,
        arguments: &[&[u8]],
    ) -> Result<Reply, Failure> {
        let command = |name, script| self.script_call(name, script, &[], arguments);
        let mut result = self.link.send_to(connection, node, command("EVALSHA", script.sha1())).await;
        if matches!(&result, Err(failure) if failure.is("NOSCRIPT")) {
            result = self.link.send_to(connection, node, command("EVAL", script.code())).await;
        }
        self.reply(result?)
    }

    fn script_call(&self, name: &str, script: &str, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        let mut command = cmd(name);
        command.arg(script).arg(keys.len());
        for key in keys {
            command.arg(*key);
        }
        for argument in arguments {
            command.arg(*argument);
        }
        self.end(&mut command);
        command
    }

    fn reply(&self, value: Value) -> Result<Reply, Failure> {
        let reply = Reply::read(value).ok_or(Failure::UnexpectedReply)?;
        self.clock.saw(reply.now);
        Ok(reply)
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, reason = "tests add the time here")]
    const fn end(&self, _: &mut Cmd) {}

    /// The scripts of the tests take the time as their last argument.
    #[cfg(test)]
    fn end(&self, command: &mut Cmd) {
        if let Some(clock) = &self.test_clock {
            command.arg(clock.now().as_millis());
        }
    }

    async fn apply(&self, id: RecordId, command: &Command) -> Result<Outcome, StoreError> {
        let connection = self.link.connection().await?;
        let key = record_key(&id);
        let outcome = match command {
            Command::Claim(claim) => self.claim(&connection, id, &key, claim, command).await?,
            Command::Renew(renew) => {
                let arguments = [&text(renew.token), &millis(renew.lease), &millis(renew.retention)];
                self.call(&connection, &self.scripts.renew, &[&key], &bytes(&arguments)).await?.outcome()?
            }
            Command::Step(RecordStep { token, number, step }) => {
                let (token, number) = (text(*token), number.to_string());
                let arguments = [token.as_bytes(), number.as_bytes(), step.name().as_bytes(), step.result()];
                self.call(&connection, &self.scripts.step, &[&key], &arguments).await?.outcome()?
            }
            Command::Complete(complete) => self.complete(&connection, &key, complete).await?,
            Command::Release(release) => {
                let arguments = [&text(release.token), &millis(release.retention)];
                self.call(&connection, &self.scripts.release, &[&key], &bytes(&arguments)).await?.outcome()?
            }
            Command::Resolve(resolve) => self.resolve(&connection, id, &key, resolve, command).await?,
            Command::Rewrite(rewrite) => self.rewrite(&connection, &key, rewrite).await?,
            Command::Forget(forget) => {
                let arguments = [forget.actor.as_bytes(), forget.reason.as_bytes()];
                self.audited(&connection, id, &key, &self.scripts.forget, &arguments, command).await?
            }
            _ => return Err(StoreError::invalid("the Redis store does not know this command")),
        };
        if let Some(wait) = self.link.options().wait
            && let Some(applied_check) = AppliedCheck::of(command, &outcome)
        {
            self.replicas.wait(wait, &self.link, &connection, &id, applied_check).await?;
        }
        Ok(outcome)
    }

    async fn claim(
        &self,
        connection: &Connection,
        id: RecordId,
        key: &str,
        claim: &Claim,
        command: &Command,
    ) -> Result<Outcome, StoreError> {
        let attempt = claim.attempt.get().to_be_bytes();
        let mut fingerprint = [claim.fingerprint.version(); 33];
        fingerprint[1..].copy_from_slice(claim.fingerprint.digest());
        let on_abandoned = match claim.on_abandoned {
            OnAbandoned::Park => "park",
            OnAbandoned::Reexecute => "reexecute",
            OnAbandoned::Reconcile => "reconcile",
            _ => {
                return Err(StoreError::invalid(
                    "the Redis store does not know this policy for abandoned attempts",
                ));
            }
        };
        let (lease, retention) = (millis(claim.lease), millis(claim.retention));
        let (caller, key_tag) = (claim.label.caller(), claim.label.key());
        let arguments: [&[u8]; 8] = [
            &attempt,
            &fingerprint,
            lease.as_bytes(),
            retention.as_bytes(),
            on_abandoned.as_bytes(),
            caller.as_bytes(),
            claim.label.operation().as_bytes(),
            key_tag.as_ref().map_or(&[], |tag| tag.as_bytes()),
        ];
        if let Some(why) = self.link.unfit() {
            let refused = StoreError::unavailable(format!("Redis: {why}"));
            let refused = refused.with_extent(Extent::Writes).with_nothing_sent();
            return self.answer_unwritten(connection, id, command).await.ok_or(refused);
        }
        match self.call(connection, &self.scripts.claim, &[key], &arguments).await {
            Err(failure) if failure.is("OOM") => {
                self.answer_unwritten(connection, id, command).await.ok_or_else(|| failure.into())
            }
            reply => reply?.outcome(),
        }
    }

    /// Answers a claim that needs no write, such as a replay, when the server takes no writes.
    async fn answer_unwritten(
        &self,
        connection: &Connection,
        id: RecordId,
        command: &Command,
    ) -> Option<Outcome> {
        let (record, now) = self.lookup_now(connection, id).await.ok()?;
        let decision = decide(record.as_ref(), command, now);
        (decision.write == Write::Keep).then_some(decision.outcome)
    }

    async fn complete(
        &self,
        connection: &Connection,
        key: &str,
        complete: &Complete,
    ) -> Result<Outcome, StoreError> {
        let (name, response) = match &complete.completion {
            Completion::Replayable(response) => ("completed", &response.as_encoded()[..]),
            Completion::Awaited => ("awaited", &[][..]),
            Completion::Tombstone => ("tombstone", &[][..]),
            Completion::Unknown => ("unknown", &[][..]),
            _ => return Err(StoreError::invalid("the Redis store does not know this completion")),
        };
        let (token, retention) = (text(complete.token), millis(complete.retention));
        let arguments = [token.as_bytes(), name.as_bytes(), retention.as_bytes(), response];
        self.call(connection, &self.scripts.complete, &[key], &arguments).await?.outcome()
    }

    async fn resolve(
        &self,
        connection: &Connection,
        id: RecordId,
        key: &str,
        resolve: &Resolve,
        command: &Command,
    ) -> Result<Outcome, StoreError> {
        let (name, response) = match &resolve.resolution {
            Resolution::Complete(Some(response)) => ("complete", &response.as_encoded()[..]),
            Resolution::Complete(None) => ("complete", &[][..]),
            Resolution::Release => ("release", &[][..]),
            Resolution::Park => ("park", &[][..]),
            _ => return Err(StoreError::invalid("the Redis store does not know this resolution")),
        };
        let flag = |is_set| if is_set { "1" } else { "0" };
        let (retention, force, amend) = (millis(resolve.retention), flag(resolve.force), flag(resolve.amend));
        let (actor, reason) = (resolve.actor.as_bytes(), resolve.reason.as_bytes());
        let arguments = [
            name.as_bytes(),
            retention.as_bytes(),
            force.as_bytes(),
            amend.as_bytes(),
            actor,
            reason,
            response,
        ];
        self.audited(connection, id, key, &self.scripts.resolve, &arguments, command).await
    }

    async fn rewrite(
        &self,
        connection: &Connection,
        key: &str,
        rewrite: &Rewrite,
    ) -> Result<Outcome, StoreError> {
        let (token, count) = (text(rewrite.token), text(rewrite.step_results.len()));
        let none = (&[][..], &[][..]);
        let response = rewrite.response.as_ref();
        let (from, to) = response.map_or(none, |both| (both.from.as_encoded(), both.to.as_encoded()));
        let mut arguments = vec![token.as_bytes(), from, to, count.as_bytes()];
        arguments.extend(rewrite.step_results.iter().map(|both| &both.from[..]));
        arguments.extend(rewrite.step_results.iter().map(|both| &both.to[..]));
        self.call(connection, &self.scripts.rewrite, &[key], &arguments).await?.outcome()
    }

    /// Calls a script that adds an entry to the audit trail if it changes the record.
    async fn audited(
        &self,
        connection: &Connection,
        id: RecordId,
        key: &str,
        script: &Script,
        arguments: &[&[u8]],
        command: &Command,
    ) -> Result<Outcome, StoreError> {
        let both = [key, AUDIT_KEY];
        let keys = if connection.is_cluster() { &both[..1] } else { &both[..] };
        let reply = self.call(connection, script, keys, arguments).await?;
        let (now, to) = (reply.now, reply.changed_to());
        let outcome = reply.outcome()?;
        if let (true, Some(to)) = (connection.is_cluster(), to)
            && let Some(entry) = AuditEntry::of(id, command, &outcome, to, now)
        {
            self.add_audit(connection, entry).await?;
        }
        Ok(outcome)
    }

    /// Adds an entry on a Cluster, where the audit trail is on another node than the record.
    async fn add_audit(&self, connection: &Connection, entry: AuditEntry) -> Result<(), StoreError> {
        let (at, id) = (entry.at.as_millis().to_string(), entry.id.to_string());
        // Two resolutions of a record may have the same time.
        let mut resolution = [0; 16];
        getrandom::fill(&mut resolution)
            .map_err(|_| StoreError::unavailable("the operating system returned no random numbers"))?;
        let resolution = format!("{:032x}", u128::from_ne_bytes(resolution));
        let arguments = [
            at.as_bytes(),
            id.as_bytes(),
            entry.from.as_str().as_bytes(),
            entry.to.as_str().as_bytes(),
            entry.actor.as_bytes(),
            entry.reason.as_bytes(),
            resolution.as_bytes(),
        ];
        let mut tries = 1;
        loop {
            let reply = self.call(connection, &self.scripts.audit, &[AUDIT_KEY], &arguments).await;
            match reply {
                Ok(_) => return Ok(()),
                Err(_) if tries < AUDIT_ATTEMPTS => tries += 1,
                Err(failure) => return Err(failure.into()),
            }
        }
    }

    /// A record without its response, and the time of the server.
    pub(crate) async fn head(
        &self,
        connection: &Connection,
        id: RecordId,
    ) -> Result<(Option<Record>, Timestamp), StoreError> {
        let reply = self.call(connection, &self.scripts.lookup, &[&record_key(&id)], &[b"head"]).await?;
        let now = reply.now;
        Ok((reply.record()?.map(|found| found.record), now))
    }

    async fn lookup_now(
        &self,
        connection: &Connection,
        id: RecordId,
    ) -> Result<(Option<Record>, Timestamp), StoreError> {
        let reply = self.call(connection, &self.scripts.lookup, &[&record_key(&id)], &[]).await?;
        let now = reply.now;
        Ok((reply.record()?.map(|found| found.record), now))
    }

    /// Returns the record if it matches the query of a listing. Its response is read only then, except if every record matches:
    /// then two calls would read the same as one.
    pub(crate) async fn listed(&self, id: RecordId, query: &ListQuery) -> Result<Option<Record>, StoreError> {
        let connection = self.link.connection().await?;
        if is_unfiltered(query) {
            let (record, now) = self.lookup_now(&connection, id).await?;
            return Ok(record.filter(|record| query.matches(record, now)));
        }
        let key = record_key(&id);
        let reply = self.call(&connection, &self.scripts.lookup, &[&key], &[b"head"]).await?;
        let now = reply.now;
        let Some(found) = reply.record()?.filter(|found| query.matches(&found.record, now)) else {
            return Ok(None);
        };
        if !found.is_head {
            return Ok(Some(found.record));
        }
        let (record, now) = self.lookup_now(&connection, id).await?;
        Ok(record.filter(|record| query.matches(record, now)))
    }

    async fn audit(&self, before: Option<u64>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        let end = match before {
            None => "+".to_owned(),
            Some(0 | 1) => return Ok(Vec::new()),
            Some(before) => format!("({before}-0"),
        };
        let mut command = cmd("XREVRANGE");
        command.arg(AUDIT_KEY).arg(end).arg("-").arg("COUNT").arg(limit.min(limits::MAX_PAGE_RECORDS));
        let Value::Array(entries) = self.link.send(&command).await? else { return Err(unexpected_reply()) };
        let damaged = || StoreError::corrupt("an entry of the audit trail in Redis cannot be read");
        entries.into_iter().map(|entry| audit_entry(entry).ok_or_else(damaged)).collect()
    }

    /// Checks that the server takes a write, and that its configuration may still be used.
    async fn check(&self) -> Result<(), StoreError> {
        let connection = self.link.connection().await?;
        let mut command = cmd("SET");
        command.arg(CHECK_KEY).arg("").arg("PX").arg(1000);
        match self.link.send_on(&connection, &command).await {
            // The inspection names the command.
            Ok(_) | Err(Failure::Forbidden(_)) => {}
            Err(failure) => return Err(failure.into()),
        }
        self.link.inspect(&connection).await.map_err(|error| match error {
            RedisOpenError::Unreachable(what) => StoreError::unavailable(format!("Redis: {what}")),
            RedisOpenError::Unfit(what) => StoreError::invalid(what),
        })?;
        match self.link.server().stopped() {
            Some(why) => Err(StoreError::unavailable(format!("Redis: {why}")).with_extent(Extent::Writes)),
            None => Ok(()),
        }
    }

    fn now(&self) -> Timestamp {
        #[cfg(test)]
        if let Some(clock) = &self.test_clock {
            return clock.now();
        }
        self.clock.now()
    }
}

/// Returns true if every record matches that has not expired.
fn is_unfiltered(query: &ListQuery) -> bool {
    let mut all = ListQuery::default();
    (all.after, all.limit) = (query.after, query.limit);
    *query == all
}

impl Store for RedisStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.run(async move { self.shared.apply(id, &command).await })
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.run(async move {
            let connection = self.shared.link.connection().await?;
            Ok(self.shared.lookup_now(&connection, id).await?.0)
        })
    }

    /// Lists records in the order of the server's walk through its keys. A record may occur twice if the server moves its key
    /// meanwhile, and one that is created or removed meanwhile may be missing.
    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.run(async move { list::list(&self.shared, &query).await })
    }

    /// Reads the records as [`list`](Store::list) walks, and only their beginnings. `None` if the server refuses the script.
    fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        self.run(async move { survey::survey(&self.shared, query).await })
    }

    /// Does nothing: the server itself removes a record ten minutes after its retention.
    fn purge(&self, _: usize) -> StoreFuture<'_, usize> {
        Box::pin(std::future::ready(Ok(0)))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.run(self.shared.audit(before, limit))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.run(self.shared.check())
    }

    fn changed(&self, id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let link = &self.shared.link;
        self.listener.changed(id, |watchers| {
            link.runtime().spawn(listen(watchers, Listener::new(link.clone())));
        })
    }

    fn now(&self) -> Timestamp {
        self.shared.now()
    }

    /// `less-durable` while the server keeps less than it did since this store was opened.
    fn advisories(&self) -> Vec<Advisory> {
        let Some((best, now)) = self.shared.link.weakened() else { return Vec::new() };
        let loss = match now {
            Durability::Unlogged => {
                "each stop of it now loses what came after its last snapshot, or everything, and those keys execute again"
            }
            _ => {
                "a crash of its machine or a failover now may lose the last records, and their keys execute again"
            }
        };
        let (best, now) = (level(best), level(now));
        vec![Advisory::new(
            "less-durable",
            format!(
                "the server of the store keeps less than it did ({now}, and {best} before): {loss}. The log and `oncegate check` name the setting"
            ),
        )]
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.shared.link.server().capabilities();
        capabilities.lists_in_order = false;
        capabilities
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("options", self.shared.link.options()).finish_non_exhaustive()
    }
}

/// The name of a durability, as in metrics.
fn level(durability: Durability) -> String {
    format!("{durability:?}").to_ascii_lowercase()
}

fn text(number: impl fmt::Display) -> String {
    number.to_string()
}

fn bytes<'a, const N: usize>(texts: &[&'a String; N]) -> [&'a [u8]; N] {
    texts.map(|text| text.as_bytes())
}

/// The longest duration of the contract, which no limit reaches.
const MAX_MILLIS: u64 = 1 << 50;

/// Whole milliseconds, rounded up, so that no lease is shorter than requested.
fn millis(duration: Duration) -> String {
    Timestamp::from_millis(0).after(duration).as_millis().min(MAX_MILLIS).to_string()
}

pin_project! {
    /// A future that runs within the store's runtime, wherever it is polled.
    struct OnRuntime<'a, F> {
        runtime: &'a Handle,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for OnRuntime<'_, F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let _entered = this.runtime.enter();
        this.future.poll(context)
    }
}
