//! Texts with places that are filled in.

/// The template with its places filled in. A place is a name in capitals between `@`. One that has a line for itself takes any
/// number of lines, with its indentation; any other takes one.
pub(super) fn fill(template: &str, places: &[(&str, Vec<String>)]) -> String {
    let mut text = String::new();
    for line in template.lines() {
        let bare = line.trim_start();
        let indentation = line.get(..line.len() - bare.len()).unwrap_or_default();
        match places.iter().find(|(name, _)| bare == format!("@{name}@")) {
            Some((_, lines)) => {
                for line in lines {
                    text.extend([if line.is_empty() { "" } else { indentation }, line.as_str(), "\n"]);
                }
            }
            None => {
                let filled = places.iter().fold(line.to_owned(), |line, (name, value)| {
                    line.replace(&format!("@{name}@"), value.first().map_or("", String::as_str))
                });
                text.extend([filled.as_str(), "\n"]);
            }
        }
    }
    text.truncate(text.trim_end().len());
    text
}
