//! The Debian package, made with `dpkg-deb`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Release, copy, copy_documents, make_parent, name_of, write};
use crate::run::{Result, output, root, run};

/// Builds the package from a directory that has the files at their places.
pub(super) fn package(release: &Release) -> Result<PathBuf> {
    let staged = release.directory.join("deb");
    let deploy = root().join("deploy");
    let doc = staged.join("usr/share/doc/oncegate");
    copy(&release.binary, &staged.join("usr/bin/oncegate"), 0o755)?;
    copy(&deploy.join("oncegate.toml"), &staged.join("etc/oncegate/oncegate.toml"), 0o644)?;
    let unit = "systemd/oncegate.service";
    copy(&deploy.join(unit), &staged.join("lib/systemd/system/oncegate.service"), 0o644)?;
    copy_documents(&doc)?;
    copy(&root().join("CHANGELOG.md"), &doc.join("changelog.md"), 0o644)?;
    let licences = ["LICENSE-MIT", "LICENSE-APACHE"].map(|file| fs::read_to_string(root().join(file)));
    let licences =
        licences.into_iter().collect::<std::io::Result<Vec<_>>>().map_err(|error| error.to_string())?;
    write(&doc.join("copyright"), &licences.join("\n\n"))?;
    let man = staged.join("usr/share/man/man1");
    let shells = [
        "bash-completion/completions/oncegate",
        "zsh/vendor-completions/_oncegate",
        "fish/vendor_completions.d/oncegate.fish",
    ];
    release.help_files(&man, shells.map(|file| staged.join("usr/share").join(file)))?;
    if man.exists() {
        run(Command::new("gzip").args(["-9n", "--recursive"]).arg(&man))?;
    }
    for script in ["postinst", "postrm", "prerm"] {
        copy(&deploy.join("debian").join(script), &staged.join("DEBIAN").join(script), 0o755)?;
    }
    write(&staged.join("DEBIAN/conffiles"), "/etc/oncegate/oncegate.toml\n")?;
    write(&staged.join("DEBIAN/md5sums"), &sums(&staged)?)?;
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned();
    let control = format!(
        "Package: oncegate\nVersion: {}\nArchitecture: {architecture}\nMaintainer: {}\n\
         Installed-Size: {}\nDepends: {}\nRecommends: ca-certificates\nSection: net\nPriority: optional\n\
         Description: one key, one effect: makes retries of requests safe\n \
         A sidecar in front of a service over HTTP: a request that is sent again with the\n \
         same Idempotency-Key takes effect once, and gets the response of the first one.\n",
        release.version,
        maintainer()?,
        size_kib(&staged)?,
        libraries(release)?,
    );
    write(&staged.join("DEBIAN/control"), &control)?;
    let package = release.directory.join(format!("oncegate_{}_{architecture}.deb", release.version));
    run(Command::new("dpkg-deb")
        .env("SOURCE_DATE_EPOCH", &release.epoch)
        .args(["--root-owner-group", "--build"])
        .arg(&staged)
        .arg(&package))?;
    fs::remove_dir_all(&staged).map_err(|error| error.to_string())?;
    Ok(package)
}

/// The person who makes the package: `DEBFULLNAME` and `DEBEMAIL`, as for the tools of Debian, or else the committer
/// of the last commit. The project has no address of its own.
fn maintainer() -> Result<String> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    if let (Some(name), Some(address)) = (set("DEBFULLNAME"), set("DEBEMAIL")) {
        return Ok(format!("{name} <{address}>"));
    }
    let known = output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%cn <%ce>"]))?;
    Ok(known.trim().to_owned())
}

/// The packages of the libraries that the program needs, with their versions.
fn libraries(release: &Release) -> Result<String> {
    let scratch = release.directory.join("shlibdeps");
    let control = scratch.join("debian/control");
    make_parent(&control)?;
    write(&control, "Source: oncegate\n\nPackage: oncegate\nArchitecture: any\n")?;
    let found = output(Command::new("dpkg-shlibdeps").current_dir(&scratch).arg("-O").arg(&release.binary))?;
    fs::remove_dir_all(&scratch).map_err(|error| error.to_string())?;
    let depends = found.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    depends.map(str::to_owned).ok_or_else(|| "dpkg-shlibdeps found no libraries".to_owned())
}

/// The files of the package with their MD5 sums, for `dpkg --verify`.
fn sums(staged: &Path) -> Result<String> {
    let mut sums = String::new();
    for file in files(staged)? {
        let inside = file.strip_prefix(staged).map_err(|error| error.to_string())?;
        if !inside.starts_with("DEBIAN") {
            let sum = output(Command::new("md5sum").current_dir(staged).arg(inside))?;
            sums.push_str(&sum);
        }
    }
    Ok(sums)
}

fn size_kib(staged: &Path) -> Result<u64> {
    let mut bytes: u64 = 0;
    for file in files(staged)? {
        bytes += fs::metadata(&file).map_err(|error| error.to_string())?.len();
    }
    Ok(bytes.div_ceil(1024))
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    for entry in entries {
        let path = entry.map_err(|error| error.to_string())?.path();
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false => found.push(path),
        }
    }
    found.sort_by_key(|path| name_of(path));
    Ok(found)
}
