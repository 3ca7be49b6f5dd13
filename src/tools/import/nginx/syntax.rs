//! The syntax of nginx: tokens, directives with their blocks, and `include`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::tools::import::model::{Model, Origin, Relation};
use crate::tools::import::{ImportError, Input, read_input};

/// Maximum depth of nested blocks.
const MAX_DEPTH: usize = 32;

/// Maximum depth of files that include each other.
const MAX_INCLUDES: usize = 16;

/// Maximum number of directives of all files together. A parsed directive takes about 200 bytes.
const MAX_DIRECTIVES: usize = 50_000;

/// A directive: `listen 80;`, or `location / { … }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directive {
    /// Position of the name.
    pub origin: Origin,
    /// The name.
    pub name: String,
    /// The arguments, without quotes.
    pub args: Vec<String>,
    /// The directives of the block. `None`: the directive ends with `;`.
    pub block: Option<Vec<Directive>>,
}

impl Directive {
    /// Return an argument, or an empty text if there is none.
    pub fn arg(&self, index: usize) -> &str {
        self.args.get(index).map_or("", String::as_str)
    }

    /// Return the directives of the block.
    pub fn children(&self) -> &[Directive] {
        self.block.as_deref().unwrap_or_default()
    }

    /// Return the directive without its block, for messages.
    pub fn text(&self) -> String {
        [std::slice::from_ref(&self.name), &*self.args].concat().join(" ")
    }
}

/// A token of a file.
#[derive(Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Semicolon,
    Open,
    Close,
    End,
}

/// Reads the tokens of one file.
struct Tokens<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    file: Arc<str>,
    line: usize,
}

impl<'a> Tokens<'a> {
    fn new(input: &'a Input) -> Self {
        let text = input.text.strip_prefix('\u{feff}').unwrap_or(&input.text);
        Tokens { rest: text.chars().peekable(), file: input.name.clone(), line: 1 }
    }

    fn origin(&self) -> Origin {
        Origin::new(&self.file, self.line)
    }

    fn error(&self, message: &str) -> ImportError {
        ImportError::Syntax(self.origin(), message.to_owned())
    }

    fn next_char(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        self.line += usize::from(c == '\n');
        Some(c)
    }

    /// Skip spaces and comments.
    fn skip_space(&mut self) {
        while let Some(&c) = self.rest.peek() {
            if c == '#' {
                while self.rest.peek().is_some_and(|c| *c != '\n') {
                    self.next_char();
                }
            } else if !matches!(c, ' ' | '\t' | '\r' | '\n') {
                return;
            }
            self.next_char();
        }
    }

    /// Return the next token.
    fn next(&mut self) -> Result<Token, ImportError> {
        self.skip_space();
        let Some(&first) = self.rest.peek() else { return Ok(Token::End) };
        match first {
            ';' => self.next_char().map_or(Ok(Token::End), |_| Ok(Token::Semicolon)),
            '{' => self.next_char().map_or(Ok(Token::End), |_| Ok(Token::Open)),
            '}' => self.next_char().map_or(Ok(Token::End), |_| Ok(Token::Close)),
            '"' | '\'' => self.quoted_word(first),
            _ => self.plain_word(),
        }
    }

    fn quoted_word(&mut self, quote: char) -> Result<Token, ImportError> {
        let start = self.origin();
        let mut word = String::new();
        self.next_char();
        loop {
            match self.next_char() {
                None => return Err(ImportError::Syntax(start, format!("the closing {quote} is missing"))),
                Some('\\') => self.escape(&mut word),
                Some(c) if c == quote => break,
                Some(c) => word.push(c),
            }
        }
        match self.rest.peek().copied() {
            None | Some(' ' | '\t' | '\r' | '\n' | ';' | '{' | ')') => Ok(Token::Word(word)),
            Some(c) => Err(self.error(&format!("unexpected `{}` after a closing quote", c.escape_debug()))),
        }
    }

    fn plain_word(&mut self) -> Result<Token, ImportError> {
        let mut word = String::new();
        while let Some(&c) = self.rest.peek() {
            // `${name}` is a variable, so its brace begins no block.
            let is_variable = c == '{' && word.ends_with('$');
            if matches!(c, ' ' | '\t' | '\r' | '\n' | ';') || c == '{' && !is_variable {
                break;
            }
            self.next_char();
            match c {
                '\\' => self.escape(&mut word),
                '{' => {
                    word.push('{');
                    while self.rest.peek().is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '}')) {
                        let Some(c) = self.next_char() else { break };
                        word.push(c);
                        if c == '}' {
                            break;
                        }
                    }
                }
                c => word.push(c),
            }
        }
        Ok(Token::Word(word))
    }

    /// Read the character after a backslash, as nginx does: quotes and backslashes are unescaped, and the backslash
    /// before any other character stays.
    fn escape(&mut self, word: &mut String) {
        match self.next_char() {
            Some(c @ ('"' | '\'' | '\\')) => word.push(c),
            Some('t') => word.push('\t'),
            Some('r') => word.push('\r'),
            Some('n') => word.push('\n'),
            Some(c) => word.extend(['\\', c]),
            None => word.push('\\'),
        }
    }

    /// Skip a block of another language, whose braces are balanced.
    fn skip_code(&mut self) -> Result<(), ImportError> {
        let start = self.origin();
        let mut depth = 1;
        while depth > 0 {
            match self.next_char() {
                Some('{') => depth += 1,
                Some('}') => depth -= 1,
                Some(_) => {}
                None => return Err(ImportError::Syntax(start, "the closing brace is missing".to_owned())),
            }
        }
        Ok(())
    }
}

/// Reads files and the files that they include.
pub struct Reader<'m> {
    /// Receives messages about files that are missing.
    pub model: &'m mut Model,
    /// Number of bytes that may still be read.
    pub budget: u64,
    /// Number of directives that may still be read.
    directives: usize,
}

impl<'m> Reader<'m> {
    /// Create a reader. `budget` is the number of bytes that included files may have.
    pub fn new(model: &'m mut Model, budget: u64) -> Self {
        Reader { model, budget, directives: MAX_DIRECTIVES }
    }

    /// Return the directives of a file and of the files that it includes.
    pub fn read(&mut self, input: &Input) -> Result<Vec<Directive>, ImportError> {
        self.file(input, input.directory.as_deref(), 0)
    }

    fn file(&mut self, input: &Input, base: Option<&Path>, depth: usize) -> Result<Vec<Directive>, ImportError> {
        let mut tokens = Tokens::new(input);
        let mut open: Vec<Directive> = Vec::new();
        let mut level: Vec<Vec<Directive>> = vec![Vec::new()];
        loop {
            tokens.skip_space();
            let origin = tokens.origin();
            let mut words = Vec::new();
            let end = loop {
                match tokens.next()? {
                    Token::Word(word) => words.push(word),
                    other => break other,
                }
            };
            let Some(siblings) = level.last_mut() else { return Err(tokens.error("unexpected `}`")) };
            match (end, words.is_empty()) {
                (Token::Close, true) => {
                    let block = level.pop().unwrap_or_default();
                    let (Some(mut directive), Some(parent)) = (open.pop(), level.last_mut()) else {
                        return Err(tokens.error("unexpected `}`"));
                    };
                    directive.block = Some(block);
                    parent.push(directive);
                }
                (Token::End, true) if open.is_empty() => return Ok(level.pop().unwrap_or_default()),
                (Token::End, _) => return Err(tokens.error("unexpected end of the file: `;` or `}` is missing")),
                (Token::Close, false) => return Err(tokens.error("unexpected `}`: `;` is missing")),
                (Token::Semicolon, true) => return Err(tokens.error("unexpected `;`")),
                (Token::Open, true) => return Err(tokens.error("unexpected `{`")),
                (end, false) => {
                    self.directives = self.directives.checked_sub(1).ok_or_else(|| {
                        tokens.error(&format!("the files have more than {MAX_DIRECTIVES} directives"))
                    })?;
                    let name = words.remove(0);
                    let mut directive = Directive { origin, name, args: words, block: None };
                    if end == Token::Semicolon && directive.name == "include" {
                        let included = self.include(&directive, base, depth)?;
                        siblings.extend(included);
                    } else if end == Token::Semicolon {
                        siblings.push(directive);
                    } else if directive.name.ends_with("_by_lua_block") {
                        tokens.skip_code()?;
                        directive.block = Some(Vec::new());
                        siblings.push(directive);
                    } else {
                        if open.len() == MAX_DEPTH {
                            return Err(tokens.error(&format!("blocks are nested deeper than {MAX_DEPTH} levels")));
                        }
                        open.push(directive);
                        level.push(Vec::new());
                    }
                }
                (Token::Word(_), true) => {}
            }
        }
    }

    /// Return the directives of the files that an `include` names. Relative paths are relative to the directory of the
    /// main file, as in nginx.
    fn include(
        &mut self,
        directive: &Directive,
        base: Option<&Path>,
        depth: usize,
    ) -> Result<Vec<Directive>, ImportError> {
        let pattern = directive.arg(0);
        let Some(base) = base else {
            self.model.no_equal(&directive.origin, format!("`include {pattern}`: give the main file by its path"));
            return Ok(Vec::new());
        };
        if depth == MAX_INCLUDES {
            let message = format!("files include each other deeper than {MAX_INCLUDES} levels");
            return Err(ImportError::Syntax(directive.origin.clone(), message));
        }
        let files = matching_files(&base.join(pattern));
        if files.is_empty() && !pattern.contains('*') {
            let is_table = ["mime.types", "fastcgi_params", "uwsgi_params", "scgi_params", "fastcgi.conf"]
                .iter()
                .any(|name| pattern.ends_with(name));
            let relation = if is_table { Relation::NotNeeded } else { Relation::NoEqual };
            let text = match is_table {
                true => format!("`include {pattern}`"),
                false => format!("`include {pattern}`: the file was not found, so its directives are missing"),
            };
            self.model.note(relation, Some(&directive.origin), text);
        }
        let mut all = Vec::new();
        for path in files {
            let included = read_input(&path, &mut self.budget)?;
            super::super::reject_template(&included)?;
            all.extend(self.file(&included, Some(base), depth + 1)?);
        }
        Ok(all)
    }
}

/// Return the files that match a path, in which `*` and `?` are wildcards in any segment.
fn matching_files(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern.components() {
        let name = part.as_os_str().to_string_lossy();
        if !name.contains(['*', '?']) {
            found.iter_mut().for_each(|path| path.push(part));
            continue;
        }
        let mut next = Vec::new();
        for directory in &found {
            let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let entry_name = entry.file_name();
                let entry_name = entry_name.to_string_lossy();
                if !entry_name.starts_with('.') && matches(&name, &entry_name) {
                    next.push(directory.join(&*entry_name));
                }
            }
        }
        next.sort();
        found = next;
    }
    found.retain(|path| path.is_file());
    found
}

/// Return whether a name matches a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let mut text = String::from("(?s)^");
    for c in pattern.chars() {
        match c {
            '*' => text.push_str(".*"),
            '?' => text.push('.'),
            c => text.push_str(&regex::escape(&c.to_string())),
        }
    }
    regex::Regex::new(&format!("{text}$")).is_ok_and(|regex| regex.is_match(name))
}
