//! The golden vectors of [`decide`], which memory stores in other languages use too: `vectors/decisions.json`.
//!
//! A walk is a list of commands for one record, each with its time, its outcome and the record after it. With
//! `ONCEGATE_WRITE_VECTORS=1` the test writes the file from the code.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    AttemptId, CallerTag, Claim, Command, Complete, Completion, FencingToken, Fingerprint, KeyTag, Label,
    OnAbandoned, Outcome, Record, RecordStep, RecordedResponse, Release, Renew, Resolution, Resolve, State,
    Step, StoredResponse, Timestamp, Write, decide,
};
use serde_json::{Value, json};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/decisions.json");

const START: u64 = 1_800_000_000_000;
const LEASE: u64 = 30_000;
const RETENTION: u64 = 600_000;
const WALKS: u64 = 40;
const COMMANDS: usize = 24;

/// A small generator of numbers (xorshift64*), so that the walks are the same on every machine.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn response(number: u64) -> StoredResponse {
    let body = [Bytes::from(format!("receipt {number}"))];
    StoredResponse::new(201, &[("content-type", &b"text/plain"[..])], &body, &[]).unwrap()
}

/// A command for this record, often one that fits it.
fn command(numbers: &mut Numbers, record: Option<&Record>, now: Timestamp) -> Command {
    let newest = record.map_or(START, |record| record.token.get());
    let token = FencingToken::new(if numbers.one_in(5) { newest - 1 } else { newest });
    let retention = Duration::from_millis(if numbers.one_in(6) { 1_000 } else { RETENTION });
    match numbers.below(12) {
        0..=3 => Command::Claim(Claim {
            attempt: AttemptId::new(numbers.below(3).into()),
            fingerprint: Fingerprint::of_parts("vector", &[if numbers.one_in(6) { b"b" } else { b"a" }]),
            lease: Duration::from_millis(LEASE),
            retention,
            on_abandoned: [OnAbandoned::Park, OnAbandoned::Reexecute, OnAbandoned::Reconcile]
                [numbers.below(3) as usize],
            label: Label::new(CallerTag::from_bytes([7; 8]), "POST /payments")
                .with_key(numbers.one_in(2).then(|| KeyTag::from_bytes([9; 8]))),
        }),
        4 => Command::Renew(Renew { token, lease: Duration::from_millis(LEASE), retention }),
        5 | 6 => {
            let recorded = record.map_or(0, |record| record.steps.len());
            let number = if numbers.one_in(4) { numbers.below(3) as usize } else { recorded };
            let result = format!("result {}", numbers.below(2));
            let step = Step::new(&format!("step {number}"), result.into()).unwrap();
            Command::Step(RecordStep { token, number, step })
        }
        7 | 8 => Command::Complete(Complete {
            token,
            completion: match numbers.below(6) {
                0 => Completion::Awaited,
                1 => Completion::Tombstone,
                2 => Completion::Unknown,
                _ => Completion::Replayable(response(numbers.below(2))),
            },
            retention,
        }),
        9 => Command::Release(Release { token, retention }),
        _ => Command::Resolve(Resolve {
            resolution: match numbers.below(4) {
                0 => Resolution::Park,
                1 => Resolution::Release,
                2 => Resolution::Complete(None),
                _ => Resolution::Complete(Some(response(numbers.below(2)))),
            },
            retention,
            force: numbers.one_in(2),
            amend: numbers.one_in(2),
            actor: "ada".to_owned(),
            reason: format!("at {}", now.as_millis()),
        }),
    }
}

/// The next time: mostly later, also beyond leases and retentions, and seldom earlier.
fn next_time(numbers: &mut Numbers, now: u64) -> u64 {
    match numbers.below(12) {
        0 => now.saturating_sub(numbers.below(2 * 3_600_000 + 1)),
        1 => now + LEASE,
        2 => now + LEASE + numbers.below(LEASE),
        3 => now + RETENTION,
        _ => now + numbers.below(LEASE / 3),
    }
}

fn show_command(command: &Command) -> Value {
    let millis = |duration: Duration| duration.as_millis() as u64;
    match command {
        Command::Claim(claim) => json!({
            "command": "claim",
            "attempt": format!("{:032x}", claim.attempt.get()),
            "fingerprint": show_fingerprint(&claim.fingerprint),
            "lease_ms": millis(claim.lease),
            "retention_ms": millis(claim.retention),
            "on_abandoned": match claim.on_abandoned {
                OnAbandoned::Park => "park",
                OnAbandoned::Reexecute => "reexecute",
                OnAbandoned::Reconcile => "reconcile",
                other => panic!("{other:?}"),
            },
            "caller": claim.label.caller().to_string(),
            "operation": claim.label.operation(),
            "key_tag": claim.label.key().map(|tag| tag.to_string()),
        }),
        Command::Renew(renew) => json!({
            "command": "renew",
            "token": renew.token.get(),
            "lease_ms": millis(renew.lease),
            "retention_ms": millis(renew.retention),
        }),
        Command::Step(step) => json!({
            "command": "step",
            "token": step.token.get(),
            "number": step.number,
            "name": step.step.name(),
            "result": hex(step.step.result()),
        }),
        Command::Complete(complete) => {
            let (state, response) = match &complete.completion {
                Completion::Replayable(response) => ("completed", Some(hex(response.as_encoded()))),
                Completion::Awaited => ("awaited", None),
                Completion::Tombstone => ("tombstone", None),
                Completion::Unknown => ("unknown", None),
                other => panic!("{other:?}"),
            };
            json!({
                "command": "complete",
                "token": complete.token.get(),
                "state": state,
                "response": response,
                "retention_ms": millis(complete.retention),
            })
        }
        Command::Release(release) => json!({
            "command": "release",
            "token": release.token.get(),
            "retention_ms": millis(release.retention),
        }),
        Command::Resolve(resolve) => {
            let (resolution, response) = match &resolve.resolution {
                Resolution::Complete(response) => {
                    ("complete", response.as_ref().map(|response| hex(response.as_encoded())))
                }
                Resolution::Release => ("release", None),
                Resolution::Park => ("park", None),
                other => panic!("{other:?}"),
            };
            json!({
                "command": "resolve",
                "resolution": resolution,
                "response": response,
                "retention_ms": millis(resolve.retention),
                "force": resolve.force,
                "amend": resolve.amend,
                "actor": resolve.actor,
                "reason": resolve.reason,
            })
        }
        other => panic!("{other:?}"),
    }
}

fn show_fingerprint(fingerprint: &Fingerprint) -> String {
    format!("{:02x}{}", fingerprint.version(), hex(fingerprint.digest()))
}

fn show_outcome(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Execute(grant) => json!({
            "outcome": "execute",
            "token": grant.token.get(),
            "attempts": grant.attempts,
            "lease_until": grant.lease_until.as_millis(),
            "after_abandoned": grant.after_abandoned,
        }),
        Outcome::Replay(response) => json!({"outcome": "replay", "response": hex(response.as_encoded())}),
        Outcome::InProgress { lease_left } => {
            json!({"outcome": "in-progress", "lease_left_ms": lease_left.as_millis() as u64})
        }
        Outcome::Mismatch => json!({"outcome": "mismatch"}),
        Outcome::Unknown => json!({"outcome": "unknown"}),
        Outcome::Unreplayable => json!({"outcome": "unreplayable"}),
        Outcome::Renewed { lease_until } => {
            json!({"outcome": "renewed", "lease_until": lease_until.as_millis()})
        }
        Outcome::StepRecorded => json!({"outcome": "recorded"}),
        Outcome::StepDiffers => json!({"outcome": "differs"}),
        Outcome::StepsFull => json!({"outcome": "full"}),
        Outcome::Completed => json!({"outcome": "completed"}),
        Outcome::Released => json!({"outcome": "released"}),
        Outcome::Fenced => json!({"outcome": "fenced"}),
        Outcome::Resolved { from } => json!({"outcome": "resolved", "state_before": from.as_str()}),
        Outcome::NotResolvable { state } => {
            json!({"outcome": "not-resolvable", "state_before": state.map(|state| state.as_str())})
        }
        other => panic!("{other:?}"),
    }
}

/// The record in the words of `lookup` in the contracts.
fn show_record(record: &Record) -> Value {
    let mut shown = json!({
        "state": match &record.state {
            State::InProgress { .. } => "in-progress",
            State::Unknown => "unknown",
            State::Completed(RecordedResponse::Replayable(_)) => "completed",
            State::Completed(RecordedResponse::Awaited) => "awaited",
            State::Completed(RecordedResponse::Tombstone) => "tombstone",
            State::Released => "released",
            other => panic!("{other:?}"),
        },
        "fingerprint": show_fingerprint(&record.fingerprint),
        "token": record.token.get(),
        "attempts": record.attempts,
        "created_at": record.created_at.as_millis(),
        "changed_at": record.changed_at.as_millis(),
        "expires_at": record.expires_at.as_millis(),
        "caller": record.label.caller().to_string(),
        "operation": record.label.operation(),
        "key_tag": record.label.key().map(|tag| tag.to_string()),
        "by_operator": record.by_operator,
        "steps": record.steps.as_slice().iter().map(|step| json!([step.name(), hex(step.result())])).collect::<Vec<_>>(),
    });
    match &record.state {
        State::InProgress { attempt, lease_until, after_abandoned } => {
            shown["attempt"] = format!("{:032x}", attempt.get()).into();
            shown["lease_until"] = lease_until.as_millis().into();
            shown["after_abandoned"] = (*after_abandoned).into();
        }
        State::Completed(RecordedResponse::Replayable(response)) => {
            shown["response"] = hex(response.as_encoded()).into();
        }
        _ => {}
    }
    shown
}

fn walk(seed: u64) -> Value {
    let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut now, mut record) = (START, None);
    let mut steps = Vec::new();
    for _ in 0..COMMANDS {
        now = next_time(&mut numbers, now);
        let at = Timestamp::from_millis(now);
        let command = command(&mut numbers, record.as_ref(), at);
        let decision = decide(record.as_ref(), &command, at);
        if let Write::Put(written) = decision.write {
            record = Some(written);
        }
        let mut step = show_command(&command);
        step["now"] = now.into();
        step["expect"] = show_outcome(&decision.outcome);
        step["record"] = record.as_ref().map(show_record).into();
        steps.push(step);
    }
    steps.into()
}

fn file() -> String {
    let about = "Golden vectors of the pure function that decides everything (crates/core/src/decide.rs). A \
                 walk is a list of commands for one record: at the time `now` (milliseconds), the command \
                 has the outcome `expect`, and the record is `record` afterwards (null: none). Bytes are \
                 hexadecimal. A record past its `expires_at` counts as absent, but stays until a claim \
                 replaces it, so that its token counts.";
    let mut text = format!(
        "{{\n \"about\": {},\n \"version\": 1,\n \"walks\": [",
        serde_json::to_string(about).unwrap()
    );
    for seed in 0..WALKS {
        text.push_str(if seed == 0 { "\n  [" } else { ",\n  [" });
        for (number, step) in walk(seed + 1).as_array().unwrap().iter().enumerate() {
            write!(text, "{}\n   {step}", if number == 0 { "" } else { "," }).unwrap();
        }
        text.push_str("\n  ]");
    }
    text.push_str("\n ]\n}\n");
    text
}

#[test]
fn decisions() {
    let computed = file();
    if std::env::var_os("ONCEGATE_WRITE_VECTORS").is_some() {
        std::fs::write(FILE, &computed).unwrap();
    }
    let published = std::fs::read_to_string(FILE).unwrap();
    for (line, (published, computed)) in published.lines().zip(computed.lines()).enumerate() {
        assert_eq!(published, computed, "{FILE}:{}", line + 1);
    }
    assert_eq!(published.len(), computed.len());
}

#[test]
fn the_walks_reach_every_outcome_and_state() {
    let walks: Value = serde_json::from_str(&file()).unwrap();
    let steps: Vec<_> =
        walks["walks"].as_array().unwrap().iter().flat_map(|walk| walk.as_array().unwrap()).collect();
    for outcome in [
        "execute", "replay", "in-progress", "mismatch", "unknown", "unreplayable", "renewed", "recorded",
        "differs", "completed", "released", "fenced", "resolved", "not-resolvable",
    ] {
        let count = steps.iter().filter(|step| step["expect"]["outcome"] == outcome).count();
        assert!(count >= 5, "{outcome}: {count}");
    }
    for state in ["in-progress", "unknown", "completed", "awaited", "tombstone", "released"] {
        assert!(steps.iter().any(|step| step["record"]["state"] == state), "{state}");
    }
    assert!(steps.iter().any(|step| step["expect"]["after_abandoned"] == true));
}
