//! The connection that listens: those who wait for a record of another process are told by the server.
//!
//! There is one for all who wait (on a Cluster one to each node), and only while somebody does. Nothing rests on it: where
//! it is lost, those who wait ask the server now and then, as they do in any case.

use std::collections::HashSet;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::{RecordId, Watchers};
use redis::aio::{AsyncPushSender, SendError};
use redis::{PushInfo, PushKind, Value, cmd};
use tokio::sync::Notify;
use tokio::time::{Instant, interval_at, sleep};
use tracing::{info, warn};

use crate::contract::{record_key, record_of};
use crate::error::Failure;
use crate::link::{Link, Wire, ask_all, ask_one};

/// How many may wait at once; the others ask now and then.
const WATCHERS_MAX: usize = 4096;

/// Pauses between attempts to connect, and the one after the server said that this user may not listen.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LAST: Duration = Duration::from_secs(5);
const PAUSE_FORBIDDEN: Duration = Duration::from_secs(60);

/// How often a silent connection is looked at: it may be gone without a word, and one that nobody needs is closed.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Listens for a store, from the first one who waits until the store is gone.
pub(crate) struct ChangeListener {
    watchers: Watchers,
    is_started: AtomicBool,
}

impl ChangeListener {
    pub(crate) fn new() -> Self {
        Self { watchers: Watchers::new(WATCHERS_MAX), is_started: AtomicBool::new(false) }
    }

    /// Waits to be told of this record. Never told where too many wait already.
    pub(crate) fn changed(&self, id: RecordId, link: &Arc<Link>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Some(watcher) = self.watchers.watch(id) else { return Box::pin(pending()) };
        if !self.is_started.swap(true, Ordering::Relaxed) {
            link.runtime().spawn(listen(self.watchers.clone(), link.clone()));
        }
        Box::pin(watcher)
    }
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.watchers.close();
    }
}

/// What the server sends without being asked.
#[derive(Clone)]
pub(crate) struct Pushes {
    watchers: Watchers,
    lost: Arc<Notify>,
}

impl AsyncPushSender for Pushes {
    fn send(&self, push: PushInfo) -> Result<(), SendError> {
        match (push.kind, push.data.first()) {
            (PushKind::SMessage, Some(Value::BulkString(channel))) => {
                if let Some(id) = record_of(channel) {
                    self.watchers.tell(&id);
                }
            }
            (PushKind::Disconnection, _) => self.lost.notify_one(),
            _ => {}
        }
        Ok(())
    }
}

/// Why a connection ended, if it was not lost.
enum ListenerEnd {
    /// Nobody waits.
    Idle,
    /// The store is gone.
    Closed,
}

async fn listen(watchers: Watchers, link: Arc<Link>) {
    let mut pause = PAUSE_FIRST;
    let mut was_lost = false;
    loop {
        while watchers.is_empty() {
            if watchers.changes().await.is_none() {
                return;
            }
        }
        let mut heard = false;
        match connection(&watchers, &link, was_lost, &mut heard).await {
            Ok(ListenerEnd::Closed) => return,
            Ok(ListenerEnd::Idle) => was_lost = false,
            Err(failure) => {
                if heard || !was_lost {
                    warn!(
                        %failure,
                        "Redis cannot tell what happens in other processes; those who wait ask now and then"
                    );
                    pause = PAUSE_FIRST;
                }
                was_lost = true;
                if failure.is("NOPERM") {
                    pause = PAUSE_FORBIDDEN;
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE_LAST);
            }
        }
    }
}

/// One connection, until it is lost or nobody needs it. `heard` tells that it was there.
async fn connection(
    watchers: &Watchers,
    link: &Link,
    was_lost: bool,
    heard: &mut bool,
) -> Result<ListenerEnd, Failure> {
    let pushes = Pushes { watchers: watchers.clone(), lost: Arc::default() };
    let lost = pushes.lost.clone();
    let wire = link.listening(pushes).await?;
    let mut ear = Subscriptions { wire, limit: link.options().timeout, watched: HashSet::new() };
    ear.follow(watchers.watched().into_iter().map(|id| (id, true)).collect()).await?;
    *heard = true;
    if was_lost {
        info!("Redis tells again what happens in other processes");
        watchers.tell_all();
    }
    let mut looks = interval_at(Instant::now() + LOOK_EVERY, LOOK_EVERY);
    loop {
        tokio::select! {
            () = lost.notified() => return Err(Failure::Lost("the connection that listens was lost")),
            changes = watchers.changes() => match changes {
                Some(changes) => ear.follow(changes).await?,
                None => return Ok(ListenerEnd::Closed),
            },
            _ = looks.tick() => {
                if ear.watched.is_empty() && watchers.is_empty() {
                    return Ok(ListenerEnd::Idle);
                }
                ask_all(&ear.wire, &cmd("PING"), ear.limit).await?;
            }
        }
    }
}

struct Subscriptions {
    wire: Wire,
    limit: Duration,
    /// What the server knows of.
    watched: HashSet<RecordId>,
}

impl Subscriptions {
    async fn follow(&mut self, changes: Vec<(RecordId, bool)>) -> Result<(), Failure> {
        for (id, is_wanted) in changes {
            let command = match (is_wanted, self.watched.contains(&id)) {
                (true, false) => "SSUBSCRIBE",
                (false, true) => "SUNSUBSCRIBE",
                _ => continue,
            };
            let mut command = cmd(command);
            // One channel in each: on a Cluster each has a slot of its own, and each is answered once.
            command.arg(record_key(&id));
            ask_one(&self.wire, &command, self.limit).await?;
            if is_wanted {
                self.watched.insert(id);
            } else {
                self.watched.remove(&id);
            }
        }
        Ok(())
    }
}
