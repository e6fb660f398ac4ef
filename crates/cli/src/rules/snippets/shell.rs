//! The program for a shell with curl.

use super::template::fill;
use super::{ABOUT_NAME, ABOUT_REFUSAL, ABOUT_REPLAY, KEY, NEXT_TO, Snippet};
use crate::rules::recipe::KeyRecipe;
use crate::rules::retry_signal::{REFUSAL_FIELD, REFUSED, RETRY_SAME_KEY};

impl Snippet<'_> {
    pub(super) fn shell(&self) -> String {
        let later = if self.has_key() { " with the same key" } else { " with the same body" };
        let places = [
            ("KEY", self.shell_key()),
            ("CALL", self.shell_call()),
            ("DECISION", self.shell_decision()),
            ("LATER", vec![later.to_owned()]),
        ];
        fill(include_str!("retry.sh"), &places)
    }

    /// Makes the key, or reads it.
    fn shell_key(&self) -> Vec<String> {
        let random = |bytes: usize| format!("od -A n -N {bytes} -t x1 /dev/urandom | tr -d ' \\n'");
        let made = match self.recipe {
            KeyRecipe::None => return Vec::new(),
            KeyRecipe::Uuid => {
                let groups = r"s/^\(.\{8\}\)\(....\).\(...\).\(...\)/\1-\2-4\3-a\4-/";
                format!("$({} | sed '{groups}')", random(16))
            }
            KeyRecipe::Ulid => format!("$({} | tr a-f A-F | sed 's/^\\(.\\{{25\\}}\\).*/0\\1/')", random(16)),
            KeyRecipe::Hex(digits) => format!("$({})", random(digits / 2)),
            KeyRecipe::Own => format!("'' # write a new key here; its format is {}", self.format),
        };
        let date = match self.first_sent {
            Some(_) => " \"$(LC_ALL=C date -u '+%a, %d %b %Y %H:%M:%S GMT')\"",
            None => "",
        };
        let mut lines = vec![
            format!("# {ABOUT_NAME}"),
            format!("# {NEXT_TO}"),
            "name=order-1".to_owned(),
            // `$0` names another program if the text is pasted into a shell, or read from the standard input. This program has
            // the words that are looked for, because it looks for them.
            "program=$(readlink -f -- \"$0\") && grep -qsF 'save this program in a file' \"$program\" || {"
                .to_owned(),
            "  echo 'There is no place for the key: save this program in a file and run that' >&2; exit 1"
                .to_owned(),
            "}".to_owned(),
            "keyfile=${program%/*}/$name.key".to_owned(),
            "if [ ! -s \"$keyfile\" ]; then".to_owned(),
            format!("  key={made}"),
            "  set -C # another run may make it at the same time: the first one counts".to_owned(),
            format!("  printf '%s\\n' \"${{key:?no key was made}}\"{date} > \"$keyfile\""),
            "  set +C".to_owned(),
            "  sync # also after a power cut, the key is the same".to_owned(),
            "fi".to_owned(),
            "key=$(sed -n 1p \"$keyfile\")".to_owned(),
            ": \"${key:?there is no key in $keyfile}\"".to_owned(),
            "echo \"The key is in $keyfile\" >&2".to_owned(),
        ];
        if self.first_sent.is_some() {
            lines.push("sent=$(sed -n 2p \"$keyfile\") # the time of the first attempt".to_owned());
        }
        lines
    }

    fn shell_call(&self) -> Vec<String> {
        let url = match self.query {
            Some(name) => format!("{}\"${{key:?}}\"", word(&format!("{}?{name}=", self.url))),
            None => word(&self.url),
        };
        let mut parts = vec![format!(
            "status=$(curl --silent --show-error --max-time 60 --request {} {url}",
            self.method
        )];
        if let Some((name, is_quoted)) = self.header {
            let quote = if is_quoted { "\\\"" } else { "" };
            parts.push(format!("--header \"{name}: {quote}${{key:?}}{quote}\""));
        }
        parts.extend(self.first_sent.map(|name| format!("--header \"{name}: ${{sent:?}}\"")));
        let fields = self.fixed_fields();
        parts.extend(
            fields.iter().map(|(name, value)| format!("--header {}", word(&format!("{name}: {value}")))),
        );
        if self.shows_certificate {
            parts.push("--cert client.pem --key client.key".to_owned());
        }
        if let Some(body) = &self.body {
            let words: Vec<_> = body.split(KEY).map(word).collect();
            parts.push(format!("--data {}", words.join("\"${key:?}\"")));
        }
        parts.push("--dump-header \"$files/head\" --output \"$files/body\"".to_owned());
        parts.push("--write-out '%{http_code}') || status=000".to_owned());
        let last = parts.len() - 1;
        let line = |(at, part): (usize, String)| {
            format!("{}{part}{}", if at > 0 { "  " } else { "" }, if at < last { " \\" } else { "" })
        };
        parts.into_iter().enumerate().map(line).collect()
    }

    fn shell_decision(&self) -> Vec<String> {
        let signal = &self.signal;
        let (marker, value) = self.marker;
        let in_head = |name: &str, value: &str| {
            format!("grep -qi {} \"$files/head\"", word(&format!("^{name}: *{value}")))
        };
        let same_key = format!("{REFUSED};.*{RETRY_SAME_KEY}");
        let mut lines = vec![
            format!("if {}; then again=yes", in_head(REFUSAL_FIELD, &same_key)),
            format!("elif {}; then again=no # {ABOUT_REFUSAL}", in_head(REFUSAL_FIELD, REFUSED)),
            format!("elif {}; then again=no # {ABOUT_REPLAY}", in_head(marker, value)),
        ];
        lines.extend(
            signal.header.iter().map(|name| format!("elif {}; then again=yes", in_head(name, "true"))),
        );
        let statuses: Vec<_> = signal.statuses.iter().map(u16::to_string).collect();
        lines.push(format!("else case $status in {}|5??) again=yes ;; esac", statuses.join("|")));
        lines.push("fi".to_owned());
        lines
    }
}

/// The text as one word.
fn word(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
