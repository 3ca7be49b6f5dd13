//! The request body of an LLM API: the model, the maximum of the output, and the size of the input.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::payload::json::body::{Collector, JsonBody, JsonValue, KeySeed, Position, SeenMembers, text_value};

/// Maximum length of a model name in bytes. Longer names are rejected, because the access log contains the name.
const MAX_MODEL: usize = 128;

/// Minimum length of a string that may be an image or audio although it is not a `data:` URL.
const MIN_BASE64: usize = 64;

/// The values that a request body contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// The model. `None` if the body does not contain a model.
    pub model: Option<Box<str>>,
    /// Whether the client requests a stream.
    pub is_stream: bool,
    /// `stream_options.include_usage` of OpenAI, if the request has `stream_options`.
    pub includes_usage: Option<bool>,
    /// Maximum number of output tokens of each choice. `None` if the request has no maximum.
    pub output_bound: Option<u64>,
    /// Number of choices.
    pub choices: u64,
    /// Length of the body in bytes, without images and audio.
    pub text_bytes: u64,
    /// Number of images.
    pub images: u64,
    /// Number of audio parts.
    pub audio: u64,
}

/// The reason why a body cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The body is not a JSON object.
    #[error("the request body is not a JSON object: {0}")]
    Json(String),
    /// A key that determines the cost is invalid.
    #[error("{0}")]
    Key(String),
}

/// Estimated numbers of tokens before the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputEstimate {
    /// Number of bytes of text per token.
    pub bytes_per_token: u64,
    /// Tokens of an image.
    pub image: u64,
    /// Tokens of an audio part.
    pub audio: u64,
    /// Output tokens of a choice if the request has no maximum.
    pub default_output: u64,
}

impl InputEstimate {
    /// Return the estimated input tokens of a request.
    pub fn input(&self, info: &RequestInfo) -> u64 {
        let text = info.text_bytes.div_ceil(self.bytes_per_token.max(1));
        let media = info.images.saturating_mul(self.image).saturating_add(info.audio.saturating_mul(self.audio));
        text.saturating_add(media)
    }

    /// Return the output tokens that a request may use.
    pub fn output(&self, info: &RequestInfo) -> u64 {
        info.output_bound.unwrap_or(self.default_output).saturating_mul(info.choices)
    }
}

/// Read a request body.
///
/// # Errors
/// The body is not a JSON object, has a key that determines the cost twice or in different spellings, or has a value of
/// such a key that is not a count.
pub fn inspect(body: &[u8]) -> Result<RequestInfo, RequestError> {
    match inspect_with(body, Collector::default()) {
        Ok((info, _)) => info,
        Err(error) => Err(RequestError::Json(error.to_string())),
    }
}

/// Read a request body as [`inspect`] does, and collect other values in the same pass.
///
/// # Errors
/// The body is not JSON.
pub fn inspect_with(
    body: &[u8],
    collector: Collector,
) -> Result<(Result<RequestInfo, RequestError>, JsonBody), serde_json::Error> {
    let position = collector.root();
    let mut reader = Reader { collector, ..Reader::default() };
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let found = ValueSeed { reader: &mut reader, place: Place::Root, position }.deserialize(&mut deserializer)?;
    let is_object = matches!(found, Found::Object);
    deserializer.end()?;
    let Reader { mut info, media_bytes, prompts, error, collector, .. } = reader;
    info.text_bytes = (body.len() as u64).saturating_sub(media_bytes);
    info.choices = info.choices.max(1).saturating_mul(prompts.max(1));
    let info = match error {
        Some(error) => Err(RequestError::Key(error)),
        None if !is_object => Err(RequestError::Json("it is another value".to_owned())),
        None => Ok(info),
    };
    Ok((info, collector.finish()))
}

/// Return a body with the option that makes OpenAI report the usage of a stream. The body must be a JSON object without
/// `stream_options`.
pub fn with_usage_option(body: &[u8]) -> Vec<u8> {
    let start = body.iter().position(|byte| *byte == b'{').map_or(0, |brace| brace + 1);
    [&body[..start], br#""stream_options":{"include_usage":true},"#, &body[start..]].concat()
}

/// Return the model that a path contains, as for Gemini (`/v1beta/models/NAME:generateContent`) and Azure
/// (`/openai/deployments/NAME/chat/completions`).
pub fn model_in_path(path: &str) -> Option<&str> {
    let mut segments = path.split('/');
    segments.find(|segment| matches!(*segment, "models" | "deployments"))?;
    let name = segments.next()?;
    let name = name.split(':').next().unwrap_or(name);
    (!name.is_empty() && name.len() <= MAX_MODEL).then_some(name)
}

/// The values that are collected while a body is read.
#[derive(Debug, Default)]
struct Reader {
    info: RequestInfo,
    /// Number of bytes of images and audio.
    media_bytes: u64,
    /// Number of prompts of a request to Completions.
    prompts: u64,
    /// Keys that have been read, as bits by [`Known`].
    seen: u32,
    /// The first error in a key that determines the cost.
    error: Option<String>,
    /// Collects the values that routes and identities need.
    collector: Collector,
}

/// The position of a value in the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Root,
    /// `generationConfig` of Gemini.
    GenerationConfig,
    /// `options` of Ollama.
    Options,
    /// `stream_options` of OpenAI.
    StreamOptions,
    /// `image_url` of OpenAI.
    ImageUrl,
    /// `input_audio` of OpenAI.
    InputAudio,
    /// `source` of Anthropic.
    Source,
    /// `fileData` of Gemini.
    FileData,
    /// `images` of Ollama.
    Images,
    /// `data` of an object with a media type.
    Data,
    Elsewhere,
}

/// A key that determines the cost. Keys are compared without regard to case and `_`: Gemini accepts `maxOutputTokens`
/// and `max_output_tokens`, and servers written in Go ignore case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Model,
    Stream,
    IncludeUsage,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    NumPredict,
    N,
    BestOf,
    CandidateCount,
    NumGenerations,
    GenerationConfig,
    Options,
    StreamOptions,
    Prompt,
}

fn known_key(place: Place, key: &str) -> Option<Known> {
    let plain: String = key.chars().filter(|c| *c != '_').map(|c| c.to_ascii_lowercase()).take(24).collect();
    Some(match (place, &*plain) {
        (Place::Root, "model") => Known::Model,
        (Place::Root, "stream") => Known::Stream,
        (Place::Root, "maxtokens") => Known::MaxTokens,
        (Place::Root, "maxcompletiontokens") => Known::MaxCompletionTokens,
        (Place::Root, "maxoutputtokens") => Known::MaxOutputTokens,
        (Place::Root, "n") => Known::N,
        (Place::Root, "bestof") => Known::BestOf,
        (Place::Root, "numgenerations") => Known::NumGenerations,
        (Place::Root, "generationconfig") => Known::GenerationConfig,
        (Place::Root, "options") => Known::Options,
        (Place::Root, "streamoptions") => Known::StreamOptions,
        (Place::Root, "prompt") => Known::Prompt,
        (Place::GenerationConfig, "maxoutputtokens") => Known::MaxOutputTokens,
        (Place::GenerationConfig, "candidatecount") => Known::CandidateCount,
        (Place::Options, "numpredict") => Known::NumPredict,
        (Place::StreamOptions, "includeusage") => Known::IncludeUsage,
        _ => return None,
    })
}

/// Return the position of the value of a key that does not determine the cost.
fn place_of(parent: Place, key: &str) -> Place {
    match (parent, key) {
        (_, "image_url" | "imageUrl") => Place::ImageUrl,
        (Place::ImageUrl, "url") => Place::ImageUrl,
        (_, "input_audio") => Place::InputAudio,
        (_, "source") => Place::Source,
        (_, "file_data" | "fileData") => Place::FileData,
        (_, "images") => Place::Images,
        (_, "data") => Place::Data,
        _ => Place::Elsewhere,
    }
}

/// A value that was read.
#[derive(Debug)]
enum Found<'de> {
    Null,
    Bool(bool),
    /// An integer, which saturates at the maximum of its type. `None` if the integer is negative.
    Count(Option<u64>),
    /// Another number.
    Fraction,
    Text(Cow<'de, str>),
    /// A string without spaces that may be an image or audio, with its length.
    Base64(u64),
    /// An array. Number of elements that are strings or arrays.
    Array(u64),
    Object,
}

/// Reads a value of any type.
struct ValueSeed<'r> {
    reader: &'r mut Reader,
    place: Place,
    position: Position,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Found<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl ValueSeed<'_> {
    fn text<'de>(self, text: Cow<'de, str>) -> Found<'de> {
        let ValueSeed { reader, place, position } = self;
        reader.collector.value(position, || text_value(&text));
        let bytes = text.len() as u64;
        if let Some(rest) = text.strip_prefix("data:") {
            let media_type = rest.split([';', ',']).next().unwrap_or_default();
            if let Some(count) = reader.media_count(media_type) {
                *count += 1;
                reader.media_bytes += bytes;
            }
            return Found::Text(text);
        }
        let is_base64 = || {
            let mut bytes = text.bytes();
            bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'='))
        };
        match place {
            Place::ImageUrl => reader.info.images += 1,
            Place::Images | Place::Data if text.len() >= MIN_BASE64 && is_base64() => {
                if place == Place::Images {
                    reader.info.images += 1;
                    reader.media_bytes += bytes;
                } else {
                    return Found::Base64(bytes);
                }
            }
            _ => {}
        }
        Found::Text(text)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Found<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Null);
        Ok(Found::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Bool(value));
        Ok(Found::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Integer(value.into()));
        Ok(Found::Count(Some(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Integer(value.into()));
        // serde_json calls this function only for negative integers.
        Ok(Found::Count(None))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Fraction);
        Ok(match value.fract() == 0.0 {
            // A cast with `as` saturates.
            true => Found::Count((value >= 0.0).then_some(value as u64)),
            false => Found::Fraction,
        })
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Found<'de>, E> {
        Ok(self.text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Found<'de>, E> {
        Ok(self.text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Found<'de>, A::Error> {
        let ValueSeed { reader, place, position: array } = self;
        reader.collector.value(array, || JsonValue::Compound);
        let place = if place == Place::Images { Place::Images } else { Place::Elsewhere };
        let mut prompts = 0;
        for index in 0.. {
            let position = reader.collector.element(array, index);
            let Some(found) = seq.next_element_seed(ValueSeed { reader, place, position })? else { break };
            prompts += u64::from(matches!(found, Found::Text(_) | Found::Array(_)));
        }
        reader.collector.array_end(array);
        Ok(Found::Array(prompts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
        let ValueSeed { reader, place, position: object } = self;
        reader.collector.value(object, || JsonValue::Compound);
        let mut seen = SeenMembers::default();
        let mut base64 = 0;
        let mut media_type = None;
        let mut is_url = false;
        while let Some(key) = map.next_key_seed(KeySeed)? {
            let position = reader.collector.member(object, &mut seen, &key);
            if let Some(known) = known_key(place, &key) {
                reader.read_known(known, &key, position, &mut map)?;
                continue;
            }
            let found = map.next_value_seed(ValueSeed { reader, place: place_of(place, &key), position })?;
            match (&*key, found) {
                (_, Found::Base64(length)) => base64 = length,
                ("media_type" | "mimeType" | "mime_type", Found::Text(text)) => media_type = Some(text),
                ("type", Found::Text(text)) => is_url = text == "url",
                _ => {}
            }
        }
        reader.collector.object_end(object);
        let kind = match place {
            Place::InputAudio => Some("audio/"),
            Place::Source if is_url => Some("image/"),
            _ => media_type.as_deref(),
        };
        if let Some(count) = kind.and_then(|kind| reader.media_count(kind))
            && (base64 > 0 || place == Place::FileData || (place == Place::Source && is_url))
        {
            *count += 1;
            reader.media_bytes += base64;
        }
        Ok(Found::Object)
    }
}

impl Reader {
    /// Return the counter for parts of this media type. Return `None` if such parts are counted as text.
    fn media_count(&mut self, media_type: &str) -> Option<&mut u64> {
        match media_type.split('/').next() {
            Some("image") => Some(&mut self.info.images),
            Some("audio") => Some(&mut self.info.audio),
            _ => None,
        }
    }

    /// Read the value of a key that determines the cost.
    fn read_known<'de, A: MapAccess<'de>>(
        &mut self,
        known: Known,
        key: &str,
        position: Position,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let bit = 1 << known as u32;
        let is_repeated = self.seen & bit > 0;
        self.seen |= bit;
        let place = match known {
            Known::GenerationConfig => Place::GenerationConfig,
            Known::Options => Place::Options,
            Known::StreamOptions => Place::StreamOptions,
            _ => Place::Elsewhere,
        };
        let found = map.next_value_seed(ValueSeed { reader: self, place, position })?;
        if is_repeated {
            self.fail(format!("`{key}` is in the request body more than once"));
            return Ok(());
        }
        match (known, found) {
            (Known::Prompt, found) => {
                if let Found::Array(prompts) = found {
                    self.prompts = prompts;
                }
            }
            (Known::StreamOptions, Found::Object) => {
                self.info.includes_usage.get_or_insert(false);
            }
            (Known::GenerationConfig | Known::Options, Found::Object) | (_, Found::Null) => {}
            (Known::Model, Found::Text(model)) if model.len() <= MAX_MODEL => self.info.model = Some(model.into()),
            (Known::Model, Found::Text(_)) => self.fail(format!("`{key}` is longer than {MAX_MODEL} bytes")),
            (Known::Stream, Found::Bool(is_stream)) => self.info.is_stream = is_stream,
            (Known::IncludeUsage, Found::Bool(includes)) => self.info.includes_usage = Some(includes),
            // For Ollama, a negative number means that there is no maximum.
            (Known::NumPredict, Found::Count(None)) => {}
            (
                Known::MaxTokens | Known::MaxCompletionTokens | Known::MaxOutputTokens | Known::NumPredict,
                Found::Count(Some(bound)),
            ) => {
                // Providers differ in which of these keys they use, so reserve the largest value.
                self.info.output_bound = Some(self.info.output_bound.map_or(bound, |other| other.max(bound)));
            }
            (Known::N | Known::BestOf | Known::CandidateCount | Known::NumGenerations, Found::Count(Some(choices))) => {
                self.info.choices = self.info.choices.max(choices);
            }
            (Known::Model, _) => self.fail(format!("`{key}` is not a string")),
            (Known::Stream | Known::IncludeUsage, _) => self.fail(format!("`{key}` is not true or false")),
            (Known::GenerationConfig | Known::Options | Known::StreamOptions, _) => {
                self.fail(format!("`{key}` is not an object"));
            }
            (_, _) => self.fail(format!("`{key}` must be an integer of 0 or more")),
        }
        Ok(())
    }

    /// Record the first error. The rest of the body is read nevertheless, for the values of other features.
    fn fail(&mut self, message: String) {
        self.error.get_or_insert(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ESTIMATE: InputEstimate = InputEstimate { bytes_per_token: 4, image: 1000, audio: 500, default_output: 1024 };

    fn bound(body: &str) -> Result<(Option<u64>, u64), String> {
        inspect(body.as_bytes()).map(|info| (info.output_bound, info.choices)).map_err(|error| error.to_string())
    }

    #[test]
    fn bound_of_each_provider_is_found() {
        for (body, expected) in [
            (r#"{"max_tokens":7}"#, (Some(7), 1)),
            (r#"{"max_completion_tokens":7,"n":3}"#, (Some(7), 3)),
            (r#"{"max_output_tokens":7}"#, (Some(7), 1)),
            (r#"{"generationConfig":{"maxOutputTokens":7,"candidateCount":2}}"#, (Some(7), 2)),
            (r#"{"generation_config":{"max_output_tokens":7}}"#, (Some(7), 1)),
            (r#"{"options":{"num_predict":7}}"#, (Some(7), 1)),
            (r#"{"options":{"num_predict":-1}}"#, (None, 1)),
            (r#"{"Options":{"NUM_PREDICT":7}}"#, (Some(7), 1)),
            (r#"{"max_tokens":7,"max_completion_tokens":9}"#, (Some(9), 1)),
            (r#"{"max_tokens":null,"n":null}"#, (None, 1)),
            (r#"{"max_tokens":7.0}"#, (Some(7), 1)),
            (r#"{"max_tokens":1e30}"#, (Some(u64::MAX), 1)),
            (r#"{"max\u005ftokens":7}"#, (Some(7), 1)),
            (r#"{"n":0,"best_of":4}"#, (None, 4)),
            (r#"{"prompt":["a","b"],"n":2,"max_tokens":7}"#, (Some(7), 4)),
            (r#"{"prompt":[1,2,3],"max_tokens":7}"#, (Some(7), 1)),
            (r#"{"prompt":[[1,2],[3]],"max_tokens":7}"#, (Some(7), 2)),
            (r#"{"messages":[{"max_tokens":1,"n":9}],"tools":[{"n":9,"max_tokens":3}]}"#, (None, 1)),
            ("{}", (None, 1)),
        ] {
            assert_eq!(bound(body), Ok(expected), "{body}");
        }
    }

    #[test]
    fn hostile_bodies_are_rejected() {
        for (body, expected) in [
            (r#"{"max_tokens":1,"max_tokens":9000}"#, "`max_tokens` is in the request body more than once"),
            (r#"{"max_tokens":1,"maxTokens":9000}"#, "`maxTokens` is in the request body more than once"),
            (r#"{"max_tokens":1,"max_token\u0073":9000}"#, "`max_tokens` is in the request body more than once"),
            (r#"{"model":"a","Model":"b"}"#, "`Model` is in the request body more than once"),
            (
                r#"{"generationConfig":{},"generation_config":{"maxOutputTokens":9}}"#,
                "`generation_config` is in the request body more than once",
            ),
            (r#"{"options":{"num_predict":1,"num_predict":9}}"#, "`num_predict` is in the request body more than once"),
            (r#"{"max_tokens":-1}"#, "`max_tokens` must be an integer of 0 or more"),
            (r#"{"max_tokens":"1"}"#, "`max_tokens` must be an integer of 0 or more"),
            (r#"{"max_tokens":1.5}"#, "`max_tokens` must be an integer of 0 or more"),
            (r#"{"max_tokens":[1]}"#, "`max_tokens` must be an integer of 0 or more"),
            (r#"{"n":true}"#, "`n` must be an integer of 0 or more"),
            (r#"{"n":-2}"#, "`n` must be an integer of 0 or more"),
            (r#"{"stream":"yes"}"#, "`stream` is not true or false"),
            (r#"{"model":7}"#, "`model` is not a string"),
            (r#"{"options":[]}"#, "`options` is not an object"),
            ("", "the request body is not a JSON object: EOF while parsing a value at line 1 column 0"),
            ("[]", "the request body is not a JSON object: it is another value"),
            ("7", "the request body is not a JSON object: it is another value"),
            (r#"{"a":1} {}"#, "the request body is not a JSON object: trailing characters at line 1 column 9"),
        ] {
            assert_eq!(bound(body), Err(expected.to_owned()), "{body}");
        }
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(200), "]".repeat(200));
        assert!(bound(&deep).is_err_and(|error| error.contains("recursion limit")));
        let long = format!(r#"{{"model":"{}"}}"#, "x".repeat(MAX_MODEL + 1));
        assert_eq!(bound(&long), Err("`model` is longer than 128 bytes".to_owned()));
        assert!(inspect(b"{\"a\":\"\xff\"}").is_err(), "not UTF-8");
    }

    #[test]
    fn model_and_stream_are_found() {
        let info = inspect(br#"{"model":"m\u00e9","stream":true,"stream_options":{"include_usage":true}}"#).unwrap();
        assert_eq!((info.model.as_deref(), info.is_stream, info.includes_usage), (Some("mé"), true, Some(true)));
        let info = inspect(br#"{"stream_options":{}}"#).unwrap();
        assert_eq!((info.model, info.is_stream, info.includes_usage), (None, false, Some(false)));
        assert_eq!(inspect(br#"{"stream_options":null}"#).unwrap().includes_usage, None);
        for (path, expected) in [
            ("/v1beta/models/gemini-3-pro:streamGenerateContent", Some("gemini-3-pro")),
            ("/openai/deployments/my-gpt/chat/completions", Some("my-gpt")),
            ("/v1/chat/completions", None),
            ("/v1/models", None),
            ("/models/:x", None),
        ] {
            assert_eq!(model_in_path(path), expected, "{path}");
        }
    }

    #[test]
    fn usage_option_is_added_to_the_object() {
        let body = with_usage_option(b" {\"stream\":true}");
        assert_eq!(body, b" {\"stream_options\":{\"include_usage\":true},\"stream\":true}");
        assert_eq!(inspect(&body).unwrap().includes_usage, Some(true));
    }

    #[test]
    fn images_and_audio_are_counted_by_number_and_not_by_length() {
        let data = "QUJD".repeat(500);
        for (body, images, audio) in [
            (
                format!(
                    r#"{{"messages":[{{"content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}}]}}]}}"#
                ),
                1,
                0,
            ),
            (
                r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"https://a.test/b.png"}}]}]}"#
                    .to_owned(),
                1,
                0,
            ),
            (
                format!(
                    r#"{{"input":[{{"content":[{{"type":"input_image","image_url":"data:image/png;base64,{data}"}}]}}]}}"#
                ),
                1,
                0,
            ),
            (
                format!(
                    r#"{{"messages":[{{"content":[{{"type":"input_audio","input_audio":{{"data":"{data}","format":"wav"}}}}]}}]}}"#
                ),
                0,
                1,
            ),
            (
                format!(
                    r#"{{"messages":[{{"content":[{{"type":"image","source":{{"type":"base64","data":"{data}","media_type":"image/png"}}}}]}}]}}"#
                ),
                1,
                0,
            ),
            (
                r#"{"messages":[{"content":[{"type":"image","source":{"type":"url","url":"https://a.test/b.png"}}]}]}"#
                    .to_owned(),
                1,
                0,
            ),
            (
                format!(
                    r#"{{"contents":[{{"parts":[{{"inlineData":{{"mimeType":"audio/mp3","data":"{data}"}}}}]}}]}}"#
                ),
                0,
                1,
            ),
            (r#"{"contents":[{"parts":[{"fileData":{"mimeType":"image/png","fileUri":"gs://a"}}]}]}"#.to_owned(), 1, 0),
            (format!(r#"{{"messages":[{{"content":"x","images":["{data}","{data}"]}}]}}"#), 2, 0),
        ] {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!((info.images, info.audio), (images, audio), "{body}");
            assert!(info.text_bytes < 200, "{} {body}", info.text_bytes);
            assert_eq!(ESTIMATE.input(&info), info.text_bytes.div_ceil(4) + images * 1000 + audio * 500);
        }
        let text = "Text is text, also in a field for data. ".repeat(50);
        for body in [
            format!(r#"{{"messages":[{{"content":"x","images":["{text}"]}}]}}"#),
            format!(r#"{{"contents":[{{"parts":[{{"inlineData":{{"mimeType":"image/png","data":"{text}"}}}}]}}]}}"#),
            format!(
                r#"{{"contents":[{{"parts":[{{"inlineData":{{"mimeType":"application/pdf","data":"{data}"}}}}]}}]}}"#
            ),
            format!(r#"{{"messages":[{{"content":"data: {text}"}}]}}"#),
        ] {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!(info.text_bytes, body.len() as u64, "{body}");
        }
    }

    #[test]
    fn estimate_saturates() {
        let info = RequestInfo { images: u64::MAX, choices: u64::MAX, output_bound: Some(2), ..RequestInfo::default() };
        assert_eq!((ESTIMATE.input(&info), ESTIMATE.output(&info)), (u64::MAX, u64::MAX));
        assert_eq!(ESTIMATE.output(&RequestInfo { choices: 2, ..RequestInfo::default() }), 2048);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = inspect(&bytes);
        }

        /// The maximum is found whatever other keys the body has.
        #[test]
        fn bound_is_found_among_other_keys(bound in any::<u32>(), text in "\\PC{0,40}", position in 0..3usize) {
            let mut entries = vec![format!("\"messages\":[{}]", serde_json::to_string(&text).unwrap()), "\"a\":{\"b\":[1]}".to_owned()];
            entries.insert(position.min(2), format!("\"max_tokens\":{bound}"));
            let body = format!("{{{}}}", entries.join(","));
            prop_assert_eq!(inspect(body.as_bytes()).unwrap().output_bound, Some(u64::from(bound)));
        }
    }
}
