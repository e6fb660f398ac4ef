//! Calls of tools by agents: the Model Context Protocol over streamable HTTP, revisions 2025-03-26 to 2026-07-28.
//!
//! All messages of a client are POST requests to one path. Only calls of tools have effects that a key protects, so all other
//! messages pass. The JSON-RPC `id` of a message is new in each retry: a replay and a refusal carry that of their own request.

mod call;
mod events;
mod json;
mod sessions;
mod stream;
mod tools;

pub(crate) use self::call::{CallError, CallOutcome, Message, OtherRequest, SESSION, ToolCall, read};
pub(crate) use self::sessions::{RunningCall, Sessions, is_end_of_session};
pub use self::tools::{ToolPolicies, ToolPolicy};

/// The protocol of the messages in the bodies of covered requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Protocol {
    /// None: each request is an operation.
    #[default]
    Http,
    /// The Model Context Protocol: calls of tools are operations, and other messages pass.
    Mcp,
}
