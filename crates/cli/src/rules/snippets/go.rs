//! The program for Go 1.21, without other modules.

use super::template::fill;
use super::{ABOUT_NAME, ABOUT_REFUSAL, ABOUT_REPLAY, KEY, Snippet, quoted};
use crate::rules::recipe::KeyRecipe;
use crate::rules::retry_signal::{REFUSAL_FIELD, REFUSED, RETRY_SAME_KEY};

impl Snippet<'_> {
    pub(super) fn go(&self) -> String {
        let body = match &self.body {
            Some(body) => {
                let texts: Vec<_> = body.split(KEY).map(quoted).collect();
                format!("strings.NewReader({})", texts.join("+key+"))
            }
            None => "nil".to_owned(),
        };
        let mut fields = Vec::new();
        let mut set =
            |name: &str, value: &str| fields.push(format!("request.Header.Set({}, {value})", quoted(name)));
        if let Some((name, is_quoted)) = self.header {
            set(name, if is_quoted { "`\"`+key+`\"`" } else { "key" });
        }
        if let Some(name) = self.first_sent {
            set(name, "sent");
        }
        for (name, value) in self.fixed_fields() {
            set(name, &quoted(value));
        }
        let names = match (self.has_key(), self.first_sent) {
            (false, _) => None,
            (true, None) => Some("key, _"),
            (true, Some(_)) => Some("key, sent"),
        };
        let read = names.map_or_else(Vec::new, |names| {
            vec![
                format!("{names}, err := storedKey()"),
                "if err != nil {".to_owned(),
                "\treturn \"\", err".to_owned(),
                "}".to_owned(),
            ]
        });
        let places = [
            ("IMPORTS", self.go_imports().into_iter().map(quoted).collect()),
            ("KEY", self.go_key()),
            ("READ_KEY", read),
            ("CERTIFICATE", self.go_certificate()),
            ("METHOD", vec![quoted(self.method)]),
            ("URL", vec![self.url_expression().replace(" + key", "+key")]),
            ("BODY", vec![body]),
            ("FIELDS", fields),
            ("DECISION", self.go_decision()),
            ("LATER", vec![self.later().to_owned()]),
        ];
        fill(include_str!("retry.go"), &places)
    }

    fn go_imports(&self) -> Vec<&'static str> {
        let needed = [
            ("crypto/rand", self.has_key() && self.recipe != KeyRecipe::Own),
            ("crypto/tls", self.shows_certificate),
            ("errors", self.has_key()),
            ("fmt", true),
            ("io", true),
            ("io/fs", self.has_key()),
            ("log", true),
            ("net/http", true),
            ("os", self.has_key()),
            ("path/filepath", self.has_key()),
            ("strconv", true),
            ("strings", true),
            ("time", true),
        ];
        needed.into_iter().filter(|(_, is_needed)| *is_needed).map(|(name, _)| name).collect()
    }

    fn go_key(&self) -> Vec<String> {
        let made = match self.recipe {
            KeyRecipe::None => return Vec::new(),
            KeyRecipe::Uuid => {
                "fmt.Sprintf(\"%x-%x-%x-%x-%x\", random[:4], random[4:6], random[6:8], random[8:10], random[10:])".to_owned()
            }
            KeyRecipe::Ulid => "\"0\" + strings.ToUpper(fmt.Sprintf(\"%x\", random))[:25]".to_owned(),
            KeyRecipe::Hex(digits) => format!("fmt.Sprintf(\"%x\", random[:{}])", digits / 2),
            KeyRecipe::Own => format!("\"\" // write a new key here; its format is {}", self.format),
        };
        let mut lines = vec![
            format!("// {ABOUT_NAME}"),
            // `go run` builds the program in a directory that changes, so the place of the program is none for the key.
            "// retry-keys/NAME.key in the user's configuration directory. Another user or computer needs this file, too.".to_owned(),
            "const name = \"order-1\"".to_owned(),
            String::new(),
            "func storedKey() (key, sent string, err error) {".to_owned(),
            "\tdirectory, err := os.UserConfigDir()".to_owned(),
            "\tif err != nil {".to_owned(),
            "\t\treturn \"\", \"\", err".to_owned(),
            "\t}".to_owned(),
            "\tfile := filepath.Join(directory, \"retry-keys\", name+\".key\")".to_owned(),
            "\tif err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {".to_owned(),
            "\t\treturn \"\", \"\", err".to_owned(),
            "\t}".to_owned(),
            "\tif _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {".to_owned(),
        ];
        if self.recipe != KeyRecipe::Own {
            lines.extend([
                "\t\trandom := make([]byte, 16)".to_owned(),
                "\t\tif _, err := rand.Read(random); err != nil {".to_owned(),
                "\t\t\treturn \"\", \"\", err".to_owned(),
                "\t\t}".to_owned(),
            ]);
        }
        if self.recipe == KeyRecipe::Uuid {
            lines.push("\t\trandom[6], random[8] = random[6]&0x0f|0x40, random[8]&0x3f|0x80".to_owned());
        }
        lines.push(format!("\t\tmade := {made}"));
        if self.recipe == KeyRecipe::Own {
            lines.extend([
                "\t\tif made == \"\" {".to_owned(),
                "\t\t\treturn \"\", \"\", errors.New(\"there is no key yet\")".to_owned(),
                "\t\t}".to_owned(),
            ]);
        }
        lines.extend([
            "\t\tcontent := made + \"\\n\" + time.Now().UTC().Format(http.TimeFormat) + \"\\n\"".to_owned(),
            "\t\tcreated, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)".to_owned(),
            "\t\tif err != nil {".to_owned(),
            "\t\t\treturn \"\", \"\", err".to_owned(),
            "\t\t}".to_owned(),
            "\t\tif _, err := created.WriteString(content); err != nil {".to_owned(),
            "\t\t\treturn \"\", \"\", err".to_owned(),
            "\t\t}".to_owned(),
            "\t\t// Also after a power cut, the key is the same.".to_owned(),
            "\t\tif err := created.Sync(); err != nil {".to_owned(),
            "\t\t\treturn \"\", \"\", err".to_owned(),
            "\t\t}".to_owned(),
            "\t\tif err := created.Close(); err != nil {".to_owned(),
            "\t\t\treturn \"\", \"\", err".to_owned(),
            "\t\t}".to_owned(),
            "\t}".to_owned(),
            "\tcontent, err := os.ReadFile(file)".to_owned(),
            "\tkey, sent, _ = strings.Cut(strings.TrimSpace(string(content)), \"\\n\")".to_owned(),
            "\tif err != nil {".to_owned(),
            "\t\treturn \"\", \"\", err".to_owned(),
            "\t}".to_owned(),
            "\tif key == \"\" {".to_owned(),
            "\t\treturn \"\", \"\", errors.New(\"there is no key in \" + file)".to_owned(),
            "\t}".to_owned(),
            "\tlog.Print(\"The key is in \", file)".to_owned(),
            "\treturn key, sent, nil".to_owned(),
            "}".to_owned(),
            String::new(),
        ]);
        lines
    }

    fn go_certificate(&self) -> Vec<String> {
        if !self.shows_certificate {
            return Vec::new();
        }
        let lines = [
            "certificate, err := tls.LoadX509KeyPair(\"client.pem\", \"client.key\")",
            "if err != nil {",
            "\treturn \"\", err",
            "}",
            "client.Transport = &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}}",
        ];
        lines.map(str::to_owned).to_vec()
    }

    fn go_decision(&self) -> Vec<String> {
        let signal = &self.signal;
        let (marker, value) = (quoted(self.marker.0), quoted(self.marker.1));
        let statuses: Vec<_> = signal.statuses.iter().map(|status| format!("status == {status}")).collect();
        let mut lines = vec![
            format!("again := {} || status >= 500", statuses.join(" || ")),
            format!("refusal := response.Header.Get({})", quoted(REFUSAL_FIELD)),
            "switch {".to_owned(),
            format!("case strings.HasPrefix(refusal, {}):", quoted(REFUSED)),
            format!("\tagain = strings.Contains(refusal, {}) // {ABOUT_REFUSAL}", quoted(RETRY_SAME_KEY)),
            format!("case response.Header.Get({marker}) == {value}:"),
            format!("\tagain = false // {ABOUT_REPLAY}"),
        ];
        if let Some(name) = signal.header.as_deref().map(quoted) {
            lines.push(format!("case response.Header.Get({name}) == \"true\":"));
            lines.push("\tagain = true".to_owned());
        }
        lines.push("}".to_owned());
        lines
    }
}
