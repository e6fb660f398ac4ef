//! The environment file of a service manager, by the rules of `EnvironmentFile=` in systemd.exec(5).
//!
//! A line is `NAME=VALUE`, a comment (`#` or `;` at its start), or empty. A value is a sequence of pieces, and a piece is
//! quoted only if its quote is the first character after `=` or after another quoted piece:
//!
//! | piece | a backslash | ends |
//! |---|---|---|
//! | unquoted | keeps the next character, and joins the next line | at the end of the line, without the spaces before it |
//! | `'…'` | is a character like others | at the next `'`, also lines later |
//! | `"…"` | before `"`, `\`, `` ` `` and `$` it is left out; it joins the next line; else it stays | at the next `"`, also lines later |
//!
//! Quotes inside of an unquoted piece are characters like others. Spaces after a quoted piece are left out.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use crate::files;

/// The largest file. Such a file has some lines.
const MAX_FILE: u64 = 1024 * 1024;

/// A variable and its value.
pub(super) type Variable = (OsString, OsString);

/// The environment of the unit.
#[derive(Debug)]
pub(super) struct UnitEnvironment {
    /// The variables of the file, and those of the environment that the file does not have.
    pub(super) variables: Vec<Variable>,
    /// The lines that systemd ignores, and quotes without an end. No value is in the text.
    pub(super) mistakes: Vec<String>,
    /// The lines whose meaning depends on the version of systemd.
    pub(super) doubts: Vec<String>,
}

/// Reads the file, and puts its variables before those of the environment with the same name, as systemd does.
///
/// # Errors
/// The file cannot be read, or systemd refuses it as a whole.
pub(super) fn over(
    file: &Path,
    environment: impl Iterator<Item = Variable>,
) -> Result<UnitEnvironment, String> {
    let named = |what: String| format!("--env-file {}: {what}", file.display());
    let size = fs::metadata(file).map_err(|error| named(error.to_string()))?.len();
    if size > MAX_FILE {
        return Err(named(format!("has {size} bytes; at most {MAX_FILE} are read")));
    }
    let text = files::read_text(file, MAX_FILE).map_err(|error| named(error.to_string()))?;
    if let Some(refused) = text.chars().find(|char| is_refused(*char)) {
        let code = u32::from(refused);
        return Err(named(format!("contains the character U+{code:04X}, so systemd reads nothing of it")));
    }
    let mut parser = Parser::default();
    for char in text.chars() {
        parser.push(char);
    }
    parser.end();
    let Parser { mut variables, mistakes, doubts, .. } = parser;
    let names: Vec<_> = variables.iter().map(|(name, _)| name.clone()).collect();
    variables.extend(environment.filter(|(name, _)| !names.contains(name)));
    let all_named = |texts: Vec<String>| texts.into_iter().map(named).collect();
    Ok(UnitEnvironment { variables, mistakes: all_named(mistakes), doubts: all_named(doubts) })
}

/// NUL, and the noncharacters of Unicode.
const fn is_refused(char: char) -> bool {
    let code = char as u32;
    code == 0 || (code >= 0xfdd0 && code <= 0xfdef) || code & 0xfffe == 0xfffe
}

/// The characters that end a line, and those that count as space.
const ENDS: [char; 2] = ['\n', '\r'];
const SPACES: [char; 4] = [' ', '\t', '\n', '\r'];

/// The characters before which a backslash is left out in double quotes.
const ESCAPED: [char; 4] = ['"', '\\', '`', '$'];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
    #[default]
    LineStart,
    Comment,
    CommentEscape,
    Name,
    /// After `=`, or after a quoted piece.
    PieceStart,
    Unquoted,
    UnquotedEscape,
    SingleQuoted,
    DoubleQuoted,
    DoubleQuotedEscape,
}

#[derive(Debug, Default)]
struct Parser {
    variables: Vec<Variable>,
    mistakes: Vec<String>,
    doubts: Vec<String>,
    position: Position,
    /// The number of the line before this one, and of the one on which the variable began.
    line: usize,
    begun_at: usize,
    name: String,
    value: String,
    /// The length of the value without the unescaped spaces at its end.
    trimmed: usize,
}

impl Parser {
    fn push(&mut self, char: char) {
        let is_end = ENDS.contains(&char);
        let is_space = SPACES.contains(&char);
        self.position = match (self.position, char) {
            (Position::LineStart, '#' | ';') => Position::Comment,
            (Position::LineStart, _) if is_space => Position::LineStart,
            (Position::LineStart, _) => {
                self.begun_at = self.line;
                self.name.push(char);
                Position::Name
            }
            (Position::Comment, '\\') => Position::CommentEscape,
            (Position::CommentEscape, _) if is_end => {
                let number = self.line + 1;
                self.doubts.push(format!(
                    "line {number} is a comment that ends with a backslash: before version 254, systemd takes the next line for a \
                     part of it"
                ));
                Position::LineStart
            }
            (Position::Comment | Position::CommentEscape, _) if is_end => Position::LineStart,
            (Position::Comment | Position::CommentEscape, _) => Position::Comment,
            (Position::Name, '=') => Position::PieceStart,
            (Position::Name, _) if is_end => {
                self.ignored();
                self.name.clear();
                Position::LineStart
            }
            (Position::Name, _) => {
                self.name.push(char);
                Position::Name
            }
            (Position::PieceStart | Position::Unquoted, _) if is_end => {
                self.finish();
                Position::LineStart
            }
            (Position::PieceStart, '\'') => Position::SingleQuoted,
            (Position::PieceStart, '"') => Position::DoubleQuoted,
            (Position::PieceStart | Position::Unquoted, '\\') => {
                self.trimmed = self.value.len();
                Position::UnquotedEscape
            }
            (Position::PieceStart, _) if is_space => Position::PieceStart,
            (Position::Unquoted, _) if is_space => {
                self.value.push(char);
                Position::Unquoted
            }
            (Position::UnquotedEscape, _) if is_end => Position::Unquoted,
            (Position::PieceStart | Position::Unquoted | Position::UnquotedEscape, _) => {
                self.keep(char);
                Position::Unquoted
            }
            (Position::SingleQuoted, '\'') | (Position::DoubleQuoted, '"') => Position::PieceStart,
            (Position::DoubleQuoted, '\\') => Position::DoubleQuotedEscape,
            (Position::DoubleQuotedEscape, '\n') => Position::DoubleQuoted,
            (Position::DoubleQuotedEscape, _) => {
                if !ESCAPED.contains(&char) {
                    self.keep('\\');
                }
                self.keep(char);
                Position::DoubleQuoted
            }
            (quoted @ (Position::SingleQuoted | Position::DoubleQuoted), _) => {
                self.keep(char);
                quoted
            }
        };
        if char == '\n' {
            self.line += 1;
        }
    }

    /// Ends the file.
    fn end(&mut self) {
        match self.position {
            Position::LineStart | Position::Comment | Position::CommentEscape => {}
            Position::Name => self.ignored(),
            Position::PieceStart | Position::Unquoted | Position::UnquotedEscape => self.finish(),
            Position::SingleQuoted | Position::DoubleQuoted | Position::DoubleQuotedEscape => {
                let (number, name) = (self.begun_at + 1, self.name.trim_end_matches(SPACES));
                // Another part of the line than the name may be a secret.
                if is_name(name) {
                    self.mistakes.push(format!(
                        "line {number}: the value of {name} has a quote without its end: systemd takes all lines that follow for a \
                         part of it"
                    ));
                }
                self.finish();
            }
        }
    }

    /// Adds a character that stays also at the end of the value.
    fn keep(&mut self, char: char) {
        self.value.push(char);
        self.trimmed = self.value.len();
    }

    /// Notes a line that systemd ignores.
    fn ignored(&mut self) {
        let number = self.begun_at + 1;
        self.mistakes
            .push(format!("line {number} is not NAME=VALUE (without `export`), so systemd ignores it"));
    }

    /// Ends a variable. The last one of a name counts.
    fn finish(&mut self) {
        let (name, mut value) = (std::mem::take(&mut self.name), std::mem::take(&mut self.value));
        value.truncate(std::mem::take(&mut self.trimmed));
        let name = name.trim_end_matches(SPACES);
        if !is_name(name) {
            return self.ignored();
        }
        self.variables.retain(|(known, _)| known != name);
        self.variables.push((name.into(), value.into()));
    }
}

fn is_name(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && name.bytes().next().is_some_and(|byte| !byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of a file with this text, the mistakes and the doubts.
    fn read(text: &str) -> UnitEnvironment {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        over(file.path(), std::iter::empty()).unwrap()
    }

    /// Each row was compared with the parser of systemd 252, by `30-systemd-environment-d-generator`.
    const VALUES: [(&str, &str); 37] = [
        ("A=", ""),
        ("A=1", "1"),
        ("  A  =  1  ", "1"),
        ("A=two words \t", "two words"),
        ("A=1\r\n", "1"),
        ("A=a=b", "a=b"),
        ("A=a #b", "a #b"),
        // A quote counts only at the start of a piece.
        ("A='x y'", "x y"),
        ("A=\"x y\"", "x y"),
        ("A=x'y", "x'y"),
        ("A=x\"y z\"", "x\"y z\""),
        ("A=don't \"say\" it", "don't \"say\" it"),
        ("A='a''b'", "ab"),
        ("A='a' \"b\"", "ab"),
        ("A='a' b", "ab"),
        ("A='a' # no comment", "a# no comment"),
        ("A='a'b'c'", "ab'c'"),
        ("A='it'\\''s'", "it''s'"),
        ("A=' x '  ", " x "),
        ("A=''", ""),
        // Backslashes in each piece.
        ("A=a\\ b", "a b"),
        ("A=a\\\\b", "a\\b"),
        ("A=a\\nb", "anb"),
        ("A=\\'a", "'a"),
        ("A=a\\ ", "a "),
        ("A=a\\  ", "a "),
        ("A=a \\\n", "a "),
        ("A='x\\y'", "x\\y"),
        ("A='x\\\\y'", "x\\\\y"),
        ("A=\"a\\\"b\"", "a\"b"),
        ("A=\"a\\\\b\"", "a\\b"),
        ("A=\"a\\nb\\'\"", "a\\nb\\'"),
        // More than one line.
        ("A=a\\\nb", "ab"),
        ("A=a \\\n  b ", "a   b"),
        ("A='a\nb'", "a\nb"),
        ("A=\"a\\\nb\nc\"", "ab\nc"),
        ("A=a\\", "a"),
    ];

    #[test]
    fn a_value_is_read_as_systemd_reads_it() {
        for (text, expected) in VALUES {
            // The line after it is read as such, too.
            for text in [text.to_owned(), format!("# a comment\n\n; one more\n{text}\nZ=z")] {
                let found = read(&text);
                let value = |name: &str| {
                    found
                        .variables
                        .iter()
                        .find(|(known, _)| known == name)
                        .map(|(_, value)| value.to_str().unwrap())
                };
                if text.ends_with("\\\nZ=z") {
                    continue; // it is a part of the value
                }
                assert_eq!(value("A"), Some(expected), "{text:?}");
                assert_eq!(value("Z"), text.ends_with("\nZ=z").then_some("z"), "{text:?}");
                assert_eq!((found.mistakes.len(), found.doubts.len()), (0, 0), "{text:?}");
            }
        }
    }

    #[test]
    fn dollars_and_backquotes_lose_their_backslash_in_double_quotes() {
        assert_eq!(read("A=\"\\$a \\`b\\`\"").variables, [("A".into(), "$a `b`".into())]);
        assert_eq!(read("A=$a").variables, [("A".into(), "$a".into())]);
    }

    #[test]
    fn the_last_value_of_a_name_counts_and_the_environment_is_behind_the_file() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"A=1\nB=2\nA=3\n").unwrap();
        let environment = [("B", "other"), ("C", "c")].map(|(name, value)| (name.into(), value.into()));
        let found = over(file.path(), environment.into_iter()).unwrap().variables;
        let expected = [("B", "2"), ("A", "3"), ("C", "c")];
        assert_eq!(found, expected.map(|(name, value)| (name.into(), value.into())));
    }

    #[test]
    fn what_systemd_ignores_is_a_mistake_and_its_text_stays_secret() {
        for (text, mistake, names) in [
            ("ok=1\nexport A=secret\nB=2", "line 2 is not NAME=VALUE", vec!["ok", "B"]),
            ("secret", "line 1 is not", vec![]),
            ("secret\nB=2", "line 1 is not", vec!["B"]),
            ("1A=secret", "line 1 is not", vec![]),
            ("=secret", "line 1 is not", vec![]),
            ("\u{feff}A=secret", "line 1 is not", vec![]),
            ("B=2\nA='secret\nC=3\n", "line 2: the value of A has a quote without its end", vec!["B", "A"]),
            ("A=\"secret\\\"", "line 1: the value of A", vec!["A"]),
        ] {
            let found = read(text);
            assert_eq!(found.variables.iter().map(|(name, _)| name).collect::<Vec<_>>(), names, "{text:?}");
            assert_eq!(found.mistakes.len(), 1, "{:?}", found.mistakes);
            assert!(found.mistakes[0].contains(mistake), "{:?}", found.mistakes);
            assert!(!found.mistakes[0].contains("secret"), "{:?}", found.mistakes);
        }
    }

    #[test]
    fn a_comment_with_a_backslash_at_its_end_depends_on_the_version() {
        let found = read("# a comment \\\nA=1\n# b\\c\n");
        assert_eq!(found.variables, [("A".into(), "1".into())]);
        assert!(found.doubts.len() == 1 && found.doubts[0].contains("line 1 is a comment"), "{found:?}");
        assert!(found.mistakes.is_empty());
    }

    #[test]
    fn a_file_that_systemd_refuses_is_an_error() {
        for (bytes, why) in [(&b"A=\xff"[..], "UTF-8"), (b"A=\0", "U+0000"), (b"A=\xef\xbf\xbe", "U+FFFE")] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(&mut file, bytes).unwrap();
            let error = over(file.path(), std::iter::empty()).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
