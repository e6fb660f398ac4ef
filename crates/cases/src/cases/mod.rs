//! The table of cases, one file per subject.

/// Builds the rows of a table of cases.
///
/// A row is `"name": "title"`, settings and exclusions as calls of [`Case`]'s methods, `=>`, and one of
/// - `steps [request, …]` or `steps { a block that returns a Vec of steps }`,
/// - `run (function, argument, …)`: an async function of a [`World`](crate::world::World) whose deployment runs,
/// - `start (function, argument, …)`: the same, but the function starts the deployment itself.
macro_rules! cases {
    ($(
        $name:literal: $title:literal $(.$setting:ident($($value:expr),* $(,)?))*
            => $kind:ident $action:tt;
    )*) => {
        vec![$(
            $crate::table::Case::new($name, $title, cases!(@$kind $action))$(.$setting($($value),*))*
        ),*]
    };
    (@steps [$($step:expr),* $(,)?]) => { $crate::table::Action::Steps(|| vec![$($step),*]) };
    (@steps {$($block:tt)*}) => { $crate::table::Action::Steps(|| {$($block)*}) };
    (@steps ($steps:expr)) => { $crate::table::Action::Steps($steps) };
    (@run ($run:ident $(, $argument:expr)*)) => {
        $crate::table::Action::Run(|world| Box::pin($run(world $(, $argument)*)))
    };
    (@run {$run:expr}) => { $crate::table::Action::Run($run) };
    (@start ($run:ident $(, $argument:expr)*)) => {
        $crate::table::Action::Start(|world| Box::pin($run(world $(, $argument)*)))
    };
    (@start {$run:expr}) => { $crate::table::Action::Start($run) };
}

mod agents;
mod callers;
mod crash;
mod dialects;
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

/// All cases.
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
        callers::cases,
        expiry::cases,
        profiles::cases,
        dialects::cases,
        agents::cases,
        upstream::cases,
        operator::cases,
    ];
    parts.into_iter().flat_map(|part| part()).collect()
}

/// The body of a payment.
const PAYMENT: &str = r#"{"amount":1000,"currency":"usd"}"#;

/// A request for a payment, without a key.
fn pay() -> Request {
    Request::post("/payments").json(PAYMENT)
}

/// A request for a payment, with this key.
fn pay_as(key: &str) -> Request {
    pay().key(key)
}
