//! Waiting for replicas, where that was asked for: on a connection of its own, because the server answers nothing else on a
//! connection that waits.
//!
//! A replica that has some write has every earlier one, whoever sent it. So one writes something there, after what is to be
//! waited for was answered on the other connection, and waits for that. Those who come while somebody waits go together in
//! the next round.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use oncegate_core::{Extent, StoreError};
use redis::{Value, cmd};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tracing::warn;

use crate::error::Failure;
use crate::link::{Connection, Link, Wire, ask_one};
use crate::options::Wait;

/// Written so that there is something to wait for.
const WAIT_KEY: &str = "oncegate:{wait}";

/// How long it stays, in milliseconds.
const WAIT_KEY_MILLIS: u64 = 1000;

/// Those who wait for replicas.
#[derive(Default)]
pub(crate) struct Replicas {
    /// How many rounds were begun.
    begun: AtomicU64,
    lane: Arc<Mutex<Lane>>,
}

/// Held by the one whose round it is.
#[derive(Default)]
struct Lane {
    /// Where one waits, and beside which connection.
    wire: Option<(u64, Wire)>,
    last: Option<Round>,
}

/// A round that is over.
struct Round {
    number: u64,
    /// Beside which connection.
    connection: u64,
    /// How many replicas have what was written before it.
    count: Result<i64, Failure>,
}

impl Replicas {
    /// Waits until enough replicas have what this connection has answered.
    pub(crate) async fn wait(
        &self,
        wait: Wait,
        link: &Arc<Link>,
        connection: &Connection,
    ) -> Result<(), StoreError> {
        let begun = self.begun.load(Ordering::SeqCst);
        let lane = self.lane.clone().lock_owned().await;
        let count = match &lane.last {
            Some(round) if round.number > begun && round.connection == connection.number() => {
                round.count.clone()
            }
            _ => {
                let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
                let round = run(lane, number, wait, link.clone(), connection.clone());
                // To its end, whether the caller goes on waiting or not.
                let round = link.runtime().spawn(round).await;
                round.unwrap_or(Err(Failure::Lost("the store is shutting down")))
            }
        };
        let why = match count {
            Ok(count) if count >= i64::from(wait.replicas) => return Ok(()),
            Ok(count) => format!("{count} of {} replicas have the record in time", wait.replicas),
            Err(failure) => format!("its replicas could not be waited for: {failure}"),
        };
        // Whatever became of this, the record was written: never as if nothing had been sent.
        Err(StoreError::unavailable(format!("Redis: {why}; it may be sent again"))
            .with_extent(Extent::Writes))
    }
}

async fn run(
    mut lane: OwnedMutexGuard<Lane>,
    number: u64,
    wait: Wait,
    link: Arc<Link>,
    connection: Connection,
) -> Result<i64, Failure> {
    let count = lane.ask(wait, &link, &connection).await;
    if let Err(failure) = &count {
        lane.wire = None;
        warn!(%failure, "could not wait for the replicas of Redis");
    }
    lane.last = Some(Round { number, connection: connection.number(), count: count.clone() });
    count
}

impl Lane {
    async fn ask(&mut self, wait: Wait, link: &Arc<Link>, connection: &Connection) -> Result<i64, Failure> {
        let wire = match &self.wire {
            Some((number, wire)) if *number == connection.number() => wire.clone(),
            _ => {
                let wire = link.beside(connection).await?;
                self.wire = Some((connection.number(), wire.clone()));
                wire
            }
        };
        let (mut set, mut waits) = (cmd("SET"), cmd("WAIT"));
        set.arg(WAIT_KEY).arg("").arg("PX").arg(WAIT_KEY_MILLIS);
        let millis = u64::try_from(wait.timeout.as_millis()).unwrap_or(u64::MAX);
        waits.arg(wait.replicas).arg(millis);
        let limit = link.options().timeout;
        // One after the other on the wire, without waiting in between.
        let asked = async {
            tokio::join!(
                biased;
                ask_one(&wire, &set, limit + wait.timeout),
                ask_one(&wire, &waits, limit + wait.timeout)
            )
        };
        let (written, count) = asked.await;
        written?;
        match count? {
            Value::Int(count) => Ok(count),
            _ => Err(Failure::Senseless),
        }
    }
}
