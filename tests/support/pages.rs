//! The documentation as data: code blocks, the commands in them and the expected output.

use std::path::{Path, PathBuf};

/// A fenced code block.
pub struct Block {
    /// The number of the first line of its content.
    pub line: usize,
    /// The language after the opening fence.
    pub language: String,
    /// The content, without the indentation of the fence.
    pub text: String,
}

impl Block {
    /// Return the file name if the first line is `# NAME.toml`, or `# NAME.yaml` in YAML.
    pub fn file_name(&self) -> Option<&str> {
        let name = self.text.lines().next()?.strip_prefix("# ")?;
        let extension = Path::new(name).extension()?;
        (matches!(&*self.language, "toml" | "yaml") && *extension == *self.language).then_some(name)
    }

    /// Return each command (`$ command`) with the expected lines of its output.
    pub fn commands(&self) -> Vec<(String, Vec<String>)> {
        let mut found: Vec<(String, Vec<String>)> = Vec::new();
        for line in self.text.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => found.push((command.to_owned(), Vec::new())),
                None => found.last_mut().expect("a block of commands begins with `$ `").1.push(line.to_owned()),
            }
        }
        found
    }
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Return the text of a document. The path is relative to the repository.
pub fn read(document: &str) -> String {
    std::fs::read_to_string(root().join(document)).unwrap()
}

/// Return README.md and all pages of the manual, except for the decisions. Paths are relative to the repository.
pub fn manual() -> Vec<String> {
    let mut pages = markdown(Path::new("docs"));
    pages.retain(|page| !page.starts_with("docs/decisions/") && page != "docs/SUMMARY.md");
    pages.push("README.md".to_owned());
    pages.sort();
    pages
}

/// Return the Markdown files in a directory and its subdirectories. Paths are relative to the repository.
pub fn markdown(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root().join(directory)).unwrap() {
        let entry = entry.unwrap();
        let path = directory.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            found.extend(markdown(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path.to_str().unwrap().to_owned());
        }
    }
    found
}

/// Return the code blocks of a document. Panic if the document has indented code blocks, because they have no language.
pub fn blocks(document: &str) -> Vec<Block> {
    let text = read(document);
    let (mut blocks, mut open, mut blank) = (Vec::new(), None, false);
    for (index, line) in text.lines().enumerate() {
        let (trimmed, number) = (line.trim_start(), index + 1);
        let indentation = line.len() - trimmed.len();
        match &mut open {
            None => {
                assert!(!blank || indentation < 4, "{document}:{number}: code without a fence");
                if let Some(language) = trimmed.strip_prefix("```") {
                    let block = Block { line: number + 1, language: language.to_owned(), text: String::new() };
                    open = Some((block, indentation));
                }
            }
            Some(_) if trimmed == "```" => blocks.extend(open.take().map(|(block, _)| block)),
            Some((block, indentation)) => {
                block.text.push_str(line.get(*indentation..).unwrap_or_default());
                block.text.push('\n');
            }
        }
        blank = trimmed.is_empty();
    }
    assert!(open.is_none(), "{document}: a block without an end");
    blocks
}

/// Return whether lines match the expected lines. `…` matches any text. A line that contains only `…` matches any
/// number of lines.
pub fn are_like(lines: &[&str], expected: &[&str]) -> bool {
    match expected.split_first() {
        None => lines.is_empty(),
        Some((&"…", rest)) => (0..=lines.len()).any(|skipped| are_like(&lines[skipped..], rest)),
        Some((first, rest)) => {
            lines.split_first().is_some_and(|(line, lines)| is_like(line, first) && are_like(lines, rest))
        }
    }
}

fn is_like(text: &str, expected: &str) -> bool {
    let mut pieces = expected.split('…');
    let Some(mut rest) = text.strip_prefix(pieces.next().unwrap()) else { return false };
    let pieces: Vec<_> = pieces.collect();
    let Some((last, between)) = pieces.split_last() else { return rest.is_empty() };
    for piece in between {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}
