//! README.md and docs/: configurations are accepted, pictures and tables match the code, links and tests exist.

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use support::gateway::{Gateway, binary};
use support::{admin_listener, pages, pictures};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Return all Markdown files in the repository root, in docs/ and in ops/.
fn documents() -> Vec<PathBuf> {
    let inside = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let below = ["docs", "ops"].into_iter().flat_map(|directory| pages::markdown(Path::new(directory)));
    let mut files: Vec<_> = inside.chain(below.map(|page| root().join(page))).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    files
}

/// Complete an example: a listener, the upstream `api`, and routes if the example has only limits or an upstream.
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
        let to = if block.contains("[upstream.api]") { "upstream = \"api\"" } else { "respond = { status = 200 }" };
        file.push_str(&format!("\n[[route]]\nname = \"r\"\npath = \"/\"\n{to}\n"));
        file.push_str(&format!("limits = {limits:?}\n"));
    }
    file
}

/// Return a minimal configuration for a consumers file, with the limits and tiers that the file names.
fn minimal_config(consumers: &str, name: &str) -> String {
    let file: toml::Table = toml::from_str(consumers).unwrap();
    let (mut limits, mut tiers) = (BTreeSet::from(["calls"]), BTreeSet::new());
    for consumer in file["consumer"].as_array().unwrap() {
        tiers.extend(consumer.get("tier").and_then(toml::Value::as_str));
        limits.extend(
            consumer.get("limit").and_then(toml::Value::as_table).into_iter().flatten().map(|(name, _)| &**name),
        );
    }
    let tiers: Vec<_> = tiers.iter().map(|tier| format!("{tier} = {{}}")).collect();
    let mut text = format!("[api_key]\nconsumers = {name:?}\n");
    for limit in limits {
        text.push_str(&format!(
            "[limit.{limit}]\nby = \"api-key\"\nquota = \"1000/min\"\ntiers = {{ {} }}\n",
            tiers.join(", ")
        ));
    }
    text
}

/// A block that begins with `# NAME.toml` is that file, next to the others of its document. A document that names
/// `consumers.toml` without showing it gets one with a consumer, as `sluicegate key` writes it. PEM files that a block names
/// are the development certificate and its key.
#[test]
fn configurations_of_the_documents_are_accepted() {
    let (mut failures, mut checked) = (String::new(), 0);
    for document in pages::manual() {
        let directory = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        put("consumers.toml", "[[consumer]]\nname = \"acme\"\nkeys = []\n");
        let blocks: Vec<_> = pages::blocks(&document).into_iter().filter(|block| block.language == "toml").collect();
        for block in &blocks {
            if let Some(name) = block.file_name() {
                put(name, &block.text);
            }
        }
        for block in blocks {
            let whole = match block.file_name() {
                Some(name) if block.text.contains("[[consumer]]") => complete(&minimal_config(&block.text, name)),
                _ => complete(&block.text),
            };
            for name in whole.split('"').filter(|text| text.ends_with(".pem") || text.ends_with(".key")) {
                let source = if name.ends_with(".key") { "certs/dev.key" } else { "certs/dev.pem" };
                std::fs::create_dir_all(directory.path().join(name).parent().unwrap()).unwrap();
                put(name, &pages::read(source));
            }
            put("checked.toml", &whole);
            let path = directory.path().join("checked.toml");
            let output = binary().arg("check").arg("--offline").arg("--config").arg(&path).output().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            if !output.status.success() || said.contains("no route uses") {
                failures.push_str(&format!("{document}:{}:\n{whole}\n{said}\n", block.line));
            }
            checked += 1;
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(checked >= 20, "{checked} configurations");
}

#[test]
fn committed_pictures_match_the_model() {
    let text = std::fs::read_to_string(root().join("docs/reference/limits.md")).unwrap();
    for (name, svg) in pictures::all() {
        assert!(text.contains(&format!("](../pictures/{name})")), "docs/reference/limits.md does not show {name}");
        let committed = std::fs::read_to_string(root().join("docs/pictures").join(&name)).unwrap_or_default();
        assert!(committed == svg, "docs/pictures/{name} differs from the model; `make pictures` draws it again");
    }
}

/// Return the names in backticks in the first cells of a table.
fn table(document: &str, heading: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join(document)).unwrap();
    let section = text.split(&format!("\n## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells.flat_map(|cell| cell.split(',')).map(|name| name.trim_matches([' ', '`']).to_owned()).collect()
}

#[test]
fn manual_lists_exactly_the_exported_metrics() {
    let route = "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";
    let page = admin_listener::ask(&Gateway::start(&admin_listener::with_admin(route)), "/metrics");
    let types = page.text().lines().filter_map(|line| line.strip_prefix("# TYPE sluicegate_")?.split(' ').next());
    let there: BTreeSet<_> = types.map(str::to_owned).collect();
    assert!(there.len() > 20, "{there:?}");
    assert_eq!(there, table("docs/how-to/operate.md", "Metrics"));
}

/// Return the text of a heading without its markup: `code` and **bold** keep their text, [links](target) their name.
fn plain_text(heading: &str) -> String {
    let mut plain = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        let (start, name) = before.rsplit_once('[').unwrap_or((before, ""));
        plain.push_str(start);
        plain.push_str(name);
        rest = after.split_once(')').map_or("", |(_, behind)| behind);
    }
    plain.push_str(rest);
    plain.replace(['`', '*'], "")
}

/// Return the anchors of the headings, as GitHub and mdBook generate them: letters in lower case, digits, `-` and `_`, with
/// `-` for each space. A repeated anchor gets a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut anchors, mut is_code) = (BTreeSet::new(), false);
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        let level = line.len() - heading.len();
        let Some(heading) = heading.strip_prefix(' ').filter(|_| !is_code && (1..=6).contains(&level)) else {
            continue;
        };
        let lower = plain_text(heading.trim()).to_lowercase();
        let allowed = lower.chars().filter(|c| c.is_alphanumeric() || ['-', '_', ' '].contains(c));
        let anchor = allowed.collect::<String>().replace(' ', "-");
        let numbered = (1..).map(|number| format!("{anchor}-{number}"));
        let mut candidates = std::iter::once(anchor.clone()).chain(numbered);
        anchors.extend(candidates.find(|candidate| !anchors.contains(candidate)));
    }
    anchors
}

#[test]
fn anchors_are_generated_as_on_github() {
    let page = "# A page\n## `[limit.NAME]`\n```toml\n# no heading\n```\n## nginx: `limit_req`\n## A page\n### See [this, *too*](x.md#y)!\n";
    let expected = ["a-page", "a-page-1", "limitname", "nginx-limit_req", "see-this-too"];
    assert_eq!(anchors(page), expected.map(str::to_owned).into());
}

#[test]
fn links_between_documents_have_targets() {
    let (mut links, mut failures) = ([0, 0], String::new());
    for document in documents() {
        let text = std::fs::read_to_string(&document).unwrap();
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap();
            if link.contains("://") {
                continue;
            }
            let (target, anchor) = link.split_once('#').map_or((link, None), |(target, anchor)| (target, Some(anchor)));
            let file = match target {
                "" => document.clone(),
                _ => document.parent().unwrap_or(Path::new(".")).join(target),
            };
            let found = match anchor {
                None => file.exists(),
                Some(anchor) => std::fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor)),
            };
            if !found {
                failures.push_str(&format!("{} links to {link}\n", document.display()));
            }
            links[usize::from(anchor.is_some())] += 1;
        }
    }
    assert!(failures.is_empty(), "targets that do not exist:\n{failures}");
    assert!(links.iter().all(|count| *count >= 20), "{links:?} links without and with an anchor found");
}

#[test]
fn kubernetes_page_shows_the_probes_and_the_termination_of_the_manifest() {
    let manifest = pages::read("ops/kubernetes.yaml");
    let lines: BTreeSet<_> = manifest.lines().map(str::trim).collect();
    let blocks = pages::blocks("docs/how-to/kubernetes.md");
    let shown: Vec<_> = blocks.iter().filter(|block| block.language == "yaml").take(2).collect();
    assert!(shown[0].text.contains("readinessProbe") && shown[1].text.contains("preStop"));
    for line in shown.iter().flat_map(|block| block.text.lines()) {
        assert!(lines.contains(line.trim()), "ops/kubernetes.yaml does not have: {line}");
    }
}

/// Return the targets of the links in a text, except URLs.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap());
    targets.filter(|target| !target.contains("://")).collect()
}

#[test]
fn summary_lists_every_page_once() {
    let summary = pages::read("docs/SUMMARY.md");
    let mut listed: Vec<_> = links(&summary).into_iter().map(|page| format!("docs/{page}")).collect();
    listed.sort();
    let mut pages = pages::markdown(Path::new("docs"));
    pages.retain(|page| page != "docs/SUMMARY.md");
    pages.sort();
    assert_eq!(listed, pages);
}

#[test]
fn readme_lists_every_command() {
    let help = String::from_utf8(binary().arg("--help").output().unwrap().stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let commands: Vec<_> = commands.filter(|name| !name.is_empty() && *name != "help" && *name != "run").collect();
    assert!(commands.len() > 10, "{commands:?}");
    let page = pages::read("README.md");
    let table = page.split("\n## Commands\n").nth(1).unwrap().split("\n## ").next().unwrap();
    for command in commands {
        assert!(table.contains(&format!("`{command}`")), "README.md does not name `{command}`");
    }
}

/// Check that `FILE::TEST`, in backquotes, is a test function in `tests/`.
fn assert_test_exists(test: &str, row: &str) {
    let name = test.strip_prefix('`').and_then(|test| test.strip_suffix('`')?.split_once("::"));
    let (file, function) = name.unwrap_or_else(|| panic!("{test} is not `FILE::TEST`: {row}"));
    let paths = [format!("tests/it/{file}.rs"), format!("tests/{file}.rs"), format!("tests/{file}/main.rs")];
    let text = paths.iter().find_map(|path| std::fs::read_to_string(root().join(path)).ok());
    let text = text.unwrap_or_else(|| panic!("tests/ has no file of {test}: {row}"));
    let first_line = format!("fn {function}() {{");
    // A test function has `#[test]` or `#[tokio::test(…)]` among its attributes.
    let has_test_attribute = |above: &str| {
        let attributes = above.lines().rev().take_while(|line| line.starts_with("#["));
        attributes.into_iter().any(|line| line == "#[test]" || line.starts_with("#[tokio::test"))
    };
    let mut above = text.match_indices(&first_line).map(|(start, _)| {
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        &text[..line_start]
    });
    assert!(above.any(has_test_attribute), "there is no test {test}: {row}");
}

/// Return the rows of the first table after `heading`, without its header.
fn rows<'p>(page: &'p str, heading: &str) -> Vec<&'p str> {
    let section = page.split(&format!("\n{heading}\n")).nth(1).unwrap_or_else(|| panic!("no {heading}"));
    let table = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    table.skip(2).collect()
}

/// Check the tests in the last cell of a row.
fn assert_tests_exist(row: &str) {
    let tests = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap();
    tests.split(", ").for_each(|test| assert_test_exists(test, row));
}

#[test]
fn every_situation_of_the_manual_names_tests_that_exist() {
    let page = pages::read("docs/reference/limits.md");
    let rows = rows(&page, "### In every situation");
    assert!(rows.len() >= 12, "{rows:?}");
    rows.into_iter().for_each(assert_tests_exist);
}

#[test]
fn fault_table_is_complete_and_names_tests_that_exist() {
    let page = pages::read("docs/testing.md");
    let rows = rows(&page, "## Fault table");
    let numbers: Vec<usize> = rows.iter().map(|row| row.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert_eq!(numbers, (1..=40).collect::<Vec<_>>());
    for row in rows {
        let run = row.rsplit(" | ").nth(1).unwrap();
        assert!(["Q", "L", "Q, L"].contains(&run), "Q, L or both: {row}");
        // `make test` skips the tests that Cargo.toml excludes.
        let is_long = ["`long_edges::", "`long_streams::", "`soak::"].iter().any(|file| row.contains(file));
        assert_eq!(run == "L", is_long, "{row}");
        assert_tests_exist(row);
    }
}
