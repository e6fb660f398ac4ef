//! The program with servers, services and other programs of this project.

#[path = "../support/mod.rs"]
mod support;

mod alerts;
mod call;
#[cfg(feature = "failpoints")]
mod client;
mod dashboard;
mod demo;
mod examples;
mod id_secret;
mod messages;
mod outage;
mod probe;
mod redis;
mod shared_store;
mod snippets;
mod vendors;
