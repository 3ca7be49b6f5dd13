//! Logs as lines: files and standard input, compressed or not.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

/// Bytes of a line; what is longer is no line of a log.
const LONGEST: u64 = 1 << 20;

/// Bytes that are read at a time; the first of them tell the format.
const BUFFER: usize = 64 << 10;

/// The first bytes of a gzip stream (RFC 1952 §2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Bytes read so far, as they lie on the disk, of all logs together.
#[derive(Debug, Clone, Default)]
pub struct Progress(Rc<Cell<u64>>);

impl Progress {
    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.0.get()
    }
}

struct Counted<R>(R, Progress);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.0.set(self.1.0.get() + read as u64);
        Ok(read)
    }
}

/// A log that is being read.
pub struct Source {
    name: String,
    reader: Box<dyn BufRead>,
    /// Its beginning, to tell the format.
    sample: Vec<u8>,
    number: u64,
    line: Vec<u8>,
    failure: Option<io::Error>,
}

/// What comes next in a log.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<'a> {
    /// A line, without its end.
    Line(&'a [u8]),
    /// A line that is too long to be one.
    TooLong,
    /// Nothing.
    End,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("name", &self.name).field("number", &self.number).finish_non_exhaustive()
    }
}

impl Source {
    /// Opens a log; `-` is standard input.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(path: &Path, progress: &Progress) -> io::Result<Source> {
        if path.as_os_str() == "-" {
            return Source::of("stdin", Box::new(io::stdin().lock()), progress);
        }
        Source::of(&path.display().to_string(), Box::new(File::open(path)?), progress)
    }

    /// Reads what somebody else has opened.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(name: &str, input: Box<dyn Read>, progress: &Progress) -> io::Result<Source> {
        let mut raw = BufReader::with_capacity(BUFFER, Counted(input, progress.clone()));
        let compressed = raw.fill_buf()?.starts_with(&GZIP);
        let input: Box<dyn Read> = if compressed { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) };
        let mut rest = BufReader::with_capacity(BUFFER, input);
        let mut sample = Vec::new();
        // What was read before it failed is there.
        let failure = (&mut rest).take(BUFFER as u64).read_to_end(&mut sample).err();
        let reader = Box::new(Cursor::new(sample.clone()).chain(rest));
        Ok(Source { name: name.to_owned(), reader, sample, number: 0, line: Vec::new(), failure })
    }

    /// How it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of the line that was read last, from 1 on.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Why it ended before its end.
    pub fn failure(&self) -> Option<&io::Error> {
        self.failure.as_ref()
    }

    /// Its first lines that are not empty, without their ends.
    pub fn sample(&self) -> Vec<&[u8]> {
        let mut lines: Vec<_> = self.sample.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end).collect();
        // The last one may be half a line.
        if lines.len() > 1 {
            lines.pop();
        }
        lines.retain(|line| !line.is_empty());
        lines
    }

    /// The next line that is not empty.
    pub fn next_line(&mut self) -> Next<'_> {
        loop {
            self.line.clear();
            let read = (&mut self.reader).take(LONGEST).read_until(b'\n', &mut self.line);
            match read {
                Ok(0) => return Next::End,
                Ok(_) => self.number += 1,
                Err(error) => {
                    self.failure = Some(error);
                    return Next::End;
                }
            }
            if self.line.len() as u64 == LONGEST && self.line.last() != Some(&b'\n') {
                // Only its end is looked for.
                let _ = self.reader.skip_until(b'\n');
                return Next::TooLong;
            }
            let end = self.line.trim_ascii_end().len();
            if end > 0 {
                return Next::Line(&self.line[..end]);
            }
        }
    }
}

/// The size of a file on the disk; none of what is no file.
pub fn size(path: &Path) -> Option<u64> {
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
        let mut source = Source::of("log", Box::new(Cursor::new(bytes)), &Progress::default()).unwrap();
        let mut lines = Vec::new();
        loop {
            match source.next_line() {
                Next::Line(line) => lines.push(String::from_utf8(line.to_vec()).unwrap()),
                Next::TooLong => lines.push("(too long)".to_owned()),
                Next::End => return (lines, source.failure().is_some()),
            }
        }
    }

    #[test]
    fn lines_end_in_many_ways() {
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
    fn what_is_cut_off_is_read_as_far_as_it_goes() {
        let text: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
        let whole = gzip(text.as_bytes());
        let (read, failed) = lines(whole[..whole.len() / 2].to_vec());
        assert!(failed, "it is said");
        assert!(read.len() > 1000 && read.len() < 20_000, "{} lines", read.len());
        assert!(text.starts_with(&read.join("\n")), "as they were written");
    }
}
