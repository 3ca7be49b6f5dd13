//! The documents tell the truth: what they say to write is accepted, what they show is what the model does, links lead somewhere.

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use support::gateway::{Gateway, binary};
use support::{operator, pictures};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// README.md, its neighbours and docs/*.md.
fn documents() -> Vec<PathBuf> {
    let inside = |folder: PathBuf| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = inside(root()).chain(inside(root().join("docs"))).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    files
}

/// The blocks of a document that are marked as TOML, each with the line it begins at, without the indentation of their fence.
fn toml_blocks(text: &str) -> Vec<(usize, String)> {
    let (mut blocks, mut open) = (Vec::new(), None);
    for (index, line) in text.lines().enumerate() {
        let fence = line.trim_start();
        match &mut open {
            None if fence == "```toml" => open = Some((index + 2, line.len() - fence.len(), String::new())),
            None => {}
            Some((first, _, block)) if fence == "```" => {
                blocks.push((*first, std::mem::take(block)));
                open = None;
            }
            Some((_, indentation, block)) => {
                block.push_str(line.get(*indentation..).unwrap_or_default());
                block.push('\n');
            }
        }
    }
    assert!(open.is_none(), "a block without an end");
    blocks
}

/// A recipe leaves out what every file has: a listener, the upstream `api`, and routes if only limits are shown.
fn complete(block: &str) -> String {
    let mut file = block.to_owned();
    if !block.contains("[[listener]]") {
        file.push_str("\n[[listener]]\naddress = \"127.0.0.1:0\"\n");
    }
    if block.contains("upstream = \"api\"") && !block.contains("[upstream.api]") {
        file.push_str("\n[upstream.api]\nservers = [\"http://127.0.0.1:9000\"]\n");
    }
    if !block.contains("[[route]]") {
        let limits = block.lines().filter_map(|line| line.strip_prefix("[limit.")?.strip_suffix(']'));
        let limits: Vec<_> = limits.collect();
        file.push_str("\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n");
        file.push_str(&format!("limits = {limits:?}\n"));
    }
    file
}

/// A block that begins with `# NAME.toml` is that file, beside the others of its document.
#[test]
fn what_the_documents_say_to_write_is_accepted() {
    let mut failures = String::new();
    for (document, least) in [("README.md", 1), ("docs/limits.md", 7)] {
        let text = std::fs::read_to_string(root().join(document)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (files, recipes): (Vec<_>, Vec<_>) =
            toml_blocks(&text).into_iter().partition(|(_, block)| file_name(block).is_some());
        assert!(recipes.len() >= least, "{document}: {} blocks found", recipes.len());
        for (_, block) in &files {
            std::fs::write(directory.path().join(file_name(block).unwrap()), block).unwrap();
        }
        for (line, block) in &recipes {
            let path = directory.path().join("gateway.toml");
            std::fs::write(&path, complete(block)).unwrap();
            let output = binary().arg("check").arg("--config").arg(&path).output().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            if !output.status.success() || said.contains("no route uses") {
                failures.push_str(&format!("{document}:{line}:\n{block}\n{said}\n"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

fn file_name(block: &str) -> Option<&str> {
    let name = block.lines().next()?.strip_prefix("# ")?;
    name.ends_with(".toml").then_some(name)
}

#[test]
fn the_pictures_are_what_the_model_draws() {
    let text = std::fs::read_to_string(root().join("docs/limits.md")).unwrap();
    for (name, svg) in pictures::all() {
        assert!(text.contains(&format!("](pictures/{name})")), "docs/limits.md does not show {name}");
        let committed = std::fs::read_to_string(root().join("docs/pictures").join(&name)).unwrap_or_default();
        assert!(committed == svg, "docs/pictures/{name} differs from the model; `make pictures` draws it again");
    }
}

/// What the rows of a table begin with, each in backquotes.
fn table(document: &str, heading: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join(document)).unwrap();
    let section = text.split(&format!("\n## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells.flat_map(|cell| cell.split(',')).map(|name| name.trim_matches([' ', '`']).to_owned()).collect()
}

#[test]
fn the_manual_lists_every_metric_and_no_other() {
    let route = "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";
    let page = operator::ask(&Gateway::start(&operator::with_admin(route)), "/metrics");
    let types = page.text().lines().filter_map(|line| line.strip_prefix("# TYPE sluicegate_")?.split(' ').next());
    let there: BTreeSet<_> = types.map(str::to_owned).collect();
    assert!(there.len() > 20, "{there:?}");
    assert_eq!(there, table("docs/operating.md", "Metrics"));
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut links = 0;
    for document in documents() {
        let text = std::fs::read_to_string(&document).unwrap();
        for rest in text.split("](").skip(1) {
            let target = rest.split([')', '#']).next().unwrap();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let folder = document.parent().unwrap_or(Path::new("."));
            assert!(folder.join(target).exists(), "{} links to {target}", document.display());
            links += 1;
        }
    }
    assert!(links >= 10, "{links} links found");
}
