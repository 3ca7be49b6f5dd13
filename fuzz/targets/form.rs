//! Forms in request bodies: no bytes cause a panic, and the value of a field is the only one that other decoders find.

use std::borrow::Cow;
use std::sync::Arc;

use sluicegate::payload::form::{FieldValue, FormFields, FormType};
use sluicegate::routing::condition::query_values;

/// The first line of the input is the media type. The other lines are the body.
pub(crate) fn run(data: &[u8]) {
    let split = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (line, rest) = data.split_at(split);
    let body = rest.get(1..).unwrap_or_default();
    let Ok(form) = FormType::parse(&String::from_utf8_lossy(line)) else { return };
    let Ok(fields) = FormFields::read(body, &form, &Arc::from(["user".into(), "user[name]".into()])) else { return };
    for name in ["user", "user[name]"] {
        match (&form, fields.value(name)) {
            (FormType::UrlEncoded, Some(FieldValue::Text(found))) => {
                let text = std::str::from_utf8(body).expect("text");
                let values: Vec<_> = query_values(text, name).collect();
                assert_eq!(values, [Cow::Borrowed(found.as_bytes())], "{text:?}");
            }
            (FormType::UrlEncoded, None) => {
                let text = std::str::from_utf8(body).expect("text");
                assert_eq!(query_values(text, name).next(), None);
            }
            (FormType::Multipart { .. }, Some(FieldValue::Text(text))) => {
                assert!(body.windows(text.len().max(1)).any(|part| part == text.as_bytes() || text.is_empty()));
            }
            (_, Some(FieldValue::TooLong | FieldValue::Ambiguous)) | (FormType::Multipart { .. }, None) => {}
        }
    }
}
