//! Bodies that take the parsers more time than ordinary bodies of the same length, for tests and benchmarks.

use std::sync::Arc;

use sluicegate::payload::json::body::{Collector, JsonPointer, JsonPointers, MAX_POINTERS, read};
use sluicegate::payload::llm::request::inspect_with;
use sluicegate::payload::llm::response::{PriceFacts, ResponseMeter, UsageFormat};

/// A body, and its name for messages.
pub struct NamedBody {
    pub name: &'static str,
    pub bytes: Vec<u8>,
}

/// Return the start, then as many repetitions of a unit as fit into `length` bytes, then the end. Remove the comma after
/// the last unit.
fn filled(length: usize, start: &str, unit: &str, end: &str) -> Vec<u8> {
    let units = unit.repeat((length - start.len() - end.len()) / unit.len());
    format!("{start}{}{end}", units.strip_suffix(',').unwrap_or(&units)).into_bytes()
}

/// Return an ordinary JSON body of about this length: many small objects.
pub fn ordinary_body(length: usize) -> NamedBody {
    let unit = r#"{"id":12345,"name":"some name","price":12.5,"tags":["a","b"]},"#;
    NamedBody { name: "ordinary objects", bytes: filled(length, "[", unit, "]") }
}

/// Return bodies of about this length in which aliases of models (`fast`) are replaced: an ordinary one, and hostile ones.
pub fn bodies_with_models(length: usize) -> Vec<NamedBody> {
    let deep = format!(r#"{{"x":{}0{}}},"#, "[".repeat(120), "]".repeat(120));
    [
        ("a chat", r#"{"model":"fast","messages":["#, r#"{"role":"user","content":"some words of a chat"},"#, "]}"),
        ("short values before the model", r#"{"a":["#, "0,", r#"],"model":"fast"}"#),
        ("deep values before the model", r#"{"a":["#, &*deep, r#"],"model":"fast"}"#),
        ("many names, of which none is an alias", r#"{"models":["#, r#""a","#, "]}"),
        ("many aliases", r#"{"models":["#, r#""fast","#, "]}"),
        ("names with escape sequences", r#"{"models":["#, r#""\u0066","#, "]}"),
        ("a name of many models", r#"{"model":""#, "a,", r#""}"#),
        ("a batch of requests", r#"{"requests":["#, r#"{"params":{"model":"a"}},"#, "]}"),
    ]
    .map(|(name, start, unit, end)| NamedBody { name, bytes: filled(length, start, unit, end) })
    .into()
}

/// Return hostile JSON bodies of about this length.
pub fn json_bodies(length: usize) -> Vec<NamedBody> {
    let chat = r#"{"model":"m","messages":["#;
    let prompt = r#"{"prompt":["#;
    let deep = |open: &str, close: &str| format!("{}0{},", open.repeat(120), close.repeat(120));
    let (arrays, objects) = (deep("[", "]"), deep(r#"{"a":"#, "}"));
    let base64 = format!(r#"{{"data":"{}"}},"#, "A".repeat(64));
    [
        ("keys that are not ASCII", "{", r#""é":0,"#, "}"),
        ("keys that are similar up to the last character", "{", r#""ſtreaK":0,"#, "}"),
        ("keys that differ in the case of a character", "{", r#""ſtream":0,"#, "}"),
        ("keys of characters that are folded", "{", r#""ſſſſſſſſſ":0,"#, "}"),
        ("keys of ligatures", "{", r#""ﬃﬃﬃﬃ":0,"#, "}"),
        ("keys with escape sequences", "{", r#""\u0061":0,"#, "}"),
        ("known keys with escape sequences", "{", r#""\u006d\u006f\u0064\u0065\u006c":0,"#, "}"),
        ("short keys", "{", r#""a":0,"#, "}"),
        ("empty keys", "{", r#""":0,"#, "}"),
        ("duplicate keys", "{", r#""model":0,"#, "}"),
        ("keys in another case", "{", r#""MODEL":0,"#, "}"),
        ("keys of ignored characters", "{", r#""______":0,"#, "}"),
        ("keys with the hash of a pointer", "{", r#""pointer0x":0,"#, "}"),
        ("array of which elements are read", r#"{"list":["#, "0,", "]}"),
        ("objects with a known key", "[", r#"{"model":0},"#, "]"),
        ("empty messages of a chat", chat, "{},", "]}"),
        ("messages with short keys", chat, r#"{"a":0},"#, "]}"),
        ("media types with escape sequences", r#"{"messages":[{"#, r#""media_type":"\n","#, "}]}"),
        ("short numbers", "[", "0,", "]"),
        ("prompt of numbers", prompt, "0,", "]}"),
        ("fractions", "[", "1.5e-7,", "]"),
        ("numbers with many digits", "[", "1234567890123456789012345678901234567890,", "]"),
        ("number of a million digits", "0.", "1", ""),
        ("empty objects", "[", "{},", "]"),
        ("empty arrays", "[", "[],", "]"),
        ("empty strings", "[", r#""","#, "]"),
        ("literals", "[", "true,", "]"),
        ("short strings with escape sequences", "[", r#""\n","#, "]"),
        ("prompt of strings with escape sequences", prompt, r#""\n","#, "]}"),
        ("nested arrays", "[", &*arrays, "]"),
        ("nested objects", "[", &*objects, "]"),
        ("string of escape sequences", r#"{"a":""#, r"\n", r#""}"#),
        ("string of hexadecimal escape sequences", r#"{"a":""#, r"\u00e9", r#""}"#),
        ("long key", r#"{""#, "é", r#"":0}"#),
        ("long key of escape sequences", r#"{""#, r"\u017f", r#"":0}"#),
        ("white space", "[", " ", "]"),
        ("batch of messages", "[", r#"{"method":"m","id":1},"#, "]"),
        ("batch of empty messages", "[", "{},", "]"),
        ("message with ambiguous members", r#"{"params":{"#, r#""Name":1,"#, "}}"),
        ("image", r#"{"messages":[{"data":""#, "A", r#""}]}"#),
        ("small images", chat, &*base64, "]}"),
    ]
    .into_iter()
    .map(|(name, start, unit, end)| NamedBody { name, bytes: filled(length, start, unit, end) })
    .collect()
}

/// Return an ordinary stream of server-sent events of about this length.
pub fn ordinary_stream(length: usize) -> NamedBody {
    let unit = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"}}],\"usage\":null}\n\n";
    NamedBody { name: "ordinary events", bytes: filled(length, "", unit, "") }
}

/// Return hostile streams of server-sent events of about this length.
pub fn streams(length: usize) -> Vec<NamedBody> {
    [
        ("empty lines", "", "\n", ""),
        ("empty lines of CR", "", "\r", ""),
        ("lines without data", "", "data:\n", ""),
        ("short events", "", "data:{}\n\n", ""),
        ("comments", "", ":\n", ""),
        ("one line", "data: ", "x", "\n\n"),
        ("event of many lines", "data: [", "\ndata:0,", "\n\n"),
        ("event of many usage objects", "data: {", r#""usage":{"prompt_tokens":1},"#, "}\n\n"),
        ("event with a long array", "data: {\"response\":[", "0,", "]}\n\n"),
        ("event of escape sequences", "data: {\"content\":\"", r"\n", "\"}\n\n"),
    ]
    .into_iter()
    .map(|(name, start, unit, end)| NamedBody { name, bytes: filled(length, start, unit, end) })
    .collect()
}

/// The parsers of request bodies, in the configurations of a gateway with one pointer, and with as many pointers as
/// possible.
pub struct Parsers {
    one: Arc<JsonPointers>,
    most: Arc<JsonPointers>,
}

impl Parsers {
    pub fn new() -> Self {
        let pointers = |texts: Vec<String>| {
            Arc::new(JsonPointers::new(texts.iter().map(|text| JsonPointer::parse(text).expect("a pointer")).collect()))
        };
        let most = (0..MAX_POINTERS).map(|index| match index % 4 {
            0 => format!("/list/{index}"),
            1 => format!("/stream/{index}"),
            _ => format!("/pointer{index}"),
        });
        Parsers { one: pointers(vec!["/model".to_owned()]), most: pointers(most.collect()) }
    }

    /// Parse a body with each parser, and pass the name of the parser and a function that parses the body to `each`.
    pub fn each(&self, body: &[u8], mut each: impl FnMut(&'static str, &dyn Fn())) {
        each("a pointer", &|| drop(read(body, &self.one, false)));
        each("64 pointers", &|| drop(read(body, &self.most, false)));
        each("JSON-RPC", &|| drop(read(body, &Arc::default(), true)));
        each("LLM", &|| drop(inspect_with(body, Collector::new(&self.one, false))));
        each("all", &|| drop(inspect_with(body, Collector::new(&self.most, true))));
    }
}

/// Measure the usage in a stream of server-sent events that arrives in chunks of 8 KiB.
pub fn measure_stream(stream: &[u8]) {
    let mut meter =
        ResponseMeter::new("text/event-stream", UsageFormat::Auto, 4, PriceFacts::Read).expect("an event stream");
    stream.chunks(8 << 10).for_each(|chunk| meter.feed(chunk));
}
