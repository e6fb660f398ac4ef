//! The parts of the program as a list for machines (CycloneDX 1.5): each crate with its version, licence and checksum.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::Release;
use crate::run::{Result, cargo, output, root};

pub(super) fn write(release: &Release) -> Result<PathBuf> {
    let arguments = ["metadata", "--format-version=1", "--locked", "--filter-platform", &release.triple];
    let metadata: Value =
        serde_json::from_str(&output(cargo().args(arguments))?).map_err(|error| error.to_string())?;
    let checksums = checksums()?;
    let packages: BTreeMap<&str, &Value> =
        list(&metadata["packages"]).filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let nodes: BTreeMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let root_id = packages.iter().find(|(_, package)| package["name"] == "oncegate-cli").map(|(id, _)| *id);
    let root_id = root_id.ok_or("there is no oncegate-cli")?;
    // Only what is linked: neither build scripts nor tests.
    let depends = |id: &str| -> Vec<&str> {
        let dependencies = nodes.get(id).into_iter().flat_map(|node| list(&node["deps"]));
        let linked = dependencies.filter(|one| list(&one["dep_kinds"]).any(|kind| kind["kind"].is_null()));
        linked.filter_map(|one| one["pkg"].as_str()).filter(|id| !is_macro(packages.get(id))).collect()
    };
    let (mut seen, mut open) = (BTreeSet::from([root_id]), vec![root_id]);
    while let Some(id) = open.pop() {
        open.extend(depends(id).into_iter().filter(|id| seen.insert(id)));
    }
    let component = |id: &str, kind: &str| {
        let package = packages.get(id).copied().unwrap_or(&Value::Null);
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let mut component = json!({
            "type": kind, "bom-ref": purl(name, version), "name": name, "version": version, "purl": purl(name, version),
        });
        if let Some(licence) = package["license"].as_str() {
            // Old crates separate alternatives by a slash.
            component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
        }
        if let Some(sum) = checksums.get(&(name.to_owned(), version.to_owned())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
        }
        component
    };
    let reference = |id: &str| {
        let package = packages.get(id).copied().unwrap_or(&Value::Null);
        purl(text(&package["name"]), text(&package["version"]))
    };
    let parts: Vec<_> = seen.iter().filter(|id| **id != root_id).map(|id| component(id, "library")).collect();
    let dependencies: Vec<_> = seen
        .iter()
        .map(|id| {
            let mut on: Vec<_> = depends(id).into_iter().map(reference).collect();
            on.sort_unstable();
            on.dedup();
            json!({ "ref": reference(id), "dependsOn": on })
        })
        .collect();
    let bom = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": component(root_id, "application") },
        "components": parts,
        "dependencies": dependencies,
    });
    let path = release.directory.join(format!("oncegate-{}-{}.cdx.json", release.version, release.triple));
    let shown = serde_json::to_string_pretty(&bom).map_err(|error| error.to_string())?;
    super::write(&path, &format!("{shown}\n"))?;
    Ok(path)
}

/// Returns true for a crate that only runs in the compiler.
fn is_macro(package: Option<&&Value>) -> bool {
    let targets = package.into_iter().flat_map(|package| list(&package["targets"]));
    targets.flat_map(|target| list(&target["kind"])).any(|kind| kind == "proc-macro")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn purl(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{version}")
}

/// The checksums in `Cargo.lock`, by name and version.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let lock = fs::read_to_string(root().join("Cargo.lock")).map_err(|error| error.to_string())?;
    let value = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""))?;
        Some(line.trim_end_matches('"').to_owned())
    };
    let blocks = lock.split("[[package]]").filter_map(|block| {
        Some(((value(block, "name")?, value(block, "version")?), value(block, "checksum")?))
    });
    Ok(blocks.collect())
}
