//! Builds and installs the programs of `benches/peers`, all under the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Result, cargo, has, install, root, run, target};

/// The directory of the programs.
pub(super) struct Programs {
    pub(super) axum_idempotent: PathBuf,
    pub(super) node: PathBuf,
    pub(super) python: PathBuf,
    pub(super) go: PathBuf,
}

impl Programs {
    pub(super) fn install() -> Result<Self> {
        let needed = [
            ("node", "nodejs"),
            ("npm", "npm"),
            ("redis-server", "redis-server"),
            ("python3", "python3-venv"),
            ("go", "golang-go"),
        ];
        for (program, package) in needed {
            let version = if program == "go" { "version" } else { "--version" };
            if !has(program, &[version]) {
                install(&[package])?;
            }
        }
        let peers = root().join("benches/peers");
        let to = target().join("peers");
        let built = to.join("axum-idempotent");
        run(cargo()
            .args(["build", "--release", "--locked", "--manifest-path"])
            .arg(peers.join("axum-idempotent/Cargo.toml"))
            .arg("--target-dir")
            .arg(&built))?;
        let node = to.join("node");
        copy(&peers.join("node"), &node, &[".npmrc", "package.json", "package-lock.json", "server.js"])?;
        if is_new(&node, "package-lock.json")? {
            run(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&node))?;
            done(&node, "package-lock.json")?;
        }
        // Ours as they stand here, and not as a registry has them.
        let sdk = root().join("sdk");
        let ours = sdk.join("node");
        run(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&ours))?;
        run(Command::new("node").arg("build.mjs").current_dir(&ours))?;
        // A copy of the same version would stay as it is.
        let installed = node.join("node_modules/oncegate");
        if installed.exists() {
            fs::remove_dir_all(&installed).map_err(|error| format!("{}: {error}", installed.display()))?;
        }
        let add = ["install", "--no-save", "--no-package-lock", "--install-links", "--no-audit", "--no-fund"];
        run(Command::new("npm").args(add).arg(&ours).current_dir(&node))?;
        let python = to.join("python");
        copy(&peers.join("python"), &python, &["requirements.txt", "main.py"])?;
        if is_new(&python, "requirements.txt")? {
            run(Command::new("python3").args(["-m", "venv"]).arg(&python))?;
            run(Command::new(python.join("bin/pip"))
                .args(["install", "--quiet", "--disable-pip-version-check", "-r"])
                .arg(python.join("requirements.txt")))?;
            done(&python, "requirements.txt")?;
        }
        run(Command::new(python.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps"])
            .arg(sdk.join("python")))?;
        let go = to.join("go");
        run(Command::new("go")
            .args(["build", "-o"])
            .arg(&go)
            .arg(".")
            .envs([("GOFLAGS", "-mod=mod"), ("GOPROXY", "off"), ("GOTOOLCHAIN", "local")])
            .current_dir(peers.join("go")))?;
        Ok(Self { axum_idempotent: built.join("release/peer-axum-idempotent"), node, python, go })
    }
}

fn copy(from: &Path, to: &Path, names: &[&str]) -> Result<()> {
    let copied = fs::create_dir_all(to)
        .and_then(|()| names.iter().try_for_each(|name| fs::copy(from.join(name), to.join(name)).map(drop)));
    copied.map_err(|error| format!("{}: {error}", to.display()))
}

/// `true` if the packages of this file are not installed yet.
fn is_new(folder: &Path, file: &str) -> Result<bool> {
    let wanted = fs::read(folder.join(file)).map_err(|error| format!("{file}: {error}"))?;
    Ok(fs::read(folder.join("installed")).ok() != Some(wanted))
}

fn done(folder: &Path, file: &str) -> Result<()> {
    fs::copy(folder.join(file), folder.join("installed"))
        .map(drop)
        .map_err(|error| format!("{file}: {error}"))
}
