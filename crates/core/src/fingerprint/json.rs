//! JSON bodies in the canonical form of RFC 8785, if that form loses nothing.
//!
//! One pass over the body. Input that is already canonical is neither copied nor changed: `copied` trails the reading
//! position, and bytes move to `out` only if the two forms differ (white space, an escape, the spelling of a number, the
//! order of members).

use std::cmp::Ordering;
use std::io::Write as _;

/// Arrays and objects may be nested this deep; deeper bodies stay raw, so that a body can never exhaust the
/// stack.
pub(super) const MAX_DEPTH: usize = 128;

/// 2^53 − 1 in decimal: the last integer that differs as a double from all its neighbours.
const MAX_SAFE: &[u8] = b"9007199254740991";
const MAX_SAFE_INTEGER: u64 = 9_007_199_254_740_991;

/// Any decimal of up to this many digits survives the way through a double (C's `DBL_DIG`), so no two of them
/// print alike. With more digits they may.
const MAX_DIGITS: usize = 15;

/// The smallest power of ten that is a normal double. Below it doubles lose digits, down to nothing.
const MIN_EXPONENT: i64 = -307;

/// Buffers of the canonicalizer, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    out: Vec<u8>,
    sorted: Vec<u8>,
    members: Vec<Member>,
    folded: Vec<u64>,
}

impl Scratch {
    /// Bytes held on to.
    pub(super) fn capacity(&self) -> usize {
        self.out.capacity()
            + self.sorted.capacity()
            + self.members.capacity() * size_of::<Member>()
            + self.folded.capacity() * size_of::<u64>()
    }
}

/// The canonical form of `body`; `None` if no canonical form distinguishes it from every other body.
pub(super) fn canonicalize<'a>(body: &'a [u8], scratch: &'a mut Scratch) -> Option<&'a [u8]> {
    write_canonical(body, scratch, false)
}

/// The same, but numbers that a double may not hold stay as they are spelt.
pub(super) fn canonicalize_with_all_numbers<'a>(
    body: &'a [u8],
    scratch: &'a mut Scratch,
) -> Option<&'a [u8]> {
    write_canonical(body, scratch, true)
}

fn write_canonical<'a>(body: &'a [u8], scratch: &'a mut Scratch, keeps_numbers: bool) -> Option<&'a [u8]> {
    let text = std::str::from_utf8(body).ok()?;
    let Scratch { out, sorted, members, folded } = scratch;
    out.clear();
    members.clear();
    let basic = text.is_ascii() || !has_astral(body);
    let mut writer =
        Writer { text, source: body, copied: 0, basic, keeps_numbers, out, sorted, members, folded };
    let start = writer.skip_space(0);
    let end = writer.value(start, MAX_DEPTH)?;
    if writer.skip_space(end) < body.len() {
        return None;
    }
    // With space at the end everything is in `out`, and `copied` is past `end`.
    if writer.copied < end {
        if writer.out.is_empty() {
            return body.get(writer.copied..end);
        }
        writer.flush(end)?;
    }
    Some(scratch.out.as_slice())
}

/// True if the text has a character outside the basic plane.
fn has_astral(utf8: &[u8]) -> bool {
    utf8.iter().any(|byte| *byte >= 0xF0)
}

/// A member name: its position in the source, without its quotes.
#[derive(Clone, Copy)]
struct Name {
    /// The first eight bytes, so that most comparisons need no look at the source.
    head: u64,
    start: usize,
    end: usize,
    /// True if the order of its source bytes is the order of its UTF-16 code units.
    plain: bool,
}

/// A member of an object that is being read: its name, and its span in the output.
#[derive(Clone, Copy)]
struct Member {
    name: Name,
    from: usize,
    to: usize,
}

/// Reads `source` and writes its canonical form to `out`.
///
/// The reading functions take the position at which an item starts, and return the position after it, or `None` if there is no
/// canonical form. This is the hot path, and positions stay in registers.
struct Writer<'s, 'b> {
    text: &'s str,
    source: &'s [u8],
    /// The source up to here is in `out`; from here to the reading position it is already canonical.
    copied: usize,
    /// True if the source has no unescaped character outside the basic plane.
    basic: bool,
    /// True if numbers that a double may not hold stay as they are spelt.
    keeps_numbers: bool,
    out: &'b mut Vec<u8>,
    sorted: &'b mut Vec<u8>,
    /// The members of all open objects; each object owns the tail that it pushed.
    members: &'b mut Vec<Member>,
    /// The hashes of an object's names without their case.
    folded: &'b mut Vec<u64>,
}

impl Writer<'_, '_> {
    /// The byte at `at`; 0, which no rule of the grammar accepts, at the end.
    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        self.source.get(at).copied().unwrap_or(0)
    }

    /// The length of the output once everything before `at` is in it.
    #[inline(always)]
    fn written(&self, at: usize) -> usize {
        self.out.len() + (at - self.copied)
    }

    fn flush(&mut self, to: usize) -> Option<()> {
        self.out.extend_from_slice(self.source.get(self.copied..to)?);
        self.copied = to;
        Some(())
    }

    #[inline(always)]
    fn skip_space(&mut self, at: usize) -> usize {
        if is_space(self.byte(at)) { self.drop_space(at) } else { at }
    }

    #[inline(never)]
    fn drop_space(&mut self, at: usize) -> usize {
        // Cannot fail: `copied` ≤ `at` ≤ the length of the source.
        let _ = self.flush(at);
        let mut end = at + 1;
        while is_space(self.byte(end)) {
            end += 1;
        }
        self.copied = end;
        end
    }

    #[inline]
    fn value(&mut self, at: usize, depth: usize) -> Option<usize> {
        match self.byte(at) {
            b'"' => self.string(at).map(|(end, _)| end + 1),
            b'-' | b'0'..=b'9' => self.number(at),
            b'{' => self.object(at + 1, depth.checked_sub(1)?),
            b'[' => self.array(at + 1, depth.checked_sub(1)?),
            b't' => self.literal(at, b"true"),
            b'f' => self.literal(at, b"false"),
            b'n' => self.literal(at, b"null"),
            _ => None,
        }
    }

    #[inline]
    fn literal(&self, at: usize, word: &[u8]) -> Option<usize> {
        self.source.get(at..)?.starts_with(word).then_some(at + word.len())
    }

    fn array(&mut self, at: usize, depth: usize) -> Option<usize> {
        let mut at = self.skip_space(at);
        if self.byte(at) == b']' {
            return Some(at + 1);
        }
        loop {
            at = self.value(at, depth)?;
            at = self.skip_space(at);
            match self.byte(at) {
                b',' => at = self.skip_space(at + 1),
                b']' => return Some(at + 1),
                _ => return None,
            }
        }
    }

    fn object(&mut self, at: usize, depth: usize) -> Option<usize> {
        let mut at = self.skip_space(at);
        if self.byte(at) == b'}' {
            return Some(at + 1);
        }
        let first = self.members.len();
        let mut previous: Option<Name> = None;
        let mut in_order = true;
        loop {
            if self.byte(at) != b'"' {
                return None;
            }
            let from = self.written(at);
            let name = self.name(at)?;
            if let Some(previous) = previous {
                match self.compare(&previous, &name) {
                    Ordering::Less => {}
                    Ordering::Equal => return None,
                    Ordering::Greater => in_order = false,
                }
            }
            previous = Some(name);
            at = self.skip_space(name.end + 1);
            if self.byte(at) != b':' {
                return None;
            }
            at = self.skip_space(at + 1);
            at = self.value(at, depth)?;
            self.members.push(Member { name, from, to: self.written(at) });
            at = self.skip_space(at);
            match self.byte(at) {
                b',' => at = self.skip_space(at + 1),
                b'}' => break,
                _ => return None,
            }
        }
        if self.has_names_in_two_cases(first) {
            return None;
        }
        if !in_order {
            self.flush(at)?;
            self.sort(first)?;
        }
        self.members.truncate(first);
        Some(at + 1)
    }

    /// True if two names of the members from `first` on differ only in case. Programs that ignore case read them as one
    /// member, and which of the two counts depends on their order.
    fn has_names_in_two_cases(&mut self, first: usize) -> bool {
        let members = self.members.get(first..).unwrap_or_default();
        if members.len() < 2 {
            return false;
        }
        let mut folded = std::mem::take(self.folded);
        folded.clear();
        folded.extend(members.iter().map(|member| self.folded_hash(&member.name)));
        folded.sort_unstable();
        let has_equal = folded.windows(2).any(|pair| matches!(pair, [a, b] if a == b));
        *self.folded = folded;
        has_equal
    }

    /// A hash of a name that ignores case. If different names collide, a body that has a canonical form is compared as it is,
    /// which is never wrong.
    fn folded_hash(&self, name: &Name) -> u64 {
        let raw = self.source.get(name.start..name.end).unwrap_or_default();
        if name.plain && raw.is_ascii() {
            return hash_of(raw);
        }
        let units =
            char::decode_utf16(self.units(name)).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER));
        // Both ways: `ſ` is an `S` only in upper case, and the sign of the kelvin a `k` only in lower case.
        let folded: String = units.flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect();
        hash_of(folded.as_bytes())
    }

    /// Rewrites the members from `first` on, which end the output, in the order of their names.
    fn sort(&mut self, first: usize) -> Option<()> {
        // The list leaves `self` for the sort, because comparing borrows `self`.
        let mut all = std::mem::take(self.members);
        let done = all.get_mut(first..).and_then(|members| self.rewrite(members));
        *self.members = all;
        done
    }

    fn rewrite(&mut self, members: &mut [Member]) -> Option<()> {
        let start = members.first()?.from;
        members.sort_unstable_by(|a, b| self.compare(&a.name, &b.name));
        self.sorted.clear();
        let mut previous: Option<&Member> = None;
        for member in members.iter() {
            if let Some(previous) = previous {
                if self.compare(&previous.name, &member.name) == Ordering::Equal {
                    return None;
                }
                self.sorted.push(b',');
            }
            self.sorted.extend_from_slice(self.out.get(member.from..member.to)?);
            previous = Some(member);
        }
        self.out.truncate(start);
        self.out.extend_from_slice(self.sorted);
        Some(())
    }

    /// Orders names by UTF-16 code units (RFC 8785, section 3.2.3).
    #[inline]
    fn compare(&self, a: &Name, b: &Name) -> Ordering {
        if !(a.plain && b.plain) {
            return self.units(a).cmp(self.units(b));
        }
        if a.head != b.head {
            return a.head.cmp(&b.head);
        }
        self.source.get(a.start..a.end).cmp(&self.source.get(b.start..b.end))
    }

    fn units(&self, name: &Name) -> Units<'_> {
        Units { chars: self.text.get(name.start..name.end).unwrap_or_default().chars(), low: None }
    }

    /// Reads the member name whose opening quote is at `at`.
    #[inline]
    fn name(&mut self, at: usize) -> Option<Name> {
        let (end, escaped) = self.string(at)?;
        let start = at + 1;
        let raw = self.source.get(start..end)?;
        let head = match raw.first_chunk() {
            Some(chunk) => u64::from_be_bytes(*chunk),
            None => short_head(self.source.get(start..).and_then(<[u8]>::first_chunk), raw),
        };
        // UTF-8 puts characters beyond the basic plane last, UTF-16 puts them before U+E000.
        let plain = !escaped && (self.basic || !has_astral(raw));
        Some(Name { head, start, end, plain })
    }

    /// Reads the string whose opening quote is at `at`. Returns the position of the closing quote, and true if the string has
    /// escapes.
    #[inline]
    fn string(&mut self, at: usize) -> Option<(usize, bool)> {
        let end = plain_end(self.source, at + 1)?;
        if self.byte(end) == b'"' {
            return Some((end, false));
        }
        self.escaped_string(end)
    }

    /// The rest of a string, from its first backslash on.
    #[inline(never)]
    fn escaped_string(&mut self, mut at: usize) -> Option<(usize, bool)> {
        loop {
            match self.byte(at) {
                b'"' => return Some((at, true)),
                b'\\' => at = plain_end(self.source, self.escape(at)?)?,
                _ => return None,
            }
        }
    }

    /// Reads the escape at `at`.
    fn escape(&mut self, at: usize) -> Option<usize> {
        match self.byte(at + 1) {
            // Spelt as RFC 8785 spells them.
            b'"' | b'\\' | b'b' | b'f' | b'n' | b'r' | b't' => Some(at + 2),
            b'/' => {
                self.flush(at)?;
                self.copied = at + 1;
                Some(at + 2)
            }
            b'u' => {
                let mut end = at + 6;
                let mut code = u32::from(self.hex(at + 2)?);
                if (0xD800..0xDC00).contains(&code) {
                    if self.source.get(end..end + 2)? != b"\\u" {
                        return None;
                    }
                    let low = u32::from(self.hex(end + 2)?);
                    if !(0xDC00..0xE000).contains(&low) {
                        return None;
                    }
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    end += 6;
                }
                // A lone low surrogate is no `char`.
                let character = char::from_u32(code)?;
                self.flush(at)?;
                write_char(character, self.out);
                self.copied = end;
                Some(end)
            }
            _ => None,
        }
    }

    fn hex(&self, at: usize) -> Option<u16> {
        let digits = self.source.get(at..at + 4)?;
        digits.iter().try_fold(0u16, |sum, digit| Some(sum << 4 | char::from(*digit).to_digit(16)? as u16))
    }

    /// The end of the digits from `at` on.
    #[inline(always)]
    fn digits_end(&self, mut at: usize) -> usize {
        while self.byte(at).is_ascii_digit() {
            at += 1;
        }
        at
    }

    #[inline]
    fn number(&mut self, at: usize) -> Option<usize> {
        if self.keeps_numbers { self.any_number(at) } else { self.exact_number(at) }
    }

    /// A number, as it is spelt if a double may not hold it.
    #[inline(never)]
    fn any_number(&mut self, at: usize) -> Option<usize> {
        let (written, copied) = (self.out.len(), self.copied);
        if let Some(end) = self.exact_number(at) {
            return Some(end);
        }
        self.out.truncate(written);
        self.copied = copied;
        let whole = at + usize::from(self.byte(at) == b'-');
        let point = self.digits_end(whole);
        if point == whole || (self.byte(whole) == b'0' && point > whole + 1) {
            return None;
        }
        let end = match self.byte(point) {
            b'.' => Some(self.digits_end(point + 1)).filter(|end| *end > point + 1)?,
            _ => point,
        };
        self.exponent(end).map(|(_, end)| end)
    }

    #[inline]
    fn exact_number(&mut self, at: usize) -> Option<usize> {
        let whole = at + usize::from(self.byte(at) == b'-');
        let point = self.digits_end(whole);
        let len = point - whole;
        let zero_first = self.byte(whole) == b'0';
        if len == 0 || (zero_first && len > 1) {
            return None;
        }
        match self.byte(point) {
            b'.' => {
                let end = self.digits_end(point + 1);
                if end == point + 1 {
                    return None;
                }
                let as_printed = end - whole <= MAX_DIGITS + 1
                    && self.byte(end - 1) != b'0'
                    && !(zero_first && self.byte(point + 1) == b'0')
                    && !matches!(self.byte(end), b'e' | b'E');
                if as_printed { Some(end) } else { self.respell(at, whole, point, end) }
            }
            b'e' | b'E' => self.respell(at, whole, point, point),
            // Minus zero is zero.
            _ if zero_first && whole > at => self.respell(at, whole, point, point),
            _ if len < MAX_SAFE.len() => Some(point),
            _ => (len == MAX_SAFE.len() && self.source.get(whole..point)? <= MAX_SAFE).then_some(point),
        }
    }

    /// Prints the number at `at` as ECMAScript does. It has digits from `whole` to `point`, and then either
    /// nothing or a point and digits up to `fraction_end`; an exponent may follow.
    #[inline(never)]
    fn respell(&mut self, at: usize, whole: usize, point: usize, fraction_end: usize) -> Option<usize> {
        let fraction = self.source.get(point + 1..fraction_end).unwrap_or_default();
        let (exponent, end) = self.exponent(fraction_end)?;
        let digits = self.source.get(whole..point)?.iter().chain(fraction);
        let decimal = Decimal::read(digits, exponent.saturating_sub(fraction.len() as i64))?;
        self.flush(at)?;
        if whole > at && decimal.digits > 0 {
            self.out.push(b'-');
        }
        decimal.write(self.out)?;
        self.copied = end;
        Some(end)
    }

    /// The exponent at `at`, 0 if there is none, and its end.
    fn exponent(&self, at: usize) -> Option<(i64, usize)> {
        if !matches!(self.byte(at), b'e' | b'E') {
            return Some((0, at));
        }
        let sign = self.byte(at + 1);
        let start = at + 1 + usize::from(matches!(sign, b'+' | b'-'));
        let end = self.digits_end(start);
        let digits = self.source.get(start..end).filter(|digits| !digits.is_empty())?;
        let size =
            digits.iter().fold(0i64, |sum, d| sum.saturating_mul(10).saturating_add(i64::from(d - b'0')));
        Some((if sign == b'-' { -size } else { size }, end))
    }
}

#[inline(always)]
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// The head of a name of less than eight bytes. No name contains a bare NUL, so padding with NULs sorts a name before the names
/// that begin with it.
#[inline]
fn short_head(chunk: Option<&[u8; 8]>, name: &[u8]) -> u64 {
    match (chunk, name.len()) {
        (_, 0) => 0,
        (Some(chunk), len) => u64::from_be_bytes(*chunk) & (u64::MAX << (64 - 8 * len.min(8))),
        (None, len) => {
            name.iter().fold(0, |head, byte| head << 8 | u64::from(*byte)) << (64 - 8 * len.min(8))
        }
    }
}

/// A hash of a text in UTF-8, without the case of its ASCII letters.
#[inline]
fn hash_of(text: &[u8]) -> u64 {
    // Two numbers without a pattern. The length distinguishes texts that differ only in leading NULs.
    const OF_LENGTH: u64 = 0x9e37_79b9_7f4a_7c15;
    const OF_WORD: u64 = 0x517c_c1b7_2722_0a95;
    text.chunks(8).fold((text.len() as u64).wrapping_mul(OF_LENGTH), |hash, chunk| {
        let word = match chunk.first_chunk() {
            Some(chunk) => u64::from_be_bytes(*chunk),
            None => chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)),
        };
        (hash.rotate_left(5) ^ lower_case(word)).wrapping_mul(OF_WORD)
    })
}

/// Eight bytes with their ASCII letters in lower case.
#[inline]
fn lower_case(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // The high bit of each byte of the sums is set if the rest of the byte is at least `A`, or beyond `Z`.
    let rest = word & !HIGHS;
    let from_a = rest + ONES * (0x80 - b'A' as u64);
    let beyond_z = rest + ONES * (0x7f - b'Z' as u64);
    word | ((from_a ^ beyond_z) & !word & HIGHS) >> 2
}

/// `digits` × 10^`scale`, where `digits` has `len` decimal digits, the last one not 0.
struct Decimal {
    digits: u64,
    len: usize,
    scale: i64,
}

impl Decimal {
    /// Reads a number; `None` if it is not distinct from its neighbours as a double.
    fn read<'a>(all: impl Iterator<Item = &'a u8>, scale: i64) -> Option<Self> {
        let (mut digits, mut len, mut zeros) = (0u64, 0usize, 0usize);
        for digit in all {
            match digit - b'0' {
                0 if digits == 0 => {}
                0 => zeros += 1,
                digit => {
                    len += zeros + 1;
                    if len > MAX_SAFE.len() {
                        return None;
                    }
                    digits = digits * 10u64.pow(zeros as u32 + 1) + u64::from(digit);
                    zeros = 0;
                }
            }
        }
        if digits == 0 {
            return Some(Self { digits: 0, len: 1, scale: 0 });
        }
        let decimal = Self { digits, len, scale: scale.saturating_add(zeros as i64) };
        let kept = if decimal.scale < 0 {
            len <= MAX_DIGITS && decimal.point() > MIN_EXPONENT
        } else {
            decimal.integer().is_some()
        };
        kept.then_some(decimal)
    }

    /// The number of digits before the decimal point; negative if the point is followed by zeros.
    fn point(&self) -> i64 {
        self.scale.saturating_add(self.len as i64)
    }

    fn integer(&self) -> Option<u64> {
        let power = 10u64.checked_pow(u32::try_from(self.scale).ok()?)?;
        self.digits.checked_mul(power).filter(|value| *value <= MAX_SAFE_INTEGER)
    }

    /// ECMA-262, `Number::toString`, for the numbers that `read` lets pass.
    fn write(&self, out: &mut Vec<u8>) -> Option<()> {
        // The widest number has 17 bytes, and the point moves by at most 6 before an exponent is written.
        if self.scale >= 0 {
            return write!(out, "{}", self.integer()?).ok();
        }
        let point = self.point();
        let digits = self.digits.to_string();
        let digits = digits.as_bytes();
        if point > 0 {
            let (whole, fraction) = digits.split_at_checked(usize::try_from(point).ok()?)?;
            out.extend_from_slice(whole);
            out.push(b'.');
            out.extend_from_slice(fraction);
        } else if point > -6 {
            out.extend_from_slice(b"0.");
            out.resize(out.len() + usize::try_from(-point).ok()?, b'0');
            out.extend_from_slice(digits);
        } else {
            let (first, rest) = digits.split_at_checked(1)?;
            out.extend_from_slice(first);
            if !rest.is_empty() {
                out.push(b'.');
                out.extend_from_slice(rest);
            }
            write!(out, "e-{}", 1 - point).ok()?;
        }
        Some(())
    }
}

/// The UTF-16 code units of a string's source text.
struct Units<'s> {
    chars: std::str::Chars<'s>,
    low: Option<u16>,
}

impl Iterator for Units<'_> {
    type Item = u16;

    fn next(&mut self) -> Option<u16> {
        if let Some(low) = self.low.take() {
            return Some(low);
        }
        let character = match self.chars.next()? {
            '\\' => match self.chars.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                // Halves of a surrogate pair are two escapes, and two units.
                'u' => {
                    return (0..4)
                        .try_fold(0, |sum, _| Some(sum << 4 | self.chars.next()?.to_digit(16)? as u16));
                }
                other => other,
            },
            other => other,
        };
        let mut units = [0; 2];
        let mut units = character.encode_utf16(&mut units).iter().copied();
        let first = units.next();
        self.low = units.next();
        first
    }
}

/// The position of the first byte from `at` on that is not plain string content: a quote, a backslash or a
/// control character. `None` if there is none.
#[inline(always)]
fn plain_end(source: &[u8], mut at: usize) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // Eight bytes at once: subtracting borrows out of a byte only if that byte is smaller. A borrow can spoil only bytes
    // after the first hit, and only the first hit is used.
    while let Some(chunk) = source.get(at..).and_then(|rest| rest.first_chunk()) {
        let word = u64::from_le_bytes(*chunk);
        let quotes = word ^ (ONES * b'"' as u64);
        let backslashes = word ^ (ONES * b'\\' as u64);
        let hits = (word.wrapping_sub(ONES * 0x20) & !word)
            | (quotes.wrapping_sub(ONES) & !quotes)
            | (backslashes.wrapping_sub(ONES) & !backslashes);
        let hits = hits & HIGHS;
        if hits != 0 {
            return Some(at + hits.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    let rest = source.get(at..)?;
    Some(at + rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..0x20))?)
}

/// Writes one character of a string as RFC 8785 spells it.
fn write_char(character: char, out: &mut Vec<u8>) {
    let short = match character {
        '"' | '\\' => character as u8,
        '\u{8}' => b'b',
        '\t' => b't',
        '\n' => b'n',
        '\u{c}' => b'f',
        '\r' => b'r',
        '\0'..'\u{20}' => {
            out.extend_from_slice(b"\\u00");
            for digit in [character as u32 >> 4, character as u32 & 15] {
                out.push(char::from_digit(digit, 16).unwrap_or('0') as u8);
            }
            return;
        }
        _ => {
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            return;
        }
    };
    out.extend_from_slice(&[b'\\', short]);
}

/// `text` as a canonical JSON string, quotes included.
pub(super) fn quoted(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + 2);
    out.push(b'"');
    text.chars().for_each(|character| write_char(character, &mut out));
    out.push(b'"');
    out
}

/// True if a canonical text has a string, a number, `true` or `false` in it. `null`, empty arrays and empty objects do not
/// distinguish two documents.
pub(super) fn has_value(mut text: &[u8]) -> bool {
    loop {
        match text {
            [] => return false,
            [b't' | b'f' | b'-' | b'0'..=b'9', ..] => return true,
            [b'"', rest @ ..] => match string_end(rest) {
                // A name: its value follows.
                [b':', value @ ..] => text = value,
                _ => return true,
            },
            // Brackets, commas, and the letters of `null`.
            [_, rest @ ..] => text = rest,
        }
    }
}

/// The text after a string whose opening quote was removed.
fn string_end(mut text: &[u8]) -> &[u8] {
    loop {
        match text {
            [b'"', rest @ ..] => return rest,
            [b'\\', _, rest @ ..] | [_, rest @ ..] => text = rest,
            [] => return text,
        }
    }
}
