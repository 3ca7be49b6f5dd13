//! Measures the token usage of an LLM response while the gateway forwards it. If the provider does not report the
//! usage, the meter estimates the usage from the length of the generated text.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use memchr::{memchr2, memmem};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::payload::llm::event_frames::{EventFrames, FramePart};
use crate::payload::llm::json_scanner::{JsonPath, JsonScanner, JsonSink};
use crate::payload::llm::request::MAX_MODEL;
use crate::payload::llm::usage::{ServiceTier, TokenUsage, parse_count, parse_usage};

/// The place in a response where the provider reports the usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageFormat {
    /// The usage is an object in the format of any supported provider.
    Auto,
    /// The usage is at paths that the configuration sets.
    Paths {
        /// Paths of the token counts.
        paths: Arc<[JsonPath]>,
        /// The kind of count at each of the paths.
        counts: Box<[CountKind]>,
    },
}

/// The kind of tokens that a count contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountKind {
    /// Input tokens, including cached input tokens.
    Input,
    /// Cached input tokens.
    CachedInput,
    /// Output tokens.
    Output,
}

/// Paths of usage objects for [`UsageFormat::Auto`]. In the list of all paths, the path `type`, the paths of the Ollama
/// counts, [`MODEL_PATHS`] and [`TIER_PATHS`] follow these paths.
const USAGE_PATHS: [&[&str]; 9] = [
    &["usage"],
    &["response", "usage"],
    &["message", "usage"],
    &["delta", "usage"],
    &["usageMetadata"],
    &["meta"],
    &["response", "meta"],
    &["x_groq", "usage"],
    &["amazon-bedrock-invocationMetrics"],
];

/// Paths of the model that has generated the response.
const MODEL_PATHS: [&[&str]; 4] = [&["model"], &["response", "model"], &["message", "model"], &["modelVersion"]];

/// Paths of the service tier outside the usage object (OpenAI, Bedrock Converse).
const TIER_PATHS: [&[&str]; 4] =
    [&["service_tier"], &["response", "service_tier"], &["serviceTier", "type"], &["performanceConfig", "latency"]];

const TYPE: usize = USAGE_PATHS.len();
const PROMPT_EVAL_COUNT: usize = TYPE + 1;
const EVAL_COUNT: usize = TYPE + 2;
const FIRST_MODEL: usize = TYPE + 3;
const FIRST_TIER: usize = FIRST_MODEL + MODEL_PATHS.len();

fn auto_paths(others: &[&[&str]]) -> Arc<[JsonPath]> {
    let counts: [&[&str]; 3] = [&["type"], &["prompt_eval_count"], &["eval_count"]];
    let to_path = |path: &&[&str]| path.iter().map(|segment| Box::from(*segment)).collect();
    USAGE_PATHS.iter().chain(&counts).chain(others).map(to_path).collect()
}

static AUTO_PATHS: LazyLock<Arc<[JsonPath]>> = LazyLock::new(|| auto_paths(&[]));
static PRICED_PATHS: LazyLock<Arc<[JsonPath]>> = LazyLock::new(|| auto_paths(&[MODEL_PATHS, TIER_PATHS].concat()));

/// Whether a meter reads the model and the service tier of the response. They occur in each event of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriceFacts {
    /// The cost may depend on them.
    Read,
    /// The cost does not depend on them.
    Ignored,
}

/// The usage of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredUsage {
    /// The numbers of used tokens.
    pub usage: TokenUsage,
    /// Whether a token count was estimated because the provider did not report the count.
    pub is_estimated: bool,
}

/// The form of a response, which determines how its documents are delimited.
#[derive(Debug)]
enum Framing {
    /// Server-sent events.
    Events(EventLines),
    /// Messages of an event stream of AWS, as Bedrock sends it.
    Frames(Box<EventFrames>),
    /// JSON documents.
    Documents,
}

/// Measures a response that arrives in chunks. A chunk may end at any byte. The meter needs only a bounded amount of
/// memory.
#[derive(Debug)]
pub struct ResponseMeter {
    framing: Framing,
    scanner: JsonScanner,
    tally: Tally,
}

/// The token usage that was found in the response so far.
#[derive(Debug)]
struct Tally {
    format: UsageFormat,
    bytes_per_token: u64,
    reported: Option<TokenUsage>,
    /// Estimated number of output tokens since the last report of output tokens.
    unreported_output: u64,
    /// Number of documents with generated text (deltas).
    deltas: u64,
    /// Whether the response has a usage object that has no known count.
    has_unknown_usage: bool,
    /// The model that has generated the response.
    model: Option<Box<str>>,
    /// The service tier, if the usage object does not contain it.
    tier: Option<ServiceTier>,
    /// Whether a checksum in the response is wrong, so its counts are not reliable.
    is_corrupt: bool,
    document: Document,
}

/// The values that were found in the current document.
#[derive(Debug, Default)]
struct Document {
    text_bytes: u64,
    usage: Option<TokenUsage>,
    /// Whether the document repeats the text of earlier events, as the event `response.completed` of OpenAI Responses
    /// does.
    repeats_text: bool,
}

impl ResponseMeter {
    /// Create the meter of a response with this media type. Return `None` if the media type is not JSON or an event
    /// stream. The output of a delta is estimated as one token per `bytes_per_token` bytes, but at least one token.
    pub fn new(media_type: &str, format: UsageFormat, bytes_per_token: u64, facts: PriceFacts) -> Option<Self> {
        let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let framing = match &*essence {
            "text/event-stream" => Framing::Events(EventLines::default()),
            "application/vnd.amazon.eventstream" => Framing::Frames(Box::new(EventFrames::new())),
            "application/json"
            | "application/x-ndjson"
            | "application/ndjson"
            | "application/jsonl"
            | "application/stream+json"
            | "application/json-seq" => Framing::Documents,
            other if other.ends_with("+json") => Framing::Documents,
            _ => return None,
        };
        let paths = match &format {
            UsageFormat::Auto if facts == PriceFacts::Read => PRICED_PATHS.clone(),
            UsageFormat::Auto => AUTO_PATHS.clone(),
            UsageFormat::Paths { paths, .. } => paths.clone(),
        };
        let tally = Tally {
            format,
            bytes_per_token: bytes_per_token.max(1),
            reported: None,
            unreported_output: 0,
            deltas: 0,
            has_unknown_usage: false,
            model: None,
            tier: None,
            is_corrupt: false,
            document: Document::default(),
        };
        Some(ResponseMeter { framing, scanner: JsonScanner::new(paths), tally })
    }

    /// Record the usage that the response headers report.
    pub fn report(&mut self, usage: TokenUsage) {
        self.tally.reported = Some(self.tally.reported.unwrap_or_default().max(usage));
    }

    /// Return the model that has generated the response, if the response names it.
    pub fn model(&self) -> Option<&str> {
        self.tally.model.as_deref()
    }

    /// Return whether the response is a stream of server-sent events.
    pub fn is_event_stream(&self) -> bool {
        matches!(self.framing, Framing::Events(_))
    }

    /// Measure a part of the response.
    pub fn feed(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let length = self.feed_event(data);
            data = &data[length..];
        }
    }

    /// Measure a part of the response up to the end of an event or document, or up to the end of `data`. Return the
    /// number of measured bytes.
    pub fn feed_event(&mut self, data: &[u8]) -> usize {
        let ResponseMeter { framing, scanner, tally } = self;
        match framing {
            Framing::Documents => scanner.scan(data, tally),
            Framing::Events(lines) => lines.read(data, |payload| match payload {
                EventPart::Data(text) => scan_all(scanner, tally, text),
                EventPart::End => end_event(scanner, tally),
            }),
            Framing::Frames(frames) => frames.read(data, |part| match part {
                FramePart::Payload(text) => scan_all(scanner, tally, text),
                FramePart::End => end_event(scanner, tally),
                FramePart::Corrupt => tally.is_corrupt = true,
            }),
        }
    }

    /// Return whether the response is an event stream whose last measured byte ended an event.
    pub fn is_between_events(&self) -> bool {
        match &self.framing {
            Framing::Events(lines) => lines.is_between_events(),
            Framing::Frames(_) | Framing::Documents => false,
        }
    }

    /// Return whether the response has a usage object whose counts are unknown, and no other report of its usage.
    pub fn has_unknown_usage(&self) -> bool {
        self.tally.has_unknown_usage && self.tally.reported.is_none()
    }

    /// Return whether the response is no event stream and has not reported its usage. A client may have requested only a
    /// part of the response, such as with the query parameter `fields` of Gemini.
    pub fn is_document_without_usage(&self) -> bool {
        matches!(self.framing, Framing::Documents) && self.tally.reported.is_none()
    }

    /// Return a lower bound of the number of output tokens so far: the reported number or the number of deltas,
    /// whichever is larger.
    pub fn min_output(&self) -> u64 {
        self.tally.reported.map_or(0, |reported| reported.output).max(self.tally.deltas)
    }

    /// Return the usage so far. `input` is the estimated number of input tokens that was reserved. Return `None` if
    /// nothing is known about the usage: the response contains neither usage nor generated text, or a usage object whose
    /// counts are unknown.
    pub fn usage(&self, input: u64) -> Option<MeasuredUsage> {
        let Tally { reported, unreported_output, deltas, has_unknown_usage, .. } = self.tally;
        if self.tally.is_corrupt || reported.is_none() && (deltas == 0 || has_unknown_usage) {
            return None;
        }
        // A complete document without generated text may report that it used no tokens. In a stream, such a report may
        // be preliminary.
        let is_zero = reported.map(|usage| TokenUsage { tier: None, ..usage }) == Some(TokenUsage::default());
        if is_zero && deltas == 0 && matches!(self.framing, Framing::Documents) {
            return Some(MeasuredUsage { usage: TokenUsage::default(), is_estimated: false });
        }
        let mut usage = reported.unwrap_or_default();
        // Use the estimate if the reported input is 0, because every request has input tokens.
        let has_input = usage.input > 0;
        if !has_input {
            usage.input = input;
        }
        usage.output += unreported_output;
        usage.tier = usage.tier.or(self.tally.tier);
        Some(MeasuredUsage { usage, is_estimated: !has_input || reported.is_none() || unreported_output > 0 })
    }
}

impl JsonSink for Tally {
    fn value(&mut self, path: usize, json: &[u8]) {
        let current = self.document.usage.unwrap_or_default();
        let usage = match &self.format {
            UsageFormat::Paths { counts, .. } => {
                let Some(count) = parse_count(json) else { return };
                match counts.get(path) {
                    Some(CountKind::Input) => TokenUsage { input: count, ..current },
                    Some(CountKind::CachedInput) => TokenUsage { cached_input: count, ..current },
                    Some(CountKind::Output) => TokenUsage { output: count, ..current },
                    None => return,
                }
            }
            UsageFormat::Auto => match path {
                TYPE => {
                    let is_delta = json.starts_with(b"\"response.") && !json.ends_with(b".delta\"");
                    self.document.repeats_text = is_delta;
                    return;
                }
                PROMPT_EVAL_COUNT | EVAL_COUNT => {
                    let Some(count) = parse_count(json) else { return };
                    match path {
                        EVAL_COUNT => TokenUsage { output: count, ..current },
                        _ => TokenUsage { input: count, ..current },
                    }
                }
                FIRST_TIER.. => {
                    let name = serde_json::from_slice::<Cow<'_, str>>(json);
                    self.tier = name.ok().and_then(|name| ServiceTier::reported(&name)).or(self.tier);
                    return;
                }
                FIRST_MODEL.. => {
                    if self.model.is_none() && json.len() <= MAX_MODEL + "\"\"".len() {
                        let name = serde_json::from_slice::<Cow<'_, str>>(json).ok();
                        self.model = name.filter(|name| !name.is_empty()).map(|name| name.as_ref().into());
                    }
                    return;
                }
                _ => {
                    let Some(usage) = parse_usage(json) else {
                        let is_usage = USAGE_PATHS[path].last().is_some_and(|name| name.starts_with("usage"));
                        self.has_unknown_usage |= is_usage && json.starts_with(b"{") && json != b"{}";
                        return;
                    };
                    current.max(usage)
                }
            },
        };
        self.document.usage = Some(usage);
    }

    fn text(&mut self, bytes: u64) {
        self.document.text_bytes = self.document.text_bytes.saturating_add(bytes);
    }

    fn document_end(&mut self) {
        let Document { text_bytes, usage, repeats_text } = std::mem::take(&mut self.document);
        if text_bytes > 0 && !repeats_text {
            self.deltas += 1;
            self.unreported_output += text_bytes.div_ceil(self.bytes_per_token);
        }
        let Some(usage) = usage else { return };
        let reported = self.reported.unwrap_or_default();
        // The report includes the output so far, so discard the estimate of this output. Keep the estimate if the
        // reported number is 0 or lower than in an earlier report.
        if usage.output > 0 && usage.output >= reported.output {
            self.unreported_output = 0;
        }
        self.reported = Some(reported.max(usage));
    }
}

fn scan_all(scanner: &mut JsonScanner, tally: &mut Tally, mut text: &[u8]) {
    while !text.is_empty() {
        let length = scanner.scan(text, tally);
        text = &text[length..];
    }
}

/// Discard the rest of a document that does not end with its event.
fn end_event(scanner: &mut JsonScanner, tally: &mut Tally) {
    scanner.reset();
    tally.document = Document::default();
}

/// Return whether an event is the additional event with the token usage, which OpenAI sends if the request sets
/// `stream_options.include_usage`.
pub fn is_usage_event(event: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<IgnoredAny>,
        usage: Option<IgnoredAny>,
    }
    // For speed, parse only events that contain `[]`. The usage event has `"choices": []`, but most other events have
    // choices.
    if memmem::find(event, b"[]").is_none() {
        return false;
    }
    let lines = event.split(|byte| matches!(byte, b'\n' | b'\r'));
    let data: Vec<_> = lines.filter_map(|line| line.strip_prefix(DATA_FIELD)).collect();
    let chunk = serde_json::from_slice::<Chunk>(&data.concat());
    chunk.is_ok_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

// === Server-sent events (WHATWG HTML §9.2.6) ===

enum EventPart<'d> {
    /// A part of the data of the current event.
    Data(&'d [u8]),
    /// The end of the event.
    End,
}

/// Finds the data of server-sent events.
#[derive(Debug, Default)]
struct EventLines {
    line: Line,
    /// Whether the last byte was CR. An LF that follows belongs to the same line end.
    is_after_cr: bool,
    /// Whether at least one line of the current event has been read.
    has_lines: bool,
}

/// Finds the ends of server-sent events in a stream that arrives in chunks.
#[derive(Debug, Default)]
pub struct EventSplitter(EventLines);

impl EventSplitter {
    /// Read up to the end of an event, or up to the end of `data`. Return the number of bytes that were read.
    pub fn read(&mut self, data: &[u8]) -> usize {
        self.0.read(data, |_| {})
    }

    /// Return whether the last byte ended an event.
    pub fn is_between_events(&self) -> bool {
        self.0.is_between_events()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// At the start of a line. The field is the number of bytes of `data:` that have been read.
    Field(usize),
    /// In the data, after its first byte. A space as the first byte is not part of the data.
    Data,
    /// At the start of the data, directly after `data:`.
    DataStart,
    /// In another field of the event, or in a comment.
    Other,
}

impl Default for Line {
    fn default() -> Self {
        Line::Field(0)
    }
}

const DATA_FIELD: &[u8] = b"data:";

impl EventLines {
    fn is_between_events(&self) -> bool {
        self.line == Line::Field(0) && !self.has_lines
    }

    /// Read lines up to the end of an event, or up to the end of `data`. Return the number of bytes that were read.
    fn read(&mut self, data: &[u8], mut on_part: impl FnMut(EventPart<'_>)) -> usize {
        let mut at = 0;
        while let Some(&byte) = data.get(at) {
            if std::mem::take(&mut self.is_after_cr) && byte == b'\n' {
                at += 1;
                continue;
            }
            let is_line_end = matches!(byte, b'\n' | b'\r');
            match self.line {
                Line::Field(0) if is_line_end => {
                    self.is_after_cr = byte == b'\r';
                    at += 1;
                    if std::mem::take(&mut self.has_lines) {
                        on_part(EventPart::End);
                        return at;
                    }
                    continue;
                }
                Line::Field(length) if DATA_FIELD.get(length) == Some(&byte) => {
                    self.has_lines = true;
                    self.line = if length + 1 == DATA_FIELD.len() { Line::DataStart } else { Line::Field(length + 1) };
                    at += 1;
                }
                Line::Field(_) => {
                    self.has_lines = true;
                    self.line = Line::Other;
                }
                Line::DataStart => {
                    self.line = Line::Data;
                    at += usize::from(byte == b' ');
                }
                Line::Data | Line::Other => {
                    let end = memchr2(b'\n', b'\r', &data[at..]).map(|offset| at + offset);
                    let line = &data[at..end.unwrap_or(data.len())];
                    if self.line == Line::Data {
                        on_part(EventPart::Data(line));
                    }
                    at += line.len();
                    if let Some(end) = end {
                        if self.line == Line::Data {
                            on_part(EventPart::Data(b"\n"));
                        }
                        self.line = Line::Field(0);
                        self.is_after_cr = data[end] == b'\r';
                        at += 1;
                    }
                }
            }
        }
        data.len()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::payload::llm::event_frames::tests::message;
    use proptest::prelude::*;

    const OPENAI: &str = concat!(
        "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"usage\":null}\n\n",
        ": comment\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hé\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"llo 中\\u4e2d\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":12,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
        "data: [DONE]\n\n",
    );

    const ANTHROPIC: &str = concat!(
        "event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"content\":[],",
        "\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\r\n\r\n",
        "event: content_block_start\r\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\r\n\r\n",
        "event: ping\r\ndata: {\"type\": \"ping\"}\r\n\r\n",
        "event: content_block_delta\r\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello\"}}\r\n\r\n",
        "event: message_delta\r\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":15}}\r\n\r\n",
        "event: message_stop\r\ndata: {\"type\":\"message_stop\"}\r\n\r\n",
    );

    const RESPONSES: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"usage\":null}}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\" there\"}\n\n",
        "event: response.output_text.done\ndata: {\"type\":\"response.output_text.done\",\"text\":\"Hi there\"}\n\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"content\":[{\"text\":\"Hi there\"}]}],",
        "\"usage\":{\"input_tokens\":37,\"input_tokens_details\":{\"cached_tokens\":0},\"output_tokens\":11}}}\n\n",
    );

    const GEMINI: &str = concat!(
        "[{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"Hello\"}]}}],\"usageMetadata\":{\"promptTokenCount\":4}}\r\n,\r\n",
        "{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\" world\"}]},\"finishReason\":\"STOP\"}],",
        "\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":7,\"thoughtsTokenCount\":3}}\r\n]",
    );

    const OLLAMA: &str = concat!(
        "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\"The\"},\"done\":false}\n",
        "{\"model\":\"m\",\"message\":{\"role\":\"assistant\",\"content\":\" sky\"},\"done\":false}\n",
        "{\"model\":\"m\",\"done\":true,\"prompt_eval_count\":26,\"eval_count\":290}\n",
    );

    const COHERE: &str = concat!(
        "event: content-delta\ndata: {\"type\":\"content-delta\",\"delta\":{\"message\":{\"content\":{\"text\":\"LLM\"}}}}\n\n",
        "event: message-end\ndata: {\"type\":\"message-end\",\"delta\":{\"finish_reason\":\"COMPLETE\",",
        "\"usage\":{\"billed_units\":{\"input_tokens\":3,\"output_tokens\":5},\"tokens\":{\"input_tokens\":209,\"output_tokens\":5}}}}\n\n",
    );

    /// Name, media type and content of a stream, and its numbers of input, cached input and output tokens.
    type Example = (&'static str, &'static str, &'static str, (u64, u64, u64));

    const STREAMS: [Example; 6] = [
        ("openai", "text/event-stream", OPENAI, (9, 4, 12)),
        ("anthropic", "text/event-stream; charset=utf-8", ANTHROPIC, (30, 5, 15)),
        ("responses", "text/event-stream", RESPONSES, (37, 0, 11)),
        ("gemini", "application/json", GEMINI, (4, 0, 10)),
        ("ollama", "application/x-ndjson", OLLAMA, (26, 0, 290)),
        ("cohere", "text/event-stream", COHERE, (3, 0, 5)),
    ];

    fn measure<'d>(media_type: &str, parts: impl IntoIterator<Item = &'d [u8]>) -> Option<MeasuredUsage> {
        let mut meter = ResponseMeter::new(media_type, UsageFormat::Auto, 4, PriceFacts::Ignored).unwrap();
        parts.into_iter().for_each(|part| meter.feed(part));
        let MeasuredUsage { usage, is_estimated } = meter.usage(100)?;
        measured((usage.input, usage.cached_input, usage.output), is_estimated)
    }

    fn measured((input, cached_input, output): (u64, u64, u64), is_estimated: bool) -> Option<MeasuredUsage> {
        Some(MeasuredUsage { usage: TokenUsage { input, cached_input, output, ..TokenUsage::default() }, is_estimated })
    }

    #[test]
    fn stream_of_each_provider_is_measured() {
        for (name, media_type, text, usage) in STREAMS {
            assert_eq!(measure(media_type, [text.as_bytes()]), measured(usage, false), "{name}");
            assert_eq!(measure(media_type, text.as_bytes().chunks(1)), measured(usage, false), "{name}, byte by byte");
        }
    }

    #[test]
    fn document_of_each_provider_is_measured() {
        for (name, text, usage) in [
            (
                "openai",
                r#"{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#,
                (9, 0, 1),
            ),
            (
                "responses",
                r#"{"object":"response","output":[],"usage":{"input_tokens":3,"output_tokens":2}}"#,
                (3, 0, 2),
            ),
            ("anthropic", r#"{"type":"message","content":[],"usage":{"input_tokens":3,"output_tokens":2}}"#, (3, 0, 2)),
            (
                "gemini",
                r#"{"candidates":[],"usageMetadata":{"promptTokenCount":3,"candidatesTokenCount":2}}"#,
                (3, 0, 2),
            ),
            ("ollama", r#"{"response":"x","done":true,"prompt_eval_count":3,"eval_count":2}"#, (3, 0, 2)),
            ("cohere 1", r#"{"text":"x","meta":{"billed_units":{"input_tokens":3,"output_tokens":2}}}"#, (3, 0, 2)),
            ("cohere 2", r#"{"message":{},"usage":{"billed_units":{"input_tokens":3,"output_tokens":2}}}"#, (3, 0, 2)),
            (
                "embeddings",
                r#"{"data":[{"embedding":[0.1,-2]}],"usage":{"prompt_tokens":8,"total_tokens":8}}"#,
                (8, 0, 0),
            ),
        ] {
            assert_eq!(measure("application/json", [text.as_bytes()]), measured(usage, false), "{name}");
        }
    }

    #[test]
    fn stream_without_usage_is_estimated_from_its_deltas() {
        let delta = |text: &str| format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
        let stream = delta("") + &delta("a") + &delta("four") + &delta("five5") + "data: [DONE]\n\n";
        assert_eq!(measure("text/event-stream", [stream.as_bytes()]), measured((100, 0, 4), true));
        let empty = delta("") + "data: [DONE]\n\n";
        assert_eq!(measure("text/event-stream", [empty.as_bytes()]), None, "no text and no usage");
        assert_eq!(measure("application/json", [&b"{\"error\":{\"message\":\"x\"}}"[..]]), None);
        assert!(ResponseMeter::new("image/png", UsageFormat::Auto, 4, PriceFacts::Ignored).is_none());
    }

    #[test]
    fn aborted_stream_costs_what_was_streamed() {
        let up_to = |text: &'static str, end: &str| &text.as_bytes()[..text.find(end).unwrap()];
        let openai = measure("text/event-stream", [up_to(OPENAI, "data: {\"choices\":[],")]);
        assert_eq!(openai, measured((100, 0, 4), true), "texts of 3 and 10 bytes: 1 and 3 tokens");
        let anthropic = measure("text/event-stream", [up_to(ANTHROPIC, "event: message_delta")]);
        assert_eq!(anthropic, measured((30, 5, 3), true), "1 reported token, and a text of 5 bytes: 2 tokens");
        let responses = measure("text/event-stream", [up_to(RESPONSES, "event: response.completed")]);
        assert_eq!(
            responses,
            measured((100, 0, 3), true),
            "`response.output_text.done` repeats text, which is not counted"
        );
        let gemini = measure("application/json", [up_to(GEMINI, ",\r\n")]);
        assert_eq!(gemini, measured((4, 0, 2), true));
    }

    #[test]
    fn repeated_reports_add_nothing_and_smaller_ones_change_nothing() {
        let report = |output: &str| {
            format!("data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{output}}}}}\n\n")
        };
        for (stream, expected) in [
            (report("12").repeat(20), (9, 0, 12)),
            (report("12") + &report("3"), (9, 0, 12)),
            (report("12") + &report("-3"), (9, 0, 12)),
            (report("12") + &report("99999999999999999999"), (9, 0, 12)),
            (report("12") + &report("\"13\""), (9, 0, 12)),
            (report("12") + &report("null"), (9, 0, 12)),
        ] {
            assert_eq!(measure("text/event-stream", [stream.as_bytes()]), measured(expected, false), "{stream}");
        }
        let invalid = report("-3");
        assert_eq!(measure("text/event-stream", [invalid.as_bytes()]), None);
    }

    #[test]
    fn event_stream_of_bedrock_is_measured_unless_it_is_corrupt() {
        let delta = message(r#"{"contentBlockIndex":0,"delta":{"text":"four"},"p":"abcdefghij"}"#);
        let usage = r#"{"metrics":{"latencyMs":9},"usage":{"inputTokens":11,"outputTokens":7,"totalTokens":18}}"#;
        let media_type = "application/vnd.amazon.eventstream";
        let stream = [delta.clone(), message(r#"{"stopReason":"end_turn"}"#), message(usage)].concat();
        assert_eq!(measure(media_type, [&stream[..]]), measured((11, 0, 7), false));
        assert_eq!(measure(media_type, stream.chunks(1)), measured((11, 0, 7), false), "byte by byte");
        let aborted = [delta.clone(), delta].concat();
        assert_eq!(measure(media_type, [&aborted[..]]), measured((100, 0, 2), true));
        let mut corrupt = stream;
        *corrupt.last_mut().unwrap() ^= 1;
        assert_eq!(measure(media_type, [&corrupt[..]]), None);
    }

    #[test]
    fn usage_event_has_usage_and_no_choices() {
        for (event, expected) in [
            ("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n", true),
            ("data: {\"id\":\"a\",\r\ndata: \"choices\": [], \"usage\":{}}\r\n\r\n", true),
            ("data: {\"choices\":[],\"usage\":null}\n\n", false),
            ("data: {\"choices\":[{\"index\":0,\"logprobs\":[]}],\"usage\":{}}\n\n", false),
            ("data: [DONE]\n\n", false),
            ("data: []\n\n", false),
            (": []\n\n", false),
        ] {
            assert_eq!(is_usage_event(event.as_bytes()), expected, "{event}");
        }
    }

    #[test]
    fn malformed_event_does_not_affect_the_next() {
        let good = "data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1}}\n\n";
        for bad in [
            "data: {]]\n\n",
            "data: {\"a\":\n\n",
            "data\n\n",
            "dat: x\n\n",
            "data: \"\n\n",
            "id: 1\nretry: 5\n\n",
            "\n\n\r\r",
        ] {
            let stream = bad.to_owned() + good;
            assert_eq!(measure("text/event-stream", [stream.as_bytes()]), measured((9, 0, 1), false), "{bad:?}");
        }
        let lines = "data: {\"usage\":\ndata: {\"prompt_tokens\":9,\r\ndata:\"completion_tokens\":1}}\r\r";
        assert_eq!(measure("text/event-stream", [lines.as_bytes()]), measured((9, 0, 1), false), "several data lines");
    }

    #[test]
    fn paths_of_the_configuration_replace_the_known_ones() {
        let path = |text: &str| text.split('/').skip(1).map(Into::into).collect::<JsonPath>();
        let format = UsageFormat::Paths {
            paths: [path("/billing/in"), path("/billing/out/0")].into_iter().collect(),
            counts: [CountKind::Input, CountKind::Output].into(),
        };
        let mut meter = ResponseMeter::new("application/json", format, 4, PriceFacts::Ignored).unwrap();
        meter.feed(br#"{"usage":{"prompt_tokens":1,"completion_tokens":1},"billing":{"in":5,"out":[7]}}"#);
        assert_eq!(meter.usage(100), measured((5, 0, 7), false));
    }

    proptest! {
        #[test]
        fn cuts_do_not_change_the_measure(
            stream in 0..STREAMS.len(),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..30),
            end in any::<prop::sample::Index>(),
        ) {
            let (_, media_type, text, _) = STREAMS[stream];
            let text = &text.as_bytes()[..end.index(text.len() + 1)];
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]);
            prop_assert_eq!(measure(media_type, parts), measure(media_type, [text]));
        }

        #[test]
        fn any_bytes_are_measured(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            measure("text/event-stream", [&bytes[..]]);
            measure("application/json", [&bytes[..]]);
        }
    }
}
