//! The texts of a configuration: read the files, and find the file and the text of a span.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::{fmt, fs, io};

use crate::config::error::{FileIssues, Issue};

/// The texts of a configuration: the main file and the files that it includes. A span is a byte range in the
/// concatenation of all texts, so that it also identifies the file.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The including file, followed by the included files in the order in which they are merged.
    pub(super) files: Vec<SourceFile>,
    /// Directories to watch: the files that match `include` exist there or may appear there.
    pub(super) directories: BTreeSet<PathBuf>,
}

/// One file of a configuration.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Text of the file.
    pub text: String,
    /// Offset of this text in the concatenation of all texts.
    pub(super) start: usize,
}

impl Sources {
    /// Create the sources of a file that includes no other files.
    pub fn new(path: &Path, text: String) -> Self {
        Sources { files: vec![SourceFile { path: path.to_owned(), text, start: 0 }], directories: BTreeSet::new() }
    }

    /// Return all files. The including file is the first.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Return the path and the text of the including file.
    pub fn main(&self) -> (&Path, &str) {
        self.files.first().map_or((Path::new(""), ""), |file| (&file.path, &file.text))
    }

    pub(super) fn add(&mut self, path: PathBuf, text: String) {
        // Leave one byte between two texts. Otherwise, the end of a text would have the same offset as the start of the
        // next text.
        let start = self.files.last().map_or(0, |last| last.start + last.text.len() + 1);
        self.files.push(SourceFile { path, text, start });
    }

    /// Return the index of the file that contains a span.
    fn index_of(&self, span: &Range<usize>) -> usize {
        self.files.partition_point(|file| file.start <= span.start).saturating_sub(1)
    }

    /// Return the file that contains a span. There is always at least one file.
    fn file_of(&self, span: &Range<usize>) -> Option<&SourceFile> {
        self.files.get(self.index_of(span))
    }

    /// Return the directory of the file that contains a span.
    pub fn directory_of(&self, span: &Range<usize>) -> &Path {
        self.file_of(span).and_then(|file| file.path.parent()).unwrap_or(Path::new(""))
    }

    /// Return the source text of a span.
    pub fn text_at(&self, span: &Range<usize>) -> Option<&str> {
        let file = self.file_of(span)?;
        file.text.get(span.start.checked_sub(file.start)?..span.end.checked_sub(file.start)?)
    }

    /// Return the text between an offset and the start of its line.
    pub fn line_before(&self, offset: usize) -> &str {
        let before = self.file_of(&(offset..offset)).and_then(|file| file.text.get(..offset.checked_sub(file.start)?));
        before.and_then(|before| before.rsplit('\n').next()).unwrap_or_default()
    }

    /// Return `line 3`, or `line 3 of FILE` if the configuration has several files.
    pub fn line_name(&self, span: &Range<usize>) -> String {
        let Some(file) = self.file_of(span) else { return String::new() };
        let issue = Issue::new(span.start - file.start..span.start - file.start, "");
        let (line, _) = issue.position(&file.text).unwrap_or((1, 1));
        if self.files.len() > 1 { format!("line {line} of {}", file.path.display()) } else { format!("line {line}") }
    }

    /// Return a hint that names the line of the first definition.
    pub fn first_line_hint(&self, first: &Range<usize>) -> String {
        format!("the first one is in {}", self.line_name(first))
    }

    /// Group issues by file. The span of each returned issue is relative to its file. Issues without a span belong to
    /// the including file.
    pub fn by_file(&self, issues: Vec<Issue>) -> Vec<FileIssues> {
        let mut by_file: Vec<_> = self.files.iter().map(|_| Vec::new()).collect();
        for mut issue in issues {
            let index = issue.span.as_ref().map_or(0, |span| self.index_of(span));
            if let (Some(issues), Some(file)) = (by_file.get_mut(index), self.files.get(index)) {
                issue.span = issue.span.map(|span| span.start - file.start..span.end.saturating_sub(file.start));
                issues.push(issue);
            }
        }
        let files = self.files.iter().zip(by_file).filter(|(_, issues)| !issues.is_empty());
        files.map(|(file, issues)| FileIssues { path: file.path.clone(), text: file.text.clone(), issues }).collect()
    }
}

/// Path of a file, and its content at the time when it was read.
#[derive(Clone, PartialEq, Eq)]
pub struct FileSnapshot {
    /// Path of the file.
    pub path: PathBuf,
    /// Content of the file. Clones share it, because the file watcher compares it with the current content.
    pub content: Arc<[u8]>,
}

/// Omit the content, which may be secret.
impl fmt::Debug for FileSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("path", &self.path).finish_non_exhaustive()
    }
}

impl FileSnapshot {
    /// Read a file, without a byte order mark at its start.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(FileSnapshot { path: path.to_owned(), content: read_text(path)?.into() })
    }

    /// Read the file again. If its content is the same, this needs little memory, also for a long file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_again(&self) -> io::Result<Self> {
        if self.is_same_as(&mut BufReader::new(File::open(&self.path)?))? {
            return Ok(self.clone());
        }
        FileSnapshot::read(&self.path)
    }

    /// Return whether a reader returns exactly this content, without a byte order mark.
    fn is_same_as(&self, reader: &mut impl BufRead) -> io::Result<bool> {
        let mut rest = &*self.content;
        loop {
            let part = reader.fill_buf()?;
            if part.is_empty() {
                return Ok(rest.is_empty());
            }
            let Some(later) = rest.strip_prefix(part) else { return Ok(false) };
            let length = part.len();
            rest = later;
            reader.consume(length);
        }
    }
}

/// Path that stands for the standard input, as for other programs.
pub const STANDARD_INPUT: &str = "-";

/// Read the main configuration file. The path `-` stands for the standard input, which is read only once: a reload uses
/// the same text again.
///
/// # Errors
/// The file cannot be read.
pub(super) fn read_main(path: &Path) -> io::Result<Vec<u8>> {
    static INPUT: OnceLock<Vec<u8>> = OnceLock::new();
    if path != Path::new(STANDARD_INPUT) {
        return read_text(path);
    }
    if let Some(text) = INPUT.get() {
        return Ok(text.clone());
    }
    let mut text = Vec::new();
    io::Read::read_to_end(&mut io::stdin().lock(), &mut text)?;
    Ok(INPUT.get_or_init(|| without_byte_order_mark(text)).clone())
}

/// Read a file without its byte order mark. Editors on Windows add this mark to the start of text files.
fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path).map(without_byte_order_mark)
}

fn without_byte_order_mark(mut content: Vec<u8>) -> Vec<u8> {
    if content.starts_with(BYTE_ORDER_MARK) {
        content.drain(..BYTE_ORDER_MARK.len());
    }
    content
}

/// The byte order mark U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Return the content of a file as text.
///
/// # Errors
/// The content is not UTF-8. The span of the issue is the first invalid byte.
pub(crate) fn utf8_text(path: &Path, content: Vec<u8>) -> Result<String, FileIssues> {
    String::from_utf8(content).map_err(|error| {
        let start = error.utf8_error().valid_up_to();
        let content = error.as_bytes();
        let encoding =
            if content.starts_with(b"\xff\xfe") || content.starts_with(b"\xfe\xff") { "utf-16" } else { "latin1" };
        let byte = content.get(start).copied().unwrap_or_default();
        // The text before the invalid byte keeps its offsets. U+FFFD replaces the invalid byte.
        let text = String::from_utf8_lossy(content).into_owned();
        let span = start..start + char::REPLACEMENT_CHARACTER.len_utf8();
        let issue = Issue::new(span, format!("the byte 0x{byte:02x} is not UTF-8"))
            .with_hint(format!("convert the file to UTF-8: iconv -f {encoding} -t utf-8 FILE"));
        FileIssues { path: path.to_owned(), text, issues: vec![issue] }
    })
}
