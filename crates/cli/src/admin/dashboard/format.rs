//! Numbers, times and addresses as people read them.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// The characters of a query that need no escape.
const QUERY: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/').remove(b'*');

/// A value for a query.
pub(super) fn query_text(text: &str) -> String {
    utf8_percent_encode(text, QUERY).to_string()
}

/// A number with a thin space between thousands.
pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 2);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A duration with its two largest units.
pub(super) fn duration(seconds: u64) -> String {
    let (days, hours, minutes, rest) =
        (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")];
    let from = units.iter().position(|(count, _)| *count > 0).unwrap_or(units.len() - 1);
    let two =
        units.iter().skip(from).take(2).filter(|(count, unit)| *count > 0 || (*unit == "s" && seconds == 0));
    two.map(|(count, unit)| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

/// A number of bytes.
pub(super) fn bytes(count: usize) -> String {
    match count {
        1 => "1 byte".to_owned(),
        0..10_240 => format!("{} bytes", number(count as u64)),
        10_240..10_485_760 => format!("{} KiB", count / 1024),
        _ => format!("{} MiB", count / (1024 * 1024)),
    }
}

/// The day and the time of a timestamp in RFC 3339, with a space between them and without `Z`.
pub(super) fn moment(text: &str) -> String {
    text.trim_end_matches('Z').replacen('T', " ", 1)
}

/// The same to the second.
pub(super) fn second(text: &str) -> String {
    let text = moment(text);
    text.split_once('.').map_or(text.clone(), |(second, _)| second.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_durations_and_sizes_are_short() {
        for (value, text) in
            [(0, "0"), (999, "999"), (1000, "1\u{202f}000"), (1_234_567, "1\u{202f}234\u{202f}567")]
        {
            assert_eq!(number(value), text);
        }
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (61, "1 min 1 s"),
            (3600, "1 h"),
            (3660, "1 h 1 min"),
            (3601, "1 h"),
            (90_000, "1 d 1 h"),
            (86_460, "1 d"),
        ] {
            assert_eq!(duration(seconds), text);
        }
        for (count, text) in
            [(0, "0 bytes"), (1, "1 byte"), (10_239, "10\u{202f}239 bytes"), (10_240, "10 KiB")]
        {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(moment("2026-02-28T12:34:56.789Z"), "2026-02-28 12:34:56.789");
        assert_eq!(second("2026-02-28T12:34:56.789Z"), "2026-02-28 12:34:56");
        assert_eq!(query_text("POST /a b&c=\"é"), "POST%20/a%20b%26c%3D%22%C3%A9");
    }
}
