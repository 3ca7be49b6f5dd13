//! Logs as lines: files and standard input, compressed or not.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

/// Bytes of a line; what is longer is no line of a log.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Bytes that are read at a time; the first of them tell the format.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// The first bytes of a gzip stream (RFC 1952 §2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Bytes read so far, as they lie on the disk, of all logs together.
#[derive(Debug, Clone, Default)]
pub struct ReadProgress(Rc<Cell<u64>>);

impl ReadProgress {
    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.0.get()
    }
}

struct CountingReader<R>(R, ReadProgress);

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.0.set(self.1.0.get() + read as u64);
        Ok(read)
    }
}

/// A log that is being read.
pub struct LogInput {
    name: String,
    reader: Box<dyn BufRead>,
    /// Its beginning, to tell the format.
    sample: Vec<u8>,
    line_number: u64,
    line: Vec<u8>,
    error: Option<io::Error>,
}

/// What comes next in a log.
#[derive(Debug, PartialEq, Eq)]
pub enum NextLine<'a> {
    /// A line, without its end.
    Line(&'a [u8]),
    /// A line that is too long to be one.
    TooLong,
    /// Nothing.
    End,
}

impl std::fmt::Debug for LogInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("name", &self.name).field("number", &self.line_number).finish_non_exhaustive()
    }
}

impl LogInput {
    /// Opens a log; `-` is standard input.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(path: &Path, progress: &ReadProgress) -> io::Result<LogInput> {
        if path.as_os_str() == "-" {
            return LogInput::from_reader("stdin", Box::new(io::stdin().lock()), progress);
        }
        LogInput::from_reader(&path.display().to_string(), Box::new(File::open(path)?), progress)
    }

    /// Reads what somebody else has opened.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn from_reader(name: &str, input: Box<dyn Read>, progress: &ReadProgress) -> io::Result<LogInput> {
        let mut raw = BufReader::with_capacity(READ_BUFFER_BYTES, CountingReader(input, progress.clone()));
        let compressed = raw.fill_buf()?.starts_with(&GZIP_MAGIC);
        let input: Box<dyn Read> = if compressed { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) };
        let mut rest = BufReader::with_capacity(READ_BUFFER_BYTES, input);
        let mut sample = Vec::new();
        // What was read before it failed is there.
        let failure = (&mut rest).take(READ_BUFFER_BYTES as u64).read_to_end(&mut sample).err();
        let reader = Box::new(Cursor::new(sample.clone()).chain(rest));
        Ok(LogInput { name: name.to_owned(), reader, sample, line_number: 0, line: Vec::new(), error: failure })
    }

    /// How it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of the line that was read last, from 1 on.
    pub fn line_number(&self) -> u64 {
        self.line_number
    }

    /// Why it ended before its end.
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// Its first lines that are not empty, without their ends.
    pub fn sample_lines(&self) -> Vec<&[u8]> {
        let mut lines: Vec<_> = self.sample.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end).collect();
        // The last one may be half a line.
        if lines.len() > 1 {
            lines.pop();
        }
        lines.retain(|line| !line.is_empty());
        lines
    }

    /// The next line that is not empty.
    pub fn next_line(&mut self) -> NextLine<'_> {
        loop {
            self.line.clear();
            let read = (&mut self.reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line);
            match read {
                Ok(0) => return NextLine::End,
                Ok(_) => self.line_number += 1,
                Err(error) => {
                    self.error = Some(error);
                    return NextLine::End;
                }
            }
            if self.line.len() as u64 == MAX_LINE_BYTES && self.line.last() != Some(&b'\n') {
                // Only its end is looked for.
                let _ = self.reader.skip_until(b'\n');
                return NextLine::TooLong;
            }
            let end = self.line.trim_ascii_end().len();
            if end > 0 {
                return NextLine::Line(&self.line[..end]);
            }
        }
    }
}

/// The size of a file on the disk; none of what is no file.
pub fn file_size(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|file| file.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn lines(bytes: Vec<u8>) -> (Vec<String>, bool) {
        let mut input = LogInput::from_reader("log", Box::new(Cursor::new(bytes)), &ReadProgress::default()).unwrap();
        let mut lines = Vec::new();
        loop {
            match input.next_line() {
                NextLine::Line(line) => lines.push(String::from_utf8(line.to_vec()).unwrap()),
                NextLine::TooLong => lines.push("(too long)".to_owned()),
                NextLine::End => return (lines, input.error().is_some()),
            }
        }
    }

    #[test]
    fn next_line_accepts_all_line_endings() {
        for (bytes, expected) in [
            (b"".to_vec(), vec![]),
            (b"a\nb\n".to_vec(), vec!["a", "b"]),
            (b"a\r\n\r\n\nb".to_vec(), vec!["a", "b"]),
            (gzip(b"a\nb\n"), vec!["a", "b"]),
            ([gzip(b"a\n"), gzip(b"b\n")].concat(), vec!["a", "b"]),
            ([b"x".repeat(3 << 20), b"\nb\n".to_vec()].concat(), vec!["(too long)", "b"]),
        ] {
            assert_eq!(lines(bytes), (expected.into_iter().map(str::to_owned).collect(), false));
        }
    }

    #[test]
    fn truncated_gzip_is_read_up_to_the_error() {
        let text: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
        let compressed = gzip(text.as_bytes());
        let (read, failed) = lines(compressed[..compressed.len() / 2].to_vec());
        assert!(failed, "it is said");
        assert!(read.len() > 1000 && read.len() < 20_000, "{} lines", read.len());
        assert!(text.starts_with(&read.join("\n")), "as they were written");
    }
}
