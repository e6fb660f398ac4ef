//! The values that a setting accepts, as data: the reader of the setting and the JSON Schema of the file use the same.

use std::time::Duration;

use oncegate_http::Profile;

use super::units::{self, duration_text, not_one_of, size_text};

/// Reads the text of one value, and describes the texts that it accepts.
pub(crate) trait Reader {
    /// The type of the value.
    type Value;

    /// Reads a text.
    ///
    /// # Errors
    /// A sentence that names the text and the accepted values.
    fn read(&self, text: &str) -> Result<Self::Value, String>;

    /// The texts that it accepts.
    fn accepted(&self) -> Accepted;
}

/// The texts that a reader accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Accepted {
    /// Texts that only the reader itself can judge.
    Text,
    /// These words and, if there is one, texts that match this regular expression.
    Words(Vec<&'static str>, Option<String>),
    /// Whole numbers within these bounds, and these words.
    Number(u64, Option<u64>, &'static [&'static str]),
    /// Numbers with a fraction, from 0 to 1.
    Ratio,
    /// Durations or sizes, which are numbers with a unit.
    Quantity(Quantity),
}

/// A range of durations or sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quantity {
    /// The units, each with the number of milliseconds or bytes that it stands for.
    units: &'static [(&'static str, u64)],
    /// True if upper and lower case are the same in them.
    ignores_case: bool,
    min: u64,
    max: u64,
    /// The bounds as they are written.
    shown: (String, String),
    /// A word that is accepted, too.
    word: Option<&'static str>,
}

impl Quantity {
    /// A regular expression that matches exactly the accepted texts, in the syntax of JSON Schema.
    pub(crate) fn pattern(&self) -> String {
        let mut texts: Vec<_> = self.word.into_iter().map(str::to_owned).collect();
        // Zero needs no unit.
        texts.extend((self.min == 0).then(|| "0+".to_owned()));
        texts.extend(self.units.iter().filter_map(|(unit, of)| {
            let (min, max) = (self.min.div_ceil(*of), self.max / of);
            let letter = |char: char| match self.ignores_case {
                true => format!("[{}{}]", char.to_ascii_uppercase(), char.to_ascii_lowercase()),
                false => char.to_string(),
            };
            let unit: String = unit.chars().map(letter).collect();
            (min <= max).then(|| format!("0*{}{unit}", number_pattern(min, max)))
        }));
        format!("^(?:{})$", texts.join("|"))
    }

    /// Returns true if zero is accepted.
    pub(crate) const fn has_zero(&self) -> bool {
        self.min == 0
    }

    /// The least and the largest value, as they are written; `None` for a bound that no value of this form can pass.
    #[cfg(test)]
    pub(crate) fn bounds(&self) -> (Option<&str>, Option<&str>) {
        let (min, max) = &self.shown;
        (
            Some(min.as_str()).filter(|_| self.min > 0),
            Some(max.as_str()).filter(|_| self.max < usize::MAX as u64),
        )
    }
}

/// A regular expression for the whole numbers within these bounds, without zeros in front.
fn number_pattern(min: u64, max: u64) -> String {
    let mut patterns = Vec::new();
    // The fewest and the most digits after the first one, for which every number is within the bounds.
    let mut whole: Option<(u32, u32)> = None;
    let mut from = min;
    while from <= max {
        let rest = from.checked_ilog10().unwrap_or(0);
        // The largest number with as many digits.
        let largest = 10_u64.checked_pow(rest + 1).map_or(u64::MAX, |next| next - 1);
        let to = largest.min(max);
        if from == 10_u64.pow(rest) && to == largest && largest < u64::MAX {
            whole = Some((whole.map_or(rest, |(fewest, _)| fewest), rest));
        } else {
            digit_patterns("", &from.to_string(), &to.to_string(), &mut patterns);
        }
        match to.checked_add(1) {
            Some(next) => from = next,
            None => break,
        }
    }
    patterns.extend(whole.map(|(fewest, most)| format!("[1-9][0-9]{{{fewest},{most}}}")));
    format!("(?:{})", patterns.join("|"))
}

/// Adds the patterns for the numbers from `min` to `max`, which have equally many digits, after the digits in `front`.
fn digit_patterns(front: &str, min: &str, max: &str, patterns: &mut Vec<String>) {
    let any = |count: usize| match count {
        0 => String::new(),
        1 => "[0-9]".to_owned(),
        count => format!("[0-9]{{{count}}}"),
    };
    let (Some(low), Some(high)) = (min.chars().next(), max.chars().next()) else {
        patterns.push(front.to_owned());
        return;
    };
    let (min_rest, max_rest) = (min.split_at(1).1, max.split_at(1).1);
    let count = min_rest.len();
    let is_low_whole = min_rest.bytes().all(|digit| digit == b'0');
    let is_high_whole = max_rest.bytes().all(|digit| digit == b'9');
    if low == high && !(is_low_whole && is_high_whole) {
        return digit_patterns(&format!("{front}{low}"), min_rest, max_rest, patterns);
    }
    // The first digits after which every rest is within the bounds.
    let digit = |char: char, by: i8| char::from((char as u8).saturating_add_signed(by));
    let first = if is_low_whole { low } else { digit(low, 1) };
    let last = if is_high_whole { high } else { digit(high, -1) };
    if !is_low_whole {
        digit_patterns(&format!("{front}{low}"), min_rest, &"9".repeat(count), patterns);
    }
    if first == last {
        patterns.push(format!("{front}{first}{}", any(count)));
    } else if first < last {
        patterns.push(format!("{front}[{first}-{last}]{}", any(count)));
    }
    if !is_high_whole {
        digit_patterns(&format!("{front}{high}"), &"0".repeat(count), max_rest, patterns);
    }
}

/// A function that reads texts.
impl<F, T> Reader for F
where
    F: Fn(&str) -> Result<T, String>,
{
    type Value = T;

    fn read(&self, text: &str) -> Result<T, String> {
        self(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Text
    }
}

/// A function that reads texts which match a regular expression. It may refuse some that match.
pub(crate) struct Matching<F>(pub(crate) F, pub(crate) &'static str);

impl<F, T> Reader for Matching<F>
where
    F: Fn(&str) -> Result<T, String>,
{
    type Value = T;

    fn read(&self, text: &str) -> Result<T, String> {
        (self.0)(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(Vec::new(), Some(self.1.to_owned()))
    }
}

/// A function that reads these words, and other texts which match a regular expression.
pub(crate) struct WordsOr<F>(pub(crate) &'static [&'static str], pub(crate) &'static str, pub(crate) F);

impl<F, T> Reader for WordsOr<F>
where
    F: Fn(&str) -> Result<T, String>,
{
    type Value = T;

    fn read(&self, text: &str) -> Result<T, String> {
        (self.2)(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(self.0.to_vec(), Some(self.1.to_owned()))
    }
}

/// One of these words.
pub(crate) struct OneOf<T: 'static>(pub(crate) &'static [(&'static str, T)]);

impl<T: Copy> Reader for OneOf<T> {
    type Value = T;

    fn read(&self, text: &str) -> Result<T, String> {
        let found = self.0.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        found.ok_or_else(|| not_one_of(text, &self.words()))
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(self.words(), None)
    }
}

impl<T> OneOf<T> {
    fn words(&self) -> Vec<&'static str> {
        self.0.iter().map(|(name, _)| *name).collect()
    }
}

/// Yes or no.
pub(crate) struct Boolean;

impl Reader for Boolean {
    type Value = bool;

    fn read(&self, text: &str) -> Result<bool, String> {
        units::boolean(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(vec!["true", "false"], None)
    }
}

/// The name of a profile, or a file.
pub(crate) struct ProfileName;

impl Reader for ProfileName {
    type Value = units::ProfileChoice;

    fn read(&self, text: &str) -> Result<Self::Value, String> {
        units::profile(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(Profile::names().to_vec(), Some(r"\.toml$".to_owned()))
    }
}

/// The algorithms of tokens.
pub(crate) struct Algorithm;

impl Reader for Algorithm {
    type Value = oncegate_http::JwtAlgorithm;

    fn read(&self, text: &str) -> Result<Self::Value, String> {
        super::scope::jwt_algorithm(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Words(
            oncegate_http::JwtAlgorithm::ALL.map(oncegate_http::JwtAlgorithm::as_str).to_vec(),
            None,
        )
    }
}

/// The share of traces that are recorded.
pub(crate) struct Ratio;

impl Reader for Ratio {
    type Value = crate::trace::SampleRatio;

    fn read(&self, text: &str) -> Result<Self::Value, String> {
        units::sample_ratio(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Ratio
    }
}

/// A duration from the first to the second.
pub(crate) struct DurationFrom(pub(crate) Duration, pub(crate) Duration);

impl DurationFrom {
    fn quantity(&self, word: Option<&'static str>) -> Accepted {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        Accepted::Quantity(Quantity {
            units: units::DURATION_UNITS,
            ignores_case: false,
            min: millis(self.0),
            max: millis(self.1),
            shown: (duration_text(self.0), duration_text(self.1)),
            word,
        })
    }
}

impl Reader for DurationFrom {
    type Value = Duration;

    fn read(&self, text: &str) -> Result<Duration, String> {
        units::bounded(text, self.0, self.1)
    }

    fn accepted(&self) -> Accepted {
        self.quantity(None)
    }
}

/// A duration from the first to the second, or `none` for no limit.
pub(crate) struct DurationOrNone(pub(crate) Duration, pub(crate) Duration);

impl Reader for DurationOrNone {
    type Value = Option<Duration>;

    fn read(&self, text: &str) -> Result<Option<Duration>, String> {
        if text == "none" {
            return Ok(None);
        }
        let read = units::bounded(text, self.0, self.1).map(Some);
        read.map_err(|error| format!("{error}; or \"none\" for no limit"))
    }

    fn accepted(&self) -> Accepted {
        DurationFrom(self.0, self.1).quantity(Some("none"))
    }
}

/// A size in bytes within these bounds, with the reason for the upper one, unless that is empty.
pub(crate) struct Size {
    pub(crate) min: usize,
    pub(crate) max: usize,
    pub(crate) why: &'static str,
}

impl Reader for Size {
    type Value = usize;

    fn read(&self, text: &str) -> Result<usize, String> {
        let bytes = units::size(text)?;
        if bytes < self.min {
            return Err(format!(
                "{text:?} is too little; at least {} is allowed",
                size_text(self.min as u64)
            ));
        }
        if bytes > self.max {
            let why = if self.why.is_empty() { String::new() } else { format!(": {}", self.why) };
            return Err(format!(
                "{text:?} is too much; at most {} is allowed{why}",
                size_text(self.max as u64)
            ));
        }
        Ok(bytes)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Quantity(Quantity {
            units: units::SIZE_UNITS,
            ignores_case: true,
            min: self.min as u64,
            max: self.max as u64,
            shown: (size_text(self.min as u64), size_text(self.max as u64)),
            word: None,
        })
    }
}

/// A whole number from 1 to the first, of the second.
pub(crate) struct NumberTo(pub(crate) usize, pub(crate) &'static str);

impl Reader for NumberTo {
    type Value = usize;

    fn read(&self, text: &str) -> Result<usize, String> {
        let Self(max, of) = self;
        match text.parse() {
            Ok(number) if (1..=*max).contains(&number) => Ok(number),
            _ => Err(format!("{text:?} is not a number of {of}; from 1 to {max} is allowed")),
        }
    }

    fn accepted(&self) -> Accepted {
        Accepted::Number(1, Some(self.0 as u64), &[])
    }
}

/// A number of records.
pub(crate) struct Records;

impl Reader for Records {
    type Value = u64;

    fn read(&self, text: &str) -> Result<u64, String> {
        match text.parse() {
            Ok(records @ 1..) => Ok(records),
            _ => Err(format!("{text:?} is not a number of records; 1 or more is allowed")),
        }
    }

    fn accepted(&self) -> Accepted {
        Accepted::Number(1, None, &[])
    }
}

/// A status of a response that may free the key, or a class of them.
pub(crate) struct ReleaseStatus;

impl Reader for ReleaseStatus {
    type Value = Vec<http::StatusCode>;

    fn read(&self, text: &str) -> Result<Self::Value, String> {
        units::release_statuses(text)
    }

    fn accepted(&self) -> Accepted {
        Accepted::Number(400, Some(599), units::STATUS_CLASSES)
    }
}

/// The pattern of a whole number within these bounds, as a text, or of one of these words.
pub(crate) fn text_of_number(min: u64, max: Option<u64>, words: &[&str]) -> String {
    let words: String = words.iter().map(|word| format!("|{word}")).collect();
    format!(r"^(?:\+?0*{}{words})$", number_pattern(min, max.unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use regex_lite::Regex;

    use super::*;

    #[test]
    fn a_pattern_of_numbers_matches_those_within_the_bounds() {
        for (min, max) in [
            (0, 0),
            (0, 9),
            (1, 9),
            (0, 10),
            (7, 7),
            (5, 123),
            (99, 101),
            (100, 199),
            (123, 456),
            (1, 999),
            (86, 3600),
            (400, 599),
            (0, 1000),
            (909, 1090),
        ] {
            let pattern = Regex::new(&text_of_number(min, Some(max), &[])).unwrap();
            for number in 0..=2 * max + 20 {
                let is_within = (min..=max).contains(&number);
                assert_eq!(
                    pattern.is_match(&number.to_string()),
                    is_within,
                    "{number} of {min} to {max}: {pattern}"
                );
                assert_eq!(pattern.is_match(&format!("00{number}")), is_within, "00{number}");
            }
            assert!(!pattern.is_match("") && !pattern.is_match("x") && !pattern.is_match("-1"));
        }
        let all = Regex::new(&text_of_number(1, None, &[])).unwrap();
        assert!(
            all.is_match(&u64::MAX.to_string())
                && !all.is_match("18446744073709551616")
                && !all.is_match("0")
        );
    }

    /// The texts around each bound, in each unit.
    fn texts(quantity: &Quantity) -> Vec<String> {
        let mut texts =
            ["", "0", "00", "1", "30", "none", "s", "B", "1x", "1.5h", "-1s", "1 s", "99999999999999999999s"]
                .map(str::to_owned)
                .to_vec();
        for (unit, of) in quantity.units {
            let bounds = [quantity.min, quantity.max];
            let near = bounds.iter().flat_map(|bound| {
                let number = bound / of;
                [number.saturating_sub(1), number, number.saturating_add(1), number.saturating_mul(10)]
            });
            texts.extend(near.chain([0, 1, 9, 10, 42]).map(|number| format!("{number}{unit}")));
            texts.push(format!("007{unit}"));
            texts.push(format!("7{}", unit.to_uppercase()));
        }
        texts
    }

    #[test]
    fn a_pattern_of_durations_or_sizes_matches_what_its_reader_reads() {
        fn compare<R: Reader>(reader: &R) {
            let Accepted::Quantity(quantity) = reader.accepted() else { panic!("no quantity") };
            let pattern = Regex::new(&quantity.pattern()).unwrap();
            for text in texts(&quantity) {
                let read = reader.read(&text);
                assert_eq!(pattern.is_match(&text), read.is_ok(), "{text}: {:?} {pattern}", read.err());
            }
        }
        let second = Duration::from_secs(1);
        for (min, max) in
            [(0, 0), (0, 3_600_000), (100, 3_600_000), (1, 86_400_000), (1000, 400 * 86_400_000)]
        {
            let [min, max] = [min, max].map(Duration::from_millis);
            compare(&DurationFrom(min, max));
            compare(&DurationOrNone(min, max.max(second)));
        }
        for (min, max) in [(0, 1 << 30), (1 << 20, 1 << 40), (0, 64 << 20), (1 << 20, usize::MAX)] {
            compare(&Size { min, max, why: "" });
        }
    }
}
