//! Included files: expand the patterns of `include`, read the files, and merge their tables.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, io};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::environment::{EnvLookup, substituted};
use crate::config::error::{FileIssues, Issue};
use crate::config::ratelimit_env;
use crate::config::ratelimit_env::ENVIRONMENT;
use crate::config::sources::{FileSnapshot, Sources, read_main, utf8_text};
use crate::config::unknown_keys::closest_name;

/// The tables that an included file may contain. Their entries are added to the tables of the including file.
const INCLUDED_TABLES: [&str; 6] = ["route", "descriptor", "limit", "upstream", "auth", "prices"];

/// Hint that lists the tables that an included file may contain, in TOML notation.
const TABLE_FORMS: &str = "an included file may contain only [[route]], [[descriptor]], [limit.NAME], [upstream.NAME], [auth.NAME] and [prices.NAME]";

/// Read the files that a configuration includes. Return the texts of all files, and the issues of `include`.
///
/// # Errors
/// An included file is not UTF-8.
pub(super) fn read(
    path: &Path,
    text: String,
    environment: EnvLookup<'_>,
) -> Result<(Sources, Vec<Issue>), Vec<FileIssues>> {
    let Expansion { files, directories, mut issues } = expand(path, &text, environment);
    let mut sources = Sources { directories, ..Sources::new(path, text) };
    let mut faulty = Vec::new();
    for (path, span) in files {
        match FileSnapshot::read(&path) {
            Err(error) => {
                issues.push(Issue::new(span, format!("{} cannot be read: {error}", path.display())));
            }
            Ok(file) => match utf8_text(&path, file.content.to_vec()) {
                Ok(text) => sources.add(path, text),
                Err(file) => faulty.push(file),
            },
        }
    }
    if faulty.is_empty() { Ok((sources, issues)) } else { Err(faulty) }
}

/// The contents of all files of a configuration, and the directories in which more included files may appear.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFiles {
    /// The including file.
    pub main: FileSnapshot,
    /// The included files.
    pub included: Vec<FileSnapshot>,
    /// Directories to watch: the files that match `include` exist there or may appear there.
    pub directories: BTreeSet<PathBuf>,
}

impl ConfigFiles {
    /// Create a `ConfigFiles` from the texts in `sources`.
    pub fn from_sources(sources: &Sources) -> Self {
        let snapshot =
            |path: &Path, text: &str| FileSnapshot { path: path.to_owned(), content: text.as_bytes().into() };
        let (path, text) = sources.main();
        ConfigFiles {
            main: snapshot(path, text),
            included: sources.files.iter().skip(1).map(|file| snapshot(&file.path, &file.text)).collect(),
            directories: sources.directories.clone(),
        }
    }

    /// Return the contents of all files, each with its length, so that equal bytes mean equal contents. The paths are
    /// not included, because replicas may read the same configuration at other paths.
    pub fn contents(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for file in [&self.main].into_iter().chain(&self.included) {
            bytes.extend_from_slice(&(file.content.len() as u64).to_be_bytes());
            bytes.extend_from_slice(&file.content);
        }
        bytes
    }

    /// Read the files of a configuration, without validation. Omit included files that cannot be read.
    ///
    /// # Errors
    /// The including file cannot be read.
    pub fn read(path: &Path, environment: EnvLookup<'_>) -> io::Result<Self> {
        let content = match path == Path::new(ENVIRONMENT) {
            true => {
                ratelimit_env::generate(environment).map(|generated| generated.text.into_bytes()).unwrap_or_default()
            }
            false => read_main(path)?,
        };
        let main = FileSnapshot { path: path.to_owned(), content: content.into() };
        let Expansion { files, directories, .. } = expand(path, &String::from_utf8_lossy(&main.content), environment);
        let included = files.into_iter().filter_map(|(path, _)| FileSnapshot::read(&path).ok()).collect();
        Ok(ConfigFiles { main, included, directories })
    }
}

/// The files that match the patterns of `include`.
#[derive(Debug, Default)]
struct Expansion {
    /// Path of each file, with the span of the pattern that matches it.
    files: Vec<(PathBuf, Range<usize>)>,
    directories: BTreeSet<PathBuf>,
    issues: Vec<Issue>,
}

/// Expand the patterns of `include` in the text of a file. If the text is not valid TOML, return nothing: the parser
/// reports the error later.
fn expand(path: &Path, text: &str, environment: EnvLookup<'_>) -> Expansion {
    let mut expansion = Expansion::default();
    if !text.contains("include") {
        return expansion;
    }
    let Ok(table) = DeTable::parse(text) else { return expansion };
    let patterns = table.get_ref().get("include").and_then(|patterns| patterns.get_ref().as_array());
    let mut seen: Vec<(PathBuf, Option<Range<usize>>)> = vec![(canonical(path), None)];
    for pattern in patterns.into_iter().flat_map(|patterns| patterns.iter()) {
        let (Some(written), span) = (pattern.get_ref().as_str(), pattern.span()) else { continue };
        let Some(written) = substituted(written, environment) else {
            // The parser reports the unset variable later. Here, report only the consequence.
            expansion
                .issues
                .push(Issue::new(span, "cannot find the included files, because an environment variable is not set"));
            continue;
        };
        let files = match matching_files(path, &written, &mut expansion.directories) {
            Ok(files) => files,
            Err(issue) => {
                expansion.issues.push(Issue { span: Some(span), ..issue });
                continue;
            }
        };
        for file in files {
            let canonical = canonical(&file);
            let name = file.display();
            expansion.issues.push(match seen.iter().find(|(other, _)| *other == canonical) {
                None => {
                    seen.push((canonical, Some(span.clone())));
                    expansion.files.push((file, span.clone()));
                    continue;
                }
                Some((_, None)) => Issue::new(span.clone(), format!("{name} includes itself"))
                    .with_hint("keep included files in a separate directory: include = [\"routes/*.toml\"]"),
                Some((_, Some(first))) => {
                    let line = Sources::new(path, text.to_owned()).line_name(first);
                    Issue::new(span.clone(), format!("{name} is included twice"))
                        .with_hint(format!("the first pattern that matches this file is in {line}"))
                }
            });
        }
    }
    expansion
}

/// Return the canonical path of a file, so that symbolic links and relative paths compare equal.
fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Return the files that match a pattern, sorted by name. Add the directory to watch to `directories`.
///
/// # Errors
/// The pattern is not valid, or its directory cannot be read.
fn matching_files(path: &Path, pattern: &str, directories: &mut BTreeSet<PathBuf>) -> Result<Vec<PathBuf>, Issue> {
    let issue = |message: String, hint: &str| Issue { span: None, message, hint: Some(hint.to_owned()) };
    let example = "write a path or a pattern relative to this file, such as \"routes/*.toml\"";
    let (directory, name) = pattern.rsplit_once('/').map_or(("", pattern), |(directory, name)| match directory {
        "" => ("/", name),
        directory => (directory, name),
    });
    if name.is_empty() {
        return Err(issue(format!("`{pattern}` is not a file"), example));
    }
    if directory.contains(['*', '?']) {
        let hint = "use `*` and `?` only in the file name";
        return Err(issue(format!("`{pattern}` has a wildcard in the name of a directory"), hint));
    }
    let base = path.parent().unwrap_or(Path::new(""));
    // Do not join an empty path, because joining would append a slash.
    let directory = if directory.is_empty() { base.to_owned() } else { base.join(directory) };
    // A directory that does not exist cannot be watched. Watch the nearest existing parent directory instead.
    let is_present = |directory: &&Path| directory.as_os_str().is_empty() || directory.is_dir();
    directories.extend(directory.ancestors().find(is_present).map(Path::to_owned));
    if !name.contains(['*', '?']) {
        return Ok(vec![directory.join(name)]);
    }
    let searched = if directory.as_os_str().is_empty() { Path::new(".") } else { &directory };
    let entries = fs::read_dir(searched).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = entries
        .map_err(|error| issue(format!("the directory {} cannot be read: {error}", searched.display()), example))?;
    let names = entries.iter().map(fs::DirEntry::file_name).filter(|entry| matches_pattern(name, entry));
    let mut files: Vec<_> = names.map(|name| directory.join(name)).filter(|file| file.is_file()).collect();
    files.sort();
    Ok(files)
}

/// Return whether a file name matches a pattern. `*` matches any number of characters, and `?` matches one. As in
/// shells, a hidden file matches only patterns that start with a dot.
fn matches_pattern(pattern: &str, name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    // After each step, `matched[n]` tells whether the pattern so far matches the first n characters of the name.
    let mut matched: Vec<bool> = (0..=name.len()).map(|length| length == 0).collect();
    for sign in pattern {
        let mut next = vec![sign == '*' && matched[0]];
        for (index, character) in name.iter().enumerate() {
            next.push(match sign {
                '*' => matched[index + 1] || next[index],
                '?' => matched[index],
                literal => matched[index] && literal == *character,
            });
        }
        matched = next;
    }
    matched.last() == Some(&true)
}

// Merging of the tables of all files.

/// Add an offset to the spans of all keys and values in a table.
pub(super) fn shift_spans<'t>(table: DeTable<'t>, offset: usize) -> DeTable<'t> {
    fn shifted<T>(value: Spanned<T>, offset: usize) -> Spanned<T> {
        let span = value.span();
        Spanned::new(span.start + offset..span.end + offset, value.into_inner())
    }
    fn shift_value<'t>(value: Spanned<DeValue<'t>>, offset: usize) -> Spanned<DeValue<'t>> {
        let value = shifted(value, offset);
        let span = value.span();
        Spanned::new(
            span,
            match value.into_inner() {
                DeValue::Table(table) => DeValue::Table(shift_spans(table, offset)),
                DeValue::Array(items) => {
                    DeValue::Array(items.into_iter().map(|item| shift_value(item, offset)).collect())
                }
                other => other,
            },
        )
    }
    if offset == 0 {
        return table;
    }
    table.into_iter().map(|(key, value)| (shifted(key, offset), shift_value(value, offset))).collect()
}

/// Merge the tables of an included file into those of the configuration.
pub(super) fn merge<'t>(all: &mut DeTable<'t>, included: DeTable<'t>, sources: &Sources, issues: &mut Vec<Issue>) {
    let (main, _) = sources.main();
    for (key, value) in included {
        let name = key.get_ref().to_string();
        if !INCLUDED_TABLES.contains(&name.as_str()) {
            let (message, hint) = match &*name {
                "include" => {
                    let hint = format!("list all files in `include` of {}", main.display());
                    ("an included file cannot include other files".to_owned(), hint)
                }
                "consumer" => {
                    let hint =
                        format!("move the file to another directory, or change the pattern in {}", main.display());
                    ("a consumers file cannot be included".to_owned(), hint)
                }
                _ => match closest_name(&name, INCLUDED_TABLES) {
                    Some(near) => (format!("unknown key `{name}`"), format!("did you mean `{near}`?")),
                    None => {
                        let hint = format!("move `{name}` to {}: {TABLE_FORMS}", main.display());
                        (format!("`{name}` is not valid in an included file"), hint)
                    }
                },
            };
            issues.push(Issue::new(key.span(), message).with_hint(hint));
            continue;
        }
        let is_expected = match name.as_str() {
            "route" => matches!(value.get_ref(), DeValue::Array(_)),
            _ => matches!(value.get_ref(), DeValue::Table(_)),
        };
        if !is_expected {
            issues.push(
                Issue::new(key.span(), format!("`{name}` has the wrong form for an included file"))
                    .with_hint(TABLE_FORMS),
            );
            continue;
        }
        let Some(existing) = all.get_mut(name.as_str()) else {
            all.insert(key, value);
            continue;
        };
        match (existing.get_mut(), value.into_inner()) {
            (DeValue::Array(all), DeValue::Array(items)) => items.into_iter().for_each(|item| all.push(item)),
            (DeValue::Table(all), DeValue::Table(entries)) => {
                for (key, value) in entries {
                    match all.get_key_value(&**key.get_ref()) {
                        Some((first, _)) => {
                            let issue = Issue::new(key.span(), format!("duplicate {name} `{}`", key.get_ref()));
                            issues.push(issue.with_hint(sources.first_line_hint(&first.span())));
                        }
                        None => drop(all.insert(key, value)),
                    }
                }
            }
            // Ignore a table of the wrong type. Deserialization reports the error.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_shells() {
        for (pattern, matching, others) in [
            ("*.toml", &["a.toml", "a.b.toml"][..], &[".toml", ".a.toml", "a.tom", "a.toml~", "a_toml"][..]),
            ("route-?.toml", &["route-1.toml", "route-\u{e9}.toml"], &["route-.toml", "route-10.toml"]),
            ("a*b*c", &["abc", "aXbXc", "abbcc"], &["ab", "acb", "abcd"]),
            ("*", &["x"], &["", ".x"]),
            (".*", &[".x"], &["x"]),
            ("a[b].toml", &["a[b].toml"], &["ab.toml"]),
        ] {
            assert!(matching.iter().all(|name| matches_pattern(pattern, OsStr::new(name))), "{pattern}");
            for name in others.iter().filter(|name| !name.is_empty()) {
                assert!(!matches_pattern(pattern, OsStr::new(name)), "{pattern} must not match {name}");
            }
        }
    }

    #[test]
    fn spans_say_which_file_they_are_in() {
        let mut sources = Sources::new(Path::new("gateway.toml"), "a = 1\nb = 2\n".to_owned());
        assert_eq!(sources.line_name(&(6..7)), "line 2");
        sources.add("routes/one.toml".into(), "c = 3\n\nd = 4".to_owned());
        sources.add("routes/two.toml".into(), String::new());
        sources.add("routes/three.toml".into(), "e = 5".to_owned());
        let start = |index: usize| sources.files()[index].start;
        for (span, text, line) in [
            (0..1, Some("a"), "line 1 of gateway.toml"),
            (10..11, Some("2"), "line 2 of gateway.toml"),
            (start(1)..start(1) + 5, Some("c = 3"), "line 1 of routes/one.toml"),
            (start(1) + 11..start(1) + 12, Some("4"), "line 3 of routes/one.toml"),
            (start(2)..start(2), Some(""), "line 1 of routes/two.toml"),
            (start(3) + 4..start(3) + 5, Some("5"), "line 1 of routes/three.toml"),
        ] {
            assert_eq!(sources.text_at(&span), text, "{span:?}");
            assert_eq!(sources.line_name(&span), line, "{span:?}");
        }
        assert_eq!(sources.line_before(start(1) + 11), "d = ");
        let issue = |start: usize| Issue::new(start..start + 1, "x");
        let issues = vec![issue(start(3) + 4), issue(0), Issue { span: None, ..issue(0) }, issue(start(1))];
        let files = sources.by_file(issues);
        let found: Vec<_> = files.iter().map(|file| (file.path.to_str().unwrap(), file.issues.len())).collect();
        assert_eq!(found, [("gateway.toml", 2), ("routes/one.toml", 1), ("routes/three.toml", 1)]);
        assert_eq!(files[2].issues[0].span, Some(4..5), "the span is relative to its file");
    }
}
