//! Surveys: the numbers and places of records, from the beginning of each record.
//!
//! A script walks through the keys of a node with `SCAN`, and returns the first bytes of the records of a portion. Of a
//! response, at most the first bytes leave the server, and the server is occupied for one to two milliseconds at a time.
//!
//! A cursor is one of a [listing](crate::list), with a digest of the nodes instead of the last record: the numbers of
//! nodes mean others once a replica has taken over.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use oncegate_core::{
    Extent, RecordId, StoreError, StoreErrorKind, StoredResponse, Survey, SurveyQuery, SurveyTally,
};
use redis::Value;
use tracing::debug;

use crate::contract::{Script, compose, part, record_of};
use crate::error::Failure;
use crate::layout::{MAX_BEFORE_OPERATION, record_without_content};
use crate::link::Connection;
use crate::list::{Cursor, nodes};
use crate::reply::{bytes, number, unexpected_reply};
use crate::slots::Node;
use crate::store::StoreInner;

/// The keys that one script looks at. Other commands of the server wait meanwhile.
const KEYS_AT_ONCE: &[u8] = b"250";

/// The bytes that are read of a record first if its operation matters. Longer operations are read by a second command.
const WITH_OPERATION: usize = 192;

/// The time after which a survey ends with a part.
const MAX_TIME: Duration = Duration::from_millis(250);

/// The number of operations that are counted separately, after which a survey ends with a part.
const MAX_OPERATIONS: usize = 10_000;

/// The unreadable records after which a survey ends with a part. Each costs a call.
const MAX_UNREADABLE: usize = 1000;

/// The records that are read one by one at the same time.
const READS_AT_ONCE: usize = 8;

/// The script. It is not one of the contract.
pub(crate) fn script() -> Script {
    compose(include_str!("../lua/survey.lua"), &part)
}

/// A survey from the query's cursor on, of all records or of a part of them.
pub(crate) async fn survey(shared: &StoreInner, query: SurveyQuery) -> Result<Option<Survey>, StoreError> {
    let placeholder = StoredResponse::new(200, &[], &[], &[])
        .map_err(|_| StoreError::invalid("an empty response is not a response"))?;
    let connection = shared.link.connection().await?;
    let mut survey = RunningSurvey {
        shared,
        connection: &connection,
        placeholder,
        needs_operation: query.by_operation
            || query.except_operation.is_some()
            || query.list.operation.is_some(),
        tally: SurveyTally::new(query.clone()),
        unreadable: Vec::new(),
    };
    let nodes = nodes(&shared.link, &connection).await?;
    let digest = digest_of(&nodes);
    let mut cursor = Cursor::read(query.list.after);
    if query.list.after.is_some() && cursor.shown != Some(digest) {
        return Err(other_nodes());
    }
    let started = Instant::now();
    while let Some(node) = nodes.get(usize::from(cursor.node)) {
        match survey.read_portion(node, cursor.scan).await {
            Ok(0) => cursor = Cursor { node: cursor.node.saturating_add(1), scan: 0, shown: None },
            Ok(scan) => cursor.scan = scan,
            Err(PortionError::Refused(failure)) => {
                debug!(%failure, "the server refuses the script of surveys; records are listed");
                return Ok(None);
            }
            Err(PortionError::Other(error)) => return Err(error),
        }
        if started.elapsed() >= MAX_TIME
            || survey.tally.operations() >= MAX_OPERATIONS
            || survey.unreadable.len() >= MAX_UNREADABLE
        {
            break;
        }
    }
    // A replica that took over meanwhile has the keys in another order, and possibly not all of them.
    if connection.is_cluster() && digest_of(&self::nodes(&shared.link, &connection).await?) != digest {
        return Err(other_nodes());
    }
    let is_part = usize::from(cursor.node) < nodes.len();
    let mut found = survey.tally.finish();
    found.unreadable = survey.unreadable;
    found.next = is_part.then(|| Cursor { shown: Some(digest), ..cursor }.write());
    Ok(Some(found))
}

/// A digest of the nodes, in the form of the last record of a cursor.
fn digest_of(nodes: &[Node]) -> [u8; 21] {
    let mut hasher = DefaultHasher::new();
    nodes.hash(&mut hasher);
    let mut digest = [0; 21];
    digest.iter_mut().zip(hasher.finish().to_be_bytes()).for_each(|(to, from)| *to = from);
    digest
}

fn other_nodes() -> StoreError {
    StoreError::unavailable("the nodes of the cluster have changed during a walk through the records")
        .with_extent(Extent::Record)
}

/// The reason why a portion was not read.
enum PortionError {
    /// The server does not run the script, for a reason that is not of the moment.
    Refused(Failure),
    Other(StoreError),
}

impl From<StoreError> for PortionError {
    fn from(error: StoreError) -> Self {
        Self::Other(error)
    }
}

struct RunningSurvey<'a> {
    shared: &'a StoreInner,
    connection: &'a Connection,
    /// Stands for each response.
    placeholder: StoredResponse,
    needs_operation: bool,
    tally: SurveyTally,
    unreadable: Vec<RecordId>,
}

impl RunningSurvey<'_> {
    /// Adds the records of a portion of a node's keys. Returns the start of the next portion, or 0 after the last one.
    async fn read_portion(&mut self, node: &Node, from: u64) -> Result<u64, PortionError> {
        let from = from.to_string();
        let size = if self.needs_operation { WITH_OPERATION } else { MAX_BEFORE_OPERATION }.to_string();
        let needs_operation: &[u8] = if self.needs_operation { b"1" } else { b"0" };
        let arguments = [from.as_bytes(), KEYS_AT_ONCE, size.as_bytes(), needs_operation];
        let script = &self.shared.survey_script;
        let reply = match self.shared.call_node(self.connection, node, script, &arguments).await {
            Ok(reply) => reply,
            Err(failure) if failure.is("ERR") || failure.is("NOPERM") => {
                return Err(PortionError::Refused(failure));
            }
            Err(failure) => return Err(PortionError::Other(failure.into())),
        };
        let now = reply.now;
        let [next, Value::Array(keys), Value::Array(heads)] =
            <[Value; 3]>::try_from(reply.values()).map_err(|_| unexpected_reply())?
        else {
            return Err(unexpected_reply().into());
        };
        let next = bytes(next).and_then(|digits| number(&digits)).ok_or_else(unexpected_reply)?;
        if keys.len() != heads.len() {
            return Err(unexpected_reply().into());
        }
        let mut unread = Vec::new();
        for (key, head) in keys.into_iter().zip(heads) {
            let Some(id) = bytes(key).and_then(|key| record_of(&key)) else { continue };
            match head {
                Value::BulkString(head) if head.is_empty() => {}
                Value::BulkString(head) => match record_without_content(&head, &self.placeholder) {
                    Some(record) => self.tally.add(id, &record, now),
                    None => unread.push(id),
                },
                _ => unread.push(id),
            }
        }
        self.read_one_by_one(unread).await?;
        Ok(next)
    }

    /// Adds records that the script could not read. Some can be read where they belong.
    async fn read_one_by_one(&mut self, ids: Vec<RecordId>) -> Result<(), StoreError> {
        let (shared, connection) = (self.shared, self.connection);
        let reads = ids.into_iter().map(|id| async move { (id, shared.head(connection, id).await) });
        let mut reads = stream::iter(reads).buffered(READS_AT_ONCE);
        while let Some((id, found)) = reads.next().await {
            match found {
                Ok((Some(record), now)) => self.tally.add(id, &record, now),
                Ok((None, _)) => {}
                Err(error) if error.kind() == StoreErrorKind::Corrupt => self.unreadable.push(id),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
