//! The parts of a response that a record does not keep, because only the first client may get them.
//!
//! A member of a JSON body is replaced by `null`; the rest of the body keeps its bytes. A body in which members cannot be
//! found (it is not JSON, or compressed) is not kept at all.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::header::HeaderName;
use oncegate_core::{JsonPointer, StoredResponse};
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The field of a stored response whose body lacks members. It is kept, so that replays have it.
pub(crate) const REDACTED: &str = "idempotency-redacted";

/// Digests of the content, which do not fit a changed body.
const DIGESTS: [&str; 4] = ["content-digest", "repr-digest", "digest", "content-md5"];

/// The value of a redacted member.
const MASK: &str = "null";

/// The largest body whose members are sought on the thread that serves requests. A body of hundreds of small objects, each with a
/// redacted member, takes half a millisecond then. One of 1 MiB takes 8 milliseconds, one of 16 MiB 130, and would hold up the
/// other requests of the thread.
const MAX_INLINE_BYTES: usize = 64 * 1024;

/// The outcome of the redaction of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedactionOutcome {
    /// Members or fields were left out of what is stored.
    Redacted,
    /// It had none of them. If a route has this outcome only, its pointers may be misspelt.
    NothingFound,
    /// Nothing of it is stored, because members cannot be found in its body.
    NotStored,
}

impl RedactionOutcome {
    /// All outcomes.
    pub const ALL: [Self; 3] = [Self::Redacted, Self::NothingFound, Self::NotStored];

    /// The name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Redacted => "redacted",
            Self::NothingFound => "nothing-found",
            Self::NotStored => "not-stored",
        }
    }
}

/// Counts responses by the outcome of their redaction.
#[derive(Debug, Default)]
pub struct RedactionCounts([AtomicU64; RedactionOutcome::ALL.len()]);

impl RedactionCounts {
    /// The number of responses with this outcome.
    #[must_use]
    pub fn get(&self, outcome: RedactionOutcome) -> u64 {
        self.0.get(outcome as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    fn count(&self, outcome: RedactionOutcome) {
        if let Some(count) = self.0.get(outcome as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The body of a response as it is stored.
#[derive(Debug)]
pub(crate) enum RedactedBody {
    /// It has none of the members.
    Same,
    /// The body without the members.
    Changed(Bytes),
    /// Members cannot be found in it.
    NotStored,
}

/// The members and header fields of responses that are not kept.
#[derive(Clone, Default)]
pub(crate) struct Redaction {
    members: Vec<JsonPointer>,
    /// The members as steps from the root of the body.
    paths: Vec<Vec<String>>,
    headers: Vec<HeaderName>,
}

impl fmt::Debug for Redaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redaction").field("members", &self.members).field("headers", &self.headers).finish()
    }
}

/// The header fields, the body and the trailers of a response.
type ResponseParts<'a> = (Vec<(&'a str, &'a [u8])>, &'a [Bytes], Vec<(&'a str, &'a [u8])>);

/// The body in which members cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NotJson;

impl Redaction {
    pub(crate) fn with_members(self, members: Vec<JsonPointer>) -> Self {
        let paths = members.iter().map(|member| steps(member.as_str())).collect();
        Self { members, paths, ..self }
    }

    pub(crate) fn with_headers(self, headers: Vec<HeaderName>) -> Self {
        Self { headers, ..self }
    }

    /// Returns true if everything is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty() && self.headers.is_empty()
    }

    /// The members that are not kept.
    pub(crate) fn members(&self) -> impl Iterator<Item = &JsonPointer> {
        self.members.iter()
    }

    /// Returns true if members of bodies are not kept.
    fn has_members(&self) -> bool {
        !self.members.is_empty()
    }

    /// Returns true if a header or trailer field of this name may be stored.
    fn keeps(&self, name: &str) -> bool {
        !self.headers.iter().any(|other| other.as_str().eq_ignore_ascii_case(name))
    }

    /// Returns true if members are sought in a body that is too large for a thread that serves requests.
    pub(crate) fn is_slow(&self, body: &[Bytes]) -> bool {
        self.has_members() && body.iter().map(Bytes::len).sum::<usize>() > MAX_INLINE_BYTES
    }

    /// Seeks the members in a body.
    pub(crate) fn body(&self, chunks: &[Bytes]) -> RedactedBody {
        // Most routes redact nothing, and copy nothing here.
        if !self.has_members() {
            return RedactedBody::Same;
        }
        let redacted = match chunks {
            [body] => self.redacted(body),
            chunks => self.redacted(&chunks.concat()),
        };
        match redacted {
            Ok(None) => RedactedBody::Same,
            Ok(Some(changed)) => RedactedBody::Changed(changed.into()),
            Err(NotJson) => RedactedBody::NotStored,
        }
    }

    /// Seeks the members in a body on a thread for blocking work. If that is not possible, nothing of the body is stored.
    pub(crate) async fn body_off_thread(redaction: Arc<Self>, chunks: Vec<Bytes>) -> RedactedBody {
        let found = tokio::task::spawn_blocking(move || redaction.body(&chunks)).await;
        found.unwrap_or(RedactedBody::NotStored)
    }

    /// The response of these header fields, this body and these trailers, as it is stored. `None` if nothing of it is.
    pub(crate) fn response(
        &self,
        status: u16,
        (mut headers, body, mut trailers): ResponseParts<'_>,
        redacted: RedactedBody,
        counts: Option<&RedactionCounts>,
    ) -> Option<StoredResponse> {
        let count = |outcome| match counts {
            Some(counts) if !self.is_empty() => counts.count(outcome),
            _ => {}
        };
        let fields = headers.len() + trailers.len();
        headers.retain(|(name, _)| self.keeps(name));
        trailers.retain(|(name, _)| self.keeps(name));
        let has_fields = headers.len() + trailers.len() < fields;
        let (changed, outcome) = match redacted {
            RedactedBody::NotStored => {
                count(RedactionOutcome::NotStored);
                return None;
            }
            RedactedBody::Changed(changed) => (Some(changed), RedactionOutcome::Redacted),
            RedactedBody::Same if has_fields => (None, RedactionOutcome::Redacted),
            RedactedBody::Same => (None, RedactionOutcome::NothingFound),
        };
        count(outcome);
        let Some(changed) = changed else {
            return StoredResponse::new(status, &headers, body, &trailers).ok();
        };
        let is_current = |name: &str| !DIGESTS.iter().any(|digest| digest.eq_ignore_ascii_case(name));
        headers.retain(|(name, _)| is_current(name) && *name != REDACTED);
        trailers.retain(|(name, _)| is_current(name));
        headers.push((REDACTED, &b"true"[..]));
        StoredResponse::new(status, &headers, &[changed], &trailers).ok()
    }

    /// The form of a response as it would be stored, if it is one that the operation itself stored.
    pub(crate) fn stored(&self, own: &StoredResponse) -> Option<StoredResponse> {
        let body = [own.body()];
        let redacted = self.body(&body);
        self.response(
            own.status(),
            (own.headers().collect(), &body, own.trailers().collect()),
            redacted,
            None,
        )
    }

    /// The body without the members. `None` if it has none of them.
    ///
    /// # Errors
    /// If members cannot be found in it.
    fn redacted(&self, body: &[u8]) -> Result<Option<String>, NotJson> {
        if self.paths.is_empty() || body.is_empty() {
            return Ok(None);
        }
        let text = std::str::from_utf8(body).map_err(|_| NotJson)?;
        // Digits and a text in quotes are JSON, too, and may be the secret itself.
        if !matches!(text.trim_start().as_bytes().first(), Some(b'{' | b'[' | b'n' | b't' | b'f')) {
            return Err(NotJson);
        }
        // The whole of it, also what no path leads into.
        serde_json::from_str::<IgnoredAny>(text).map_err(|_| NotJson)?;
        let paths: Vec<&[String]> = self.paths.iter().map(Vec::as_slice).collect();
        let mut found = Vec::new();
        walk(text, &paths, false, &mut found)?;
        if found.is_empty() {
            return Ok(None);
        }
        let mut changed = String::with_capacity(text.len());
        let mut rest = text;
        for value in found {
            // Each is a part of the text, and comes after those before it.
            let start = (value.as_ptr() as usize).checked_sub(rest.as_ptr() as usize).ok_or(NotJson)?;
            let (before, after) = rest.split_at_checked(start).ok_or(NotJson)?;
            changed.push_str(before);
            changed.push_str(MASK);
            rest = after.get(value.len()..).ok_or(NotJson)?;
        }
        changed.push_str(rest);
        Ok(Some(changed))
    }
}

/// The steps of a pointer.
fn steps(pointer: &str) -> Vec<String> {
    pointer.split('/').skip(1).map(|step| step.replace("~1", "/").replace("~0", "~")).collect()
}

/// Finds the values at these paths, in their order. All members of a repeated name are found, because programs differ in
/// which of them counts. The recursion is as deep as the longest path.
///
/// `is_named` says that a step names this value: then it is found as well if it is a text or a number and a path leads further
/// down, because what it says cannot be told apart. A step `*` passes over such values.
fn walk<'a>(
    value: &'a str,
    paths: &[&[String]],
    is_named: bool,
    found: &mut Vec<&'a str>,
) -> Result<(), NotJson> {
    if paths.iter().any(|path| path.is_empty()) {
        found.push(value);
        return Ok(());
    }
    match value.trim_start().as_bytes().first() {
        Some(b'{') => {
            for (name, child) in members(value)? {
                let rest = below(paths, |step| step == name);
                if !rest.is_empty() {
                    let is_named = paths.iter().any(|path| path.first() == Some(&name));
                    walk(child.get(), &rest, is_named, found)?;
                }
            }
        }
        Some(b'[') => {
            let elements: Vec<&RawValue> = serde_json::from_str(value).map_err(|_| NotJson)?;
            for (number, child) in elements.into_iter().enumerate() {
                let rest = below(paths, |step| index(step) == Some(number));
                if !rest.is_empty() {
                    walk(child.get(), &rest, false, found)?;
                }
            }
        }
        Some(b'"' | b'-' | b'0'..=b'9') if is_named => found.push(value),
        _ => {}
    }
    Ok(())
}

/// The rests of the paths whose first step matches.
fn below<'p>(paths: &[&'p [String]], matches: impl Fn(&str) -> bool) -> Vec<&'p [String]> {
    let first = paths.iter().filter_map(|path| path.split_first());
    first.filter(|(step, _)| *step == "*" || matches(step)).map(|(_, rest)| rest).collect()
}

/// The index that a step names: digits without leading zeros (RFC 6901, section 4).
fn index(step: &str) -> Option<usize> {
    let is_plain = step == "0" || !step.starts_with('0');
    if is_plain && step.bytes().all(|byte| byte.is_ascii_digit()) { step.parse().ok() } else { None }
}

/// All members of an object.
fn members(object: &str) -> Result<Vec<(String, &RawValue)>, NotJson> {
    struct All;
    impl<'de> Visitor<'de> for All {
        type Value = Vec<(String, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some(member) = map.next_entry()? {
                all.push(member);
            }
            Ok(all)
        }
    }
    serde_json::Deserializer::from_str(object).deserialize_map(All).map_err(|_| NotJson)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redaction(pointers: &[&str]) -> Redaction {
        Redaction::default().with_members(pointers.iter().map(|text| text.parse().unwrap()).collect())
    }

    #[track_caller]
    fn becomes(pointers: &[&str], body: &str, changed: Option<&str>) {
        assert_eq!(redaction(pointers).redacted(body.as_bytes()).unwrap().as_deref(), changed, "{body}");
    }

    #[test]
    fn members_become_null_and_everything_else_keeps_its_bytes() {
        let body = " { \"id\" : 1.50,\n\"card\":{\"number\":\"4111\", \"exp\":[1, 2]} ,\"x\":\"\\u0041\"}\n";
        becomes(
            &["/card/number"],
            body,
            Some(" { \"id\" : 1.50,\n\"card\":{\"number\":null, \"exp\":[1, 2]} ,\"x\":\"\\u0041\"}\n"),
        );
        becomes(&["/card"], body, Some(" { \"id\" : 1.50,\n\"card\":null ,\"x\":\"\\u0041\"}\n"));
        becomes(
            &["/x", "/card/exp/1", "/card/number"],
            body,
            Some(" { \"id\" : 1.50,\n\"card\":{\"number\":null, \"exp\":[1, null]} ,\"x\":null}\n"),
        );
        // A pointer below another one.
        becomes(&["/card/number", "/card"], r#"{"card":{"number":1}}"#, Some(r#"{"card":null}"#));
        for absent in ["/cards", "/card/exp/2", "/card/exp/01", "/Card"] {
            becomes(&[absent], body, None);
        }
        becomes(&["/a"], "", None);
    }

    #[test]
    fn repeated_and_escaped_names_and_all_elements_are_found() {
        becomes(&["/a"], r#"{"a":1,"b":2,"a":{"c":3}}"#, Some(r#"{"a":null,"b":2,"a":null}"#));
        becomes(&["/a/b"], r#"{"a":{"b":1},"a":{"b":2}}"#, Some(r#"{"a":{"b":null},"a":{"b":null}}"#));
        becomes(&["/a~1b"], r#"{"\u0061/b":"secret"}"#, Some(r#"{"\u0061/b":null}"#));
        becomes(&["/*/n"], r#"[{"n":1},{"m":2},{"n":3}]"#, Some(r#"[{"n":null},{"m":2},{"n":null}]"#));
        becomes(&["/*"], r#"{"a":1,"b":[2]}"#, Some(r#"{"a":null,"b":null}"#));
        becomes(&["/a/0"], r#"{"a":{"0":1}}"#, Some(r#"{"a":{"0":null}}"#));
    }

    #[test]
    fn a_body_in_which_members_cannot_be_found_is_an_error() {
        for body in [
            "483920", "-1", "\"4111\"", "card=4111", "{\"a\":1}{\"a\":2}", "{\"a\":1", "<html>",
            "{\"\\ud800\":1}", "[1,]",
        ] {
            assert_eq!(redaction(&["/a"]).redacted(body.as_bytes()), Err(NotJson), "{body}");
        }
        assert_eq!(redaction(&["/a"]).redacted(b"{\"a\":\"\xff\"}"), Err(NotJson));
        // A deep body is read without recursion.
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(redaction(&["/a"]).redacted(deep.as_bytes()), Ok(None));
        assert_eq!(Redaction::default().redacted(b"\xff"), Ok(None));
    }

    /// JSON in a text, for example.
    #[test]
    fn a_text_or_number_where_a_path_leads_further_down_is_not_kept() {
        becomes(&["/card/number"], r#"{"card":"{\"number\":4111}","id":1}"#, Some(r#"{"card":null,"id":1}"#));
        becomes(&["/card/number"], r#"{"card":4111}"#, Some(r#"{"card":null}"#));
        becomes(&["/card/number"], r#"{"card":null}"#, None);
        becomes(&["/card/number"], r#"{"card":true}"#, None);
        becomes(
            &["/*/number"],
            r#"{"card":4111,"x":{"number":1}}"#,
            Some(r#"{"card":4111,"x":{"number":null}}"#),
        );
        becomes(&["/a"], "null", None);
    }

    #[test]
    fn digests_of_a_changed_body_are_not_kept() {
        let redaction = redaction(&["/a"]).with_headers(vec![HeaderName::from_static("x-token")]);
        let own = |body: &'static str| {
            let fields = [("Etag", &b"1"[..]), ("X-Token", b"2"), ("Content-Digest", b"3")];
            redaction.stored(&StoredResponse::new(200, &fields, &[body.into()], &[]).unwrap()).unwrap()
        };
        let names = |response: &StoredResponse| {
            response.headers().map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(&own("{}")), ["Etag", "Content-Digest"]);
        let changed = own("{\"a\":1}");
        assert_eq!(names(&changed), ["Etag", REDACTED]);
        // The form of a form is the form.
        assert_eq!(redaction.stored(&changed).unwrap(), changed);
        assert_eq!(redaction.stored(&StoredResponse::new(200, &[], &["<p>".into()], &[]).unwrap()), None);
    }

    /// Redaction of a large body takes milliseconds, so it runs elsewhere.
    #[tokio::test]
    async fn a_large_body_is_redacted_off_the_thread_in_the_same_way() {
        let redaction = Arc::new(redaction(&["/items/*/n"]));
        let items =
            "{\"n\":\"secret\",\"m\":1.50}".to_owned() + &",{\"n\":\"secret\",\"m\":1.50}".repeat(20_000);
        let body = format!("{{\"items\":[{items}]}}");
        let (start, end) = body.split_at(1000);
        let chunks = [Bytes::copy_from_slice(start.as_bytes()), Bytes::copy_from_slice(end.as_bytes())];
        assert!(redaction.is_slow(&chunks) && !redaction.is_slow(&chunks[..1]));
        assert!(!Redaction::default().is_slow(&chunks));
        let RedactedBody::Changed(there) =
            Redaction::body_off_thread(redaction.clone(), chunks.to_vec()).await
        else {
            panic!("it has the members")
        };
        let RedactedBody::Changed(here) = redaction.body(&chunks) else { panic!("it has the members") };
        assert_eq!(there, here);
        assert_eq!(here, body.replace("\"secret\"", "null"));
    }
}
