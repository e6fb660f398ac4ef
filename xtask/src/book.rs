//! The documentation as a book.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::run::{Result, has, root, target};
use crate::tidy;

const SUMMARY: &str = "docs/SUMMARY.md";

/// Puts all pages together, with the files that they link to, and builds the book. A page that no one finds, a link out of the
/// book and a warning of mdBook are errors.
pub(crate) fn run() -> Result<()> {
    if !has("mdbook", &["--version"]) {
        return Err("mdbook is missing: cargo install --locked mdbook --no-default-features".to_owned());
    }
    let book = target().join("book");
    if book.exists() {
        fs::remove_dir_all(&book).map_err(|error| format!("{}: {error}", book.display()))?;
    }
    let source = book.join("src");
    let summary = read(Path::new(SUMMARY))?;
    let pages: BTreeSet<PathBuf> = linked(Path::new(SUMMARY), &summary).into_iter().collect();
    let is_page = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "md");
    for file in tidy::tracked()?.iter().filter(|file| is_page(file) && !file.ends_with("SUMMARY.md")) {
        if !pages.contains(file) {
            return Err(format!("{}: not in {SUMMARY}", file.display()));
        }
    }
    for page in &pages {
        let text = read(page)?;
        for file in linked(page, &text) {
            if is_page(&file) && !pages.contains(&file) {
                return Err(format!(
                    "{}: links to {}, which is not in {SUMMARY}",
                    page.display(),
                    file.display()
                ));
            }
            if root().join(&file).is_dir() {
                return Err(format!("{}: links to the directory {}", page.display(), file.display()));
            }
            if !is_page(&file) {
                write(
                    &source.join(&file),
                    &fs::read(root().join(&file)).map_err(|error| error.to_string())?,
                )?;
            }
        }
        write(&source.join(index(page)), renamed(&text).as_bytes())?;
    }
    let entries: Vec<String> =
        summary.lines().map(|line| line.replace("](", "](docs/").replace("](docs/../", "](")).collect();
    write(&source.join("SUMMARY.md"), renamed(&entries.join("\n")).as_bytes())?;
    write(&book.join("book.toml"), read(Path::new("docs/book.toml"))?.as_bytes())?;
    let built = Command::new("mdbook")
        .arg("build")
        .arg(&book)
        .output()
        .map_err(|error| format!("mdbook: {error}"))?;
    let log = String::from_utf8_lossy(&built.stderr);
    if !built.status.success() || log.contains("WARN") || log.contains("ERROR") {
        return Err(format!("mdbook: {}\n{log}", built.status));
    }
    println!("book: {} pages in {}", pages.len(), book.join("book").display());
    Ok(())
}

/// The files of the repository that a page links to.
fn linked(page: &Path, text: &str) -> Vec<PathBuf> {
    let folder = page.parent().unwrap_or(Path::new(""));
    let targets = tidy::targets(text).map(|(_, target)| target.split('#').next().unwrap_or_default());
    targets
        .filter(|target| !target.is_empty() && !target.contains(':'))
        .map(|target| plain(&folder.join(target)))
        .collect()
}

/// The path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

/// mdBook makes index.html of a README, and leaves the links to it as they are.
fn index(page: &Path) -> PathBuf {
    if page.ends_with("README.md") { page.with_file_name("index.md") } else { page.to_owned() }
}

fn renamed(text: &str) -> String {
    text.replace("README.md)", "index.md)").replace("README.md#", "index.md#")
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(root().join(file)).map_err(|error| format!("{}: {error}", file.display()))
}

fn write(file: &Path, content: &[u8]) -> Result<()> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(file, content));
    written.map_err(|error| format!("{}: {error}", file.display()))
}
