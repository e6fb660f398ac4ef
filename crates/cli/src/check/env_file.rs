//! The environment file of a service manager (`EnvironmentFile=` of systemd, `--env-file` of container engines).

use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// The largest file. Such a file has some lines.
const MAX_FILE: u64 = 1024 * 1024;

/// A variable and its value.
pub(super) type Variable = (OsString, OsString);

/// Reads the file, and puts its variables before those of the environment with the same name, as systemd does.
///
/// # Errors
/// The file cannot be read, or a line of it is none of `NAME=VALUE`, a comment and an empty line. No value is in the text.
pub(super) fn over(
    file: &Path,
    environment: impl Iterator<Item = Variable>,
) -> Result<Vec<Variable>, String> {
    let failed = |what: String| format!("--env-file {}: {what}", file.display());
    let size = fs::metadata(file).map_err(|error| failed(error.to_string()))?.len();
    if size > MAX_FILE {
        return Err(failed(format!("has {size} bytes; at most {MAX_FILE} are read")));
    }
    let text = fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    let mut variables = parse(&text).map_err(failed)?;
    let names: Vec<_> = variables.iter().map(|(name, _)| name.clone()).collect();
    variables.extend(environment.filter(|(name, _)| !names.contains(name)));
    Ok(variables)
}

fn parse(text: &str) -> Result<Vec<Variable>, String> {
    let mut variables: Vec<Variable> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        let number = number + 1;
        let is_name = |name: &&str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        };
        let pair = line.split_once('=').map(|(name, value)| (name.trim_end(), value));
        let Some((name, value)) = pair.filter(|(name, _)| is_name(name)) else {
            return Err(format!("line {number} is not NAME=VALUE (without `export`)"));
        };
        let value = unquoted(value.trim_start()).ok_or_else(|| {
            format!("line {number}: the value of {name} has a quote or a backslash without its end")
        })?;
        // The last one counts.
        variables.retain(|(known, _)| known != name);
        variables.push((name.into(), value.into()));
    }
    Ok(variables)
}

/// The value without its quotes. `None` if a quote is not closed, or if the line ends in a backslash.
fn unquoted(text: &str) -> Option<String> {
    let (mut value, mut quote) = (String::new(), None);
    let mut rest = text.chars();
    while let Some(next) = rest.next() {
        match (next, quote) {
            ('\'' | '"', None) => quote = Some(next),
            (next, Some(open)) if next == open => quote = None,
            ('\\', None | Some('"')) => value.push(rest.next()?),
            (next, _) => value.push(next),
        }
    }
    quote.is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_systemd_reads_them() {
        let text = "# a comment\n; one more\n\nA=1\nB = two words \nC=\"a \\\"b\\\" #c\"\nD='x\\y'\nE=a\\ b\nA=2\nF=\n";
        let read = parse(text).unwrap();
        let value = |name: &str| read.iter().find(|(known, _)| known == name).unwrap().1.to_str().unwrap();
        assert_eq!(
            ["A", "B", "C", "D", "E", "F"].map(value),
            ["2", "two words", "a \"b\" #c", "x\\y", "a b", ""]
        );
        for (wrong, what) in [
            ("ok=1\nexport A=secret", "line 2 is not"),
            ("secret", "line 1 is not"),
            ("A='secret", "line 1: the value of A"),
            ("A=secret\\", "line 1: the value of A"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(what) && !error.contains("secret"), "{error}");
        }
    }
}
