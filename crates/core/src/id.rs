//! Identifiers: the caller's key, the scope in which it is unique, and the record that both name.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::derived_key::uuid_of_digest;
use crate::limits;

/// The caller's identifier of one intent: 1 to 255 bytes, opaque and case-sensitive.
///
/// An entry point parses it (from an HTTP field or a message header); all other code checks only its length. `Debug` does
/// not show it, because people put customer data in keys. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(Arc<[u8]>);

/// The reason why bytes are not an [`IdempotencyKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// There are no bytes.
    #[error("the key is empty; send 1 to 255 bytes")]
    Empty,
    /// There are more than [`limits::MAX_KEY_BYTES`] bytes.
    #[error("the key has {bytes} bytes; at most {} are allowed", limits::MAX_KEY_BYTES)]
    TooLong {
        /// The number of bytes.
        bytes: usize,
    },
    /// A value that the key is made of, or the identity of the caller, is empty. All operations with an empty value would share
    /// one key.
    #[error("a value that the key is made of, or the identity of the caller, is empty")]
    EmptyValue,
    /// The value that the key is made of should be JSON and is not, or programs read it in different ways.
    #[error("the value that the key is made of is not JSON that all programs read alike")]
    NotJson,
}

impl IdempotencyKey {
    /// A key of these bytes: a byte string, a `str`, a `String`, a `Vec<u8>`.
    ///
    /// ```
    /// use oncegate_core::IdempotencyKey;
    ///
    /// let key = IdempotencyKey::new(b"order-123")?;
    /// assert_eq!(key, IdempotencyKey::new("order-123")?);
    /// assert_eq!(key, IdempotencyKey::new(format!("order-{}", 123))?);
    /// # Ok::<_, oncegate_core::KeyError>(())
    /// ```
    ///
    /// # Errors
    /// [`KeyError`] if there are none, or more than [`limits::MAX_KEY_BYTES`].
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let bytes = bytes.as_ref();
        match bytes.len() {
            0 => Err(KeyError::Empty),
            n if n > limits::MAX_KEY_BYTES => Err(KeyError::TooLong { bytes: n }),
            _ => Ok(Self(bytes.into())),
        }
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key as text; `None` if it is not UTF-8.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }

    /// A key of bytes that are known to be 1 to 255.
    pub(crate) fn from_valid(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

macro_rules! try_from_text {
    ($($text:ty),*) => {$(
        impl TryFrom<$text> for IdempotencyKey {
            type Error = KeyError;

            fn try_from(text: $text) -> Result<Self, KeyError> {
                Self::new(text)
            }
        }
    )*};
}

try_from_text!(&str, String, &String);

impl From<&Self> for IdempotencyKey {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

/// A value that is a key already always converts.
impl From<Infallible> for KeyError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.0.len())
    }
}

/// Gives an identifier its bytes, and their hexadecimal digits as text.
macro_rules! hexadecimal {
    ($name:ident, $bytes:literal) => {
        impl $name {
            /// The identifier with these bytes, as a store read them back.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; $bytes]) -> Self {
                Self(bytes)
            }

            /// The bytes.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; $bytes] {
                &self.0
            }

            /// Reads the hexadecimal digits that `Display` writes.
            #[must_use]
            pub fn from_hex(text: &str) -> Option<Self> {
                hex_to_array(text).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }
    };
}

/// A short, stable mark of a caller, which does not reveal the identity: the first eight bytes of the SHA-256 of the
/// caller's identity. All zero if there is only one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CallerTag([u8; 8]);

hexadecimal!(CallerTag, 8);

impl fmt::Debug for CallerTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A short mark of an idempotency key, by which an operator finds the records of a key without the rest of the requests.
///
/// It is the first eight bytes of `SHA-256( lp("oncegate-key-1") lp(key) )`. The ASCII letters of the key are in lower case
/// there, because some formats of keys ignore case. The tag depends on neither the caller nor the service.
///
/// It proves nothing: two keys may have the same tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyTag([u8; 8]);

impl KeyTag {
    /// The tag of this key.
    #[must_use]
    pub fn of(key: &IdempotencyKey) -> Self {
        Self(*Self::digest_of(key).first_chunk().unwrap_or(&[0; 8]))
    }

    /// The whole digest that the tag is the beginning of.
    pub(crate) fn digest_of(key: &IdempotencyKey) -> [u8; 32] {
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-key-1");
        let mut folded = [0; limits::MAX_KEY_BYTES];
        let folded = folded.get_mut(..key.as_bytes().len()).unwrap_or_default();
        for (to, from) in folded.iter_mut().zip(key.as_bytes()) {
            *to = from.to_ascii_lowercase();
        }
        part(&mut hash, folded);
        hash.finalize().into()
    }
}

hexadecimal!(KeyTag, 8);

impl fmt::Debug for KeyTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of a service. It keeps the keys of services apart that share a store. Programs with the same name share keys.
///
/// 1 to [`limits::MAX_SERVICE_NAME_CHARS`] visible ASCII characters. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceName(Arc<str>);

/// The error for a text that is not a [`ServiceName`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a service name has 1 to {} ASCII characters and no space", limits::MAX_SERVICE_NAME_CHARS)]
pub struct ServiceNameError;

impl ServiceName {
    /// Reads a name.
    ///
    /// # Errors
    /// [`ServiceNameError`] if it is empty, too long, or has a character other than visible ASCII.
    pub fn new(name: &str) -> Result<Self, ServiceNameError> {
        let fits = (1..=limits::MAX_SERVICE_NAME_CHARS).contains(&name.len());
        if fits && name.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(name.into()))
        } else {
            Err(ServiceNameError)
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The scope in which a key is unique: a caller; also a service, if several share the store; also an operation, if keys
/// belong to operations.
///
/// The caller's identity (a credential, a subject, a tenant) is hashed at once and not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope<'a> {
    caller: [u8; 32],
    /// The caller's digest, or that of the service and the caller.
    owner: [u8; 32],
    operation: Operation<'a>,
}

/// The operation that a scope is narrowed to.
#[derive(Clone, Copy, Debug)]
enum Operation<'a> {
    Part(&'a [u8]),
    Parts(&'a [&'a [u8]]),
}

impl<'a> Operation<'a> {
    const NONE: Self = Self::Parts(&[]);

    const fn parts(&self) -> &[&'a [u8]] {
        match self {
            Self::Part(part) => std::slice::from_ref(part),
            Self::Parts(parts) => parts,
        }
    }
}

/// A single part and a list of that part are the same operation.
impl PartialEq for Operation<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for Operation<'_> {}

impl<'a> Scope<'a> {
    /// The scope of one caller, identified by `identity`. `kind` (such as `header:authorization`) keeps equal identities of
    /// different kinds apart.
    ///
    /// Refuse a request whose identity is missing before you call this: all callers with an empty identity share one scope, so
    /// one of them can get the response of another.
    ///
    /// ```
    /// use oncegate_core::Scope;
    ///
    /// let scope = Scope::caller("customer", "42").with_operation("payment");
    /// ```
    #[must_use]
    pub fn caller(kind: &str, identity: impl AsRef<[u8]>) -> Self {
        Self::caller_of_parts(&[(kind, identity.as_ref())])
    }

    /// The scope of a caller that several parts identify together, such as a tenant and a session: pairs of kind and
    /// identity. Their order counts. Without any part, it is the scope of a [single tenant](Self::single_tenant).
    #[must_use]
    pub fn caller_of_parts(parts: &[(&str, &[u8])]) -> Self {
        if parts.is_empty() {
            return Self::single_tenant();
        }
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-caller-1");
        for (kind, identity) in parts {
            part(&mut hash, kind.as_bytes());
            part(&mut hash, identity);
        }
        let caller = hash.finalize().into();
        Self { caller, owner: caller, operation: Operation::NONE }
    }

    /// The scope of a service that has one caller only, or whose callers may share keys.
    #[must_use]
    pub const fn single_tenant() -> Self {
        Self { caller: [0; 32], owner: [0; 32], operation: Operation::NONE }
    }

    /// Narrows the scope to a service, for stores that several services share. All programs that name no service share one
    /// scope.
    #[must_use]
    pub fn with_service(&self, service: &ServiceName) -> Self {
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-service-1");
        part(&mut hash, service.as_str().as_bytes());
        part(&mut hash, &self.caller);
        Self { owner: hash.finalize().into(), ..*self }
    }

    /// The scope of the same caller in the same service for records that only observe requests. It shares no record with this
    /// scope, whatever its operation.
    #[must_use]
    pub fn in_shadow(&self) -> Self {
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-shadow-1");
        part(&mut hash, &self.owner);
        Self { owner: hash.finalize().into(), ..*self }
    }

    /// The scope of one operation of the caller, such as `payment`. It replaces an operation that was set before.
    #[must_use]
    pub fn with_operation<'b, O: AsRef<[u8]> + ?Sized>(&self, operation: &'b O) -> Scope<'b> {
        Scope { caller: self.caller, owner: self.owner, operation: Operation::Part(operation.as_ref()) }
    }

    /// The scope of an operation of several parts, such as a method and a path. It replaces an operation that was set before.
    #[must_use]
    pub const fn with_operation_parts<'b>(&self, operation: &'b [&'b [u8]]) -> Scope<'b> {
        Scope { caller: self.caller, owner: self.owner, operation: Operation::Parts(operation) }
    }

    /// The parts of the operation. Empty if keys belong to the caller alone.
    #[must_use]
    pub const fn operation(&self) -> &[&'a [u8]] {
        self.operation.parts()
    }

    /// The digest of the caller; zeros for a single tenant.
    pub(crate) const fn caller_digest(&self) -> &[u8; 32] {
        &self.caller
    }

    /// The caller's mark for listings. It does not depend on the service.
    #[must_use]
    pub fn caller_tag(&self) -> CallerTag {
        let mut tag = [0; 8];
        for (to, from) in tag.iter_mut().zip(self.caller) {
            *to = from;
        }
        CallerTag(tag)
    }
}

/// The identifier of a record: SHA-256 over the length-prefixed parts of its scope and its key.
///
/// The parts are never joined into a string, so no separator inside a key can give two records the same identifier. With
/// `lp(x) = u64 big-endian length, then x`:
///
/// - caller = 32 zero bytes for a single tenant, otherwise `SHA-256( lp("oncegate-caller-1") (lp(kind) lp(identity))+ )`;
/// - owner = the caller if no service is named, otherwise `SHA-256( lp("oncegate-service-1") lp(service) lp(caller) )`;
/// - record = `SHA-256( lp("oncegate-record-1") lp(owner) u64(number of operation parts) lp(part)* lp(key) )`.
///
/// `vectors/record_ids.json` has examples.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId([u8; 32]);

impl RecordId {
    /// Derives the identifier of the record for `key` in `scope`.
    #[must_use]
    pub fn derive(scope: &Scope<'_>, key: &IdempotencyKey) -> Self {
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-record-1");
        part(&mut hash, &scope.owner);
        hash.update((scope.operation().len() as u64).to_be_bytes());
        for operation in scope.operation() {
            part(&mut hash, operation);
        }
        part(&mut hash, key.as_bytes());
        Self(hash.finalize().into())
    }

    /// The key for a call of another API on behalf of this record, so that repeated calls take effect once. It differs for
    /// each `step`, and is the same for each attempt.
    ///
    /// It is a UUID of version 8 (RFC 9562), 36 characters: the first 16 bytes of
    /// `SHA-256( lp("oncegate-downstream-1") lp(record id) lp(step) )` with the version and variant bits set. Nearly every API
    /// accepts it. For an API with a lower limit, remove the hyphens: 32 hexadecimal digits remain.
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-downstream-1");
        part(&mut hash, &self.0);
        part(&mut hash, step.as_bytes());
        uuid_of_digest(hash)
    }
}

hexadecimal!(RecordId, 32);

/// The first four bytes: enough to find a line in a log, not enough to query the store.
impl fmt::Debug for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, self.0.first_chunk::<4>().unwrap_or(&[0; 4]))
    }
}

/// A number that grows with every claim of a record, over its whole life and beyond it.
///
/// The first claim takes the store's clock in milliseconds. Each later claim takes the greater of the clock and the previous
/// token plus one. So tokens grow even if the record was purged or lost in between. A resource that refuses tokens below the
/// greatest that it has seen (`WHERE token <= $1`) never blocks a key because a counter restarted at one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FencingToken(u64);

impl FencingToken {
    /// The token with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number, below 2^53 for all clocks before the year 287396, so that JSON can hold it.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number of a claim, by which the store recognises a claim that is sent again because its reply was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttemptId(u128);

impl AttemptId {
    /// An identifier from 128 random bits. The caller brings the randomness.
    #[must_use]
    pub const fn new(random: u128) -> Self {
        Self(random)
    }

    /// The bits.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }
}

/// Feeds one length-prefixed part to a hash.
pub(crate) fn part(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_be_bytes());
    hash.update(bytes);
}

/// Writes hexadecimal digits in lower case. The digits go to the formatter in pieces of up to 32 bytes: a formatted write for
/// each byte takes ten times as long, and every request that is passed on carries the identifier of its record.
pub(crate) fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digit = |value: u8| DIGITS.get(usize::from(value)).copied().unwrap_or_default();
    for piece in bytes.chunks(32) {
        let mut text = [0; 64];
        for (pair, byte) in text.as_chunks_mut().0.iter_mut().zip(piece) {
            *pair = [digit(byte >> 4), digit(byte & 0xf)];
        }
        let text = text.get(..2 * piece.len()).unwrap_or_default();
        f.write_str(std::str::from_utf8(text).map_err(|_| fmt::Error)?)?;
    }
    Ok(())
}

pub(crate) fn hex_to_array<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = pair else { return None };
        let value = char::from(*high).to_digit(16)? << 4 | char::from(*low).to_digit(16)?;
        *byte = u8::try_from(value).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_1_to_255_bytes() {
        assert_eq!(IdempotencyKey::new(b"").unwrap_err(), KeyError::Empty);
        assert!(IdempotencyKey::new([b'k'; 1]).is_ok());
        assert!(IdempotencyKey::new([b'k'; limits::MAX_KEY_BYTES]).is_ok());
        assert_eq!(
            IdempotencyKey::new([b'k'; limits::MAX_KEY_BYTES + 1]).unwrap_err(),
            KeyError::TooLong { bytes: 256 }
        );
    }

    #[test]
    fn no_separator_inside_a_part_gives_two_records_one_identifier() {
        let id = |parts: &[&str], key: &str| {
            let parts: Vec<_> = parts.iter().map(|part| part.as_bytes()).collect();
            let scope = Scope::single_tenant().with_operation_parts(&parts);
            RecordId::derive(&scope, &IdempotencyKey::new(key.as_bytes()).unwrap())
        };
        let ids = [
            id(&["POST", "/a"], "b"),
            id(&["POST", "/ab"], "b"),
            id(&["POST/a"], "b"),
            id(&["POST"], "/ab"),
            id(&["POST", "/a", ""], "b"),
            id(&["POST", "/a"], ":b"),
            id(&["POST:", "/a"], "b"),
        ];
        let distinct: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
    }

    #[test]
    fn equal_identities_of_different_kinds_are_different_callers() {
        assert_ne!(Scope::caller("header:x-tenant", b"7"), Scope::caller("header:authorization", b"7"));
    }

    #[test]
    fn different_lists_of_parts_are_different_callers() {
        let callers = [
            Scope::single_tenant(),
            Scope::caller("a", b"b"),
            Scope::caller("ab", b""),
            Scope::caller_of_parts(&[("a", b"b"), ("c", b"d")]),
            Scope::caller_of_parts(&[("c", b"d"), ("a", b"b")]),
            Scope::caller_of_parts(&[("a", b"bc"), ("", b"d")]),
            Scope::caller_of_parts(&[("a", b"b"), ("c", b"")]),
        ];
        let owners: std::collections::HashSet<_> = callers.iter().map(|scope| scope.owner).collect();
        assert_eq!(owners.len(), callers.len());
        assert_eq!(Scope::caller_of_parts(&[]), Scope::single_tenant());
        assert_eq!(Scope::caller_of_parts(&[("a", b"b")]), Scope::caller("a", b"b"));
    }

    #[test]
    fn two_services_on_one_store_share_no_key_and_show_the_same_caller() {
        let key = IdempotencyKey::new(*b"k").unwrap();
        let service = |name| ServiceName::new(name).unwrap();
        for scope in [Scope::single_tenant(), Scope::caller("a", b"b")] {
            let (orders, stock) =
                (scope.with_service(&service("orders")), scope.with_service(&service("stock")));
            let ids = [scope, orders, stock].map(|scope| RecordId::derive(&scope, &key));
            assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
            assert_eq!(orders.caller_tag(), scope.caller_tag());
            assert_eq!(orders.with_service(&service("stock")), stock, "the last name counts");
            let operation: [&[u8]; 1] = [b"POST"];
            assert_ne!(
                RecordId::derive(&orders.with_operation_parts(&operation), &key),
                RecordId::derive(&stock.with_operation_parts(&operation), &key)
            );
        }
    }

    #[test]
    fn the_tag_of_a_key_ignores_case() {
        let tag = |key: &str| KeyTag::of(&IdempotencyKey::new(key).unwrap());
        // Computed by another implementation of SHA-256.
        assert_eq!(tag("order-123").to_string(), "5254b927e4206baf");
        assert_eq!(tag("ORDER-123"), tag("order-123"));
        assert_ne!(tag("order-124"), tag("order-123"));
        assert_ne!(tag(&"k".repeat(limits::MAX_KEY_BYTES)), tag(&"k".repeat(limits::MAX_KEY_BYTES - 1)));
        assert_eq!(KeyTag::from_hex(&tag("k").to_string()), Some(tag("k")));
    }

    #[test]
    fn an_operation_replaces_one_that_was_set_before() {
        let caller = Scope::caller("customer", "42");
        let payment = caller.with_operation("payment");
        assert_eq!(caller.with_operation("order").with_operation("payment"), payment);
        assert_eq!(payment.with_operation_parts(&[]), caller);
    }

    #[test]
    fn a_service_name_is_visible_ascii_within_its_limit() {
        let longest = "x".repeat(limits::MAX_SERVICE_NAME_CHARS);
        for name in ["orders", "a.b/c-1", &longest] {
            assert_eq!(ServiceName::new(name).unwrap().as_str(), name);
        }
        for name in ["", "two words", "größe", "a\n", &format!("{longest}x")] {
            assert_eq!(ServiceName::new(name), Err(ServiceNameError), "{name}");
        }
    }

    #[test]
    fn only_hexadecimal_digits_of_the_right_length_are_read_back() {
        let id = RecordId::from_bytes([0xa5; 32]);
        assert_eq!(RecordId::from_hex(&id.to_string()), Some(id));
        assert_eq!(RecordId::from_hex("a5"), None);
        assert_eq!(RecordId::from_hex(&"g".repeat(64)), None);
    }

    #[test]
    fn every_byte_is_two_digits_in_lower_case() {
        let all: Vec<u8> = (0..=255).collect();
        for bytes in all.chunks(32) {
            let expected: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(RecordId::from_bytes(bytes.try_into().unwrap()).to_string(), expected);
        }
        struct Hex<'a>(&'a [u8]);
        impl fmt::Display for Hex<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, self.0)
            }
        }
        for len in [0, 1, 31, 32, 33, 65] {
            let expected: String = all[..len].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(Hex(&all[..len]).to_string(), expected);
        }
    }

    #[test]
    fn debug_output_shows_neither_key_nor_whole_id() {
        let key = IdempotencyKey::new(b"customer-4711").unwrap();
        assert!(!format!("{key:?}").contains("4711"));
        assert_eq!(format!("{:?}", RecordId::from_bytes([0xab; 32])), "abababab");
    }
}
