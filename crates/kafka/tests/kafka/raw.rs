//! Records that no client writes, sent to a broker byte by byte.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

/// The invalid part of a record.
#[derive(Clone, Copy)]
pub(crate) enum Wrong {
    /// The checksum.
    Checksum,
    /// Its compression: an unknown one.
    Compression,
}

/// Appends one such record to partition 0 of a topic, at the broker that leads it.
pub(crate) fn produce(broker: &str, topic: &str, wrong: Wrong) {
    let mut request = Vec::new();
    // Produce, version 7; the correlation id; no client id; no transaction; all replicas; ten seconds.
    request.extend([0, 0, 0, 7, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    request.extend(10_000_i32.to_be_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend((topic.len() as i16).to_be_bytes());
    request.extend(topic.as_bytes());
    request.extend(1_i32.to_be_bytes());
    request.extend(0_i32.to_be_bytes());
    let batch = batch(wrong);
    request.extend((batch.len() as i32).to_be_bytes());
    request.extend(batch);
    let mut stream = TcpStream::connect(broker).unwrap();
    stream.set_read_timeout(Some(oncegate_broker_tests::TIMEOUT)).unwrap();
    stream.write_all(&(request.len() as i32).to_be_bytes()).unwrap();
    stream.write_all(&request).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut reply = vec![0; i32::from_be_bytes(length) as usize];
    stream.read_exact(&mut reply).unwrap();
    // The reply's number, one topic and its name, one partition and its number, and what became of it.
    let error = 4 + 4 + 2 + topic.len() + 4 + 4;
    assert_eq!(reply[error..error + 2], [0, 0], "{reply:?}");
}

/// One record with the payload `x`, without key and headers.
fn batch(wrong: Wrong) -> Vec<u8> {
    let compression = if let Wrong::Compression = wrong { 7_i16 } else { 0 };
    let mut checked = Vec::new();
    checked.extend(compression.to_be_bytes());
    // The last offset in it; the first and the last time.
    checked.extend([0; 4 + 8 + 8]);
    // No producer id, epoch and sequence.
    checked.extend([0xff; 8 + 2 + 4]);
    checked.extend(1_i32.to_be_bytes());
    checked.extend([14, 0, 0, 0, 1, 2, b'x', 0]);
    let checksum = crc32c(&checked) ^ u32::from(matches!(wrong, Wrong::Checksum));
    let mut batch = vec![0; 8];
    batch.extend((4 + 1 + 4 + checked.len() as i32).to_be_bytes());
    batch.extend([0, 0, 0, 0, 2]);
    batch.extend(checksum.to_be_bytes());
    batch.extend(checked);
    batch
}

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
        }
    }
    !crc
}
