//! Tests of the sealed store, through the interface of stores.

mod conformance;
mod keyless;
mod refusals;
mod reseal;
mod rotation;
mod vectors;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    Claim, Command, Complete, Completion, FencingToken, MemoryStore, Outcome, RecordId, RecordStep,
    Resolution, Resolve, Step, Store, StoreError, StoredResponse,
};
use oncegate_seal::{Keyring, SealKey, SealKeys, SealedStore};
use oncegate_testkit::{block_on, record_id};

const SECRET: &[u8] = b"the balance is 17";
const MINUTE: Duration = Duration::from_secs(60);

fn key(n: u8) -> SealKey {
    SealKey::from_bytes([n; 32])
}

fn ring(keys: &[u8]) -> Keyring {
    Keyring::new(keys.iter().map(|n| key(*n)))
}

fn response() -> StoredResponse {
    let body = [Bytes::from_static(SECRET)];
    StoredResponse::new(201, &[("content-type", b"text/plain")], &body, &[]).unwrap()
}

/// A store in memory, and the same store with seals.
struct World {
    plain: Arc<MemoryStore>,
    sealed: SealedStore,
    keys: SealKeys,
}

impl World {
    fn with(keys: Keyring) -> Self {
        let plain = Arc::new(MemoryStore::default());
        let sealed = SealedStore::new(plain.clone(), keys);
        let keys = sealed.keys();
        Self { plain, sealed, keys }
    }

    /// Claims a record, which must be free.
    fn owned(&self, n: u64) -> (RecordId, FencingToken) {
        let id = record_id(n);
        match self.apply(id, Command::Claim(claim(u128::from(n)))) {
            Ok(Outcome::Execute(grant)) => (id, grant.token),
            other => panic!("{other:?}"),
        }
    }

    fn claim_again(&self, id: RecordId) -> Result<Outcome, StoreError> {
        self.apply(id, Command::Claim(claim(1 << 70)))
    }

    fn apply(&self, id: RecordId, command: Command) -> Result<Outcome, StoreError> {
        block_on(self.sealed.apply(id, command))
    }

    fn completed(&self, n: u64) -> (RecordId, FencingToken) {
        let (id, token) = self.owned(n);
        assert_eq!(self.apply(id, complete(token)).unwrap(), Outcome::Completed);
        (id, token)
    }

    /// The response as the wrapped store has it.
    fn stored(&self, id: RecordId) -> StoredResponse {
        match block_on(self.plain.apply(id, Command::Claim(claim(1 << 71)))).unwrap() {
            Outcome::Replay(response) => response,
            other => panic!("{other:?}"),
        }
    }

    /// Puts a response into the wrapped store, as an attacker or another program would.
    fn put(&self, id: RecordId, token: FencingToken, response: StoredResponse) {
        let completion = Completion::Replayable(response);
        let complete = Command::Complete(Complete { token, completion, retention: MINUTE });
        assert_eq!(block_on(self.plain.apply(id, complete)).unwrap(), Outcome::Completed);
    }
}

fn claim(attempt: u128) -> Claim {
    oncegate_testkit::claim(attempt, b"pay 5")
}

fn complete(token: FencingToken) -> Command {
    Command::Complete(Complete { token, completion: Completion::Replayable(response()), retention: MINUTE })
}

fn record_step(token: FencingToken, number: usize, name: &str, result: &'static [u8]) -> Command {
    let step = Step::new(name, Bytes::from_static(result)).unwrap();
    Command::Step(RecordStep { token, number, step })
}

fn resolve(resolution: Resolution) -> Command {
    let (actor, reason) = ("ann".to_owned(), "seen to by hand".to_owned());
    Command::Resolve(Resolve { resolution, retention: MINUTE, force: false, amend: false, actor, reason })
}
