//! The program for Node.js.

use super::template::fill;
use super::{ABOUT_NAME, ABOUT_REFUSAL, ABOUT_REPLAY, KEY, NEXT_TO, Snippet, quoted};
use crate::rules::recipe::KeyRecipe;
use crate::rules::retry_signal::{REFUSAL_FIELD, REFUSED, RETRY_SAME_KEY};

impl Snippet<'_> {
    pub(super) fn fetch(&self) -> String {
        let mut options = vec![format!("method: {},", quoted(self.method)), "headers: {".to_owned()];
        if let Some((name, is_quoted)) = self.header {
            let key = if is_quoted { "`\"${key}\"`" } else { "key" };
            options.push(format!("  {}: {key},", quoted(name)));
        }
        options.extend(self.first_sent.map(|name| format!("  {}: sent,", quoted(name))));
        let fields = self.fixed_fields();
        options.extend(fields.iter().map(|(name, value)| format!("  {}: {},", quoted(name), quoted(value))));
        options.push("},".to_owned());
        if let Some(body) = &self.body {
            options.push(format!("body: JSON.stringify({}),", body.replace(&quoted(KEY), "key")));
        }
        let places = [
            ("KEY", self.fetch_key()),
            ("URL", vec![self.url_expression()]),
            ("OPTIONS", options),
            ("DECISION", self.fetch_decision()),
            ("LATER", vec![self.later().to_owned()]),
        ];
        fill(include_str!("retry.mjs"), &places)
    }

    fn fetch_key(&self) -> Vec<String> {
        let random = |bytes: usize| format!("randomBytes({bytes}).toString(\"hex\")");
        let (made, imported) = match self.recipe {
            KeyRecipe::None => return Vec::new(),
            KeyRecipe::Uuid => ("randomUUID()".to_owned(), Some("randomUUID")),
            KeyRecipe::Ulid => {
                (format!("\"0\" + {}.slice(0, 25).toUpperCase()", random(16)), Some("randomBytes"))
            }
            KeyRecipe::Hex(digits) => (random(digits / 2), Some("randomBytes")),
            KeyRecipe::Own => (format!("\"\"; // write a new key here; its format is {}", self.format), None),
        };
        let mut lines: Vec<_> =
            imported.iter().map(|name| format!("import {{ {name} }} from \"node:crypto\";")).collect();
        lines.extend([
            "import { existsSync, readFileSync, realpathSync, writeFileSync } from \"node:fs\";".to_owned(),
            "import { dirname, join } from \"node:path\";".to_owned(),
            "import { fileURLToPath } from \"node:url\";".to_owned(),
            String::new(),
            format!("// {ABOUT_NAME}"),
            format!("// {NEXT_TO}"),
            "const name = \"order-1\";".to_owned(),
            "const file = join(dirname(realpathSync(fileURLToPath(import.meta.url))), `${name}.key`);"
                .to_owned(),
            "if (!existsSync(file)) {".to_owned(),
            format!("  const made = {made}{}", if imported.is_some() { ";" } else { "" }),
        ]);
        if self.recipe == KeyRecipe::Own {
            lines.push("  if (!made) throw new Error(\"there is no key yet\");".to_owned());
        }
        lines.extend([
            match self.first_sent {
                Some(_) => {
                    "  writeFileSync(file, `${made}\\n${new Date().toUTCString()}\\n`, { flag: \"wx\", flush: true });".to_owned()
                }
                None => "  writeFileSync(file, `${made}\\n`, { flag: \"wx\", flush: true });".to_owned(),
            },
            "}".to_owned(),
            format!(
                "const [key{}] = readFileSync(file, \"utf8\").split(\"\\n\");",
                if self.first_sent.is_some() { ", sent" } else { "" }
            ),
            "if (!key) throw new Error(`there is no key in ${file}`);".to_owned(),
            "console.error(`The key is in ${file}`);".to_owned(),
            String::new(),
        ]);
        lines
    }

    fn fetch_decision(&self) -> Vec<String> {
        let signal = &self.signal;
        let (marker, value) = (quoted(self.marker.0), quoted(self.marker.1));
        let statuses: Vec<_> = signal.statuses.iter().map(u16::to_string).collect();
        let mut lines = vec![
            format!("let again = [{}].includes(status) || status >= 500;", statuses.join(", ")),
            format!("const refusal = headers.get({}) ?? \"\";", quoted(REFUSAL_FIELD)),
            format!(
                "if (refusal.startsWith({})) again = refusal.includes({}); // {ABOUT_REFUSAL}",
                quoted(REFUSED),
                quoted(RETRY_SAME_KEY)
            ),
            format!("else if (headers.get({marker}) === {value}) again = false; // {ABOUT_REPLAY}"),
        ];
        let header = signal.header.as_deref().map(quoted);
        lines.extend(header.map(|name| format!("else if (headers.get({name}) === \"true\") again = true;")));
        lines
    }
}
