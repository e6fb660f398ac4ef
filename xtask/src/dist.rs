//! The files of a release: the archive, the Debian package, the list of parts (SBOM), and their checksums. The archive and the
//! package carry the documentation: the program, its configuration and its alerts name pages of it.
//!
//! All files are in `dist` in the target directory. The archive is the same for the same sources, program and
//! `SOURCE_DATE_EPOCH` (by default the time of the last commit).

mod debian;
mod sbom;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::run::{Result, cargo, output, root, run, target};

/// The facts about a release.
struct Release {
    version: String,
    /// Such as `x86_64-unknown-linux-gnu`.
    triple: String,
    /// The seconds since 1970 that all files in the archives have.
    epoch: String,
    /// The directory for all that is made.
    directory: PathBuf,
    /// The program.
    binary: PathBuf,
}

/// Makes everything. `profile` is that of the build; `dist` is the one for users.
pub(crate) fn dist(profile: &str) -> Result<()> {
    let directory = target().join("dist-files");
    if directory.exists() {
        fs::remove_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    run(cargo().args(["build", "--locked", "--profile", profile, "--package", "oncegate-cli"]))?;
    let in_target = if profile == "dev" { "debug" } else { profile };
    let binary = target().join(in_target).join("oncegate");
    let version = output(Command::new(&binary).arg("--version"))?;
    let rustc = output(Command::new("rustc").arg("-vV"))?;
    let release = Release {
        version: version.split_whitespace().last().unwrap_or_default().to_owned(),
        triple: rustc.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default().to_owned(),
        epoch: match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(epoch) => epoch,
            Err(_) => output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%ct"]))?
                .trim()
                .to_owned(),
        },
        directory,
        binary,
    };
    let archive = release.archive()?;
    let sbom = sbom::write(&release)?;
    let package = debian::package(&release)?;
    let mut sums = String::new();
    for file in [&archive, &package, &sbom] {
        let name = name_of(file);
        let sum = output(Command::new("sha256sum").current_dir(&release.directory).arg(&name))?;
        sums.push_str(&sum);
    }
    write(&release.directory.join("SHA256SUMS"), &sums)?;
    run(Command::new("sha256sum")
        .current_dir(&release.directory)
        .args(["--check", "--strict", "SHA256SUMS"]))?;
    eprintln!("xtask: {}", release.directory.display());
    Ok(())
}

impl Release {
    /// The archive: the program, its manual pages and completions, the licences, the documentation, and the directory `deploy`.
    fn archive(&self) -> Result<PathBuf> {
        let name = format!("oncegate-{}-{}", self.version, self.triple);
        let staged = self.directory.join(&name);
        copy(&self.binary, &staged.join("oncegate"), 0o755)?;
        for file in
            ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md", "GUARANTEES.md", "SECURITY.md"]
        {
            copy(&root().join(file), &staged.join(file), 0o644)?;
        }
        copy_documents(&staged)?;
        let shells = ["completions/oncegate.bash", "completions/_oncegate", "completions/oncegate.fish"];
        self.help_files(&staged.join("man"), shells.map(|file| staged.join(file)))?;
        let archive = self.directory.join(format!("{name}.tar.gz"));
        let epoch = format!("--mtime=@{}", self.epoch);
        run(Command::new("tar")
            .current_dir(&self.directory)
            .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu", &epoch])
            .args(["--use-compress-program=gzip -9n", "-cf"])
            .arg(&archive)
            .arg(&name))?;
        fs::remove_dir_all(&staged).map_err(|error| error.to_string())?;
        Ok(archive)
    }

    /// The manual pages, and the completions of bash, zsh and fish, if this version of the program prints them.
    fn help_files(&self, man: &Path, completions: [PathBuf; 3]) -> Result<()> {
        let has = |command: &str| {
            let help = Command::new(&self.binary).args([command, "--help"]).output();
            help.is_ok_and(|help| help.status.success())
        };
        if has("man") {
            fs::create_dir_all(man).map_err(|error| error.to_string())?;
            run(Command::new(&self.binary).arg("man").arg(man))?;
        }
        if has("completions") {
            for (shell, file) in ["bash", "zsh", "fish"].into_iter().zip(completions) {
                write(&file, &output(Command::new(&self.binary).args(["completions", shell]))?)?;
            }
        }
        Ok(())
    }
}

/// The directories that a user of the program gets, next to it.
const FOR_USERS: [&str; 2] = ["docs", "deploy"];

/// The files of the documentation and of `deploy`, and those that the pages link to, so that no link of a page is dead.
fn documents() -> Result<BTreeSet<PathBuf>> {
    let tracked: BTreeSet<PathBuf> = crate::tidy::tracked()?.into_iter().collect();
    let is_for_users = |file: &&PathBuf| FOR_USERS.iter().any(|directory| file.starts_with(directory));
    let mut documents: BTreeSet<PathBuf> = tracked.iter().filter(is_for_users).cloned().collect();
    for page in
        tracked.iter().filter(is_for_users).filter(|file| file.extension().is_some_and(|end| end == "md"))
    {
        let text =
            fs::read_to_string(root().join(page)).map_err(|error| format!("{}: {error}", page.display()))?;
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
        let linked = targets.map(|target| resolved(&page.with_file_name(target)));
        documents.extend(linked.filter(|file| tracked.contains(file)));
    }
    Ok(documents)
}

/// A path without `..`.
fn resolved(path: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            part => resolved.push(part),
        }
    }
    resolved
}

/// Copies the [`documents`] to their places below this directory.
fn copy_documents(to: &Path) -> Result<()> {
    for file in documents()? {
        let from = root().join(&file);
        let mode =
            fs::metadata(&from).map_err(|error| format!("{}: {error}", from.display()))?.permissions().mode();
        copy(&from, &to.join(&file), if mode & 0o100 == 0 { 0o644 } else { 0o755 })?;
    }
    Ok(())
}

/// The name of a file, without its directory.
fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// Writes a file, and makes its directory.
fn write(path: &Path, text: &str) -> Result<()> {
    make_parent(path)?;
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Copies a file with these rights, and makes its directory.
fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    make_parent(to)?;
    let copied = fs::copy(from, to).and_then(|_| fs::set_permissions(to, fs::Permissions::from_mode(mode)));
    copied.map_err(|error| format!("{}: {error}", from.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|error| format!("{}: {error}", parent.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pages that a text names by their place in the repository, such as `docs/guides/backups.md`.
    fn named(text: &str) -> impl Iterator<Item = PathBuf> {
        let ends = |c: char| !(c.is_ascii_alphanumeric() || "/-_.".contains(c));
        let starts = text.match_indices("docs/").map(|(at, _)| &text[at..]);
        starts
            .filter_map(move |rest| rest.split(ends).next())
            .filter(|name| name.ends_with(".md"))
            .map(PathBuf::from)
    }

    #[test]
    fn users_get_each_page_that_the_program_the_configuration_or_an_alert_names() {
        let documents = documents().unwrap();
        let sources = crate::tidy::tracked().unwrap().into_iter().filter(|file| {
            let is_source = file.starts_with("crates") && file.extension().is_some_and(|end| end == "rs");
            let is_test =
                file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs");
            file.starts_with("deploy") && file.extension().is_some_and(|end| end != "png")
                || is_source && !is_test
        });
        let mut pages = BTreeSet::new();
        for file in sources {
            pages.extend(named(&fs::read_to_string(root().join(&file)).unwrap()));
        }
        assert!(pages.contains(Path::new("docs/guides/backups.md")), "{pages:?}");
        assert!(pages.contains(Path::new("docs/operations/alerts.md")), "{pages:?}");
        for page in pages {
            assert!(documents.contains(&page), "{}", page.display());
        }
        assert!(documents.contains(Path::new("deploy/grafana/oncegate.json")));
        // Pages link to it.
        assert!(documents.contains(Path::new("GUARANTEES.md")));
    }
}
