//! The files of a release: the archive, the Debian package, the list of parts (SBOM), and their checksums.
//!
//! All files are in `dist` in the target directory. The archive is the same for the same sources, program and
//! `SOURCE_DATE_EPOCH` (by default the time of the last commit).

mod debian;
mod sbom;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
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
    /// The archive: the program, its manual pages and completions, the licences, and the directory `deploy`.
    fn archive(&self) -> Result<PathBuf> {
        let name = format!("oncegate-{}-{}", self.version, self.triple);
        let staged = self.directory.join(&name);
        copy(&self.binary, &staged.join("oncegate"), 0o755)?;
        for file in
            ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md", "GUARANTEES.md", "SECURITY.md"]
        {
            copy(&root().join(file), &staged.join(file), 0o644)?;
        }
        for file in crate::tidy::tracked()?.iter().filter(|file| file.starts_with("deploy")) {
            let from = root().join(file);
            let mode = fs::metadata(&from).map_err(|error| error.to_string())?.permissions().mode();
            copy(&from, &staged.join(file), if mode & 0o100 == 0 { 0o644 } else { 0o755 })?;
        }
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
