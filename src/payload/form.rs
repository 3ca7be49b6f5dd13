//! Reads fields of an HTML form in a request body: `application/x-www-form-urlencoded` or `multipart/form-data`.
//!
//! Servers read unusual forms in different ways, so a client could show the gateway another value than the server. The
//! parser reads only what browsers and HTTP libraries send, and rejects every other form. Parsers for servers accept
//! more, so none of them is used here.

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memmem;
use percent_encoding::percent_decode_str;

/// Maximum number of fields in a form, as in PHP (`max_input_vars`) and Django (`DATA_UPLOAD_MAX_NUMBER_FIELDS`).
pub const MAX_FIELDS: usize = 1000;

/// Maximum length of a collected value in bytes.
const MAX_FIELD_VALUE: usize = 1024;

/// Maximum length of a boundary in bytes (RFC 2046 §5.1.1).
const MAX_BOUNDARY: usize = 70;

/// The reason why a body cannot be read as a form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// Servers read the form differently, or it is not a form.
    #[error("the request body is not a form that all servers read in the same way: {0}")]
    Syntax(&'static str),
    /// The form has more than [`MAX_FIELDS`] fields.
    #[error(
        "the form in the request body has more than {MAX_FIELDS} fields, which is the maximum that the gateway reads"
    )]
    TooManyFields,
}

/// How a form is written in a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FormType {
    /// `application/x-www-form-urlencoded`.
    UrlEncoded,
    /// `multipart/form-data` (RFC 7578).
    Multipart {
        /// The boundary between the parts.
        boundary: Box<str>,
    },
}

/// The value of a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FieldValue {
    /// Text without control characters.
    Text(Box<str>),
    /// A value longer than 1024 bytes.
    TooLong,
    /// Servers may read different values: the field occurs twice, has a similar name, is a file, or contains control
    /// characters.
    Ambiguous,
}

/// The values of the fields that the configuration names.
#[derive(Debug, Clone, Default)]
pub struct FormFields {
    names: Arc<[Box<str>]>,
    values: Vec<Option<FieldValue>>,
}

impl FormType {
    /// Return whether a server may read a body of this media type as a form. `essence` is the media type without
    /// parameters, in lower case. PHP ignores what follows the name of the type.
    pub fn is_form(essence: &str) -> bool {
        essence.starts_with("application/x-www-form-urlencoded") || essence.starts_with("multipart/")
    }

    /// Parse the media type of a form.
    ///
    /// # Errors
    /// The gateway does not read forms of this type.
    pub fn parse(media_type: &str) -> Result<FormType, FormError> {
        let mut parts = media_type.split(';');
        let essence = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
        let mut boundary = None;
        for part in parts {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let quoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
            let value = quoted.unwrap_or(value);
            match &*name.trim_start().to_ascii_lowercase() {
                "charset" if value.eq_ignore_ascii_case("utf-8") => {}
                "boundary" if boundary.is_none() && is_boundary(value, quoted.is_some()) => {
                    boundary = Some(value.into())
                }
                _ => return Err(FormError::Syntax("its media type has another parameter than `boundary`")),
            }
        }
        match (&*essence, boundary) {
            ("application/x-www-form-urlencoded", None) => Ok(FormType::UrlEncoded),
            ("multipart/form-data", Some(boundary)) => Ok(FormType::Multipart { boundary }),
            _ => Err(FormError::Syntax("its media type is not that of a form")),
        }
    }
}

/// Return whether text is a boundary that all servers read to its end. Without quotes, some servers (PHP, Werkzeug) end
/// it at a character that is not one of a token.
fn is_boundary(text: &str, is_quoted: bool) -> bool {
    let others: &[u8] = if is_quoted { b"'()+_,-./:=?" } else { b"'+_-." };
    let is_char = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    (1..=MAX_BOUNDARY).contains(&text.len()) && text.bytes().all(is_char)
}

impl FormFields {
    /// Read the fields with these names from a complete body.
    ///
    /// # Errors
    /// The body is not a form that all servers read in the same way, or has too many fields.
    pub fn read(body: &[u8], form: &FormType, names: &Arc<[Box<str>]>) -> Result<FormFields, FormError> {
        let mut fields = FormFields { names: names.clone(), values: vec![None; names.len()] };
        match form {
            FormType::UrlEncoded => fields.read_url_encoded(body)?,
            FormType::Multipart { boundary } => fields.read_multipart(body, boundary)?,
        }
        Ok(fields)
    }

    /// Return the value of a field. `name` must be one of the names with which the form was read.
    pub fn value(&self, name: &str) -> Option<&FieldValue> {
        let index = self.names.iter().position(|other| **other == *name)?;
        self.values.get(index)?.as_ref()
    }

    /// Record a field of the form. `value` is `None` for a file.
    fn record(&mut self, name: &str, value: Option<&[u8]>) {
        for (wanted, found) in self.names.iter().zip(&mut self.values) {
            if name == &**wanted && found.is_none() {
                *found = Some(value.map_or(FieldValue::Ambiguous, field_value));
            } else if are_similar(name, wanted) {
                *found = Some(FieldValue::Ambiguous);
            }
        }
    }

    /// Read `name=value&name=value` (WHATWG URL §5.1).
    fn read_url_encoded(&mut self, body: &[u8]) -> Result<(), FormError> {
        // Some servers also split fields at `;`. Encoders escape it, as well as spaces, controls and other characters.
        let text = str::from_utf8(body).ok().filter(|text| text.bytes().all(|byte| matches!(byte, b'!'..=b'~')));
        let Some(text) = text.filter(|text| !text.contains(';')) else {
            return Err(FormError::Syntax("a character is not percent-encoded"));
        };
        for (count, field) in text.split('&').enumerate() {
            if count >= MAX_FIELDS {
                return Err(FormError::TooManyFields);
            }
            let (name, value) = field.split_once('=').unwrap_or((field, ""));
            self.record(&decoded(name)?, Some(decoded(value)?.as_bytes()));
        }
        Ok(())
    }

    /// Read the parts of a `multipart/form-data` body.
    fn read_multipart(&mut self, body: &[u8], boundary: &str) -> Result<(), FormError> {
        let opening = format!("--{boundary}");
        let delimiter = format!("\r\n{opening}");
        let finder = memmem::Finder::new(&delimiter);
        let Some(mut rest) = body.strip_prefix(opening.as_bytes()) else {
            return Err(FormError::Syntax("it does not begin with its boundary"));
        };
        for _ in 0..=MAX_FIELDS {
            let Some(part) = rest.strip_prefix(b"\r\n") else {
                return match rest {
                    b"--" | b"--\r\n" => Ok(()),
                    _ => Err(FormError::Syntax("other bytes follow a boundary")),
                };
            };
            let Some(end) = finder.find(part) else {
                return Err(FormError::Syntax("its last boundary is missing"));
            };
            // Some servers find a boundary after a line feed alone.
            if memmem::find(&part[..end], opening.as_bytes()).is_some() {
                return Err(FormError::Syntax("a part contains the boundary"));
            }
            self.read_part(&part[..end])?;
            rest = &part[end + delimiter.len()..];
        }
        Err(FormError::TooManyFields)
    }

    fn read_part(&mut self, part: &[u8]) -> Result<(), FormError> {
        let end = memmem::find(part, b"\r\n\r\n").ok_or(FormError::Syntax("a part has no headers"))?;
        let head = str::from_utf8(&part[..end]).map_err(|_| FormError::Syntax("a header of a part is not UTF-8"))?;
        let mut disposition = None;
        for line in head.split("\r\n") {
            let header = line.split_once(':').filter(|(name, _)| is_token(name) && !line.contains(['\r', '\n', '\0']));
            let (name, value) = header.ok_or(FormError::Syntax("a header of a part is malformed"))?;
            let value = value.trim_matches([' ', '\t']);
            match &*name.to_ascii_lowercase() {
                "content-disposition" if disposition.is_none() => disposition = Some(Disposition::parse(value)?),
                "content-disposition" => return Err(FormError::Syntax("a part has two names")),
                "content-type" if !is_plain_type(value) => {
                    return Err(FormError::Syntax("a part has a charset other than UTF-8, or consists of parts"));
                }
                "content-transfer-encoding"
                    if !["7bit", "8bit", "binary"].iter().any(|plain| value.eq_ignore_ascii_case(plain)) =>
                {
                    return Err(FormError::Syntax("a part has a transfer encoding"));
                }
                _ => {}
            }
        }
        let disposition = disposition.ok_or(FormError::Syntax("a part has no name"))?;
        self.record(disposition.name, (!disposition.is_file).then_some(&part[end + 4..]));
        Ok(())
    }
}

/// The header Content-Disposition of a part.
struct Disposition<'h> {
    name: &'h str,
    is_file: bool,
}

impl<'h> Disposition<'h> {
    /// Parse `form-data; name="NAME"`, or the same with a file name.
    fn parse(value: &'h str) -> Result<Self, FormError> {
        let malformed = FormError::Syntax("a part has a malformed Content-Disposition");
        let (kind, mut rest) = value.split_once(';').ok_or(malformed.clone())?;
        let (mut name, mut is_file) = (None, false);
        if !kind.trim().eq_ignore_ascii_case("form-data") || value.contains('\\') {
            return Err(malformed);
        }
        loop {
            let (key, after) = rest.split_once('=').ok_or(malformed.clone())?;
            let quoted = after.strip_prefix('"').and_then(|after| after.split_once('"'));
            // Browsers quote each value, and write `filename*` as RFC 8187 does. PHP reads other quotes as well, and
            // some servers decode `=?utf-8?Q?user?=`.
            let (text, after) = match (&*key.trim_start().to_ascii_lowercase(), quoted) {
                ("name", Some((text, after))) if name.is_none() && !text.contains('%') && !text.contains("=?") => {
                    name = Some(text);
                    (text, after)
                }
                ("filename", Some(split)) => {
                    is_file = true;
                    split
                }
                ("filename*", None) => {
                    is_file = true;
                    after.split_at(after.find(';').unwrap_or(after.len()))
                }
                _ => return Err(malformed),
            };
            if quoted.is_none() && !is_extended_value(text) {
                return Err(malformed);
            }
            match after.strip_prefix(';') {
                Some(next) => rest = next,
                None if after.is_empty() => break,
                None => return Err(malformed),
            }
        }
        name.map(|name| Disposition { name, is_file }).ok_or(malformed)
    }
}

fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Return whether text is an `ext-value`: `charset'language'value` (RFC 8187 §3.2.1).
fn is_extended_value(text: &str) -> bool {
    let is_char = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~%".contains(&byte);
    let mut parts = text.split('\'');
    let [charset, language, value] = [(); 3].map(|()| parts.next());
    let is_text = |part: Option<&str>| part.is_some_and(|part| part.bytes().all(is_char));
    charset.is_some_and(is_token) && is_text(language) && is_text(value) && parts.next().is_none()
}

/// Return whether a part of this media type is a single value, in UTF-8 if it is text.
fn is_plain_type(media_type: &str) -> bool {
    let lower = media_type.to_ascii_lowercase();
    let charset = lower.split_once("charset").map(|(_, rest)| rest.trim_matches(['=', ' ', '"']));
    !lower.starts_with("multipart/") && charset.is_none_or(|charset| matches!(charset, "utf-8" | "us-ascii"))
}

/// Decode a name or value of the type `application/x-www-form-urlencoded`.
fn decoded(text: &str) -> Result<Cow<'_, str>, FormError> {
    if !text.contains(['%', '+']) {
        return Ok(Cow::Borrowed(text));
    }
    let escapes = || text.split('%').skip(1);
    let is_escape = |escape: &str| escape.len() >= 2 && escape.bytes().take(2).all(|digit| digit.is_ascii_hexdigit());
    if !escapes().all(is_escape) {
        return Err(FormError::Syntax("a `%` is not followed by two hexadecimal digits"));
    }
    let spaced = text.replace('+', " ");
    let decoded = percent_decode_str(&spaced).decode_utf8();
    decoded.map(|text| Cow::Owned(text.into_owned())).map_err(|_| FormError::Syntax("a value is not UTF-8"))
}

fn field_value(value: &[u8]) -> FieldValue {
    match str::from_utf8(value) {
        _ if value.len() > MAX_FIELD_VALUE => FieldValue::TooLong,
        Ok(text) if !text.chars().any(char::is_control) => FieldValue::Text(text.into()),
        Ok(_) | Err(_) => FieldValue::Ambiguous,
    }
}

/// Return whether a server may read a parameter of a query as the field `wanted`.
pub fn has_similar_parameter(query: &str, wanted: &str) -> bool {
    query.split(['&', ';']).any(|parameter| {
        let name = parameter.split('=').next().unwrap_or_default().replace('+', " ");
        are_similar(&percent_decode_str(&name).decode_utf8_lossy(), wanted)
    })
}

/// Return whether a server may read the field `name` as the field `wanted`. Servers ignore case or white space, replace
/// characters (PHP), ignore brackets (Rack), or combine fields such as `user`, `user[]` and `user[name]` into one value.
fn are_similar(name: &str, wanted: &str) -> bool {
    let canonical = |name: &str| {
        let name = name.split('\0').next().unwrap_or_default();
        let name = name.trim_matches(|c: char| c.is_whitespace() || c.is_control());
        let name = name.trim_start_matches(['[', ']']);
        let name = if name.contains('[') { name } else { name.trim_end_matches(']') };
        name.to_lowercase().replace([' ', '.'], "_")
    };
    let name = canonical(name);
    let wanted = canonical(wanted);
    let contains = |outer: &str, inner: &str| outer.strip_prefix(inner).is_some_and(|rest| rest.starts_with('['));
    // PHP reads `user[name` as `user_name`.
    let is_unclosed = name.split_once('[').is_some_and(|(_, rest)| !rest.contains(']'));
    name == wanted
        || contains(&name, &wanted)
        || contains(&wanted, &name)
        || is_unclosed && name.replacen('[', "_", 1) == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(media_type: &str, body: &str, name: &str) -> Result<Option<FieldValue>, FormError> {
        let fields = FormFields::read(body.as_bytes(), &FormType::parse(media_type)?, &Arc::from([name.into()]))?;
        Ok(fields.value(name).cloned())
    }

    #[test]
    fn field_of_an_encoded_form_has_one_value() {
        let long = format!("user={}", "x".repeat(1025));
        let text = |text: &str| Some(FieldValue::Text(text.into()));
        for (name, body, expected) in [
            ("user", "user=alice&password=x%26user%3Dbob", text("alice")),
            ("user", "us%65r=al%C3%A9+ce", text("al\u{e9} ce")),
            ("user", "password=x", None),
            ("user", "user", text("")),
            ("user", "user=a&user=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a&%75ser=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a&User=b", Some(FieldValue::Ambiguous)),
            ("user", "+user=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a&user%5B%5D=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a%00b", Some(FieldValue::Ambiguous)),
            ("user", "user%00x=b", Some(FieldValue::Ambiguous)),
            ("user", &long, Some(FieldValue::TooLong)),
            ("user[email]", "user%5Bemail%5D=a&user%5Bpassword%5D=b", text("a")),
            ("user[email]", "user%5Bemail%5D=a&user=b", Some(FieldValue::Ambiguous)),
            ("user_name", "user.name=a", Some(FieldValue::Ambiguous)),
            ("user_name", "user_name=a&user[name=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a&[user]=b", Some(FieldValue::Ambiguous)),
            ("user", "user=a&user]=b", Some(FieldValue::Ambiguous)),
        ] {
            assert_eq!(value("application/x-www-form-urlencoded", body, name), Ok(expected), "{body}");
        }
    }

    #[test]
    fn encoded_form_that_servers_read_differently_is_rejected() {
        let many = vec!["a=1"; MAX_FIELDS + 1].join("&");
        for (media_type, body) in [
            ("application/x-www-form-urlencoded", "a=1;user=b"),
            ("application/x-www-form-urlencoded", "user=%zz"),
            ("application/x-www-form-urlencoded", "user=%u0061"),
            ("application/x-www-form-urlencoded", "user=%"),
            ("application/x-www-form-urlencoded", "user=%ff"),
            ("application/x-www-form-urlencoded", "user=a\r\n"),
            ("application/x-www-form-urlencoded; charset=utf-7", "user=a"),
            ("application/x-www-form-urlencoded", &*many),
        ] {
            assert!(value(media_type, body, "user").is_err(), "{media_type} {body:.80}");
        }
    }

    /// A form with one part, whose headers and content are `part`.
    fn one_part(part: &str) -> String {
        format!("--b\r\n{part}\r\n--b--\r\n")
    }

    #[test]
    fn field_of_a_multipart_form_has_one_value() {
        let text = |text: &str| Some(FieldValue::Text(text.into()));
        let field = |name: &str| format!("Content-Disposition: form-data; name=\"{name}\"\r\n\r\nalice");
        let file = "Content-Disposition: form-data; name=\"f\"; filename=\"user\"\r\nContent-Type: text/plain\r\n\r\nx";
        for (body, expected) in [
            (one_part(&field("user")), text("alice")),
            (one_part(&field("other")), None),
            (one_part(&field("USER")), Some(FieldValue::Ambiguous)),
            (one_part(file), None),
            (one_part(&file.replace("\"f\"", "\"user\"")), Some(FieldValue::Ambiguous)),
            (one_part(&file.replace("filename=\"user\"", "filename*=utf-8''a%20b.txt")), None),
            (one_part(&format!("{}\r\n--b\r\n{}", field("user"), field("user"))), Some(FieldValue::Ambiguous)),
            (one_part(&format!("{file}\r\n--b\r\n{}", field("user"))), text("alice")),
        ] {
            assert_eq!(value("multipart/form-data; boundary=b", &body, "user"), Ok(expected), "{body}");
        }
        assert_eq!(
            value("multipart/form-data; boundary=\"b\"", &one_part(&field("user")), "user"),
            Ok(text("alice")),
            "a boundary may be quoted"
        );
    }

    #[test]
    fn parameters_of_a_query_may_replace_fields() {
        for (query, expected) in [
            ("user=a", true),
            ("x=1&User=a", true),
            ("x=1;us%65r[]=a", true),
            ("+user", true),
            ("", false),
            ("x=user&users=a", false),
        ] {
            assert_eq!(has_similar_parameter(query, "user"), expected, "{query}");
        }
    }

    #[test]
    fn multipart_form_that_servers_read_differently_is_rejected() {
        let type_of = "multipart/form-data; boundary=b";
        let field = "Content-Disposition: form-data; name=\"user\"\r\n\r\nalice";
        let with = |header: &str| one_part(&format!("{header}\r\n{field}"));
        for (media_type, body) in [
            ("multipart/form-data", one_part(field)),
            ("multipart/form-data; boundary=b; boundary=c", one_part(field)),
            ("multipart/form-data; boundary*0=b", one_part(field)),
            ("multipart/form-data; boundary=b/c", one_part(field).replace("--b", "--b/c")),
            ("application/x-www-form-urlencoded, x", one_part(field)),
            ("application/x-www-form-urlencoded x", one_part(field)),
            ("multipart/mixed; boundary=b", one_part(field)),
            (type_of, format!("x\r\n{}", one_part(field))),
            (type_of, format!("{}x", one_part(field))),
            (type_of, format!("--b\r\n{field}")),
            (type_of, one_part(field).replace("--b\r\n", "--b \r\n")),
            (type_of, one_part(&format!("{field}\n--b\nx"))),
            (type_of, one_part(&field.replace("name=\"user\"", "name=user"))),
            (type_of, one_part(&field.replace("name=\"user\"", "name=\"a\"; name=\"user\""))),
            (type_of, one_part(&field.replace("name=\"user\"", "name*=utf-8''user"))),
            (type_of, one_part(&field.replace("name=\"user\"", "name=\"a\\\"; name=\"user\""))),
            (type_of, one_part(&field.replace("user", "us%65r"))),
            (type_of, one_part(&field.replace("user", "=?utf-8?Q?user?="))),
            (type_of, one_part(&field.replace("\"user\"", "\"f\"; filename*=x'; filename=\"'; name=user; x=\""))),
            (type_of, one_part(&field.replace("form-data", "attachment"))),
            (type_of, one_part(&field.replace("; name", ";\r\n name"))),
            (type_of, one_part("\r\n\r\nalice")),
            (type_of, with("Content-Transfer-Encoding: base64")),
            (type_of, with("Content-Type: text/plain; charset=utf-16")),
            (type_of, with("Content-Type: multipart/mixed; boundary=c")),
            (type_of, with("Content-Disposition: form-data; name=\"a\"")),
        ] {
            assert!(value(media_type, &body, "user").is_err(), "{media_type} {body}");
        }
    }
}
