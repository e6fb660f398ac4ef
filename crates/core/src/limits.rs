//! Every bound of Oncegate in one place, each with its reason. Each is tested at the limit and one beyond it.

use std::time::Duration;

/// Longest key in bytes. Stripe, ACP and most published APIs stop at 255; RFC 9651 lets a field definition
/// constrain its strings.
pub const MAX_KEY_BYTES: usize = 255;

/// Most members of a body that a key is built of. A business key has two or three; each costs a walk through the body.
pub const MAX_KEY_MEMBERS: usize = 16;

/// Longest name of a service, in characters. It is hashed into each record's identifier, and people type it.
pub const MAX_SERVICE_NAME_CHARS: usize = 100;

/// Longest operation name (method and path) that a record keeps for operators to read. Longer names are cut at a character
/// boundary; the [`RecordId`](crate::RecordId) covers the whole name.
pub const MAX_OPERATION_BYTES: usize = 256;

/// Shortest lease. Below this a renewal cannot be relied on to arrive in time.
pub const MIN_LEASE: Duration = Duration::from_millis(100);

/// Longest lease. A crashed owner blocks its key for at most this time.
pub const MAX_LEASE: Duration = Duration::from_secs(60 * 60);

/// Shortest retention. A shorter one would end before a client can retry.
pub const MIN_RETENTION: Duration = Duration::from_secs(1);

/// Longest retention: 400 days, a year and a margin. The store is not an archive.
pub const MAX_RETENTION: Duration = Duration::from_secs(400 * 24 * 60 * 60);

/// Largest jump of the time of day that a store in this process follows by itself. Time synchronisation moves a clock by
/// less. A clock that jumped by more was set, and the store cannot know if it was right before or is right now.
pub const MAX_CLOCK_STEP: Duration = Duration::from_secs(5 * 60);

/// Largest response, headers and body, that a record may hold. No setting exceeds it. A store commits the response in one
/// transaction.
pub const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;

/// Most header fields, and most trailer fields, in a stored response.
pub const MAX_HEADER_FIELDS: usize = 128;

/// Most records in one page of a listing, and most records that one purge step removes.
pub const MAX_PAGE_RECORDS: usize = 1000;

/// Longest reason and longest actor name in an audit entry, in bytes.
pub const MAX_AUDIT_TEXT_BYTES: usize = 1000;

/// Most audit entries that a store keeps. The oldest are dropped first.
pub const MAX_AUDIT_ENTRIES: u64 = 100_000;

/// Most steps of one record. A step is a call of another API, and costs a write in the store.
pub const MAX_STEPS: usize = 256;

/// Longest name of a step, in bytes.
pub const MAX_STEP_NAME_BYTES: usize = 255;

/// Most bytes of the names and results of all steps of a record. An attempt that resumes reads all of them.
pub const MAX_STEPS_BYTES: usize = 1024 * 1024;

/// Most requests that wait for one owner's response. Further ones get "in progress" at once.
pub const MAX_WAITERS: usize = 1000;

/// Most attempts of an engine that are not settled: those that run, and those whose end the store has not accepted yet.
/// Further claims are refused, so that every attempt that begins can wait for the store with its end.
pub const MAX_UNSETTLED: usize = 65_536;

/// Most bytes of responses that an engine holds until the store accepts them. Beyond that, the end of an attempt is stored
/// without its response.
pub const MAX_DEFERRED_BYTES: usize = 256 * 1024 * 1024;

/// Most pairs of a form that are compared as pairs. A form with more is compared byte by byte. Frameworks read at most 1000
/// to 4096 pairs, and to sort hundreds of thousands takes a second of processor time.
pub const MAX_FORM_PAIRS: usize = 16_384;

/// Most parts and header lines of a multipart body that are compared one by one. A body with more is compared byte by byte.
/// In memory, each takes many times the few bytes that it has in the body.
pub const MAX_MULTIPART_ITEMS: usize = 16_384;

/// Largest growth of a compressed request body, as a factor. A body that grows more is compared as it was sent. JSON and
/// forms grow 5 to 50 times. The formats allow 1000 times, so that two kilobytes could keep a processor busy.
pub const MAX_DECODED_RATIO: usize = 100;

/// Decoded size in bytes that every compressed request body may reach, even a tiny one: a short body may repeat itself.
pub const DECODED_FREE: usize = 64 * 1024;
