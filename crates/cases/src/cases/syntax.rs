//! The syntax of keys: equal keys, different keys, invalid keys.

use oncegate_http::KeySyntax;

use super::{pay, pay_as};
use crate::library::Library;
use crate::plan::Plan;
use crate::table::{Case, executes, refused, rejected, replays};

const UUID: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";

pub(super) fn cases() -> Vec<Case> {
    let strict = Plan { key_syntax: Some(KeySyntax::Strict), ..Plan::default() };
    cases! {
        "quoted-uuid-key": "the draft's first example is a key"
            => steps {
                let key = format!("\"{UUID}\"");
                vec![executes(pay_as(&key)), replays(0, pay_as(&key))]
            };
        "quoted-opaque-key": "the draft's second example is a key"
            => steps {
                let key = "\"clkyoesmbgybucifusbbtdsbohtyuuwz\"";
                vec![executes(pay_as(key)), replays(0, pay_as(key))]
            };
        "bare-and-quoted-are-one-key": "a bare key is the same key as the quoted one"
            => steps {
                let quoted = format!("\"{UUID}\"");
                vec![
                    executes(pay_as(UUID)),
                    replays(0, pay_as(&quoted)),
                    executes(pay_as("\"abc\"")),
                    replays(2, pay_as("abc")),
                ]
            };
        "strict-refuses-bare-keys": "strict: only strings of RFC 9651 are keys"
            .given(strict)
            => steps [
                refused("key-invalid", pay_as("clkyoesmbgybucifusbbtdsbohtyuuwz")),
                refused("key-invalid", pay_as(UUID)),
                executes(pay_as("\"clkyoesmbgybucifusbbtdsbohtyuuwz\"")),
                executes(pay_as("\"a\\\"b\\\\c\";v=1")),
            ];
        "malformed-key-is-refused": "a string without its end is a 400, even if no key is required"
            => steps {
                let broken = [
                    "\"abc",
                    "abc\"",
                    "\"foo \\,\"",
                    "\"abc\"def",
                    "\"abc\" \"def\"",
                    "\"a\\bc\"",
                    "\"",
                    "\"abc\";",
                ];
                broken.map(|key| refused("key-invalid", pay_as(key))).into()
            };
        "single-quotes-are-plain-characters": "'foo' is a bare key that is not foo"
            => steps [executes(pay_as("'foo'")), executes(pay_as("foo")), replays(0, pay_as("'foo'"))];
        "key-escapes": "escapes are undone: \"a\\\"b\" is its own key"
            => steps [
                executes(pay_as(r#""a\"b""#)),
                executes(pay_as("ab")),
                replays(0, pay_as(r#""a\"b""#)),
                executes(pay_as(r#""a\"b\\c""#)),
                executes(pay_as(r#""a\\b""#)),
                replays(4, pay_as(r"a\b")),
            ];
        "key-parameters-are-ignored": "\"abc\";p=1 is the key abc"
            => steps [
                executes(pay_as("\"abc\";p=1")),
                replays(0, pay_as("\"abc\"")),
                replays(0, pay_as("\"abc\";v=\"x\";w")),
                replays(0, pay_as("abc")),
            ];
        "two-key-headers": "two lines are a 400, even if they are equal"
            => steps [
                refused("key-invalid", pay().key("\"a\"").key("\"a\"")),
                refused("key-invalid", pay().key("a").key("b")),
                refused("key-invalid", pay().key("a").key("")),
                refused("key-invalid", pay().key("\"foo").key("bar\"")),
                refused("key-invalid", pay().field("Idempotency-Key", "a").field("IDEMPOTENCY-KEY", "a")),
                executes(pay_as("a")),
            ];
        "comma-in-a-key": "a comma in a bare key is a 400, within quotes it is a part of the key"
            => steps [
                refused("key-invalid", pay_as("a, b")),
                refused("key-invalid", pay_as("a,b")),
                refused("key-invalid", pay_as("\"a\", \"b\"")),
                refused("key-invalid", pay_as("\"a\",\"a\"")),
                executes(pay_as("\"a, b\"")),
                replays(4, pay_as("\"a, b\"")),
            ];
        "empty-key": "an empty key is a 400"
            => steps {
                ["", "\"\"", "   ", "\"\";p=1", "\"   \""].map(|key| refused("key-invalid", pay_as(key))).into()
            };
        "key-length": "255 bytes are a key, 256 are not, counted without quotes and escapes"
            => steps {
                let long = |bytes: usize| "k".repeat(bytes);
                let quoted = |bytes: usize| format!("\"{}\"", "q".repeat(bytes));
                let escaped = |bytes: usize| format!("\"{}\"", "\\\"".repeat(bytes));
                vec![
                    executes(pay_as(&long(255))),
                    replays(0, pay_as(&long(255))),
                    executes(pay_as(&long(254))),
                    refused("key-invalid", pay_as(&long(256))),
                    executes(pay_as(&quoted(255))),
                    refused("key-invalid", pay_as(&quoted(256))),
                    executes(pay_as(&escaped(255))),
                    replays(6, pay_as(&escaped(255))),
                    refused("key-invalid", pay_as(&escaped(256))),
                    executes(pay_as("x")),
                ]
            };
        "key-characters": "control and non-ASCII bytes, in quotes or not, are a 400"
            => steps {
                let none: [&[u8]; 6] =
                    ["\"fü\"".as_bytes(), "fü".as_bytes(), b"\"a\tb\"", b"a\tb", b"\"\xff\xfe\"", b"a\x80b"];
                let mut steps: Vec<_> =
                    none.into_iter().map(|key| refused("key-invalid", pay().key(key))).collect();
                // A server may refuse these before any layer sees them.
                let worse: [&[u8]; 4] = [b"a\0b", b"\"a\0b\"", b"a\x7fb", b"\"a\x01b\""];
                steps.extend(worse.into_iter().map(|key| rejected(pay().key(key))));
                steps
            };
        "spaces-around-a-key": "optional whitespace around the field's value is no part of it"
            => steps [
                executes(pay_as("  \"abc\"  ")),
                replays(0, pay_as("\"abc\"")),
                replays(0, pay_as("\t abc \t")),
            ];
        "space-within-a-key": "a bare key has no space; a string may"
            => steps [
                refused("key-invalid", pay_as("a b")),
                executes(pay_as("\"a b\"")),
                executes(pay_as("\"a  b\"")),
                replays(1, pay_as("\"a b\"")),
            ];
        "header-name-in-any-case": "the field's name is not case-sensitive"
            => steps [
                executes(pay().field("IDEMPOTENCY-KEY", "abc")),
                replays(0, pay().field("idempotency-key", "abc")),
                replays(0, pay().field("iDemPotency-kEy", "\"abc\"")),
            ];
        "keys-are-case-sensitive": "ABC and abc are two keys"
            => steps [
                executes(pay_as("abc")),
                executes(pay_as("ABC")),
                replays(0, pay_as("abc")),
                replays(1, pay_as("ABC")),
            ];
        "uuid-keys-ignore-case": "if keys are UUIDs, case does not count, and other keys are refused"
            .given(Plan { key_format: Some("uuid"), ..Plan::default() })
            => steps [
                executes(pay_as(UUID)),
                replays(0, pay_as(&format!("\"{}\"", UUID.to_uppercase()))),
                refused("key-invalid", pay_as("8e03978e40d543e8bc936894a57f9324")),
                refused("key-invalid", pay_as("{8e03978e-40d5-43e8-bc93-6894a57f9324}")),
                refused("key-invalid", pay_as("8e03978e-40d5-43e8-bc93-6894a57f932g")),
                refused("key-invalid", pay_as("abc")),
            ];
        "ulid-keys": "if keys are ULIDs, other keys are refused"
            .given(Plan { key_format: Some("ulid"), ..Plan::default() })
            => steps [
                executes(pay_as("01ARZ3NDEKTSV4RRFFQ69G5FAV")),
                replays(0, pay_as("\"01ARZ3NDEKTSV4RRFFQ69G5FAV\"")),
                refused("key-invalid", pay_as("01ARZ3NDEKTSV4RRFFQ69G5FA")),
                refused("key-invalid", pay_as("01ARZ3NDEKTSV4RRFFQ69G5FAU")),
                refused("key-invalid", pay_as(UUID)),
            ];
        "keys-by-pattern": "if keys have a pattern, the whole key must match"
            .given(Plan { key_format: Some("pattern:order-[0-9]{3}"), ..Plan::default() })
            => steps [
                executes(pay_as("order-123")),
                replays(0, pay_as("\"order-123\"")),
                refused("key-invalid", pay_as("order-12345")),
                refused("key-invalid", pay_as("my-order-123")),
                refused("key-invalid", pay_as("order-123x")),
            ];
        "hostile-keys": "a key is only bytes: it is found again, and equals no other"
            => steps {
                let hostile = [
                    "'; DROP TABLE records; --",
                    "%0d%0aSet-Cookie: a=b",
                    "\\\\r\\\\nX-Injected: 1",
                    "${jndi:ldap://127.0.0.1/a}",
                    "%s%s%n%x",
                    "../../../../etc/passwd",
                    "*",
                    "{tag}",
                    "oncegate:lock:abc",
                    "a:b",
                    ":",
                    "<script>alert(1)</script>",
                    "$(reboot)",
                    "null",
                    "undefined",
                    "0",
                    "__proto__",
                ];
                let key = |text: &str| format!("\"{text}\"");
                let first = hostile.iter().map(|text| executes(pay_as(&key(text))));
                let again = hostile.iter().enumerate().map(|(n, text)| replays(n, pay_as(&key(text))));
                first.chain(again).collect()
            };
        "line-break-in-a-key": "a line break within the field never leads to an unprotected execution"
            .without_library(Library::Go, "net/http joins a folded line to one with a space, as RFC 9112 (5.2) allows")
            .without_library(Library::Python, "h11 joins a folded line to one with a space, as RFC 9112 (5.2) allows")
            => steps {
                let broken: [&[u8]; 4] = [b"abc\r\n def", b"abc\rdef", b"abc\ndef", b"\"abc\r\n\tdef\""];
                broken.map(|key| rejected(pay().key(key))).into()
            };
        "very-long-keys": "a key of kilobytes is a 400; for a longer one, the server's own refusal"
            => steps [
                refused("key-invalid", pay_as(&"k".repeat(8 * 1024))),
                refused("key-invalid", pay_as(&format!("\"{}\"", "k".repeat(64 * 1024)))),
                rejected(pay_as(&"k".repeat(1024 * 1024))),
                executes(pay_as("k")),
            ];
        "key-in-another-header": "the header of the key can have another name; the usual one is then ignored"
            .given(Plan { key_header: Some("x-request-token"), ..Plan::default() })
            => steps {
                let carried = |key: &str| pay().field("X-Request-Token", key);
                vec![
                    executes(carried("abc")),
                    replays(0, carried("\"abc\"")),
                    refused("key-invalid", carried("a,b")),
                    executes(carried("abd").key("\"broken")),
                    replays(3, carried("abd").key("also, broken")),
                ]
            };
    }
}
