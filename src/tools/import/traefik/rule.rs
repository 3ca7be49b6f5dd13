//! The rules of Traefik's routers: matchers joined with `&&`, `||`, `!` and parentheses.

/// Maximum depth of nested parentheses.
const MAX_DEPTH: usize = 16;

/// Maximum number of alternatives of a rule.
const MAX_ALTERNATIVES: usize = 64;

/// A matcher such as ``Path(`/a`)``.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Matcher {
    /// Name of the matcher.
    pub(super) name: String,
    /// Arguments without quotes.
    pub(super) arguments: Vec<String>,
    /// Whether the matcher is negated.
    pub(super) is_negated: bool,
}

/// Matchers that must all match.
pub(super) type Alternative = Vec<Matcher>;

/// Return the alternatives of a rule, each of which is a list of matchers.
///
/// # Errors
/// The rule has a syntax error, or too many alternatives.
pub(super) fn parse(rule: &str) -> Result<Vec<Alternative>, String> {
    let mut parser = Parser { rest: rule, depth: 0 };
    let alternatives = parser.any()?;
    match parser.peek() {
        None => Ok(alternatives),
        Some(c) => Err(format!("unexpected `{c}`")),
    }
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// `all || all`
    fn any(&mut self) -> Result<Vec<Alternative>, String> {
        let mut alternatives = self.all()?;
        while self.eat("||") {
            alternatives.extend(self.all()?);
            bounded(&alternatives)?;
        }
        Ok(alternatives)
    }

    /// `factor && factor`
    fn all(&mut self) -> Result<Vec<Alternative>, String> {
        let mut alternatives = self.factor()?;
        while self.eat("&&") {
            let right = self.factor()?;
            let mut both = Vec::new();
            for one in &alternatives {
                for other in &right {
                    both.push([&**one, &**other].concat());
                    bounded(&both)?;
                }
            }
            alternatives = both;
        }
        Ok(alternatives)
    }

    fn factor(&mut self) -> Result<Vec<Alternative>, String> {
        let is_negated = self.eat("!");
        if self.eat("(") {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err("parentheses are nested too deeply".to_owned());
            }
            let inner = self.any()?;
            self.depth -= 1;
            if !self.eat(")") {
                return Err("a closing parenthesis is missing".to_owned());
            }
            return match (is_negated, &*inner) {
                (false, _) => Ok(inner),
                (true, [single]) if single.len() == 1 => {
                    let mut matcher = single[0].clone();
                    matcher.is_negated = !matcher.is_negated;
                    Ok(vec![vec![matcher]])
                }
                (true, _) => Err("`!` in front of several matchers".to_owned()),
            };
        }
        let length = self.rest.bytes().take_while(u8::is_ascii_alphanumeric).count();
        let (name, rest) = self.rest.split_at(length);
        let name = name.to_owned();
        self.rest = rest;
        if name.is_empty() || !self.eat("(") {
            return Err("a matcher is missing".to_owned());
        }
        let arguments = self.arguments()?;
        Ok(vec![vec![Matcher { name, arguments, is_negated }]])
    }

    /// Quoted texts, up to the closing parenthesis.
    fn arguments(&mut self) -> Result<Vec<String>, String> {
        let mut arguments = Vec::new();
        loop {
            if self.eat(")") {
                return Ok(arguments);
            }
            let quote = self.peek().filter(|c| matches!(c, '`' | '"' | '\''));
            let Some(quote) = quote else { return Err("an argument must be in quotes".to_owned()) };
            let text = &self.rest[1..];
            let Some((argument, rest)) = text.split_once(quote) else {
                return Err(format!("the closing {quote} is missing"));
            };
            arguments.push(argument.to_owned());
            self.rest = rest;
            self.eat(",");
        }
    }
}

fn bounded(alternatives: &[Alternative]) -> Result<(), String> {
    let size: usize = alternatives.iter().map(Vec::len).sum();
    match alternatives.len() > MAX_ALTERNATIVES || size > MAX_ALTERNATIVES * 16 {
        true => Err(format!("the rule has more than {MAX_ALTERNATIVES} alternatives")),
        false => Ok(()),
    }
}
