//! The connection for notifications: the server publishes the end of an attempt in another process.
//!
//! There is one connection for all waiting callers, on a Cluster one to each node, and only while a caller waits.

use std::collections::HashSet;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{ChangeSource, RecordId, SessionEnd, Watchers};
use redis::aio::{AsyncPushSender, SendError};
use redis::{PushInfo, PushKind, Value, cmd};
use tokio::sync::Notify;
use tokio::time::{Instant, interval_at, sleep};
use tracing::{info, warn};

use crate::contract::{record_key, record_of};
use crate::error::Failure;
use crate::link::{Link, Wire, ask_all, ask_one};

/// The most callers that wait for notifications; others ask from time to time.
pub(crate) const MAX_WATCHERS: usize = 4096;

/// The pause after the server refused this user the right to listen.
const PAUSE_FORBIDDEN: Duration = Duration::from_secs(60);

/// The interval at which a silent connection is checked: it may be dead without notice, or not needed any more.
const CHECK_EVERY: Duration = Duration::from_secs(30);

/// The sessions of a store that listen for changed records.
pub(crate) struct Listener {
    link: Arc<Link>,
}

impl Listener {
    pub(crate) const fn new(link: Arc<Link>) -> Self {
        Self { link }
    }
}

impl ChangeSource for Listener {
    type Error = Failure;

    async fn session(
        &mut self,
        watchers: &Watchers,
        was_lost: bool,
        is_connected: &mut bool,
    ) -> Result<SessionEnd, Failure> {
        let pushes = Pushes { watchers: watchers.clone(), lost: Arc::default() };
        let lost = pushes.lost.clone();
        let wire = self.link.listening(pushes).await?;
        let mut subscriptions =
            Subscriptions { wire, timeout: self.link.options().timeout, watched: HashSet::new() };
        let mut changes = watchers.watched().into_iter().map(|id| (id, true)).collect();
        let mut checks = interval_at(Instant::now() + CHECK_EVERY, CHECK_EVERY);
        loop {
            subscriptions.follow(take(&mut changes)).await?;
            // If the callers have gone already, it is not known whether the server accepts a subscription.
            if !*is_connected && !subscriptions.watched.is_empty() {
                *is_connected = true;
                if was_lost {
                    info!("Redis sends notifications from other processes again");
                    watchers.notify_all();
                }
            }
            tokio::select! {
                () = lost.notified() => return Err(Failure::Lost("the connection for notifications was lost")),
                changed = watchers.changes() => match changed {
                    Some(changed) => changes = changed,
                    None => return Ok(SessionEnd::Closed),
                },
                _ = checks.tick() => {
                    if subscriptions.watched.is_empty() && watchers.is_empty() {
                        return Ok(SessionEnd::Idle);
                    }
                    ask_all(&subscriptions.wire, &cmd("PING"), subscriptions.timeout).await?;
                }
            }
        }
    }

    async fn lost(&mut self, failure: Failure, is_news: bool, pause: Duration) {
        if is_news {
            warn!(%failure, "Redis sends no notifications from other processes; waiting requests ask from time to time");
        }
        sleep(if failure.is("NOPERM") { PAUSE_FORBIDDEN } else { pause }).await;
    }
}

/// Receives what the server sends without a request.
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
                    self.watchers.notify(&id);
                }
            }
            (PushKind::Disconnection, _) => self.lost.notify_one(),
            _ => {}
        }
        Ok(())
    }
}

struct Subscriptions {
    wire: Wire,
    timeout: Duration,
    /// The records that this connection has subscribed to.
    watched: HashSet<RecordId>,
}

impl Subscriptions {
    /// Subscribes to the records that are watched now, and unsubscribes from the others.
    async fn follow(&mut self, changes: Vec<(RecordId, bool)>) -> Result<(), Failure> {
        for (id, is_wanted) in changes {
            let command = match (is_wanted, self.watched.contains(&id)) {
                (true, false) => "SSUBSCRIBE",
                (false, true) => "SUNSUBSCRIBE",
                _ => continue,
            };
            let mut command = cmd(command);
            // One channel in each command: on a Cluster each channel has its own slot.
            command.arg(record_key(&id));
            ask_one(&self.wire, &command, self.timeout).await?;
            if is_wanted {
                self.watched.insert(id);
            } else {
                self.watched.remove(&id);
            }
        }
        Ok(())
    }
}
