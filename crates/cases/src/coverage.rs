//! What the table has to cover, and what covers it.

use std::collections::BTreeSet;

use crate::table::cases;
use crate::world::{Door, Kind};

/// The rows of the protocol's table, each with cases that are about it. One row is not here: a lost claim race whose
/// second look finds nothing, which only a store that claims in two steps can come to.
const ROWS: &[(&str, &[&str])] = &[
    ("method not covered", &["C24-safe-methods", "C26-put-and-delete-pass", "C26-delete-opted-in"]),
    ("no key, optional", &["C23-optional-and-missing", "S3-no-scope-no-key"]),
    ("no key, required", &["C20-required-and-missing", "C20-required-of-covered-methods"]),
    (
        "key malformed",
        &["C05-malformed-is-never-unprotected", "C08-two-field-lines", "C09-comma", "C12-characters"],
    ),
    ("body larger than the limit", &["S3-body-at-the-limit", "S3-limit-before-the-record"]),
    ("no room for the body", &["S3-bodies-together"]),
    (
        "a call of gRPC",
        &["S3-grpc", "S3-grpc-refusals", "S3-grpc-failed", "S3-grpc-in-progress", "S3-grpc-unknown"],
    ),
    ("no scope", &["S3-scope-before-key", "C110-required", "scope-not-set", "scope-empty-is-absent"]),
    ("store unavailable at claim", &["C96-store-down", "C98-fail-open"]),
    ("first request", &["C30-first"]),
    (
        "other fingerprint",
        &["C60-tells-nothing", "C71-mismatch-while-in-flight", "C71-mismatch-of-a-tombstone"],
    ),
    ("in progress", &["C80-C82-conflict", "C81-retry-after", "C83-wait", "C84-wait-in-vain"]),
    ("completed", &["C31-retry", "C37-binary", "C32-kept"]),
    ("completed, not stored", &["C101-too-large", "C102-events", "S3-directive-tombstone"]),
    ("abandoned, park", &["S3-abandoned-park", "S3-resolved-completed", "C90-killed-during-the-call"]),
    ("abandoned, reexecute", &["C92-stale-owner", "C90-killed-during-the-call-reexecute"]),
    (
        "abandoned, reconcile",
        &[
            "S3-reconcile-found",
            "S3-reconcile-not-found",
            "S3-reconcile-unclear",
            "C90-killed-during-the-call-reconcile-found",
            "C90-killed-during-the-call-reconcile-not-found",
            "C90-killed-during-the-call-reconcile-unclear",
        ],
    ),
    ("record corrupt", &["C100-corrupt", "C100-corrupt-reexecute"]),
    ("completion write fails", &["C97-completion-fails", "C97-completion-lost", "C97-completion-fails-once"]),
    ("a stale owner completes", &["C92-stale-owner", "C92-stopped-and-replaced"]),
    ("client hangs up", &["C93-hang-up", "C93-hang-up-politely", "C93-hang-up-while-reading"]),
    ("handler panics, times out", &["C95-panic", "C95-panic-released", "S3-hangs", "S3-hangs-released"]),
];

/// Published black-box cases that are not in this table, and why.
const ELSEWHERE: &[(u32, &str)] = &[
    (21, "the title is compared wherever key-missing is: C20"),
    (33, "the marker is compared in every replay and every execution of the table"),
    (
        42,
        "a handler that refuses before it begins says so by `Idempotency-Store: release`: S3-directive-release",
    ),
    (52, "in the list of C50"),
    (53, "in the list of C50"),
    (54, "in the list of C50: no Access-Control field is kept"),
    (55, "a replay is byte for byte: the layer belongs inside of what codes for one client"),
    (103, "no store here has replicas"),
    (113, "authentication stands in front of the door"),
    (116, "stores measure by their own clock: their suite moves it"),
    (117, "their suite purges among live records; C99 is the race that can be seen from outside"),
    (119, "no descriptor is published"),
];

/// The numbers of the published list: C01 to C119, with its gaps.
fn published() -> BTreeSet<u32> {
    [1..=14, 20..=26, 30..=44, 50..=57, 60..=73, 80..=87, 90..=103, 110..=119].into_iter().flatten().collect()
}

/// What is missing: rows without a case that is run, and published cases that nothing here is about.
#[must_use]
pub fn gaps() -> Vec<String> {
    let all = cases();
    let mut gaps = Vec::new();
    for (row, ids) in ROWS {
        for id in *ids {
            let case = all.iter().find(|case| case.id == *id);
            let run = |door| {
                Kind::ALL
                    .into_iter()
                    .any(|kind| case.is_some_and(|case| case.reason_against(door, kind).is_none()))
            };
            if !Door::ALL.into_iter().any(run) {
                gaps.push(format!("row {row:?}: {id} is not run anywhere"));
            }
        }
    }
    let numbers = |id: &str| {
        id.split('-').filter_map(|part| part.strip_prefix('C')?.parse::<u32>().ok()).collect::<Vec<_>>()
    };
    let covered: BTreeSet<u32> = all.iter().flat_map(|case| numbers(case.id)).collect();
    let elsewhere: BTreeSet<u32> = ELSEWHERE.iter().map(|(number, _)| *number).collect();
    let published = published();
    gaps.extend(
        published
            .iter()
            .filter(|n| !covered.contains(n) && !elsewhere.contains(n))
            .map(|n| format!("C{n:02}")),
    );
    gaps.extend(
        covered.iter().filter(|n| !published.contains(n)).map(|n| format!("C{n:02} is not published")),
    );
    gaps.extend(elsewhere.intersection(&covered).map(|n| format!("C{n:02} is here and elsewhere")));
    gaps
}
