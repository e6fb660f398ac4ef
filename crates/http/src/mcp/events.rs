//! Server-sent events (HTML Living Standard, 9.2), cut where one ends and the next begins.

use bytes::{Bytes, BytesMut};

/// The part of a stream of events that has arrived and was not taken yet.
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    bytes: BytesMut,
    /// The number of bytes at the beginning that hold no end of an event.
    scanned: usize,
    /// True if the line at `scanned` has a character.
    has_line: bool,
    /// True if the last byte that was scanned is a CR: an LF after it belongs to the same end of a line.
    is_after_cr: bool,
}

impl EventBuffer {
    pub(super) fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
    }

    /// The number of bytes that were not taken.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes the next whole event, up to the end of the empty line after it. An LF that arrives after the CR of that line is
    /// taken alone, as an event that says nothing.
    pub(super) fn next(&mut self) -> Option<Bytes> {
        while let Some(byte) = self.bytes.get(self.scanned).copied() {
            self.scanned += 1;
            let is_second = byte == b'\n' && self.is_after_cr;
            self.is_after_cr = byte == b'\r';
            let is_end = match byte {
                b'\n' if is_second => self.scanned == 1,
                b'\r' | b'\n' => !std::mem::take(&mut self.has_line),
                _ => {
                    self.has_line = true;
                    false
                }
            };
            if is_end {
                if self.is_after_cr && self.bytes.get(self.scanned) == Some(&b'\n') {
                    self.scanned += 1;
                    self.is_after_cr = false;
                }
                return Some(self.bytes.split_to(std::mem::take(&mut self.scanned)).freeze());
            }
        }
        None
    }

    /// Takes everything: the beginning of an event that has no end.
    pub(super) fn take_rest(&mut self) -> Bytes {
        let rest = self.bytes.split().freeze();
        *self = Self::default();
        rest
    }
}

/// One event.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// The message in it; `None` if it has none, or is not of the type `message`.
    pub(super) data: Option<String>,
    /// True if it has an identifier, from which a client can resume the stream.
    pub(super) has_id: bool,
}

impl Event {
    pub(super) fn read(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes));
        let (mut data, mut has_id, mut is_message) = (None::<String>, false, true);
        for line in text.split(['\r', '\n']) {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match name {
                "data" => match &mut data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => data = Some(value.to_owned()),
                },
                "id" => has_id = true,
                "event" => is_message = value.is_empty() || value == "message",
                _ => {}
            }
        }
        Self { data: data.filter(|_| is_message), has_id }
    }
}

/// The event of this JSON message. Ends of lines in it are white space, and would end the field.
pub(super) fn event_of(message: &[u8]) -> Bytes {
    let one_line = message.iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte });
    b"event: message\r\ndata: ".iter().copied().chain(one_line).chain(*b"\r\n\r\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&[u8]]) -> (Vec<String>, String) {
        let (mut buffer, mut events) = (EventBuffer::default(), Vec::new());
        for piece in pieces {
            buffer.push(piece);
            while let Some(event) = buffer.next() {
                events.push(String::from_utf8(event.to_vec()).unwrap());
            }
        }
        (events, String::from_utf8(buffer.take_rest().to_vec()).unwrap())
    }

    #[test]
    fn a_stream_is_cut_at_the_ends_of_its_events() {
        let one = |text: &str| (vec![text.to_owned()], String::new());
        for text in [
            "data: a\n\n",
            "data: a\r\n\r\n",
            "data: a\r\r",
            "data: a\r\n\n",
            ": ping\n\n",
            "\n",
            "\r\n",
            "event: x\ndata: 1\ndata: 2\n\n",
        ] {
            assert_eq!(cut(&[text.as_bytes()]), one(text), "{text:?}");
            // Byte by byte it has the same text, with at most empty events more.
            let bytes: Vec<_> = text.as_bytes().chunks(1).collect();
            let (events, rest) = cut(&bytes);
            assert_eq!(events.concat() + &rest, text);
            assert_eq!(events[0].trim_end(), text.trim_end(), "{text:?}: {events:?}");
        }
        let (events, rest) = cut(&[b"data: a\n\ndata: b\n", b"\ndata: c\n"]);
        assert_eq!((events, &*rest), (vec!["data: a\n\n".to_owned(), "data: b\n\n".to_owned()], "data: c\n"));
    }

    #[test]
    fn the_message_of_an_event_is_all_its_data() {
        let data = |text: &str| Event::read(text.as_bytes()).data;
        for (text, expected) in [
            ("data: {\"a\":1}\n\n", Some("{\"a\":1}")),
            ("data:x\r\ndata: y\r\n\r\n", Some("x\ny")),
            ("data:  two\n\n", Some(" two")),
            ("data\n\n", Some("")),
            ("\u{feff}data: a\n\n", Some("a")),
            ("event: message\ndata: a\n\n", Some("a")),
            ("event: ping\ndata: a\n\n", None),
            (": data: a\n\n", None),
            ("datax: a\n\n", None),
            ("", None),
        ] {
            assert_eq!(data(text).as_deref(), expected, "{text:?}");
        }
        assert!(Event::read(b"id: 7\ndata: a\n\n").has_id);
        assert!(!Event::read(b"data: id: 7\n\n").has_id);
        assert_eq!(data(std::str::from_utf8(&event_of(b"{\r\n}")).unwrap()).as_deref(), Some("{  }"));
    }
}
