//! A claim was sent, and its connection ended before the reply: its sender must learn that it may have taken effect.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use oncegate_core::{Completion, Outcome, State, Store as _, StoreErrorKind};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_servers::{Fault, FaultProxy, PostgresServer};
use tokio::task::block_in_place;

use crate::support::{claims, completes, id, token};

/// A bound for every wait, generous for a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A text that only the message of a claim contains.
const A_CLAIM: &[u8] = b"POST /payments";

/// The same text in a message to a pooler, whose arguments are in hexadecimal.
const A_CLAIM_IN_HEX: &[u8] = b"504f5354202f7061796d656e7473";

/// A server whose commits wait, on request, for a standby that does not exist.
struct World {
    server: PostgresServer,
    proxy: FaultProxy,
    store: PostgresStore,
}

impl World {
    async fn open(pooler: bool) -> Self {
        let server = tokio::task::spawn_blocking(PostgresServer::start).await.unwrap().unwrap();
        schema::apply(&PostgresOptions::from_url(&server.url()).unwrap()).await.unwrap();
        let proxy = FaultProxy::start(server.port()).await.unwrap();
        let url = server.url().replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
        let options = PostgresOptions::from_url(&format!("{url}?sslmode=disable")).unwrap();
        let options = options
            .with_connect_timeout(LONG)
            .unwrap()
            .with_statement_timeout(LONG)
            .unwrap()
            .with_command_timeout(LONG)
            .unwrap();
        let store = PostgresStore::open(options.with_transaction_pooler(pooler)).await.unwrap();
        Self { server, proxy, store }
    }

    /// Makes commits wait. The sessions of the server notice the setting with a delay.
    fn hold_commits(&self) {
        self.server.sql("ALTER SYSTEM SET synchronous_standby_names = 'absent'").unwrap();
        self.server.sql("SELECT pg_reload_conf()").unwrap();
        let give_up = Instant::now() + LONG;
        let mut probe: Option<JoinHandle<()>> = None;
        while self.waiting_commits() == 0 {
            assert!(Instant::now() < give_up, "commits do not wait");
            if probe.as_ref().is_none_or(JoinHandle::is_finished) {
                let mut session = self.server.session().unwrap();
                probe =
                    Some(thread::spawn(move || drop(session.run("COMMENT ON SCHEMA public IS 'probe';"))));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn let_commits_go_on(&self) {
        self.server.sql("ALTER SYSTEM RESET synchronous_standby_names").unwrap();
        self.server.sql("SELECT pg_reload_conf()").unwrap();
    }

    fn waiting_commits(&self) -> usize {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        self.server.sql(waiting).unwrap().parse().unwrap()
    }
}

/// The connection of a waiting commit is cut. The store must not send the claim again on its own: the second claim would meet
/// the first one and get `InProgress`, and the sender would not know that the running attempt may be its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_not_sent_again_by_the_store() {
    for pooler in [false, true] {
        let world = World::open(pooler).await;
        // Once a claim is prepared, it is sent in a single message.
        world.store.apply(id(9), claims(9)).await.unwrap();
        block_in_place(|| world.hold_commits());
        world.proxy.arm(if pooler { A_CLAIM_IN_HEX } else { A_CLAIM }, Fault::Sent);
        let error = world.store.apply(id(1), claims(1)).await.unwrap_err();
        tokio::time::timeout(LONG, world.proxy.broken()).await.expect("the connection is cut");
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(!error.is_unsent(), "it may have been granted: {error}");
        // A sender that repeats the claim gets no final reply while the first one commits.
        let outcome = world.store.apply(id(1), claims(1)).await.unwrap();
        assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
        assert_eq!(world.store.lookup(id(1)).await.unwrap(), None);
        block_in_place(|| world.let_commits_go_on());
        let give_up = Instant::now() + LONG;
        let granted = loop {
            match world.store.apply(id(1), claims(1)).await.unwrap() {
                Outcome::InProgress { .. } => assert!(Instant::now() < give_up),
                granted => break granted,
            }
        };
        let completed = world.store.apply(id(1), completes(token(&granted), Completion::Tombstone)).await;
        assert_eq!(completed.unwrap(), Outcome::Completed, "pooler: {pooler}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_claim_of_a_cut_batch_gets_an_error() {
    let world = Arc::new(World::open(false).await);
    world.store.apply(id(9), claims(9)).await.unwrap();
    block_in_place(|| world.hold_commits());
    // Two claims occupy the senders, so the others gather. The statement of the others is cut.
    let before = block_in_place(|| world.waiting_commits());
    let claim = |number: u8| {
        let world = world.clone();
        tokio::spawn(async move { world.store.apply(id(number), claims(number.into())).await })
    };
    let give_up = Instant::now() + LONG;
    let mut first = Vec::new();
    // One after the other, because simultaneous claims may share a batch.
    for number in 10..12 {
        first.push(claim(number));
        while block_in_place(|| world.waiting_commits()) < before + first.len() {
            assert!(Instant::now() < give_up);
        }
    }
    let gathered: Vec<_> = (20..40).map(claim).collect();
    world.proxy.cut();
    for claim in first {
        assert!(!claim.await.unwrap().unwrap_err().is_unsent());
    }
    // The gathered claims were sent on a new connection, and wait there.
    while block_in_place(|| world.waiting_commits()) < before + 3 {
        assert!(Instant::now() < give_up);
    }
    world.proxy.cut();
    let mut cut = 0;
    block_in_place(|| world.let_commits_go_on());
    for claim in gathered {
        match claim.await.unwrap() {
            Ok(outcome) => drop(token(&outcome)),
            // The new connection may have been cut before anything was sent on it.
            Err(error) => cut += usize::from(!error.is_unsent()),
        }
    }
    assert!(cut > 0);
    for number in (10..12).chain(20..40) {
        // The session of a cut connection may still be committing.
        let again = loop {
            match world.store.apply(id(number), claims(number.into())).await.unwrap() {
                Outcome::InProgress { .. } => assert!(Instant::now() < give_up),
                again => break again,
            }
        };
        assert!(matches!(again, Outcome::Execute(_)), "{number}: {again:?}");
        let record = world.store.lookup(id(number)).await.unwrap().unwrap();
        assert!(matches!(record.state, State::InProgress { .. }));
    }
}

/// Every other command is sent again: if another transaction has locked the record, nothing is decided.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_an_attempt_is_sent_again_by_the_store() {
    let world = World::open(false).await;
    for (number, how) in [(1, Fault::Before), (2, Fault::Sent)] {
        let owner = token(&world.store.apply(id(number), claims(1)).await.unwrap());
        world.proxy.arm(b"tombstone", how);
        let ended = world.store.apply(id(number), completes(owner, Completion::Tombstone)).await;
        assert_eq!(ended.unwrap(), Outcome::Completed, "{how:?}");
        world.proxy.go_on();
    }
}
