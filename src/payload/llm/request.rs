//! The request body of an LLM API: the model, the maximum number of output tokens, and the size of the input.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::LazyLock;

use memchr::{memchr, memchr2};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::payload::json::body::{
    Collector, JsonBody, JsonError, JsonValue, Position, SeenMembers, Skip, Skipped, deserialize, shortened, text_value,
};
use crate::payload::json::names::{NameIndex, bits};
use crate::payload::llm::image::{ImageScale, ImageSize, Media, base64_size};
use crate::payload::llm::provider::{Operation, Provider, RootMaximum};
use crate::payload::llm::text_tokens::TextTokens;
use crate::payload::llm::usage::ServiceTier;

/// Maximum length of a model name in bytes. Requests with longer names are rejected, because the access log contains
/// the name.
pub const MAX_MODEL: usize = 128;

/// Maximum number of models that a request names in addition to `model`.
const MAX_OTHER_MODELS: usize = 32;

/// Number of bytes of a streamed text per token, if `bytes_per_token` is not set. It is typical of English text.
const OUTPUT_BYTES_PER_TOKEN: u64 = 4;

/// Minimum length in bytes of a base64 string that is treated as an image or audio. Shorter strings count as text.
const MIN_BASE64: usize = 64;

/// The values that a request body contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// The model. `None` if the body does not contain a model.
    pub model: Option<Box<str>>,
    /// Other models that the server may use (`models` of OpenRouter, `fallbacks` of LiteLLM).
    pub other_models: Vec<Box<str>>,
    /// The service tier that the client requests, if it may have another price.
    pub tier: Option<ServiceTier>,
    /// Whether the client requests a stream.
    pub is_stream: bool,
    /// Whether the client requests a report of the usage in the stream (OpenAI's `stream_options.include_usage`).
    pub includes_usage: bool,
    /// Whether the response is generated in the background (`background` of OpenAI's Responses API). The client fetches
    /// it later.
    pub is_background: bool,
    /// Maximum numbers of output tokens per choice.
    pub bounds: OutputBounds,
    /// The requests of a batch.
    pub batch: Batch,
    /// Number of alternative outputs (choices) that the client requests.
    pub choices: u64,
    /// Length of the body in bytes, without images, audio and documents.
    pub text_bytes: u64,
    /// The tokens of the body without images, audio and documents.
    pub text: TextTokens,
    /// Images, audio and documents.
    pub media: Media,
    /// Number of models that LiteLLM calls for one request, if `model` is a list with commas. 0 means 1.
    pub calls: u64,
}

/// The requests of a batch of Anthropic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Batch {
    /// Number of requests.
    pub requests: u64,
    /// Number of requests with a maximum number of output tokens.
    pub bounded: u64,
    /// The sum of the maximum numbers of output tokens.
    pub output: u64,
}

impl Batch {
    fn add_bound(&mut self, bound: u64) {
        self.bounded += 1;
        self.output = self.output.saturating_add(bound);
    }
}

/// Number of bytes of a document for which `document` tokens are reserved. A page of a PDF has about as many.
const DOCUMENT_PART: u64 = 64 << 10;

/// The maximum numbers of output tokens in a request body, by their position in the body. `None` if the body has no
/// maximum at a position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputBounds {
    /// The largest maximum at the root.
    pub root: Option<u64>,
    /// `max_tokens` or `max_completion_tokens`, whichever is larger.
    pub max_tokens: Option<u64>,
    /// `max_output_tokens` of OpenAI's Responses API.
    pub max_output_tokens: Option<u64>,
    /// `max_tokens_to_sample` of Anthropic's Text Completions API.
    pub max_tokens_to_sample: Option<u64>,
    /// The maximum in `generationConfig`, as for Gemini.
    pub generation_config: Option<u64>,
    /// The maximum in `options`, as for Ollama.
    pub options: Option<u64>,
    /// The maximum in `inferenceConfig`, as for Bedrock Converse.
    pub inference_config: Option<u64>,
    /// The maximum in `parameters` or `completion_args`, as for several servers whose operations are unknown.
    pub parameters: Option<u64>,
    /// The largest maximum of a fallback (LiteLLM), which replaces that of the request.
    pub fallback: Option<u64>,
}

impl OutputBounds {
    /// Return the maximum that an operation uses, or `default` if the body has none. For OpenAI, return the largest of
    /// all values, because the server may be an OpenAI-compatible server that uses any of the positions. A maximum that
    /// only other operations use does not replace `default`: the server may ignore it.
    fn of(self, operation: Option<&Operation>, default: u64) -> u64 {
        let own = operation.map_or(RootMaximum::Unknown, Operation::root_maximum);
        let own = match own {
            RootMaximum::MaxTokens => self.max_tokens,
            RootMaximum::MaxOutputTokens => self.max_output_tokens,
            RootMaximum::MaxTokensToSample => self.max_tokens_to_sample,
            RootMaximum::OfModel => self.root,
            RootMaximum::Unknown => None,
        };
        match operation.map_or(Provider::OpenAi, |operation| operation.provider) {
            Provider::OpenAi => {
                let nested = self.generation_config.max(self.options).max(self.inference_config).max(self.parameters);
                own.unwrap_or(default).max(self.root.max(nested).max(self.fallback).unwrap_or(0))
            }
            Provider::Anthropic => own.unwrap_or(default),
            Provider::Gemini => self.generation_config.unwrap_or(default),
            Provider::Ollama => self.options.unwrap_or(default),
            Provider::Bedrock => self.inference_config.unwrap_or(default),
        }
    }
}

/// The reason why a body cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The body cannot be read as JSON.
    #[error(transparent)]
    Body(#[from] JsonError),
    /// The body is not a JSON object.
    #[error("the request body is not a JSON object: it is another JSON value")]
    NoObject,
    /// A key that determines the cost is invalid.
    #[error("{0}")]
    Key(String),
}

/// Parameters for the estimate of tokens before the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputEstimate {
    /// Number of bytes of text per token. `None`: an estimate by the classes of the bytes.
    pub bytes_per_token: Option<u64>,
    /// Estimated tokens of an image. `None`: the formula of the API.
    pub image: Option<u64>,
    /// Estimated tokens of an audio part.
    pub audio: u64,
    /// Estimated tokens of each started [`DOCUMENT_PART`] bytes of a document or video.
    pub document: u64,
    /// Maximum number of output tokens to reserve per choice. `None`: the maximum of the request.
    pub max_output: Option<u64>,
    /// Assumed number of output tokens per choice, if the request has no maximum.
    pub default_output: u64,
}

impl InputEstimate {
    /// Return the estimated input tokens of a request to this provider and these models.
    pub fn input<'m>(
        &self,
        info: &RequestInfo,
        provider: Provider,
        models: &(impl Iterator<Item = &'m str> + Clone),
    ) -> u64 {
        let text = match self.bytes_per_token {
            Some(bytes) => info.text_bytes.div_ceil(bytes.max(1)),
            None => info.text.tokens(),
        };
        if info.media == Media::default() {
            return text;
        }
        let Media { images, sized, audio, document_parts, files } = info.media;
        let largest = |of: &dyn Fn(ImageScale) -> u64| {
            models.clone().map(ImageScale::of).map(of).fold(of(ImageScale::Standard), u64::max)
        };
        let unknown_image = self.image.unwrap_or_else(|| largest(&ImageScale::unknown_image));
        let sized = match self.image {
            Some(tokens) => sized.count.saturating_mul(tokens),
            None => largest(&|scale| sized.tokens(provider, scale)),
        };
        let parts = [
            (images, unknown_image),
            (audio, self.audio),
            (document_parts, self.document),
            (files, self.document.max(unknown_image)),
        ];
        let parts = parts.into_iter().map(|(count, tokens)| count.saturating_mul(tokens));
        parts.fold(text.saturating_add(sized), u64::saturating_add)
    }

    /// Return the number of bytes per token of a streamed text.
    pub fn output_bytes_per_token(&self) -> u64 {
        self.bytes_per_token.unwrap_or(OUTPUT_BYTES_PER_TOKEN)
    }

    /// Return the maximum number of output tokens of all choices of a request. `operation` is `None` if it is unknown.
    pub fn output(&self, info: &RequestInfo, operation: Option<&Operation>) -> u64 {
        self.capped(info.bounds.of(operation, self.default_output)).saturating_mul(info.choices)
    }

    /// Return the maximum number of output tokens of all requests of a batch.
    pub fn batch_output(&self, info: &RequestInfo) -> u64 {
        let Batch { requests, bounded, output } = info.batch;
        requests.saturating_sub(bounded).saturating_mul(self.default_output).saturating_add(output)
    }

    fn capped(&self, output: u64) -> u64 {
        self.max_output.map_or(output, |max| output.min(max))
    }
}

/// Read a request body.
///
/// # Errors
/// The body is not a JSON object. Or a key that determines the cost occurs twice or in different spellings, or has an
/// invalid value.
pub fn inspect(body: &[u8]) -> Result<RequestInfo, RequestError> {
    match inspect_with(body, Collector::default()) {
        Ok((info, _)) => info,
        Err(error) => Err(RequestError::Body(error)),
    }
}

/// Read a request body as [`inspect`] does, and collect other values in the same pass.
///
/// # Errors
/// The body is not JSON, is nested too deeply, or has too many values.
pub fn inspect_with(
    body: &[u8],
    collector: Collector,
) -> Result<(Result<RequestInfo, RequestError>, JsonBody), JsonError> {
    let position = collector.root();
    let mut reader = Reader { collector, body_start: address(body), body_length: body.len(), ..Reader::default() };
    let root = ValueSeed { reader: &mut reader, place: Place::Root, position, text: TextUse::Discarded };
    let result = deserialize(body, root);
    let is_object = matches!(reader.collector.check(result)?, Found::Object);
    let Reader { mut info, media_bytes, media_ranges, media_text, prompts, error, collector, .. } = reader;
    info.text = text_tokens(body, media_ranges).without(media_text);
    info.text_bytes = (body.len() as u64).saturating_sub(media_bytes);
    info.choices = info.choices.max(1).saturating_mul(prompts.max(1));
    let info = match error {
        Some(error) => Err(RequestError::Key(error)),
        None if !is_object => Err(RequestError::NoObject),
        None => Ok(info),
    };
    Ok((info, collector.finish()))
}

/// Return the address of a text, from which its position in the body is computed.
fn address(text: &[u8]) -> usize {
    text.as_ptr().addr()
}

/// Return the tokens of a body without the parts at these ranges.
fn text_tokens(body: &[u8], mut ranges: Vec<Range<usize>>) -> TextTokens {
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut tokens, mut at) = (TextTokens::default(), 0);
    for Range { start, end } in ranges {
        tokens.read(body.get(at..start).unwrap_or_default());
        at = at.max(end);
    }
    tokens.read(body.get(at..).unwrap_or_default());
    tokens
}

/// Return the body with `stream_options.include_usage` set to true, which makes OpenAI report the usage of a stream.
/// The body must be a JSON object.
pub fn with_usage_option(body: &[u8]) -> Vec<u8> {
    let member = member_value(body, "stream_options");
    let options = match member.clone().map(|range| &body[range]) {
        Some(options) if options.starts_with(b"{") => {
            with_member(options, member_value(options, "include_usage").as_ref(), "include_usage", b"true")
        }
        Some(_) | None => br#"{"include_usage":true}"#.to_vec(),
    };
    with_member(body, member.as_ref(), "stream_options", &options)
}

/// Return a name of models in which `replacement` replaces names. A name with commas stands for several models. Return
/// `None` if no name is replaced.
pub fn renamed<'n>(name: &str, replacement: impl Fn(&str) -> Option<&'n str>) -> Option<Cow<'n, str>> {
    if let Some(whole) = replacement(name) {
        return Some(whole.into());
    }
    let names = || name.split(',').map(str::trim);
    if !name.contains(',') || names().all(|name| replacement(name).is_none()) {
        return None;
    }
    let replaced: Vec<_> = names().map(|name| replacement(name).unwrap_or(name)).collect();
    Some(replaced.join(",").into())
}

/// Return the body with other names of models, where the request names the models that the server may use. The body
/// must be a JSON object.
///
/// # Errors
/// A client can repeat a short alias of a long name. The body would grow beyond a bound.
pub fn with_models<'n>(body: &[u8], replacement: impl Fn(&str) -> Option<&'n str>) -> Result<Vec<u8>, RequestError> {
    let mut names = Vec::new();
    let lists = ["model", "models", "fallbacks", "context_window_fallbacks", "content_policy_fallbacks"];
    for range in lists.iter().filter_map(|member| member_value(body, member)) {
        find_models(body, range.start, &mut names);
    }
    if let Some(requests) = member_value(body, "requests") {
        find_models_of_batch(body, requests.start, &mut names);
    }
    names.sort_unstable_by_key(|name| name.start);
    let mut changed = Vec::with_capacity(body.len());
    let mut at = 0;
    let max_length = body.len() + body.len() / 4 + MAX_RENAMED_GROWTH;
    for range in names {
        let name = serde_json::from_slice::<Cow<'_, str>>(&body[range.clone()]).unwrap_or_default();
        if let Some(renamed) = renamed(&name, &replacement) {
            changed.extend_from_slice(&body[at..range.start]);
            changed.extend_from_slice(serde_json::Value::from(renamed).to_string().as_bytes());
            at = range.end;
        }
        if changed.len() + body.len() - at > max_length {
            return Err(RequestError::Key("the request names models too often".to_owned()));
        }
    }
    changed.extend_from_slice(&body[at..]);
    Ok(changed)
}

/// Number of bytes by which aliases of models may lengthen a body, in addition to a quarter of its length.
const MAX_RENAMED_GROWTH: usize = 64 << 10;

/// Find the strings that name models in a value at the place [`Place::Models`]. Return the end of the value.
fn find_models(json: &[u8], start: usize, names: &mut Vec<Range<usize>>) -> usize {
    match json.get(start) {
        Some(b'"') => {
            let end = value_end(json, start);
            names.push(start..end);
            end
        }
        Some(b'[') => each_element(json, start, |at| find_models(json, at, names)),
        Some(b'{') => each_member(json, start, |key, at| match place_of(Place::Models, key) {
            Place::Models => find_models(json, at, names),
            _ => value_end(json, at),
        }),
        Some(_) | None => value_end(json, start),
    }
}

/// Find the models of the requests in a batch of Anthropic. Return the end of the batch.
fn find_models_of_batch(json: &[u8], start: usize, names: &mut Vec<Range<usize>>) -> usize {
    let mut find = |at| {
        each_member(json, at, |key, at| match key {
            "params" => each_member(json, at, |key, at| match key {
                "model" => find_models(json, at, names),
                _ => value_end(json, at),
            }),
            _ => value_end(json, at),
        })
    };
    each_element(json, start, &mut find)
}

/// Call `visit` with the start of each element of a JSON array. `visit` returns the end of the element. Return the end
/// of the array, or of another value.
fn each_element(json: &[u8], start: usize, mut visit: impl FnMut(usize) -> usize) -> usize {
    if json.get(start) != Some(&b'[') {
        return value_end(json, start);
    }
    let mut at = skip_space(json, start + 1);
    while json.get(at).is_some_and(|byte| *byte != b']') {
        at = skip_space(json, visit(at));
        if json.get(at) != Some(&b',') {
            break;
        }
        at = skip_space(json, at + 1);
    }
    at + 1
}

/// Call `visit` with each key of a JSON object and the start of its value. `visit` returns the end of the value. Return
/// the end of the object, or of another value.
fn each_member(json: &[u8], start: usize, mut visit: impl FnMut(&str, usize) -> usize) -> usize {
    if json.get(start) != Some(&b'{') {
        return value_end(json, start);
    }
    let mut at = skip_space(json, start + 1);
    while let Some(key_end) = string_end(json, at) {
        let key = serde_json::from_slice::<Cow<'_, str>>(&json[at..key_end]).unwrap_or_default();
        let value = skip_space(json, skip_space(json, key_end) + 1);
        at = skip_space(json, visit(&key, value));
        if json.get(at) != Some(&b',') {
            break;
        }
        at = skip_space(json, at + 1);
    }
    at + 1
}

/// Return a JSON object in which the member `name` has this value. `existing` is the range of the value of this member.
/// If it is `None`, add the member.
fn with_member(object: &[u8], existing: Option<&Range<usize>>, name: &str, value: &[u8]) -> Vec<u8> {
    if let Some(Range { start, end }) = existing {
        return [&object[..*start], value, &object[*end..]].concat();
    }
    let start = object.iter().position(|byte| *byte == b'{').map_or(0, |brace| brace + 1);
    let rest = &object[start..];
    let separator: &[u8] = if rest.trim_ascii_start().starts_with(b"}") { b"" } else { b"," };
    [&object[..start], b"\"", name.as_bytes(), b"\":", value, separator, rest].concat()
}

/// Return the byte range of the value of a member in a valid JSON object. Return `None` if there is no such member.
fn member_value(object: &[u8], name: &str) -> Option<Range<usize>> {
    let mut at = object.iter().position(|byte| *byte == b'{')? + 1;
    loop {
        at = skip_space(object, at);
        let key_end = string_end(object, at)?;
        let key = &object[at..key_end];
        let is_found = match memchr(b'\\', key) {
            None => key[1..key.len() - 1] == *name.as_bytes(),
            Some(_) => serde_json::from_slice::<Cow<'_, str>>(key).is_ok_and(|key| key == name),
        };
        let start = skip_space(object, skip_space(object, key_end) + 1);
        let end = value_end(object, start);
        if is_found {
            return Some(start..end);
        }
        at = skip_space(object, end) + 1;
    }
}

fn skip_space(json: &[u8], at: usize) -> usize {
    at + json.get(at..).map_or(0, |rest| rest.len() - rest.trim_ascii_start().len())
}

/// Return the end of the string that begins at `start`. Return `None` if no string begins there.
fn string_end(json: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    json.get(start).filter(|byte| **byte == b'"')?;
    while let Some(offset) = memchr2(b'"', b'\\', json.get(at..)?) {
        match json[at + offset] {
            b'"' => return Some(at + offset + 1),
            _ => at += offset + 2,
        }
    }
    None
}

/// Return the end of the value that begins at `start`.
fn value_end(json: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_u32);
    while let Some(byte) = json.get(at) {
        match byte {
            b'"' => {
                at = string_end(json, at).unwrap_or(json.len());
                if depth == 0 {
                    break;
                }
                continue;
            }
            b'{' | b'[' => depth += 1,
            b',' | b'}' | b']' if depth == 0 => break,
            b'}' | b']' if depth == 1 => return at + 1,
            b'}' | b']' => depth -= 1,
            _ if depth == 0 && byte.is_ascii_whitespace() => break,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Return the model in a canonical path. The paths of Gemini (`/v1beta/models/NAME:generateContent`), Bedrock
/// (`/model/NAME/converse`) and Azure (`/openai/deployments/NAME/chat/completions`) contain it. Azure ignores case.
pub fn model_in_path(path: &str) -> Option<Cow<'_, str>> {
    let name = percent_decode_str(&path[model_range(path)?]).decode_utf8_lossy();
    (!name.is_empty() && name.len() <= MAX_MODEL).then_some(name)
}

/// Return a canonical path with another model, or `None` if the path contains no model.
pub fn with_model_in_path(path: &str, model: &str) -> Option<String> {
    let Range { start, end } = model_range(path)?;
    Some(format!("{}{}{}", &path[..start], utf8_percent_encode(model, SEGMENT), &path[end..]))
}

/// The characters of a model that are percent-encoded in a path: all but the unreserved ones (RFC 3986 §2.3).
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Return the position of the model in a canonical path.
fn model_range(path: &str) -> Option<Range<usize>> {
    let mut start = 0;
    let mut segments = path.split('/').map(|segment| {
        let range = start..start + segment.len();
        start = range.end + 1;
        range
    });
    let kind = segments.find_map(|range| {
        let is = |kind: &&str| path[range.clone()].eq_ignore_ascii_case(kind);
        ["models", "tunedModels", "model", "deployments"].into_iter().find(is)
    })?;
    match kind {
        "model" | "deployments" => segments.next().filter(|_| segments.next().is_some()),
        // `/models/cheap:x/v1/chat/completions` names no model for a server that reads only the end of the path.
        _ => {
            let last = segments.next().filter(|_| segments.next().is_none())?;
            Some(last.start..last.start + path[last].find(':')?)
        }
    }
}

/// The values that are collected while a body is read.
#[derive(Debug, Default)]
struct Reader {
    info: RequestInfo,
    /// Number of bytes of images and audio in the body.
    media_bytes: u64,
    /// The positions of images, audio and documents in the body.
    media_ranges: Vec<Range<usize>>,
    /// The tokens of images, audio and documents that are written with escape sequences, so their position is unknown.
    media_text: TextTokens,
    /// The address and the length of the body.
    body_start: usize,
    body_length: usize,
    /// Number of prompts in a request to the Completions API.
    prompts: u64,
    /// Bit set of the keys that have been read, with one bit for each [`Known`] key.
    seen: u64,
    /// The first error in a key that determines the cost.
    error: Option<String>,
    /// Buffer for the comparison of keys.
    folded: Vec<u8>,
    /// Collects the values that routes and identities of limits need.
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
    /// `inferenceConfig` of Bedrock Converse.
    InferenceConfig,
    /// `parameters` of Hugging Face, Vertex AI and DashScope, and `completion_args` of Mistral's Conversations API.
    Parameters,
    /// `stream_options` of OpenAI.
    StreamOptions,
    /// The value is within the messages. Only messages can contain images and audio.
    Content,
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
    /// `data` of an object with a media type, or `bytes` of a `source` of Bedrock.
    Data,
    /// `image` of Bedrock.
    Image,
    /// `source` of an `image` of Bedrock.
    ImageSource,
    /// `document` or `video` of Bedrock.
    Document,
    /// `source` of a `document` or `video` of Bedrock.
    DocumentSource,
    /// `file` of OpenAI, and `file_data` in it.
    File,
    /// The name of an uploaded file, or a link to a file that may be an image or a document.
    FileLink,
    /// `models` of OpenRouter, and `fallbacks` of LiteLLM.
    Models,
    /// `service_tier` of OpenAI, `speed` of Anthropic, `serviceTier` of Bedrock.
    Tier,
    /// `requests` of a batch of Anthropic.
    Batch,
    /// `params` of a request in a batch.
    BatchParams,
    /// `model` of a request in a batch.
    BatchModel,
    /// The maximum number of output tokens of a request in a batch.
    BatchBound,
    /// The maximum number of output tokens of a fallback.
    FallbackBound,
    Elsewhere,
}

/// A key that determines the cost. The comparison of keys ignores case and `_`, because Gemini accepts
/// `maxOutputTokens` and `max_output_tokens`, and servers written in Go ignore case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Model,
    Stream,
    Background,
    IncludeUsage,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MaxNewTokens,
    NPredict,
    GenerationMaxOutputTokens,
    NumPredict,
    InferenceMaxTokens,
    N,
    BestOf,
    CandidateCount,
    NumGenerations,
    GenerationConfig,
    Options,
    InferenceConfig,
    StreamOptions,
    Prompt,
    MaxTokensToSample,
    Models,
    Fallbacks,
    ContextFallbacks,
    PolicyFallbacks,
    ServiceTier,
    Speed,
    Performance,
    Requests,
    Parameters,
    CompletionArgs,
    ParametersMax,
}

/// The keys that determine the cost, in the spellings that providers document. Gemini accepts keys in camel case and in
/// snake case, as Protocol Buffers do.
const KNOWN_KEYS: [(Place, &str, Known); 43] = [
    (Place::Root, "model", Known::Model),
    (Place::Root, "stream", Known::Stream),
    (Place::Root, "background", Known::Background),
    (Place::Root, "max_tokens", Known::MaxTokens),
    (Place::Root, "max_completion_tokens", Known::MaxCompletionTokens),
    (Place::Root, "max_output_tokens", Known::MaxOutputTokens),
    (Place::Root, "max_new_tokens", Known::MaxNewTokens),
    // The Text Completions API of Anthropic.
    (Place::Root, "max_tokens_to_sample", Known::MaxTokensToSample),
    // OpenRouter and LiteLLM.
    (Place::Root, "models", Known::Models),
    (Place::Root, "fallbacks", Known::Fallbacks),
    (Place::Root, "context_window_fallbacks", Known::ContextFallbacks),
    (Place::Root, "content_policy_fallbacks", Known::PolicyFallbacks),
    (Place::Root, "service_tier", Known::ServiceTier),
    (Place::Root, "serviceTier", Known::ServiceTier),
    (Place::Root, "speed", Known::Speed),
    (Place::Root, "performanceConfig", Known::Performance),
    (Place::Root, "requests", Known::Requests),
    // Llama and Titan on Bedrock.
    (Place::Root, "max_gen_len", Known::MaxNewTokens),
    (Place::Root, "textGenerationConfig", Known::GenerationConfig),
    (Place::GenerationConfig, "maxTokenCount", Known::GenerationMaxOutputTokens),
    (Place::Root, "n_predict", Known::NPredict),
    (Place::Root, "n", Known::N),
    (Place::Root, "best_of", Known::BestOf),
    (Place::Root, "num_generations", Known::NumGenerations),
    (Place::Root, "generation_config", Known::GenerationConfig),
    (Place::Root, "generationConfig", Known::GenerationConfig),
    (Place::Root, "options", Known::Options),
    (Place::Root, "inferenceConfig", Known::InferenceConfig),
    (Place::Root, "stream_options", Known::StreamOptions),
    (Place::Root, "prompt", Known::Prompt),
    (Place::GenerationConfig, "max_output_tokens", Known::GenerationMaxOutputTokens),
    (Place::GenerationConfig, "maxOutputTokens", Known::GenerationMaxOutputTokens),
    (Place::GenerationConfig, "candidate_count", Known::CandidateCount),
    (Place::GenerationConfig, "candidateCount", Known::CandidateCount),
    (Place::Options, "num_predict", Known::NumPredict),
    (Place::InferenceConfig, "maxTokens", Known::InferenceMaxTokens),
    // Nova on Bedrock.
    (Place::InferenceConfig, "max_new_tokens", Known::InferenceMaxTokens),
    (Place::StreamOptions, "include_usage", Known::IncludeUsage),
    (Place::Root, "parameters", Known::Parameters),
    (Place::Root, "completion_args", Known::CompletionArgs),
    (Place::Parameters, "max_new_tokens", Known::ParametersMax),
    (Place::Parameters, "max_tokens", Known::ParametersMax),
    (Place::Parameters, "maxOutputTokens", Known::ParametersMax),
];

/// For each place that has [`KNOWN_KEYS`], an index of their names. The number of a name is its index in the list.
static KNOWN_NAMES: LazyLock<[(Place, NameIndex); 6]> = LazyLock::new(|| {
    let index = |place| {
        let names = KNOWN_KEYS.iter().map(|(at, name, _)| (*at == place).then_some(*name));
        (place, NameIndex::new(names, Some('_')))
    };
    let places = [
        Place::Root,
        Place::GenerationConfig,
        Place::Options,
        Place::InferenceConfig,
        Place::StreamOptions,
        Place::Parameters,
    ];
    places.map(index)
});

/// The result of comparing a key with [`KNOWN_KEYS`].
enum KeyMatch {
    Known(Known, &'static str),
    /// A key that differs from a documented spelling only in case or `_`. Some servers ignore these differences.
    OtherSpelling(&'static str),
    Other,
}

fn match_key(place: Place, key: &str, buffer: &mut Vec<u8>) -> KeyMatch {
    let Some((_, names)) = KNOWN_NAMES.iter().find(|(at, _)| *at == place) else { return KeyMatch::Other };
    let mut similar = bits(names.similar(u64::MAX, key, buffer)).map(|number| KNOWN_KEYS[number]).peekable();
    let Some((_, first, _)) = similar.peek().copied() else { return KeyMatch::Other };
    match similar.find(|(_, name, _)| *name == key) {
        Some((_, name, known)) => KeyMatch::Known(known, name),
        None => KeyMatch::OtherSpelling(first),
    }
}

/// Return the position of the value of `key`, which does not determine the cost.
fn place_of(parent: Place, key: &str) -> Place {
    match (parent, key) {
        (Place::Root, "messages" | "contents" | "input" | "system" | "systemInstruction" | "system_instruction") => {
            Place::Content
        }
        (Place::Root | Place::Content, "images") => Place::Images,
        (Place::ImageUrl, "url") => Place::ImageUrl,
        // The arguments and results of tools count as text, never as images or audio.
        (Place::Content, "input" | "args" | "response" | "arguments") => Place::Elsewhere,
        (Place::Content, "image_url" | "imageUrl") => Place::ImageUrl,
        (Place::Content, "input_audio") => Place::InputAudio,
        (Place::Content, "source") => Place::Source,
        (Place::Content, "file_data" | "fileData") => Place::FileData,
        (Place::Content | Place::Source | Place::InputAudio, "data") => Place::Data,
        (Place::Content, "file") => Place::File,
        (Place::File, "file_data") => Place::FileData,
        (Place::Content, "image") => Place::Image,
        (Place::Image, "source") => Place::ImageSource,
        (Place::Content, "document" | "video") => Place::Document,
        (Place::Document, "source") => Place::DocumentSource,
        (Place::ImageSource | Place::DocumentSource, "bytes") => Place::Data,
        (Place::ImageSource | Place::DocumentSource, "s3Location") => Place::FileLink,
        (Place::FileLink, "uri") => Place::FileLink,
        (Place::Content | Place::File, "file_id" | "file_url") => Place::FileLink,
        // The messages of a fallback are not models.
        (Place::Models, "messages" | "prompt" | "input" | "tools") => Place::Elsewhere,
        (Place::Models, "max_tokens" | "max_completion_tokens" | "max_output_tokens") => Place::FallbackBound,
        (Place::Models, _) => Place::Models,
        (Place::Tier, "type" | "latency") => Place::Tier,
        (Place::Batch, "params") => Place::BatchParams,
        (Place::BatchParams, "model") => Place::BatchModel,
        (Place::BatchParams, "max_tokens") => Place::BatchBound,
        (Place::BatchParams, "messages" | "system") => Place::Content,
        (Place::BatchParams, "service_tier" | "speed") => Place::Tier,
        (Place::Content, _) => Place::Content,
        _ => Place::Elsewhere,
    }
}

/// A value that was read.
#[derive(Debug)]
enum Found<'de> {
    Null,
    Bool(bool),
    /// An integer, or `None` if it is negative. An integer that is too large becomes the maximum of `u64`.
    Count(Option<u64>),
    /// A number with a fraction.
    Fraction,
    /// A string. It is empty if the text is not used.
    Text(Cow<'de, str>),
    /// A base64 string that may be an image, audio or a document.
    Base64(Base64Data),
    /// An array. The field is the number of its elements that are strings or arrays.
    Array(u64),
    /// A `source` of Anthropic that is a link or an uploaded file. The object around it says whether it is an image.
    Link,
    Object,
}

/// A base64 string: its length in bytes, and its size in pixels if it is an image.
#[derive(Debug, Clone, Default)]
struct Base64Data {
    length: u64,
    size: Option<ImageSize>,
    text: Base64Text,
}

/// Where the text of a base64 string is, which does not count as text.
#[derive(Debug, Clone)]
enum Base64Text {
    At(Range<usize>),
    /// It is written with escape sequences, such as `\/`. These are its tokens.
    Escaped(TextTokens),
}

impl Default for Base64Text {
    fn default() -> Self {
        Base64Text::At(0..0)
    }
}

/// Return whether a text may be base64 (RFC 4648 §4, §5).
fn is_base64(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'='))
}

/// Whether the text of a string is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextUse {
    /// The caller uses the text.
    Kept,
    /// The text is discarded, so it is not copied.
    Discarded,
}

/// Reads a value of any type.
struct ValueSeed<'r> {
    reader: &'r mut Reader,
    place: Place,
    position: Position,
    text: TextUse,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Found<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Found<'de>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl ValueSeed<'_> {
    /// Read a string. Return what it is, or `None` if it is text.
    fn text<'de>(self, text: &str) -> Option<Found<'de>> {
        let ValueSeed { reader, place, position, .. } = self;
        reader.collector.value(position, || text_value(text));
        let data_url = || text.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
        match place {
            Place::ImageUrl | Place::FileData => match data_url() {
                None if place == Place::ImageUrl => reader.info.media.images += 1,
                Some((media_type, data)) if data.len() >= MIN_BASE64 && is_base64(data) => {
                    let data = reader.base64(data);
                    reader.add_media(media_type, data);
                }
                None | Some(_) => {}
            },
            Place::FileLink => reader.info.media.files += 1,
            Place::Models | Place::BatchModel => reader.add_model(text),
            Place::Tier => reader.add_tier(text),
            Place::Images if text.len() >= MIN_BASE64 && is_base64(text) => {
                let data = reader.base64(text);
                reader.add_media("image/", data);
            }
            Place::Data if text.len() >= MIN_BASE64 && is_base64(text) => {
                return Some(Found::Base64(reader.base64(text)));
            }
            _ => {}
        }
        None
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
        self.reader.add_nested_bound(self.place, value);
        Ok(Found::Count(Some(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Integer(value.into()));
        // serde_json calls this function only for negative integers.
        Ok(Found::Count(None))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Found<'de>, E> {
        self.reader.collector.value(self.position, || JsonValue::Fraction);
        self.reader.add_nested_bound(self.place, value.ceil() as u64);
        Ok(match value.fract() == 0.0 {
            // The cast with `as` saturates.
            true => Found::Count((value >= 0.0).then_some(value as u64)),
            false => Found::Fraction,
        })
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Found<'de>, E> {
        Ok(self.text(text).unwrap_or(Found::Text(Cow::Borrowed(text))))
    }

    fn visit_str<E>(self, text: &str) -> Result<Found<'de>, E> {
        let is_kept = self.text == TextUse::Kept;
        let kept = || if is_kept { text.to_owned() } else { String::new() };
        Ok(self.text(text).unwrap_or_else(|| Found::Text(Cow::Owned(kept()))))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Found<'de>, A::Error> {
        let ValueSeed { reader, place, position: array, .. } = self;
        let is_list = matches!(place, Place::Images | Place::Content | Place::Models | Place::Batch);
        let place = if is_list { place } else { Place::Elsewhere };
        reader.collector.count_container()?;
        reader.collector.value(array, || JsonValue::Compound);
        let mut elements = reader.collector.elements(array);
        let mut prompts = 0;
        loop {
            let position = match reader.collector.element(&mut elements) {
                Some(position) => position,
                None if place == Place::Elsewhere => break,
                None => Collector::irrelevant_element(array),
            };
            let element = ValueSeed { reader, place, position, text: TextUse::Discarded };
            let Some(found) = seq.next_element_seed(element)? else {
                reader.collector.array_end(array);
                return Ok(Found::Array(prompts));
            };
            reader.collector.count_element()?;
            prompts += u64::from(matches!(found, Found::Text(_) | Found::Array(_)));
        }
        // Neither the cost nor a pointer depends on the other elements.
        while let Some(skipped) = seq.next_element_seed(Skip(&mut reader.collector))? {
            reader.collector.count_element()?;
            prompts += u64::from(skipped == Skipped::TextOrArray);
        }
        reader.collector.array_end(array);
        Ok(Found::Array(prompts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
        let ValueSeed { reader, place, position: object, .. } = self;
        if place == Place::Elsewhere && object.is_irrelevant() {
            Skip(&mut reader.collector).visit_map(map)?;
            return Ok(Found::Object);
        }
        reader.collector.count_container()?;
        reader.collector.value(object, || JsonValue::Compound);
        let mut seen = SeenMembers::default();
        let mut base64 = Base64Data::default();
        let mut media_type = None;
        let mut is_linked_source = false;
        let mut kinds = PartKinds::default();
        if place == Place::BatchParams {
            reader.info.batch.requests += 1;
        }
        while let Some(member) = map.next_key_seed(KeySeed { reader, place, object, seen: &mut seen })? {
            let (position, place, role) = match member {
                Member::Known { known, name, position } => {
                    reader.read_known(known, name, position, &mut map)?;
                    continue;
                }
                Member::Other { position, place, role } => (position, place, role),
            };
            let text = if role == Role::Other { TextUse::Discarded } else { TextUse::Kept };
            match (role, map.next_value_seed(ValueSeed { reader, place, position, text })?) {
                (_, Found::Base64(data)) => base64 = data,
                (Role::MediaType, Found::Text(text)) => media_type = Some(text),
                (Role::Type, Found::Text(text)) => kinds.add(&text),
                (_, Found::Link) => is_linked_source = true,
                _ => {}
            }
        }
        reader.collector.object_end(object);
        let kind = match place {
            Place::InputAudio => Some("audio/"),
            Place::Source if kinds.is_link => return Ok(Found::Link),
            Place::ImageSource => Some("image/"),
            Place::DocumentSource => Some("application/pdf"),
            _ => media_type.as_deref(),
        };
        match kind {
            Some(kind) if base64.length > 0 => reader.add_media(kind, base64),
            Some(kind) if place == Place::FileData => reader.add_link(kind),
            None if place == Place::FileData => reader.info.media.files += 1,
            Some(_) | None => {}
        }
        match is_linked_source {
            true if kinds.is_only_image => reader.info.media.images += 1,
            true => reader.info.media.files += 1,
            false => {}
        }
        Ok(Found::Object)
    }
}

/// The values of `type` in an object.
#[derive(Debug, Default)]
struct PartKinds {
    /// Whether a source is a link or an uploaded file.
    is_link: bool,
    /// Whether `image` is the only value.
    is_only_image: bool,
    has_other: bool,
}

impl PartKinds {
    fn add(&mut self, kind: &str) {
        self.is_link |= matches!(kind, "url" | "file");
        self.has_other |= kind != "image";
        self.is_only_image = !self.has_other;
    }
}

/// Reads the key of a member.
struct KeySeed<'r> {
    reader: &'r mut Reader,
    place: Place,
    object: Position,
    seen: &'r mut SeenMembers,
}

/// The key of a member.
enum Member {
    /// A key that determines the cost.
    Known { known: Known, name: &'static str, position: Position },
    /// Another key.
    Other { position: Position, place: Place, role: Role },
}

/// The use of a member that does not determine the cost by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The media type of the data in the same object.
    MediaType,
    /// The type of a part of the content or of its source.
    Type,
    Other,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Member;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Member, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Member;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Member, E> {
        let KeySeed { reader, place, object, seen } = self;
        reader.collector.count_member()?;
        let position = reader.collector.member(object, seen, key);
        match match_key(place, key, &mut reader.folded) {
            KeyMatch::Known(known, name) => return Ok(Member::Known { known, name, position }),
            KeyMatch::OtherSpelling(name) => {
                reader.fail(|| format!("some servers may read `{}` as `{name}`: write `{name}`", shortened(key)));
            }
            KeyMatch::Other => {}
        }
        let role = match key {
            "media_type" | "mimeType" | "mime_type" => Role::MediaType,
            "type" if matches!(place, Place::Content | Place::Source) => Role::Type,
            _ => Role::Other,
        };
        Ok(Member::Other { position, place: place_of(place, key), role })
    }
}

impl Reader {
    /// Record the maximum number of output tokens of a request in a batch or of a fallback.
    fn add_nested_bound(&mut self, place: Place, bound: u64) {
        if place == Place::BatchBound {
            self.info.batch.add_bound(bound);
        } else if place == Place::FallbackBound {
            self.info.bounds.fallback = self.info.bounds.fallback.max(Some(bound));
        }
    }

    /// Record a further model that the server may use. A name with commas stands for several models (LiteLLM).
    fn add_model(&mut self, name: &str) {
        // Bound the length as well: the same name can occur several times.
        if name.len() > MAX_OTHER_MODELS * MAX_MODEL {
            return self.fail(|| format!("a list of models is longer than {} bytes", MAX_OTHER_MODELS * MAX_MODEL));
        }
        for name in name.split(',').map(str::trim) {
            let others = &mut self.info.other_models;
            if name.is_empty() || others.iter().any(|other| **other == *name) {
                continue;
            }
            if others.len() == MAX_OTHER_MODELS || name.len() > MAX_MODEL {
                return self.fail(|| {
                    format!(
                        "the request body names more than {MAX_OTHER_MODELS} models, or one with more than {MAX_MODEL} bytes"
                    )
                });
            }
            others.push(name.into());
        }
    }

    /// Record a service tier. If there are several, keep the one that is usually the most expensive.
    fn add_tier(&mut self, name: &str) {
        self.info.tier = self.info.tier.max(ServiceTier::requested(name));
    }

    /// Count a link to a part of this media type.
    fn add_link(&mut self, media_type: &str) {
        match media_type.split('/').next() {
            Some("image") => self.info.media.images += 1,
            Some("audio") => self.info.media.audio += 1,
            _ => self.info.media.files += 1,
        }
    }

    /// Describe a base64 string.
    fn base64(&self, text: &str) -> Base64Data {
        let start = address(text.as_bytes()).wrapping_sub(self.body_start);
        let range = start..start.wrapping_add(text.len());
        let text_use = match range.end <= self.body_length && range.start <= range.end {
            true => Base64Text::At(range),
            false => Base64Text::Escaped(TextTokens::of(text.as_bytes())),
        };
        Base64Data { length: text.len() as u64, size: base64_size(text), text: text_use }
    }

    /// Count a part of this media type. The length of `data` is 0 if the part is a link. Other media types count as
    /// text.
    fn add_media(&mut self, media_type: &str, data: Base64Data) {
        let media = &mut self.info.media;
        match (media_type.split('/').next(), data.size) {
            (Some("image"), Some(size)) => media.sized.add(size),
            (Some("image"), None) => media.images += 1,
            (Some("audio"), _) => media.audio += 1,
            (Some("video"), _) => media.document_parts += (data.length / 4 * 3).div_ceil(DOCUMENT_PART).max(1),
            (Some("application"), _) if media_type.starts_with("application/pdf") => {
                media.document_parts += (data.length / 4 * 3).div_ceil(DOCUMENT_PART).max(1);
            }
            _ => return,
        }
        self.media_bytes += data.length;
        match data.text {
            Base64Text::At(range) => self.media_ranges.push(range),
            Base64Text::Escaped(tokens) => self.media_text = self.media_text.plus(tokens),
        }
    }

    /// Read the value of a key that determines the cost.
    fn read_known<'de, A: MapAccess<'de>>(
        &mut self,
        known: Known,
        key: &'static str,
        position: Position,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let bit = 1 << known as u64;
        let is_repeated = self.seen & bit > 0;
        self.seen |= bit;
        let place = match known {
            Known::GenerationConfig => Place::GenerationConfig,
            Known::Options => Place::Options,
            Known::InferenceConfig => Place::InferenceConfig,
            Known::StreamOptions => Place::StreamOptions,
            Known::Parameters | Known::CompletionArgs => Place::Parameters,
            Known::Models | Known::Fallbacks | Known::ContextFallbacks | Known::PolicyFallbacks => Place::Models,
            Known::ServiceTier | Known::Speed | Known::Performance => Place::Tier,
            Known::Requests => Place::Batch,
            _ => Place::Elsewhere,
        };
        let text = if known == Known::Model { TextUse::Kept } else { TextUse::Discarded };
        let found = map.next_value_seed(ValueSeed { reader: self, place, position, text })?;
        if is_repeated {
            self.fail(|| format!("`{key}` is in the request body more than once"));
            return Ok(());
        }
        match (known, found) {
            (Known::Prompt, found) => {
                if let Found::Array(prompts) = found {
                    self.prompts = prompts;
                }
            }
            (
                Known::GenerationConfig | Known::Options | Known::InferenceConfig | Known::StreamOptions,
                Found::Object,
            )
            | (_, Found::Null) => {}
            (
                Known::Models
                | Known::Fallbacks
                | Known::ContextFallbacks
                | Known::PolicyFallbacks
                | Known::ServiceTier
                | Known::Speed
                | Known::Performance
                | Known::Requests
                | Known::Parameters
                | Known::CompletionArgs,
                _,
            ) => {}
            (Known::Model, Found::Text(model)) if model.len() <= MAX_MODEL => {
                if model.contains(',') {
                    self.info.calls = model.split(',').count() as u64;
                    self.add_model(&model);
                }
                self.info.model = Some(model.into());
            }
            (Known::Model, Found::Text(_)) => self.fail(|| format!("`{key}` is longer than {MAX_MODEL} bytes")),
            (Known::Stream, Found::Bool(is_stream)) => self.info.is_stream = is_stream,
            (Known::Background, Found::Bool(is_background)) => self.info.is_background = is_background,
            (Known::IncludeUsage, Found::Bool(includes)) => self.info.includes_usage = includes,
            // A negative number means no maximum, as in Ollama and llama.cpp.
            (Known::NumPredict | Known::NPredict, Found::Count(None)) => {}
            (
                Known::MaxTokens
                | Known::MaxCompletionTokens
                | Known::MaxOutputTokens
                | Known::MaxNewTokens
                | Known::MaxTokensToSample
                | Known::NPredict
                | Known::GenerationMaxOutputTokens
                | Known::InferenceMaxTokens
                | Known::NumPredict
                | Known::ParametersMax,
                // 0 means no maximum, as in some servers.
                Found::Count(Some(0)),
            ) => {}
            (
                Known::MaxTokens
                | Known::MaxCompletionTokens
                | Known::MaxOutputTokens
                | Known::MaxNewTokens
                | Known::MaxTokensToSample
                | Known::NPredict,
                Found::Count(bound @ Some(_)),
            ) => {
                let bounds = &mut self.info.bounds;
                bounds.root = bounds.root.max(bound);
                match known {
                    Known::MaxOutputTokens => bounds.max_output_tokens = bound,
                    Known::MaxTokensToSample => bounds.max_tokens_to_sample = bound,
                    // Servers differ in which of these keys they use, so keep the largest value.
                    Known::MaxTokens | Known::MaxCompletionTokens => bounds.max_tokens = bounds.max_tokens.max(bound),
                    _ => {}
                }
            }
            (Known::GenerationMaxOutputTokens, Found::Count(bound @ Some(_))) => {
                self.info.bounds.generation_config = bound;
            }
            (Known::NumPredict, Found::Count(bound @ Some(_))) => self.info.bounds.options = bound,
            (Known::ParametersMax, Found::Count(bound @ Some(_))) => self.info.bounds.parameters = bound,
            (Known::InferenceMaxTokens, Found::Count(bound @ Some(_))) => self.info.bounds.inference_config = bound,
            (Known::N | Known::BestOf | Known::CandidateCount | Known::NumGenerations, Found::Count(Some(choices))) => {
                self.info.choices = self.info.choices.max(choices);
            }
            (Known::Model, _) => self.fail(|| format!("`{key}` is not a string")),
            (Known::Stream | Known::Background | Known::IncludeUsage, _) => {
                self.fail(|| format!("`{key}` is not true or false"));
            }
            (Known::GenerationConfig | Known::Options | Known::InferenceConfig | Known::StreamOptions, _) => {
                self.fail(|| format!("`{key}` is not an object"));
            }
            (_, _) => self.fail(|| format!("`{key}` must be an integer of 0 or more")),
        }
        Ok(())
    }

    /// Record the first error. The reader then continues to read the body, because routes and identities need its
    /// values.
    fn fail(&mut self, message: impl FnOnce() -> String) {
        self.error.get_or_insert_with(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ESTIMATE: InputEstimate = InputEstimate {
        bytes_per_token: Some(4),
        image: None,
        audio: 500,
        document: 3000,
        max_output: None,
        default_output: 1024,
    };

    fn bound(body: &str) -> Result<(Option<u64>, u64), String> {
        let largest = |bounds: OutputBounds| {
            bounds.root.max(bounds.generation_config).max(bounds.options).max(bounds.inference_config)
        };
        let bound = |info: RequestInfo| (largest(info.bounds), info.choices);
        inspect(body.as_bytes()).map(bound).map_err(|error| error.to_string())
    }

    #[test]
    fn models_are_replaced_and_all_other_bytes_stay() {
        let replacement = |name: &str| match name {
            "fast" => Some("gpt-5-mini"),
            "a\"b" => Some("é"),
            _ => None,
        };
        for (body, expected) in [
            (r#"{ "model" : "fast" , "x":1.0e2 }"#, r#"{ "model" : "gpt-5-mini" , "x":1.0e2 }"#),
            (r#"{"mod\u0065l":"f\u0061st"}"#, r#"{"mod\u0065l":"gpt-5-mini"}"#),
            (r#"{"model":"a\"b"}"#, r#"{"model":"é"}"#),
            (r#"{"model":"m, fast"}"#, r#"{"model":"m,gpt-5-mini"}"#),
            (
                r#"{"models":[ "fast" ,"m", "fast"],"model":"m"}"#,
                r#"{"models":[ "gpt-5-mini" ,"m", "gpt-5-mini"],"model":"m"}"#,
            ),
            (r#"{"fallbacks":"fast","z":"fast"}"#, r#"{"fallbacks":"gpt-5-mini","z":"fast"}"#),
            (
                r#"{"fallbacks":[{"m":["fast"]},{"messages":"fast","model":"fast","max_tokens":1},[]]}"#,
                r#"{"fallbacks":[{"m":["gpt-5-mini"]},{"messages":"fast","model":"gpt-5-mini","max_tokens":1},[]]}"#,
            ),
            (
                r#"{"requests":[{"custom_id":"fast","params":{"model":"fast","system":"fast"}},{},1]}"#,
                r#"{"requests":[{"custom_id":"fast","params":{"model":"gpt-5-mini","system":"fast"}},{},1]}"#,
            ),
            (
                r#"{"models":{},"fallbacks":[],"requests":{},"model":null}"#,
                r#"{"models":{},"fallbacks":[],"requests":{},"model":null}"#,
            ),
        ] {
            assert_eq!(String::from_utf8(with_models(body.as_bytes(), replacement).unwrap()).unwrap(), expected);
        }
    }

    #[test]
    fn repeated_alias_is_rejected_instead_of_forwarded() {
        let long = "m".repeat(MAX_MODEL);
        let change = |count: usize| {
            let body = serde_json::json!({ "models": vec!["f"; count], "model": "f" }).to_string();
            with_models(body.as_bytes(), |name| (name == "f").then_some(&*long))
        };
        let changed: serde_json::Value = serde_json::from_slice(&change(400).unwrap()).unwrap();
        assert_eq!((&changed["models"][399], &changed["model"]), (&serde_json::json!(long), &serde_json::json!(long)));
        assert!(change(100_000).is_err());
        let list = serde_json::json!({ "models": "f,".repeat(100_000) }).to_string();
        assert!(inspect(list.as_bytes()).is_err_and(|error| error.to_string().contains("longer than 4096 bytes")));
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
            (r#"{"inferenceConfig":{"maxTokens":7}}"#, (Some(7), 1)),
            (r#"{"options":{"num_predict":-1}}"#, (None, 1)),
            (r#"{"options":{"num_predict":0}}"#, (None, 1)),
            (r#"{"max_tokens":0}"#, (None, 1)),
            (r#"{"max_tokens":1,"n_predict":9}"#, (Some(9), 1)),
            (r#"{"max_new_tokens":9}"#, (Some(9), 1)),
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
    fn maximum_of_a_fallback_only_raises_the_output() {
        let estimate = InputEstimate { default_output: 100, max_output: None, ..ESTIMATE };
        for (body, expected) in [
            (r#"{"max_tokens":10,"fallbacks":[{"model":"m","max_tokens":9000}]}"#, 9000),
            (r#"{"max_tokens":10,"fallbacks":["m",{"model":"n","max_tokens":5}]}"#, 10),
            (r#"{"fallbacks":[{"model":"m","max_tokens":5.0}]}"#, 100),
        ] {
            let chat = Operation::of("/v1/chat/completions");
            assert_eq!(estimate.output(&inspect(body.as_bytes()).unwrap(), chat), expected, "{body}");
        }
    }

    #[test]
    fn hostile_bodies_are_rejected() {
        for (body, expected) in [
            (r#"{"max_tokens":1,"max_tokens":9000}"#, "`max_tokens` is in the request body more than once"),
            (r#"{"maxTokens":9000}"#, "some servers may read `maxTokens` as `max_tokens`: write `max_tokens`"),
            (
                r#"{"max_to\u212aens":9000}"#,
                "some servers may read `max_to\u{212a}ens` as `max_tokens`: write `max_tokens`",
            ),
            (r#"{"mo_del":"cheap"}"#, "some servers may read `mo_del` as `model`: write `model`"),
            (r#"{"OPTIONS":{"num_predict":7}}"#, "some servers may read `OPTIONS` as `options`: write `options`"),
            (
                r#"{"options":{"Num_Predict":7}}"#,
                "some servers may read `Num_Predict` as `num_predict`: write `num_predict`",
            ),
            (r#"{"max_tokens":1,"max_token\u0073":9000}"#, "`max_tokens` is in the request body more than once"),
            (r#"{"model":"a","Model":"b"}"#, "some servers may read `Model` as `model`: write `model`"),
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
            ("", "the request body is not JSON: EOF while parsing a value at line 1 column 0"),
            ("[]", "the request body is not a JSON object: it is another JSON value"),
            ("7", "the request body is not a JSON object: it is another JSON value"),
            (r#"{"a":1} {}"#, "the request body is not JSON: trailing characters at line 1 column 9"),
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
    fn bound_is_that_of_the_provider() {
        let several = r#"{"max_tokens":1,"generationConfig":{"maxOutputTokens":2},"options":{"num_predict":3}}"#;
        let (chat, ollama) = ("/v1/chat/completions", "/api/chat");
        for (path, body, expected) in [
            (chat, several, 3),
            ("/v1/messages", several, 1),
            ("/v1beta/models/m:generateContent", several, 2),
            (ollama, several, 3),
            (ollama, r#"{"max_tokens":1}"#, 1024),
            // The keys at the root that only other operations use do not replace the default.
            (chat, r#"{"max_tokens":1}"#, 1),
            (chat, r#"{"max_completion_tokens":1}"#, 1),
            (chat, r#"{"max_output_tokens":1}"#, 1024),
            (chat, r#"{"max_new_tokens":1,"n_predict":1,"max_tokens_to_sample":1}"#, 1024),
            (chat, r#"{"max_output_tokens":9000,"max_tokens":1}"#, 9000),
            ("/v1/responses", r#"{"max_output_tokens":1}"#, 1),
            ("/v1/responses", r#"{"max_tokens":1,"max_completion_tokens":1}"#, 1024),
            ("/v2/chat", r#"{"max_tokens":1}"#, 1),
            ("/v1/complete", r#"{"max_tokens_to_sample":1}"#, 1),
            ("/v1/complete", r#"{"max_tokens":1}"#, 1024),
            ("/v1/messages", r#"{"max_tokens_to_sample":1,"max_output_tokens":1}"#, 1024),
            ("/model/m/invoke", r#"{"max_gen_len":1}"#, 1),
            ("/model/m/invoke", r#"{"max_tokens":1,"textGenerationConfig":{"maxTokenCount":9000}}"#, 9000),
            // Any key at the root of an unknown operation could be one that the server ignores.
            ("/generate", r#"{"max_tokens":1}"#, 1024),
            ("/generate", r#"{"max_tokens":1,"parameters":{"max_new_tokens":9000}}"#, 9000),
            ("/v1/conversations", r#"{"completion_args":{"max_tokens":9000}}"#, 9000),
            ("/m:predict", r#"{"parameters":{"maxOutputTokens":9000}}"#, 9000),
        ] {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!(ESTIMATE.output(&info, Operation::of(path)), expected, "{path} {body}");
        }
    }

    #[test]
    fn model_and_stream_are_found() {
        let info = inspect(br#"{"model":"m\u00e9","stream":true,"stream_options":{"include_usage":true}}"#).unwrap();
        assert_eq!((info.model.as_deref(), info.is_stream, info.includes_usage), (Some("mé"), true, true));
        for body in
            [r#"{"stream_options":{}}"#, r#"{"stream_options":null}"#, r#"{"stream_options":{"include_usage":null}}"#]
        {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!(
                (info.model, info.is_stream, info.includes_usage, info.is_background),
                (None, false, false, false)
            );
        }
        assert!(inspect(br#"{"background":true}"#).unwrap().is_background);
        for (path, expected) in [
            ("/v1beta/models/gemini-3-pro:streamGenerateContent", Some("gemini-3-pro")),
            ("/v1beta/models/gemini%E9:streamGenerateContent", Some("gemini\u{fffd}")),
            ("/openai/deployments/my-gpt/chat/completions", Some("my-gpt")),
            ("/openai/Deployments/my-gpt/chat/completions", Some("my-gpt")),
            ("/v1beta/tunedModels/mine:generateContent", Some("mine")),
            ("/model/anthropic.claude-opus-4-v1%3A0/converse", Some("anthropic.claude-opus-4-v1:0")),
            ("/model/anthropic.claude-opus-4-v1:0/converse-stream", Some("anthropic.claude-opus-4-v1:0")),
            ("/model/m", None),
            ("/models/v1/chat/completions", None),
            ("/v1/chat/completions", None),
            ("/v1/models", None),
            ("/v1/models/m", None),
            ("/models/:x", None),
        ] {
            assert_eq!(model_in_path(path).as_deref(), expected, "{path}");
            let renamed = with_model_in_path(path, "a/b:c-1.0");
            let renamed = renamed.as_deref().filter(|_| expected.is_some());
            assert_eq!(renamed.and_then(model_in_path).as_deref(), expected.map(|_| "a/b:c-1.0"), "{path}");
        }
    }

    #[test]
    fn usage_option_replaces_what_the_client_sent() {
        for (body, expected) in [
            (r#" {"stream":true}"#, r#" {"stream_options":{"include_usage":true},"stream":true}"#),
            (r#"{"stream_options" : null , "n":1}"#, r#"{"stream_options" : {"include_usage":true} , "n":1}"#),
            (r#"{"a":"}\"{","stream_options":{}}"#, r#"{"a":"}\"{","stream_options":{"include_usage":true}}"#),
            (
                r#"{"a":[{"stream_options":1},{}],"stream_options":{"b":[1,"]"], "include_usage":false}}"#,
                r#"{"a":[{"stream_options":1},{}],"stream_options":{"b":[1,"]"], "include_usage":true}}"#,
            ),
            (
                r#"{"stream\u005foptions":{"b":1},"n":1e3}"#,
                r#"{"stream\u005foptions":{"include_usage":true,"b":1},"n":1e3}"#,
            ),
        ] {
            assert_eq!(String::from_utf8(with_usage_option(body.as_bytes())).unwrap(), expected);
            assert!(inspect(expected.as_bytes()).unwrap().includes_usage);
        }
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
            assert_eq!((info.media.images, info.media.audio), (images, audio), "{body}");
            assert!(info.text_bytes < 200, "{} {body}", info.text_bytes);
            assert_eq!(
                ESTIMATE.input(&info, Provider::OpenAi, &std::iter::empty()),
                info.text_bytes.div_ceil(4) + images * 1000 + audio * 500
            );
        }
        let text = "Text is text, also in a field for data. ".repeat(50);
        for body in [
            format!(r#"{{"messages":[{{"content":"x","images":["{text}"]}}]}}"#),
            format!(r#"{{"contents":[{{"parts":[{{"inlineData":{{"mimeType":"image/png","data":"{text}"}}}}]}}]}}"#),
            format!(r#"{{"contents":[{{"parts":[{{"inlineData":{{"mimeType":"text/plain","data":"{data}"}}}}]}}]}}"#),
            format!(r#"{{"messages":[{{"content":"data: {text}"}}]}}"#),
            format!(r#"{{"messages":[{{"content":"data:image/png;base64,{data}"}}]}}"#),
            format!(r#"{{"messages":[{{"content":[{{"image_url":{{"url":"data:image/png,{text}"}}}}]}}]}}"#),
            format!(r#"{{"tools":[{{"parameters":{{"default":{{"mimeType":"image/png","data":"{data}"}}}}}}]}}"#),
            format!(
                r#"{{"tools":[{{"images":["{data}"]}}],"metadata":{{"image_url":"data:image/png;base64,{data}"}}}}"#
            ),
            format!(r#"{{"messages":[{{"content":[{{"input":{{"mimeType":"image/png","data":"{data}"}}}}]}}]}}"#),
        ] {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!(info.text_bytes, body.len() as u64, "{body}");
        }
    }

    #[test]
    fn documents_are_counted_by_their_length_and_not_as_text() {
        let data = "QUJD".repeat(50_000);
        for body in [
            format!(
                r#"{{"messages":[{{"content":[{{"type":"file","file":{{"filename":"a.pdf","file_data":"data:application/pdf;base64,{data}"}}}}]}}]}}"#
            ),
            format!(
                r#"{{"input":[{{"content":[{{"type":"input_file","file_data":"data:application/pdf;base64,{data}"}}]}}]}}"#
            ),
            format!(
                r#"{{"messages":[{{"content":[{{"type":"document","source":{{"type":"base64","media_type":"application/pdf","data":"{data}"}}}}]}}]}}"#
            ),
            format!(r#"{{"contents":[{{"parts":[{{"inline_data":{{"mime_type":"video/mp4","data":"{data}"}}}}]}}]}}"#),
            format!(
                r#"{{"messages":[{{"content":[{{"document":{{"format":"pdf","name":"a","source":{{"bytes":"{data}"}}}}}}]}}]}}"#
            ),
        ] {
            let info = inspect(body.as_bytes()).unwrap();
            assert_eq!(info.media, Media { document_parts: 3, ..Media::default() }, "150,000 bytes: {}", &body[..150]);
            let input = ESTIMATE.input(&info, Provider::OpenAi, &std::iter::empty());
            assert!((9000..9060).contains(&input), "{input} {}", &body[..150]);
        }
        let image =
            format!(r#"{{"messages":[{{"content":[{{"image":{{"format":"png","source":{{"bytes":"{data}"}}}}}}]}}]}}"#);
        assert_eq!(inspect(image.as_bytes()).unwrap().media, Media { images: 1, ..Media::default() });
    }

    #[test]
    fn estimate_saturates() {
        let bounds = OutputBounds { root: Some(2), ..OutputBounds::default() };
        let media = Media { images: u64::MAX, ..Media::default() };
        let info = RequestInfo { media, choices: u64::MAX, bounds, ..RequestInfo::default() };
        assert_eq!(
            (ESTIMATE.input(&info, Provider::OpenAi, &std::iter::empty()), ESTIMATE.output(&info, None)),
            (u64::MAX, u64::MAX)
        );
        assert_eq!(ESTIMATE.output(&RequestInfo { choices: 2, ..RequestInfo::default() }, None), 2048);
    }

    /// A maximum at a position that the API does not use never lowers the reservation.
    #[test]
    fn each_api_has_its_position_and_an_unknown_api_reserves_the_largest_reading() {
        let one = Some(1);
        let all = OutputBounds {
            root: one,
            max_tokens: one,
            max_output_tokens: one,
            max_tokens_to_sample: one,
            generation_config: one,
            options: one,
            inference_config: one,
            parameters: one,
            fallback: None,
        };
        let large = Some(9000);
        let (chat, messages) = ("/v1/chat/completions", "/v1/messages");
        let (gemini, ollama, bedrock) = ("/models/m:generateContent", "/api/chat", "/model/m/converse");
        for (path, bounds) in [
            (chat, OutputBounds { root: large, ..all }),
            (chat, OutputBounds { generation_config: large, ..all }),
            (chat, OutputBounds { options: large, ..all }),
            (chat, OutputBounds { inference_config: large, ..all }),
            (chat, OutputBounds { parameters: large, ..all }),
            (chat, OutputBounds { max_tokens: None, ..all }),
            ("/v1/responses", OutputBounds { max_output_tokens: None, ..all }),
            (messages, OutputBounds { max_tokens: large, ..all }),
            (messages, OutputBounds { max_tokens: None, ..all }),
            ("/v1/complete", OutputBounds { max_tokens_to_sample: None, ..all }),
            (gemini, OutputBounds { generation_config: large, ..all }),
            (gemini, OutputBounds { generation_config: None, ..all }),
            (ollama, OutputBounds { options: large, ..all }),
            (ollama, OutputBounds { options: None, ..all }),
            (bedrock, OutputBounds { inference_config: large, ..all }),
            (bedrock, OutputBounds { inference_config: None, ..all }),
            ("/model/m/invoke", OutputBounds { root: None, ..all }),
            ("/unknown", all),
        ] {
            assert_eq!(bounds.of(Operation::of(path), 9000), 9000, "{path} {bounds:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = inspect(&bytes);
        }

        /// The maximum number of output tokens is found regardless of the other keys in the body.
        #[test]
        fn bound_is_found_among_other_keys(bound in any::<u32>(), text in "\\PC{0,40}", position in 0..3usize) {
            let mut entries = vec![format!("\"messages\":[{}]", serde_json::to_string(&text).unwrap()), "\"a\":{\"b\":[1]}".to_owned()];
            entries.insert(position.min(2), format!("\"max_tokens\":{bound}"));
            let body = format!("{{{}}}", entries.join(","));
            prop_assert_eq!(inspect(body.as_bytes()).unwrap().bounds.root, Some(u64::from(bound)).filter(|bound| *bound > 0));
        }

        /// The changed body is equal to the document that results if serde_json parses the body and makes the same
        /// change.
        #[test]
        fn usage_option_changes_nothing_else(
            keys in proptest::collection::vec("stream_options|[a-c\"\\\\{}]{1,3}", 1..5),
            value in "true|null|[0-9]|\\[1, \\{\\}\\]|\\{\"include_usage\":false,\"a\":\\[\\]\\}|\"[a-c{,]{0,3}\"",
        ) {
            let value: serde_json::Value = serde_json::from_str(&value).unwrap();
            let members = keys.iter().map(|key| (key.clone(), value.clone()));
            let mut expected: serde_json::Map<_, _> = members.collect();
            let body = serde_json::to_vec_pretty(&expected).unwrap();
            let option = ("include_usage".to_owned(), true.into());
            match expected.get_mut("stream_options") {
                Some(serde_json::Value::Object(options)) => drop(options.insert(option.0, option.1)),
                _ => drop(expected.insert("stream_options".to_owned(), serde_json::Map::from_iter([option]).into())),
            }
            let changed: serde_json::Value = serde_json::from_slice(&with_usage_option(&body)).unwrap();
            prop_assert_eq!(changed, serde_json::Value::Object(expected));
        }
    }
}
