//! The program for Python, without other packages.

use super::template::fill;
use super::{ABOUT_NAME, ABOUT_REFUSAL, ABOUT_REPLAY, KEY, NEXT_TO, Snippet, quoted};
use crate::rules::recipe::KeyRecipe;
use crate::rules::retry_signal::{REFUSAL_FIELD, REFUSED, RETRY_SAME_KEY};

impl Snippet<'_> {
    pub(super) fn python(&self) -> String {
        let mut headers = Vec::new();
        if let Some((name, is_quoted)) = self.header {
            let key = if is_quoted { "f'\"{key}\"'" } else { "key" };
            headers.push(format!("{}: {key},", quoted(name)));
        }
        headers.extend(self.first_sent.map(|name| format!("{}: sent,", quoted(name))));
        let fields = self.fixed_fields();
        headers.extend(fields.iter().map(|(name, value)| format!("{}: {},", quoted(name), quoted(value))));
        let body = self
            .body
            .iter()
            .map(|body| format!("request.data = json.dumps({}).encode()", body.replace(&quoted(KEY), "key")));
        let opener: &[&str] = match self.shows_certificate {
            true => &[
                "context = ssl.create_default_context()",
                "context.load_cert_chain(\"client.pem\", \"client.key\")",
                "opener = urllib.request.build_opener(NoRedirects, urllib.request.HTTPSHandler(context=context))",
            ],
            false => &["opener = urllib.request.build_opener(NoRedirects)"],
        };
        let places = [
            ("IMPORTS", vec![self.python_imports().join(", ")]),
            ("KEY", self.python_key()),
            ("OPENER", opener.iter().map(|line| (*line).to_owned()).collect()),
            ("URL", vec![self.url_expression()]),
            ("METHOD", vec![quoted(self.method)]),
            ("HEADERS", headers),
            ("BODY", body.collect()),
            ("DECISION", self.python_decision()),
            ("LATER", vec![self.later().to_owned()]),
        ];
        fill(include_str!("retry.py"), &places)
    }

    fn python_imports(&self) -> Vec<&'static str> {
        let needed = [
            ("email.utils", true),
            ("http.client", true),
            ("json", self.body.is_some()),
            ("os", self.has_key()),
            ("pathlib", self.has_key()),
            ("secrets", matches!(self.recipe, KeyRecipe::Ulid | KeyRecipe::Hex(_))),
            ("ssl", self.shows_certificate),
            ("sys", self.has_key()),
            ("time", true),
            ("urllib.error", true),
            ("urllib.request", true),
            ("uuid", self.recipe == KeyRecipe::Uuid),
        ];
        needed.into_iter().filter(|(_, is_needed)| *is_needed).map(|(name, _)| name).collect()
    }

    fn python_key(&self) -> Vec<String> {
        let made = match self.recipe {
            KeyRecipe::None => return Vec::new(),
            KeyRecipe::Uuid => "str(uuid.uuid4())".to_owned(),
            KeyRecipe::Ulid => "\"0\" + secrets.token_hex(16)[:25].upper()".to_owned(),
            KeyRecipe::Hex(digits) => format!("secrets.token_hex({})", digits / 2),
            KeyRecipe::Own => format!("\"\"  # write a new key here; its format is {}", self.format),
        };
        let date = match self.first_sent {
            Some(_) => "{email.utils.formatdate(usegmt=True)}\\n",
            None => "",
        };
        let mut lines = vec![
            format!("# {ABOUT_NAME}"),
            format!("# {NEXT_TO}"),
            "name = \"order-1\"".to_owned(),
            "file = pathlib.Path(__file__).resolve(strict=True).parent / f\"{name}.key\"".to_owned(),
            "if not file.exists():".to_owned(),
            format!("    made = {made}"),
        ];
        if self.recipe == KeyRecipe::Own {
            lines.extend(
                ["    if not made:", "        raise RuntimeError(\"there is no key yet\")"]
                    .map(str::to_owned),
            );
        }
        lines.extend([
            "    with file.open(\"x\") as new:".to_owned(),
            format!("        new.write(f\"{{made}}\\n{date}\")"),
            "        new.flush()".to_owned(),
            "        os.fsync(new.fileno())  # also after a power cut, the key is the same".to_owned(),
            "key = file.read_text().split(\"\\n\")[0]".to_owned(),
            "if not key:".to_owned(),
            "    raise RuntimeError(f\"there is no key in {file}\")".to_owned(),
            "print(f\"The key is in {file}\", file=sys.stderr)".to_owned(),
        ]);
        if self.first_sent.is_some() {
            lines.push(
                "sent = file.read_text().split(\"\\n\")[1]  # the time of the first attempt".to_owned(),
            );
        }
        lines.push(String::new());
        lines
    }

    fn python_decision(&self) -> Vec<String> {
        let signal = &self.signal;
        let (marker, value) = (quoted(self.marker.0), quoted(self.marker.1));
        let statuses: Vec<_> = signal.statuses.iter().map(u16::to_string).collect();
        let mut lines = vec![
            format!("again = status in ({}) or status >= 500", statuses.join(", ")),
            format!("refusal = headers.get({}, \"\")", quoted(REFUSAL_FIELD)),
            format!("if refusal.startswith({}):", quoted(REFUSED)),
            format!("    again = {} in refusal  # {ABOUT_REFUSAL}", quoted(RETRY_SAME_KEY)),
            format!("elif headers.get({marker}) == {value}:"),
            format!("    again = False  # {ABOUT_REPLAY}"),
        ];
        if let Some(name) = signal.header.as_deref().map(quoted) {
            lines.push(format!("elif headers.get({name}) == \"true\":"));
            lines.push("    again = True".to_owned());
        }
        lines
    }
}
