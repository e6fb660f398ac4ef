//! W3C Trace Context: the fields `traceparent` and `tracestate`, read and written.
//!
//! A field that does not follow the specification to the letter is no context. It is never repaired, and never passed on.

use std::fmt::{self, Write as _};

use http::header::{HeaderMap, HeaderName, HeaderValue};

pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(crate) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The flag that the spans of a trace are recorded.
const SAMPLED: u8 = 0b01;

/// The flag that the identifier of a trace is random (level 2 of the specification). It is passed on as it came.
const RANDOM: u8 = 0b10;

/// The longest `tracestate` that is passed on, in bytes, and the most members: the specification demands that much.
const MAX_STATE: usize = 512;
const MAX_MEMBERS: usize = 32;

/// The identifier of a trace; not zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TraceId([u8; 16]);

/// The identifier of a span; not zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SpanId([u8; 8]);

impl TraceId {
    pub(crate) fn random() -> Self {
        Self(fastrand::u128(1..).to_be_bytes())
    }

    pub(crate) const fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl SpanId {
    pub(crate) fn random() -> Self {
        Self(fastrand::u64(1..).to_be_bytes())
    }

    pub(crate) const fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceId({self})")
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpanId({self})")
    }
}

/// The identity of a span, as `traceparent` carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanContext {
    pub(crate) trace_id: TraceId,
    pub(crate) span_id: SpanId,
    flags: u8,
}

impl SpanContext {
    /// The context of a new span in a new trace.
    pub(crate) fn root(is_sampled: bool) -> Self {
        let flags = if is_sampled { SAMPLED } else { 0 };
        Self { trace_id: TraceId::random(), span_id: SpanId::random(), flags }
    }

    /// The context of a new span in this trace.
    pub(crate) fn child(&self, is_sampled: bool) -> Self {
        let flags = (self.flags & RANDOM) | if is_sampled { SAMPLED } else { 0 };
        Self { trace_id: self.trace_id, span_id: SpanId::random(), flags }
    }

    pub(crate) const fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    pub(crate) const fn flags(&self) -> u8 {
        self.flags
    }

    /// Reads the value of `traceparent`: `00-TRACE-PARENT-FLAGS`, in lower case. A later version may append fields.
    fn parse(value: &[u8]) -> Option<Self> {
        let (version, rest) = (value.get(..2)?, value.get(2..)?);
        let [version] = hex(version)?;
        let is_whole = match version {
            0 => value.len() == 55,
            0xff => false,
            _ => value.len() == 55 || value.get(55) == Some(&b'-'),
        };
        let separators = [0, 33, 50];
        if !is_whole || separators.iter().any(|place| rest.get(*place) != Some(&b'-')) {
            return None;
        }
        let trace_id: [u8; 16] = hex(rest.get(1..33)?)?;
        let span_id: [u8; 8] = hex(rest.get(34..50)?)?;
        let [flags] = hex(rest.get(51..53)?)?;
        let is_zero = trace_id == [0; 16] || span_id == [0; 8];
        let (trace_id, span_id) = (TraceId(trace_id), SpanId(span_id));
        (!is_zero).then_some(Self { trace_id, span_id, flags: flags & (SAMPLED | RANDOM) })
    }

    fn value(&self) -> Option<HeaderValue> {
        let mut text = String::with_capacity(55);
        write!(text, "00-{}-{}-{:02x}", self.trace_id, self.span_id, self.flags).ok()?;
        HeaderValue::try_from(text).ok()
    }
}

/// Lower-case hexadecimal digits.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    if digits.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = pair else { return None };
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

/// The trace context of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) span: SpanContext,
    /// The data of other tracing systems, which is passed on.
    pub(crate) state: Option<HeaderValue>,
}

impl TraceContext {
    /// Reads the context of a request. `None` if there is none, or an invalid one.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all(TRACEPARENT).iter();
        let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
        let span = SpanContext::parse(parent.as_bytes())?;
        Some(Self { span, state: read_state(headers) })
    }

    /// Removes the context from a request.
    pub(crate) fn remove(headers: &mut HeaderMap) {
        headers.remove(TRACEPARENT);
        headers.remove(TRACESTATE);
    }

    /// Replaces the context of a request.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        Self::remove(headers);
        let Some(parent) = self.span.value() else { return };
        headers.insert(TRACEPARENT, parent);
        if let Some(state) = &self.state {
            headers.insert(TRACESTATE, state.clone());
        }
    }
}

/// All lines of `tracestate` as one; `None` if one of them is invalid, or it is too long.
fn read_state(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut members = Vec::new();
    for line in headers.get_all(TRACESTATE) {
        let line = line.to_str().ok()?;
        members.extend(
            line.split(',')
                .map(|member| member.trim_matches([' ', '\t']))
                .filter(|member| !member.is_empty()),
        );
    }
    if members.is_empty() || members.len() > MAX_MEMBERS || !members.iter().all(|member| is_member(member)) {
        return None;
    }
    let mut keys: Vec<_> = members.iter().filter_map(|member| member.split('=').next()).collect();
    keys.sort_unstable();
    if keys.windows(2).any(|pair| pair.first() == pair.last()) {
        return None;
    }
    let joined = members.join(",");
    HeaderValue::try_from(joined).ok().filter(|joined| joined.len() <= MAX_STATE)
}

/// `key=value`, as section 3.3.1.3 defines them.
fn is_member(member: &str) -> bool {
    let Some((key, value)) = member.split_once('=') else { return false };
    let is_key_byte = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'*' | b'/' | b'@');
    let is_key = key.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
        && key.len() <= 256
        && key.bytes().all(is_key_byte)
        && key.matches('@').count() <= 1;
    let is_value_byte = |byte: u8| matches!(byte, 0x20..=0x7e) && byte != b'=' && byte != b',';
    is_key && !value.is_empty() && value.len() <= 256 && value.bytes().all(is_value_byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn read(lines: &[(&'static str, &str)]) -> Option<TraceContext> {
        TraceContext::read(&headers(lines))
    }

    #[test]
    fn a_valid_parent_is_read_and_written_unchanged() {
        let context = read(&[("traceparent", PARENT)]).unwrap();
        assert_eq!(context.span.trace_id.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.span.span_id.to_string(), "00f067aa0ba902b7");
        assert!(context.span.is_sampled() && context.state.is_none());
        let mut written = headers(&[("traceparent", "x"), ("traceparent", "y"), ("tracestate", "a=b")]);
        context.write(&mut written);
        assert_eq!(written.get_all("traceparent").iter().collect::<Vec<_>>(), [PARENT]);
        assert!(!written.contains_key("tracestate"));
        for (from, to, is_sampled) in [("-01", "-00", false), ("-01", "-03", true), ("-01", "-02", false)] {
            let value = PARENT.replace(from, to);
            let context = read(&[("traceparent", &value)]).unwrap();
            assert_eq!(context.span.is_sampled(), is_sampled);
            assert_eq!(context.span.value().unwrap(), value);
        }
        // A later version may say more, and is continued in this one. Unknown flags are not passed on.
        for later in [
            PARENT.replacen("00-", "cc-", 1),
            format!("{}-what.the.future", PARENT.replacen("00-", "cc-", 1)),
        ] {
            assert_eq!(read(&[("traceparent", &later)]), Some(context.clone()), "{later}");
        }
        let all_flags = read(&[("traceparent", &PARENT.replace("-01", "-ff"))]).unwrap();
        assert_eq!(all_flags.span.value().unwrap(), PARENT.replace("-01", "-03"));
    }

    #[test]
    fn an_invalid_parent_is_no_context() {
        for value in [
            "",
            "00",
            &PARENT[1..],
            &PARENT[..54],
            &PARENT.to_uppercase(),
            &PARENT.replacen("00-", "ff-", 1),
            &PARENT.replacen("00-", "0-", 1),
            &PARENT.replacen("00-", "0x-", 1),
            &PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &PARENT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &PARENT.replace("4bf9", "4bg9"),
            &PARENT.replace("4bf9", "4BF9"),
            &PARENT.replace('-', "_"),
            &PARENT.replace("-01", "-1"),
            &PARENT.replace("-01", "-0g"),
            &format!("{PARENT}-more"),
            &format!("{PARENT}0"),
            &format!("{}x", PARENT.replacen("00-", "cc-", 1)),
            &format!(" {PARENT}, {PARENT}"),
        ] {
            assert_eq!(read(&[("traceparent", value)]), None, "{value}");
        }
        assert_eq!(read(&[("traceparent", PARENT), ("traceparent", PARENT)]), None);
        assert_eq!(read(&[("tracestate", "a=b")]), None);
    }

    #[test]
    fn the_state_is_passed_on_if_it_is_valid() {
        let state = |lines: &[&str]| {
            let mut all = vec![("traceparent", PARENT)];
            all.extend(lines.iter().map(|line| ("tracestate", *line)));
            let context = read(&all).unwrap();
            context.state.map(|state| state.to_str().unwrap().to_owned())
        };
        let many: String = (0..33).map(|n| format!("k{n}=v,")).collect();
        let long = format!("a={},b={},c={}", "x".repeat(200), "x".repeat(200), "x".repeat(200));
        for (lines, expected) in [
            (&["a=1"][..], Some("a=1")),
            (&["a=1, ,b@c=2 3", "d/*-_=4"], Some("a=1,b@c=2 3,d/*-_=4")),
            (&[""], None),
            (&["a"], None),
            (&["A=1"], None),
            (&["a=1,a=2"], None),
            (&["a=1", "b"], None),
            (&["a=b=c"], None),
            (&["a=\u{e9}"], None),
            (&[&many], None),
            (&[&long], None),
        ] {
            assert_eq!(state(lines).as_deref(), expected, "{lines:?}");
        }
    }

    #[test]
    fn a_child_has_the_trace_and_another_span() {
        let parent = read(&[("traceparent", &PARENT.replace("-01", "-03"))]).unwrap().span;
        let child = parent.child(false);
        assert!(child.trace_id == parent.trace_id && child.span_id != parent.span_id);
        assert_eq!((child.flags(), parent.child(true).flags()), (0b10, 0b11));
        assert!(SpanContext::root(true).trace_id != SpanContext::root(true).trace_id);
    }
}
