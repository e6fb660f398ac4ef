//! Listings: a walk through the keys with `SCAN`, in the order of the server.
//!
//! A cursor has the form of a record's identifier, because callers store identifiers: the number of the node (u16), the
//! position of its walk (u64), a flag if a record of this portion was returned (u8), and the first 21 bytes of the last one.
//! `SCAN` returns keys in portions. If a page is full within a portion, the next page asks for the same portion again and
//! continues after that record, in the order of identifiers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use oncegate_core::{Extent, ListPage, ListQuery, RecordId, StoreError, StoreErrorKind};
use redis::{Value, cmd};

use crate::contract::record_of;
use crate::error::Failure;
use crate::link::{Connection, Link, ask_all};
use crate::reply::{bytes, number, unexpected_reply};
use crate::store::StoreInner;

/// The most keys that one page looks at.
const MAX_KEYS: usize = 10_000;

/// The records that are read at the same time, in one pipeline, so that a page does not wait for each reply. Their responses may
/// be in memory in addition to those of the page.
const READS_AT_ONCE: usize = 8;

/// The most records that are read before their sizes are looked at.
const GROUP: usize = 16;

/// The size of a response, in bytes, from which the next record is read alone: the replies to requests wait on the same
/// connection behind those that are under way.
const LARGE: usize = 64 * 1024;

/// The largest sum of the responses in a page, except for the last one.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// The time after which a page ends.
const MAX_TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    pub(crate) node: u16,
    /// The cursor of the server.
    pub(crate) scan: u64,
    pub(crate) shown: Option<[u8; 21]>,
}

impl Cursor {
    pub(crate) fn read(after: Option<RecordId>) -> Self {
        let Some(after) = after else { return Self::default() };
        let id = after.as_bytes();
        let node = id.first_chunk().map_or(0, |node| u16::from_be_bytes(*node));
        let scan =
            id.get(2..).and_then(|rest| rest.first_chunk()).map_or(0, |scan| u64::from_be_bytes(*scan));
        let shown = id.last_chunk().copied().filter(|_| id.get(10) == Some(&1));
        // The server counts from the highest bit downwards. In reverse order the number grows, and so does the cursor.
        Self { node, scan: scan.reverse_bits(), shown }
    }

    pub(crate) fn write(self) -> RecordId {
        let mut bytes = [0; 32];
        let parts = self.node.to_be_bytes().into_iter().chain(self.scan.reverse_bits().to_be_bytes());
        let parts = parts.chain([u8::from(self.shown.is_some())]).chain(self.shown.unwrap_or_default());
        bytes.iter_mut().zip(parts).for_each(|(to, from)| *to = from);
        RecordId::from_bytes(bytes)
    }

    /// Tells if the record was returned from this portion already.
    fn is_past(&self, id: &RecordId) -> bool {
        self.shown
            .is_some_and(|shown| id.as_bytes().first_chunk().is_some_and(|start: &[u8; 21]| *start <= shown))
    }
}

/// A page of records.
pub(crate) async fn list(shared: &StoreInner, query: &ListQuery) -> Result<ListPage, StoreError> {
    let link = &shared.link;
    let connection = link.connection().await?;
    let nodes = nodes(link, &connection).await?;
    let started = Instant::now();
    let limit = query.bounded_limit();
    let (mut page, mut size, mut looked_at) = (ListPage::default(), 0, 0);
    // The first one is read alone, because its size is not known. So is the one after a large one.
    let mut group_size = 1;
    let mut cursor = Cursor::read(query.after);
    while let Some(node) = nodes.get(usize::from(cursor.node)) {
        let (next, ids) = scan(link, &connection, node, cursor.scan, limit.clamp(10, 1000)).await?;
        let selected = ids.iter().copied().filter(|id| !cursor.is_past(id));
        let selected: Vec<_> = selected.collect();
        let mut left = &selected[..];
        while !left.is_empty() {
            let (group, later) = left.split_at(left.len().min(group_size));
            left = later;
            let mut largest = 0;
            let group = group.iter().copied();
            let group = group.map(|id| async move { (id, shared.listed(id, query).await) });
            let mut reads = stream::iter(group).buffered(READS_AT_ONCE);
            while let Some((id, found)) = reads.next().await {
                looked_at += 1;
                match found {
                    Ok(None) => {}
                    Ok(Some(record)) => {
                        let of_record = size_of(&record);
                        (size, largest) = (size + of_record, largest.max(of_record));
                        page.records.push((id, record));
                    }
                    Err(error) if error.kind() == StoreErrorKind::Corrupt => page.unreadable.push(id),
                    Err(error) => return Err(error),
                }
                let full = page.records.len() + page.unreadable.len() >= limit
                    || size >= MAX_BYTES
                    || started.elapsed() >= MAX_TIME;
                if full && ids.last() != Some(&id) {
                    let shown = id.as_bytes().first_chunk().copied();
                    page.next = Some(Cursor { shown, ..cursor }.write());
                    return Ok(page);
                }
            }
            group_size = if largest < LARGE { (group_size * 2).min(GROUP) } else { 1 };
        }
        cursor = match next {
            0 => Cursor { node: cursor.node.saturating_add(1), scan: 0, shown: None },
            scan => Cursor { scan, shown: None, ..cursor },
        };
        let full = page.records.len() + page.unreadable.len() >= limit || size >= MAX_BYTES;
        if full || looked_at >= MAX_KEYS || started.elapsed() >= MAX_TIME {
            let more = usize::from(cursor.node) < nodes.len();
            page.next = more.then(|| cursor.write());
            return Ok(page);
        }
    }
    Ok(page)
}

fn size_of(record: &oncegate_core::Record) -> usize {
    let response = match &record.state {
        oncegate_core::State::Completed(oncegate_core::RecordedResponse::Replayable(response)) => {
            response.as_encoded().len()
        }
        _ => 0,
    };
    response + record.steps.size()
}

/// The primaries, in an order that stays the same as long as they do. Without a Cluster, one without a name.
pub(crate) async fn nodes(link: &Link, connection: &Connection) -> Result<Vec<(String, u16)>, StoreError> {
    if !connection.is_cluster() {
        return Ok(vec![(String::new(), 0)]);
    }
    // The line of each primary about itself contains `myself`.
    let mut command = cmd("CLUSTER");
    command.arg("NODES");
    let said =
        ask_all(connection.wire(), &command, link.options().timeout).await.map_err(StoreError::from)?;
    let mut nodes = Vec::with_capacity(said.len());
    let mut covered = vec![false; SLOTS];
    for text in said {
        let text: String = redis::from_redis_value(text).map_err(|_| unexpected_reply())?;
        let line = text.lines().find(|line| line.contains("myself")).ok_or_else(unexpected_reply)?;
        let address = line.split(' ').nth(1).and_then(|address| address.split(['@', ',']).next());
        let (host, port) =
            address.and_then(|address| address.rsplit_once(':')).ok_or_else(unexpected_reply)?;
        nodes.push((host.to_owned(), port.parse().map_err(|_| unexpected_reply())?));
        cover(&mut covered, line);
    }
    // A node that does not answer is in none of the answers. A listing without its records would look complete, and a deletion
    // that goes by it, too.
    let missing = covered.iter().filter(|is_covered| !**is_covered).count();
    if missing > 0 {
        let what = format!(
            "{missing} of {SLOTS} slots of the cluster belong to no node that answers: a listing would be incomplete"
        );
        return Err(StoreError::unavailable(what).with_extent(Extent::Record));
    }
    nodes.sort();
    Ok(nodes)
}

/// The slots of a cluster.
const SLOTS: usize = 16_384;

/// Notes the slots in a line of `CLUSTER NODES`: numbers and ranges after the eighth field. Those in brackets are on their way.
fn cover(covered: &mut [bool], line: &str) {
    for part in line.split_ascii_whitespace().skip(8).filter(|part| !part.starts_with('[')) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>())
            && let Some(slots) = covered.get_mut(first..=last)
        {
            slots.fill(true);
        }
    }
}

/// Reads a portion of a node's keys. Returns the records among them in their order, and the start of the next portion, or 0
/// after the last one.
async fn scan(
    link: &Arc<Link>,
    connection: &Connection,
    node: &(String, u16),
    from: u64,
    count: usize,
) -> Result<(u64, Vec<RecordId>), StoreError> {
    let mut command = cmd("SCAN");
    command.arg(from).arg("MATCH").arg("oncegate:{*}").arg("COUNT").arg(count);
    let Value::Array(parts) = link.send_to(connection, node, command).await? else {
        return Err(unexpected_reply());
    };
    let mut parts = parts.into_iter();
    let next =
        parts.next().and_then(self::bytes).and_then(|digits| number(&digits)).ok_or_else(unexpected_reply)?;
    let Some(Value::Array(keys)) = parts.next() else { return Err(Failure::UnexpectedReply.into()) };
    let mut ids: Vec<_> = keys.into_iter().filter_map(|key| record_of(&bytes(key)?)).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok((next, ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slots_of_a_node_are_numbers_and_ranges() {
        let mut covered = vec![false; SLOTS];
        cover(
            &mut covered,
            "07c37df 127.0.0.1:30004@31004 myself,master - 0 0 2 connected 0-5460 7000 [93->-292f8b3]",
        );
        assert_eq!(covered.iter().filter(|is_covered| **is_covered).count(), 5462);
        cover(&mut covered, "07c37df 127.0.0.1:30005@31005 myself,master - 0 0 3 connected 5461-16383");
        assert!(covered.iter().all(|is_covered| *is_covered));
        cover(&mut covered, "07c37df 127.0.0.1:30005@31005 myself,master - 0 0 3 connected 5461-99999 x-y");
    }

    #[test]
    fn a_cursor_reads_back_and_grows_as_the_walk_goes_on() {
        let cursors = [
            Cursor { node: 0, scan: 1 << 63, shown: None },
            Cursor { node: 0, scan: 5, shown: Some([7; 21]) },
            Cursor { node: 3, scan: u64::MAX, shown: Some([255; 21]) },
            Cursor { node: 0, scan: 0, shown: Some([0; 21]) },
        ];
        for cursor in cursors {
            assert_eq!(Cursor::read(Some(cursor.write())), cursor);
        }
        assert_eq!(Cursor::read(None), Cursor::default());
        // The walk through a table of eight places.
        let walk = [4, 2, 6, 1, 5, 3, 7].map(|scan| Cursor { node: 0, scan, shown: None }.write());
        assert!(walk.is_sorted());
        let next_node = Cursor { node: 1, scan: 0, shown: None }.write();
        assert!(walk.iter().all(|cursor| *cursor < next_node));
    }

    #[test]
    fn records_returned_from_a_portion_are_not_returned_again() {
        let cursor = Cursor { node: 0, scan: 0, shown: Some([7; 21]) };
        assert!(
            cursor.is_past(&RecordId::from_bytes([7; 32])) && cursor.is_past(&RecordId::from_bytes([6; 32]))
        );
        assert!(!cursor.is_past(&RecordId::from_bytes([8; 32])));
        assert!(!Cursor::default().is_past(&RecordId::from_bytes([0; 32])));
    }
}
