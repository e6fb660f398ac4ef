//! The words and the first lines of doc comments that the style of the project refuses.

use std::path::Path;

/// Refused words, and the words to use instead. An identifier is split at underscores; text with hyphens is one word.
const WORDS: &[(&str, &str)] = &[
    ("beside", "next to"),
    ("buried", "dead letter, or given up"),
    ("bury", "write a dead letter, or give up"),
    ("door", "entry point, deployment"),
    ("doors", "entry points, deployments"),
    ("ear", "change listener"),
    ("gravity", "severity"),
    ("keeper", "lease renewal"),
    ("landed", "the shared outcome"),
    ("landing", "the shared outcome"),
    ("lest", "so that … not"),
    ("nobody", "name the actor"),
    ("octet", "byte"),
    ("octets", "bytes"),
    ("patience", "timeout"),
    ("room", "crate, database, capacity"),
    ("rooms", "crates, databases"),
    ("somebody", "name the actor: client, operator, another process, the owner"),
    ("twin", "duplicate, copy"),
    ("twins", "duplicates, copies"),
    ("wherein", "in which"),
    ("whoever", "name the actor"),
    ("whomever", "name the actor"),
    ("witness", "the check that a replica applied a write"),
];

/// Refused phrases, and the phrases to use instead.
const PHRASES: &[(&str, &str)] =
    &[("all the same", "anyway"), ("for so long", "until"), ("in place of", "instead of")];

/// Terms of others that contain a refused word: functions of SQL, names of libraries.
const ALLOWED: &[&str] = &["octet_length"];

/// Words that must not begin a doc comment: it begins with a noun phrase or a verb in the third person.
const QUESTION_WORDS: &[&str] = &["What", "Who", "Whose", "Whom", "Whether", "Where", "How", "Which"];

/// This file has to name what it refuses.
const THIS: &str = "xtask/src/language.rs";

/// Adds a fault for each refused word and first line of a file.
pub(crate) fn check(file: &Path, text: &str, faults: &mut Vec<String>) {
    let name = file.display().to_string();
    let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_checked = matches!(extension, "rs" | "md" | "sql" | "lua");
    if !is_checked || name == THIS {
        return;
    }
    let mut previous = "";
    for (number, line) in text.lines().enumerate() {
        let at = format!("{name}:{}", number + 1);
        let line = line.trim();
        if extension == "rs" {
            question_words(&at, line, previous, faults);
        }
        words(&at, line, faults);
        previous = line;
    }
}

/// The marker of a doc comment, and its text.
fn doc(line: &str) -> Option<(&str, &str)> {
    ["///", "//!"].iter().find_map(|marker| Some((*marker, line.strip_prefix(marker)?.trim())))
}

fn question_words(at: &str, line: &str, previous: &str, faults: &mut Vec<String>) {
    let Some((marker, text)) = doc(line) else { return };
    if previous.starts_with(marker) {
        return;
    }
    let first = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    if QUESTION_WORDS.contains(&first) {
        faults.push(format!("{at}: a doc comment begins with {first}: use a noun phrase or a verb"));
    }
}

fn words(at: &str, line: &str, faults: &mut Vec<String>) {
    let line = ALLOWED.iter().fold(line.to_lowercase(), |line, term| line.replace(term, ""));
    for word in line.split(|c: char| !c.is_alphanumeric() && c != '-') {
        if let Some((word, instead)) = WORDS.iter().find(|(refused, _)| *refused == word) {
            // A quoted word is data, such as the name of a user.
            if !line.contains(&format!("\"{word}\"")) {
                faults.push(format!("{at}: {word}: use {instead}"));
            }
        }
    }
    for (phrase, instead) in PHRASES.iter().filter(|(phrase, _)| has_phrase(&line, phrase)) {
        faults.push(format!("{at}: {phrase}: use {instead}"));
    }
}

/// Returns `true` if the line has the phrase as whole words.
fn has_phrase(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + phrase.len()..]);
        !before.ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(file: &str, text: &str) -> usize {
        let mut faults = Vec::new();
        check(Path::new(file), text, &mut faults);
        faults.len()
    }

    #[test]
    fn only_the_first_line_of_a_doc_comment_must_not_begin_with_a_question_word() {
        assert_eq!(faults("a.rs", "/// What it holds."), 1);
        assert_eq!(faults("a.rs", "/// The content.\n/// What it holds."), 0);
        assert_eq!(faults("a.rs", "// Where it stands."), 0);
        assert_eq!(faults("a.md", "What it holds."), 0);
    }

    #[test]
    fn refused_words_are_found_in_prose_and_in_identifiers() {
        assert_eq!(faults("a.md", "Somebody waits in place of the client."), 2);
        assert_eq!(faults("a.rs", "let max_octets = 1;"), 1);
        assert_eq!(faults("a.rs", "let media = \"application/octet-stream\";"), 0);
        assert_eq!(faults("a.rs", "let user = \"nobody\";"), 0);
        assert_eq!(faults("a.txt", "octets"), 0);
        assert_eq!(faults("a.sql", "SELECT octet_length(body);"), 0);
        assert_eq!(faults("a.md", "All the same, it ends."), 1);
        assert_eq!(faults("a.md", "Services call the same functions."), 0);
    }
}
