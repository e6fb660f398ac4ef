//! Runs the program that prints the keys.

use std::process::Stdio;
use std::time::Duration;

use oncegate_core::ErrorChain;
use oncegate_seal::Keyring;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

use crate::config::{MAX_KEY_TEXT, parse_seal_keys, shown_program};

/// Limits the time of the program.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The most of the standard error that is read and logged.
const MAX_ERRORS: u64 = 8 * 1024;

/// The variables that the program gets: those that every program needs, and those with which clients of key management services
/// find their server, their identity and the authorities that they trust. The page docs/reference/sealing.md lists them.
const KEPT: [&str; 24] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "CREDENTIALS_DIRECTORY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    "IDENTITY_ENDPOINT",
    "IDENTITY_HEADER",
];

/// The beginnings of the names of further variables that it gets.
const KEPT_PREFIXES: [&str; 8] = ["LC_", "XDG_", "AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "VAULT_", "BAO_"];

fn is_kept(name: &str) -> bool {
    KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// A process group, which is killed when this is dropped: a shell script may leave programs behind that hold the pipes.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _already_gone = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Runs the program and reads the keys that it prints. `note` gets each line of its standard error.
pub(super) async fn keys(words: &[String], note: fn(&str)) -> Result<Keyring, String> {
    keys_within(words, note, TIMEOUT).await
}

async fn keys_within(words: &[String], note: fn(&str), timeout: Duration) -> Result<Keyring, String> {
    let Some((program, arguments)) = words.split_first() else {
        return Err("the command is empty".to_owned());
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Not the whole environment, which has the secrets of the sidecar.
    let kept = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_kept));
    command.env_clear().envs(kept).kill_on_drop(true).process_group(0);
    // The word may be a whole command line with its secrets.
    let (has_blanks, program) = (program.contains(char::is_whitespace), &*shown_program(program));
    let hint = if has_blanks { "; the words of a command are separated by commas" } else { "" };
    let mut child = command.spawn().map_err(|error| format!("cannot run {program}: {error}{hint}"))?;
    let mut group = Group(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw));
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let run = async {
        let (output, ()) = tokio::join!(beginning(output), notes(errors, program, note));
        if output.len() > MAX_KEY_TEXT {
            return Err(format!("{program} printed more than {} KiB", MAX_KEY_TEXT / 1024));
        }
        let status = child.wait().await.map_err(|error| format!("{program}: {}", ErrorChain(&error)))?;
        // Another group may get its number from now on.
        group.0 = None;
        if !status.success() {
            return Err(format!("{program} failed: {status}"));
        }
        let text =
            String::from_utf8(output).map_err(|_| format!("the output of {program} is not a UTF-8 text"))?;
        parse_seal_keys(&text).map_err(|why| format!("the output of {program}: {why}"))
    };
    let late = |_| format!("{program} did not end within {} seconds, and was killed", timeout.as_secs());
    tokio::time::timeout(timeout, run).await.map_err(late)?
}

/// Reads an output up to one byte beyond the limit. Then the pipe is closed, so that a program that prints for ever ends.
async fn beginning(pipe: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // A pipe that breaks has ended; the status tells if the program failed.
        let _read = pipe.take(MAX_KEY_TEXT as u64 + 1).read_to_end(&mut bytes).await;
    }
    bytes
}

/// Passes on the first lines of the standard error, and reads the rest of it. A line that contains a key is left out.
async fn notes(pipe: Option<impl AsyncRead + Unpin>, program: &str, note: fn(&str)) {
    let Some(mut pipe) = pipe else { return };
    let mut bytes = Vec::new();
    let _read = (&mut pipe).take(MAX_ERRORS).read_to_end(&mut bytes).await;
    for line in String::from_utf8_lossy(&bytes).lines().filter(|line| !line.trim().is_empty()) {
        let line = if line.contains("ogseal1_") { "(a line with a key was left out)" } else { line };
        note(&format!("seal-keys-command, {program}: {}", crate::printable(line)));
    }
    let _read = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
}

#[cfg(test)]
mod tests {
    use oncegate_seal::SealKey;

    use super::*;

    fn shell(script: &str) -> Vec<String> {
        ["/bin/sh", "-c", script].map(str::to_owned).to_vec()
    }

    #[tokio::test]
    async fn keys_are_what_the_program_prints() {
        let key = SealKey::from_bytes([7; 32]);
        let ring =
            keys(&shell(&format!("echo '# ours'; echo {}", *key.to_secret_text())), |_| ()).await.unwrap();
        assert_eq!(ring.ids().collect::<Vec<_>>(), [key.id()]);
    }

    #[test]
    fn the_page_lists_the_variables_that_the_program_gets() {
        let page = include_str!("../../../../docs/reference/sealing.md");
        for name in KEPT.iter().filter(|name| !name.starts_with(|first: char| first.is_ascii_lowercase())) {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
        for prefix in KEPT_PREFIXES {
            assert!(page.contains(&format!("`{prefix}*`")), "{prefix}");
        }
    }

    #[tokio::test]
    async fn failures_name_the_program_and_nothing_that_it_printed() {
        for (script, why) in [
            ("echo hunter2; echo why >&2; exit 3", "/bin/sh failed: exit status: 3"),
            ("echo hunter2", "the output of /bin/sh: line 1 is not a key"),
            ("true", "the output of /bin/sh: there is no key in it"),
            ("printf '\\377'", "the output of /bin/sh is not a UTF-8 text"),
            ("yes hunter2", "/bin/sh printed more than 64 KiB"),
        ] {
            let error = keys(&shell(script), |_| ()).await.unwrap_err();
            assert!(error.starts_with(why), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        let none = keys(&["/nowhere/keys".to_owned()], |_| ()).await.unwrap_err();
        assert!(none.starts_with("cannot run /nowhere/keys: No such file"), "{none}");
        let line = "/nowhere/curl -H X-Vault-Token:hunter2 https://vault/v1/k".to_owned();
        let none = keys(&[line], |_| ()).await.unwrap_err();
        assert!(none.starts_with("cannot run curl …: No such file"), "{none}");
        assert!(none.ends_with("are separated by commas") && !none.contains("hunter2"), "{none}");
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_killed_with_everything_that_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        // The grandchild holds the pipes open.
        let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let error = keys_within(&shell(&script), |_| (), Duration::from_secs(2)).await.unwrap_err();
        assert!(error.contains("did not end within 2 seconds, and was killed"), "{error}");
        let pid = std::fs::read_to_string(&file).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        // A zombie that no parent has collected yet has ended, too.
        oncegate_testkit::until("the grandchild has ended", async || {
            std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
        })
        .await;
    }
}
