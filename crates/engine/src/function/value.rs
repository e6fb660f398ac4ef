//! The stored form of values: JSON, if JSON can express the value exactly.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::de::DeserializeOwned;
use serde::ser::{self, Serialize};

/// The reason why a value is not stored, or not accepted as an input: JSON cannot express it exactly.
///
/// Values are stored as JSON so that an operator can read them, and can write one if the outcome of a function is unknown. A
/// value that JSON cannot express is refused before it is stored, because a replay must equal the first caller's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// It holds a number that is not finite. JSON has no such number; serde writes `null`.
    #[error("it holds a number that is not finite, which JSON does not have")]
    NotFinite,
    /// It holds a `Some` whose content is written as `null`, such as `Some(None)` or `Some(())`: it would be read back as `None`.
    #[error("it holds a Some that JSON cannot distinguish from None")]
    SomeOfNull,
    /// Its `Serialize` failed, or it has map keys other than strings, numbers and booleans.
    #[error("it could not be serialized as JSON")]
    NotSerialized,
    /// Its JSON cannot be read back as the same type: a required field is left out, or it is nested too deeply.
    #[error("its JSON cannot be read back as its type")]
    NotReadBack,
    /// Its JSON is larger than [`Function::with_max_result_bytes`](super::Function::with_max_result_bytes) allows.
    #[error("it is larger than the limit for results")]
    TooLarge,
}

/// The JSON of a result: at most `max` bytes. It is read back once, so that a type that cannot be read back is found now, not
/// by a replay.
pub(crate) fn encode<T: Serialize + DeserializeOwned>(value: &T, max: usize) -> Result<Vec<u8>, JsonError> {
    // The value's own code runs here after the effect took place. A panic in it must not hide the effect.
    guarded(|| {
        value.serialize(Check(&mut ValueInfo::default())).map_err(|fault| fault.0)?;
        let mut to = Bounded { json: Vec::with_capacity(128), max, is_full: false };
        if serde_json::to_writer(&mut to, value).is_err() {
            return Err(if to.is_full { JsonError::TooLarge } else { JsonError::NotSerialized });
        }
        let reads_back = serde_json::from_slice::<T>(&to.json).is_ok();
        reads_back.then_some(to.json).ok_or(JsonError::NotReadBack)
    })
    .unwrap_or(Err(JsonError::NotSerialized))
}

/// The JSON of an input.
pub(crate) fn encode_input<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, JsonError> {
    let mut seen = ValueInfo::default();
    value.serialize(Check(&mut seen)).map_err(|fault| fault.0)?;
    // A hash map has another order each time. The order would count if the JSON has no canonical form because of its numbers.
    if seen.has_map
        && let Ok(sorted) = serde_json::to_value(value)
        && let Ok(json) = serde_json::to_vec(&sorted)
    {
        return Ok(json);
    }
    serde_json::to_vec(value).map_err(|_| JsonError::NotSerialized)
}

/// Reads a stored value. An empty body, which an operator may have given, is read as `null`.
///
/// # Errors
/// The reason, without any part of the value.
pub(crate) fn decode<T: DeserializeOwned>(stored: &[u8]) -> Result<T, String> {
    let stored = if stored.is_empty() { b"null" } else { stored };
    match guarded(|| serde_json::from_slice(stored)) {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(without_values(&error)),
        None => Err("its Deserialize panicked".to_owned()),
    }
}

/// The text of a serde error without the value.
fn without_values(error: &serde_json::Error) -> String {
    let text = error.to_string();
    if text.starts_with("missing field") {
        return text;
    }
    match text.rsplit_once(", expected ") {
        Some((_, expected)) => format!("expected {expected}"),
        None => format!("no such value at line {} column {}", error.line(), error.column()),
    }
}

/// The result of a closure; `None` if it panicked.
pub(crate) fn guarded<R>(of: impl FnOnce() -> R) -> Option<R> {
    // The closures only read what they refer to, and it is not read again after a panic.
    catch_unwind(AssertUnwindSafe(of)).ok()
}

/// A writer that accepts at most `max` bytes.
struct Bounded {
    json: Vec<u8>,
    max: usize,
    is_full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.max.saturating_sub(self.json.len()) {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.json.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The facts about a value that [`Check`] collects.
#[derive(Default)]
struct ValueInfo {
    has_map: bool,
}

/// The JSON form of a value: `null` or something else.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Null,
    Other,
}

/// A serializer that writes nothing, and fails at the first part that JSON cannot express.
struct Check<'a>(&'a mut ValueInfo);

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct CheckError(JsonError);

impl ser::Error for CheckError {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self(JsonError::NotSerialized)
    }
}

type CheckResult = Result<Shape, CheckError>;

/// Begins a compound value, whose parts are checked one by one.
macro_rules! compound {
    ($($name:ident($($of:ty),*)),* $(,)?) => {
        $(fn $name(self, $(_: $of),*) -> Result<Self, CheckError> {
            Ok(self)
        })*
    };
}

/// Serializes into [`Shape::Other`], whatever the value.
macro_rules! other {
    ($($name:ident: $of:ty),* $(,)?) => {
        $(fn $name(self, _: $of) -> CheckResult {
            Ok(Shape::Other)
        })*
    };
}

impl ser::Serializer for Check<'_> {
    type Ok = Shape;
    type Error = CheckError;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    other! {
        serialize_bool: bool, serialize_char: char, serialize_str: &str, serialize_bytes: &[u8],
        serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64, serialize_i128: i128,
        serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64, serialize_u128: u128,
    }

    fn serialize_f32(self, value: f32) -> CheckResult {
        self.serialize_f64(value.into())
    }

    fn serialize_f64(self, value: f64) -> CheckResult {
        if value.is_finite() { Ok(Shape::Other) } else { Err(CheckError(JsonError::NotFinite)) }
    }

    fn serialize_none(self) -> CheckResult {
        Ok(Shape::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> CheckResult {
        match value.serialize(self)? {
            Shape::Null => Err(CheckError(JsonError::SomeOfNull)),
            Shape::Other => Ok(Shape::Other),
        }
    }

    fn serialize_unit(self) -> CheckResult {
        Ok(Shape::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> CheckResult {
        Ok(Shape::Null)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, _: &'static str) -> CheckResult {
        Ok(Shape::Other)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> CheckResult {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        value: &T,
    ) -> CheckResult {
        value.serialize(self)?;
        Ok(Shape::Other)
    }

    compound! {
        serialize_seq(Option<usize>),
        serialize_tuple(usize),
        serialize_tuple_struct(&'static str, usize),
        serialize_tuple_variant(&'static str, u32, &'static str, usize),
        serialize_struct(&'static str, usize),
        serialize_struct_variant(&'static str, u32, &'static str, usize),
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Self, CheckError> {
        self.0.has_map = true;
        Ok(self)
    }

    fn collect_str<T: fmt::Display + ?Sized>(self, _: &T) -> CheckResult {
        Ok(Shape::Other)
    }
}

/// Implements the serializers of compound values: each part is checked.
macro_rules! parts {
    ($($of:ident: $part:ident($($name:ident: $named:ty)?)),* $(,)?) => {
        $(impl ser::$of for Check<'_> {
            type Ok = Shape;
            type Error = CheckError;

            fn $part<T: Serialize + ?Sized>(&mut self, $($name: $named,)? value: &T) -> Result<(), CheckError> {
                value.serialize(Check(self.0)).map(drop)
            }

            fn end(self) -> CheckResult {
                Ok(Shape::Other)
            }
        })*
    };
}

parts! {
    SerializeSeq: serialize_element(),
    SerializeTuple: serialize_element(),
    SerializeTupleStruct: serialize_field(),
    SerializeTupleVariant: serialize_field(),
    SerializeStruct: serialize_field(_name: &'static str),
    SerializeStructVariant: serialize_field(_name: &'static str),
}

impl ser::SerializeMap for Check<'_> {
    type Ok = Shape;
    type Error = CheckError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), CheckError> {
        key.serialize(Check(self.0)).map(drop)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CheckError> {
        value.serialize(Check(self.0)).map(drop)
    }

    fn end(self) -> CheckResult {
        Ok(Shape::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_and_some_of_null_are_found_at_any_depth() {
        let max = 1 << 20;
        assert_eq!(encode(&Some(f64::NAN), max), Err(JsonError::NotFinite));
        assert_eq!(encode(&vec![1.0, f64::INFINITY], max), Err(JsonError::NotFinite));
        assert_eq!(encode(&("a".to_owned(), f32::NEG_INFINITY), max), Err(JsonError::NotFinite));
        assert_eq!(encode(&vec![Some(None::<u8>)], max), Err(JsonError::SomeOfNull));
        assert_eq!(encode(&Some(()), max), Err(JsonError::SomeOfNull));
        assert_eq!(encode(&Some(Some(0)), max).as_deref(), Ok(&b"0"[..]));
    }

    #[test]
    fn a_result_is_bounded_in_bytes() {
        assert_eq!(encode(&"12345678".to_owned(), 10).map(|json| json.len()), Ok(10));
        assert_eq!(encode(&"123456789".to_owned(), 10), Err(JsonError::TooLarge));
    }

    #[test]
    fn an_error_shows_nothing_of_the_value() {
        let result = decode::<u32>(br#""4111 1111, expected nothing""#).unwrap_err();
        assert_eq!(result, "expected u32 at line 1 column 29");
        let result = decode::<(u32, u32)>(b"[1, 4111").unwrap_err();
        assert!(!result.contains("4111"), "{result}");
    }

    #[test]
    fn the_order_of_a_hash_map_does_not_count() {
        use std::collections::HashMap;
        // Too large for the canonical form, which would sort.
        let of = || (0..50).map(|n| (n.to_string(), u64::MAX - n)).collect::<HashMap<_, _>>();
        assert_eq!(encode_input(&of()), encode_input(&of()));
    }
}
