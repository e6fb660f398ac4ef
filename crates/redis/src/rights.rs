//! A check that the user may call the commands of the scripts.
//!
//! A script calls each command once, on keys that expire at once. `ACL DRYRUN` would answer the same for the user, if the user
//! may call it, but not for commands that the server's configuration renamed.

use std::time::Duration;

use redis::cmd;

use crate::error::Failure;
use crate::link::{Wire, ask_one};

/// The keys of the check, in one slot of a Cluster.
const KEYS: [&str; 2] = ["oncegate:{check}record", "oncegate:{check}stream"];

/// Returns the refused commands: first those of requests, then those of the audit trail.
const SCRIPT: &str = "\
local refused = {}
-- Returns true unless the command is refused.
local function try(name, ...)
  local reply = redis.pcall(name, ...)
  local why = type(reply) == 'table' and reply.err and string.lower(reply.err)
  -- Another error, such as that memory is used up, is not about rights.
  if why and (string.find(why, 'acl failure', 1, true) or string.find(why, 'no permissions', 1, true)
    or string.find(why, 'executing the script can', 1, true) or string.find(why, 'unknown redis command', 1, true)
    or string.find(why, 'unknown command', 1, true)) then
    table.insert(refused, name)
    return false
  end
  return true
end
local record, stream = KEYS[1], KEYS[2]
try('TIME')
try('GET', record)
try('GETRANGE', record, '0', '1')
-- Only a key that expires is appended to.
if try('SET', record, '', 'PX', '1000') and try('APPEND', record, '') then
  -- A time in the past: it is gone at once.
  redis.pcall('SET', record, '', 'PXAT', '1')
end
-- It creates no stream.
try('XADD', stream, 'NOMKSTREAM', '*', 'a', '1')
try('XREVRANGE', stream, '+', '-', 'COUNT', '1')
return refused
";

/// The commands that only the audit trail needs.
const OF_OPERATORS: [&str; 2] = ["XADD", "XREVRANGE"];

/// The commands that the server refuses to the user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingCommands {
    /// The commands without which no request with a key can be executed.
    pub(crate) of_requests: Vec<String>,
    /// The commands without which no operator can resolve a record.
    pub(crate) of_operators: Vec<String>,
}

/// Asks the server, or the node of a Cluster that has the keys.
///
/// # Errors
/// If the server does not answer, or cannot run a script now.
pub(crate) async fn refused(wire: &Wire, limit: Duration) -> Result<MissingCommands, Failure> {
    let mut command = cmd("EVAL");
    command.arg(SCRIPT).arg(KEYS.len()).arg(&KEYS);
    let names = match ask_one(wire, &command, limit).await {
        Ok(reply) => redis::from_redis_value::<Vec<String>>(reply).map_err(|_| Failure::UnexpectedReply)?,
        Err(failure) if failure.is("NOPERM") => vec!["EVAL".to_owned()],
        Err(failure) => return Err(failure),
    };
    let (of_operators, of_requests) =
        names.into_iter().partition(|name| OF_OPERATORS.contains(&name.as_str()));
    Ok(MissingCommands { of_requests, of_operators })
}
