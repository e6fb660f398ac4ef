//! Encryption at rest of what records keep of requests: stored responses and the results of steps.
//!
//! [`SealedStore`] wraps any [`Store`](oncegate_core::Store). It seals responses and steps on their way into the store, and
//! opens them on their way out. The store sees an ordinary response and ordinary steps, so its contract does not change, and a
//! cache in front of the store holds sealed responses, too.
//!
//! ```
//! use oncegate_core::MemoryStore;
//! use oncegate_seal::{Keyring, SealKey, SealedStore};
//!
//! let keys = Keyring::new([SealKey::generate()?]);
//! let store = SealedStore::new(MemoryStore::default(), keys);
//! # Ok::<(), oncegate_seal::SealKeyError>(())
//! ```
//!
//! # Format
//! The sealed form of some bytes, version 1:
//!
//! ```text
//! 8 magic "\0ogseal\x01" | 8 key id | u8 part | u64 token | 32 salt | ciphertext | 16 tag      numbers big-endian
//!
//! part     1 the response of an owner, 2 the response of an operator, 3 the result of a step, 4 a request in a client's journal,
//!          5 the content of a dead letter, 6 the error of a dead letter, 7 an event that a stream buffers
//! token    the fencing token under which the part was written; 0 for an operator, in a journal, a dead letter and an event
//! context  "oncegate-seal-1" | u8 part | 32 record id | u64 token     and for a step: | u32 number | name
//!                                                                     in a journal: 32 zero bytes as the id, | file name
//!                                                                     in a dead letter: | lp consumer | lp topic, and for its
//!                                                                     content: | u32 number of headers | lp name of each
//!                                                                     in an event: 32 zero bytes as the id, | lp consumer
//!                                                                     | lp stream | u64 number of the event
//!
//! lp        = u32 length, and the bytes
//! key id    = HKDF-Expand(key, "oncegate-seal-1 id", 8)               HKDF-Expand: RFC 5869 with SHA-256
//! salt key  = HKDF-Expand(key, "oncegate-seal-1 salt", 32)
//! salt      = HMAC-SHA-256(salt key, u64 length of context | context | plaintext)
//! data key  = HKDF-Expand(key, "oncegate-seal-1 data" | salt, 32)
//! ciphertext, tag = AES-256-GCM(data key, nonce of 12 zero bytes, associated data = context, plaintext)
//! ```
//!
//! Each plaintext in each place has a data key of its own, so a nonce cannot repeat. No random numbers are needed: two
//! processes, or two copies of one virtual machine, only ever agree in a data key for the same plaintext in the same place.
//! `vectors/sealed.json` has examples, next to a second implementation.
//!
//! A sealed response is stored as a response with the status 500, one header field `oncegate-sealed: 1`, and the sealed form
//! of its published bytes ([`StoredResponse::as_encoded`](oncegate_core::StoredResponse::as_encoded)) as the body. A program
//! that does not know the seal replays an error, never a success. A sealed step keeps its name; its result is the sealed form.
//!
//! The content of a dead letter is `lp` of the value of each header, and then the payload. Its sealed form takes the place of the
//! payload, and the header values are empty. The sealed form of its error is the text `ogseal:` and hexadecimal digits. The
//! sealed form of an event takes the place of the event.
//!
//! A program that completes records in a transaction of its own uses [`seal_owners_response`] and [`open_claimed_response`].

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod dead_letter;
mod envelope;
mod key;
mod keyless;
mod keyring;
mod refused;
mod reseal;
mod store;
mod stream_event;

pub use dead_letter::{
    DeadLetterContent, DeadLetterPlace, open_dead_letter, open_dead_letter_error, seal_dead_letter,
    seal_dead_letter_error,
};
pub use envelope::{
    Part, SealError, SealInfo, open_claimed_response, open_intent, seal_intent, seal_owners_response,
};
pub use key::{SealKey, SealKeyError, SealKeyId};
pub use keyless::KeylessStore;
pub use keyring::{Keyring, KeyringError};
pub use refused::{MissingKey, SealRefusals, SealSample};
pub use reseal::{ResealOptions, ResealOutcome};
pub use store::{SealKeys, SealedStore, StoredRecord};
pub use stream_event::{StreamEventPlace, open_stream_event, seal_stream_event};
