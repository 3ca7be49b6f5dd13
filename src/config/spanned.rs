//! Values with their spans in the configuration file, so that validation errors can point to them.

use std::borrow::Cow;
use std::ops::{Deref, Range};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

/// A string with its span.
pub type Text = Spanned<String>;

/// A value with its span in the file. Wraps `toml::Spanned`, and has the JSON Schema of the value.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(transparent)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub struct Spanned<T>(toml::Spanned<T>);

impl<T> Spanned<T> {
    /// Create a value with a span.
    pub fn new(span: Range<usize>, value: T) -> Self {
        Spanned(toml::Spanned::new(span, value))
    }
}

impl<T> Deref for Spanned<T> {
    type Target = toml::Spanned<T>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T: JsonSchema> JsonSchema for Spanned<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}
