//! Waiting for replicas and disks, on separate connections, because a server answers nothing else on a connection that waits:
//! one to each primary of a Cluster, or a single one.
//!
//! A replica that has a write has every earlier one of all clients, and so has a disk. So after the command was
//! answered on the shared connection, this connection checks that the record shows it, writes something, and waits for that
//! write. Callers that come while a round waits go together into the next round.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::{Extent, RecordId, StoreError};
use redis::{Pipeline, Value};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tracing::warn;

use crate::applied_check::AppliedCheck;
use crate::contract::record_key;
use crate::disk::{FSYNC, Proof, fsync_of, prove};
use crate::error::Failure;
use crate::link::{Connection, Link, Wire, pipelined};
use crate::options::Wait;
use crate::slots::{Node, Slots, slot_of};

/// The hash tag of the written key without a Cluster.
const TAG: &str = "wait";

/// The key that is written to have something to wait for.
fn wait_key(tag: &str) -> String {
    if tag == TAG { format!("oncegate:{{{tag}}}") } else { format!("oncegate:{{{tag}}}wait") }
}

/// The lifetime of that key, in milliseconds.
const WAIT_KEY_MILLIS: u64 = 1000;

/// The most callers in one round.
const MAX_ROUND: usize = 1000;

/// The callers that wait for replicas and disks.
#[derive(Default)]
pub(crate) struct Replicas {
    /// A lane for each primary; without a Cluster, a single lane without an address.
    lanes: Mutex<HashMap<Option<Node>, Arc<Lane>>>,
    /// Held by the task that asks.
    slots: tokio::sync::Mutex<Option<Arc<Slots>>>,
}

/// A primary whose replicas and disks are waited for.
struct Lane {
    node: Option<Node>,
    /// The hash tag of the key that is written there.
    tag: String,
    state: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    /// True if a task serves them.
    is_served: bool,
    place: Option<WaitConnection>,
}

/// A connection to wait on.
#[derive(Clone)]
struct WaitConnection {
    wire: Wire,
    /// The number of the shared connection that it belongs to.
    connection: u64,
    /// The reason to trust its reports about the disk; `None` if disks are not waited for.
    proof: Option<Proof>,
}

struct Waiter {
    key: String,
    applied_check: AppliedCheck,
    /// The number of the connection on which the command was answered.
    connection: u64,
    tell: oneshot::Sender<Result<(), Shortfall>>,
}

/// The reason why a write does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Shortfall {
    /// This many replicas have it, of the demanded number.
    Replicas(i64, u32),
    /// It is not on the server's own disk.
    Disk,
    /// The server does not have it.
    Elsewhere,
    /// No server could be asked.
    Failed(Failure),
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicas(count, of) => write!(f, "only {count} of {of} replicas got the record in time"),
            Self::Disk => f.write_str("the record did not get to the server's disk in time"),
            Self::Elsewhere => f.write_str("another server took the place of the one with the record"),
            Self::Failed(Failure::Refused(code)) if code == "MOVED" || code == "ASK" => {
                write!(f, "the record moves to another part of the Cluster ({code})")
            }
            Self::Failed(Failure::Unfit(why)) => write!(f, "wait-aof: {why}"),
            Self::Failed(failure) => write!(f, "replicas and disks could not be waited for: {failure}"),
        }
    }
}

impl Replicas {
    /// Waits until a write that was answered on this connection is where it has to be.
    pub(crate) async fn wait(
        &self,
        wait: Wait,
        link: &Arc<Link>,
        connection: &Connection,
        id: &RecordId,
        applied_check: AppliedCheck,
    ) -> Result<(), StoreError> {
        let Err(short) = self.wait_for(wait, link, connection, id, applied_check).await else {
            return Ok(());
        };
        let mut extent = Extent::Writes;
        if connection.is_cluster() {
            // Only this primary is affected; check if it still is one.
            extent = Extent::Record;
            if !matches!(short, Shortfall::Replicas(..) | Shortfall::Disk) {
                *self.slots.lock().await = None;
            }
        } else if short == Shortfall::Elsewhere {
            // Either of the two connections may lead to the wrong server.
            link.judge(connection, &Failure::Lost("another server has taken its place"));
        }
        // The record was written in any case. So the error must not claim that nothing was sent.
        Err(StoreError::unavailable(format!("Redis: {short}; it may be sent again")).with_extent(extent))
    }

    async fn wait_for(
        &self,
        wait: Wait,
        link: &Arc<Link>,
        connection: &Connection,
        id: &RecordId,
        applied_check: AppliedCheck,
    ) -> Result<(), Shortfall> {
        let lane = self.lane(link, connection, id).await.map_err(Shortfall::Failed)?;
        let (tell, told) = oneshot::channel();
        let waiter = Waiter { key: record_key(id), applied_check, connection: connection.number(), tell };
        if lane.join(waiter) {
            // It runs to its end, even if the caller goes away.
            link.runtime().spawn(serve(LaneServer { lane, is_over: false }, wait, link.clone()));
        }
        told.await.unwrap_or(Err(Shortfall::Failed(Failure::Lost("the store is shutting down"))))
    }

    /// Checks that every server can be waited for, before a caller needs it.
    pub(crate) async fn prove(
        &self,
        wait: Wait,
        link: &Arc<Link>,
        connection: &Connection,
    ) -> Result<(), Failure> {
        let lanes = if connection.is_cluster() {
            let slots = self.slots(link, connection, &wait_key(TAG)).await?;
            slots.primaries().map(|node| self.lane_of(&slots, node)).collect::<Result<Vec<_>, _>>()?
        } else {
            vec![self.only_lane()]
        };
        let mut proofs = JoinSet::new();
        for lane in lanes {
            let (link, number) = (link.clone(), connection.number());
            proofs.spawn(async move {
                let place = lane.place(wait, &link, number).await?;
                lock(&lane.state).place = Some(place);
                Ok(())
            });
        }
        while let Some(proof) = proofs.join_next().await {
            proof.unwrap_or(Err(Failure::Lost("the store is shutting down")))?;
        }
        Ok(())
    }

    /// The lane of the primary that has the record.
    async fn lane(&self, link: &Link, connection: &Connection, id: &RecordId) -> Result<Arc<Lane>, Failure> {
        if !connection.is_cluster() {
            return Ok(self.only_lane());
        }
        let slots = self.slots(link, connection, &record_key(id)).await?;
        let node = slots.primary(slot_of(&id.to_string()));
        self.lane_of(&slots, node.ok_or(Failure::Lost("no part of the Cluster has the record"))?)
    }

    fn only_lane(&self) -> Arc<Lane> {
        let lane = || Lane::new(None, TAG.to_owned());
        lock(&self.lanes).entry(None).or_insert_with(lane).clone()
    }

    fn lane_of(&self, slots: &Slots, node: &Node) -> Result<Arc<Lane>, Failure> {
        match lock(&self.lanes).entry(Some(node.clone())) {
            Entry::Occupied(lane) => Ok(lane.get().clone()),
            Entry::Vacant(place) => {
                let tag = slots.tag_of(node).ok_or(Failure::UnexpectedReply)?;
                Ok(place.insert(Lane::new(Some(node.clone()), tag)).clone())
            }
        }
    }

    /// Returns the known slots of the Cluster, or reads them from the node that has this key.
    async fn slots(&self, link: &Link, connection: &Connection, key: &str) -> Result<Arc<Slots>, Failure> {
        let mut known = self.slots.lock().await;
        if let Some(slots) = &*known {
            return Ok(slots.clone());
        }
        let slots = Arc::new(link.slots(connection, key).await?);
        // A lane whose node lost the slot of its key is created again. Its waiting callers are still served.
        lock(&self.lanes).retain(|node, lane| slots.primary(slot_of(&lane.tag)) == node.as_ref());
        Ok(known.insert(slots).clone())
    }
}

impl Lane {
    fn new(node: Option<Node>, tag: String) -> Arc<Self> {
        Arc::new(Self { node, tag, state: Mutex::default() })
    }

    /// Adds a caller. Returns true if a task has to serve the lane now.
    fn join(&self, waiter: Waiter) -> bool {
        let mut state = lock(&self.state);
        state.waiting.push_back(waiter);
        !std::mem::replace(&mut state.is_served, true)
    }

    /// Takes the callers of the next round. If there are none, the lane is no longer served.
    fn next(&self) -> Vec<Waiter> {
        let mut state = lock(&self.state);
        let count = state.waiting.len().min(MAX_ROUND);
        state.is_served = count > 0;
        state.waiting.drain(..count).collect()
    }

    /// Runs one round, and returns the result of each caller.
    async fn round(&self, waiters: &[Waiter], wait: Wait, link: &Link) -> Vec<Result<(), Shortfall>> {
        let results = match self.ask(waiters, wait, link).await {
            Ok(results) => results,
            Err(failure) => {
                warn!(%failure, "could not wait for the replicas or the disk of Redis");
                return waiters.iter().map(|_| Err(Shortfall::Failed(failure.clone()))).collect();
            }
        };
        // The replies about the records come first.
        let (records, waits) = results.split_at(waiters.len().min(results.len()));
        let whole = judge(waits, wait);
        if let Err(Shortfall::Failed(failure)) = &whole {
            warn!(%failure, "could not wait for the replicas or the disk of Redis");
        }
        let each = waiters.iter().zip(records).map(|(waiter, record)| match record {
            Ok(record) if waiter.applied_check.is_met_by(record) => whole.clone(),
            Ok(_) => Err(Shortfall::Elsewhere),
            Err(failure) => Err(Shortfall::Failed(failure.clone())),
        });
        each.collect()
    }

    async fn ask(
        &self,
        waiters: &[Waiter],
        wait: Wait,
        link: &Link,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let connection = waiters.iter().map(|waiter| waiter.connection).max().unwrap_or_default();
        let known = lock(&self.state).place.take().filter(|place| place.connection == connection);
        let place = match known {
            Some(place) => place,
            None => self.place(wait, link, connection).await?,
        };
        let (pipeline, waits) = self.pipeline(waiters, wait, place.proof);
        let limit = link.options().timeout + wait.timeout * waits;
        let mut results = pipelined(&place.wire, &pipeline, limit).await?;
        if results.len() != pipeline.len() {
            return Err(Failure::UnexpectedReply);
        }
        if place.proof == Some(Proof::Always) {
            let fsync = results.pop().unwrap_or(Err(Failure::UnexpectedReply))?;
            if fsync_of(fsync).as_deref() != Some("always") {
                return Err(Failure::Lost("the server no longer flushes before it answers"));
            }
        }
        if results.iter().all(Result::is_ok) {
            lock(&self.state).place = Some(place);
        }
        Ok(results)
    }

    /// A connection to wait on, to a server that can be waited for.
    async fn place(&self, wait: Wait, link: &Link, connection: u64) -> Result<WaitConnection, Failure> {
        let wire = link.separate_connection(self.node.as_ref()).await?;
        let proof = if wait.aof {
            Some(prove(&wire, &wait_key(&self.tag), link.options().timeout).await?)
        } else {
            None
        };
        Ok(WaitConnection { wire, connection, proof })
    }

    /// One pipeline, so that no other command comes between. Returns it with the number of waits in it.
    fn pipeline(&self, waiters: &[Waiter], wait: Wait, proof: Option<Proof>) -> (Pipeline, u32) {
        let mut pipeline = Pipeline::new();
        for waiter in waiters {
            waiter.applied_check.ask(&waiter.key, &mut pipeline);
        }
        pipeline.cmd("SET").arg(wait_key(&self.tag)).arg("").arg("PX").arg(WAIT_KEY_MILLIS);
        let millis = u64::try_from(wait.timeout.as_millis()).unwrap_or(u64::MAX);
        let mut waits = 0;
        if wait.aof {
            pipeline.cmd("WAITAOF").arg(1).arg(0).arg(millis);
            waits += 1;
        }
        if wait.replicas > 0 {
            pipeline.cmd("WAIT").arg(wait.replicas).arg(millis);
            waits += 1;
        }
        if proof == Some(Proof::Always) {
            pipeline.cmd("CONFIG").arg("GET").arg(FSYNC);
        }
        (pipeline, waits)
    }
}

/// Reads the replies to `SET`, and to `WAITAOF` and `WAIT` if they were sent.
fn judge(replies: &[Result<Value, Failure>], wait: Wait) -> Result<(), Shortfall> {
    let mut replies = replies.iter().cloned();
    let mut next = || replies.next().unwrap_or(Err(Failure::UnexpectedReply)).map_err(Shortfall::Failed);
    let unexpected_reply = Shortfall::Failed(Failure::UnexpectedReply);
    if next()? != Value::Okay {
        return Err(unexpected_reply);
    }
    if wait.aof {
        let Value::Array(counts) = next()? else { return Err(unexpected_reply) };
        match counts.as_slice() {
            [Value::Int(1..), _] => {}
            [Value::Int(_), _] => return Err(Shortfall::Disk),
            _ => return Err(unexpected_reply),
        }
    }
    if wait.replicas > 0 {
        match next()? {
            Value::Int(count) if count < i64::from(wait.replicas) => {
                return Err(Shortfall::Replicas(count, wait.replicas));
            }
            Value::Int(_) => {}
            _ => return Err(unexpected_reply),
        }
    }
    Ok(())
}

/// The task that serves a lane. If it ends early, the waiting callers get an error.
struct LaneServer {
    lane: Arc<Lane>,
    is_over: bool,
}

impl Drop for LaneServer {
    fn drop(&mut self) {
        if !self.is_over {
            let mut state = lock(&self.lane.state);
            state.is_served = false;
            state.waiting.clear();
        }
    }
}

async fn serve(mut serving: LaneServer, wait: Wait, link: Arc<Link>) {
    let lane = serving.lane.clone();
    loop {
        let waiters = lane.next();
        if waiters.is_empty() {
            serving.is_over = true;
            return;
        }
        let results = lane.round(&waiters, wait, &link).await;
        if results.contains(&Err(Shortfall::Elsewhere)) {
            lock(&lane.state).place = None;
        }
        for (waiter, result) in waiters.into_iter().zip(results) {
            // The caller may have gone.
            let _ = waiter.tell.send(result);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
