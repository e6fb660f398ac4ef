//! The table itself, one file per part.

mod crash;
mod expiry;
mod failure;
mod grpc;
mod headers;
mod mismatch;
mod natural;
mod operator;
mod parallel;
mod paths;
mod presence;
mod profiles;
mod refusals;
mod replay;
mod scope;
mod syntax;
mod upstream;

use crate::client::Request;
use crate::table::Case;

/// The whole table.
#[must_use]
pub fn cases() -> Vec<Case> {
    let parts = [
        syntax::cases,
        presence::cases,
        refusals::cases,
        replay::cases,
        headers::cases,
        mismatch::cases,
        natural::cases,
        parallel::cases,
        paths::cases,
        failure::cases,
        grpc::cases,
        crash::cases,
        scope::cases,
        expiry::cases,
        profiles::cases,
        upstream::cases,
        operator::cases,
    ];
    parts.into_iter().flat_map(|part| part()).collect()
}

/// A body that could be a payment.
const PAYMENT: &str = r#"{"amount":1000,"currency":"usd"}"#;

/// A payment without a key.
fn pay() -> Request {
    Request::post("/payments").json(PAYMENT)
}

/// A payment under this key.
fn pay_as(key: &str) -> Request {
    pay().key(key)
}
