//! The rules of the protocol, and the cases that cover them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::library::Library;
use crate::table::{Case, cases};
use crate::world::{Deployment, StoreKind};

/// The rules of the protocol, each with cases about it. One rule has no case: a claim that lost a race and then finds no
/// record. Only a store that claims in two steps can get there.
const RULES: &[(&str, &[&str])] = &[
    ("method not covered", &["safe-methods-pass", "put-and-delete-pass", "delete-opted-in"]),
    ("no key, optional", &["optional-key-missing", "request-without-a-key-needs-no-scope"]),
    ("no key, required", &["required-key-missing", "key-required-only-for-covered-methods"]),
    ("key malformed", &["malformed-key-is-refused", "two-key-headers", "comma-in-a-key", "key-characters"]),
    ("body larger than the limit", &["request-body-at-the-limit", "body-limit-applies-before-the-record"]),
    ("request bodies exceed the budget", &["request-bodies-exceed-the-budget"]),
    (
        "a call of gRPC",
        &[
            "grpc-response-passes-and-is-not-run-again",
            "grpc-refusals",
            "grpc-failed",
            "grpc-in-progress",
            "grpc-unknown",
        ],
    ),
    (
        "no scope",
        &[
            "scope-is-checked-before-the-key",
            "scope-required",
            "scope-not-set",
            "scope-empty-is-absent",
            "token-not-verified-names-no-caller",
        ],
    ),
    ("a rate limit is exceeded", &["new-keys-of-a-caller-are-limited", "attempts-under-a-key-are-limited"]),
    ("store unavailable at claim", &["store-down", "fail-open"]),
    ("first request", &["first-request-gets-the-response"]),
    (
        "other fingerprint",
        &["mismatch-tells-nothing-of-the-first", "mismatch-while-in-flight", "mismatch-of-a-tombstone"],
    ),
    (
        "in progress",
        &[
            "second-request-conflicts",
            "retry-after-grows",
            "second-request-waits-for-the-response",
            "wait-ends-with-a-conflict",
        ],
    ),
    (
        "completed",
        &["retry-gets-the-same-response", "replay-of-a-binary-body", "stored-headers-are-replayed"],
    ),
    (
        "completed, and the service decides about replays",
        &["replays-are-authorized", "replays-to-duplicates-that-wait-are-authorized"],
    ),
    (
        "completed, not stored",
        &["response-too-large-to-store", "event-stream-is-not-run-again", "handler-asks-for-a-tombstone"],
    ),
    ("abandoned, park", &["abandoned-park", "resolved-as-completed", "killed-during-the-call"]),
    ("abandoned, reexecute", &["stale-owner-is-fenced", "killed-during-the-call-reexecute"]),
    (
        "abandoned, reconcile",
        &[
            "reconcile-found",
            "reconcile-not-found",
            "reconcile-unclear",
            "killed-during-the-call-reconcile-found",
            "killed-during-the-call-reconcile-not-found",
            "killed-during-the-call-reconcile-unclear",
        ],
    ),
    ("record corrupt", &["corrupt-record", "corrupt-record-reexecute"]),
    (
        "completion write fails",
        &["completion-fails", "reply-to-the-completion-is-lost", "completion-fails-once"],
    ),
    ("a stale owner completes", &["stale-owner-is-fenced", "stopped-and-replaced-owner-is-fenced"]),
    ("client hangs up", &["client-hangs-up", "client-half-closes", "client-hangs-up-while-reading"]),
    (
        "handler panics, times out",
        &[
            "handler-panics",
            "handler-panics-and-the-key-is-released",
            "upstream-times-out",
            "upstream-times-out-and-the-key-is-released",
        ],
    ),
];

/// The cases that a library runs on no store, with the reason.
#[must_use]
pub fn exceptions(library: Library) -> Vec<(&'static str, &'static str)> {
    let reason = |case: &Case, store| case.reason_against(Deployment::Library(library), store);
    let excluded = |case: Case| {
        let is_run = Library::STORES.into_iter().any(|store| reason(&case, store).is_none());
        // A store of several processes: the reasons against it are not those of one process.
        (!is_run).then(|| (case.name, reason(&case, StoreKind::Redis).unwrap_or_default()))
    };
    cases().into_iter().filter_map(excluded).collect()
}

/// The number of cases that each library runs, and of those that it does not, by their reasons.
#[must_use]
pub fn summary_of_libraries() -> String {
    let mut summary = String::new();
    for library in Library::ALL {
        let exceptions = exceptions(library);
        let mut reasons = BTreeMap::<_, usize>::new();
        exceptions.iter().for_each(|(_, why)| *reasons.entry(*why).or_default() += 1);
        let run = cases().len() - exceptions.len();
        let _ = writeln!(summary, "{}: {run} cases, and {} exceptions:", library.name(), exceptions.len());
        for (why, count) in reasons {
            let _ = writeln!(summary, "  {count:2} {why}");
        }
    }
    summary
}

/// The cases that a rule names and that no target runs.
#[must_use]
pub fn gaps() -> Vec<String> {
    let all = cases();
    let runs = |name: &str| {
        let case = all.iter().find(|case| case.name == name);
        let runs_on =
            |deployment, store| case.is_some_and(|case| case.reason_against(deployment, store).is_none());
        Deployment::ALL
            .into_iter()
            .any(|deployment| StoreKind::ALL.into_iter().any(|store| runs_on(deployment, store)))
    };
    let named = RULES.iter().flat_map(|(rule, names)| names.iter().map(move |name| (rule, name)));
    named
        .filter(|(_, name)| !runs(name))
        .map(|(rule, name)| format!("{rule:?}: no target runs {name}"))
        .collect()
}
