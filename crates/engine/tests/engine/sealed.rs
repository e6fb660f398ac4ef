//! A response that another program has sealed, in a store that opens none.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Command, Complete, Completion, Fingerprint, IdempotencyKey, Label, MemoryStore, Outcome, RecordId, Scope,
    Store, StoreErrorKind, StoredResponse,
};
use oncegate_engine::{ClaimRequest, Engine, EventKind, Policy};
use oncegate_testkit::{NeverAtOnce, claim};

use crate::support::Events;

#[tokio::test]
async fn a_sealed_response_is_neither_replayed_nor_executed() {
    let id = RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new(b"k").unwrap());
    let memory = Arc::new(MemoryStore::default());
    let Ok(Outcome::Execute(grant)) = memory.apply(id, Command::Claim(claim(1_u128, b"a"))).await else {
        panic!("the record is free")
    };
    let field = [(StoredResponse::SEALED_FIELD, &b"1"[..])];
    let sealed = StoredResponse::new(500, &field, &["secret".into()], &[]).unwrap();
    let retention = Duration::from_secs(60);
    let complete = Complete { token: grant.token, completion: Completion::Replayable(sealed), retention };
    assert_eq!(memory.apply(id, Command::Complete(complete)).await.unwrap(), Outcome::Completed);

    let stores: [Arc<dyn Store>; 2] = [memory.clone(), Arc::new(NeverAtOnce::new(memory))];
    for store in stores {
        let events = Events::default();
        let engine = Engine::builder(store).with_observer(events.clone()).build();
        let request = ClaimRequest {
            id,
            fingerprint: Fingerprint::of_parts("test", &[b"a"]),
            label: Label::default(),
            policy: Policy::default(),
        };
        let error = engine.claim(request).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Sealed);
        assert!(events.has(EventKind::ClaimFailed(StoreErrorKind::Sealed)), "{:?}", events.all());
    }
}
